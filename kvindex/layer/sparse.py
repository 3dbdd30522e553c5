"""Sparse attention of a prompt: each block of queries attends to chosen blocks of keys.

Queries and keys are divided into blocks of 128 tokens, at multiples of 128 in the sequence. A
selector (`kvindex.selectors`) chooses blocks of keys for each query head and block of queries. Only
whole blocks of queries are sparse. The first and the last block of a chunk attend to all tokens if
the chunk contains only a part of them, and so do the last tokens of the prompt. Therefore the size
of the chunks has no effect, as long as they begin and end at multiples of 128.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

import torch
from torch import Tensor

from kvindex.core import check
from kvindex.core.backend import prompt_kernels
from kvindex.core.protocol import UNUSED, Hits, KVIndex, Rows
from kvindex.core.restore import Restorable
from kvindex.layer.dense import GATHERED_BYTES, attend_densely
from kvindex.layer.sink import Sink
from kvindex.ops.block_sparse import BLOCK, attend_chosen_fast
from kvindex.selectors.pooled import PooledSelector
from kvindex.selectors.sampled import SampledSelector

SELECTORS: dict[str, type[PooledSelector] | type[SampledSelector]] = {
    "pooled": PooledSelector,
    "sampled": SampledSelector,
}
"""Name of each selector that a layer can use -> its class."""

PREFILL_DEFAULTS = {"prefill_mass": 0.95, "prefill_last": 128, "prefill_selector": "sampled"}
"""Names of the options of sparse attention, and their defaults."""

PIECE = 2**15
"""Number of tokens whose keys and values are fetched from the index at a time, to read only their
keys."""


def check_prefill(prefill: object, options: Mapping[str, object]) -> None:
    """Check how a prompt attends.

    Args:
        prefill: "dense" or "sparse".
        options: The options of `PREFILL_DEFAULTS`.

    Raises:
        ValueError: A value is not allowed, or an option differs from its default although full
            attention does not use it.
    """
    check.one_of("prefill", prefill, ("dense", "sparse"))
    check.within("prefill_mass", options["prefill_mass"], 0, 1)
    check.at_least("prefill_last", options["prefill_last"], 0)
    check.one_of("prefill_selector", options["prefill_selector"], SELECTORS)
    for name, value in options.items():
        if prefill == "dense" and value != PREFILL_DEFAULTS[name]:
            raise ValueError(
                f"{name}: got {value!r} together with prefill='dense', which does not use it; "
                f"pass prefill='sparse' as well, or leave out {name}"
            )


class PromptRows(Protocol):
    """The keys and values of the tokens that a chunk of a prompt attends to."""

    scale: float
    """Factor of the logits."""

    def keys(self, start: int, stop: int) -> Tensor:
        """Return the keys of the tokens from one position to another, `[B, G, n, D]`."""
        ...

    def attend_densely(self, queries: Tensor, stop: int) -> Tensor:
        """Attend causally with queries `[B, H, T, D]` of the last tokens before a position."""
        ...

    def attend_chosen(self, queries: Tensor, chosen: Tensor) -> Tensor:
        """Attend causally to the chosen blocks, bool `[B, H, QB, KB]`.

        The queries `[B, H, T, D]` belong to the last blocks.
        """
        ...


class SparsePrompt(Restorable):
    """Chooses the blocks of keys that a prompt attends to, and attends to them.

    Args:
        selector: Name of the selector, one of `SELECTORS`.
        mass: Fraction of the estimated attention weight that the chosen blocks have.
        last: Number of tokens at the end of a prompt that attend to all tokens.
    """

    def __init__(self, selector: str, mass: float, last: int) -> None:
        self.selector = SELECTORS[selector](mass)
        self.last = last
        self.end: int | None = None
        """Length of the sequence at the end of the prompt, or None if unknown. If it is unknown, or
        the prompt has ended, the last tokens of each chunk attend to all tokens."""
        self.used_from: int | None = None
        """Position of the first token that was read with sparse attention, or None."""
        self._means: Tensor | None = None  # of the first blocks of keys, float32 [B, G, m, D]
        self._read: Tensor | int = 0  # number of chosen blocks; a tensor on the device
        self._causal = 0  # number of blocks that dense attention would have read

    @property
    def fraction(self) -> float | None:
        """Fraction of the blocks of keys that was read, of those that dense attention reads.

        None before the first sparse block of queries.
        """
        return float(self._read) / self._causal if self._causal else None

    @property
    def nbytes(self) -> int:
        """Bytes of the mean keys."""
        return 0 if self._means is None else self._means.nbytes

    def attend(self, queries: Tensor, first: int, rows: PromptRows) -> Tensor:
        """Attend from a chunk of a prompt to the tokens before it and to itself.

        Args:
            queries: `[B, H, T, D]`.
            first: Position of the first query.
            rows: The keys and values of all tokens, those of the chunk included.

        Returns:
            Attention outputs `[B, H, T, Dv]`.
        """
        B, H, T, _ = queries.shape
        # an announced prompt may have ended before
        end = self.end if self.end is not None and self.end > first else first + T
        start = -(-first // BLOCK) * BLOCK
        stop = min(first + T, max(end - self.last, 0)) // BLOCK * BLOCK
        if start >= stop:
            return rows.attend_densely(queries, first + T)
        before, some, after = torch.split(
            queries, [start - first, stop - start, first + T - stop], dim=2
        )
        chosen = self.choose(some, start, rows)
        outputs = [rows.attend_chosen(some, chosen)]
        if start > first:
            outputs.insert(0, rows.attend_densely(before, start))
        if stop < first + T:
            outputs.append(rows.attend_densely(after, first + T))
        self.used_from = start if self.used_from is None else min(self.used_from, start)
        self._read = self._read + chosen.sum()
        self._causal += B * H * sum(range(start // BLOCK + 1, stop // BLOCK + 1))
        return outputs[0] if len(outputs) == 1 else torch.cat(outputs, 2)

    def choose(self, queries: Tensor, first: int, rows: PromptRows) -> Tensor:
        """Choose the blocks of keys that whole blocks of queries read.

        Args:
            queries: `[B, H, T, D]`.
            first: Position of the first query.
            rows: The keys and values of all tokens.

        Returns:
            Bool `[B, H, QB, KB]`.
        """
        kernels, selector, scale = prompt_kernels(queries.device), self.selector, rows.scale
        before = first + queries.shape[2] - BLOCK  # all keys before the block of the last query
        made: Tensor
        if isinstance(selector, SampledSelector):
            keys = rows.keys(0, before)
            if kernels is None:
                return selector.choose(queries, selector.summarize(keys), first, scale=scale)
            how = dict(scale=scale, mass=selector.mass, count=selector.queries)
            made = kernels.choose_sampled(queries, keys, first, **how)
            return made
        means = self._means_before(before, rows)
        if kernels is None:
            return selector.choose(queries, means, first, scale=scale)
        made = kernels.choose_pooled(queries, means, first, scale=scale, mass=selector.mass)
        return made

    def _means_before(self, position: int, rows: PromptRows) -> Tensor:
        """Return the mean keys of all blocks before a position, float32 `[B, G, m, D]`."""
        known, block = self._means, position // BLOCK
        have = 0 if known is None else known.shape[2]
        if known is None or have < block:
            keys = rows.keys(have * BLOCK, block * BLOCK)
            kernels = prompt_kernels(keys.device)
            new: Tensor = (self.selector.summarize if kernels is None else kernels.mean_keys)(keys)
            known = self._means = new if known is None else torch.cat([known, new], 2)
        return known[:, :, :block]

    def truncate(self, length: int) -> None:
        """Forget the blocks that contain tokens from position `length` on."""
        self.end = None
        if self.used_from is not None and length <= self.used_from:
            self.used_from = None
        if self._means is not None:
            self._means = self._means[:, :, : length // BLOCK]

    def reorder(self, batch_indices: Tensor) -> None:
        """Replace sequence `b` by sequence `batch_indices[b]`."""
        if self._means is not None:
            self._means = self._means[batch_indices.to(self._means.device)]

    def reset(self) -> None:
        """Forget all tokens."""
        self.end, self.used_from, self._means = None, None, None
        self._read, self._causal = 0, 0


class StoredRows:
    """The keys and values of a prompt, in tensors of the caller.

    Args:
        index: The layer's index.
        rows: Keys `[B, G, N, D]` and values `[B, G, N, Dv]`.
    """

    def __init__(self, index: KVIndex, rows: Rows) -> None:
        self.scale, self._index, self._rows = index.geometry.scale, index, rows

    def keys(self, start: int, stop: int) -> Tensor:
        """Return the keys of the tokens from one position to another, `[B, G, n, D]`."""
        return self._rows.keys[:, :, start:stop]

    def attend_densely(self, queries: Tensor, stop: int) -> Tensor:
        """Attend causally with queries `[B, H, T, D]` of the last tokens before a position."""
        return attend_densely(self._index, _until(self._rows, stop), queries, None, indexed=0)

    def attend_chosen(self, queries: Tensor, chosen: Tensor) -> Tensor:
        """Attend causally to the chosen blocks, bool `[B, H, QB, KB]`."""
        rows = _until(self._rows, chosen.shape[3] * BLOCK)
        return attend_to_blocks(queries, rows, chosen, self.scale)


class IndexedRows:
    """The keys and values of a prompt, of which the older ones must be fetched from the index.

    Args:
        index: The layer's index.
        window: Keys `[B, G, W, D]` and values `[B, G, W, Dv]` of the tokens that are not in the
            index.
        sink: The first tokens. Their exact keys and values replace those of the index.
    """

    def __init__(self, index: KVIndex, window: Rows, sink: Sink | None) -> None:
        self.scale, self._index = index.geometry.scale, index
        self._window, self._sink = window, sink

    def keys(self, start: int, stop: int) -> Tensor:
        """Return the keys of the tokens from one position to another, `[B, G, n, D]`.

        Keys and values of `PIECE` tokens are fetched at a time, and only the keys are kept.
        """
        indexed, keys = len(self._index), self._window.keys
        newer = keys[:, :, max(start - indexed, 0) : max(stop - indexed, 0)]
        if start >= indexed:
            return newer
        B, G, _, D = keys.shape
        found = keys.new_empty(B, G, stop - start, D)
        for first in range(start, min(stop, indexed), PIECE):
            ids = torch.arange(first, min(first + PIECE, stop, indexed), device=keys.device)
            rows = self._fetched(ids.expand(B, G, -1))
            found[:, :, first - start : first - start + len(ids)] = rows.keys
        found[:, :, stop - start - newer.shape[2] :] = newer
        if self._sink is not None and start < self._sink.ids.shape[1]:
            exact = self._sink.rows.keys[:, :, start:stop]
            found[:, :, : exact.shape[2]] = exact
        return found

    def attend_densely(self, queries: Tensor, stop: int) -> Tensor:
        """Attend causally with queries `[B, H, T, D]` of the last tokens before a position."""
        window = _until(self._window, stop - len(self._index))
        return attend_densely(self._index, window, queries, None, sink=self._sink)

    def attend_chosen(self, queries: Tensor, chosen: Tensor) -> Tensor:
        """Attend causally to the chosen blocks, bool `[B, H, QB, KB]`.

        Only the blocks that at least one query head of a KV head reads are fetched. If they are
        large, the queries are divided in two, so that fewer rows are in memory at a time.
        """
        QB, KB = chosen.shape[2:]
        window = self._window
        width = window.keys.shape[3] + window.values.shape[3]
        nbytes = KB * BLOCK * width * len(queries) * window.keys.shape[1] * queries.element_size()
        if QB > 1 and nbytes > GATHERED_BYTES:
            half = QB // 2
            first, second = queries[:, :, : half * BLOCK], queries[:, :, half * BLOCK :]
            some = chosen[:, :, :half, : KB - QB + half]
            outputs = (
                self.attend_chosen(first, some),
                self.attend_chosen(second, chosen[:, :, half:]),
            )
            return torch.cat(outputs, 2)
        rows, renumbered = self._gathered(chosen)
        return attend_to_blocks(queries, rows, renumbered, self.scale)

    def _gathered(self, chosen: Tensor) -> tuple[Rows, Tensor]:
        """Fetch the chosen blocks.

        Returns:
            The rows: first the chosen blocks of the index, then all tokens after the last whole
            block of the index. The second result is `chosen` for these rows.
        """
        (B, H, QB, KB), G, indexed = chosen.shape, self._window.keys.shape[1], len(self._index)
        whole = min(indexed // BLOCK, KB)
        wanted = chosen[..., :whole].reshape(B, G, H // G * QB, whole).any(2)
        sinks = 0 if self._sink is None else self._sink.ids.shape[1]
        wanted[..., : -(-sinks // BLOCK)] = True  # so that the sink comes first
        count = int(wanted.sum(-1).max()) if whole else 0
        order = torch.argsort(wanted.byte(), dim=-1, descending=True, stable=True)[..., :count]
        used = wanted.gather(-1, order)
        inner = torch.arange(BLOCK, device=order.device)
        ids = torch.where(used[..., None], order[..., None] * BLOCK + inner, UNUSED).flatten(2)
        rest = torch.arange(whole * BLOCK, min(indexed, KB * BLOCK), device=ids.device)
        rows = self._fetched(torch.cat([ids, rest.expand(B, G, -1)], -1))
        if self._sink is not None:
            here = min(sinks, rows.keys.shape[2])
            rows.keys[:, :, :here] = self._sink.rows.keys[:, :, :here]
            rows.values[:, :, :here] = self._sink.rows.values[:, :, :here]
        newer = _until(self._window, max(KB * BLOCK - indexed, 0))
        keys = torch.cat([rows.keys, newer.keys], 2)
        values = torch.cat([rows.values, newer.values], 2)
        # an unused slot is that of a block that no query head has chosen
        each = order.repeat_interleave(H // G, 1)[:, :, None].expand(-1, -1, QB, -1)
        some = chosen[..., :whole].gather(-1, each)
        return Rows(keys, values), torch.cat([some, chosen[..., whole:]], -1)

    def _fetched(self, ids: Tensor) -> Rows:
        """Fetch the keys and values of token positions int64 `[B, G, n]`, -1 for zeros."""
        return self._index.fetch(Hits(ids, torch.zeros_like(ids, dtype=torch.float32)))


def attend_to_blocks(queries: Tensor, rows: Rows, chosen: Tensor, scale: float) -> Tensor:
    """Attend causally to the chosen blocks of keys, with the fastest kernel for the device.

    Args:
        queries: `[B, H, T, D]`, of the newest `T` tokens of `rows`.
        rows: Keys `[B, G, N, D]` and values `[B, G, N, Dv]`.
        chosen: Bool `[B, H, QB, KB]`.
        scale: Factor of the logits.

    Returns:
        Attention outputs `[B, H, T, Dv]`.
    """
    kernels = prompt_kernels(queries.device)
    attend: Any = attend_chosen_fast if kernels is None else kernels.attend_chosen
    output: Tensor = attend(queries, rows.keys, rows.values, chosen, scale=scale)
    return output


def _until(rows: Rows, stop: int) -> Rows:
    """Return the first `stop` keys and values."""
    return Rows(rows.keys[:, :, :stop], rows.values[:, :, :stop])
