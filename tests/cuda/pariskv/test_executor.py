"""ParisKV with codes in blocks and a fused search, compared with itself in plain torch.

This is one file because it compares one class with one reference: search, attention, changes,
failures.
"""

import gc
from contextlib import nullcontext
from dataclasses import replace
from importlib import import_module

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import kvindex
from kvindex.core.protocol import Attends
from kvindex.core.resident import ResidentRows
from kvindex.layer import AttentionLayer
from kvindex.pariskv.index import ParisKV
from kvindex.testing.contract.attending import check_attention_where_few_tokens_are_valid
from kvindex_cuda.pariskv.device_state import put
from kvindex_cuda.pariskv.steps import workspace
from kvindex_cuda.pariskv.steps.sign_votes import SignVotesStep
from tests.cuda import emulator, sanitize
from tests.cuda.devices import DEVICES, mostly_slow_on_cpu, slow_on_cpu, torch_ops_and_an_executor
from tests.cuda.launches import Launches
from tests.support.beside import alone
from tests.support.helpers import (
    ROUNDED,
    Case,
    assert_same_hits,
    follow_changes,
    left_padding,
    mostly_slow,
    part,
    sampled,
    slow,
)

CASE = Case(q_heads=4, kv_heads=2, head_dim=64, batch=2)
OPTIONS = dict(preset="fast", candidates_per="group")


@pytest.fixture(params=DEVICES)
def device(request, monkeypatch):
    """The torch ops together with the fused search. On a CPU, kernels are emulated."""
    # on a CPU the only store is in CPU memory; it gets a cache of its rows
    torch_ops_and_an_executor(monkeypatch, on_host=request.param == "cpu")
    with emulator.emulated() if request.param == "cpu" else nullcontext():
        yield request.param


def pair(device, case=CASE, **options):
    """The index with fused kernels, and the index in plain torch."""
    options = OPTIONS | dict(device=device) | options
    return [case.index("pariskv", backend=name, **options) for name in ("cuda", "torch")]


def moved(tokens, device):
    return tuple(piece.to(device) for piece in tokens)


def assert_same(mine, theirs, queries, k=20):
    assert mine._executor
    assert not theirs._executor
    for name in theirs._codes:
        assert torch.equal(mine._codes[name], theirs._codes[name]), name
    assert_same_hits(mine.search(queries, k=k), theirs.search(queries, k=k), close=ROUNDED)


@pytest.mark.parametrize("k", [1, 20, 700])
def test_a_fused_search_is_the_reference_search(device, k):
    mine, theirs = pair(device)
    for index in (mine, theirs):
        index.append(*moved(CASE.tokens(600), device))
    assert_same(mine, theirs, CASE.queries().to(device), k)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("group", "options"),
    [
        (dict(q_heads=2), {}),
        (dict(q_heads=4), dict(preset="precise")),
        (dict(q_heads=4), dict(center=0)),
    ],
    ids=str,
)
def test_other_groups_and_options(device, group, options):
    case = Case(kv_heads=2, head_dim=64, **group)
    mine, theirs = pair(device, case, **options)
    for index in (mine, theirs):
        index.append(*moved(case.tokens(400), device))
    assert_same(mine, theirs, case.queries().to(device))


def test_it_follows_appends_truncation_reordering_and_reset(device):
    mine, theirs = pair(device)
    follow_changes(mine, theirs, CASE, device, assert_same)


@slow_on_cpu
def test_many_queries_at_once(device):
    case = Case(q_heads=4, kv_heads=2, head_dim=64)
    mine, theirs = pair(device, case)
    for index in (mine, theirs):
        index.append(*moved(case.tokens(300), device))
    queries = case.queries(batch=3).to(device)
    found = [index.expand_batch(3).search(queries, k=9) for index in (mine, theirs)]
    assert_same_hits(*found, close=ROUNDED)
    assert_same(mine, theirs, queries[:1])


def test_a_share_of_the_attention(device):
    mine, theirs = pair(device)
    for index in (mine, theirs):
        index.append(*moved(CASE.tokens(300), device))
    queries = CASE.queries().to(device)
    found = [index.search(queries, k=50, coverage=0.6) for index in (mine, theirs)]
    torch.testing.assert_close(found[0].coverage, found[1].coverage, rtol=1e-3, atol=1e-3)


