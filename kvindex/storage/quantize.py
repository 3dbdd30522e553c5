"""Quantization to 2, 4 or 8 bits in groups: codes of a vector, and a lowest value and a step each.

A vector of `n` numbers is cut into `⌈n/32⌉` groups of equal size, the last one filled up with its
last number. A number stands for `low + code · step`. `low` is rounded down and `step` up to
bfloat16, which has the range of float32, so that every number lies between codes: it is off by
half a step at most. Zeros have zero codes, `low` and `step`.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import pad

GROUP = 32
"""Numbers of a group at most (KIVI, arXiv 2402.02750: 32)."""

BITS = (2, 4, 8)
"""Bits that a code may have."""


def groups(count: int) -> tuple[int, int]:
    """How many groups a vector of `count` numbers has, and how many numbers a group."""
    number = -(-count // GROUP)
    return number, -(-count // number)


def code_bytes(count: int, bits: int) -> int:
    """Bytes of the codes of `count` numbers."""
    number, size = groups(count)
    return -(-number * size * bits // 8)


def quantize(numbers: Tensor, bits: int) -> tuple[Tensor, Tensor]:
    """Codes uint8 `[..., code_bytes(n, bits)]` and scales bfloat16 `[..., groups, 2]`: low, step.

    numbers: finite, `[..., n]`; bits: one of `BITS`. The first code is in a byte's lowest bits.
    """
    number, size = groups(numbers.shape[-1])
    spare = number * size - numbers.shape[-1]
    last = numbers[..., -1:].expand(*numbers.shape[:-1], spare)
    grouped = torch.cat([numbers, last], dim=-1).float() + 0.0  # -0 is 0
    grouped = grouped.reshape(*grouped.shape[:-1], number, size)
    levels = 2**bits - 1
    low = _rounded(grouped.amin(-1, keepdim=True), float("-inf"))
    step = _rounded(grouped.amax(-1, keepdim=True) / levels - low.float() / levels, float("inf"))
    codes = (grouped / step.float() - low.float() / step.float()).round().clamp(0, levels)
    codes = torch.where(step > 0, codes, 0)  # of equal numbers
    return _packed(codes.flatten(-2).to(torch.uint8), bits), torch.cat([low, step], dim=-1)


def dequantize(codes: Tensor, scales: Tensor, count: int, bits: int) -> Tensor:
    """The `count` numbers that codes and scales of `quantize` stand for, float32 `[..., count]`."""
    number, size = groups(count)
    shifts = torch.arange(0, 8, bits, device=codes.device, dtype=torch.uint8)
    unpacked = (codes[..., None] >> shifts & (2**bits - 1)).flatten(-2)[..., : number * size]
    low, step = scales[..., :1].float(), scales[..., 1:].float()
    largest = torch.finfo(torch.float32).max  # which the highest code may be above
    unpacked = unpacked.reshape(*unpacked.shape[:-1], number, size)
    grouped = torch.addcmul(low, unpacked.float(), step)
    return grouped.clamp(-largest, largest).flatten(-2)[..., :count]


def _rounded(numbers: Tensor, towards: float) -> Tensor:
    """Numbers float32 as finite bfloat16, rounded towards an infinity."""
    near, largest = numbers.to(torch.bfloat16), torch.finfo(torch.bfloat16).max
    limit = torch.full_like(near, towards)
    short = near.float() > numbers if towards < 0 else near.float() < numbers
    return torch.where(short, near.nextafter(limit), near).clamp(-largest, largest)


def _packed(codes: Tensor, bits: int) -> Tensor:
    """Codes uint8 `[..., n]`, side by side in bytes."""
    per = 8 // bits
    codes = pad(codes, (0, -codes.shape[-1] % per))
    codes = codes.reshape(*codes.shape[:-1], codes.shape[-1] // per, per)
    shifts = torch.arange(0, 8, bits, device=codes.device, dtype=torch.uint8)
    return (codes << shifts).sum(-1, dtype=torch.uint8)
