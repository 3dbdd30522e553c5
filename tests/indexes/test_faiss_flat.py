"""FAISS flat equals `exact`, and tests of what all FAISS indexes share."""

import sys
from dataclasses import replace

import pytest
import torch

from kvindex.bases import faiss, faiss_library
from tests.support.helpers import ROUNDED, Case, assert_same_hits, left_padding, part

ONE = Case(q_heads=2, kv_heads=2, head_dim=16, value_dim=8, batch=2)
GROUPS = Case(q_heads=6, kv_heads=2, head_dim=16, value_dim=8, batch=2)


def searched(case, name, tokens, *, k, valid=None, **options):
    index = case.index(name, **options)
    index.append(*tokens, valid=valid)
    return index.search(case.queries(), k=k)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("k", [1, 30, 400])
def test_one_head_per_group_is_exact(k, dtype):
    pytest.importorskip("faiss", reason="needs faiss-cpu")
    case = Case(q_heads=2, kv_heads=2, head_dim=16, value_dim=8, batch=2, dtype=dtype)
    tokens, valid = case.tokens(300), left_padding([0, 40], 300)
    got = searched(case, "faiss-flat", tokens, k=k, valid=valid)
    assert_same_hits(got, searched(case, "exact", tokens, k=k, valid=valid), close=1e-5)


@pytest.mark.parametrize("group", ["mean_share", "max_share", "union", "mean_query"])
def test_a_group_whose_heads_retrieve_all_keys_is_exact(group):
    pytest.importorskip("faiss", reason="needs faiss-cpu")
    tokens = GROUPS.tokens(120)
    got = searched(GROUPS, "faiss-flat", tokens, k=12, pool=10, group=group)
    want = searched(GROUPS, "exact", tokens, k=12, group=group)
    assert_same_hits(got, want, close=1e-5)


def test_candidates_of_a_group_are_the_union_of_its_heads_best():
    pytest.importorskip("faiss", reason="needs faiss-cpu")
    tokens, k = GROUPS.tokens(120), 7
    got = searched(GROUPS, "faiss-flat", tokens, k=3 * k, group="mean_share")
    index = GROUPS.index("faiss-flat")
    index.append(*tokens)
    ids = index._candidates(GROUPS.queries().unflatten(1, (2, 3)), k)[0]
    scores = GROUPS.queries().unflatten(1, (2, 3)) @ tokens[0].mT
    want = scores.topk(k).indices.flatten(2)
    assert torch.equal(ids.sort().values, want.sort().values)
    assert (got.ids >= 0).all()


def test_rows_that_share_an_index_are_copied_when_they_part():
    pytest.importorskip("faiss", reason="needs faiss-cpu")
    tokens, more = ONE.tokens(50), ONE.tokens(30, seed=1, batch=3)
    index, want = ONE.index("faiss-flat"), ONE.index("exact")
    rows = torch.tensor([1, 1, 0])
    for each in (index, want):
        each.append(*tokens)
        each.reorder(rows)
    assert index._faiss_indexes[0][0] is index._faiss_indexes[1][0]
    for each in (index, want):
        each.append(*more)
    assert index._faiss_indexes[0][0] is not index._faiss_indexes[1][0]
    queries = ONE.queries(batch=3)
    assert_same_hits(index.search(queries, k=9), want.search(queries, k=9), close=1e-5)


@pytest.mark.parametrize("name", ["faiss-flat", "faiss-ivf:lists=4", "faiss-hnsw"])
@pytest.mark.parametrize("pads", [[0, 30], [30, 0], [0, 9], [9, 0]])
def test_rows_that_share_an_index_part_where_one_gets_more(name, pads):
    """A sequence with only padded tokens keeps the index, whichever it is."""
    pytest.importorskip("faiss", reason="needs faiss-cpu")
    tokens, more, valid = ONE.tokens(50), ONE.tokens(30, seed=1), left_padding(pads, 30)
    index = ONE.index(name)
    index.append(*tokens)
    index.reorder(torch.tensor([0, 0]))
    index.append(*more, valid=valid)
    assert index._token_counts() == [80 - pad for pad in pads]
    hits = index.search(ONE.queries(), k=9)
    shown = torch.cat([torch.ones(2, 50, dtype=torch.bool), valid], 1)
    assert shown[:, None].expand(-1, 2, -1).gather(2, hits.ids.clamp_min(0)).all()
    if name == "faiss-flat":
        want = ONE.index("exact")
        want.append(*tokens)
        want.reorder(torch.tensor([0, 0]))
        want.append(*more, valid=valid)
        assert_same_hits(hits, want.search(ONE.queries(), k=9), close=1e-5)


