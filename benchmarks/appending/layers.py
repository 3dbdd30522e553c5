"""Attention layers that decode: by how much updates of their windows delay the steps."""

from __future__ import annotations

import statistics
from itertools import pairwise
from typing import Any

import torch

from benchmarks.appending.encode import index_of, keys_of
from benchmarks.appending.update import PIECE, UPDATE
from kvindex.geometry import Geometry
from kvindex.layer import AttentionLayer

LOCAL = 256
"""Tokens of the local window; there is no sink."""

PLANS = {
    "at_once": "all layers at the end of the same step, on its stream",
    "beside": "a layer at a time, beside the steps: what a layer does by itself",
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
        options = dict(sink=0, local=LOCAL, update_every=update, full_threshold=0)
        self.layers = []
        for number in range(layers):
            index, keys = index_of(g, store=store), keys_of(g, number, tokens)
            self.layers.append(kind(index, turn=number / layers, **options))
            for start in range(0, tokens - LOCAL, PIECE):
                some = keys[:, :, start : min(start + PIECE, tokens - LOCAL)]
                index.append(some, some)  # a layer would attend from all of them, too
            new = keys[:, :, tokens - LOCAL :]
            self.layers[-1].step(new.repeat_interleave(g.group_size, dim=1), new, new)
            index.prepare(k=self.layers[-1].k, tokens=tokens + 64 * UPDATE)
        shape = (UPDATE, layers, 1, g.kv_heads, 1, g.head_dim)
        self._new = torch.randn(shape, device=g.device).to(g.dtype)
        self._group, self._token = g.group_size, 0

    def step(self) -> bool:
        """A token of every layer; whether an update of one has begun or ended with it."""
        before = self._places()
        for layer, new in zip(self.layers, self._new[self._token % UPDATE], strict=True):
            layer.step(new.repeat_interleave(self._group, dim=1), new, new)
        self._token += 1
        return self._places() != before

    def _places(self) -> list[tuple[int, int]]:
        return [(len(layer.index), layer._regions.leaving) for layer in self.layers]


def timed(decoding: Decoding, steps: int) -> tuple[list[float], list[bool]]:
    """Microseconds from the end of each step to the next one's, and whether it had an update.

    The host waits for each step, as one that samples a token does, and only then begins the next.
    """
    ends, hit = [], []
    for _ in range(steps + 1):
        hit.append(decoding.step())
        done = torch.cuda.Event(enable_timing=True)
        done.record()
        done.synchronize()
        ends.append(done)
    return [1e3 * first.elapsed_time(last) for first, last in pairwise(ends)], hit[1:]


def delays(times: list[float], hit: list[bool]) -> dict[str, Any]:
    """How much longer steps with an update are than the others of the same run."""
    struck = [time for time, some in zip(times, hit, strict=True) if some]
    others = [time for time, some in zip(times, hit, strict=True) if not some]
    usual = statistics.median(others)
    return {
        "others_median_us": usual,
        "others_worst_us": max(others),
        "updated_median_us": statistics.median(struck),
        "updated_worst_us": max(struck),
        "delay_median": statistics.median(struck) / usual - 1,
        "delay_worst": max(struck) / usual - 1,
        "amortised": sum(times) / len(times) / usual - 1,
        "steps": len(times),
        "updated": len(struck),
    }


def measure(geometry: Geometry, tokens: int, layers: int, periods: int) -> dict[str, Any]:
    """Each plan over so many periods of 256 steps, launched one by one."""
    found: dict[str, Any] = {"tokens": tokens, "layers": layers}
    for plan, words in PLANS.items():
        decoding = Decoding(geometry, tokens, layers, plan)
        timed(decoding, UPDATE)  # compiles what is new, and brings each layer to its turn
        found[plan] = {"is": words, **delays(*timed(decoding, periods * UPDATE))}
    return found
