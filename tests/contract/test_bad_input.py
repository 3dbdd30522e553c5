"""Bad input raises an error that names argument, value and allowed values, and changes nothing.

The file is long, because it is a table of wrong inputs and the calls that read them.
"""

import copy
import dataclasses
import re
from contextlib import contextmanager

import pytest
import torch

import kvindex
from kvindex import BaseIndex, Hits
from kvindex.core import backend
from tests.support.helpers import Case, assert_same_snapshot, hits_of, snapshot

CASE = Case(q_heads=6, kv_heads=2, head_dim=16, value_dim=8, batch=2)
NAN, INF = float("nan"), float("inf")


def spoiled(tensor, value):
    tensor = tensor.clone()
    tensor[1, 1, ..., 3] = value
    return tensor


def ids(*shape, fill=0):
    return torch.full(shape, fill, dtype=torch.int64)


KEYS, VALUES = CASE.tokens(20)
QUERIES = CASE.queries()
VALID = torch.ones(2, 20, dtype=torch.bool)

BAD_CALLS = {
    # name of the case: (call, parts of the error message, in order)
    "keys of rank 3": (
        lambda i: i.append(KEYS[0], VALUES),
        ["keys", "[2, 20, 16]", "B=2, G=2, N, D=16"],
    ),
    "keys that are no tensor": (lambda i: i.append([1.0], VALUES), ["keys", "list", "Tensor"]),
    "keys of another dtype": (
        lambda i: i.append(KEYS.half(), VALUES),
        ["keys", "float16", "float32"],
    ),
    "keys on another device": (
        lambda i: i.append(KEYS.to("meta"), VALUES),
        ["keys", "device meta", "cpu"],
    ),
    "keys with query heads": (
        lambda i: i.append(KEYS.repeat(1, 3, 1, 1), VALUES),
        ["keys", "[2, 6, 20, 16]", "G=2"],
    ),
    "keys of another width": (lambda i: i.append(KEYS[..., :8], VALUES), ["keys", "8]", "D=16"]),
    "keys of another batch": (lambda i: i.append(KEYS[:1], VALUES[:1]), ["keys", "[1,", "B=2"]),
    "NaN in keys": (lambda i: i.append(spoiled(KEYS, NAN), VALUES), ["keys", "nan", "finite"]),
    "infinity in keys": (
        lambda i: i.append(spoiled(KEYS, -INF), VALUES),
        ["keys", "-inf", "finite"],
    ),
    "NaN in a valid key beside padding": (
        lambda i: i.append(spoiled(KEYS, NAN), VALUES, valid=torch.arange(20).expand(2, 20) > 3),
        ["keys", "nan", "finite"],
    ),
    "values of another length": (
        lambda i: i.append(KEYS, VALUES[:, :, 1:]),
        ["values", "[2, 2, 19, 8]", "N=20"],
    ),
    "values of another width": (lambda i: i.append(KEYS, KEYS), ["values", "16]", "D=8"]),
    "values of another dtype": (
        lambda i: i.append(KEYS, VALUES.double()),
        ["values", "float64", "float32"],
    ),
    "valid per head": (
        lambda i: i.append(KEYS, VALUES, valid=VALID[:, None]),
        ["valid", "[2, 1, 20]", "B=2, N=20"],
    ),
    "valid as numbers": (
        lambda i: i.append(KEYS, VALUES, valid=VALID.long()),
        ["valid", "int64", "bool"],
    ),
    "encoding NaN": (lambda i: i.encode(spoiled(KEYS, NAN)), ["keys", "nan", "finite"]),
    "encoding rank 3": (lambda i: i.encode(KEYS[0]), ["keys", "[2, 20, 16]", "D=16"]),
    "queries with a token axis": (
        lambda i: i.search(QUERIES[:, :, None], k=3),
        ["queries", "[2, 6, 1, 16]", "H=6"],
    ),
    "queries with KV heads": (
        lambda i: i.search(QUERIES[:, :2], k=3),
        ["queries", "[2, 2, 16]", "H=6"],
    ),
    "queries of another batch": (lambda i: i.search(QUERIES[:1], k=3), ["queries", "[1,", "B=2"]),
    "queries of another dtype": (
        lambda i: i.search(QUERIES.bfloat16(), k=3),
        ["queries", "bfloat16", "float32"],
    ),
    "NaN in queries": (
        lambda i: i.search(spoiled(QUERIES, NAN), k=3),
        ["queries", "nan", "finite"],
    ),
    "k of 0": (lambda i: i.search(QUERIES, k=0), ["k", "0", "at least 1"]),
    "k of -1": (lambda i: i.search(QUERIES, k=-1), ["k", "-1", "at least 1"]),
    "k as a decimal": (lambda i: i.search(QUERIES, k=2.0), ["k", "2.0", "integer"]),
    "negative truncate": (lambda i: i.truncate(-1), ["length", "-1", "at least 0"]),
    "truncate to a decimal": (lambda i: i.truncate(3.5), ["length", "3.5", "integer"]),
    "ids past the end": (lambda i: i.fetch(hits_of(ids(2, 2, 3, fill=20))), ["ids", "20", "19"]),
    "ids that name no row": (
        lambda i: i.fetch(hits_of(ids(2, 2, 3, fill=-(2**40)))),
        ["ids", str(-(2**40)), "to 19"],
    ),
    "ids of another batch": (lambda i: i.fetch(hits_of(ids(1, 2, 3))), ["ids", "[1, 2, 3]", "B=2"]),
    "ids per query head": (lambda i: i.fetch(hits_of(ids(2, 6, 3))), ["ids", "[2, 6, 3]", "G=2"]),
    "ids as int32": (
        lambda i: i.fetch(Hits(ids(2, 2, 3).int(), torch.zeros(2, 2, 3))),
        ["ids", "int32", "int64"],
    ),
    "fetching ids": (lambda i: i.fetch(ids(2, 2, 3)), ["hits", "Tensor", "Hits"]),
    "reorder past the batch": (
        lambda i: i.reorder(torch.tensor([0, 2])),
        ["batch_indices", "[0, 2]", "0 to 1"],
    ),
    "reorder below 0": (
        lambda i: i.reorder(torch.tensor([-1])),
        ["batch_indices", "[-1]", "0 to 1"],
    ),
    "reorder to nothing": (
        lambda i: i.reorder(torch.tensor([], dtype=torch.int64)),
        ["batch_indices", "[]", "non-empty"],
    ),
    "reorder by a mask": (
        lambda i: i.reorder(torch.tensor([True, False])),
        ["batch_indices", "bool", "int64"],
    ),
    "reorder by a list": (lambda i: i.reorder([0]), ["batch_indices", "list", "Tensor"]),
}

