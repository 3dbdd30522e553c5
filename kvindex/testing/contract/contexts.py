"""Checks that an index works under any torch settings of its caller.

The settings are autocast, the default dtype and device, and inference mode.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext

import torch

from kvindex.bases.index import BaseIndex
from kvindex.testing.cases import Case, left_padding
from kvindex.testing.contract.common import Make


@contextmanager
def default_dtype(dtype: torch.dtype) -> Iterator[None]:
    """Set torch's default dtype within the context."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


CONTEXTS: dict[str, Callable[[], AbstractContextManager[object]]] = {
    "autocast to bfloat16": lambda: torch.autocast("cpu", dtype=torch.bfloat16),
    "autocast to float16": lambda: torch.autocast("cpu", dtype=torch.float16),
    "float64 by default": lambda: default_dtype(torch.float64),
    "float16 by default": lambda: default_dtype(torch.float16),
    "bfloat16 by default": lambda: default_dtype(torch.bfloat16),
    "another device by default": lambda: torch.device("meta"),
    "inference mode": torch.inference_mode,
}


class Life:
    """Calls all methods of an index, one after the other, with tensors that the constructor
    creates.
    """

    def __init__(self, case: Case) -> None:
        B, device = case.batch, case.device
        self.first, self.second = case.tokens(30), case.tokens(9, seed=1)
        self.queries = case.queries()
        self.pads = left_padding([3 + b for b in range(B)], 30, device)
        self.at = torch.tensor([29], device=device)
        self.order = torch.arange(B - 1, -1, -1, device=device)

    def of(
        self, make: Make, begun: Callable[[], AbstractContextManager[object]] = nullcontext
    ) -> list[object]:
        """Create an index, call all of its methods, and return all results.

        The index is created, and gets its first tokens, inside the context manager `begun`.
        """
        out: list[object] = []

        def note() -> None:
            hits = index.search(self.queries, k=6)
            rows = index.fetch(hits)
            out.extend([hits.ids, hits.scores, hits.log_weight, rows.keys, rows.values])
            out.append(index.nbytes())

        with begun():
            index = make()
            index.append(*self.first, valid=self.pads)
            index.observe_queries(self.queries[:, :, None], self.at)
        note()
        index.end_prompt()
        index.append(*self.second)
        index.mark_boundary()
        note()
        index.truncate(33)
        index.reorder(self.order)
        note()
        out.append(dict(index.encode(self.first[0])))
        index.reorder(self.order[:1])
        if isinstance(index, BaseIndex):
            queries = self.queries[:1].expand(3, -1, -1)
            out.append(index.expand_batch(3).search(queries, k=6).ids)
        return out


def check_no_context_changes_results(make: Make, case: Case) -> None:
    """Autocast, inference mode, and default dtypes and devices do not change any result.

    Results must be equal bit by bit. This also holds for an index that is created in inference mode
    and used outside of it.
    """
    life = Life(case)
    want = life.of(make)

    def compare(got: list[object], name: str) -> None:
        for mine, theirs in zip(got, want, strict=True):
            torch.testing.assert_close(mine, theirs, rtol=0, atol=0, msg=name)

    for name, entered in CONTEXTS.items():
        with entered():
            got = life.of(make)
        compare(got, name)
    compare(life.of(make, torch.inference_mode), "begun in inference mode")