@slow_on_cpu
@pytest.mark.parametrize("softcap", mostly_slow([None, 5.0], None))
def test_a_layer_attends_in_one_go(device, softcap, monkeypatch):
    monkeypatch.setattr(ParisKV, "supports_async_append", True)
    case = Case(q_heads=4, kv_heads=2, head_dim=64, batch=2, softcap=softcap)
    mine, theirs = pair(device, case)
    layers = [
        AttentionLayer(index, k=20, sink=4, local_window=16, update_every=8, dense_below=64)
        for index in (mine, alone(theirs))
    ]
    keys, values = moved(case.tokens(316), device)
    valid = left_padding([0, 9], 300).to(device)
    for layer in layers:
        queries = case.tensor(5, 2, 4, 300, 64).to(device)
        layer.step(queries, *part((keys, values), 0, 300), valid=valid)
    for t in range(300, 316):
        query = case.tensor(100 + t, 2, 4, 1, 64).to(device)
        mine, theirs = (layer.step(query, *part((keys, values), t, t + 1)) for layer in layers)
        torch.testing.assert_close(mine, theirs, rtol=1e-3, atol=1e-3)
    mine, theirs = (layer.traffic for layer in layers)
    assert mine.steps == theirs.steps == 16
    assert float(mine.rows_read) == float(theirs.rows_read)
    assert float(mine.bytes_fetched) == float(theirs.bytes_fetched)


@slow_on_cpu
@pytest.mark.parametrize("preset", mostly_slow(["fast", "sampled"], "sampled"))
def test_it_attends_where_few_tokens_are_valid(device, preset):
    case = replace(CASE, device=device)
    options = OPTIONS | dict(preset=preset, backend="cuda")
    check_attention_where_few_tokens_are_valid(
        lambda **others: case.index("pariskv", **options, **others), case
    )


@pytest.mark.parametrize(
    "options",
    [
        dict(candidates_per="head"),
        dict(preset="accurate"),
        dict(preset="scan"),
        dict(single_stage_below=9),
    ],
    ids=str,
)
def test_what_is_not_fused_runs_op_by_op(device, options):
    index = pair(device, **options)[0]
    assert index._executor is None


def test_the_plain_index_knows_nothing_of_it():
    sizes = dict(q_heads=2, kv_heads=1, head_dim=64)
    assert kvindex.create("pariskv", **sizes, backend="torch")._executor is None


def addresses(index):
    """Addresses of all tensors that a search of the index reads or writes, except its results."""
    state, step = index._executor._state, index._executor._uses[-1].step
    kept = {**vars(state), **vars(step), "asked": index._executor._uses[-1].wanted}
    for result in ("output", "lse", "found"):
        del kept[result]
    return [part.data_ptr() for part in kept.values() if isinstance(part, torch.Tensor)]


@slow_on_cpu
def test_nothing_that_a_search_reads_or_writes_moves(device):
    mine, theirs = pair(device)
    tokens, queries = moved(CASE.tokens(700), device), CASE.queries().to(device)
    for index in (mine, theirs):
        index.append(*part(tokens, 0, 300), valid=left_padding([0, 70], 300).to(device))
    mine.warm_up(k=20, tokens=700)
    mine.search(queries, k=20)
    where = addresses(mine)
    for start, stop in ((300, 301), (301, 700)):
        for index in (mine, theirs):
            index.append(*part(tokens, start, stop))
        assert_same(mine, theirs, queries)
    for index in (mine, theirs):
        index.truncate(290)
    assert_same(mine, theirs, queries)
    assert addresses(mine) == where


def test_a_view_leaves_its_index_alone(device):
    case = Case(q_heads=4, kv_heads=2, head_dim=64)
    mine, theirs = pair(device, case)
    tokens, queries = moved(case.tokens(400), device), case.queries(batch=2).to(device)
    for index in (mine, theirs):
        index.append(*part(tokens, 0, 300))
    mine.search(queries[:1], k=9)
    where = addresses(mine)
    found = [index.expand_batch(2).search(queries, k=9) for index in (mine, theirs)]
    assert_same_hits(*found, close=ROUNDED)
    for index in (mine, theirs):
        index.append(*part(tokens, 300, 310))
    assert_same(mine, theirs, queries[:1], k=9)
    assert addresses(mine) == where


@slow_on_cpu
def test_indexes_of_a_shape_share_buffers_for_as_long_as_they_live(device):
    first, second = pair(device)[0], pair(device)[0]
    other = pair(device, seed=1)[0]
    tokens, queries = moved(CASE.tokens(300), device), CASE.queries().to(device)
    for index in (first, second, other):
        index.append(*tokens)
        index.search(queries, k=7)
    assert first._executor._uses[-1].step is second._executor._uses[-1].step
    assert first._executor._uses[-1].step is not other._executor._uses[-1].step
    del first, second, other, index
    gc.collect()
    assert not workspace._alive


