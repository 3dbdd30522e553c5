"""Imitate a CUDA graph on a CPU: record work while it is captured, and run it when it is replayed.

As with a CUDA graph, nothing runs during capture, and a replay passes the same arguments again,
addresses and numbers. `KeptGraph` records launches and rejects operations of torch. `WholeGraph`
records both.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from kvindex.core.graphs import GRAPHS
from kvindex_cuda.runtime import launch as launching
from tests.cuda.recorder import again


class NoWork(TorchDispatchMode):
    """Context in which an operation of torch that is not a view raises an error."""

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None):
        if not function.is_view:
            raise RuntimeError(f"{function}: got an operation that a graph would not do again")
        return function(*args, **kwargs or {})


class KeptGraph:
    """A graph of the kernels that `work` launches."""

    made, replays = 0, 0

    def __init__(self, device: torch.device, work: Callable[[], object]) -> None:
        type(self).made += 1
        self._launches: list[Callable[[], None]] = []
        loaders = dict(launching.LOADERS)
        launching.LOADERS.update({at: partial(self._kept, load) for at, load in loaders.items()})
        try:
            with self._while_kept():
                work()
        finally:
            launching.LOADERS.update(loaders)

    def _while_kept(self) -> TorchDispatchMode:
        return NoWork()

    def _kept(self, load: launching.Loader, *which: Any) -> launching.Launch:
        def keep(grid, block, arguments, shared_bytes, overlap):
            run = partial(load(*which), grid, block, list(arguments), shared_bytes, overlap)
            self._launches.append(run)

        return keep

    def replay(self) -> None:
        """Replay the graph."""
        type(self).replays += 1
        for run in self._launches:
            run()


class NotYet(TorchDispatchMode):
    """Context in which operations of torch are recorded with their results, and do not change
    anything.

    Operations that return new tensors do run, because the shapes of their results are needed.
    Nobody may read the contents of these tensors, and converting one to a number raises an error.
    """

    def __init__(self, kept: list[Callable[[], Any]]) -> None:
        super().__init__()
        self._kept = kept

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None):
        call = partial(function, *args, **kwargs or {})
        # some operations copy because they cannot do otherwise (`to`, `reshape`)
        if function.is_view:
            result = call()
            if storages(result) <= storages((args, kwargs)):
                return result
            self._kept.append(partial(again, call, result))
            return result
        # a message between processes, which is also sent immediately
        if function.namespace == "c10d":
            self._kept.append(partial(waited_for, call))
            return call()
        if function in (torch.ops.aten._local_scalar_dense.default, torch.ops.aten.equal.default):
            raise RuntimeError(f"{function}: got a question to the device while a graph is made")
        written = [
            (args[i] if i < len(args) else kwargs[argument.name])
            for i, argument in enumerate(function._schema.arguments)
            if argument.alias_info is not None and argument.alias_info.is_write
        ]
        if written:
            self._kept.append(call)
            return written[0] if len(written) == 1 else tuple(written)
        result = call()
        if function in (torch.ops.aten.empty.memory_format, torch.ops.aten.empty_like.default):
            # the tensor will be written later; until then it may be used as an index
            result.zero_()
        self._kept.append(partial(again, call, result))
        return result


def waited_for(call: Callable[[], Any]) -> None:
    """Run a collective and wait for it, because gloo's own threads write what the next operation
    reads.
    """
    call()[-1].wait()


def storages(tensors: Any) -> set[int]:
    """Return the addresses of the memory of tensors."""
    leaves = tree_leaves(tensors)
    return {one.untyped_storage().data_ptr() for one in leaves if isinstance(one, torch.Tensor)}


class WholeGraph(KeptGraph):
    """A graph of the kernels and the torch operations that `work` launches.

    draws: as for `CudaGraph`.
    """

    def __init__(
        self,
        device: torch.device,
        work: Callable[[], object],
        draws: torch.Generator | None = None,
    ) -> None:
        super().__init__(device, work)

    def _while_kept(self) -> TorchDispatchMode:
        return NotYet(self._launches)


@contextmanager
def recorded(graph: type[KeptGraph] = KeptGraph) -> Iterator[type[KeptGraph]]:
    """Let tensors of a CPU be captured, too. Returns counters of graphs and replays."""
    counting = type("Counting", (graph,), dict(made=0, replays=0))  # `graph` may have been used
    GRAPHS["cpu"] = counting
    try:
        yield counting
    finally:
        del GRAPHS["cpu"]


@contextmanager
def counted(device, *kind):
    """Count graphs and replays of a device: CUDA graphs on a GPU, else those of `recorded`."""
    if device == "cpu":
        with recorded(*kind) as counting:
            yield counting
        return
    real = GRAPHS["cuda"]

    class Counting(real):
        made, replays = 0, 0

        def __init__(self, *given):
            type(self).made += 1
            super().__init__(*given)
            replay = self.replay

            def counted_replay():
                type(self).replays += 1
                replay()

            self.replay = counted_replay

    GRAPHS["cuda"] = Counting
    yield Counting
    GRAPHS["cuda"] = real
