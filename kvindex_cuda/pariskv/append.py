"""What `ParisKV.append` does with keys on a GPU: two kernels, and keys come from memory once."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from kvindex_cuda.memory.code_blocks import Fill
from kvindex_cuda.memory.layout import BLOCK
from kvindex_cuda.ops.learn import answer, flags_of, shared_bytes, windows
from kvindex_cuda.pariskv.encode import WIDEST, Encoder, Fresh
from kvindex_cuda.runtime.arguments import CODES, contiguous_rows, of_type, strides, wide
from kvindex_cuda.runtime.constants import LEARN_THREADS
from kvindex_cuda.runtime.launch import launch


@dataclass(frozen=True)
class Begun:
    """What is learned once keys are appended and, of some of it, coded.

    learned: `centers`, `known` and `weight_scale` as `kvindex.ops.learn` gives them, but for
    `fresh`: segments whose centers, and whether they have one, come with their codes.
    """

    learned: dict[str, Tensor]
    fresh: Fresh


class Writer:
    """Learns of keys and encodes them, for a `ParisKV` whose codes lie in `CodeBlocks`.

    Codes are those of `ParisKV._encode` but for rounding (`Encoder`).
    """

    def __init__(self, index: Any) -> None:
        self._encode = Encoder(index._fused.codes.layout, index._rotation, index._levels)
        self._centered = bool(index.config.center)
        self._room: Tensor | None = None  # for centers, bfloat16 [B, G, capacity, D]
        self._unread = torch.zeros(1, dtype=torch.int32, device=index.geometry.device)

    def learn(
        self,
        keys: Tensor,
        valid: Tensor | None,
        learned: Mapping[str, Tensor],
        *,
        start: int,
        wrong: Tensor | None = None,
    ) -> Begun:
        """What keys `[B, G, N, D]` teach before they are coded: a weight_scale, centers of edges.

        wrong: int32 of one element, set to 1, once the keys are coded, where a valid one is not
        finite; or None.

        A segment is at an edge where the keys do not hold it whole, where it has been begun
        before, and where one that has only begun leans on it. Others are learned by `codes`.
        `learned` stays as it is, but for the centers of segments that no valid key has begun,
        which nobody reads: centers grow in place. Raises ValueError for wrong dtypes or shapes.
        """
        B, G, N, D = of_type("keys", keys, *CODES).shape
        given, flags = contiguous_rows(keys, 1), flags_of(valid, B, N)
        before, begin = 0, start // BLOCK
        stop = -(-(start + N) // BLOCK)
        old = held = centers = known = None
        if self._centered:
            old, held = learned.get("centers"), learned.get("known")
            before = 0 if old is None else old.shape[2]
            stop = max(stop, before)
            centers = self._centers(old, (B, G, stop, D), keys.device)
            if old is not None and old.data_ptr() != centers.data_ptr():
                old, begin = old.contiguous(), 0  # the kernel copies them
            held = None if held is None else held.contiguous()
            known = torch.empty((B, stop), dtype=torch.bool, device=keys.device)
        weight_scale = answer(keys)
        # made before `learn`, after which `encode` is to come at once
        taken = torch.zeros_like(self._unread) if N > BLOCK else None
        leave = max(-(-start // BLOCK), before)
        left = max((start + N) // BLOCK - ((start + N) % BLOCK > 0) - leave, 0)
        launch(
            "append/learn.cu",
            "learn",
            (stop - begin - left + windows(N), G, B),
            (LEARN_THREADS,),
            arguments=dict(
                keys=given,
                valid=flags,
                old_centers=old,
                old_known=held,
                centers=centers,
                known=known,
                old_scale=learned.get("weight_scale"),
                weight_scale=weight_scale,
                wrong=wrong,
                count=N,
                dim=D,
                before=before,
                old_row=_row(old),
                row=_row(centers),
                start=start,
                every=BLOCK,
                begin=begin,
                segments=stop,
                skip=leave,
                skipped=left,
                **strides("keys", given, "batch", "head", "token"),
                **strides("valid", flags, "batch"),
            ),
            shared_bytes=shared_bytes(D),
            DTYPE=CODES[keys.dtype],
            WIDE=int(wide(given)),
        )
        wrong = self._unread if wrong is None else wrong
        found = {"weight_scale": weight_scale}
        if centers is not None and known is not None:
            found |= {"centers": centers[:, :, :stop], "known": known}
        return Begun(found, Fresh(leave, left, known, wrong, taken))

    def codes(self, keys: Tensor, valid: Tensor | None, begun: Begun, *, start: int) -> Fill:
        """Codes of keys `[B, G, N, D]`, for `CodeBlocks` to have written, and the rest learned."""
        learned = begun.learned
        given = keys, learned.get("centers"), learned["weight_scale"]
        write = partial(self._encode, *given, start=start, valid=valid, fresh=begun.fresh)
        return Fill(keys.shape[0], keys.shape[2], write)

    def _centers(self, old: Tensor | None, shape: tuple[int, ...], device: torch.device) -> Tensor:
        """Room for centers of a shape: where the old ones lie, or, too small, twice as much."""
        (B, G, S, D), room = shape, self._room
        held = room is not None and old is not None and old.data_ptr() == room.data_ptr()
        if held and room is not None and room.shape[2] >= S:
            return room
        capacity = max(S, 0 if old is None else 2 * old.shape[2])
        self._room = torch.empty((B, G, capacity, D), dtype=torch.bfloat16, device=device)
        return self._room


def writer(index: Any) -> Writer | None:
    """For a `ParisKV` whose kernels are fused, where `encode.cu` serves it."""
    served = index._fused and index.config.block == "key"
    return Writer(index) if served and index.geometry.head_dim <= WIDEST else None


def _row(centers: Tensor | None) -> int:
    """Segments from one head's centers to the next one's."""
    return 0 if centers is None else centers.stride(1) // centers.shape[3]
