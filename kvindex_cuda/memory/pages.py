"""Describes where an inference engine such as vLLM stores the codes and rows of all layers in its
pages."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from kvindex_cuda.memory.layout import BLOCK, Layout


@dataclass(frozen=True)
class PagedLayout(Layout):
    """Layout of the codes in an engine's pages, where the codes of several KV heads need not be
    contiguous."""

    record_bytes: int

    @cached_property
    def head_bytes(self) -> int:
        """Distance in bytes between the codes of two KV heads in a page."""
        return self.record_bytes


@dataclass(frozen=True)
class Pages:
    """The caches of an inference engine: the codes and the rows of each layer, in pages. All layers
    have the same strides.

    Args:
        codes: Codes of each layer, uint8 `[pages, G, parts, bytes]`. A page has `parts` records for
            each KV head, and a record contains the codes of 256 tokens.
        rows: Rows of each layer, `[pages, G, tokens, 2 D]`, the key before the value; or the keys
            alone, `[pages, G, tokens, D]`, if values are a part of their keys. Each row must be
            contiguous; other strides are arbitrary.
        places: Addresses by which kernels access the rows of each layer, if rows are in pinned host
            memory.
        scales: If rows are uint8, for numbers in FP8 (e4m3): scale of the keys and scale of the
            values of each layer, float32 of one element on the device. Kernels read them in each
            step.

    Raises:
        ValueError: Layers differ, or shapes do not fit.
    """

    codes: Sequence[Tensor]
    rows: Sequence[Tensor]
    places: Sequence[int] | None = None
    scales: Sequence[tuple[Tensor, Tensor]] | None = None

    def __post_init__(self) -> None:
        for name, parts in (("codes", self.codes), ("rows", self.rows)):
            found = {(part.shape, part.stride(), part.dtype, part.device) for part in parts}
            if len(found) != 1:
                raise ValueError(
                    f"{name}: got tensors with {len(found)} different combinations of shape, "
                    "strides, dtype and device; the tensors of all layers must agree in these"
                )
        codes, rows = self.codes[0], self.rows[0]
        tokens = rows.shape[2]
        if tokens % BLOCK or codes.shape[:3] != (*rows.shape[:2], tokens // BLOCK):
            raise ValueError(
                f"pages: got codes {tuple(codes.shape)} and rows {tuple(rows.shape)}, allowed are "
                f"[pages, G, tokens / {BLOCK}, bytes] and [pages, G, tokens, 2 D]"
            )
        if rows.stride(3) != 1 or codes.stride(3) != 1:
            raise ValueError(
                f"pages: got rows with strides {rows.stride()} and codes with strides "
                f"{codes.stride()}; the last dimension must be contiguous (stride 1)"
            )
        if (rows.dtype == torch.uint8) is not (self.scales is not None):
            raise ValueError(
                f"scales: got {'none' if self.scales is None else 'scales'} for rows of "
                f"{rows.dtype}; rows in FP8 are uint8 and have scales"
            )
        if self.scales is not None and len(self.scales) != len(self.codes):
            raise ValueError(
                f"scales: got those of {len(self.scales)} layers, allowed are those of all "
                f"{len(self.codes)} layers"
            )
        for scale in (one for pair in self.scales or () for one in pair):
            if scale.numel() != 1 or scale.dtype != torch.float32 or scale.device != codes.device:
                raise ValueError(
                    f"scales: got {scale.numel()} numbers of {scale.dtype} on {scale.device}, "
                    f"allowed is one of torch.float32 on {codes.device}"
                )
        if self.places is None and rows.device != codes.device:
            raise ValueError(f"rows: got rows on {rows.device}, but codes are on {codes.device}")
        size = rows.element_size()
        places = [*(part.data_ptr() for part in self.codes), *self.row_places]
        steps = [step * size for step in rows.stride()[:3]] + [*codes.stride()[:3]]
        if any(step % 16 for step in steps) or any(place % 16 for place in places):
            raise ValueError(
                f"pages: got strides of {steps} bytes; addresses and strides must be multiples "
                "of 16 bytes"
            )

    @property
    def tokens(self) -> int:
        """Number of tokens per page."""
        return self.rows[0].shape[2]

    @property
    def row_places(self) -> Sequence[int]:
        """Address by which kernels access the rows of each layer."""
        return [rows.data_ptr() for rows in self.rows] if self.places is None else self.places

    @cached_property
    def bases(self) -> Tensor:
        """Addresses of the codes and of the rows of each layer, int64 `[layers, 2]` on the
        device."""
        pairs = zip(self.codes, self.row_places, strict=True)
        places = [[codes.data_ptr(), rows] for codes, rows in pairs]
        return torch.tensor(places, dtype=torch.int64, device=self.codes[0].device)

    @cached_property
    def key_scales(self) -> Tensor | None:
        """Addresses of the scales of each layer's keys, int64 `[layers]` on the device. None if
        rows are not in FP8."""
        if self.scales is None:
            return None
        places = [key.data_ptr() for key, _ in self.scales]
        return torch.tensor(places, dtype=torch.int64, device=self.codes[0].device)

    @cached_property
    def strides(self) -> dict[str, int]:
        """Strides in bytes of the tensors of codes and of rows (keys and values), as arguments of
        kernels: a dictionary from the name of a parameter to its value."""
        codes, rows = self.codes[0], self.rows[0]
        size, part = rows.element_size(), codes.stride(2) if codes.shape[2] > 1 else 0
        return dict(
            codes_page=codes.stride(0),
            codes_part=part,
            rows_page=rows.stride(0) * size,
            rows_part=BLOCK * rows.stride(2) * size,
        )
