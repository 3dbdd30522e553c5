"""Quantization to 2, 4 or 8 bits in groups, each with a minimum (`low`) and a step size (`step`).

A vector of `n` numbers is divided into `⌈n/32⌉` groups of equal size. If the last group is not
full, its last number is repeated. A code stands for the number `low + code · step`.

`low` is rounded down to bfloat16, which has the range of float32, and `step` is rounded up. So the
codes cover all numbers of the group, and the error is at most half a step. If all numbers are zero,
then codes, `low` and `step` are zero.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import pad

GROUP = 32
"""Largest number of numbers in a group (KIVI, arXiv 2402.02750, uses 32)."""

BITS = (2, 4, 8)
"""Allowed numbers of bits of a code."""


def groups(count: int) -> tuple[int, int]:
    """Divide `count` numbers into groups for quantization. Return the number of groups and their
    size."""
    number = -(-count // GROUP)
    return number, -(-count // number)


def code_bytes(count: int, bits: int) -> int:
    """Return the number of bytes for the codes of `count` numbers."""
    number, size = groups(count)
    return -(-number * size * bits // 8)


def quantize(numbers: Tensor, bits: int) -> tuple[Tensor, Tensor]:
    """Quantize finite numbers in groups.

    Args:
        numbers: `[..., n]`.
        bits: Bits per number, one of `BITS`.

    Returns:
        Codes uint8 `[..., code_bytes(n, bits)]`, where the first number is in the lowest bits of a
        byte; and bfloat16 `[..., groups, 2]`, `low` and `step` of each group.
    """
    number, size = groups(numbers.shape[-1])
    spare = number * size - numbers.shape[-1]
    last = numbers[..., -1:].expand(*numbers.shape[:-1], spare)
    grouped = torch.cat([numbers, last], dim=-1).float() + 0.0  # changes -0 to 0
    grouped = grouped.reshape(*grouped.shape[:-1], number, size)
    levels = 2**bits - 1
    low = _rounded(grouped.amin(-1, keepdim=True), float("-inf"))
    step = _rounded(grouped.amax(-1, keepdim=True) / levels - low.float() / levels, float("inf"))
    codes = (grouped / step.float() - low.float() / step.float()).round().clamp(0, levels)
    codes = torch.where(step > 0, codes, 0)  # step is 0 if all numbers are equal
    return _packed(codes.flatten(-2).to(torch.uint8), bits), torch.cat([low, step], dim=-1)


def dequantize(codes: Tensor, scales: Tensor, count: int, bits: int) -> Tensor:
    """Convert codes and scales from `quantize` back to `count` numbers, float32."""
    number, size = groups(count)
    shifts = torch.arange(0, 8, bits, device=codes.device, dtype=torch.uint8)
    unpacked = (codes[..., None] >> shifts & (2**bits - 1)).flatten(-2)[..., : number * size]
    low, step = scales[..., :1].float(), scales[..., 1:].float()
    largest = torch.finfo(torch.float32).max  # `low + code * step` may be infinite in float32
    unpacked = unpacked.reshape(*unpacked.shape[:-1], number, size)
    grouped = torch.addcmul(low, unpacked.float(), step)
    return grouped.clamp(-largest, largest).flatten(-2)[..., :count]


def _rounded(numbers: Tensor, towards: float) -> Tensor:
    """Round float32 numbers to finite bfloat16, in the direction of `towards`."""
    near, largest = numbers.to(torch.bfloat16), torch.finfo(torch.bfloat16).max
    limit = torch.full_like(near, towards)
    short = near.float() > numbers if towards < 0 else near.float() < numbers
    return torch.where(short, near.nextafter(limit), near).clamp(-largest, largest)


def _packed(codes: Tensor, bits: int) -> Tensor:
    """Pack codes of `bits` bits, uint8 `[..., n]`, into bytes."""
    per = 8 // bits
    codes = pad(codes, (0, -codes.shape[-1] % per))
    codes = codes.reshape(*codes.shape[:-1], codes.shape[-1] // per, per)
    shifts = torch.arange(0, 8, bits, device=codes.device, dtype=torch.uint8)
    return (codes << shifts).sum(-1, dtype=torch.uint8)
