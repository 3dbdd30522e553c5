"""Check that a decode step computes right results, before it is timed."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad
from torch.nn.functional import scaled_dot_product_attention as sdpa

from benchmarks.common.workload import WINDOW, K, created, queries_of, tokens_of
from kvindex.core.capability import required
from kvindex.core.geometry import Geometry
from kvindex.core.protocol import Attends, Hits
from kvindex.core.resident import ResidentRows

CHECKED = 20_224
"""Number of tokens in the index that is checked."""

SAME, CLOSE = 0.98, 5e-3
"""Tolerances of the check.

`SAME`: smallest allowed fraction of the retrieved tokens that the torch implementation retrieves,
too. Tokens may differ where two keys have equal scores, or where rounding decides which key is the
last candidate.

`CLOSE`: largest allowed relative error of attention outputs. Rounding to bfloat16 alone gives an
error of 1e-3.
"""

ROUNDED = {"int8": 0.02, "fp8": 0.1}
"""Name of a row codec -> largest allowed relative error of attention outputs with this codec."""


def check(
    g: Geometry, spec: str, *, batch: int = 2, k: int = K, window: int = WINDOW, **options: Any
) -> dict[str, Any]:
    """Compare the decode step of an index with plain torch, on synthetic tokens.

    The positions of the retrieved tokens are compared with those that the same index finds with
    `backend="torch"`. The attention output is compared with SDPA over the same tokens. Tokens are
    appended in two calls, and the first call ends in the middle of a block of 256 tokens.

    Args:
        g: Shapes of the layer.
        spec: Name and options of the index.
        batch: Number of sequences.
        k: Number of tokens to retrieve per KV head.
        window: Number of tokens in sink and local window.
        options: Further options of `created`. Keys and values are in host memory unless `store` is
            given.

    Returns:
        The differences that were found.

    Raises:
        SystemExit: The results differ by more than the tolerances allow.
    """
    keys, values = next(iter(tokens_of(g, 1000, batch, CHECKED + window, CHECKED + window)))
    cut = CHECKED * 2 // 3
    mine, theirs = (
        created(g, spec, **{"store": "host", **options}),
        created(g, spec, backend="torch"),
    )
    for index in (mine, theirs):
        index.append(keys[:, :, :cut], values[:, :, :cut])
        index.append(keys[:, :, cut:CHECKED], values[:, :, cut:CHECKED])
    resident = ResidentRows(g, batch, window)
    resident.add(keys[:, :, CHECKED:], values[:, :, CHECKED:], None)
    queries = queries_of(g, batch)
    hits = [index.search(queries, k=k) for index in (mine, mine, theirs)]
    got, again, want = (found.ids.sort(-1).values for found in hits)
    attends = required(mine, Attends)
    outputs = [attends.attend(queries, resident, k=k) for _ in range(2)]  # 1: host, 2: cache
    true = over(g, queries, keys, values, hits[0], CHECKED)
    result = {
        "tokens": CHECKED,
        "batch": batch,
        "same_ids": float((got[..., None] == want[..., None, :]).any(-1).float().mean()),
        "error": max(float((out.output.float() - true).norm() / true.norm()) for out in outputs),
        "repeats": bool(torch.equal(got, again)),
        "found": int(outputs[0].found.min()),
    }
    close = next((limit for codec, limit in ROUNDED.items() if codec in spec), CLOSE)
    judge(result, k, close)
    return result


def over(g: Geometry, queries: Tensor, keys: Tensor, values: Tensor, hits: Hits, n: int) -> Tensor:
    """Compute attention with SDPA over the retrieved tokens `hits` and the newest tokens.

    The index contains the first `n` tokens. Of these tokens, attention reads only `hits`. It also
    reads all tokens from position `n` on. The result is `[B, H, D]`.
    """
    chosen = hits.ids.clamp_min(0)[..., None]
    rows = [
        torch.cat([p[:, :, :n].gather(2, chosen.expand(-1, -1, -1, p.shape[3])), p[:, :, n:]], 2)
        for p in (keys, values)
    ]
    folded = queries.float().unflatten(1, (g.kv_heads, -1))
    weights = None
    if hits.log_weight is not None:
        weights = hits.log_weight.unflatten(1, (g.kv_heads, -1))
        weights = pad(weights, (0, keys.shape[2] - n))
    whole = (part.float() for part in rows)
    return sdpa(folded, *whole, attn_mask=weights, scale=g.scale).flatten(1, 2)


def judge(found: dict[str, Any], k: int, close: float = CLOSE) -> None:
    """Raise SystemExit if the differences that `check` found exceed the tolerances."""
    wrong = []
    if not found["same_ids"] >= SAME:
        wrong.append(f"only {found['same_ids']:.3f} of the ids equal those of torch, not {SAME}")
    if not found["error"] <= close:
        wrong.append(f"the output has an error of {found['error']:.1e}, not {close:.0e} or less")
    if not found["repeats"]:
        wrong.append("two runs chose different rows")
    if found["found"] != k:
        wrong.append(f"{found['found']} rows were found, not {k}")
    if wrong:
        raise SystemExit("the decode step is wrong and is not timed: " + "; ".join(wrong))
