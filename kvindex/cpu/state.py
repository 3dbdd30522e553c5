"""Memory addresses of an index's codes and rows, for the kernels that read them."""

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
    """Return the memory address of each `tensor[b, g]` of a tensor `[B, G, …]`, int64 `[B·G]`."""
    batch, heads = places(*tensor.shape[:2])
    steps = batch * tensor.stride(0) + heads * tensor.stride(1)
    at: np.ndarray = tensor.data_ptr() + steps * tensor.element_size()
    return at


@lru_cache
def places(batch: int, heads: int) -> tuple[np.ndarray, np.ndarray]:
    """Return the indices `b` and `g` of all `B·G` pairs of sequence and KV head, int64 `[B·G]`."""
    pairs = np.indices((batch, heads), dtype=np.int64).reshape(2, -1)
    return pairs[0], pairs[1]


def compact(tensor: Tensor) -> Tensor:
    """Return the tensor `[B, G, N, …]`, with the axis `N` and all later axes contiguous in memory.

    The tensor itself is returned if these axes are contiguous already, otherwise a copy.
    """
    shape = tensor.shape[2:]
    if tensor.stride()[2:] == tuple(prod(shape[i + 1 :]) for i in range(len(shape))):
        return tensor
    return tensor.contiguous()


@dataclass(frozen=True)
class State:
    """Addresses of an index's codes and rows, and statistics that the kernels read.

    A group is one KV head of one sequence. `signs`, `magnitudes`, `weights`, `fractions` and
    `centers` are addresses of codes, int64 `[2, B·G]`. For group `p`, element `[0, p]` is the
    address of the codes in the full blocks. Element `[1, p]` is the address of those in the last,
    partly filled block; it is 0 if there is no such block.

    Attributes:
        valid: Addresses of the masks of valid tokens, int64 `[B·G]`; 0 if all tokens are valid.
        length: Number of tokens.
        full: Number of tokens in full blocks.
        scales: For each group the smallest power of two above the weights of all keys (weight
            scale), float64 `[B·G]`.
        factors: Integer by which the coarse score (vote) of a key is multiplied, indexed by the
            upper byte of the key's logarithmic weight, int32 `[B·G, 256]`.
        regression: Matrices of the sign regression, float32 `[B·G, D, D]`, or `[B·G, 0, 0]` without
            a regression.
        rows: Address of each group's first row in the store, int64 `[B·G]`.
        row_bytes: Bytes of a row.
        held: Tensors to which the addresses belong. They are referenced here so that their memory
            is not freed.
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
        """Cache of candidate counts: `k` -> number of candidates of each KV head, int64 `[B·G]`.

        The first search for `k` rows adds the entry for this `k`.
        """
        return {}

    @staticmethod
    def of(contents: Contents, codes: BlockColumns, heads: int, factors: Tensor | None) -> State:
        """Collect the addresses of an index's codes and rows.

        Args:
            contents: Contents of the index.
            codes: Codes of full blocks.
            heads: Number of KV heads.
            factors: Result of `ops.codes.log_factors`. None if the coarse scores (votes) of keys
                do not depend on the weights of the keys, as with `coarse="tiered_votes"`.
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
    """Return the matrices that predict keys from their sign bits, float32 `[B·G, D, D]`.

    If the index does not use such matrices, the result has the shape `[B·G, 0, 0]`.
    """
    if contents.regression is None:
        return np.empty((groups, 0, 0), np.float32)
    return contents.regression().float().contiguous().flatten(0, 1).numpy()


def weighed(parts: list[Codes], groups: int, factors: Tensor) -> tuple[np.ndarray, np.ndarray]:
    """Compute `State.scales` and `State.factors`.

    The factors are integers that are proportional to the possible weights of a key. A search
    multiplies the coarse score (vote) of a key by the factor of the key's weight.
    """
    some = [part["weights"].flatten(2).amax(2) for part in parts if part]
    largest = torch.stack(some).amax(0).flatten()
    scale = coding.weight_scale(largest)
    held = torch.arange(256).minimum(largest[:, None]).to(torch.uint8)  # no stored weight is larger
    by_byte = coding.factors(held[None, ..., None], scale[None], factors)
    return scale.double().numpy(), by_byte[0, ..., 0].numpy()


@dataclass(frozen=True)
class ResidentState:
    """Addresses of the rows in sink and window (resident rows) and of their masks, int64 `[B·G]`.

    `made_of` references the tensors to which the addresses belong, so that their memory is not
    freed.
    """

    rows: np.ndarray
    row_bytes: int
    mask: np.ndarray
    made_of: tuple[Tensor, Tensor]

    @staticmethod
    def of(resident: ResidentRows, before: ResidentState | None) -> ResidentState:
        """Return the addresses of the tensors in `resident`.

        `before` is the result of the previous call, or None. If `resident` still contains the same
        tensor objects as in that call, `before` is returned.
        """
        rows, mask = resident.rows, resident.mask
        if before is not None and before.made_of[0] is rows and before.made_of[1] is mask:
            return before
        wide = rows.shape[-1] * rows.element_size()
        flags = mask[:, None].expand(-1, rows.shape[1], -1)
        return ResidentState(addresses(rows), wide, addresses(flags), (rows, mask))