BAD_GEOMETRY = {
    "head_dim not divisible by 8": (dict(head_dim=12), ["head_dim", "12", "multiple of 8"]),
    "head_dim of 0": (dict(head_dim=0), ["head_dim", "0", "at least 1"]),
    "heads that do not divide": (dict(q_heads=5), ["q_heads", "5", "multiple of kv_heads = 2"]),
    "no KV heads": (dict(kv_heads=0), ["kv_heads", "0", "at least 1"]),
    "heads as a decimal": (dict(q_heads=4.0), ["q_heads", "4.0", "integer"]),
    "value_dim of -1": (dict(value_dim=-1), ["value_dim", "-1", "at least 1"]),
    "float64": (dict(dtype=torch.float64), ["dtype", "float64", "bfloat16"]),
    "dtype as a word": (dict(dtype="float32"), ["dtype", "float32", "torch.float32"]),
    "scale of 0": (dict(scale=0), ["scale", "0", "positive"]),
    "scale of NaN": (dict(scale=NAN), ["scale", "nan", "positive"]),
    "scale of 1e30": (dict(scale=1e30), ["scale", "1e+30", "2^-126 to 2^16"]),
    "scale of 1e-40": (dict(scale=1e-40), ["scale", "1e-40", "2^-126 to 2^16"]),
    "softcap of 1e300": (dict(softcap=1e300), ["softcap", "1e+300", "2^-126 to 2^64"]),
    "softcap of 1e-50": (dict(softcap=1e-50), ["softcap", "1e-50", "2^-126 to 2^64"]),
    "scale as a word": (dict(scale="abc"), ["scale", "abc", "positive"]),
    "softcap as a word": (dict(softcap="abc"), ["softcap", "abc", "positive"]),
    "softcap as a flag": (dict(softcap=True), ["softcap", "True", "positive"]),
    "negative softcap": (dict(softcap=-2.0), ["softcap", "-2.0", "positive"]),
    "unknown store": (dict(store="disk"), ["store", "disk", "device", "host"]),
    "unknown backend": (dict(backend="tpu"), ["backend", "tpu", "cuda", "torch"]),
    "backend as a list": (dict(backend=[1]), ["backend", "[1]", "cuda", "torch"]),
    "check as a word": (dict(check="yes"), ["check", "yes", "True, False or None"]),
    "device as a list": (dict(device=[1]), ["device", "[1]", "allowed"]),
    "preset as a number": (dict(preset=1), ["preset", "1", "string"]),
    "unknown option": (dict(gruop="union"), ["option", "gruop", "allowed"]),
    "unknown preset": (dict(preset="papre"), ["preset", "papre", "allowed"]),
    "bad policy": (dict(group="maximum"), ["group", "maximum", "max_share", "union"]),
}


