"""A damaged or forged state is not loaded: ValueError names the tensor, the index stays empty.

Every index is found by scanning. A mutation signs the state again, as a knowledgeable attacker
would (`about` lists shapes and dtypes, which can be changed as well).
"""

import copy
import functools
import itertools
import time
from dataclasses import replace

import pytest
import torch

import kvindex
from kvindex.core.protocol import ChecksState
from kvindex.storage.state import ABOUT
from tests.contract.test_state import CASE, SPECS, do, life, made
from tests.support.forged import resigned
from tests.support.helpers import left_padding, mostly_slow, sampled

SECONDS = 5
"""Time limit. Each load takes milliseconds."""


@functools.cache
def states(spec):
    """Return two states of an index: one in use, and one after a long padded prompt and a
    search."""
    index = made(spec)
    for deed in [*enumerate(life(1))][:9]:
        do(index, *deed)
    first = index.state_dict()
    index = made(spec)
    queries = CASE.tensor(3, 2, 4, 700, 16)
    index.observe_queries(queries, torch.arange(700))
    index.observe_tokens(torch.arange(700) % 5, first=0)
    index.append(*CASE.tokens(700), valid=left_padding([0, 3], 700))
    index.end_prompt()
    index.append(*CASE.tokens(70, seed=5))
    index.search(CASE.queries(0), k=5)
    return first, index.state_dict()


def loaded(spec, state):
    """Return the message of the error, or None if the state was loaded and searched."""
    index, start = made(spec), time.perf_counter()
    try:
        index.load_state_dict(state)
    except ValueError as error:
        assert len(index) == 0
        assert index.state_dict().keys() == made(spec).state_dict().keys()
        return str(error)
    finally:
        assert time.perf_counter() - start < SECONDS
    hits = index.search(CASE.queries(2), k=9)
    assert bool((hits.ids < len(index)).all())
    index.fetch(hits)
    return None


@pytest.mark.parametrize("spec", SPECS)
def test_every_tensor_of_a_state_is_declared(spec):
    for state in states(spec):
        outline = {
            name: part if part.ndim == 0 or name.endswith(ABOUT) else part.to("meta")
            for name, part in state.items()
        }
        index = made(spec)
        for one in (state, outline):
            index.check_state(one)
        assert index.capability(ChecksState) is index
        assert loaded(spec, state) is None


def with_last(part, value):
    part = part.contiguous().clone()
    part.view(-1)[-1] = value
    return part


def changes(name, part):
    """Return changes with the changed tensor, which is None if it is removed."""
    yield "dropped", None
    others = [torch.float64, torch.int16, torch.bool]
    yield "dtype", part.to(next(dtype for dtype in others if dtype != part.dtype))
    yield "an axis more", part[None].clone()
    for axis in range(part.ndim):
        if part.shape[axis]:
            yield f"axis {axis} cut", part.narrow(axis, 0, part.shape[axis] - 1).clone()
    if not part.numel():
        return
    if part.dtype.is_floating_point or part.dtype.is_complex:
        yield "NaN", with_last(part, float("nan"))
    if name.endswith("rows"):
        broken = part.clone()
        broken[..., -1, :] = 255  # NaN in every floating-point format
        yield "NaN", broken
    if part.dtype in (torch.int64, torch.int32):
        yield "too large", with_last(part, 2**31 - 1)
        yield "negative", with_last(part, -(2**31))


MEANS_SOMETHING_ELSE = {
    # without flags all tokens are real, without a newest query none was observed
    *(("valid", "dropped"), ("newest", "dropped"), ("threshold", "dropped")),
    *(("ends", "axis 1 cut"), ("cuts", "axis 0 cut")),  # no sentence, or segment, ends there
    # positions may be large
    *(("end", "too large"), ("next", "too large"), ("newest", "too large")),
    *(("newest", "negative"), ("positions", "too large"), ("first", "too large")),
    *(("shift", "too large"), ("ends", "axis 0 cut")),
    # counters of a wrapper
    *((name, "too large") for name in ("steps", "searches", "found", "reachable", "wanted")),
    *(("before", "dropped"), ("differs", "dropped"), ("next", "dropped")),
    ("queries", "axis 0 cut"),  # an empty tensor of queries
}
"""Part of a tensor's name, and a change that gives a different but valid state."""


@pytest.mark.parametrize("spec", mostly_slow(SPECS, *kvindex.names(), "exact+reuse:tau=-.1"))
def test_a_change_of_any_tensor_is_refused_or_harmless(spec):
    for state in states(spec):
        for name, part in state.items():
            for what, changed in changes(name, part) if not name.endswith(ABOUT) else ():
                forged = {other: state[other] for other in state if other != name}
                forged |= {} if changed is None else {name: changed}
                message = loaded(spec, resigned(forged))
                last = name.rpartition(".")[2]
                if message is None:
                    assert (last, what) in MEANS_SOMETHING_ELSE, (name, what)
                else:
                    assert message.startswith("state["), (name, what, message)


