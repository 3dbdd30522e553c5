"""Time decode steps of kvindex's own decoder with several kinds of attention, in alternation."""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor

from benchmarks.common import token, workload
from benchmarks.common.shapes import SHAPES, weights_of
from benchmarks.common.timing import Figures, check_floor, in_turns
from kvindex_adapters.llama.fused import refusal

VERIFIED = 3
"""Number of timed rounds of a turn in which full attention verifies drafts."""

MOST_ADAPTED = 14 * 8 + 2 * token.WARM
"""Number of tokens that `token.allow_errors` generates, and the tokens to warm up."""


def measured(given: argparse.Namespace, end: float) -> Iterator[dict[str, Any]]:
    """Measure decode steps with each kind of attention. Yield the results after each round."""
    shape, device = SHAPES[given.decoder], given.device
    g = shape.geometry(getattr(torch, given.dtype), device)
    how: dict[str, Any] = dict(batch=given.batch, fused=not given.torch_products)
    automatic = "auto" if given.rows else given.k
    token.check(shape, g, given.index, kind=given.weights, k=automatic, **how)
    for drafts in given.drafts:
        fused = not given.torch_products
        of = drafts, given.weights, given.batch
        token.check_drafts(shape, g, given.index, *of, fused=fused)
    if given.verified:
        most = max(drafts for drafts, _ in given.verified)
        fused = not given.torch_products
        token.check_verified(shape, g, given.index, most, given.batch, fused=fused)
    rate = token.read_rate(g.device)
    weights = weights_of(shape, g, given.weights)
    read = weights.read_bytes
    about = dict(shape=shape._asdict(), context=given.context, batch=given.batch)
    about |= dict(k=given.k, sink=token.SINK, window=token.LOCAL, update_every=token.UPDATE)
    by_torch = given.torch_products or refusal(weights, given.batch) is not None
    about |= dict(products="torch" if by_torch else "triton", kind=given.weights)
    about["weights_bytes"] = read
    about |= dict(kept={n: kept for n, kept in given.verified}) if given.verified else {}
    about |= dict(read_bytes_per_s=rate, floor_ms=1e3 * read / rate)
    plan = partial(token.Plan, shape, g, weights, **how)
    rows, rounds = given.context * given.batch, given.written // given.turn
    # reserve memory for all generated tokens, so that no decode step waits for an allocation
    room = (
        2 * (rounds + 1) * (given.turn + token.REFILLED) + token.MOST_SHARPENED + 2 * token.UPDATE
    )
    room += MOST_ADAPTED if given.rows else 0
    room += sum(2 * (rounds + 1) * (given.turn * (n + 1) + token.REFILLED) for n in given.drafts)
    room += sum(
        2 * (rounds + 1) * (token.REFILLED + (VERIFIED + token.CAPTURES) * (kept + 1) + drafts)
        for drafts, kept in given.verified
    )
    sizes = given.context, shape.layers, room, given.batch
    layers = token.indexed(g, given.index, *sizes, k=automatic)
    through, errors, most = plan(layers), [0.0] * shape.layers, layers[0].k

    def use(name: str) -> None:
        """Let the layers retrieve `given.k` rows, or for the plan "auto" as many as are allowed."""
        for layer, error in zip(layers, errors, strict=True):
            layer.k, layer.error = (most, error) if name == "auto" else (given.k, None)

    use("cached")
    through.turn(token.WARM)
    about["sharpness"] = token.sharpen_for(weights, through, given.hit_rate)
    hits, caches = token.Hits(), token.caches()

    def emptied() -> None:
        for cache in caches:
            cache.forget()

    def noted(name: str, run: Callable[[], Figures]) -> Figures:
        found = run()
        written[name] += found["between_ms"]
        return found

    def turn(name: str, before: Callable[[], None] | None) -> Figures:
        use(name)
        through.turn(token.WARM if before else token.REFILLED)
        hits.rate()
        earlier = token.rows_found(layers) if name == "auto" else None
        found = through.turn(given.turn, before)
        about["hit_rates"][name].append(hits.rate())
        if earlier is not None:
            about["rows"].append(described(token.rows_found(layers) - earlier))
        return found

    def drafted(drafts: int) -> Figures:
        use("cached")
        through.turn(token.REFILLED)
        hits.rate()
        found = through.turn_drafts(given.turn, drafts)
        about["hit_rates"].setdefault(f"cached+{drafts}", []).append(hits.rate())
        return found

    def verified(drafts: int, kept: int) -> Figures:
        use("cached")
        through.turn(token.REFILLED)
        hits.rate()
        found = through.turn_verified(VERIFIED, drafts, kept)
        about["hit_rates"].setdefault(f"verified+{drafts}", []).append(hits.rate())
        return found

    befores: dict[str, Any] = {"cached": None, "uncached": emptied}
    if given.rows:
        befores["auto"] = None
        wanted = [given.rows[i % len(given.rows)] for i in range(shape.layers)]
        use("auto")
        errors[:] = token.allow_errors(layers, through, wanted)
        about["errors"], about["rows"] = list(errors), []
    about["hit_rates"] = {name: [] for name in befores}
    turns: dict[str, Any] = {name: partial(turn, name, before) for name, before in befores.items()}
    alone = plan([token.Nothing()] * shape.layers)
    turns["weights"] = partial(alone.turn, given.turn)
    for drafts in given.drafts:
        turns[f"weights+{drafts}"] = partial(alone.turn_drafts, given.turn, drafts)
        turns[f"cached+{drafts}"] = partial(drafted, drafts)
    for drafts, kept in given.verified:
        turns[f"verified+{drafts}"] = partial(verified, drafts, kept)
    if token.fits(g, rows, shape.layers):
        dense = [token.Everything(g, given.context, given.batch) for _ in range(shape.layers)]
        turns["dense"] = partial(plan(dense).turn, given.turn)
    if token.fits(g, rows, shape.layers):
        growing = token.dense(shape, g, given.context, room, given.batch)
        turns["growing"] = partial(plan(growing).turn, given.turn)
    for warm in turns.values():
        warm()
    workload.free()
    about["hit_rates"] = {name: [] for name in about["hit_rates"]}
    about |= {"rows": []} if given.rows else {}
    use("cached")
    written: dict[str, list[float]] = {name: [] for name in turns}
    if (more := 2 * token.UPDATE - given.written) > 0:  # let each layer update its index twice
        noted("cached", partial(through.turn, more))
    turns = {name: partial(noted, name, run) for name, run in turns.items()}
    over = "cached" if given.rows or given.drafts else "dense" if "dense" in turns else "weights"
    for found in in_turns(turns, rounds, end, over):
        worst = {name: max(ms) / statistics.median(ms) for name, ms in written.items() if ms}
        found |= {"over": over, "worst_over_median": worst}
        found["worst_of"] = {name: len(ms) for name, ms in written.items()}
        if found["rounds"]:
            per_s = {name: 1e3 * given.batch / found[name]["token_ms"] for name in turns}
            found["tokens_per_s"] = per_s
        check_floor(found, turns, about["floor_ms"])
        yield about | found


