"""Shapes of attention layers with which the checks run, and random tensors of these shapes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any, TypeAlias

import torch
from torch import Tensor

from kvindex.bases.index import BaseIndex
from kvindex.core.config import split_spec
from kvindex.core.protocol import KVIndex
from kvindex.registry import create, get

Tokens: TypeAlias = tuple[Tensor, Tensor]
"""Keys `[B, G, N, D]` and values `[B, G, N, Dv]`."""


@dataclass(frozen=True)
class Case:
    """The shape of an attention layer in a test. Its methods create indexes and random tensors of
    this shape."""

    q_heads: int = 2
    kv_heads: int = 2
    head_dim: int = 16
    value_dim: int = 16
    dtype: torch.dtype = torch.float32
    softcap: float | None = None
    device: str = "cpu"
    batch: int = 1
    value_in_key: bool = False

    def __str__(self) -> str:
        dtype = str(self.dtype).removeprefix("torch.")
        shape = f"H{self.q_heads}-G{self.kv_heads}-D{self.head_dim}-Dv{self.value_dim}"
        cap = "" if self.softcap is None else "-softcap"
        device = "" if self.device == "cpu" else f"-{self.device}"
        in_key = "-value_in_key" if self.value_in_key else ""
        return f"{dtype}-B{self.batch}-{shape}{cap}{in_key}{device}"

    def geometry(self) -> dict[str, Any]:
        """Return the arguments of `kvindex.create` for an index of this shape, without `rope`."""
        return {key: value for key, value in asdict(self).items() if key != "batch"}

    def index(self, name: str, **options: Any) -> KVIndex:
        """Create an index of this shape with `kvindex.create(name, **options)`."""
        geometry = self.geometry()
        if get(split_spec(name.partition("+")[0])[0]).needs_rope:
            geometry["rope"] = rope(self.head_dim, self.device)
        # use the reference implementation in PyTorch, even on a GPU, unless options say otherwise
        return create(name, **{**geometry, "backend": "torch", **options})

    def made(self, make: Callable[..., BaseIndex], **options: object) -> BaseIndex:
        """Create an index of this shape by calling `make`, a class or a function."""
        geometry = self.geometry() | {"rope": rope(self.head_dim, self.device)}
        return make(**{**geometry, **options})

    def tensor(self, seed: int, *shape: int) -> Tensor:
        """Return normally distributed numbers, which depend only on the seed and the shape."""
        generator = torch.Generator().manual_seed(seed)
        return torch.randn(shape, generator=generator).to(self.device, self.dtype)

    def tokens(self, count: int, seed: int = 0, batch: int | None = None) -> Tokens:
        """Return random keys `[B, G, count, D]` and values `[B, G, count, Dv]`."""
        batch = self.batch if batch is None else batch
        keys = self.tensor(2 * seed, batch, self.kv_heads, count, self.head_dim)
        values = self.tensor(2 * seed + 1, batch, self.kv_heads, count, self.value_dim)
        return self.of_keys(keys, values)

    def of_keys(self, keys: Tensor, values: Tensor) -> Tokens:
        """Return the keys and their values.

        With `value_in_key`, the values are the first `value_dim` coordinates of the keys.
        """
        return keys, keys[..., : self.value_dim].clone() if self.value_in_key else values

    def queries(self, seed: int = 0, batch: int | None = None) -> Tensor:
        """Return random queries `[B, H, D]`."""
        batch = self.batch if batch is None else batch
        return self.tensor(10_000 + seed, batch, self.q_heads, self.head_dim)


CASES = (
    Case(q_heads=2, kv_heads=2, head_dim=8, value_dim=8),
    Case(q_heads=3, kv_heads=1, head_dim=64, value_dim=24, batch=3),
    Case(q_heads=8, kv_heads=2, head_dim=80, value_dim=80, dtype=torch.float16, batch=2),
    Case(q_heads=3, kv_heads=3, head_dim=96, value_dim=128, dtype=torch.bfloat16, batch=2),
    Case(q_heads=6, kv_heads=2, head_dim=16, value_dim=8, softcap=1.0, batch=2),
    Case(q_heads=4, kv_heads=1, head_dim=24, value_dim=16, batch=2, value_in_key=True),
)
"""Shapes with which `check_index` runs every check."""


def rope(head_dim: int, device: str | torch.device = "cpu") -> Tensor:
    """Return the inverse frequencies `[D / 2]` of a rotary embedding with base 10,000."""
    return 10_000.0 ** -(torch.arange(0, head_dim, 2, device=device) / head_dim)


def left_padding(pads: list[int], count: int, device: str = "cpu") -> Tensor:
    """Return a mask, bool `[B, count]`: sequence `b` begins with `pads[b]` padding tokens."""
    return torch.arange(count, device=device) >= torch.tensor(pads, device=device)[:, None]


def part(tokens: Tokens, start: int, stop: int) -> Tokens:
    """Return keys and values of the tokens from position `start` to `stop`."""
    return tokens[0][:, :, start:stop], tokens[1][:, :, start:stop]


def join(*parts: Tokens) -> Tokens:
    """Concatenate keys and values along the token dimension."""
    keys, values = zip(*parts, strict=True)
    return torch.cat(keys, dim=2), torch.cat(values, dim=2)
