"""Record on a CPU what a CUDA graph would capture: each operation runs again on the same memory.

A number that the host read when the call was recorded does not change, as in a graph.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from kvindex_cuda.runtime import launch as launching


class Recorded(TorchDispatchMode):
    """Context that records torch's operations and the emulator's launches, for `replay`."""

    def __init__(self) -> None:
        super().__init__()
        self._steps: list[Callable[[], Any]] = []

    def __enter__(self) -> Recorded:
        self._loader = launching.LOADERS["cpu"]
        launching.LOADERS["cpu"] = self._load
        super().__enter__()
        return self

    def __exit__(self, *raised: Any) -> None:
        super().__exit__(*raised)
        launching.LOADERS["cpu"] = self._loader

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        call = partial(function, *args, **kwargs or {})
        result = call()
        self._steps.append(partial(again, call, result))
        return result

    def _load(self, *which: Any) -> launching.Launch:
        run = self._loader(*which)

        def launch(*given: Any) -> None:
            self._steps.append(partial(run, *given))
            run(*given)

        return launch

    def replay(self) -> None:
        """Run all recorded operations again, with results in the same tensors."""
        for step in self._steps:
            step()


def again(call: Callable[[], Any], result: Any) -> None:
    """Run an operation again; its result goes where the first result is."""
    for old, new in zip(tree_leaves(result), tree_leaves(call()), strict=True):
        # else it is a view, or the tensor itself
        if isinstance(old, Tensor) and old.data_ptr() != new.data_ptr():
            old.copy_(new)