@pytest.mark.parametrize("check", [None, True, False])
def test_rows_are_read_unless_the_caller_vouches_for_them(check):
    state = states("exact")[0]
    broken = state["rows"].clone()
    broken[..., -1, :] = 255  # NaN
    index = made("exact", check=check)
    if check is False:
        index.load_state_dict(resigned({**state, "rows": broken}))
        return
    with pytest.raises(ValueError, match=r"^state\['rows'\]: "):
        index.load_state_dict(resigned({**state, "rows": broken}))


def test_hits_of_another_number_of_heads_are_refused():
    state = states("exact+reuse:tau=-.1")[1]
    cut = {name: state[f"last.hits.{name}"][:, :1] for name in ("ids", "scores")}
    forged = resigned(state | {f"last.hits.{name}": part for name, part in cut.items()})
    assert loaded("exact+reuse:tau=-.1", forged).startswith("state['last.hits.")


@pytest.mark.parametrize("spec", mostly_slow(SPECS, *SPECS[::3]))
def test_another_length_or_batch_is_refused(spec):
    for state in states(spec):
        for name in state:
            if name.rpartition(".")[2] not in ("length", "batch") or name.startswith("last."):
                continue
            now = int(state[name])
            for number in (-1, 0, now - 1, now + 1, 10**6, 10**9, 2**62):
                if number != now and not (number == 0 and name == "length"):
                    forged = {**state, name: torch.tensor(number)}
                    assert loaded(spec, resigned(forged)) is not None, (name, number)


@pytest.mark.parametrize("spec", mostly_slow(SPECS, *SPECS[::3]))
def test_tensors_in_each_others_place_are_refused_or_as_good(spec):
    for state in states(spec):
        names = [name for name in state if not name.endswith(ABOUT)]
        for one, other in itertools.combinations(names, 2):
            if (state[one].dtype, state[one].ndim) != (state[other].dtype, state[other].ndim):
                continue  # a change of either raises an error
            loaded(spec, resigned({**state, one: state[other], other: state[one]}))


OPTIONS = [
    *("doublesparsity:bits=none", "doublesparsity:bits=8", "dsa:key_codec=plain"),
    *("arkvale:volume=ball", "arkvale:volume=center", "arkvale:radius=max", "magicpig:stale=true"),
    *("pariskv:preset=fast", "pariskv:preset=precise", "pariskv:preset=scan"),
    *("pariskv:weight_bits=8", "pariskv:preset=fast:weights=bfloat16:center=0", "pariskv:center=0"),
    "pariskv:preset=fast:coarse=tiered_votes:center=0",
    *(
        "pariskv:preset=paper:group=union",
        "infllm:group=mean_query",
        "shadowkv:rank=none",
        "shadowkv:rank=8",
    ),
    *("pqcache:preset=infinitebench", "clusterkv:block=16", "retroinfer:block=16", "h2o:budget=8"),
    *("squeezed:block=16", "louiskv:longest=4", "snapkv:budget=40", "triattention:budget=8"),
    *("ctkvr:preset=paper512", "sentencekv:query=sentence", "leoam:page=16:leaf=16"),
    *("faiss-ivf:lists=9", "faiss-ivfpq:bits=4", "streaming", "socket:bits=3", "quest+recall"),
    *("retroinfer+reuse", "exact+vattention"),
]


@pytest.mark.parametrize(("spec", "dtype"), sampled(OPTIONS, [torch.float16, torch.bfloat16]))
def test_a_state_of_any_option_and_dtype_is_as_declared(spec, dtype):
    case = replace(CASE, dtype=dtype)
    index = made(spec, case)
    for count, deed in ((70, None), (1, "end_prompt"), (37, "mark_boundary"), (1, None)):
        first = len(index)
        queries = case.tensor(first, 2, 4, count, 16)
        index.observe_queries(queries, torch.arange(first, first + count))
        index.observe_tokens(torch.arange(count) % 5, first=first)
        index.append(
            *case.tokens(count, seed=first), valid=left_padding([0, 3 * (not first)], count)
        )
        if deed:
            getattr(index, deed)()
        index.search(case.queries(first), k=5)
        for length in (len(index), len(index) - 3, 0):
            duplicate = copy.deepcopy(index)
            duplicate.truncate(length)
            duplicate.reorder(torch.tensor([1, 0, 1]))
            for one in (index, duplicate):
                other = made(spec, case)
                other.load_state_dict(one.state_dict())
                assert len(other) == len(one)
