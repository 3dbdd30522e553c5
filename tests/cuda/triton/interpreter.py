"""Triton's interpreter with NumPy from 2.4 on, which does not convert an array `[1]` to a number;
and its launches in a graph.
"""

from contextlib import contextmanager
from functools import partial
from unittest import mock

from triton.runtime import interpreter

from tests.cuda.graphs import WholeGraph


def mend():
    """Let loops over a kernel's range argument convert such an array to a number."""
    patch = interpreter._patch_lang_tensor

    def patched(tensor, scope):
        patch(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: self.handle.data.item())

    interpreter._patch_lang_tensor = patched


class InterpretedGraph(WholeGraph):
    """A graph that records launches of interpreted kernels, too."""

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
