"""Attention layers that decode: by how much updates of their windows delay the steps."""

from __future__ import annotations

import statistics
from itertools import pairwise
from typing import Any

import torch

from benchmarks.appending.encode import index_of, keys_of
from benchmarks.appending.update import PIECE, UPDATE
from kvindex.core.geometry import Geometry
from kvindex.layer import AttentionLayer

LOCAL = 256
"""Tokens of the local window; there is no sink."""

PLANS = {
    "at_once": "all layers at the end of the same step, on its stream",
    "beside": "a layer at a time, beside the steps: what a layer does by itself",
    "room": "the same, memory for all updates taken before (index.reserve)",
}


KINDS = {
    "plain": "nothing but a token",
    "updated": "an update of a layer's window began or ended",
    "pinning": "host memory was pinned, ahead of need, for updates to come",
}


class AtOnce(AttentionLayer):
    """Updates its window at once, on the stream of its step."""

    def _update(self, *, beside: bool = False) -> None:
        super()._update()


class Decoding:
    """Layers that hold a prompt of `tokens`, and attend from one token after the other."""

    def __init__(
        self, geometry: Geometry, tokens: int, layers: int, plan: str, *, update: int = UPDATE
    ) -> None:
        g, store = geometry, "host" if geometry.device.type == "cuda" else "device"
        kind = AtOnce if plan == "at_once" else AttentionLayer
        options = dict(sink=0, local_window=LOCAL, update_every=update, dense_below=0)
        self.layers = []
        for number in range(layers):
            index, keys = index_of(g, store=store), keys_of(g, number, tokens)
            self.layers.append(kind(index, update_phase=number / layers, **options))
            for start in range(0, tokens - LOCAL, PIECE):
                some = keys[:, :, start : min(start + PIECE, tokens - LOCAL)]
                index.append(some, some)  # a layer would attend from all of them, too
            new = keys[:, :, tokens - LOCAL :]
            self.layers[-1].step(new.repeat_interleave(g.group_size, dim=1), new, new)
            index.warm_up(k=self.layers[-1].k, tokens=tokens + 64 * UPDATE)
            if plan == "room":
                made: Any = index
                made.reserve(tokens + 64 * UPDATE)
        shape = (UPDATE, layers, 1, g.kv_heads, 1, g.head_dim)
        self._new = torch.randn(shape, device=g.device).to(g.dtype)
        self._group, self._token = g.group_size, 0

    def step(self) -> str:
        """A token of every layer; which of `KINDS` the step is."""
        before, held = self._places(), self._pinned()
        for layer, new in zip(self.layers, self._new[self._token % UPDATE], strict=True):
            layer.step(new.repeat_interleave(self._group, dim=1), new, new)
        self._token += 1
        if self._pinned() != held:
            return "pinning"
        return "plain" if self._places() == before else "updated"

    def _places(self) -> list[tuple[int, int]]:
        return [(len(layer.index), layer._regions.leaving) for layer in self.layers]

    def _pinned(self) -> int:
        """Bytes of host memory; a thread takes more while steps run."""
        stores: list[Any] = [layer.index._store for layer in self.layers]
        return sum(getattr(store, "pinned_bytes", 0) for store in stores)


def timed(decoding: Decoding, steps: int) -> tuple[list[float], list[str]]:
    """Microseconds from the end of each step to the next one's, and which of `KINDS` it was.

    The host waits for each step, as one that samples a token does, and only then begins the next.
    """
    ends, kinds = [], []
    for _ in range(steps + 1):
        kinds.append(decoding.step())
        done = torch.cuda.Event(enable_timing=True)
        done.record()
        done.synchronize()
        ends.append(done)
    return [1e3 * first.elapsed_time(last) for first, last in pairwise(ends)], kinds[1:]


def delays(times: list[float], kinds: list[str]) -> dict[str, Any]:
    """How much longer steps of each kind are than plain ones of the same run."""
    usual = statistics.median(t for t, kind in zip(times, kinds, strict=True) if kind == "plain")
    found: dict[str, Any] = {"amortised": sum(times) / len(times) / usual - 1}
    for kind, words in KINDS.items():
        some = [time for time, other in zip(times, kinds, strict=True) if other == kind]
        found[kind] = {"is": words, "steps": len(some)}
        if some:
            found[kind] |= {
                "median_us": statistics.median(some),
                "worst_us": max(some),
                "delay_median": statistics.median(some) / usual - 1,
                "delay_worst": max(some) / usual - 1,
            }
    return found


def measure(geometry: Geometry, tokens: int, layers: int, periods: int) -> dict[str, Any]:
    """Each plan over so many periods of 256 steps, launched one by one."""
    found: dict[str, Any] = {"tokens": tokens, "layers": layers}
    for plan, words in PLANS.items():
        decoding = Decoding(geometry, tokens, layers, plan)
        timed(decoding, UPDATE)  # compiles what is new, and brings each layer to its turn
        found[plan] = {"is": words, **delays(*timed(decoding, periods * UPDATE))}
    return found