def test_many_queries_of_one_sequence_are_one_search(monkeypatch):
    pytest.importorskip("faiss", reason="needs faiss-cpu")
    case = Case(q_heads=2, kv_heads=2, head_dim=16)
    index, calls = case.index("faiss-flat"), []
    index.append(*case.tokens(100))
    view, queries = index.expand_batch(8), case.queries(batch=8)
    ask = faiss.FaissIndex._query_faiss

    def spy(*given):
        calls.append(1)
        return ask(*given)

    monkeypatch.setattr(faiss.FaissIndex, "_query_faiss", spy)
    got = view.search(queries, k=5)
    assert len(calls) == 2  # one for each KV head
    for b in range(8):
        alone = index.search(queries[b : b + 1], k=5)
        assert torch.equal(got.ids[b], alone.ids[0])


def test_adding_in_blocks_changes_nothing(monkeypatch):
    pytest.importorskip("faiss", reason="needs faiss-cpu")
    tokens, valid = ONE.tokens(100), left_padding([3, 30], 100)
    want = searched(ONE, "faiss-flat", tokens, k=9, valid=valid)
    monkeypatch.setattr(faiss, "BLOCK", 7)
    assert_same_hits(searched(ONE, "faiss-flat", tokens, k=9, valid=valid), want)


def test_an_append_that_faiss_has_no_memory_for_is_made_good_by_the_next_search(monkeypatch):
    pytest.importorskip("faiss", reason="needs faiss-cpu")
    tokens, index = ONE.tokens(60), ONE.index("faiss-flat")
    index.append(*part(tokens, 0, 40))
    left = [1]

    def failing(self, made, keys):
        left[0] -= 1
        if left[0] < 0:
            raise MemoryError
        made.add(keys.numpy())

    with monkeypatch.context() as patch:
        patch.setattr(faiss.FaissIndex, "_add", failing)
        index.append(*part(tokens, 40, 60))
        with pytest.raises(MemoryError):
            index.search(ONE.queries(), k=9)
    got = index.search(ONE.queries(), k=9)
    assert_same_hits(got, searched(ONE, "exact", tokens, k=9), close=ROUNDED)


def test_a_child_adds_again_what_was_being_added_when_it_was_forked():
    pytest.importorskip("faiss", reason="needs faiss-cpu")
    tokens, index = ONE.tokens(60), ONE.index("faiss-flat")
    index.append(*tokens)
    half = index._faiss_indexes[0][0]
    half.reset()
    half.add(torch.zeros(60, ONE.head_dim).numpy())
    index._synchronized = False  # as if another thread were adding keys
    index._after_fork()
    got = index.search(ONE.queries(), k=9)
    assert_same_hits(got, searched(ONE, "exact", tokens, k=9), close=ROUNDED)


def test_faiss_keeps_the_threads_that_it_had():
    faiss = pytest.importorskip("faiss", reason="needs faiss-cpu")
    before = faiss.omp_get_max_threads()
    faiss.omp_set_num_threads(2)
    searched(ONE, "faiss-flat", ONE.tokens(20), k=3)
    assert faiss.omp_get_max_threads() == 2
    faiss.omp_set_num_threads(before)


@pytest.mark.parametrize("name", ["faiss-flat", "faiss-ivf", "faiss-ivfpq", "faiss-hnsw"])
def test_hits_do_not_depend_on_the_number_of_threads(name):
    pytest.importorskip("faiss", reason="needs faiss-cpu")
    tokens, found = GROUPS.tokens(400), []
    for threads in (1, 2):
        torch.set_num_threads(threads)
        found.append(searched(GROUPS, name, tokens, k=20))
    torch.set_num_threads(1)
    assert_same_hits(*found)


def test_nothing_but_padding_reads_nothing():
    pytest.importorskip("faiss", reason="needs faiss-cpu")
    for name in ("faiss-ivf", "faiss-ivfpq", "faiss-hnsw"):
        index = ONE.index(name)
        index.append(*ONE.tokens(5), valid=left_padding([5, 5], 5))
        assert index.bytes_per_key()["scanned"] == 0


def test_bytes():
    pytest.importorskip("faiss", reason="needs faiss-cpu")
    index = ONE.index("faiss-flat")
    index.append(*ONE.tokens(30), valid=left_padding([10, 0], 30))
    assert index.nbytes()["codes"] == 2 * 50 * 64 + 60  # plus the flags of padding
    assert index.bytes_per_key() == {"stored": 64, "scanned": 64}


