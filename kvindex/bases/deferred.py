"""Deferred checks of what is in a tensor: on a CUDA device they must not stop it."""

from __future__ import annotations

import torch
from torch import Tensor

from kvindex.core import check
from kvindex.core.geometry import Geometry
from kvindex.core.protocol import UNUSED, Hits
from kvindex.core.transaction import Guarded


class DeferredChecks(Guarded):
    """An index's checks of tensors; what they find on a CUDA device is kept in flags there.

    Raises ValueError or TypeError that name the argument, the value received, what is allowed: at
    once, or, where `_defers`, at the next call that waits for the device anyway.
    """

    _batch: int | None
    _length: int

    def __init__(self, geometry: Geometry, at_once: bool | None) -> None:
        if at_once is not None and not isinstance(at_once, bool):
            raise ValueError(f"check: got {at_once!r}, allowed is True, False or None")
        self.geometry, self._check = geometry, at_once
        self._deferred: dict[str, tuple[Tensor, str]] = {}  # argument -> (flag, message)

    def _after_copy(self) -> None:
        flags = self._deferred.items()  # which are written to in place
        self._deferred = {name: (flag.clone(), message) for name, (flag, message) in flags}

    def _check_tensor(self, name: str, value: Tensor, shape: dict[str, int | None]) -> None:
        check.tensor(name, value, shape, self.geometry.dtype, self.geometry.device)

    def _per_token(self, batch: int | None, count: int | None, width: int) -> dict[str, int | None]:
        """The shape of keys or values, for `_check_tensor`; None for any."""
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
        """Of a geometry with `value_in_key`: that values are what keys begin with."""
        if self._check is False:
            return
        if self._defers:
            self._defer("values", check.not_in_keys(values, keys).any(), check.ALLOWED_IN_KEYS)
        else:
            check.in_keys(values, keys)

    @property
    def _defers(self) -> bool:
        """Whether errors in values wait for the next call that stops the device anyway."""
        return self.geometry.device.type == "cuda" and not self._check

    def _raise_if(self, name: str, value: Tensor, wrong: Tensor, allowed: str) -> None:
        """Raise where `wrong` is True, now or (see `check`) later."""
        if self._defers:
            self._defer(name, wrong.any(), allowed)
        elif bool(wrong.any()):
            raise ValueError(f"{name}: got {value[wrong][0].item()}, allowed is {allowed}")

    def _defer(self, name: str, wrong: Tensor, allowed: str) -> None:
        """Keep `wrong`, bool `[]`, in the argument's flag."""
        self._flag(name, allowed).logical_or_(wrong)

    def _flag(self, name: str, allowed: str) -> Tensor:
        """The argument's flag, int32 `[]`: not 0 where it was wrong. One for all calls, at one
        address, so that a kernel may set it.
        """
        if name in self._deferred:
            flag = self._deferred[name][0]
        else:
            flag = torch.zeros((), dtype=torch.int32, device=self.geometry.device)
        message = f"{name}: got (in an earlier call) what is not, allowed is {allowed}"
        self._deferred[name] = flag, message
        return flag

    def raise_pending(self) -> None:
        """Raise what a check on a CUDA device has found since the last call (it waits for it)."""
        found = [message for flag, message in self._deferred.values() if bool(flag)]
        if found:
            for flag, _ in self._deferred.values():
                flag.zero_()
            raise ValueError(found[0])

    def _captured(self) -> bool:
        """Whether a graph of the current stream is being captured."""
        device = self.geometry.device
        if device.type != "cuda":
            return False
        with torch.cuda.device(device):
            return torch.cuda.is_current_stream_capturing()

    def _checked_ids(self, hits: Hits, summaries: int, length: Tensor | None = None) -> Tensor:
        """Ids of `hits`, of so many summaries too; one that names no row is an unused slot.

        length: int64 `[1]`, tokens held as the device knows it, for a call that a graph replays
        when there are others; without it RuntimeError is raised where a graph is captured. Raises
        TypeError or ValueError, on a CUDA device later for a value.
        """
        if not isinstance(hits, Hits):
            raise TypeError(f"hits: got {type(hits).__name__}, allowed is a kvindex.Hits")
        if length is None and self._captured():
            raise RuntimeError(
                "graph: got ids that are held to the rows there are when it is captured, as of a "
                "fetch; allowed are search and attend, which read on the device how many there are"
            )
        g, lowest = self.geometry, UNUSED - summaries
        shape = {"B": self._batch, "G": g.kv_heads, "K": None}
        check.tensor("hits.ids", hits.ids, shape, torch.int64, g.device)
        count = self._length if length is None else length
        wrong = (hits.ids >= count) | (hits.ids < lowest)
        span = "" if lowest == self._length - 1 else f" to {self._length - 1}"
        self._raise_if("hits.ids", hits.ids, wrong, f"{lowest}{span}")
        return hits.ids.masked_fill(wrong, UNUSED)  # a deferred error must not read outside
