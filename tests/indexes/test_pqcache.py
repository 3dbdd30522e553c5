"""PQCache: codes are the nearest centroids, and estimates are exact where centroids are keys."""

import pytest
import torch

from tests.contract import CHECKS
from tests.support.helpers import Case, assert_same_hits, left_padding

CASE = Case(q_heads=2, kv_heads=2, head_dim=16, value_dim=8, batch=2)
GROUPS = Case(q_heads=6, kv_heads=2, head_dim=16, value_dim=8, batch=2)
TRAINED = dict(subspaces=4, bits=3)  # fewer centroids than keys in every check


def whole(case, count, *, seed=0):
    """Return keys, values and queries of small integers, whose products and means are exact in
    float32."""
    generator = torch.Generator().manual_seed(seed)
    keys = torch.randint(
        -8, 9, (case.batch, case.kv_heads, count, case.head_dim), generator=generator
    )
    queries = torch.randint(-8, 9, (case.batch, case.q_heads, case.head_dim), generator=generator)
    return keys.float(), keys[..., : case.value_dim].float(), 3 * queries.float()


def decoded(index):
    """Return the vectors that the codes of an index represent, `[B, G, N, D]`, subspace by
    subspace."""
    books, labels = index._learned["codebooks"], index._codes["labels"].long()
    parts = []
    for b in range(labels.shape[-1]):
        rows = labels[..., b, None].expand(-1, -1, -1, books.shape[-1])
        parts.append(books[:, :, b].gather(2, rows))
    return torch.cat(parts, dim=-1)


# Theory


@pytest.mark.parametrize("group", ["mean_share", "max_share", "union", "mean_query"])
@pytest.mark.parametrize("count", [1, 40, 64])
def test_with_as_many_centroids_as_keys_it_is_exact(count, group):
    keys, values, queries = whole(GROUPS, count)
    index, exact = GROUPS.index("pqcache", group=group), GROUPS.index("exact", group=group)
    for one in (index, exact):
        one.append(keys, values)
    assert torch.equal(decoded(index), keys)
    assert_same_hits(index.search(queries, k=20), exact.search(queries, k=20))


def test_with_fewer_centroids_it_is_not():
    keys, values, queries = whole(GROUPS, 40)
    index, exact = GROUPS.index("pqcache", bits=5), GROUPS.index("exact")
    for one in (index, exact):
        one.append(keys, values)
    with pytest.raises(AssertionError):
        assert_same_hits(index.search(queries, k=20), exact.search(queries, k=20))


def test_a_few_distinct_keys_are_found_however_often_they_occur():
    keys, values, queries = whole(CASE, 12)
    keys, values = keys.repeat(1, 1, 20, 1), values.repeat(1, 1, 20, 1)
    index, exact = CASE.index("pqcache"), CASE.index("exact")
    for one in (index, exact):
        one.append(keys, values)
    torch.testing.assert_close(decoded(index), keys, atol=1e-5, rtol=0)
    assert_same_hits(index.search(queries, k=20), exact.search(queries, k=20), close=1e-5)


def test_each_code_is_the_nearest_centroid():
    index = CASE.index("pqcache", **TRAINED)
    for seed in (0, 1):  # keys that trained the centroids, and later ones
        index.append(*CASE.tokens(60, seed))
    keys = torch.cat([CASE.tokens(60, seed)[0] for seed in (0, 1)], dim=2)
    books, labels = index._learned["codebooks"].double(), index._codes["labels"]
    parts = keys.double().unflatten(-1, (4, 4)).transpose(2, 3)  # [B, G, M, N, m]
    distances = (parts[..., None, :] - books[:, :, :, None]).square().sum(-1)
    chosen = distances.gather(-1, labels.transpose(2, 3).long()[..., None])[..., 0]
    assert (chosen <= distances.amin(-1) + 1e-5).all()


