"""Reference implementation, in plain PyTorch, of the Triton kernels for a model's layers. Tests
compare the kernels with these functions.

Results are computed in float32 and rounded once. Arguments are those of the functions that launch
the kernels, but without tile sizes, and with keys and values as tensors.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from kvindex.ops.attention import attend, attend_blocks
from kvindex_cuda.triton.operands import Matrix, Norm


def normalize(x: Tensor, norm: Norm) -> Tensor:
    """Apply RMS normalization along the last dimension. Returns float32."""
    wide = x.float()
    factor = torch.rsqrt(wide.square().mean(-1, keepdim=True) + norm.eps)
    return wide * factor * norm.weight.float()


def multiply(x: Tensor, matrix: Matrix) -> Tensor:
    """Multiply float32 activations `[B, K]` by a matrix `[N, K]` and add its bias. Returns float32
    `[B, N]`."""
    product = x @ matrix.weight.float().T
    if matrix.scale is not None:
        product = product * matrix.scale
    return product if matrix.bias is None else product + matrix.bias.float()


def norm_linear(x: Tensor, norm: Norm, matrix: Matrix) -> Tensor:
    """Apply RMS normalization to activations `[B, K]`, and multiply them by a matrix `[N, K]`.
    Returns `[B, N]`."""
    return multiply(normalize(x, norm), matrix).to(x.dtype)


def norm_swiglu(x: Tensor, norm: Norm, matrix: Matrix) -> Tensor:
    """Apply RMS normalization to activations `[B, K]`, and multiply them by gate and up, stacked as
    `[2N, K]`. Returns `silu(gate) · up`, `[B, N]`."""
    gate, up = multiply(normalize(x, norm), matrix).chunk(2, dim=-1)
    return (functional.silu(gate) * up).to(x.dtype)


def linear_residual(x: Tensor, matrix: Matrix, residual: Tensor) -> Tensor:
    """Multiply activations `[B, K]` by a matrix, and add a residual `[B, N]`."""
    return (residual.float() + multiply(x.float(), matrix)).to(x.dtype)


def swiglu_linear(gate_up: Tensor, matrix: Matrix, residual: Tensor) -> Tensor:
    """Multiply `silu(gate) · up` by a matrix `[N, K]`, and add a residual `[B, N]`. `gate_up` is
    `[B, 2K]`."""
    gate, up = gate_up.float().chunk(2, dim=-1)
    product = multiply(functional.silu(gate) * up, matrix)
    return (residual.float() + product).to(gate_up.dtype)


def project_heads(
    x: Tensor,
    norm: Norm,
    matrix: Matrix,
    cos: Tensor,
    sin: Tensor,
    slots: Tensor,
    queries: Tensor,
    keys: Tensor,
    values: Tensor,
    *,
    query_norm: Norm | None = None,
    key_norm: Norm | None = None,
) -> None:
    """Compute queries, keys and values of one token per sequence.

    Writes the queries to `queries` `[B, H, D]`. For each sequence `b`, writes the keys to
    `keys[b, :, slots[b]]` and the values to `values[b, :, slots[b]]`.
    """
    (H, D), (G, C) = queries.shape[1:], keys.shape[1:3]
    heads = norm_linear(x, norm, matrix).view(len(x), -1, D)
    query, key, value = torch.split(heads, [H, G, G], dim=1)
    queries.copy_(_rotated(query, query_norm, cos, sin))
    rotated = _rotated(key, key_norm, cos, sin).to(keys.dtype)
    for row, slot in enumerate(slots.tolist()):
        if 0 <= slot < C:
            keys[row, :, slot], values[row, :, slot] = rotated[row], value[row]


def _rotated(heads: Tensor, norm: Norm | None, cos: Tensor, sin: Tensor) -> Tensor:
    """Apply RMS normalization (if there is a norm) and the rotary embedding to heads `[B, heads,
    D]`. Returns float32."""
    return _rotated_heads(heads, norm, cos[:, None], sin[:, None])


def _rotated_heads(heads: Tensor, norm: Norm | None, cos: Tensor, sin: Tensor) -> Tensor:
    """Do the same for heads `[..., D]`. Cosines and sines broadcast to their shape."""
    wide = heads.float() if norm is None else normalize(heads, norm)
    first, second = wide.chunk(2, dim=-1)
    turned = torch.cat((-second, first), dim=-1)
    return wide * cos.float() + turned * sin.float()


def rotate_heads(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cos: Tensor,
    sin: Tensor,
    queries: Tensor,
    keys: Tensor,
    values: Tensor,
    *,
    query_norm: Norm | None = None,
    key_norm: Norm | None = None,
) -> None:
    """Compute queries `[B, H, T, D]`, keys and values `[B, G, T, D]` from the projections `[B, T,
    heads·D]` of a chunk of a prompt. `cos` and `sin` are `[B, T, D]`."""
    D = queries.shape[3]
    for projected, to, norm in ((query, queries, query_norm), (key, keys, key_norm)):
        heads = projected.view(*projected.shape[:2], -1, D)
        to.copy_(_rotated_heads(heads, norm, cos[:, :, None], sin[:, :, None]).transpose(1, 2))
    values.copy_(value.view(*value.shape[:2], -1, D).transpose(1, 2))


def swiglu(gate: Tensor, up: Tensor) -> Tensor:
    """Return `silu(gate) · up` in the dtype of `gate`."""
    return (functional.silu(gate.float()) * up.float()).to(gate.dtype)


def begin_token(
    ids: Tensor, positions: Tensor, embedding: Tensor, frequencies: Tensor, factor: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Return embeddings `[B, N]`, and cosines and sines of the rotary angles `[B, D]`. The
    embedding of an id outside of the vocabulary is NaN."""
    known, dtype = (ids >= 0) & (ids < len(embedding)), embedding.dtype
    hidden = embedding[ids.where(known, 0)].masked_fill(~known[:, None], float("nan"))
    angles = (positions[:, None] * frequencies).repeat(1, 2)
    return hidden, (angles.cos() * factor).to(dtype), (angles.sin() * factor).to(dtype)


