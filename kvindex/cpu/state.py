"""What a step reads of an index: addresses of its codes and rows, of one group after the other."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from math import prod

import numpy as np
import torch
from torch import Tensor

from kvindex.core.lazy import lazy
from kvindex.core.protocol import Codes, Contents
from kvindex.core.resident import ResidentRows
from kvindex.ops import codes as coding
from kvindex.storage.columns import BlockColumns
from kvindex.storage.store import TensorStore

CODES = "signs", "magnitudes", "weights", "fractions", "centers"


def addresses(tensor: Tensor) -> np.ndarray:
    """Where each `[b, g]` of a tensor `[B, G, …]` begins, int64 `[B·G]`."""
    batch, heads = places(*tensor.shape[:2])
    steps = batch * tensor.stride(0) + heads * tensor.stride(1)
    at: np.ndarray = tensor.data_ptr() + steps * tensor.element_size()
    return at


@lru_cache
def places(batch: int, heads: int) -> tuple[np.ndarray, np.ndarray]:
    """`b` and `g` of each of `B·G` pairs, int64."""
    pairs = np.indices((batch, heads), dtype=np.int64).reshape(2, -1)
    return pairs[0], pairs[1]


def compact(tensor: Tensor) -> Tensor:
    """The tensor `[B, G, N, …]`, or a copy of it that has no gaps from `N` on."""
    shape = tensor.shape[2:]
    if tensor.stride()[2:] == tuple(prod(shape[i + 1 :]) for i in range(len(shape))):
        return tensor
    return tensor.contiguous()


@dataclass(frozen=True)
class State:
    """Addresses int64 `[2, B·G]`, of full blocks and of the open one; 0 where there is none.

    valid: addresses of flags `[B·G]`, or 0; full: tokens of full blocks; scales: of weights,
    float64 `[B·G]`; factors: by a weight's byte, int32 `[B·G, 256]`; regression: matrices
    of signs that vote together, float32 `[B·G, D, D]`, or of no rows; rows: addresses of
    the store's, int64 `[B·G]`, of `row_bytes` each; held: what the addresses are of, which must
    live as long.
    """

    signs: np.ndarray
    magnitudes: np.ndarray
    weights: np.ndarray
    fractions: np.ndarray
    centers: np.ndarray
    valid: np.ndarray
    length: int
    full: int
    scales: np.ndarray
    factors: np.ndarray
    regression: np.ndarray
    rows: np.ndarray
    row_bytes: int
    held: list[Tensor]

    @lazy
    def limits(self) -> dict[int, np.ndarray]:
        """Candidates of each group int64 `[B·G]`, by `k`: whoever asks first puts them there."""
        return {}

    @staticmethod
    def of(contents: Contents, codes: BlockColumns, heads: int, factors: Tensor | None) -> State:
        """That of what an index holds.

        factors: of `ops.codes.log_factors`, or None: nothing is weighed.
        """
        batch = len(contents.counts)
        full: Codes = {name: codes[name] for name in codes} if len(codes) else {}
        parts: list[Codes] = [
            {name: compact(part[name]) for name in CODES if name in part}
            for part in (full, contents.opened)
        ]
        none = np.zeros(batch * heads, np.int64)
        found = {
            name: np.stack([addresses(p[name]) if name in p else none for p in parts])
            for name in CODES
        }
        valid = none
        if contents.valid is not None:
            valid = addresses(contents.valid[:, None].expand(-1, heads, -1))
        scales, by_byte = np.zeros(batch * heads), np.zeros((batch * heads, 0), np.int32)
        if factors is not None:
            scales, by_byte = weighed(parts, batch * heads, factors)
        held = [tensor for part in parts for tensor in part.values()]
        rows, row_bytes = none, 0
        if isinstance(contents.rows, TensorStore):
            held.append(contents.rows.contiguous_rows())
            rows, row_bytes = addresses(held[-1]), contents.rows.row_bytes
        return State(
            **found,
            valid=valid,
            length=contents.length,
            full=len(codes),
            scales=scales,
            factors=by_byte,
            regression=regressions(contents, batch * heads),
            rows=rows,
            row_bytes=row_bytes,
            held=[*held, *([] if contents.valid is None else [contents.valid])],
        )


def regressions(contents: Contents, groups: int) -> np.ndarray:
    """`State.regression` of what an index holds."""
    if contents.regression is None:
        return np.empty((groups, 0, 0), np.float32)
    return contents.regression().float().contiguous().flatten(0, 1).numpy()


def weighed(parts: list[Codes], groups: int, factors: Tensor) -> tuple[np.ndarray, np.ndarray]:
    """Weight scales float64 `[B·G]`, and factors by weight int32 `[B·G, 256]`, as `ops.codes`."""
    some = [part["weights"].flatten(2).amax(2) for part in parts if part]
    largest = torch.stack(some).amax(0).flatten()
    scale = coding.weight_scale(largest)
    held = torch.arange(256).minimum(largest[:, None]).to(torch.uint8)  # none is larger
    by_byte = coding.factors(held[None, ..., None], scale[None], factors)
    return scale.double().numpy(), by_byte[0, ..., 0].numpy()


@dataclass(frozen=True)
class ResidentState:
    """Addresses int64 `[B·G]` of a buffer's rows and of their mask.

    made_of: those tensors, for as long as which it holds.
    """

    rows: np.ndarray
    row_bytes: int
    mask: np.ndarray
    made_of: tuple[Tensor, Tensor]

    @staticmethod
    def of(resident: ResidentRows, before: ResidentState | None) -> ResidentState:
        """That of `resident`: the one before, if it is of the same tensors."""
        rows, mask = resident.rows, resident.mask
        if before is not None and before.made_of[0] is rows and before.made_of[1] is mask:
            return before
        wide = rows.shape[-1] * rows.element_size()
        flags = mask[:, None].expand(-1, rows.shape[1], -1)
        return ResidentState(addresses(rows), wide, addresses(flags), (rows, mask))