def test_an_estimate_errs_by_no_more_than_its_residual():
    """`|⟨q, k⟩ - Σ ⟨q_b, c_b⟩| ≤ Σ ‖q_b‖ ‖k_b - c_b‖`, and it is `⟨q, code⟩` itself."""
    index = GROUPS.index("pqcache", **TRAINED)
    keys, values = GROUPS.tokens(200)
    index.append(keys, values)
    queries = GROUPS.queries().unflatten(1, (2, 3))
    got, coded = index.estimates(queries), decoded(index)
    torch.testing.assert_close(got, queries @ coded.mT, atol=1e-5, rtol=1e-5)
    cut = (2, 2, -1, 4, 4)
    query_norms = queries.reshape(cut).norm(dim=-1)  # [B, G, g, M]
    residuals = (keys - coded).reshape(cut).norm(dim=-1)
    bound = query_norms @ residuals.mT
    assert ((got - queries @ keys.mT).abs() <= bound + 1e-5).all()


def test_more_bits_or_more_subspaces_err_less():
    keys, values = CASE.tokens(500)

    def error(**options):
        index = CASE.index("pqcache", **options)
        index.append(keys, values)
        return float((decoded(index) - keys).square().mean())

    errors = [error(subspaces=2, bits=bits) for bits in (2, 4, 6)]
    errors += [error(subspaces=s, bits=6) for s in (4, 8)]
    assert errors == sorted(errors, reverse=True)


# What is learned


def test_later_tokens_are_coded_with_the_prompts_centroids():
    index = CASE.index("pqcache", **TRAINED)
    index.append(*CASE.tokens(60))
    before = index._learned["codebooks"].clone()
    labels = index._codes["labels"].clone()
    keys, values = CASE.tokens(60, seed=1)
    index.append(keys + 10, values)
    index.truncate(80)
    assert torch.equal(index._learned["codebooks"], before)
    assert torch.equal(index._codes["labels"][:, :, :60], labels)
    index.reset()
    index.append(keys + 10, values)
    assert not torch.equal(index._learned["codebooks"], before)


def test_padding_teaches_nothing():
    """The sequences learn at different appends, but from the same number of keys."""
    keys, values = CASE.tokens(60)
    padded = CASE.index("pqcache", **TRAINED)
    valid = left_padding([40, 7], 60)
    spoilt = keys.masked_fill(~valid[:, None, :, None], 1e6)
    for piece in (slice(0, 30), slice(30, 60)):
        padded.append(spoilt[:, :, piece], values[:, :, piece], valid=valid[:, piece])
    for b, (start, stop) in enumerate([(40, 60), (7, 30)]):
        alone = CASE.index("pqcache", **TRAINED)
        alone.append(keys[b : b + 1, :, start:stop], values[b : b + 1, :, start:stop])
        got, want = padded._learned["codebooks"][b], alone._learned["codebooks"][0]
        torch.testing.assert_close(got, want, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
def test_trained_codebooks_keep_the_contract(check):
    check(lambda **options: GROUPS.index("pqcache", **{**TRAINED, **options}), GROUPS)


# Bytes and options


@pytest.mark.parametrize(("preset", "each"), [(None, 2), ("infinitebench", 4)])
def test_bytes_per_key(preset, each):
    case = Case(q_heads=2, kv_heads=2, head_dim=128, value_dim=8)
    index = case.index("pqcache", preset=preset)
    index.append(*case.tokens(10))
    centroids = 2**index.config.bits * 128 * 4
    assert index.nbytes()["codes"] == 2 * (10 * each + centroids) + 1
    assert index.bytes_per_key()["scanned"] == each


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (dict(subspaces=3), "subspaces: got 3, allowed is a divisor of head_dim = 16"),
        (dict(subspaces=0), "subspaces: got 0"),
        (dict(bits=0), "bits: got 0"),
        (dict(bits=9), "bits: got 9, allowed is 1 to 8"),
        (dict(iterations=-1), "iterations: got -1"),
        (dict(seed=2**63), "seed: got 9223372036854775808"),
    ],
    ids=str,
)
def test_bad_options_are_refused(options, words):
    with pytest.raises(ValueError, match=words):
        CASE.index("pqcache", **options)
