"""Ranks: the processes of a `torch.distributed` group, and the few collectives that indexes need.

Every rank makes the same calls in the same order. A rank that dies or hangs ends the others with a
`RankError` that names it: those that are left sign in at the group's store, and who is missing
there after the timeout is the one. With NCCL a collective is a kernel, which the host does not wait
for: there torch's own watchdog ends a process after the same timeout (docs/distributed.md). It does
not see those of a graph, so whoever replays one waits by `Ranks.wait_for`.
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
"""Seconds that a rank waits for the others, unless told: less than a user waits before he looks,
more than the longest time between two layers of a prompt."""

ASK_EVERY_S = 0.05
"""Seconds between two looks for who has signed in: nothing else is left to do."""

LOOK_EVERY_S = 1e-4
"""Seconds between two looks at an event: little of a token, of which some are launched ahead."""

WORD = 8
"""Bytes to which parts of a message are aligned: of the widest number."""


class RankError(RuntimeError):
    """Another rank is gone, or has made another call; no rank can go on."""


class Ranks:
    """One of `count` processes, its `rank`, and its way to the others; one alone needs no group.

    `of` gives one object for each group and timeout, so that layers share a communicator.
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
        """The ranks of a process group; None: of the default one, or this process alone.

        All of them call it. Raises ValueError for a process that torchrun has started and that has
        no group yet.
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
        """Itself: copies of an index talk to the same processes."""
        return self

    def check_same(self, what: str, facts: Mapping[str, Any]) -> None:
        """Raises ValueError on every rank unless all of them give the same facts, as JSON has them.

        what: what the facts are of, for the error.
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
        """Tensors of the same shapes on all ranks: each of all of them, `[W, ...]`, by rank.

        One all-gather of their bytes, whatever their dtypes. Raises RankError.
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
        """Objects of all ranks, by rank; they are pickled. Raises RankError."""
        every = [value] * self.count
        if self._group is not None:
            self._run(dist.all_gather_object, every, value, group=self._group)
        return every

    def gather_message(self, message: Tensor) -> Tensor:
        """Messages of all ranks, uint8 `[W, n]`, from this one's, uint8 `[n]`: one all-gather.

        Raises RankError.
        """
        if self._group is None:
            return message[None]
        got = message.new_empty(self.count * len(message))
        self._run(_all_gather(), got, message, group=self._group)
        return got.view(self.count, -1)

    @property
    def group(self) -> Any:
        """torch's group of several processes. Raises ValueError for one process alone."""
        if self._group is None:
            raise ValueError("group: got one process alone, allowed is a group of several")
        return self._group

    def sum(self, tensor: Tensor) -> Tensor:
        """The sum of tensors of one shape, on all, in place of this one: one all-reduce.

        Raises RankError.
        """
        if self._group is not None:
            self._run(dist.all_reduce, tensor, group=self._group)
        return tensor

    def first(self, tensor: Tensor) -> Tensor:
        """Rank 0's tensor, on all, in place of this one: one broadcast. Raises RankError."""
        if self._group is not None:
            first = dist.get_global_rank(self._group, 0)  # torch before 2.6 knows no `group_src`
            self._run(dist.broadcast, tensor, first, group=self._group)
        return tensor

    def add(self, tensor: Tensor) -> Tensor:
        """The sum of tensors that are not zero at the same place on two ranks: exact, on all.

        One all-reduce of their bytes. Raises RankError.
        """
        if self._group is None:
            return tensor
        raw = _bytes(tensor)
        self._run(dist.all_reduce, raw, group=self._group)
        return raw[: tensor.nbytes].view(tensor.dtype).view(tensor.shape)

    def wait_for(self, event: Any) -> None:
        """Until a device has come to an event of its own, after messages that a graph holds.

        torch's watchdog does not see those. Raises RankError after the timeout.
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
        """Which ranks do not sign in within the timeout, in words. Takes as long as they take."""
        assert self._group is not None
        store, end = self._group.get_group_store(), time.monotonic() + self.timeout_s
        missing = [rank for rank in range(self.count) if rank != self.rank]
        try:
            store.set(f"kvindex/left/{self.rank}", b"")
            while missing and time.monotonic() < end:
                missing = [rank for rank in missing if not store.check([f"kvindex/left/{rank}"])]
                time.sleep(ASK_EVERY_S)
            gone = f"rank {' and '.join(map(str, missing))}" if missing else "a message"
        except RuntimeError:  # no store
            gone = "rank 0 or whoever else holds the store"
        return (
            f"ranks: lost {gone} of {self.count} (this is rank {self.rank}, which waits "
            f"{self.timeout_s:g} s); allowed is that all make the same calls ({reason})"
        )


_known: dict[tuple[Any, float], Ranks] = {}


@cache
def _all_gather() -> Any:
    """torch's all-gather into one tensor, which torch before 2.13 has by another name."""
    try:
        from torch.distributed import all_gather_single
    except ImportError:
        from torch.distributed import all_gather_into_tensor as all_gather_single
    return all_gather_single


def _bytes(tensor: Tensor) -> Tensor:
    """A copy as uint8, and zeros up to a whole word."""
    raw = tensor.contiguous().view(-1).view(torch.uint8)
    return torch.nn.functional.pad(raw, (0, -len(raw) % WORD))