@slow_on_cpu
def test_what_signs_tell_follows_the_tokens_to_the_device(device):
    mine, theirs = pair(device, sign_decoder="regression")
    tokens, queries = moved(CASE.tokens(1100), device), CASE.queries().to(device)
    for start, end in ((0, 300), (300, 500), (500, 1100)):  # 1, 1 and 4 full blocks
        for index in (mine, theirs):
            index.append(*(piece[:, :, start:end] for piece in tokens))
        mine.search(queries, k=20)
        assert torch.equal(mine._executor._state.regression, theirs._regressed())
    assert not torch.equal(theirs._regressed(), theirs.encoding.fit(theirs._codes.every, 1))


@slow_on_cpu
def test_buffers_grow_once_for_all_when_candidates_outgrow_them(device):
    indexes = [pair(device)[0] for _ in range(2)]
    tokens, queries = moved(CASE.tokens(900), device), CASE.queries().to(device)
    for index in indexes:
        index.append(*part(tokens, 0, 60))
        index.search(queries, k=10)
    small = indexes[0]._executor._uses[-1].step
    assert small.most == 80  # twice as many as pool · k requires
    for index in indexes:
        index.append(*part(tokens, 60, 900))
        index.search(queries, k=50)
        index.search(queries, k=10)
        assert index._executor._newest(10).step is small
    for index in indexes:
        index.warm_up(k=10, tokens=10_000)
        assert [use.step.most for use in index._executor._uses if use.step.k == 10] == [200]
    steps_of = [index._executor._newest(10).step for index in indexes]
    assert steps_of[0] is steps_of[1] is not small


def test_what_a_graph_holds_stays_and_asks_for_no_more_than_it_has_room_for(device, monkeypatch):
    mine, theirs = pair(device)
    tokens, queries = moved(CASE.tokens(1100), device), CASE.queries().to(device)
    for index in (mine, theirs):
        index.append(*part(tokens, 0, 60))
    fusing = import_module("kvindex_cuda.pariskv.executor")
    with monkeypatch.context() as context:
        context.setattr(fusing, "capturing", lambda device: True)
        with pytest.raises(
            RuntimeError, match="graph: no buffers that are large enough for a search of k = 5 rows"
        ):
            mine.search(queries, k=5)
    mine.warm_up(k=5, tokens=60)
    with monkeypatch.context() as context:
        context.setattr(fusing, "capturing", lambda device: True)
        mine.search(queries, k=5)
    (held,) = mine._executor._uses
    for index in (mine, theirs):
        index.append(*part(tokens, 60, 1100))
    assert_same(mine, theirs, queries, k=5)
    assert mine._executor._uses[0] is held
    assert mine._executor._newest(5) is not held
    assert held.wanted.tolist() == [20, 20]
    assert mine._executor._newest(5).wanted.tolist() == [22, 22]


def test_attention_reads_no_more_near_rows_than_there_are(device):
    mine, theirs = pair(device)
    for index in (mine, theirs):
        index.append(*moved(CASE.tokens(300), device))
    resident = ResidentRows(mine.geometry, 2, 50)
    resident.rows.fill_(float("nan"))
    resident.add(*moved(CASE.tokens(7, seed=3), device), left_padding([0, 3], 7).to(device))
    attended = mine.attend(CASE.queries().to(device), resident, k=20)
    assert attended.output.isfinite().all()
    assert attended.found.tolist() == [[20, 20], [20, 20]]
    with pytest.raises(ValueError, match="attend: got an index with backend="):
        theirs.attend(CASE.queries().to(device), resident, k=20)


