"""`HeadRanks`: tensor parallelism over attention heads, with its collective operations.

A rank has a shard of the heads and of the MLP: rows of the query, key, value, gate and up matrices,
and columns of the output and down matrices. The output and down products are summed over the ranks.

Source: Shoeybi et al., Megatron-LM (2019).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from kvindex.core.one_shot import OneShot
from kvindex.core.ranks import TIMEOUT_S, Ranks


class HeadRanks:
    """A rank that has a shard of the heads on `device`, with access to the other ranks.

    Args:
        ranks: Ranks of a process group with a backend for the device (NCCL for a GPU, gloo for a
            CPU).
        device: Device of this rank.
        one_shot: Whether to compute small all-reduces with one kernel that reads the memory of all
            GPUs of a host (`OneShot`), if the GPUs support it.
    """

    def __init__(self, ranks: Ranks, device: torch.device, *, one_shot: bool = False) -> None:
        self.device, self._ranks = device, ranks
        self.rank, self.count = ranks.rank, ranks.count
        self._one_shot = OneShot.of(ranks, device) if one_shot else None

    @staticmethod
    def of(
        device: torch.device | str,
        group: Any = None,
        *,
        timeout_s: float = TIMEOUT_S,
        one_shot: bool = False,
    ) -> HeadRanks:
        """Make the `HeadRanks` of this process. All processes of the group must call this.

        Args:
            device: Device of this rank.
            group: A process group of torch, or None for the default group.
            timeout_s: Seconds to wait for other ranks before a call raises an error.
            one_shot: Whether to compute small all-reduces with one kernel, if the GPUs support it.

        Returns:
            The rank of this process.

        Raises:
            ValueError: torchrun started this process and there is no process group yet, or `device`
                is not the current GPU, which torch's collective operations require.
        """
        place = torch.device(device)
        if place.type == "cuda" and place.index not in (None, torch.cuda.current_device()):
            raise ValueError(
                f"device: got {place}, allowed is the current device, "
                f"cuda:{torch.cuda.current_device()}; call torch.cuda.set_device first"
            )
        return HeadRanks(Ranks.of(group, timeout_s), place, one_shot=one_shot)

    @property
    def one_shot(self) -> bool:
        """True if small all-reduces use one kernel over memory that all GPUs can access."""
        return self._one_shot is not None

    def on(self, device: torch.device) -> bool:
        """Return True if `device` is this rank's device. "cuda" without a number means this rank's
        GPU."""
        same = {device.index, self.device.index} - {None}
        return device.type == self.device.type and len(same) < 2

    def sum(self, partial: Tensor) -> Tensor:
        """All-reduce: sum tensors of equal shape over all ranks. A CUDA graph may contain this.

        Args:
            partial: This rank's tensor. Its contents are overwritten.

        Returns:
            The sum, equal on all ranks.

        Raises:
            RankError: Another rank failed or did not answer in time.
        """
        if self._one_shot is not None and self._one_shot.takes(partial):
            return self._one_shot.sum(partial)
        return self._ranks.sum(partial)

    def gather_logits(self, logits: Tensor) -> Tensor:
        """All-gather the logits: concatenate `[B, V / W]` of all `W` ranks to `[B, V]`."""
        (every,) = self._ranks.gather(logits)
        return every.movedim(0, 1).flatten(1)

    def first(self, tokens: Tensor) -> Tensor:
        """Broadcast the tokens of rank 0. Return them on all ranks."""
        return self._ranks.first(tokens)

    def wait_for(self, event: Any) -> None:
        """Block the host until a CUDA event has occurred. Raise RankError after the timeout."""
        self._ranks.wait_for(event)

    def check_same(self, what: str, facts: dict[str, Any]) -> None:
        """Check that all ranks pass the same names and values in `facts`.

        Raise ValueError if they differ.
        """
        self._ranks.check_same(what, facts)
