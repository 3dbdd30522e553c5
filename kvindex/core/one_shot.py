"""`OneShot`: all-reduce (sum) of small tensors over the GPUs of one host, in a single kernel.

Each GPU writes its tensor to memory that all GPUs of the group can access (torch's symmetric
memory), and reads the tensors of the other GPUs from there. The all-reduce of NCCL exchanges
messages instead, and for small tensors it spends most of its time waiting for them.
"""

from __future__ import annotations

import warnings

import torch
from torch import Tensor

from kvindex.core.ranks import Ranks

MOST_BYTES = 2**16
"""Bytes of the largest tensor that `sum` supports. NCCL is faster for larger tensors, because here
each rank reads the whole tensors of all other ranks."""

ALIGNED_BYTES = 16
"""Number of bytes that a kernel reads at a time."""

DTYPES = (torch.bfloat16, torch.float32)
"""Dtypes that torch's kernel supports."""


class OneShot:
    """An all-reduce over memory that all GPUs of a group can access. Use `OneShot.of`."""

    def __init__(self, ranks: Ranks, device: torch.device) -> None:
        from torch.distributed import (
            _symmetric_memory as symmetric,
        )  # imported here, because some builds of torch do not have it

        self._name = str(ranks.group.group_name)
        self._buffer = symmetric.empty(MOST_BYTES, dtype=torch.uint8, device=device)
        symmetric.rendezvous(self._buffer, ranks.group)

    @staticmethod
    def of(ranks: Ranks, device: torch.device) -> OneShot | None:
        """Create a `OneShot` for a group of GPUs of one host. All ranks must call this.

        If any rank cannot access the memory of another rank, the result is None on all ranks, and
        each rank shows a warning.
        """
        if device.type != "cuda" or ranks.count < 2:
            return None
        made, why = None, "on another rank"
        try:
            made = OneShot(ranks, device)
            made.sum(torch.zeros(ALIGNED_BYTES, dtype=torch.bfloat16, device=device))
        except (ImportError, RuntimeError, AttributeError) as error:
            made, why = None, str(error).partition("\n")[0]
        (every,) = ranks.gather(torch.tensor([made is not None], device=device))
        if bool(every.all()):
            return made
        warnings.warn(
            f"one_shot: the GPUs cannot access each other's memory ({why}); using NCCL instead",
            stacklevel=3,
        )
        return None

    def takes(self, tensor: Tensor) -> bool:
        """Return True if `sum` supports the size, dtype and layout of the tensor."""
        fits = tensor.nbytes <= MOST_BYTES and not tensor.nbytes % ALIGNED_BYTES
        return fits and tensor.dtype in DTYPES and tensor.is_contiguous()

    def sum(self, tensor: Tensor) -> Tensor:
        """Return the sum of the tensors of all ranks as a new tensor.

        The call can be captured in a CUDA graph.

        Ranks may add the tensors in different orders. With more than two ranks, the results of two
        ranks may therefore differ by rounding.
        """
        place = self._buffer[: tensor.nbytes].view(tensor.dtype)
        ops = torch.ops.symm_mem
        made: Tensor = ops.one_shot_all_reduce_copy(place, tensor.view(-1), "sum", self._name)
        return made.view(tensor.shape)
