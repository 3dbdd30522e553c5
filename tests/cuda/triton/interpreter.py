"""Triton's interpreter under NumPy from 2.4 on, which makes no number of an array `[1]`."""

from triton.runtime import interpreter


def mend():
    """Loops over a range that a kernel is given take the number in such an array."""
    patch = interpreter._patch_lang_tensor

    def patched(tensor, scope):
        patch(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: self.handle.data.item())

    interpreter._patch_lang_tensor = patched