def most_likely(logits: Tensor) -> Tensor:
    """Return the token with the highest logit, int64 `[B]`. Of equal logits, the lowest id is
    returned; NaN counts as the highest logit."""
    return logits.argmax(-1)


def attend_pages(
    queries: Tensor,
    keys: Tensor,
    values: Tensor,
    lengths: Tensor,
    *,
    scale: float,
    causal: bool = True,
) -> tuple[Tensor, Tensor]:
    """Attend from the newest tokens to the first `lengths[b]` rows of each sequence. Returns
    outputs `[B, H, T, Dv]` and log-sum-exp values, float32 `[B, H, T]`."""
    T, R = queries.shape[2], keys.shape[2]
    rows = torch.arange(R, device=queries.device)
    ends = lengths[:, None].expand(-1, T)
    if causal:
        ends = ends - T + 1 + torch.arange(T, device=queries.device)
    bias = torch.zeros((*ends.shape, R), device=queries.device)
    bias = bias.masked_fill(rows >= ends[..., None], float("-inf"))[:, None]
    return attend_blocks(queries, [(keys, values, bias)], scale=scale, return_lse=True)


def attend_token(
    queries: Tensor, keys: Tensor, values: Tensor, starts: Tensor, ends: Tensor, *, scale: float
) -> Tensor:
    """Attend from one token per sequence to rows `starts[b]` to `ends[b] - 1`. Returns `[B, H,
    Dv]`."""
    rows = torch.arange(keys.shape[2], device=queries.device)
    seen = (rows >= starts[:, None]) & (rows < ends[:, None])
    bias = torch.zeros(seen.shape, device=queries.device).masked_fill(~seen, float("-inf"))
    return attend(queries, keys, values, scale=scale, bias=bias[:, None])
