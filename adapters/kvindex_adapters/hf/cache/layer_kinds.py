"""Cache layers that keep more than rows: states of linear attention, keys of a trained indexer."""

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
    """A cache layer with linear attention beside full attention, whose tokens are in an index.

    states: number of states of the linear attention.
    """

    def __init__(self, make: LayerFactory, padding: Padding, states: int) -> None:
        IndexedLayer.__init__(self, make, padding)
        LinearAttentionLayer.__init__(self, number_of_states=states)

    @property
    def is_croppable(self) -> bool:
        """As the linear attention says."""
        return bool(super(IndexedLayer, self).is_croppable)

    def lazy_initialization(self, *args: Any, **kwargs: Any) -> None:
        """Initialize the linear attention, which passes its tensors by name."""
        if kwargs:
            LinearAttentionLayer.lazy_initialization(self, **kwargs)

    def reset(self) -> None:
        """Forget all tokens."""
        LinearAttentionLayer.reset(self)
        IndexedLayer.reset(self)

    def crop(self, tokens_to_remove: int) -> None:
        """Crop both parts; linear attention mostly cannot, and raises RuntimeError."""
        LinearAttentionLayer.crop(self, check_crop(tokens_to_remove))
        IndexedLayer.crop(self, tokens_to_remove)

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Row `b` of the batch becomes what row `beam_idx[b]` was."""
        IndexedLayer.reorder_cache(self, beam_idx)
        LinearAttentionLayer.reorder_cache(self, beam_idx)


class ChosenLayer(IndexedLayer):
    """A cache layer of a model whose trained indexer chooses the rows: the index keeps them.

    chooser: the layer of transformers, which keeps what the indexer compares, and no rows.
    """

    def __init__(self, make: LayerFactory, padding: Padding, chooser: Any) -> None:
        super().__init__(make, padding)
        self.chooser = chooser
        chooser.keys = chooser.values = torch.empty(0, 0)  # which transformers 5.17 crops

    def update_index(self, keys: Tensor) -> Tensor:
        """All keys of the indexer, with new ones (minimax_m3)."""
        everything: Tensor = self.chooser.update_index(keys)
        return everything

    def update_indexer(self, keys: Tensor) -> Tensor:
        """All keys of the indexer, with new ones (qwen4_exp)."""
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
        """As `IndexedLayer.checkpoint`; the indexer's keys grow into new tensors."""
        return super().checkpoint(), dict(vars(self.chooser))

    def rollback(self, checkpoint: Any) -> None:
        """Restore the state of `checkpoint`."""
        attention, chooser = checkpoint
        super().rollback(attention)
        vars(self.chooser).update(chooser)

    def crop(self, tokens_to_remove: int) -> None:
        """Forget the newest `-tokens_to_remove` tokens. Raises ValueError above 0."""
        if (removed := check_crop(tokens_to_remove)) and self.attention is not None:
            self.chooser.crop(removed)
        super().crop(removed)

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Row `b` of the batch becomes what row `beam_idx[b]` was."""
        super().reorder_cache(beam_idx)
        self.chooser.reorder_cache(beam_idx)


def indexed_layer(layer: Any, make: LayerFactory, padding: Padding) -> IndexedLayer:
    """The indexed layer that replaces a layer of transformers that `has_full_attention`."""
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
    """Ids int64 `[B, G, T, K]` of the rows that a model has chosen for `T` tokens.

    heads: `G`; before: tokens that came earlier; mask: bool `[B, 1, T, N]`, the rows, or those
    that may be among `rows`, positions `[B, T, K]` (DeepSeek-V3.2); or blocks: numbers of blocks
    `[B, G, T, K]`, -1 for none. Raises UnsupportedError for neither, and for blocks of sequences
    with padding, which an indexer chooses, too.
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
    else:  # as many as ever, even where fewer are to be seen
        ids = rows.long().masked_fill(~mask[:, 0].gather(-1, rows.long()), -1)
    return ids[:, None].expand(-1, heads, -1, -1)
