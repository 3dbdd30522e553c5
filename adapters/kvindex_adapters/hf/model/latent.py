"""Multi-head latent attention (MLA) with an index over latents, as one KV head.

For each token, MLA caches a latent `c` of dimension `r`, and a rotated key of dimension `Dr` that
all heads share. `kv_b_proj` projects the latent to the key and value of every head. The adapter
instead projects queries into the space of latents, and outputs back from it. So the index stores
keys `[c, rotated]` and values `c`. Since the value is a part of the key (`Geometry.value_in_key`),
a store contains each latent only once.

Source: DeepSeek-AI, DeepSeek-V2 (arXiv 2405.04434), section 2.1.2.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from kvindex_adapters.common.unsupported import UnsupportedError


def is_latent(module: nn.Module) -> bool:
    """Return True for multi-head latent attention: the module has the projection `kv_b_proj`."""
    return "kv_b_proj" in dict(module.named_children())


def absorbed(
    module: Any, queries: Tensor, latents: Tensor, rotated: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Convert queries, latents and rotated keys to queries, keys and values of a single KV head.

    The attention logits are the same as with the keys that the module would project.

    Args:
        module: The attention module.
        queries: `[B, H, T, Dn + Dr]`. The first `Dn` coordinates are not rotated.
        latents: `[B, 1, T, r]`, which the module passes to the cache.
        rotated: Rotated keys `[B, 1, T, Dr]`, which the module passes to the cache.

    Returns:
        Queries `[B, H, T, r + Dr]`, keys `[B, 1, T, r + Dr]` and values `[B, 1, T, r]`.

    Raises:
        UnsupportedError: `kv_b_proj` is not a plain matrix.
    """
    down, _ = _projections(module)
    plain, turned = torch.split(queries, [down.shape[1], rotated.shape[-1]], dim=-1)
    queries = torch.cat([torch.matmul(plain, down), turned], dim=-1)
    return queries, torch.cat([latents, rotated], dim=-1), latents


def projected(module: Any, output: Tensor) -> Tensor:
    """Multiply attention outputs by the module's value projection.

    Args:
        module: The attention module.
        output: Attention outputs, computed with latents as values, `[B, H, T, r]`.

    Returns:
        Attention outputs `[B, H, T, Dv]`.
    """
    _, up = _projections(module)
    return torch.matmul(output, up.mT)


def _projections(module: Any) -> tuple[Tensor, Tensor]:
    """Return the projections of a latent to each head's key `[H, Dn, r]` and value `[H, Dv, r]`."""
    linear = module.kv_b_proj
    if type(linear) is not nn.Linear or linear.bias is not None:
        raise UnsupportedError(
            f"kv_b_proj: got a {type(linear).__name__}, allowed is an nn.Linear without bias, "
            "because the matrix is applied to queries and outputs instead of latents"
        )
    sizes = [module.qk_nope_head_dim, module.v_head_dim]
    down, up = torch.split(linear.weight.unflatten(0, (-1, sum(sizes))), sizes, dim=1)
    return down, up
