"""`OneShot`: sums of few bytes over the GPUs of one host, in one kernel.

Each GPU reads what the others have written to memory that all of them see (torch's symmetric
memory), where NCCL's kernel sends and waits. Of few bytes it is the waiting that takes time.
"""

from __future__ import annotations

import warnings

import torch
from torch import Tensor

from kvindex.core.ranks import Ranks

MOST_BYTES = 2**16
"""Sums of more bytes go by NCCL: there all ranks no longer read all of it."""

ALIGNED_BYTES = 16
"""What a kernel reads at once."""

DTYPES = (torch.bfloat16, torch.float32)
"""What torch's kernel adds."""


class OneShot:
    """A buffer that all GPUs of a group see. Made by `of`."""

    def __init__(self, ranks: Ranks, device: torch.device) -> None:
        from torch.distributed import _symmetric_memory as symmetric  # asked for where it is used

        self._name = str(ranks.group.group_name)
        self._buffer = symmetric.empty(MOST_BYTES, dtype=torch.uint8, device=device)
        symmetric.rendezvous(self._buffer, ranks.group)

    @staticmethod
    def of(ranks: Ranks, device: torch.device) -> OneShot | None:
        """One for a group of GPUs of one host, or None, with a warning where it is not to be had.

        All ranks call it, and all get one or none does.
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
            f"one_shot: no memory that all GPUs see ({why}); sums go by NCCL", stacklevel=3
        )
        return None

    def takes(self, tensor: Tensor) -> bool:
        """Whether a tensor is one that it adds up."""
        fits = tensor.nbytes <= MOST_BYTES and not tensor.nbytes % ALIGNED_BYTES
        return fits and tensor.dtype in DTYPES and tensor.is_contiguous()

    def sum(self, tensor: Tensor) -> Tensor:
        """The sum of all ranks' tensors of this shape, a new one. A graph may hold it.

        Ranks may add in another order each: more than two of them may differ in rounding.
        """
        place = self._buffer[: tensor.nbytes].view(tensor.dtype)
        ops = torch.ops.symm_mem
        made: Tensor = ops.one_shot_all_reduce_copy(place, tensor.view(-1), "sum", self._name)
        return made.view(tensor.shape)
