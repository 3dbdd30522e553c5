"""Whatever a caller has set in torch (autocast, default dtype and device), results are the same."""

from contextlib import contextmanager

import pytest
import torch

import kvindex
from kvindex.layer import AttentionLayer
from tests.contract import CHECKS
from tests.contract.test_contract import CASES, SPECS
from tests.contract.test_faults import WRAPPED
from tests.support.helpers import Case, left_padding
from tests.support.sequences import SIZES, Sequence


@contextmanager
def default_dtype(dtype):
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


CONTEXTS = {
    "autocast to bfloat16": lambda: torch.autocast("cpu", dtype=torch.bfloat16),
    "autocast to float16": lambda: torch.autocast("cpu", dtype=torch.float16),
    "float64 by default": lambda: default_dtype(torch.float64),
    "float16 by default": lambda: default_dtype(torch.float16),
    "bfloat16 by default": lambda: default_dtype(torch.bfloat16),
    "another device by default": lambda: torch.device("meta"),
}
CASE = Case(q_heads=4, kv_heads=2, head_dim=16, value_dim=8, batch=2, softcap=3.0)


def used(spec):
    """All that an index gives in a life of all its calls."""
    index, out = CASE.index(spec), []

    def note():
        hits = index.search(queries, k=6)
        rows = index.fetch(hits)
        out.extend([hits.ids, hits.scores, hits.log_weight, rows.keys, rows.values])
        out.append(index.nbytes())

    index.append(*first, valid=pads)
    index.observe_queries(queries[:, :, None], at)
    note()
    index.end_prompt()
    index.append(*second)
    index.mark_boundary()
    note()
    index.truncate(33)
    index.reorder(order)
    note()
    out.append(dict(index.encode(first[0])))
    index.reorder(order[:1])
    if hasattr(index, "expand_batch"):
        out.append(index.expand_batch(3).search(queries[:1].expand(3, -1, -1), k=6).ids)
    return out


# made where nothing is unusual
first, second, queries = CASE.tokens(30), CASE.tokens(9, seed=1), CASE.queries()
pads, at, order = left_padding([3, 4], 30), torch.tensor([29]), torch.tensor([1, 0])


@pytest.mark.parametrize("spec", [*SPECS, *WRAPPED])
def test_no_index_depends_on_the_context(spec):
    want = used(spec)
    for context, entered in CONTEXTS.items():
        with entered():
            got = used(spec)
        for mine, theirs in zip(got, want, strict=True):
            torch.testing.assert_close(mine, theirs, rtol=0, atol=0, msg=context)


@pytest.mark.parametrize("context", CONTEXTS)
def test_no_layer_depends_on_the_context(context):
    def outputs():
        layer = AttentionLayer(CASE.index("pariskv"), k=6, **SIZES)
        return [layer.step(*part, valid=None) for part in parts]

    sequence = Sequence.of(CASE, 40)
    parts = [sequence.parts(0, 20), *(sequence.parts(i, i + 1) for i in range(20, 40))]
    want = outputs()
    with CONTEXTS[context]():
        got = outputs()
    for mine, theirs in zip(got, want, strict=True):
        assert torch.equal(mine, theirs)


def test_the_caller_finds_the_context_as_it_was():
    index = CASE.index("exact")
    with default_dtype(torch.float64), torch.device("meta"), torch.autocast("cpu"):
        index.append(*first)
        with pytest.raises(ValueError, match="k: got 0"):
            index.search(queries, k=0)
        assert torch.get_default_dtype() == torch.float64
        assert torch.get_default_device().type == "meta"
        assert torch.is_autocast_enabled("cpu")


class Inside:
    """An index, each call of which is made in a context."""

    def __init__(self, index, entered):
        vars(self).update(index=index, entered=entered)

    def __getattr__(self, name):
        found = getattr(self.index, name)
        if not callable(found):
            return found

        def call(*args, **options):
            with self.entered():
                return found(*args, **options)

        return call

    def __len__(self):
        return len(self.index)


@pytest.mark.slow
@pytest.mark.parametrize("name", kvindex.names())
@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
def test_index_keeps_the_contract_in_every_context(check, name):
    for case in CASES:
        for entered in CONTEXTS.values():
            check(lambda c=case, e=entered, **options: Inside(c.index(name, **options), e), case)
