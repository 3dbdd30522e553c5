"""Recall of a system along a real generation, and after made-up shifts."""

from __future__ import annotations

import torch
from torch import Tensor

from benchmarks.drifting.shifts import SHIFTS
from benchmarks.drifting.systems import System
from benchmarks.reading import SEED
from kvindex_adapters.evaluate.capture import Captured
from kvindex_adapters.evaluate.recall import SINK

ASKED, APART = 16, 4
"""Queries per position, and tokens between one and the next."""


def along(
    layer: Captured, system: System, positions: list[int], k: int
) -> tuple[list[Tensor], dict[str, float]]:
    """Recall of the queries after each position over the keys before it, and bytes per key.

    The first position is where the prompt ends.
    """
    start = layer.keys.shape[1] - layer.queries.shape[1]
    searcher, last, found = system.make(layer), SINK, []
    for position in positions:
        if system.rebuilt:
            searcher, last = system.make(layer), SINK
        searcher.add(layer.keys[:, last:position])
        last = position
        asked = layer.queries[:, position - start :: APART][:, :ASKED]
        found.append(system.recall(searcher, layer.keys[:, SINK:position], asked, k))
    return found, searcher.bytes()


def shifted(
    layer: Captured, system: System, k: int, learned: int
) -> dict[tuple[str, float], Tensor]:
    """Recall after as many keys again as were learned from, shifted; by kind and size.

    Both halves are drawn at random from the layer's keys, so that at size 0 nothing drifts.
    """
    order = torch.randperm(
        layer.keys.shape[1] - SINK, generator=torch.Generator().manual_seed(SEED)
    )
    half = min(learned, len(order) // 2)
    keys = layer.keys[:, SINK + order[: 2 * half].to(layer.keys.device)].float()
    first, second = keys[:, :half], keys[:, half:]
    asked = layer.queries[:, :: max(layer.queries.shape[1] // ASKED, 1)][:, :ASKED].float()
    searcher = system.make(layer)
    if not system.rebuilt:
        searcher.add(first)
    found = {}
    for kind, (change, sizes, _) in SHIFTS.items():
        for size in sizes:
            draw = torch.Generator().manual_seed(SEED)
            later = change(second, first, size, draw) if size else second
            both = torch.cat([first, later], 1)
            if not size and found:
                found[kind, size] = next(iter(found.values()))  # the same for each kind
                continue
            if system.rebuilt:
                searcher = system.make(layer)
            else:
                searcher.truncate(half)  # forgets the last shift, not what it has learned
            searcher.add(both if system.rebuilt else later)
            found[kind, size] = system.recall(searcher, both, asked, k)
    return found
