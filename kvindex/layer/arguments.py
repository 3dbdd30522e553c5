"""Checks of the tensors passed to an attention layer: their shapes, dtypes and devices."""

from __future__ import annotations

import torch
from torch import Tensor

from kvindex.core import check
from kvindex.core.capability import capability
from kvindex.core.geometry import Geometry
from kvindex.core.protocol import KVIndex, LimitsError, Rows

AUTO_ROWS = 1024
"""Largest number of rows per KV head that a search retrieves with `k="auto"`."""

DEFAULT_K = 256
"""Number of rows that a decode step retrieves for each KV head if the caller gives none
(docs/decisions/0059-256-rows-by-default.md)."""

AUTO_ERROR = 0.1
"""Relative error of a layer's output that a search may cause with `k="auto"`."""


def checked_rows(
    k: object, coverage: float | None, error: float | None, index: KVIndex
) -> tuple[int, float | None]:
    """Check how many rows a layer shall retrieve.

    Args:
        k: Number of rows, or "auto".
        coverage: Fraction of attention weight to reach, or None.
        error: Relative error of the layer's output, or None.
        index: The layer's index.

    Returns:
        The largest number of rows, and the relative error, or None if all searches retrieve as many
        rows.

    Raises:
        ValueError: An argument is out of range, or they do not go together, or the index cannot
            choose the number of rows.
    """
    automatic = isinstance(k, str) and k == "auto"
    if isinstance(k, str) and not automatic:
        raise ValueError(f"k: got {k!r}, allowed is a number of at least 1, or 'auto'")
    most = AUTO_ROWS if automatic else check.wanted_rows(k)
    if error is None and automatic:
        error = AUTO_ERROR
    if error is None:
        return most, None
    asked = "k: got 'auto'" if automatic else f"error: got {error}"
    error = check.positive("error", error)
    if coverage is not None:
        raise ValueError(
            f"{asked} together with coverage={coverage}; pass one of the two, because both choose "
            "the number of rows"
        )
    if capability(index, LimitsError) is None:
        raise ValueError(
            f"{asked}, but {type(index).__name__} with these options cannot predict the error of "
            "fewer rows; pass a number for k and no error, or the index 'pariskv', which samples "
            "rows by default"
        )
    return most, error


def check_tokens(g: Geometry, batch: int, queries: Tensor, keys: Tensor, values: Tensor) -> None:
    """Check the shapes, dtypes and devices of queries, keys and values of the same `T` tokens.

    Args:
        g: The layer's geometry.
        batch: The required batch size `B`, or 0 to allow any.
        queries: `[B, H, T, D]`.
        keys: `[B, G, T, D]`.
        values: `[B, G, T, Dv]`.

    Raises:
        ValueError: A shape, dtype or device does not fit.
        TypeError: An argument is not a tensor.
    """
    check_new_rows(g, batch, keys, values)
    shape: dict[str, int | None] = {"B": keys.shape[0], "H": g.q_heads, "T": keys.shape[2]}
    check.tensor("queries", queries, {**shape, "D": g.head_dim}, g.dtype, g.device)
    check.at_least("queries.shape[2] (tokens)", queries.shape[2], 1)


def check_new_rows(g: Geometry, batch: int, keys: Tensor, values: Tensor) -> None:
    """Check the shapes, dtypes and devices of new keys and values.

    Args:
        g: The layer's geometry.
        batch: The required batch size `B`, or 0 to allow any.
        keys: `[B, G, T, D]`.
        values: `[B, G, T, Dv]`.

    Raises:
        ValueError: A shape, dtype or device does not fit.
        TypeError: An argument is not a tensor.
    """
    shape = {"B": batch or None, "G": g.kv_heads, "T": None, "D": g.head_dim}
    check.tensor("keys", keys, shape, g.dtype, g.device)
    shape = {**shape, "B": keys.shape[0], "T": keys.shape[2]}
    check.tensor("values", values, {**shape, "D": g.value_dim}, g.dtype, g.device)


def check_computed(
    g: Geometry, keys: Tensor, queries: Tensor | None, outputs: Tensor | None
) -> None:
    """Check queries `[B, H, T, D]` and attention outputs `[B, H, T, Dv]` of tokens with these keys.

    Each may be None. Raise ValueError or TypeError as `check_tokens` does.
    """
    shape: dict[str, int | None] = {"B": keys.shape[0], "H": g.q_heads, "T": keys.shape[2]}
    if queries is not None:
        check.tensor("queries", queries, {**shape, "D": g.head_dim}, g.dtype, g.device)
    if outputs is not None:
        check.tensor("outputs", outputs, {**shape, "D": g.value_dim}, g.dtype, g.device)


def check_valid(valid: Tensor, keys: Tensor) -> None:
    """Raise TypeError or ValueError unless `valid` is a bool tensor `[B, T]`."""
    sizes: dict[str, int | None] = {"B": keys.shape[0], "T": keys.shape[2]}
    check.tensor("valid", valid, sizes, torch.bool, keys.device)