@mostly_slow_on_cpu(
    "given", [pytest.param(False, id="attend"), pytest.param(True, id="attend_hits")], False
)
def test_what_attention_gives_can_be_merged(device, given):
    """lse is the logarithm of the softmax denominator; found is the number of rows that the search
    found.
    """
    case = replace(CASE, softcap=5.0)
    index = pair(device, case)[0]
    index.append(*moved(case.tokens(300), device))
    (resident, queries), k = (ResidentRows(index.geometry, 2, 7), case.queries().to(device)), 20
    resident.add(*moved(case.tokens(7, seed=3), device), left_padding([0, 3], 7).to(device))
    hits = index.search(queries, k=k)
    if given:
        hits.ids[:, 1, 15:] = -1
    found = (
        index.attend_hits(queries, hits, resident)
        if given
        else index.attend(queries, resident, k=k)
    )
    keys = torch.cat([index.fetch(hits).keys, resident.rows[..., :64]], dim=2)
    logits = queries.unflatten(1, (2, 2)) @ keys.mT * index.geometry.scale
    hidden = torch.cat([hits.ids < 0, (resident.mask == 0)[:, None].expand(-1, 2, -1)], dim=2)
    logits = (5 * (logits / 5).tanh()).masked_fill(hidden[:, :, None], -torch.inf)
    torch.testing.assert_close(found.lse, logits.logsumexp(-1).flatten(1), rtol=1e-4, atol=1e-4)
    assert found.lse.dtype is torch.float32
    assert found.found.dtype is torch.int32
    assert found.found.tolist() == [[k, 15 if given else k]] * 2


def spoiled(queries):
    queries = queries.clone()
    queries[1, 2, 5] = torch.nan
    return queries


def attending(device, **options):
    """An index of 300 tokens, a resident row, and queries."""
    index = pair(device, **options)[0]
    index.append(*moved(CASE.tokens(300), device))
    resident = ResidentRows(index.geometry, 2, 1)
    resident.add(*moved(CASE.tokens(1, seed=3), device), None)
    return index, resident, CASE.queries().to(device)


def test_a_query_that_is_not_finite_is_an_error_later(device, monkeypatch):
    """As on a GPU, where a check would stop the device, checks are delayed."""
    monkeypatch.setattr(ParisKV, "_defers", True)
    index, resident, queries = attending(device)
    want = index.attend(queries, resident, k=20).output
    index.raise_pending()
    got = index.attend(spoiled(queries), resident, k=20).output
    torch.testing.assert_close(got[0], want[0])
    index.attend(queries, resident, k=20)
    message = r"queries: got \(in an earlier call\) what is not, allowed is a finite number"
    with pytest.raises(ValueError, match=message):
        index.raise_pending()
    index.raise_pending()  # reported once
    index.search(spoiled(queries), k=20)  # the same flag
    index.attend(queries, resident, k=20)
    with pytest.raises(ValueError, match=message):
        index.state_dict()
    assert [len(index._deferred), index._deferred["queries"][0].dtype] == [2, torch.int32]


@mostly_slow_on_cpu("check", [None, True, False], None)
def test_a_query_that_is_not_finite_is_an_error_at_once_or_none(device, check):
    index, resident, queries = attending(device, check=check)
    before = index.attend(queries, resident, k=20).output
    at_once = check or (check is None and device == "cpu")
    with (
        pytest.raises(ValueError, match="queries: got nan, allowed is a finite number")
        if at_once
        else nullcontext()
    ):
        index.attend(spoiled(queries), resident, k=20)
    torch.testing.assert_close(index.attend(queries, resident, k=20).output, before)
    if check is False:
        index.raise_pending()


@slow_on_cpu
def test_results_are_the_callers_though_layers_share_buffers(device):
    (first, resident, queries), (second, *_) = attending(device), attending(device)
    other = CASE.queries(seed=1).to(device)
    results = [
        first.attend(queries, resident, k=20),
        first.attend_hits(queries, first.search(queries, k=20), resident),
    ]
    results = [part for one in results for part in (one.output, one.lse, one.found)]
    kept = [part.clone() for part in results]
    for index in (second, first):
        later = index.attend(other, resident, k=20).output
        hits = index.search(other, k=20)
        index.attend_hits(other, hits, resident)
        assert not torch.equal(later, results[0])
    assert first._executor._newest(20).step is second._executor._newest(20).step
    for result, copy in zip(results, kept, strict=True):
        assert torch.equal(result, copy)


class Counted(TorchDispatchMode):
    """Collect the names of torch's operations that are called."""

    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.names.append(function.overloadpacket.__name__)
        return function(*args, **kwargs or {})


def test_a_call_of_the_index_launches_its_kernels_and_nothing_else(device, monkeypatch):
    monkeypatch.setattr(ParisKV, "_defers", True)
    index, resident, queries = attending(device)
    index.warm_up(k=20, tokens=300)
    with Launches() as launches, Counted() as torchs:
        index.attend(queries, resident, k=20)
    assert launches.names == ["prepare_query", "scan", "rerank", "select_rows", "attend"]
    assert set(torchs.names) <= {"empty_like", "view", "detach"}  # operations that run nothing