def test_a_gpu_index_is_refused_where_there_is_none():
    pytest.importorskip("faiss", reason="needs faiss-cpu")
    with pytest.raises(ValueError, match="where: got 'gpu', but the index is on device=cpu"):
        ONE.index("faiss-flat", where="gpu")
    with pytest.raises(ValueError, match="where: got 'tpu', allowed is one of"):
        ONE.index("faiss-flat", where="tpu")
    with pytest.raises(ValueError, match="pool: got 0, allowed is an integer of at least 1"):
        ONE.index("faiss-flat", pool=0)


def test_faiss_without_a_gpu_part_is_named():
    class Stock:
        pass

    with pytest.raises(ImportError, match="does not support GPUs; install faiss-gpu"):
        faiss_library.check_gpu(Stock, torch.device("cuda"))


@pytest.mark.parametrize("spec", ["faiss-flat", "faiss-ivf:lists=6", "faiss-ivfpq:lists=6"])
def test_the_way_of_a_gpu_finds_the_same(spec, monkeypatch):
    """Simulated on a CPU: FAISS reconstructs nothing, and indexes are rebuilt after a
    truncation."""
    pytest.importorskip("faiss", reason="needs faiss-cpu")
    monkeypatch.setattr(faiss, "check_gpu", lambda faiss, device: None)
    monkeypatch.setattr(faiss, "resources", lambda device: None)
    monkeypatch.setattr(faiss.FaissIndex, "_to_device", lambda self, index: index)
    index = assert_both_ways_find_the_same(GROUPS, spec)
    with pytest.raises(
        ValueError, match="k: got 3000 candidates per query head, allowed with where='gpu'"
    ):
        index._candidates(GROUPS.queries(batch=3).unflatten(1, (2, 3)), 3000)


def assert_both_ways_find_the_same(case, spec):
    """Compare CPU and GPU after each call that rebuilds FAISS's indexes."""
    valid, found = left_padding([0, 30], 400, case.device), []
    tokens = case.tokens(400)
    for where in ("cpu", "gpu"):
        index = case.index(spec, where=where)
        index.append(*part(tokens, 0, 300), valid=valid[:, :300])
        index.truncate(200)
        index.reorder(torch.tensor([1, 1, 0]))
        index.append(*part(case.tokens(400, batch=3), 200, 400))
        found.append(index.search(case.queries(batch=3), k=20))
    assert_same_hits(*found, close=ROUNDED)
    return index


@pytest.fixture
def faiss_gpu():
    faiss = pytest.importorskip("faiss", reason="needs faiss-gpu")
    if not getattr(faiss, "get_num_gpus", int)():
        pytest.skip("needs faiss-gpu")


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("spec", ["faiss-flat", "faiss-ivf:lists=6", "faiss-ivfpq:lists=6"])
def test_on_a_gpu_the_same_is_found(spec, dtype, faiss_gpu):
    case = replace(GROUPS, dtype=dtype, device="cuda")
    assert_both_ways_find_the_same(case, spec)


@pytest.mark.gpu
@pytest.mark.parametrize("spec", ["faiss-flat", "faiss-ivf:lists=6", "faiss-ivfpq:lists=6"])
def test_on_a_gpu_a_search_is_on_the_current_stream(spec, faiss_gpu):
    """On a busy GPU, a search reads the queries that its stream has written before."""
    case = replace(GROUPS, device="cuda")
    index = case.index(spec, where="gpu")
    index.append(*case.tokens(3000))
    asked = case.queries()
    want = index.search(asked, k=20)
    side, wide = torch.cuda.Stream(), torch.randn(4096, 4096, device="cuda")
    torch.cuda.synchronize()
    with torch.cuda.stream(side):
        queries = torch.zeros_like(asked)
        for _ in range(20):
            wide = (wide @ wide).tanh()
        queries.copy_(asked + 0 * wide[0, 0])  # written late
        got = index.search(queries, k=20)
        ids = got.ids.clone()
    side.synchronize()
    assert torch.equal(ids, want.ids)
    again = index.search(asked, k=20)  # back on the default stream
    assert torch.equal(again.ids, want.ids)


@pytest.mark.gpu
def test_on_a_gpu_indexes_share_what_is_bounded(faiss_gpu):
    device = torch.device("cuda", torch.cuda.current_device())
    case = replace(GROUPS, device="cuda")
    for name in ("faiss-flat", "faiss-ivf"):
        case.index(name, where="gpu").append(*case.tokens(100))
    assert faiss_library.resources(device.index) is faiss_library.resources(device.index)
    free = faiss_library.resources(device.index).getTempMemoryAvailable(device.index)
    assert 0 < free <= faiss_library.TEMPORARY_BYTES


def test_missing_faiss_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "faiss", None)
    with pytest.raises(ImportError, match=r'pip install -e "\.\[faiss\]"'):
        ONE.index("faiss-flat")