def check_finite(name: str, tensor: Tensor) -> None:
    """Raise ValueError if a CPU tensor contains NaN or infinite values.

    A CUDA tensor is not checked, because reading the result would make the host wait for the GPU.
    """
    if tensor.device.type != "cuda":
        check.finite(name, tensor)


def check_queries(g: Geometry, batch: int, queries: Tensor, most: int) -> None:
    """Raise TypeError or ValueError unless queries are `[B, H, T, D]` with `T` from 1 to `most`."""
    shape = {"B": batch or None, "H": g.q_heads, "T": None, "D": g.head_dim}
    check.tensor("queries", queries, shape, g.dtype, g.device)
    T = queries.shape[2]
    if most == 0:
        raise ValueError(
            f"queries: got {T} tokens for an empty layer; append tokens first, with step() or "
            "append()"
        )
    if not 1 <= T <= most:
        raise ValueError(f"queries.shape[2] (tokens): got {T}, allowed is 1 to {most}")


def check_rows(g: Geometry, batch: int, rows: Rows, length: int) -> None:
    """Raise TypeError or ValueError unless `rows` has the keys and values of `length` tokens."""
    shape = {"B": batch or None, "G": g.kv_heads, "N": length}
    check.tensor("rows.keys", rows.keys, {**shape, "D": g.head_dim}, g.dtype, g.device)
    shape["B"] = len(rows.keys)
    check.tensor("rows.values", rows.values, {**shape, "D": g.value_dim}, g.dtype, g.device)


def check_bias(bias: Tensor, queries: Tensor, length: int) -> None:
    """Raise TypeError or ValueError unless `bias` is a float tensor `[B, H, T, N]`.

    `B`, `H` and `T` are taken from queries `[B, H, T, D]`; `N` is `length`.
    """
    shape = {"B": queries.shape[0], "H": queries.shape[1], "T": queries.shape[2], "N": length}
    check.tensor("bias", bias, dict(shape), device=queries.device)
    if not bias.is_floating_point():
        raise ValueError(f"bias: got dtype {bias.dtype}, allowed is a floating-point dtype")


def check_visible(visible: Tensor, queries: Tensor, length: int) -> None:
    """Check a mask of the tokens that each query attends to.

    Args:
        visible: Bool `[B, T, N]`.
        queries: `[B, H, T, D]`.
        length: `N`, the number of past and new tokens together.

    Raises:
        ValueError: The shape, dtype or device does not fit.
        TypeError: `visible` is not a tensor.
    """
    shape: dict[str, int | None] = {"B": queries.shape[0], "T": queries.shape[2], "N": length}
    check.tensor("visible", visible, shape, torch.bool, queries.device)


def check_sparse(g: Geometry) -> None:
    """Raise ValueError if a layer of this geometry does not support sparse attention of prompts."""
    if g.softcap is not None:
        raise ValueError(
            f"prefill: got 'sparse' for a layer with softcap={g.softcap}, allowed is 'dense'"
        )
    if g.value_in_key:
        raise ValueError(
            "prefill: got 'sparse' for a layer with latent attention (MLA), allowed is 'dense'"
        )


def check_plain(
    valid: Tensor | None, bias: Tensor | None, sinks: Tensor | None, visible: Tensor | None
) -> None:
    """Raise ValueError if sparse attention does not support a chunk of a prompt.

    The arguments are those of `AttentionLayer.step`.
    """
    given = {"valid": valid, "bias": bias, "sink_logits": sinks, "visible": visible}
    what = {"valid": "padding tokens", "bias": "a bias", "sink_logits": "learned sinks"}
    for name, tensor in given.items():
        if tensor is not None and not (name == "valid" and bool(tensor.all())):
            raise ValueError(
                f"{name}: got {what.get(name, 'a mask')}, which prefill='sparse' does not support; "
                "pass prefill='dense', or prompts without padding one at a time"
            )


def checked_sinks(sink_logits: Tensor | None, queries: Tensor) -> Tensor | None:
    """Return the logits of learned sinks as float32 `[B, H, T]`, or None if `sink_logits` is None.

    Args:
        sink_logits: `[H]` or `[B, H, T]`, or None.
        queries: `[B, H, T, D]`.

    Raises:
        ValueError: The shape, dtype or device does not fit.
        TypeError: `sink_logits` is not a tensor.
    """
    if sink_logits is None:
        return None
    B, H, T, _ = queries.shape
    alone = isinstance(sink_logits, Tensor) and sink_logits.ndim == 1
    shape: dict[str, int | None] = {"H": H} if alone else {"B": B, "H": H, "T": T}
    check.tensor("sink_logits", sink_logits, shape, device=queries.device)
    if not sink_logits.is_floating_point():
        dtype = sink_logits.dtype
        raise ValueError(f"sink_logits: got dtype {dtype}, allowed is a floating-point dtype")
    sinks = sink_logits.detach().float()
    return sinks[None, :, None].expand(B, H, T) if alone else sinks
