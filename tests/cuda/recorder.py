"""What a CUDA graph would keep of a call, on a CPU: each operation, done again to the same memory.

A number that the host had read when the call was recorded stays as it was, as in a graph.
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
    """While it is entered: torch's operations and the emulator's launches are kept, to `replay`."""

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
        """All of it once more, results where they were."""
        for step in self._steps:
            step()


def again(call: Callable[[], Any], result: Any) -> None:
    """Do a call once more: its result goes where that of the first time is."""
    for old, new in zip(tree_leaves(result), tree_leaves(call()), strict=True):
        if isinstance(old, Tensor) and old.data_ptr() != new.data_ptr():  # else a view, or itself
            old.copy_(new)
