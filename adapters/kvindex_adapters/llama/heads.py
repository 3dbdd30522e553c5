"""Tensor parallelism over attention heads: the ranks of a model, and their collective operations.

A rank has a shard of the heads: rows of the matrices that produce queries, keys, values, gate and
up, and columns of the matrices that consume them. The two products per layer that end in the
residual are summed over the ranks (Shoeybi et al., Megatron-LM, 2019).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from kvindex.core.one_shot import OneShot
from kvindex.core.ranks import TIMEOUT_S, Ranks


class HeadRanks:
    """One of several ranks, which has a shard of the heads on `device`.

    Args:
        ranks: Ranks of a process group with a backend for the device (NCCL for a GPU, gloo for a
            CPU).
        device: Device of this rank.
        one_shot: Whether to compute small sums with one kernel that reads the memory of all GPUs of
            a host (`OneShot`), if supported. The property `one_shot` reports whether it is used.
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
        """Make the ranks of a process group. All processes of the group must call this.

        Args:
            device: Device of this rank.
            group: A process group of torch, or None for the default group.
            timeout_s: Seconds to wait for other ranks before a call raises an error.
            one_shot: As in `HeadRanks`.

        Returns:
            This process's rank.

        Raises:
            ValueError: torchrun started this process and there is no process group yet, or `device`
                is not the current GPU, from which torch sends objects.
        """
        place = torch.device(device)
        if place.type == "cuda" and place.index not in (None, torch.cuda.current_device()):
            raise ValueError(
                f"device: got {place}, allowed is the current one, "
                f"cuda:{torch.cuda.current_device()}: call torch.cuda.set_device before"
            )
        return HeadRanks(Ranks.of(group, timeout_s), place, one_shot=one_shot)

    @property
    def one_shot(self) -> bool:
        """True if small sums are computed by one kernel over memory that all GPUs can access."""
        return self._one_shot is not None

    def on(self, device: torch.device) -> bool:
        """Return True if `device` is this rank's device. "cuda" without a number is this rank's
        GPU."""
        same = {device.index, self.device.index} - {None}
        return device.type == self.device.type and len(same) < 2

    def sum(self, partial: Tensor) -> Tensor:
        """Sum tensors of equal shape over all ranks, with one all-reduce that a graph may contain.

        Args:
            partial: This rank's tensor, which the call overwrites.

        Returns:
            The sum, equal on all ranks.

        Raises:
            RankError: Another rank failed or did not answer in time.
        """
        if self._one_shot is not None and self._one_shot.takes(partial):
            return self._one_shot.sum(partial)
        return self._ranks.sum(partial)

    def gather_logits(self, logits: Tensor) -> Tensor:
        """Gather logits `[B, V]` from each rank's `[B, V / W]`, with one all-gather."""
        (every,) = self._ranks.gather(logits)
        return every.movedim(0, 1).flatten(1)

    def first(self, tokens: Tensor) -> Tensor:
        """Return the first rank's tokens on all ranks, with one broadcast."""
        return self._ranks.first(tokens)

    def wait_for(self, event: Any) -> None:
        """See `Ranks.wait_for`."""
        self._ranks.wait_for(event)

    def check_same(self, what: str, facts: dict[str, Any]) -> None:
        """See `Ranks.check_same`."""
        self._ranks.check_same(what, facts)