WRAPPERS = ("", "+sample", "+reuse:tau=2")


def layers_of(device, case, indexes, steps=6):
    """Yield outputs and traffic of a layer over each index, which attends step by step after a
    prompt.
    """
    tokens = moved(case.tokens(300 + steps), device)
    for index in indexes:
        layer = AttentionLayer(index, k=20, sink=4, local_window=16, update_every=4, dense_below=64)
        layer.step(case.tensor(5, 1, 4, 300, 64).to(device), *part(tokens, 0, 300))
        outputs = []
        for t in range(300, 300 + steps):
            query = case.tensor(t, 1, 4, 1, 64).to(device)
            outputs.append(layer.step(query, *part(tokens, t, t + 1)))
        yield torch.cat(outputs, 2), layer.traffic


@mostly_slow_on_cpu(
    "rows, value_dim, wrapper",
    [
        *(slow("plain", 64, wrapper) for wrapper in WRAPPERS),
        *(("int8", 64, wrapper) for wrapper in WRAPPERS),
        *(slow("fp8", 64, wrapper) for wrapper in WRAPPERS[:1]),
        *(slow(*one) for one in zip(("plain", "int8", "fp8"), (12,) * 3, WRAPPERS, strict=True)),
        ("int4", 64, WRAPPERS[0]),
    ],
    ("int8", 64, WRAPPERS[0]),
    ("int4", 64, WRAPPERS[0]),
)
def test_a_layer_over_rows_of_every_codec(device, rows, value_dim, wrapper, monkeypatch):
    case, calls = Case(q_heads=4, kv_heads=2, head_dim=64, value_dim=value_dim), []
    attend = SignVotesStep.attend
    monkeypatch.setattr(
        SignVotesStep, "attend", lambda *given, **how: calls.append(given) or attend(*given, **how)
    )
    name, options = "pariskv" + wrapper, OPTIONS | dict(row_codec=rows, device=device)
    indexes = [case.index(name, backend=backend, **options) for backend in ("cuda", "torch")]
    attends = value_dim == 64 and rows != "int4"
    assert (indexes[0].capability(Attends) is not None) == attends
    assert indexes[1].capability(Attends) is None
    (got, mine), (want, theirs) = layers_of(device, case, indexes)
    torch.testing.assert_close(got, want, rtol=1e-3, atol=1e-3)
    assert ("row_codec: got 'int4', allowed is" in indexes[0].explain()) == (rows == "int4")
    # after two normal steps and a captured one
    replayed = torch.device(device).type == "cuda" and not wrapper
    assert len(calls) == (0 if not attends else 3 if replayed else 6)
    assert float(mine.rows_read) == float(theirs.rows_read)
    assert float(mine.bytes_fetched) == float(theirs.bytes_fetched)


@pytest.mark.slow
@pytest.mark.parametrize("rows", ["plain", "int8"])
def test_a_layer_over_values_in_keys_reads_them_where_they_lie(device, rows):
    sizes = dict(q_heads=4, kv_heads=1, head_dim=64, value_dim=32, value_in_key=True)
    case, options = Case(**sizes), OPTIONS | dict(row_codec=rows, device=device)
    indexes = [case.index("pariskv", backend=name, **options) for name in ("cuda", "torch")]
    (got, mine), (want, theirs) = layers_of(device, case, indexes)
    torch.testing.assert_close(got, want, rtol=1e-3, atol=1e-3)
    assert "attend: in one go" in indexes[0].explain()
    assert float(mine.bytes_fetched) == float(theirs.bytes_fetched)
    assert indexes[0].row_bytes == (256 if rows == "plain" else 80)
    assert indexes[0].capability(Attends) is not None


def test_rows_that_attention_cannot_read_are_refused(device):
    case = Case(q_heads=4, kv_heads=2, head_dim=64, value_dim=12)
    index = pair(device, case)[0]
    index.append(*moved(case.tokens(30), device))
    resident, queries = ResidentRows(index.geometry, 1, 1), case.queries().to(device)
    with pytest.raises(ValueError, match="attend: got an index with backend="):
        index.attend(queries, resident, k=20)
    with pytest.raises(ValueError, match="attend: got an index with backend="):
        index.attend_hits(queries, index.search(queries, k=20), resident)


