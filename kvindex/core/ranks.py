"""`Ranks`: the processes of a `torch.distributed` group, and the collectives that indexes need.

All ranks must make the same calls in the same order. If a rank dies or hangs, the other ranks raise
`RankError`, which names the lost rank. To find the lost rank, each remaining rank writes an entry
to the store of the process group. After the timeout, the ranks without an entry are the lost ones.

An NCCL collective is a kernel, and the host does not wait for it. If such a collective hangs, the
watchdog of torch ends the process after the same timeout (docs/distributed.md). The watchdog does
not see collectives in a CUDA graph, so a caller that replays a graph must wait with
`Ranks.wait_for`.
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
"""Default number of seconds that a rank waits for the other ranks. A rank computes a layer of a
prompt in less time, and users still wait long enough to see the error."""

ASK_EVERY_S = 0.05
"""Seconds between two checks of which ranks have written their entry to the store."""

LOOK_EVERY_S = 1e-4
"""Seconds between two checks of an event. This is much shorter than a decode step."""

WORD = 8
"""Alignment of the parts of a message in bytes: the size of the widest dtype."""


class RankError(RuntimeError):
    """Another rank is lost or made a different call. No rank can continue."""


class Ranks:
    """A process group as one process (rank) sees it: number, count and communication of the ranks.

    A single process needs no process group. `Ranks.of` returns the same object for the same group
    and timeout, so that all layers share one communicator.
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
        """Return the `Ranks` of a process group. All processes of the group must call this.

        Args:
            group: Process group of `torch.distributed`. None for the default group, or for this
                process alone if there is no group.
            timeout_s: Number of seconds that a rank waits for the other ranks.

        Raises:
            ValueError: torchrun has started this process, but there is no process group.
        """
        if group is None and dist.is_available() and dist.is_initialized():
            group = dist.group.WORLD
        if group is None and dist.is_available() and dist.is_torchelastic_launched():
            raise ValueError(
                "group: got none in a process that torchrun started; call "
                "torch.distributed.init_process_group first"
            )
        known = group, timeout_s
        if known not in _known:
            _known[known] = Ranks(group, timeout_s)
        return _known[known]

    def __deepcopy__(self, memo: dict[int, Any]) -> Ranks:
        """Return this object, because copies of an index use the same processes."""
        return self

    def check_same(self, what: str, facts: Mapping[str, Any]) -> None:
        """Compare values of all ranks. If one of them differs, raise ValueError on all ranks.

        Args:
            what: What the values describe, for the error message.
            facts: Name -> value to compare, which must be convertible to JSON.
        """
        if self._group is None:
            return
        every = self.gather_object(dict(facts))
        for rank, others in enumerate(every):
            for name in dict.fromkeys([*every[0], *others]):
                mine, theirs = every[0].get(name), others.get(name)
                if mine != theirs:
                    raise ValueError(
                        f"{what}: got {name} = {theirs!r} on rank {rank}, allowed is the value of "
                        f"rank 0, {mine!r}"
                    )

    def gather(self, *parts: Tensor) -> list[Tensor]:
        """Gather tensors of all `W` ranks. Return one tensor `[W, ...]` for each argument.

        The tensors must have the same shapes on all ranks. They are sent as bytes in one
        all-gather. Raises RankError.
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
        """Return the objects of all ranks, which are sent with pickle. Raises RankError."""
        every = [value] * self.count
        if self._group is not None:
            self._run(dist.all_gather_object, every, value, group=self._group)
        return every

    def gather_message(self, message: Tensor) -> Tensor:
        """Gather the messages of all `W` ranks in one all-gather. Raises RankError.

        message: the message of this rank, uint8 `[n]`. The result is uint8 `[W, n]`.
        """
        if self._group is None:
            return message[None]
        got = message.new_empty(self.count * len(message))
        self._run(_all_gather(), got, message, group=self._group)
        return got.view(self.count, -1)

    @property
    def group(self) -> Any:
        """The process group of torch. Raises ValueError if this process is alone."""
        if self._group is None:
            raise ValueError(
                "group: got a single process, allowed is a group of at least two processes"
            )
        return self._group

    def sum(self, tensor: Tensor) -> Tensor:
        """Add the tensors of all ranks in place, by one all-reduce. Raises RankError."""
        if self._group is not None:
            self._run(dist.all_reduce, tensor, group=self._group)
        return tensor

    def first(self, tensor: Tensor) -> Tensor:
        """Overwrite the tensor on all ranks with the tensor of rank 0, by one broadcast.

        Raises RankError.
        """
        if self._group is not None:
            first = dist.get_global_rank(self._group, 0)  # torch before 2.6 has no `group_src`
            self._run(dist.broadcast, tensor, first, group=self._group)
        return tensor

    def add(self, tensor: Tensor) -> Tensor:
        """Return the exact sum of a tensor over all ranks.

        For each element, at most one rank may have a nonzero value. So the tensors can be added as
        bytes, in one all-reduce. Raises RankError.
        """
        if self._group is None:
            return tensor
        raw = _bytes(tensor)
        self._run(dist.all_reduce, raw, group=self._group)
        return raw[: tensor.nbytes].view(tensor.dtype).view(tensor.shape)

    def wait_for(self, event: Any) -> None:
        """Wait until the device reaches an event that follows a CUDA graph with collectives.

        Raises RankError after the timeout. The watchdog of torch would not end the process if such
        a graph hangs, because it does not see collectives in a CUDA graph.
        """
        end = time.monotonic() + self.timeout_s
        while self._group is not None and not event.query():
            if not self._lost and time.monotonic() > end:
                self._lost = self._found("the device did not finish a CUDA graph in time")
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
        """Find out which ranks are lost, and return an error message that names them.

        Each rank that calls this method writes an entry to the store of the process group. A rank
        without an entry at the end of the timeout is lost.
        """
        assert self._group is not None
        store, end = self._group.get_group_store(), time.monotonic() + self.timeout_s
        missing = [rank for rank in range(self.count) if rank != self.rank]
        try:
            store.set(f"kvindex/left/{self.rank}", b"")
            while missing and time.monotonic() < end:
                missing = [rank for rank in missing if not store.check([f"kvindex/left/{rank}"])]
                time.sleep(ASK_EVERY_S)
            gone = f"rank {' and '.join(map(str, missing))}" if missing else "a message"
        except RuntimeError:  # the store cannot be reached
            gone = "rank 0 or the process that runs the store"
        return (
            f"ranks: lost {gone} of {self.count} (this is rank {self.rank}, timeout "
            f"{self.timeout_s:g} s); all ranks must run and make the same calls ({reason})"
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
    """Return a copy of the tensor as uint8, padded with zeros to a multiple of `WORD` bytes."""
    raw = tensor.contiguous().view(-1).view(torch.uint8)
    return torch.nn.functional.pad(raw, (0, -len(raw) % WORD))
