"""Cache layers that also store states of linear attention, or keys of a trained indexer."""

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
    """A cache layer with full attention through an index, and linear attention.

    Args:
        make: Makes the attention layer in the first step.
        padding: The padding of the current step.
        states: Number of states of the linear attention.
    """

    def __init__(self, make: LayerFactory, padding: Padding, states: int) -> None:
        IndexedLayer.__init__(self, make, padding)
        LinearAttentionLayer.__init__(self, number_of_states=states)

    @property
    def is_croppable(self) -> bool:
        """True if the linear attention can be cropped."""
        return bool(super(IndexedLayer, self).is_croppable)

    def lazy_initialization(self, *args: Any, **kwargs: Any) -> None:
        """Initialize the linear attention, whose calls pass keywords. Ignore calls without
        keywords."""
        if kwargs:
            LinearAttentionLayer.lazy_initialization(self, **kwargs)

    def reset(self) -> None:
        """Remove all tokens."""
        LinearAttentionLayer.reset(self)
        IndexedLayer.reset(self)

    def crop(self, tokens_to_remove: int) -> None:
        """Crop both parts. Most kinds of linear attention raise RuntimeError."""
        LinearAttentionLayer.crop(self, check_crop(tokens_to_remove))
        IndexedLayer.crop(self, tokens_to_remove)

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Replace each sequence `b` of the batch by sequence `beam_idx[b]`."""
        IndexedLayer.reorder_cache(self, beam_idx)
        LinearAttentionLayer.reorder_cache(self, beam_idx)


class ChosenLayer(IndexedLayer):
    """A cache layer of a model whose trained indexer chooses the rows; the index stores them.

    Args:
        make: Makes the attention layer in the first step.
        padding: The padding of the current step.
        chooser: The cache layer of transformers. It only stores the keys of the indexer.
    """

    def __init__(self, make: LayerFactory, padding: Padding, chooser: Any) -> None:
        super().__init__(make, padding)
        self.chooser = chooser
        chooser.keys = chooser.values = torch.empty(0, 0)  # transformers 5.17 crops these

    def update_index(self, keys: Tensor) -> Tensor:
        """Append keys of the indexer, and return all of them (minimax_m3)."""
        everything: Tensor = self.chooser.update_index(keys)
        return everything

    def update_indexer(self, keys: Tensor) -> Tensor:
        """Append keys of the indexer, and return all of them (qwen4_exp)."""
        everything: Tensor = self.chooser.update_indexer(keys)
        return everything

    @property
    def indexer_position_ids(self) -> Tensor | None:
        """Positions of the indexer's keys."""
        known: Tensor | None = self.chooser.indexer_position_ids
        return known

    @indexer_position_ids.setter
    def indexer_position_ids(self, positions: Tensor | None) -> None:
        self.chooser.indexer_position_ids = positions

    def checkpoint(self) -> Any:
        """Return the state of the layer. It refers to the indexer's tensors, which never change."""
        return super().checkpoint(), dict(vars(self.chooser))

    def rollback(self, checkpoint: Any) -> None:
        """Restore the state of `checkpoint`."""
        attention, chooser = checkpoint
        super().rollback(attention)
        vars(self.chooser).update(chooser)

    def crop(self, tokens_to_remove: int) -> None:
        """Remove the newest `-tokens_to_remove` tokens. Raises ValueError above 0."""
        if (removed := check_crop(tokens_to_remove)) and self.attention is not None:
            self.chooser.crop(removed)
        super().crop(removed)

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Replace each sequence `b` of the batch by sequence `beam_idx[b]`."""
        super().reorder_cache(beam_idx)
        self.chooser.reorder_cache(beam_idx)


def indexed_layer(layer: Any, make: LayerFactory, padding: Padding) -> IndexedLayer:
    """Make the indexed layer that replaces a layer of transformers with full attention."""
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
    """Convert the rows that a model's trained indexer has chosen to token ids.

    Args:
        module: The attention module.
        heads: Number of KV heads, `G`.
        before: Number of tokens before the `T` new ones.
        mask: Bool `[B, 1, T, N]`, True for the chosen rows. If `rows` are passed, True for those of
            the chosen rows that are visible.
        rows: Positions `[B, T, K]` of the chosen rows (DeepSeek-V3.2), or None.
        blocks: Numbers `[B, G, T, K]` of the chosen blocks, -1 for none; or None.

    Returns:
        Token ids int64 `[B, G, T, K']`, -1 for none.

    Raises:
        UnsupportedError: The model has chosen neither rows nor blocks; or it has chosen blocks of
            padded sequences, where its indexer may choose padding.
    """
    if blocks is not None:
        if mask is not None:
            raise UnsupportedError(
                f"attention_mask: got padding of {type(module).__name__}, whose indexer chooses "
                "blocks of rows; allowed are sequences of one length"
            )
        size: int = module.indexer.block_size  # type: ignore[assignment, union-attr]
        ids = (blocks[..., None] * size + torch.arange(size, device=blocks.device)).flatten(3)
        own = torch.arange(before, before + ids.shape[2], device=ids.device)[:, None]
        return ids.masked_fill((ids > own) | (ids < 0), -1).long()
    if mask is None or mask.ndim != 4 or mask.shape[1] != 1 or mask.dtype != torch.bool:
        raise UnsupportedError(
            f"{type(module).__name__}: got a trained indexer without the rows or blocks that it "
            "has chosen, allowed are a bool mask [B, 1, T, N] or block_indices"
        )
    if rows is None:
        ids = compact(mask[:, 0])
    else:  # always K ids, even if fewer rows are visible
        ids = rows.long().masked_fill(~mask[:, 0].gather(-1, rows.long()), -1)
    return ids[:, None].expand(-1, heads, -1, -1)
