"""Ranks: the processes of a `torch.distributed` group, and the few collectives that indexes need.

All ranks must make the same calls in the same order. If a rank dies or hangs, the others raise
`RankError`, which names the lost rank: the remaining ranks sign in at the group's store, and the
lost rank is missing there after the timeout. An NCCL collective is a kernel, for which the host
does not wait. With NCCL, torch's own watchdog ends a process after the same timeout
(docs/distributed.md). The watchdog does not see collectives in a CUDA graph, so a caller that
replays a graph must wait with `Ranks.wait_for`.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from datetime import timedelta
from functools import cache
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

TIMEOUT_S = 60.0
"""Default number of seconds that a rank waits for the others: longer than any layer of a prompt
takes, and short enough that a user sees the error."""

ASK_EVERY_S = 0.05
"""Seconds between two checks of which ranks have signed in."""

LOOK_EVERY_S = 1e-4
"""Seconds between two checks of an event. This is much shorter than a decode step."""

WORD = 8
"""Alignment of the parts of a message in bytes: the size of the widest dtype."""


class RankError(RuntimeError):
    """A rank is lost, or has made a different call than this one. No rank can continue."""


class Ranks:
    """This process as one of `count` ranks, and its communication with the others.

    A single process needs no group. `of` returns the same object for the same group and timeout, so
    that layers share a communicator.
    """

    def __init__(self, group: Any, timeout_s: float) -> None:
        self.timeout_s, self._lost = timeout_s, ""
        self.rank, self.count, self._group = 0, 1, None
        if group is None:
            return
        members = dist.get_process_group_ranks(group)
        self.rank, self.count = dist.get_rank(group), len(members)
        if self.count > 1:
            timeout, local = timedelta(seconds=timeout_s), len(members) < dist.get_world_size()
            self._group = dist.new_group(members, timeout=timeout, use_local_synchronization=local)

    @staticmethod
    def of(group: Any = None, timeout_s: float = TIMEOUT_S) -> Ranks:
        """Return the ranks of a process group. All of them must call this.

        group: None for the default group, or for this process alone. Raises ValueError if torchrun
        has started this process, and there is no group yet.
        """
        if group is None and dist.is_available() and dist.is_initialized():
            group = dist.group.WORLD
        if group is None and dist.is_available() and dist.is_torchelastic_launched():
            raise ValueError(
                "group: got none in a process of torchrun, allowed is one: call "
                "torch.distributed.init_process_group before"
            )
        known = group, timeout_s
        if known not in _known:
            _known[known] = Ranks(group, timeout_s)
        return _known[known]

    def __deepcopy__(self, memo: dict[int, Any]) -> Ranks:
        """Return this object, because copies of an index use the same processes."""
        return self

    def check_same(self, what: str, facts: Mapping[str, Any]) -> None:
        """Raise ValueError on all ranks unless they all pass the same facts.

        what: the subject of the facts, for the error message; facts: JSON values by name.
        """
        if self._group is None:
            return
        every = self.gather_object(dict(facts))
        for rank, others in enumerate(every):
            for name in dict.fromkeys([*every[0], *others]):
                mine, theirs = every[0].get(name), others.get(name)
                if mine != theirs:
                    raise ValueError(
                        f"{what}: got {name} = {theirs!r} on rank {rank}, allowed is what rank 0 "
                        f"has: {mine!r}"
                    )

    def gather(self, *parts: Tensor) -> list[Tensor]:
        """Gather tensors, which have the same shapes on all ranks. Return each as `[W, ...]`.

        This is one all-gather of bytes for all dtypes. Raises RankError.
        """
        if self._group is None:
            return [part[None] for part in parts]
        every = self.gather_message(torch.cat([_bytes(part) for part in parts]))
        start, found = 0, []
        for part in parts:
            raw = every[:, start : start + part.nbytes].view(part.dtype)
            found.append(raw.view(self.count, *part.shape))
            start += part.nbytes + -part.nbytes % WORD
        return found

    def gather_object(self, value: Any) -> list[Any]:
        """Return the objects of all ranks, which are pickled. Raises RankError."""
        every = [value] * self.count
        if self._group is not None:
            self._run(dist.all_gather_object, every, value, group=self._group)
        return every

    def gather_message(self, message: Tensor) -> Tensor:
        """Return the messages of all ranks, uint8 `[W, n]`, by one all-gather.

        message: this rank's, uint8 `[n]`. Raises RankError.
        """
        if self._group is None:
            return message[None]
        got = message.new_empty(self.count * len(message))
        self._run(_all_gather(), got, message, group=self._group)
        return got.view(self.count, -1)

    @property
    def group(self) -> Any:
        """The torch process group. Raises ValueError for a single process."""
        if self._group is None:
            raise ValueError("group: got one process alone, allowed is a group of several")
        return self._group

    def sum(self, tensor: Tensor) -> Tensor:
        """Add the tensors of all ranks in place, by one all-reduce. Raises RankError."""
        if self._group is not None:
            self._run(dist.all_reduce, tensor, group=self._group)
        return tensor

    def first(self, tensor: Tensor) -> Tensor:
        """Copy rank 0's tensor into those of all ranks, by one broadcast. Raises RankError."""
        if self._group is not None:
            first = dist.get_global_rank(self._group, 0)  # torch before 2.6 has no `group_src`
            self._run(dist.broadcast, tensor, first, group=self._group)
        return tensor

    def add(self, tensor: Tensor) -> Tensor:
        """Return the exact sum of tensors. No element may be nonzero on two ranks.

        This is one all-reduce of bytes. Raises RankError.
        """
        if self._group is None:
            return tensor
        raw = _bytes(tensor)
        self._run(dist.all_reduce, raw, group=self._group)
        return raw[: tensor.nbytes].view(tensor.dtype).view(tensor.shape)

    def wait_for(self, event: Any) -> None:
        """Wait for an event on the device that comes after collectives of a CUDA graph.

        torch's watchdog does not see collectives in a graph. Raises RankError after the timeout.
        """
        end = time.monotonic() + self.timeout_s
        while self._group is not None and not event.query():
            if not self._lost and time.monotonic() > end:
                self._lost = self._found("the device does not come to the end of a graph")
            if self._lost:
                raise RankError(self._lost)
            time.sleep(LOOK_EVERY_S)
        event.synchronize()

    def _run(self, collective: Any, *args: Any, **options: Any) -> None:
        if self._lost:
            raise RankError(self._lost)
        try:
            collective(*args, **options)
        except RuntimeError as error:
            self._lost = self._found(str(error).partition("\n")[0])
            raise RankError(self._lost) from error

    def _found(self, reason: str) -> str:
        """Wait for the timeout, and return a message that names the ranks that did not sign in."""
        assert self._group is not None
        store, end = self._group.get_group_store(), time.monotonic() + self.timeout_s
        missing = [rank for rank in range(self.count) if rank != self.rank]
        try:
            store.set(f"kvindex/left/{self.rank}", b"")
            while missing and time.monotonic() < end:
                missing = [rank for rank in missing if not store.check([f"kvindex/left/{rank}"])]
                time.sleep(ASK_EVERY_S)
            gone = f"rank {' and '.join(map(str, missing))}" if missing else "a message"
        except RuntimeError:  # the store is gone
            gone = "rank 0 or whoever else holds the store"
        return (
            f"ranks: lost {gone} of {self.count} (this is rank {self.rank}, which waits "
            f"{self.timeout_s:g} s); allowed is that all make the same calls ({reason})"
        )


_known: dict[tuple[Any, float], Ranks] = {}


@cache
def _all_gather() -> Any:
    """Return torch's function for an all-gather into one tensor. torch 2.13 renamed it."""
    try:
        from torch.distributed import all_gather_single
    except ImportError:
        from torch.distributed import all_gather_into_tensor as all_gather_single
    return all_gather_single


def _bytes(tensor: Tensor) -> Tensor:
    """Return a copy as uint8, padded with zeros to whole words."""
    raw = tensor.contiguous().view(-1).view(torch.uint8)
    return torch.nn.functional.pad(raw, (0, -len(raw) % WORD))
