"""Cache layers with an index that also store linear-attention states, or keys of a trained
indexer."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from transformers.cache_utils import LinearAttentionAndFullAttentionLayer, LinearAttentionLayer

from kvindex.ops.select import compact
from kvindex_adapters.common.unsupported import UnsupportedError
from kvindex_adapters.hf.cache.layer import IndexedLayer, LayerFactory, check_crop
from kvindex_adapters.hf.cache.padding import Padding
from kvindex_adapters.hf.unsupported import has_indexer


class HybridLayer(IndexedLayer, LinearAttentionAndFullAttentionLayer):
    """A cache layer for a model layer that has both full attention (with an index) and linear
    attention.

    Args:
        make: Function that creates the `kvindex.AttentionLayer` when attention is first computed.
        padding: The padding of the current forward pass.
        states: Number of states of the linear attention.
    """

    def __init__(self, make: LayerFactory, padding: Padding, states: int) -> None:
        IndexedLayer.__init__(self, make, padding)
        LinearAttentionLayer.__init__(self, number_of_states=states)

    @property
    def is_croppable(self) -> bool:
        """True if the linear attention of the layer can remove tokens."""
        return bool(super(IndexedLayer, self).is_croppable)

    def lazy_initialization(self, *args: Any, **kwargs: Any) -> None:
        """Initialize the state of the linear attention.

        transformers also calls this method for the layer's full attention, but then without keyword
        arguments. Such a call has no effect.
        """
        if kwargs:
            LinearAttentionLayer.lazy_initialization(self, **kwargs)

    def reset(self) -> None:
        """Remove all tokens, and reset the linear attention."""
        LinearAttentionLayer.reset(self)
        IndexedLayer.reset(self)

    def crop(self, tokens_to_remove: int) -> None:
        """Remove the newest tokens from this cache layer.

        The tokens are removed from the cache of full attention and from the state of linear
        attention. Most kinds of linear attention do not support this and raise RuntimeError.
        """
        LinearAttentionLayer.crop(self, check_crop(tokens_to_remove))
        IndexedLayer.crop(self, tokens_to_remove)

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Replace each sequence `b` of the batch by sequence `beam_idx[b]`."""
        IndexedLayer.reorder_cache(self, beam_idx)
        LinearAttentionLayer.reorder_cache(self, beam_idx)


class ChosenLayer(IndexedLayer):
    """A cache layer for models with a trained indexer, such as DeepSeek-V3.2.

    The model's indexer chooses the tokens to attend to. The index only stores keys and values.

    Args:
        make: Function that creates the `kvindex.AttentionLayer` when attention is first computed.
        padding: The padding of the current forward pass.
        chooser: A cache layer of transformers, which stores only the keys of the indexer.
    """

    def __init__(self, make: LayerFactory, padding: Padding, chooser: Any) -> None:
        super().__init__(make, padding)
        self.chooser = chooser
        chooser.keys = chooser.values = torch.empty(0, 0)  # transformers 5.17 crops these tensors

    def update_index(self, keys: Tensor) -> Tensor:
        """Append keys of the model's indexer, and return all keys of the indexer.

        transformers' model class of minimax_m3 calls this method.
        """
        everything: Tensor = self.chooser.update_index(keys)
        return everything

    def update_indexer(self, keys: Tensor) -> Tensor:
        """Append keys of the model's indexer, and return all keys of the indexer.

        transformers' model class of qwen4_exp calls this method.
        """
        everything: Tensor = self.chooser.update_indexer(keys)
        return everything

    @property
    def indexer_position_ids(self) -> Tensor | None:
        """The positions of the keys that the model's indexer has stored, or None."""
        known: Tensor | None = self.chooser.indexer_position_ids
        return known

    @indexer_position_ids.setter
    def indexer_position_ids(self, positions: Tensor | None) -> None:
        self.chooser.indexer_position_ids = positions

    def checkpoint(self) -> Any:
        """Return a checkpoint for `rollback`. It shares the indexer's tensors, which are never
        overwritten."""
        return super().checkpoint(), dict(vars(self.chooser))

    def rollback(self, checkpoint: Any) -> None:
        """Return to the state that `checkpoint` recorded."""
        attention, chooser = checkpoint
        super().rollback(attention)
        vars(self.chooser).update(chooser)

    def crop(self, tokens_to_remove: int) -> None:
        """Remove the newest tokens. As in transformers, -3 removes 3 tokens.

        Raises ValueError for a positive number.
        """
        if (removed := check_crop(tokens_to_remove)) and self.attention is not None:
            self.chooser.crop(removed)
        super().crop(removed)

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Replace each sequence `b` of the batch by sequence `beam_idx[b]`."""
        super().reorder_cache(beam_idx)
        self.chooser.reorder_cache(beam_idx)


def indexed_layer(layer: Any, make: LayerFactory, padding: Padding) -> IndexedLayer:
    """Make the layer with an index that replaces a full-attention cache layer of transformers."""
    if has_indexer(layer):
        return ChosenLayer(make, padding, layer)
    if isinstance(layer, LinearAttentionAndFullAttentionLayer):
        return HybridLayer(make, padding, layer.number_of_states)
    return IndexedLayer(make, padding)


def chosen_ids(
    module: nn.Module,
    heads: int,
    before: int,
    mask: Tensor | None,
    rows: Tensor | None,
    blocks: Tensor | None,
) -> Tensor:
    """Convert the choice of a model's trained indexer to token positions.

    Args:
        module: The attention module.
        heads: Number of KV heads, `G`.
        before: Number of tokens before the `T` new tokens.
        mask: Bool `[B, 1, T, N]`. Without `rows`, True for chosen tokens. With `rows`, True for
            visible tokens.
        rows: Positions `[B, T, K]` of the chosen tokens (DeepSeek-V3.2), or None.
        blocks: Numbers `[B, G, T, K]` of the chosen blocks of tokens, -1 for an unused slot. None
            if the indexer does not choose blocks.

    Returns:
        Token positions int64 `[B, G, T, K']`, -1 for an unused slot.

    Raises:
        UnsupportedError: The attention call contains neither chosen tokens nor blocks. Or it
            contains blocks and sequences are padded, so that the indexer may have chosen padding.
    """
    if blocks is not None:
        if mask is not None:
            raise UnsupportedError(
                f"attention_mask: got padding in {type(module).__name__}, whose indexer chooses "
                "blocks of tokens; pass sequences of equal length"
            )
        size: int = module.indexer.block_size  # type: ignore[assignment, union-attr]
        ids = (blocks[..., None] * size + torch.arange(size, device=blocks.device)).flatten(3)
        own = torch.arange(before, before + ids.shape[2], device=ids.device)[:, None]
        return ids.masked_fill((ids > own) | (ids < 0), -1).long()
    if mask is None or mask.ndim != 4 or mask.shape[1] != 1 or mask.dtype != torch.bool:
        raise UnsupportedError(
            f"{type(module).__name__}: got an attention call without the tokens that the model's "
            "trained indexer has chosen; the call must pass them as a bool mask [B, 1, T, N] or as "
            "block_indices"
        )
    if rows is None:
        ids = compact(mask[:, 0])
    else:  # `rows` has K positions, even if fewer tokens are visible
        ids = rows.long().masked_fill(~mask[:, 0].gather(-1, rows.long()), -1)
    return ids[:, None].expand(-1, heads, -1, -1)
