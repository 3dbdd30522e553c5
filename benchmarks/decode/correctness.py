"""Whether the step is right; a wrong one is not timed."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch.nn.functional import scaled_dot_product_attention as sdpa

from benchmarks.decode.setting import Setting, synthetic
from benchmarks.decode.workload import Pool, RowPool, Workload
from kvindex_cuda.memory.block_store import HostStore
from kvindex_cuda.memory.slab_pool import Budget

CHECKED = 20_000
"""Tokens at which the answer is checked; no multiple of 256."""

SAME, CLOSE = 0.98, 5e-3
"""Least share of the ids that are the reference's (the others lie at the edge of the candidates
or tie), and largest relative error of the output: that of rounding to bfloat16 is 1e-3."""


def check(
    setting: Setting, multiprocessors: int, *, batch: int = 2, **options: Any
) -> dict[str, Any]:
    """The step's ids against the reference's, its output against SDPA over the rows it chose.

    options: for `HostStore`. Raises SystemExit where they differ.
    """
    g, tokens = setting.geometry, CHECKED
    index: Any = setting.index
    layout = setting.layout
    keys, values = (
        torch.cat([synthetic(g, first + b, 0, tokens + setting.resident) for b in range(batch)])
        for first in (1000, 2000)
    )
    index.append(keys[:, :, :tokens], values[:, :, :tokens])
    codes = {name: index._codes[name] for name in index._codes}
    blocks = layout.pack(codes, index._learned.get("centers"))
    none = torch.zeros((batch, g.kv_heads), device=g.device)
    histograms = index._histogram if setting.kind == "tiers" else None
    pool = Pool(blocks, index._learned.get("weight_scale", none), histograms)
    store = HostStore(g, max_tokens=tokens, budget=Budget(), **options)
    store.append(store.join(keys[:, :, :tokens], values[:, :, :tokens]))
    store.wait()
    store._pool.settle()
    resident = torch.cat([keys, values], -1)[:, :, tokens:].contiguous()
    rows = RowPool(store.table[0], store.row_bytes, store)
    work = Workload.of(setting, tokens, batch, 1, pool, {"host": rows}, multiprocessors)
    S = blocks.shape[1]
    state = replace(work.states["host"][0], resident=resident, rows=store.table[:, :S].contiguous())
    step, queries = work.step, work.asked[0, 0]
    step.output.fill_(float("nan"))
    first = step(queries, state).clone()
    got = step.ids.view(batch, g.kv_heads, -1).sort(-1).values.clone()
    found = int(step.found.min())
    again = step(queries, state)
    repeats = bool(torch.equal(got, step.ids.view(got.shape).sort(-1).values))
    want = index.search(queries, k=setting.k).ids.sort(-1).values
    same = float((got[..., None] == want[..., None, :]).any(-1).float().mean())
    chosen = got[..., None].expand(-1, -1, -1, g.head_dim)
    parts = [
        torch.cat([part[:, :, :tokens].gather(2, chosen), part[:, :, tokens:]], 2).float()
        for part in (keys, values)
    ]
    folded = queries.float().view(batch, g.kv_heads, g.group_size, g.head_dim)
    true = sdpa(folded, *parts, scale=g.scale).flatten(1, 2)
    error = max(float((out.float() - true).norm() / true.norm()) for out in (first, again))
    result = {
        "tokens": tokens,
        "batch": batch,
        "same_ids": same,
        "error": error,
        "repeats": repeats,
        "found": found,
    }
    judge(result, setting.k)
    return result


def judge(found: dict[str, Any], k: int) -> None:
    """Raises SystemExit if what `check` found is not good enough."""
    wrong = []
    if not found["same_ids"] >= SAME:
        wrong.append(f"{found['same_ids']:.3f} of the ids are the reference's, not {SAME}")
    if not found["error"] <= CLOSE:
        wrong.append(f"the output is off by {found['error']:.1e}, not {CLOSE:.0e}")
    if not found["repeats"]:
        wrong.append("two runs chose different rows")
    if found["found"] != k:
        wrong.append(f"{found['found']} rows were found, not {k}")
    _refuse(wrong)


CODED = {"int8": 0.02, "fp8": 0.1}
"""Largest relative difference from the output over plain rows: of roundings to codes."""


def sound(setting: Setting, work: Workload) -> None:
    """Raises SystemExit if at full length, where there is no reference, a step is surely wrong."""
    work.step.output.fill_(float("nan"))
    queries, state = work.queries[0], work.states["host"][0]
    outputs = {
        place: work.step(queries, states[0]).clone() for place, states in work.states.items()
    }
    ids = []
    for _ in range(2):
        work.step(queries, state)
        ids.append(work.step.ids.sort(-1).values.clone())
    wrong = []
    if not all(bool(part.isfinite().all()) for part in outputs.values()):
        wrong.append("the output is not finite")
    if not torch.equal(*ids):
        wrong.append("two runs chose different rows")
    if bool((ids[0][:, 1:] == ids[0][:, :-1]).any()):
        wrong.append("a row was chosen twice")
    first = outputs["host"].float()
    for place, output in outputs.items():
        if place in CODED:
            same = float((output.float() - first).norm() / first.norm()) <= CODED[place]
        else:
            same = torch.allclose(first, output.float(), rtol=2e-2, atol=1e-2)
        if not same:
            wrong.append(f"rows on the host and those of {place!r} give different outputs")
    if not bool((work.step.found == setting.k).all()):
        wrong.append(f"{int(work.step.found.min())} rows were found, not {setting.k}")
    _refuse(wrong)


def _refuse(wrong: list[str]) -> None:
    if wrong:
        raise SystemExit("the step is wrong and is not timed: " + "; ".join(wrong))
