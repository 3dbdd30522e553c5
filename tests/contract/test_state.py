"""The state of an index is named tensors, and another index that loads them continues like it."""

import random
from dataclasses import replace

import pytest
import torch

import kvindex
from kvindex.core.protocol import KeepsState
from kvindex.layer import AttentionLayer
from kvindex.wrappers import Wrapper
from tests.support.helpers import Case, left_padding, sampled
from tests.support.sequences import SIZES, Sequence

CASE = Case(q_heads=4, kv_heads=2, head_dim=16, value_dim=24, batch=2)
SPECS = [
    *kvindex.names(),
    *("pariskv:preset=paper", "pariskv:preset=accurate", "squeezed:sparsity=.3"),
    *("pariskv+reuse:tau=2", "exact+reuse:tau=-.1", "h2o+recall", "exact+sample"),
]


def made(spec, case=CASE, **options):
    if spec.startswith("faiss"):
        pytest.importorskip("faiss")
    return case.index(spec, **options)


def life(seed):
    """Return the calls on an index in order, as (name, arguments)."""
    rng = random.Random(seed)
    deeds = [("append", 45, [0, rng.randrange(1, 9)]), ("append", rng.randrange(1, 30), None)]
    deeds += [("search",), ("end_prompt",), ("search",)]
    for _ in range(9):
        deed = rng.choice(["truncate", "reorder", "mark_boundary", "append", "append", "append"])
        arguments = {
            "append": (rng.choice([1, 1, 17]), None),
            "truncate": (rng.randrange(12, 30),),  # number of tokens to remove
            "reorder": (rng.choice([[1, 0], [0, 0], [1, 1]]),),
        }
        deeds += [(deed, *arguments.get(deed, ())), ("search",)]
    return deeds


def do(index, number, deed):
    """Make a call, and return its result."""
    name, *given = deed
    if name == "append":
        (count, pads), first = given, len(index)
        index.observe_queries(
            CASE.tensor(500 + number, 2, 4, count, 16), torch.arange(first, first + count)
        )
        index.observe_tokens(torch.arange(count) % 5, first=first)
        valid = None if pads is None else left_padding(pads, count)
        index.append(*CASE.tokens(count, seed=number), valid=valid)
    elif name == "truncate":
        index.truncate(max(len(index) - given[0], 1))
    elif name == "reorder":
        index.reorder(torch.tensor(given[0]))
    elif name == "search":
        hits = index.search(CASE.queries(number), k=9)
        rows = index.fetch(hits)
        return hits.ids, hits.scores, hits.log_weight, rows.keys, rows.values
    else:
        index.end_prompt() if name == "end_prompt" else index.mark_boundary()
    return ()


def assert_equal(got, want):
    for mine, theirs in zip(got, want, strict=True):
        assert (mine is None) == (theirs is None)
        assert mine is None or torch.equal(mine, theirs)


def assert_same_state(first, second):
    first, second = first.state_dict(), second.state_dict()
    assert first.keys() == second.keys()
    for name in first:
        assert torch.equal(first[name], second[name]), name


@pytest.mark.parametrize(("spec", "seed"), sampled(SPECS, [0, 1, 2]))
def test_an_index_that_loads_a_state_goes_on_as_the_one_that_gave_it(spec, seed):
    index, other, deeds = made(spec), made(spec), [*enumerate(life(seed))]
    at = random.Random(seed).randrange(len(deeds))
    for deed in deeds[:at]:
        do(index, *deed)
    state = index.state_dict()
    before = {name: tensor.clone() for name, tensor in state.items()}
    other.load_state_dict(state)
    assert len(other) == len(index)
    assert_same_state(index, other)
    for deed in deeds[at:]:
        assert_equal(do(index, *deed), do(other, *deed))
    assert_same_state(index, other)
    for name in state:  # no call wrote to the tensors of the state
        assert torch.equal(state[name], before[name]), name


@pytest.mark.parametrize("spec", ["pariskv", "exact", "quest", "h2o"])
@pytest.mark.parametrize("row_codec", ["int8", "fp8", "int2"])
def test_rows_stay_the_bytes_they_are(spec, row_codec):
    index, other = (made(spec, row_codec=row_codec, store="host") for _ in range(2))
    index.append(*CASE.tokens(30))
    other.load_state_dict(index.state_dict())
    assert_same_state(index, other)


@pytest.mark.parametrize("name", kvindex.names())
def test_an_empty_index_has_a_state_and_so_has_one_that_was_told_only(name):
    index, other = made(name), made(name)
    other.load_state_dict(index.state_dict())
    queries = CASE.tensor(1, 2, 4, 5, 16)
    index.observe_queries(queries, torch.arange(5))
    index.end_prompt()
    other.load_state_dict(index.state_dict())
    for one in (index, other):
        one.append(*CASE.tokens(20))
    assert_same_state(index, other)
    for one in (index, other):
        one.truncate(0)
    third = made(name)
    third.load_state_dict(index.state_dict())
    assert_same_state(index, third)
    with pytest.raises(ValueError, match="keys: got shape"):
        third.append(*CASE.tokens(20, batch=1))  # the batch size does not change


def without(name):
    return lambda state: {other: part for other, part in state.items() if other != name}


