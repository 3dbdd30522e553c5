"""Numbers too large, rows too many, and concurrent threads: an error, or right results."""

import copy
import dataclasses
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import pytest
import torch

from kvindex import BaseIndex
from kvindex.core import check, transaction
from kvindex.core.check import MOST_ROWS
from kvindex.layer import AttentionLayer
from kvindex.testing.contract.limits import (
    check_numbers_beyond_are_refused_by_name,
    check_the_largest_numbers_give_scores,
)
from tests.contract.test_contract import SPECS
from tests.contract.test_faults import WRAPPED
from tests.support.helpers import Case, assert_well_formed, left_padding
from tests.support.sequences import SIZES, Sequence

CASE = Case(q_heads=4, kv_heads=2, head_dim=16, value_dim=8, batch=2)
ALL = [*SPECS, *WRAPPED]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("spec", ALL)
def test_the_largest_numbers_give_scores(spec, dtype):
    """Keys and queries are up to `LARGEST`; half of the products cancel."""
    case = dataclasses.replace(CASE, dtype=dtype)
    check_the_largest_numbers_give_scores(partial(case.index, spec), case)


@pytest.mark.parametrize("scale", check.SCALES)
@pytest.mark.parametrize("spec", ALL)
def test_the_largest_numbers_give_scores_with_the_least_and_largest_scale(spec, scale):
    """This holds also with the smallest and the largest softcap, for any scale."""
    for softcap in (None, *check.SOFTCAPS):
        case = dataclasses.replace(CASE, softcap=softcap)
        make = partial(case.index, spec, scale=scale)
        check_the_largest_numbers_give_scores(make, case)


def test_logits_of_the_largest_numbers_are_finite_in_float32():
    """Larger estimates, and twice a logarithm, still fit in float32."""
    largest = check.SCALES[1] * 2**12 * check.LARGEST**2
    assert 8 * largest < torch.finfo(torch.float32).max


@pytest.mark.parametrize("spec", ALL)
def test_numbers_beyond_are_refused_by_name(spec):
    check_numbers_beyond_are_refused_by_name(partial(CASE.index, spec), CASE)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_infinity_is_refused_in_half_precision(dtype):
    case = Case(dtype=dtype)
    keys, values = case.tokens(4)
    keys[0, 0, 2, 1] = float("inf")
    with pytest.raises(ValueError, match="keys: got inf"):
        case.index("exact").append(keys, values)


# Rows


@pytest.mark.parametrize("spec", SPECS)
def test_more_rows_than_there_are_cost_nothing(spec, monkeypatch):
    """The hits and their width are the same as for `k` equal to the number of rows."""
    index = CASE.index(spec)
    index.append(*CASE.tokens(40), valid=left_padding([3, 0], 40))
    index.observe_queries(CASE.queries()[:, :, None], torch.tensor([39]))
    index.end_prompt()
    want = index._search(CASE.queries(), 300)
    asked = []
    search = type(index)._search
    monkeypatch.setattr(
        type(index), "_search", lambda self, q, k: asked.append(k) or search(self, q, k)
    )
    hits = index.search(CASE.queries(), k=300)
    assert_well_formed(hits, index, 2, 300)
    assert torch.equal(hits.ids, want.ids)
    torch.testing.assert_close(hits.scores, want.scores)
    assert asked[0] <= 2 * 40


def test_a_layer_asks_for_no_more_rows_than_there_can_be():
    layer = AttentionLayer(CASE.index("exact"), k=MOST_ROWS, **SIZES)
    sequence = Sequence.of(CASE, 60)
    sequence.feed(layer, 0, 30)
    start = time.perf_counter()
    sequence.assert_equals(sequence.feed(layer, 30, 31), sequence.dense(), 30)
    assert time.perf_counter() - start < 1  # 2^24 rows of 96 bytes would take longer


@pytest.mark.parametrize(
    "spec",
    ["exact+recall", "exact+sample", "exact+reuse", "exact+vattention"],
)
def test_wrappers_of_more_rows_than_there_are_cost_nothing(spec):
    index, most = CASE.index(spec), CASE.index(spec)
    for one in (index, most):
        one.append(*CASE.tokens(40))
    start = time.perf_counter()
    hits = index.search(CASE.queries(), k=10**5)
    assert time.perf_counter() - start < 1
    assert_well_formed(hits, index, 2, 10**5)
    want = most.search(CASE.queries(), k=40)
    assert torch.equal(hits.ids[..., :40].sort(-1).values, want.ids.sort(-1).values)
    if hits.log_weight is not None:
        assert (hits.log_weight[..., :40] == 0).all()


@pytest.mark.parametrize("k", [0, -1, 2.0, True, MOST_ROWS + 1, 2**40])
def test_a_k_out_of_range_is_refused(k):
    index = CASE.index("exact")
    with pytest.raises(ValueError, match=f"k: got {k}"):
        index.search(CASE.queries(), k=k)
    with pytest.raises(ValueError, match=f"k: got {k}"):
        AttentionLayer(index, k=k)


def test_a_layer_refuses_other_layouts_at_any_step():
    layer, sequence = AttentionLayer(CASE.index("exact"), k=6, **SIZES), Sequence.of(CASE, 60)
    for token in range(3):
        sequence.feed(layer, token, token + 1)
    queries, keys, values = sequence.parts(3, 4)
    with pytest.raises(ValueError, match=r"keys: got layout torch.sparse_coo"):
        layer.step(queries, keys.to_sparse(), values)
    with pytest.raises(ValueError, match=r"bias: got dtype torch\.int64"):
        layer.step(queries, keys, values, bias=torch.zeros(2, 4, 1, 4, dtype=torch.int64))


