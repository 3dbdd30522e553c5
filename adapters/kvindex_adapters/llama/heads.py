"""`HeadRanks`: the processes that have a model's heads together, and what they say to each other.

Tensor parallelism (Shoeybi et al., 2019): a rank has rows of the matrices that give queries, keys,
values, gate and up, and the columns of those that take what comes of them; the two products of a
layer that end in the residual are sums over the ranks.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from kvindex.core.one_shot import OneShot
from kvindex.core.ranks import TIMEOUT_S, Ranks


class HeadRanks:
    """One of several ranks, which has its share of the heads on `device`.

    ranks: of a process group whose messages reach the device (NCCL for a GPU, gloo for a CPU);
    one_shot: whether sums of few bytes are one kernel over the memory of all GPUs of a host
    (`OneShot`), where that is to be had; `one_shot` then says so.
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
        """The ranks of a process group, or of the default one. All of them call it.

        Raises ValueError in a process of torchrun that has no group yet, and for a GPU that is not
        the current one, from which torch sends what is no tensor.
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
        """Whether sums of few bytes go through memory that all GPUs see."""
        return self._one_shot is not None

    def on(self, device: torch.device) -> bool:
        """Whether a device is this rank's; one without a number is the current one, as it is."""
        same = {device.index, self.device.index} - {None}
        return device.type == self.device.type and len(same) < 2

    def sum(self, partial: Tensor) -> Tensor:
        """The sum of all ranks' tensors of this shape, the same on all; this one is used up.

        One all-reduce, which a graph may hold. Raises `RankError`.
        """
        if self._one_shot is not None and self._one_shot.takes(partial):
            return self._one_shot.sum(partial)
        return self._ranks.sum(partial)

    def gather_logits(self, logits: Tensor) -> Tensor:
        """Logits `[B, V]` from each rank's `[B, V / W]`: one all-gather."""
        (every,) = self._ranks.gather(logits)
        return every.movedim(0, 1).flatten(1)

    def first(self, tokens: Tensor) -> Tensor:
        """Rank 0's tokens, on all: one broadcast."""
        return self._ranks.first(tokens)

    def wait_for(self, event: Any) -> None:
        """As `Ranks.wait_for`."""
        self._ranks.wait_for(event)

    def check_same(self, what: str, facts: dict[str, Any]) -> None:
        """As `Ranks.check_same`."""
        self._ranks.check_same(what, facts)