def assert_says(error, words):
    assert re.search(".*".join(map(re.escape, words)), str(error.value)), str(error.value)


@contextmanager
def named(case):
    """Name the case in errors that are raised inside."""
    try:
        yield
    except BaseException as error:
        error.add_note(f"case: {case}")
        raise


# One index gets all wrong inputs, because none may change it


@pytest.mark.parametrize("name", kvindex.names())
def test_bad_calls_are_refused_and_change_nothing(name):
    index = CASE.index(name)
    index.append(KEYS, VALUES)
    before = snapshot(index, QUERIES)
    for case, (call, words) in BAD_CALLS.items():
        with named(case):
            with pytest.raises((ValueError, TypeError)) as error:
                call(index)
            assert_says(error, words)
            assert_same_snapshot(snapshot(index, QUERIES), before)


@pytest.mark.parametrize("name", kvindex.names())
def test_bad_calls_on_an_empty_index_are_refused_and_leave_it_empty(name):
    index = CASE.index(name)
    for case, (call, words) in BAD_CALLS.items():
        if "batch" in case or "reorder" in case:
            continue
        with named(case):
            with pytest.raises((ValueError, TypeError)) as error:
                call(index)
            assert_says(error, words[:1])
            assert len(index) == 0
            # the error has not fixed the batch size either
            copy.deepcopy(index).append(KEYS[:1], VALUES[:1])


@pytest.mark.parametrize("name", kvindex.names())
def test_bad_geometry_and_options_are_refused(name):
    for case, (options, words) in BAD_GEOMETRY.items():
        if "group" in options and not hasattr(kvindex.get(name).Config, "group"):
            continue  # this index has no group policy
        with named(case):
            with pytest.raises((ValueError, TypeError)) as error:
                kvindex.create(name, **{**dict(q_heads=4, kv_heads=2, head_dim=16), **options})
            assert_says(error, words)


@pytest.mark.parametrize("name", kvindex.names())
def test_the_cuda_backend_off_a_gpu_is_refused_in_words(name):
    with pytest.raises(ValueError, match="device") as error:
        Case().index(name, backend="cuda")
    assert_says(error, ["device", "cpu", "backend='cuda'", "a CUDA device"])


@pytest.mark.parametrize("name", kvindex.names())
def test_a_missing_cuda_backend_is_refused_in_words(name, monkeypatch):
    monkeypatch.setitem(backend.BACKENDS, "cuda", "kvindex_not_installed")
    with pytest.raises(ImportError) as error:
        Case().index(name, backend="cuda")
    assert_says(error, ["backend", "cuda", "is not installed", "torch"])


@pytest.mark.parametrize("wrong", ["exakt", "Exact", "pariskv2", "pariskv "])
def test_unknown_index_names_near_matches(wrong):
    with pytest.raises(ValueError, match="index") as error:
        kvindex.create(wrong, q_heads=4, kv_heads=2, head_dim=16)
    assert_says(error, ["index", repr(wrong), "allowed", "did you mean"])


