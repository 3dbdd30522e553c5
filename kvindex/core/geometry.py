"""`Geometry`: number of heads, dimensions, scale, dtype and device of an attention layer."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any

import torch
from torch import Tensor

from kvindex.core import check
from kvindex.core import rope as rotary

DTYPES = (torch.float32, torch.float16, torch.bfloat16)


@dataclass(frozen=True)
class Geometry:
    """The shapes, scale, dtype and device of one attention layer.

    Use `Geometry.of`, which checks the fields.

    Args:
        q_heads: Number of query heads, `H`, a multiple of `kv_heads`.
        kv_heads: Number of KV heads, `G`.
        head_dim: Dimension of keys and queries, `D`, a multiple of 8, because kernels read sign
            bits in bytes.
        value_dim: Dimension of values, `Dv`.
        scale: Factor on `q·k` before the softmax, from 2^-126 to 2^16.
        softcap: If given, logits become `softcap · tanh(logit / softcap)`; from 2^-126 to 2^64.
        rope: Inverse frequencies of the keys' rotary embedding, float `[F]` (`core/rope.py`), or
            None.
        dtype: Dtype of keys, values and queries: float32, float16 or bfloat16.
        device: Device of the codes and of the search.
        value_in_key: True if a value is the first `Dv` coordinates of its key, as in multi-head
            latent attention. Then only the key is stored.
    """

    q_heads: int
    kv_heads: int
    head_dim: int
    value_dim: int
    scale: float
    softcap: float | None
    rope: Tensor | None
    dtype: torch.dtype
    device: torch.device
    value_in_key: bool

    def options(self) -> dict[str, Any]:
        """Return the geometry as keyword arguments for the constructor of an index.

        Returns:
            The fields by name. `value_in_key` is left out if it is False. Older versions of
            kvindex did not have this field, so the result equals what they wrote into the folder
            of a saved index.
        """
        options = {part.name: getattr(self, part.name) for part in fields(self)}
        if not self.value_in_key:
            options.pop("value_in_key")
        return options

    @staticmethod
    def of(
        *,
        q_heads: int,
        kv_heads: int,
        head_dim: int,
        value_dim: int | None = None,
        scale: float | None = None,
        softcap: float | None = None,
        rope: Any = None,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
        value_in_key: bool = False,
    ) -> Geometry:
        """Create a geometry after checking its fields.

        Args:
            q_heads: Number of query heads, a multiple of `kv_heads`.
            kv_heads: Number of KV heads.
            head_dim: Dimension of keys and queries, a multiple of 8.
            value_dim: Dimension of values; None for `head_dim`.
            scale: Factor on `q·k` before the softmax; None for `head_dim**-0.5`.
            softcap: If given, logits become `softcap · tanh(logit / softcap)`.
            rope: Inverse frequencies of the keys' rotary embedding, float `[F]`, or None.
            dtype: Dtype of keys, values and queries.
            device: Device of the codes and of the search. "cuda" means the current CUDA device.
            value_in_key: True if a value is the first `value_dim` coordinates of its key.

        Raises:
            ValueError: A field is not allowed. The message names the argument, the value, and what
                is allowed.
            TypeError: `rope` is not a tensor.
        """
        value_dim = head_dim if value_dim is None else value_dim
        sizes = dict(q_heads=q_heads, kv_heads=kv_heads, head_dim=head_dim, value_dim=value_dim)
        for name, value in sizes.items():
            check.at_least(name, value, 1)
        if q_heads % kv_heads:
            raise ValueError(
                f"q_heads: got {q_heads}, allowed is a multiple of kv_heads = {kv_heads}"
            )
        if head_dim % 8:
            raise ValueError(f"head_dim: got {head_dim}, allowed is a multiple of 8")
        if value_in_key and value_dim >= head_dim:
            raise ValueError(
                f"value_in_key: got {value_in_key} with value_dim = {value_dim}, but a value can "
                f"be part of its key only if value_dim is less than head_dim = {head_dim}"
            )
        if dtype not in DTYPES:
            raise ValueError(f"dtype: got {dtype!r}, allowed is one of {list(DTYPES)}")
        scale = head_dim**-0.5 if scale is None else check.factor("scale", scale, check.SCALES)
        if softcap is not None:
            softcap = check.factor("softcap", softcap, check.SOFTCAPS)
        try:
            place = torch.empty(0, device=device).device  # "cuda" becomes "cuda:0"
        except (RuntimeError, AssertionError, TypeError) as error:
            reason = str(error).splitlines()[0]
            raise ValueError(
                f"device: got {device!r}, allowed is a device that torch can use here ({reason})"
            ) from error
        rope = rotary.checked(rope, head_dim, place)
        sized = q_heads, kv_heads, head_dim, value_dim, scale, softcap, rope, dtype, place
        return Geometry(*sized, value_in_key)

    @property
    def value_start(self) -> int:
        """Position of the value in a stored row: 0 if the value is part of the key, else
        `head_dim`.
        """
        return 0 if self.value_in_key else self.head_dim

    @property
    def group_size(self) -> int:
        """Number of query heads per KV head, `H / G`."""
        return self.q_heads // self.kv_heads