def test_a_mass_that_cannot_be_told_is_refused_when_a_layer_is_made():
    for spec in ("quest", "exact+sample", "exact:group=mean_query", "quest+reuse"):
        with pytest.raises(ValueError, match="coverage: got"):
            AttentionLayer(CASE.index(spec), coverage=0.9)


def test_other_layouts_are_refused():
    index = CASE.index("exact")
    keys, values = CASE.tokens(4)
    with pytest.raises(ValueError, match=r"keys: got layout torch.sparse_coo, allowed is a dense"):
        index.append(keys.to_sparse(), values)
    with pytest.raises(ValueError, match="keys: got a nested tensor"):
        index.append(torch.nested.nested_tensor([keys[0], keys[1]]), values)


# Threads


class Gate:
    """Stops a call in the middle until it is released."""

    def __init__(self, index, name):
        self.there, self.go = threading.Event(), threading.Event()
        method = getattr(index, name)

        def held(*args, **options):
            self.there.set()
            assert self.go.wait(10)
            return method(*args, **options)

        setattr(index, name, held)


def beside(gate, first, second):
    """Return the result or error of `second`, called while `first` is stopped in the gate, and of
    `first`."""
    found = []

    def run():
        try:
            found.append(first())
        except Exception as error:
            found.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    assert gate.there.wait(10)
    try:
        second()
    except RuntimeError as error:
        refused = str(error)
    else:
        refused = ""
    gate.go.set()
    thread.join()
    return refused, found[0]


@pytest.mark.parametrize(
    ("gate", "first", "second", "refused"),
    [
        ("_prepared", "append", "search", True),
        ("_prepared", "append", "append", True),
        ("_search", "search", "append", True),
        ("_search", "search", "truncate", True),
        ("_search", "search", "fetch", False),
        # `nbytes` is a counter, which is allowed meanwhile
        ("_prepared", "append", "nbytes", False),
        ("_search", "search", "nbytes", False),
    ],
)
def test_reads_run_beside_reads_and_nothing_beside_a_change(gate, first, second, refused):
    index = CASE.index("exact")
    index.append(*CASE.tokens(30))
    hits = index.search(CASE.queries(), k=5)
    calls = {
        "append": lambda: index.append(*CASE.tokens(3)),
        "search": lambda: index.search(CASE.queries(), k=5),
        "truncate": lambda: index.truncate(9),
        "fetch": lambda: index.fetch(hits),
        "nbytes": index.nbytes,
    }
    message, outcome = beside(Gate(index, gate), calls[first], calls[second])
    assert message.startswith(f"{second}: got a call while another thread's") == refused
    assert not isinstance(outcome, Exception)
    assert len(index) == 30 + 3 * (first == "append")
    index.append(*CASE.tokens(3))  # no other thread is in a call


def test_searches_beside_one_another_make_an_index_of_faiss_once(monkeypatch):
    pytest.importorskip("faiss", reason="needs faiss-cpu")
    index, inside, most = CASE.index("faiss-flat"), [], []
    index.append(*CASE.tokens(40))
    want = index.search(CASE.queries(), k=5)
    index = copy.deepcopy(index)  # a copy builds its FAISS indexes in its first search
    fill = type(index)._fill

    def slow(self, held):
        inside.append(held)
        most.append(len(inside))
        time.sleep(0.05)
        fill(self, held)
        inside.pop()

    monkeypatch.setattr(type(index), "_fill", slow)
    with ThreadPoolExecutor(3) as pool:
        hits = list(pool.map(lambda _: index.search(CASE.queries(), k=5), range(3)))
    assert most == [1]
    assert all(torch.equal(one.ids, want.ids) for one in hits)


def test_a_call_that_fails_is_undone_before_another_thread_may_look(monkeypatch):
    index, rollback, inside = CASE.index("exact"), BaseIndex.rollback, []

    def seen(self, checkpoint):
        access = self._access
        inside.append((access._holder[transaction._HOLDER], access._depth))
        rollback(self, checkpoint)

    monkeypatch.setattr(BaseIndex, "rollback", seen)
    with pytest.raises(ValueError, match="values: got shape"):
        index.append(CASE.tokens(3)[0], CASE.tokens(4)[1])
    assert inside == [(threading.get_ident(), depth) for depth in (2, 1)]  # start_append, append
    assert not index._access._holder


def test_two_threads_in_one_layer_are_told():
    layer = AttentionLayer(CASE.index("exact"), k=6, **SIZES)
    sequence = Sequence.of(CASE, 60)
    sequence.feed(layer, 0, 30)
    gate = Gate(layer._retrieval, "attend")
    message, _ = beside(gate, lambda: sequence.feed(layer, 30, 31), lambda: layer.truncate(3))
    assert message.startswith("truncate: got a call while another thread's call is running")
    assert len(layer) == 31
    sequence.assert_equals(sequence.feed(layer, 31, 33), sequence.dense(), 31)


def test_a_search_that_keeps_something_is_a_change():
    index = CASE.index("exact+reuse")
    index.append(*CASE.tokens(30))
    gate = Gate(index, "_searched")
    search = [lambda: index.search(CASE.queries(), k=5)] * 2
    assert beside(gate, *search)[0].startswith("search: got a call while another thread's")
