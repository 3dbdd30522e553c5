"""Multi-head latent attention (MLA): attention of absorbed queries to latents, one KV head for all.

A token leaves a latent `c [r]`, from which each head's key and value are projected (`kv_b_proj`),
and a rotated key `[Dr]` that all heads share. The projections go to the other side instead
(DeepSeek-V2, arXiv 2405.04434, section 2.1.2): the index holds keys `[c, rotated]` and values `c`;
queries are projected into the space of latents, and the output out of it. The value is in the key
(`Geometry.value_in_key`): a store keeps a latent once.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from kvindex_adapters.common.unsupported import UnsupportedError


def is_latent(module: nn.Module) -> bool:
    """Whether an attention module projects keys and values from latents in the cache."""
    return "kv_b_proj" in dict(module.named_children())


def absorbed(
    module: Any, queries: Tensor, latents: Tensor, rotated: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Queries `[B, H, T, r + Dr]`, keys `[B, 1, T, r + Dr]` and values `[B, 1, T, r]`.

    queries `[B, H, T, Dn + Dr]`: the part without positions first; latents `[B, 1, T, r]` and
    rotated `[B, 1, T, Dr]`, as the cache gets them. Logits are those of the module's own keys.
    Raises UnsupportedError for a projection that is no plain matrix.
    """
    down, _ = _projections(module)
    plain, turned = torch.split(queries, [down.shape[1], rotated.shape[-1]], dim=-1)
    queries = torch.cat([torch.matmul(plain, down), turned], dim=-1)
    return queries, torch.cat([latents, rotated], dim=-1), latents


def projected(module: Any, output: Tensor) -> Tensor:
    """The output `[B, H, T, Dv]` of every head from its sum of latents `[B, H, T, r]`."""
    _, up = _projections(module)
    return torch.matmul(output, up.mT)


def _projections(module: Any) -> tuple[Tensor, Tensor]:
    """From a latent to each head's key `[H, Dn, r]`, and to its value `[H, Dv, r]`."""
    linear = module.kv_b_proj
    if type(linear) is not nn.Linear or linear.bias is not None:
        raise UnsupportedError(
            f"kv_b_proj: got a {type(linear).__name__}, allowed is an nn.Linear without bias: its "
            "matrix is applied to queries and outputs in place of keys and values"
        )
    sizes = [module.qk_nope_head_dim, module.v_head_dim]
    down, up = torch.split(linear.weight.unflatten(0, (-1, sum(sizes))), sizes, dim=1)
    return down, up
