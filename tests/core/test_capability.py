"""An instance reports its capabilities, and every wrapper passes them on."""

from pathlib import Path

import pytest

import kvindex
from kvindex.core import protocol
from kvindex.core.capability import capability
from kvindex.core.protocol import (
    AppendsAsync,
    Attends,
    AttendsToAll,
    CapturesAll,
    CapturesStep,
    CapturesTokens,
    ChecksTokens,
    CountsTokens,
    DecodesStep,
    ExpandsBatch,
    JoinsBatch,
    LimitsError,
    LimitsSteps,
    ObservesQueries,
    ReportsCoverage,
    ReportsRowBytes,
    SearchesShard,
    WeighsRows,
)
from kvindex.indexes.exact import Exact
from kvindex.registry import wrapper_options
from kvindex.wrappers import MeasureRecall, Reuse, Sample, Sharded, VAttention, Wrapper
from tests.support.helpers import Case

CLASSES = {
    "recall": MeasureRecall,
    "reuse": Reuse,
    "sample": Sample,
    "sharded": Sharded,
    "vattention": VAttention,
    "wrapper": Wrapper,
}
CAPABILITIES = [
    found
    for found in vars(protocol).values()
    if getattr(found, "_is_runtime_protocol", False) and found is not protocol.KVIndex
]
ONLY_ITS_OWN = {
    ("reuse", ObservesQueries),
    *((name, own) for name in ("sample", "vattention") for own in (ReportsCoverage, WeighsRows)),
    *(("sharded", own) for own in (Attends, CountsTokens, ReportsCoverage)),
}
"""Capabilities of a wrapper that do not depend on the inner index."""
NOT_PASSED_ON = {
    # a fused step of the inner index would bypass the wrapper's search
    *((name, step) for name in CLASSES for step in (DecodesStep, ChecksTokens, CapturesStep)),
    *((name, step) for name in CLASSES for step in (CapturesTokens, CapturesAll, AttendsToAll)),
    *((name, step) for name in CLASSES for step in (LimitsSteps, JoinsBatch, SearchesShard)),
    # these have a search of their own, without a limit of the error
    *((name, LimitsError) for name in ("reuse", "sample", "sharded", "vattention")),
    ("recall", AppendsAsync),  # the exact copy's append is part of the same change
    ("recall", ExpandsBatch),  # hits of a view would not be counted
    ("reuse", ExpandsBatch),  # a step may reuse the previous hits
    # an append and a search are calls of all ranks together
    *(("sharded", together) for together in (AppendsAsync, ExpandsBatch)),
}


class Able(Exact):
    """An index with the methods of all capabilities, which offers those in `offered`."""

    offered = frozenset(CAPABILITIES)
    block_tokens = 256

    learns_from = 512

    most_tokens = 8

    def attend_all(self):
        """Never called, like the following methods."""

    def decode_step(self):
        """Never called, like the following methods."""

    def attend(self):
        pass

    def attend_hits(self):
        pass

    def prepare_replay(self):
        pass

    def captured_step(self):
        pass

    def prepare_tokens(self):
        pass

    def captured_tokens(self):
        pass

    def prepare_all(self):
        pass

    def captured_all(self):
        pass

    def new_batch(self):
        pass

    def batch_row(self):
        pass

    def search_within(self):
        pass

    def reserve(self):
        pass

    def warm_up(self):
        pass

    def _offers(self, wanted):
        return wanted in self.offered


def able(offered):
    case = Case()
    index = Able(q_heads=case.q_heads, kv_heads=case.kv_heads, head_dim=case.head_dim)
    index.offered = frozenset(offered)
    return index


def test_all_capabilities_are_found():
    assert {AppendsAsync, Attends, DecodesStep, ReportsRowBytes} < set(CAPABILITIES)
    assert set(wrapper_options()) == set(CLASSES) - {"wrapper"}