def test_hits_to_attend_to_are_checked(device):
    index = pair(device)[0]
    index.append(*moved(CASE.tokens(300), device))
    resident, queries = ResidentRows(index.geometry, 2, 1), CASE.queries().to(device)
    hits = index.search(queries, k=20)
    with pytest.raises(TypeError, match=r"hits: got Tensor, allowed is a kvindex\.Hits"):
        index.attend_hits(queries, hits.ids, resident)
    wrong = torch.zeros((2, 4, 19), device=device)
    with pytest.raises(ValueError, match=r"hits.log_weight: .*\[2, 4, 19\]"):
        index.attend_hits(queries, replace(hits, log_weight=wrong), resident)
    hits.ids[1, 1, 3] = 300
    if device == "cpu":
        with pytest.raises(ValueError, match=r"hits\.ids: got 300, allowed is -1 to 299"):
            index.attend_hits(queries, hits, resident)
    else:
        assert index.attend_hits(queries, hits, resident).output.isfinite().all()
        with pytest.raises(ValueError, match=r"hits.ids: got .* allowed is -1 to 299"):
            index.raise_pending()


@pytest.mark.parametrize("values", [[5, 5, 5], [5, 0, 7], []])
def test_numbers_of_the_host_reach_the_device(values):
    target = torch.zeros(len(values), dtype=torch.int32)
    put(target, values)
    assert target.tolist() == values


def test_a_padded_batch_may_be_cut_to_nothing_and_go_on(device):
    both, tokens = pair(device), moved(CASE.tokens(300), device)
    queries = CASE.queries().to(device)
    for index in both:
        index.append(*tokens, valid=left_padding([0, 70], 300).to(device))
        index.search(queries, k=9)
        index.truncate(0)
        assert len(index) == 0
        index.append(*tokens)
    assert_same(*both, queries)


@mostly_slow_on_cpu(
    "wrapper, rows",
    sampled(["+sample", "+reuse:tau=2"], ["plain", "int8"]),
    ("+sample", "plain"),
)
def test_rows_that_others_chose_are_read_from_the_cache(device, rows, wrapper):
    """Rows that are read again come from the cache: the stored rows have been overwritten since."""
    options = OPTIONS | dict(row_codec=rows, device=device, backend="cuda", store="host")
    index = CASE.index("pariskv" + wrapper, **options)
    index.append(*moved(CASE.tokens(300), device))
    resident, queries = ResidentRows(index.geometry, 2, 1), CASE.queries().to(device)
    first = index.attend(queries, resident, k=20).output
    cache, store = index.inner._executor.cache, index.inner._store
    asked, found = cache.counts.sum(0).tolist()
    assert (asked, found) == (4 * 20, 0)
    assert (cache.tags >= 0).sum(1).tolist() == [20] * 4  # no two ids below 300 are in the same set
    if device == "cuda":
        torch.cuda.synchronize()
    for block in range(4):
        store._table._block(block).fill_(0xFF)
    assert torch.equal(index.attend(queries, resident, k=20).output, first)
    assert cache.hit_rate() == 0.5
    hits = index.search(queries, k=20)
    hits.ids[:, :, ::2] = -1
    index.attend_hits(queries, hits, resident)
    assert cache.counts.sum(0).tolist() == [4 * 50, 4 * 30]


@pytest.mark.slow
def test_what_the_sanitizers_run_runs(device):
    assert len(list(sanitize.run(device))) == 4 * len(sanitize.SHAPES) == 16


def test_room_for_an_answer_is_taken_before_it(device):
    mine, theirs = pair(device)
    mine.reserve(900)  # nothing is known of an empty index
    tokens, queries = moved(CASE.tokens(1100), device), CASE.queries().to(device)
    for index in (mine, theirs):
        index.append(*part(tokens, 0, 300))
        index.reserve(900)  # plain torch has nothing to do
    tables = mine._codes.table.clone(), mine._store.table.clone()
    assert [int((table != 0).sum(1).min()) for table in tables] == [4, 4]
    for start in range(300, 900, 200):
        for index in (mine, theirs):
            index.append(*part(tokens, start, start + 200))
    assert torch.equal(mine._codes.table, tables[0])
    assert torch.equal(mine._store.table, tables[1])
    assert_same(mine, theirs, queries)
    with pytest.raises(ValueError, match="tokens: got 0, allowed is an integer of at least 1"):
        mine.reserve(0)
    with pytest.raises(ValueError, match="max_tokens: got"):
        mine.reserve(10**9)
    assert_same(mine, theirs, queries)
