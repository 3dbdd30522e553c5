"""Checks of argument tensors.

On a GPU, errors in the contents of a tensor are raised by a later call, so that the host need not
wait for the GPU.
"""

from __future__ import annotations

import torch
from torch import Tensor

from kvindex.core import check
from kvindex.core.geometry import Geometry
from kvindex.core.protocol import UNUSED, Hits
from kvindex.core.transaction import Transactional


class DeferredChecks(Transactional):
    """Checks argument tensors for an index.

    A failed check raises a ValueError or TypeError that names the argument, the received value and
    what is allowed. On a CPU the error is raised immediately. On a CUDA device, a check for NaN or
    for wrong ids only sets a flag in device memory, and the next call that waits for the device
    raises the error. With `check=True`, the error is always raised immediately.
    """

    _batch: int | None
    _length: int

    def __init__(self, geometry: Geometry, at_once: bool | None) -> None:
        if at_once is not None and not isinstance(at_once, bool):
            raise ValueError(f"check: got {at_once!r}, allowed is True, False or None")
        self.geometry, self._check = geometry, at_once
        self._deferred: dict[str, tuple[Tensor, str]] = {}  # argument -> (flag, message)

    def _after_copy(self) -> None:
        flags = self._deferred.items()  # cloned, because flags are written in place
        self._deferred = {name: (flag.clone(), message) for name, (flag, message) in flags}

    def _check_tensor(self, name: str, value: Tensor, shape: dict[str, int | None]) -> None:
        check.tensor(name, value, shape, self.geometry.dtype, self.geometry.device)

    def _per_token(self, batch: int | None, count: int | None, width: int) -> dict[str, int | None]:
        """Return the required shape of keys or values, for `_check_tensor`.

        None stands for any size.
        """
        return {"B": batch, "G": self.geometry.kv_heads, "N": count, "D": width}

    def _check_finite(self, name: str, value: Tensor) -> None:
        if self._check is False:
            return
        if not value.numel():
            return
        if self._defers:
            self._defer(name, check.out_of_range(value.abs().amax()), check.ALLOWED_NUMBER)
        else:
            check.finite(name, value)

    def _check_in_keys(self, keys: Tensor, values: Tensor) -> None:
        """Check that each value equals the first coordinates of its key, as `value_in_key`
        requires.
        """
        if self._check is False:
            return
        if self._defers:
            self._defer("values", check.not_in_keys(values, keys).any(), check.ALLOWED_IN_KEYS)
        else:
            check.in_keys(values, keys)

    @property
    def _defers(self) -> bool:
        """True if errors in the contents of tensors are raised by a later call.

        This is so on a CUDA device, unless `check=True`.
        """
        return self.geometry.device.type == "cuda" and not self._check

    def _raise_if(self, name: str, value: Tensor, wrong: Tensor, allowed: str) -> None:
        """Raise ValueError if any element of `wrong` is True, immediately or (on a GPU) at a later
        call.
        """
        if self._defers:
            self._defer(name, wrong.any(), allowed)
        elif bool(wrong.any()):
            raise ValueError(f"{name}: got {value[wrong][0].item()}, allowed is {allowed}")

    def _defer(self, name: str, wrong: Tensor, allowed: str) -> None:
        self._flag(name, allowed).logical_or_(wrong)

    def _flag(self, name: str, allowed: str) -> Tensor:
        """Return the error flag of the argument `name`, int32 `[]` on the device.

        The flag is nonzero if a check of this argument has failed. It is created once and stays at
        the same address, so that kernels can write to it.
        """
        message = f"{name}: got (in an earlier call) what is not, allowed is {allowed}"
        if name not in self._deferred:
            made = torch.zeros((), dtype=torch.int32, device=self.geometry.device)
            self._deferred.setdefault(name, (made, message))  # another thread may have been first
        flag = self._deferred[name][0]
        self._deferred[name] = flag, message
        return flag

    def raise_pending(self) -> None:
        """Raise the error of a check on a CUDA device that failed since the last `raise_pending`.

        This call waits for the device.

        Raises:
            ValueError: An argument of an earlier call was wrong.
        """
        flags = list(self._deferred.values())  # another thread may add a flag during the loop
        found = [message for flag, message in flags if bool(flag)]
        if found:
            for flag, _ in flags:
                flag.zero_()
            raise ValueError(found[0])

    def _captured(self) -> bool:
        """Return True if a CUDA graph is being captured on the current stream."""
        device = self.geometry.device
        if device.type != "cuda":
            return False
        with torch.cuda.device(device):
            return torch.cuda.is_current_stream_capturing()

    def _checked_ids(self, hits: Hits, summaries: int, length: Tensor | None = None) -> Tensor:
        """Check the ids of `hits`, and return them with -1 in place of invalid ids.

        Args:
            hits: Result of a search.
            summaries: Number of summary rows, which have the ids -2, -3, ….
            length: Number of tokens, int64 `[1]` on the device. A CUDA graph needs it, because a
                Python number would keep its value in every replay.

        Raises:
            TypeError: `hits` is not a `Hits`.
            ValueError: A shape or dtype is wrong, or an id is out of range. On a CUDA device, the
                error for an id is raised by a later call.
            RuntimeError: A CUDA graph is being captured and `length` is None.
        """
        if not isinstance(hits, Hits):
            raise TypeError(f"hits: got {type(hits).__name__}, allowed is a kvindex.Hits")
        if length is None and self._captured():
            raise RuntimeError(
                "graph: got a call (such as fetch) that compares hits.ids with the number of "
                "tokens on the host; this number would not change when the CUDA graph is replayed, "
                "so capture search and attend instead, which read the number from device memory"
            )
        g, lowest = self.geometry, UNUSED - summaries
        shape = {"B": self._batch, "G": g.kv_heads, "K": None}
        check.tensor("hits.ids", hits.ids, shape, torch.int64, g.device)
        count = self._length if length is None else length
        wrong = (hits.ids >= count) | (hits.ids < lowest)
        span = "" if lowest == self._length - 1 else f" to {self._length - 1}"
        self._raise_if("hits.ids", hits.ids, wrong, f"{lowest}{span}")
        # Replace invalid ids by `UNUSED`. On a GPU, the error that reports them may be raised only
        # later, and until then no kernel may use them as addresses.
        return hits.ids.masked_fill(wrong, UNUSED)