@pytest.mark.parametrize("name", CLASSES)
@pytest.mark.parametrize("wanted", CAPABILITIES, ids=lambda wanted: wanted.__name__)
def test_a_wrapper_has_what_it_and_its_inner_index_have(name, wanted):
    if wanted is not WeighsRows or name not in (
        "sample",
        "vattention",
    ):  # sampling sampled rows raises an error
        wrapper = CLASSES[name](able({wanted}))
        passed = (name, wanted) not in NOT_PASSED_ON
        assert wrapper.capability(wanted) is (wrapper if passed else None)
        twice = Wrapper(wrapper)  # also around a wrapper
        assert twice.capability(wanted) is (twice if passed else None)
    wrapper = CLASSES[name](able({}))
    own = (name, wanted) in ONLY_ITS_OWN
    assert wrapper.capability(wanted) is (wrapper if own else None)


def test_the_instance_answers():
    case = Case()
    exact, reuse = case.index("exact"), case.index("exact+reuse")
    assert exact.capability(ExpandsBatch) is exact
    assert reuse.capability(ExpandsBatch) is None
    assert exact.capability(AppendsAsync) is None  # although its class has the method
    assert exact.capability(Attends) is None
    pariskv = case.index("pariskv")
    assert pariskv.capability(Attends) is None  # there are no kernels here
    assert case.index("retroinfer").capability(WeighsRows) is not None


class Foreign:
    """An index of another library, with only the methods of the protocol."""

    def __init__(self, inner):
        self.inner = inner

    def check_coverage(self, coverage):  # a protocol looks for it without __getattr__
        self.inner.check_coverage(coverage)

    def __getattr__(self, name):
        if name in ("expand_batch", "capability", "row_bytes"):
            raise AttributeError(name)
        return getattr(self.inner, name)


def test_an_index_of_others_can_do_what_it_has_the_methods_for():
    foreign = Foreign(Case().index("exact"))
    assert capability(foreign, ReportsCoverage) is foreign
    assert capability(foreign, ExpandsBatch) is None
    assert Wrapper(foreign).capability(ReportsRowBytes) is None
    assert Wrapper(foreign).capability(ReportsCoverage) is not None


@pytest.mark.parametrize("name", sorted(wrapper_options()))
def test_a_wrapped_index_explains_the_wrapper_and_then_itself(name):
    inner = Case().index("exact")
    wrapped = CLASSES[name](inner)
    options = ", ".join(f"{o}={value!r}" for o, value in wrapper_options()[name].items())
    lines = [f"wrapper: {CLASSES[name].__name__}({options})", inner.explain()]
    said = wrapped.explain()
    assert said.startswith("\n".join(lines))
    assert (said == "\n".join(lines)) == (name != "sharded"), "which rank it is, too"
    assert Wrapper(wrapped).explain() == f"wrapper: Wrapper()\n{said}"
    assert Case().index(f"exact+{name}").explain().startswith(lines[0])


def test_what_a_wrapper_keeps_under_another_name_is_not_explained():
    class Noting(Wrapper):
        def __init__(self, inner, *, notes, every=2):
            super().__init__(inner)
            self._notes, self.every = notes, every

    said = Noting(Case().index("exact"), notes=[]).explain()
    assert said.startswith("wrapper: Noting(every=2)\nbackend: torch")


def test_counts_of_a_wrapper_are_its_inner_indexs():
    index = Case(batch=2).index("exact+reuse+recall")
    index.append(*Case(batch=2).tokens(5))
    assert index.counts.tolist() == [5, 5]


def test_a_wrapper_says_what_its_inner_index_lacks():
    wrapper = Wrapper(kvindex.create("h2o", q_heads=2, kv_heads=1, head_dim=8))
    with pytest.raises(TypeError, match="inner: got H2O, which does not support the protocol Exp"):
        wrapper.expand_batch(2)


def test_the_page_of_the_protocol_names_every_capability():
    page = (Path(__file__).parents[2] / "docs/api/protocol.md").read_text()
    assert [found.__name__ for found in CAPABILITIES if f"`{found.__name__}`" not in page] == []