WRONG = {
    "no mapping": (lambda state: 5, "state: got int, allowed is a dict of named tensors"),
    "no tensors": (lambda state: {**state, "rows": 1}, "state: got dict, allowed is a dict of"),
    "no about": (without("about"), "state: got no 'about' tensor"),
    "nonsense": (lambda state: {**state, "about": torch.zeros(3)}, "state: got no 'about'"),
    "missing": (without("rows"), r"state\['rows'\]: got none, allowed is torch.uint8"),
    "unknown": (
        lambda state: {**state, "codes.more": torch.zeros(1)},
        r"state\['codes.more'\]: got torch.float32 \[1\], allowed is none",
    ),
    "shape": (
        lambda state: {**state, "rows": state["rows"][:, :, :7]},
        r"state\['rows'\]: got torch.uint8 \[2, 2, 7, .*\], allowed is .*\[2, 2, 30, ",
    ),
    "dtype": (
        lambda state: {**state, "valid": state["valid"].int()},
        r"state\['valid'\]: got torch.int32 \[2, 30\], allowed is torch.bool",
    ),
}


@pytest.mark.parametrize(("change", "match"), WRONG.values(), ids=WRONG)
def test_what_is_no_state_is_refused_in_words(change, match):
    index, other = made("pariskv"), made("pariskv")
    index.append(*CASE.tokens(30), valid=left_padding([3, 0], 30))
    with pytest.raises((TypeError, ValueError), match=match):
        other.load_state_dict(change(index.state_dict()))
    assert (len(other), other._batch) == (0, None)
    other.load_state_dict(index.state_dict())
    assert_same_state(index, other)


@pytest.mark.parametrize(
    ("other", "match"),
    [
        (lambda: made("exact"), r"index = 'ParisKV', allowed is 'Exact'"),
        (lambda: made("pariskv", beta=0.5), r"config.beta = 0.005, allowed is 0.5"),
        (lambda: made("pariskv", replace(CASE, softcap=2.0)), "softcap = None, allowed is 2.0"),
        (
            lambda: made("pariskv", replace(CASE, head_dim=32)),
            r"geometry.head_dim = 16, allowed is 32",
        ),
        (lambda: made("pariskv", rope=torch.ones(8)), "geometry.rope = None, allowed is"),
        (lambda: made("pariskv", row_codec="int8"), "row_codec = 'plain', allowed is 'int8'"),
        (lambda: made("pariskv+recall"), "wrapper = None, allowed is 'MeasureRecall'"),
    ],
)
def test_the_state_of_another_is_refused_in_words(other, match):
    index, other = made("pariskv"), other()
    index.append(*CASE.tokens(30))
    with pytest.raises(ValueError, match=match):
        other.load_state_dict(index.state_dict())
    assert len(other) == 0


def test_an_index_that_holds_tokens_takes_no_state():
    index = made("exact")
    index.append(*CASE.tokens(30))
    with pytest.raises(ValueError, match="got an index with 30 tokens and batch size 2"):
        index.load_state_dict(index.state_dict())
    assert len(index) == 30


class LoadError(Exception):
    """An error of a load."""


def test_a_load_that_fails_leaves_the_index_as_it_was(monkeypatch):
    index, other = made("h2o"), made("h2o")
    index.append(*CASE.tokens(30))
    before = other.state_dict()

    def fail(*_):
        raise LoadError

    with monkeypatch.context() as patch:
        patch.setattr(type(other), "_unpack", fail)
        with pytest.raises(LoadError):
            other.load_state_dict(index.state_dict())
    after = other.state_dict()
    assert before.keys() == after.keys()
    other.load_state_dict(index.state_dict())
    assert_same_state(index, other)


@pytest.mark.parametrize(
    ("spec", "at"),
    sampled(["exact", "pariskv", "snapkv", "h2o+reuse", "quest+recall"], [0, 5, 22, 41]),
)
def test_a_layer_that_loads_a_state_goes_on_as_the_one_that_gave_it(spec, at):
    case = Case(q_heads=4, kv_heads=2, batch=2)
    sequence = Sequence.of(case, 60, [3, 0])
    layer, other = (
        AttentionLayer(case.index(spec), k=7, **{**SIZES, "dense_below": 0}) for _ in range(2)
    )
    done = 0
    for stop in [12, *range(13, 60)]:
        if done >= at > 0 or (not at and not done):
            break
        sequence.feed(layer, done, stop)
        done = stop
    other.load_state_dict(layer.state_dict())
    assert len(other) == len(layer)
    for start, stop in ([(0, 12)] if not done else []) + [
        (i, i + 1) for i in range(done or 12, 60)
    ]:
        outputs = [sequence.feed(one, start, stop) for one in (layer, other)]
        assert torch.equal(*outputs)
    assert_same_state(layer, other)
    with pytest.raises(ValueError, match="layer: got a layer with 60 tokens"):
        layer.load_state_dict(other.state_dict())
    smaller = AttentionLayer(case.index(spec), k=7, **{**SIZES, "sink": 1})
    with pytest.raises(ValueError, match=r"layer.sink = .*, allowed is 1"):
        smaller.load_state_dict(layer.state_dict())


def test_an_index_of_others_may_keep_no_state():
    class Foreign:
        def __init__(self, inner):
            self._inner = inner

        def __len__(self):
            return len(self._inner)

        def __getattr__(self, name):
            if name in ("state_dict", "load_state_dict"):
                raise AttributeError(name)
            return getattr(self._inner, name)

    foreign = Foreign(made("exact"))
    assert Wrapper(foreign).capability(KeepsState) is None
    with pytest.raises(
        ValueError, match="index: got Foreign, allowed is an index that offers Keeps"
    ):
        AttentionLayer(foreign).state_dict()
