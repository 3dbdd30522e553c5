"""Measure the error of each layer's output, and the recall of its searches.

Every index gets the same queries, keys and values: those that the model with full attention
computed for the steps along a text. So a layer's error does not include the errors of earlier
layers.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from statistics import fmean
from typing import Any

import torch
from torch import Tensor

from kvindex.core.geometry import Geometry
from kvindex.core.protocol import UNUSED, Hits, KVIndex
from kvindex.layer.retrieval import row_bytes
from kvindex.ops.attention import cap
from kvindex_adapters.evaluate.compare import continuation
from kvindex_adapters.evaluate.compare.found import Watching
from kvindex_adapters.evaluate.compare.replay import (
    Indexed,
    ReplayLayer,
    Taken,
    plain_row_bytes,
)
from kvindex_adapters.evaluate.fidelity import BLOCK

AT_ONCE = 2**24
"""Largest number of exact logits that are computed together, which limits the memory."""

ROUNDING = 1e-5
"""Relative difference of two logits that counts as rounding."""

LEAST = 1e-12
"""Smallest norm of an output by which an error is divided."""


@dataclass(frozen=True)
class LayerResult:
    """How well one layer attends with an index.

    Args:
        error: `‖o − o*‖ / ‖o*‖` at each step, where `o*` is the output of full attention: mean over
            the query heads, float64 `[T]` on the CPU.
        recall: Fraction of the `k` rows with the largest logits of a query head that the index has
            retrieved. Mean over searches and query heads. None if no step searched.
        coverage: Attention weight of the retrieved rows, where the weights of all rows in the index
            add up to 1. Mean over searches and query heads. None if no step searched.
        weighted: Whether the index samples rows and returns log weights.
        rows_found: Number of rows per KV head that the index has retrieved, mean over steps.
        rows_others: Number of first and newest tokens that a step has read, mean over steps.
    """

    error: Tensor
    recall: float | None
    coverage: float | None
    weighted: bool
    rows_found: float
    rows_others: float


class _Collecting(Watching):
    """Wrapper around an index that collects the hits of all searches in a list.

    Each element of the list has the hits and the number of tokens in the index.
    """

    def __init__(self, inner: KVIndex, searches: list[tuple[Hits, int]]) -> None:
        super().__init__(inner, None)  # type: ignore[arg-type]  # `_added` does not use it
        self._searches = searches

    def _added(self, queries: Tensor, k: int, hits: Hits) -> Hits:
        self._searches.append((hits, len(self._whole)))
        return hits


@dataclass(eq=False)
class LayerSteps:
    """The steps of one layer along a text, as full attention computed them.

    The exact results with which searches are compared are computed only once for all indexes.

    Args:
        keys: Keys of the prompt, `[1, G, P, D]`.
        taken: What the layer received and returned for each part of the continuation.
        sink: Number of tokens at the beginning that no search returns.
    """

    keys: Tensor
    taken: Sequence[Taken]
    sink: int
    _sums: dict[int, Tensor] = field(default_factory=dict)
    _least: dict[tuple[int, int], Tensor] = field(default_factory=dict)

    def __post_init__(self) -> None:
        parts = [(one.queries, one.keys, one.values, one.outputs) for one in self.taken]
        joined = (torch.cat(part, dim=2) for part in zip(*parts, strict=True))
        self._queries, keys, self._values, self._outputs = joined
        self._new, self._all = keys, torch.cat([self.keys, keys], dim=2)[0]
        sinks = [one.sink_logits for one in self.taken]
        self._sinks = sinks[0]
        if self._sinks is not None and self._sinks.dim() == 3:
            self._sinks = torch.cat([one for one in sinks if one is not None], dim=2)

    @property
    def rows(self) -> float:
        """Number of tokens that full attention reads in a step, mean over steps."""
        return float(self.keys.shape[2]) + (self._queries.shape[2] + 1) / 2

    def measure(self, layer: ReplayLayer, k: int) -> LayerResult:
        """Run the steps in a layer that contains the prompt. The steps remain in the layer."""
        index, searches = layer.index, list[tuple[Hits, int]]()
        layer.index = _Collecting(index, searches)
        try:
            outputs = self._run(layer)
        finally:
            layer.index = index
        want = self._outputs[0].double()
        wrong = (outputs[0].double() - want).norm(dim=-1) / want.norm(dim=-1).clamp_min(LEAST)
        return LayerResult(wrong.mean(0).cpu(), *self._found(searches, k, index.geometry))

    def _run(self, layer: ReplayLayer) -> Tensor:
        """Return the outputs `[1, H, T, Dv]` of a layer with an index."""
        if layer.parallel:
            layer.begin()
        size, outputs = BLOCK if layer.parallel else 1, []
        for start in range(0, self._queries.shape[2], size):
            part = slice(start, start + size)
            terms: dict[str, Any] = {}
            if self._sinks is not None:
                whole = self._sinks.dim() == 1
                terms["sink_logits"] = self._sinks if whole else self._sinks[..., part]
            given = (t[:, :, part] for t in (self._queries, self._new, self._values))
            outputs.append(layer.step(*given, **terms))
        layer.pause()
        return torch.cat(outputs, dim=2)

    def _found(
        self, searches: Sequence[tuple[Hits, int]], k: int, g: Geometry
    ) -> tuple[float | None, float | None, bool, float, float]:
        """Return the last five fields of a `LayerResult`.

        Steps whose index was empty have not searched, and have read all tokens. They come before
        all other steps.
        """
        T, prompt = self._queries.shape[2], self.keys.shape[2]
        step = T - sum(len(hits.ids) for hits, _ in searches)
        recall, coverage, count, rows = 0.0, 0.0, 0, 0.0
        others = sum(prompt + t + 1 for t in range(step))
        for hits, tokens in searches:
            steps = range(step, step + len(hits.ids))
            step = steps.stop
            rows += float((hits.ids != UNUSED).sum(-1).double().mean(1).sum())
            others += sum(min(self.sink, tokens) + prompt + t + 1 - tokens for t in steps)
            if tokens > self.sink:
                each = self._worth(hits, steps, tokens, k, g)
                recall, coverage = recall + each[0], coverage + each[1]
                count += len(steps)
        weighted = any(hits.log_weight is not None for hits, _ in searches)
        read = rows / T, others / T
        if not count:
            return None, None, weighted, *read
        return recall / count, coverage / count, weighted, *read

    def _worth(
        self, hits: Hits, steps: range, tokens: int, k: int, g: Geometry
    ) -> tuple[float, float]:
        """Return recall and coverage, as means over query heads, summed over steps."""
        n, least = tokens - self.sink, self._smallest(tokens, k, g)
        sums, most = self._sums[tokens], min(k, n)
        recall, coverage = 0.0, 0.0
        for part in _parts(steps, g.q_heads * n):
            ids = hits.ids[part.start - steps.start : part.stop - steps.start] - self.sink
            flags = torch.zeros(*ids.shape[:2], n + 1, dtype=torch.bool, device=ids.device)
            flags.scatter_(-1, torch.where((ids < 0) | (ids >= n), n, ids), True)
            seen = flags.transpose(0, 1)[:, :, None, :n]  # [G, T, 1, n]
            logits, limit = self._logits(part, tokens, g), least[:, part.start : part.stop]
            best = logits >= limit - ROUNDING * limit.abs()  # equal logits may be rounded otherwise
            hit = (best & seen).sum(-1).clamp_max(most).double() / most
            recall += float(hit.mean((0, 2)).sum())
            logits = cap(logits, g.scale, g.softcap) - sums[:, part.start : part.stop]
            weights = logits.exp_().mul_(seen).sum(-1)
            coverage += float(weights.double().mean((0, 2)).sum())
        return recall, coverage

    def _smallest(self, tokens: int, k: int, g: Geometry) -> Tensor:
        """Return the `k`-th largest logit of each step and query head, `[G, T, H / G, 1]`.

        Also store the log-sum-exp of all logits in `_sums`. `tokens` is the number of tokens in the
        index.
        """
        if (tokens, k) not in self._least:
            n, least, sums = tokens - self.sink, [], []
            for part in _parts(range(self._queries.shape[2]), g.q_heads * n):
                logits = self._logits(part, tokens, g)
                least.append(logits.topk(min(k, n), sorted=False).values.amin(-1, keepdim=True))
                capped = cap(logits, g.scale, g.softcap)
                sums.append(capped.logsumexp(-1, keepdim=True))
            self._least[tokens, k], self._sums[tokens] = torch.cat(least, 1), torch.cat(sums, 1)
        return self._least[tokens, k]

    def _logits(self, steps: range, tokens: int, g: Geometry) -> Tensor:
        """Return `q·k` of some steps and all rows in the index, float32 `[G, T, H / G, n]`."""
        T, G, each = len(steps), g.kv_heads, g.group_size
        queries = self._queries[0, :, steps.start : steps.stop].float()  # [H, T, D]
        queries = queries.reshape(G, each, T, -1).transpose(1, 2).reshape(G, T * each, -1)
        keys = self._all[:, self.sink : tokens].float()
        return (queries @ keys.mT).reshape(G, T, each, -1)


def _parts(steps: range, logits: int) -> list[range]:
    """Divide steps into ranges with at most `AT_ONCE` logits each, if a step has `logits`."""
    size = max(AT_ONCE // max(logits, 1), 1)
    return [range(at, min(at + size, steps.stop)) for at in range(steps.start, steps.stop, size)]


def measure_outputs(indexed: Indexed, layers: Sequence[LayerSteps], *, k: int) -> dict[str, Any]:
    """Measure the outputs and searches of all layers of a model with an index.

    The index is restored afterwards.

    Args:
        indexed: The model with an index that contains the prompt.
        layers: The steps of each full-attention layer.
        k: Number of tokens that each step retrieves per KV head.

    Returns:
        The fields of a result: means over layers, means by layer, the error by step, and what a
        step reads.
    """
    nbytes, indexes = indexed.cache.report().nbytes, [layer.index for layer in indexed.layers]
    read = continuation.sizes(indexes)
    with indexed.branch(k):
        pairs = zip(indexed.layers, layers, strict=True)
        found = [steps.measure(layer, k) for layer, steps in pairs]
    by_step = torch.stack([one.error for one in found]).mean(0)
    recalls = [one.recall for one in found if one.recall is not None]
    coverages = [one.coverage for one in found if one.coverage is not None]
    return {
        "recall": fmean(recalls) if recalls else None,
        "coverage": fmean(coverages) if coverages else None,
        "weighted": any(one.weighted for one in found),
        "error_by_step": by_step.tolist(),
        "error_by_layer": [float(one.error.mean()) for one in found],
        "recall_by_layer": [one.recall for one in found],
        "coverage_by_layer": [one.coverage for one in found],
        **_traffic(found, indexes, read, layers),
        "nbytes": nbytes,
    }


def _traffic(
    found: Sequence[LayerResult],
    indexes: Sequence[KVIndex],
    sizes: Sequence[dict[str, float]],
    layers: Sequence[LayerSteps],
) -> dict[str, Any]:
    """Return what a decode step reads, as fields of a result.

    Args:
        found: The result of each layer.
        indexes: The index of each layer, after the prompt.
        sizes: `bytes_per_key` of the indexes, or [] if they are unknown.
        layers: The steps of each layer.
    """
    step_bytes = scan_bytes = other_bytes = full_bytes = 0.0
    for number, (one, index, steps) in enumerate(zip(found, indexes, layers, strict=True)):
        g, row = index.geometry, plain_row_bytes(index.geometry)
        step_bytes += one.rows_found * row_bytes(index) * g.kv_heads
        other_bytes += one.rows_others * row
        full_bytes += steps.rows * row
        if sizes:
            scan_bytes += sizes[number]["scanned"] * len(index) * g.kv_heads
    return {
        "rows_read": fmean(one.rows_found + one.rows_others for one in found),
        "rows_full": fmean(steps.rows for steps in layers),
        "rows_found": fmean(one.rows_found for one in found),
        "key_bytes": fmean(one["stored"] for one in sizes) if sizes else None,
        "step_bytes": step_bytes,
        "scan_bytes": scan_bytes if sizes else None,
        "read_bytes": step_bytes + scan_bytes + other_bytes if sizes else None,
        "full_bytes": full_bytes,
    }