def described(found: Tensor) -> dict[str, Any]:
    """Return the number of rows per KV head: mean, 99th percentile, and means of the layers.

    found: How often each number was found in each layer, int64 `[L, 1025]`.
    """
    together = found.sum(0).cumsum(0)
    p99 = int((together < 0.99 * together[-1]).sum())
    means = token.mean_rows(found)
    return dict(mean=float(token.mean_rows(found.sum(0))), p99=p99, by_layer=means.tolist())


def shown(found: dict[str, Any]) -> Iterator[str]:
    """Yield a line of text for each kind of attention that was measured."""
    if not found["rounds"]:
        return
    floor, rates = found["floor_ms"], found["hit_rates"]
    yield f"floor {floor:.2f} ms: {found['weights_bytes'] / 1e9:.2f} GB of weights"
    drafted = [plan for plan in found if "+" in plan]
    for plan in ("weights", "dense", "growing", "cached", "uncached", "auto", *drafted):
        if plan not in found:
            continue
        name = "token_ms" if plan in drafted else "device_ms"
        ms, low, high = (found[plan][f"{name}{part}"] for part in ("", "_low", "_high"))
        line = f"{plan:8} {ms:6.2f} ms ({low:.2f} to {high:.2f}), {ms / floor:.2f} of the floor"
        line += f", host {found[plan]['token_ms']:.2f} ms"
        line += f", {found['tokens_per_s'][plan]:.1f} tokens/s"
        if plan in found["ratio"]:
            line += f", {found['ratio'][plan][name]:.3f} of {found['over']}"
        if plan in rates:
            line += f", hits {statistics.median(rates[plan]):.2f}"
        if plan == "auto" and found["rows"]:
            last = found["rows"][-1]
            line += f", {last['mean']:.0f} rows (99th percentile {last['p99']})"
        of, worst = found["worst_of"][plan], found["worst_over_median"][plan]
        line += f", worst of {of} {worst:.2f} of the median"
        yield line
