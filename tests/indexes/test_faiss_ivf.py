"""FAISS IVF: with every list probed it is flat, and what it learned stays."""

import pytest
import torch

from tests.contract import CHECKS
from tests.support.helpers import Case, assert_same_hits, left_padding, part

faiss = pytest.importorskip("faiss", reason="needs faiss-cpu")
CASE = Case(q_heads=6, kv_heads=2, head_dim=16, value_dim=8, batch=2)


def made(name, tokens, valid=None, **options):
    index = CASE.index(name, **options)
    index.append(*tokens, valid=valid)
    return index


@pytest.mark.parametrize("group", ["mean_share", "max_share", "union", "mean_query"])
@pytest.mark.parametrize("k", [1, 9, 400])
def test_with_every_list_probed_it_is_flat(k, group):
    tokens, valid = CASE.tokens(300), left_padding([0, 40], 300)
    index = made("faiss-ivf", tokens, valid, lists=12, probes=12, group=group)
    want = made("faiss-flat", tokens, valid, group=group).search(CASE.queries(), k=k)
    assert_same_hits(index.search(CASE.queries(), k=k), want, close=1e-5)
    assert index._faiss_indexes[0][0].nlist == 12


def test_with_fewer_lists_probed_it_is_not_flat():
    """Shows that the test above can fail."""
    tokens = CASE.tokens(300)
    got = made("faiss-ivf", tokens, lists=12, probes=1).search(CASE.queries(), k=20)
    want = made("faiss-flat", tokens).search(CASE.queries(), k=20)
    with pytest.raises(AssertionError):
        assert_same_hits(got, want, close=1e-5)


def test_its_lists_are_those_that_faiss_trains():
    case = Case(q_heads=1, kv_heads=1, head_dim=16)
    keys, values = case.tokens(900)
    index = case.index("faiss-ivf")
    index.append(keys, values)
    theirs = faiss.IndexIVFFlat(faiss.IndexFlatIP(16), 16, 23, faiss.METRIC_INNER_PRODUCT)
    before = faiss.omp_get_max_threads()
    faiss.omp_set_num_threads(1)
    theirs.train(keys[0, 0].numpy())
    faiss.omp_set_num_threads(before)
    want = theirs.quantizer.reconstruct_n(0, 23)
    assert int(index._learned["lists"]) == 23  # one for 39 keys, fewer than 4 √900
    torch.testing.assert_close(index._learned["centroids"][0, 0], torch.from_numpy(want))


def test_later_keys_move_no_centroid():
    tokens = CASE.tokens(300)
    index = made("faiss-ivf", part(tokens, 0, 200), lists=6)
    before = index._learned["centroids"].clone()
    index.append(*part(tokens, 200, 300))
    assert torch.equal(index._learned["centroids"], before)
    assert index._faiss_indexes[0][0].ntotal == 300


def test_rows_learn_when_their_first_token_comes():
    tokens = CASE.tokens(300)
    index = CASE.index("faiss-ivf", lists=6)
    index.append(*part(tokens, 0, 150), valid=left_padding([150, 0], 150))
    assert index._learned["lists"].tolist() == [0, 6]
    index.append(*part(tokens, 150, 300))
    assert index._learned["lists"].tolist() == [6, 6]
    alone = CASE.index("faiss-ivf", lists=6)
    alone.append(*[tensor[:1] for tensor in part(tokens, 150, 300)])
    torch.testing.assert_close(index._learned["centroids"][:1], alone._learned["centroids"])


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
def test_the_contract_holds_with_several_lists(check):
    check(lambda **options: CASE.index("faiss-ivf", lists=4, probes=4, **options), CASE)


def test_bytes():
    index = made("faiss-ivf", CASE.tokens(400), lists=8, probes=2)
    bytes_per_key = index.bytes_per_key()
    assert bytes_per_key["scanned"] == pytest.approx(72 * 2 / 8 + 8 * 64 / 400)
    assert bytes_per_key["stored"] == pytest.approx(72 + (8 * 64 * 4 + 16) / 1600)


@pytest.mark.parametrize("bad", [dict(lists=0), dict(probes=0), dict(iterations=0), dict(seed=-1)])
def test_bad_options_are_named(bad):
    with pytest.raises(ValueError, match=f"{next(iter(bad))}: got .* allowed is an integer"):
        CASE.index("faiss-ivf", **bad)
