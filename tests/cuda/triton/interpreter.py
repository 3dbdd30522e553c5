"""Triton's interpreter under NumPy from 2.4 on, which makes no number of an array `[1]`; its
launches in a graph.
"""

from contextlib import contextmanager
from functools import partial
from unittest import mock

from triton.runtime import interpreter

from tests.cuda.graphs import WholeGraph


def mend():
    """Loops over a range that a kernel is given take the number in such an array."""
    patch = interpreter._patch_lang_tensor

    def patched(tensor, scope):
        patch(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: self.handle.data.item())

    interpreter._patch_lang_tensor = patched


class InterpretedGraph(WholeGraph):
    """Keeps launches of interpreted kernels, too."""

    @contextmanager
    def _while_kept(self):
        launch = interpreter.GridExecutor.__call__

        def keep(executor, *given, **named):
            self._launches.append(partial(launch, executor, *given, **named))

        with (
            mock.patch.object(interpreter.GridExecutor, "__call__", keep),
            super()._while_kept(),
        ):
            yield