def test_unknown_index_like_no_other_lists_what_there_is():
    with pytest.raises(ValueError, match="allowed") as error:
        kvindex.get("zzz")
    assert_says(error, ["zzz", *kvindex.names()])


@pytest.mark.parametrize("call", [kvindex.get, kvindex.create])
def test_a_name_that_is_no_string_is_refused(call):
    with pytest.raises(ValueError, match="index: got 5, allowed is a string"):
        call(5)


@pytest.mark.parametrize("spec", ["exact:group", "exact:group=", "exact:=union", "exact:"])
def test_bad_spec_is_refused(spec):
    with pytest.raises(ValueError, match="index") as error:
        kvindex.create(spec, q_heads=4, kv_heads=2, head_dim=16)
    assert_says(error, [repr(spec), ":option=value"])


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (dict(beta=0), ["beta", "0", "(0, 1]"]),
        (dict(beta=1.5), ["beta", "1.5", "(0, 1]"]),
        (dict(rho=-0.1), ["rho", "-0.1", "(0, 1]"]),
        (dict(rho=NAN), ["rho", "nan", "(0, 1]"]),
        (dict(rho="half"), ["rho", "half", "number"]),
        (dict(seed=-1), ["seed", "-1", "at least 0"]),
        (dict(bta=0.1), ["option", "bta", "did you mean 'beta'"]),
        (dict(preset="papre"), ["preset", "papre", "did you mean 'paper'"]),
    ],
    ids=str,
)
def test_bad_option_of_pariskv_is_refused(options, words):
    with pytest.raises(ValueError, match="allowed") as error:
        Case().index("pariskv", **options)
    assert_says(error, words)


def test_check_false_never_looks_for_nan():
    index = CASE.index("exact", check=False)
    index.append(spoiled(KEYS, NAN), VALUES)
    assert len(index) == 20


def deferring(place, monkeypatch):
    """Make an index whose checks are deferred, as on a CUDA device (forced on a CPU)."""
    if place == "cpu":
        monkeypatch.setattr(BaseIndex, "_defers", True)
    return dataclasses.replace(CASE, device=place).index("exact")


PLACES = ["cpu", pytest.param("cuda:0", marks=pytest.mark.gpu)]


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("call", ["truncate", "reorder", "state_dict"])
def test_a_deferred_error_comes_at_the_next_call_that_waits(place, call, monkeypatch):
    index = deferring(place, monkeypatch)
    keys, values = KEYS.to(place), VALUES.to(place)
    for _ in range(50):
        index.append(keys, values)
    assert len(index._deferred) == 1  # all calls share one flag
    index.append(spoiled(keys, NAN), values)
    index.append(keys, values)
    argument = {"truncate": [5], "reorder": [torch.tensor([0])], "state_dict": []}[call]
    with pytest.raises(ValueError, match=r"keys: got .* what is not, allowed is a finite number"):
        getattr(index, call)(*argument)
    assert len(index) == 52 * 20
    index.state_dict()  # the error is raised only once


@pytest.mark.parametrize("place", PLACES)
def test_a_deferred_error_reads_no_row_outside(place, monkeypatch):
    index = deferring(place, monkeypatch)
    index.append(KEYS.to(place), VALUES.to(place))
    rows = index.fetch(hits_of(torch.tensor([0, 20, 2**40, -7], device=place).expand(2, 2, 4)))
    assert torch.equal(rows.keys[:, :, 0].cpu(), KEYS[:, :, 0])
    assert not rows.keys[:, :, 1:].any()
    with pytest.raises(ValueError, match=r"hits.ids: got .* allowed is -1 to 19"):
        index.state_dict()


def test_a_device_that_torch_does_not_have_is_named():
    with pytest.raises(ValueError, match="device: got 'abacus', allowed is a device that torch"):
        Case(device="abacus").index("exact")


def test_a_seed_too_large_for_torch_is_named():
    with pytest.raises(ValueError, match=r"seed: got 18446744073709551616, allowed is"):
        Case().index("pariskv", seed=2**64)
