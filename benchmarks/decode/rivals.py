"""What the step is compared with: dense attention, and exact scores with topk."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention as sdpa

from benchmarks.decode.setting import Setting
from benchmarks.decode.timing import OutOfTimeError, Timed

FUSED = [
    SDPBackend.FLASH_ATTENTION,
    SDPBackend.CUDNN_ATTENTION,
    SDPBackend.EFFICIENT_ATTENTION,
]
"""All but the one that writes the logits down, which would need several times the memory."""


def layers_of_dense(
    need_bytes: int, free_bytes: float, layers: int, *, replays: int, GB_s: float, left_s: float
) -> tuple[int, str]:
    """How many layers of keys and values `dense` may hold and read; 0, and why, where it may not.

    need_bytes: of one layer; free_bytes: of the device; GB_s: the rate of reading; left_s: seconds
    of the whole run, half of which it may take.
    """
    layers = min(layers, int(0.8 * free_bytes) // need_bytes)
    if not layers:
        need, free = need_bytes / 2**30, free_bytes / 2**30
        return 0, f"a layer's keys and values take {need:.0f} GiB, {free:.0f} are free"
    # two ways of attention and the scores' keys, each replayed and before that run and captured
    seconds = 2.5 * (replays + 6) * layers * need_bytes / (1e9 * GB_s)
    if seconds > left_s / 2:
        return 0, f"it would take {seconds:.0f} s at least, {left_s:.0f} are left"
    return layers, ""


def dense(setting: Setting, tokens: int, batch: int, layers: int, timed: Timed) -> dict[str, Any]:
    """Attention over all keys and values, and exact scores with the best k, in device memory.

    Attention is timed as SDPA with `enable_gqa`, and with a group's heads as so many queries of
    one KV head, which is the same; the faster one is `dense`.
    """
    g = setting.geometry
    shape = (layers, 2, batch, g.kv_heads, tokens, g.head_dim)
    both = torch.empty(shape, dtype=g.dtype, device=g.device)
    for part in both.view(-1, tokens, g.head_dim).split(64):
        part.normal_()
    keys, values = both.unbind(1)
    asked = setting.queries(layers, batch)
    wide = asked[..., None, :]  # [L, B, H, 1, D]
    folded = asked.unflatten(2, (g.kv_heads, g.group_size))  # [L, B, G, g, D]

    def gqa() -> Tensor:
        for q, k, v in zip(wide, keys, values, strict=True):
            out = sdpa(q, k, v, enable_gqa=True)
        return out

    def fold() -> Tensor:
        for q, k, v in zip(folded, keys, values, strict=True):
            out = sdpa(q, k, v)
        return out

    def best() -> Tensor:
        for q, k in zip(folded, keys, strict=True):
            out = torch.matmul(q, k.mT).amax(2).topk(setting.k, sorted=False).indices
        return out

    found: dict[str, Any] = {"dense_layers": layers}
    outputs = []
    for name, run in (("dense_gqa", gqa), ("dense_folded", fold), ("topk", best)):
        try:
            with sdpa_kernel(FUSED if g.device.type == "cuda" else [SDPBackend.MATH]):
                outputs.append(run().float().flatten())
                found[name] = timed(run, layers)
        except OutOfTimeError:
            raise
        except RuntimeError as error:
            found[f"{name}_error"] = str(error).splitlines()[0]
    if "dense_gqa" in found and "dense_folded" in found:
        one, other = outputs[:2]
        if not float((one - other).norm() / one.norm()) < 2e-2:
            raise SystemExit("the two ways of dense attention differ")
    ways = [found[name] for name in ("dense_gqa", "dense_folded") if name in found]
    if ways:
        found["dense"] = min(ways, key=lambda times: times["median_us"])
        found["dense_bytes"] = keys[0].nbytes + values[0].nbytes
    return found
