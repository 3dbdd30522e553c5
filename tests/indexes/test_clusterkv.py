"""ClusterKV equals whole clusters in Python's lists; with clusters of one key it is exact."""

import pytest

from tests.support import literal
from tests.support.helpers import Case, assert_same_hits, left_padding

SMALL = dict(per_cluster=4, block=8, block_clusters=2)


def in_words(learned, keys, b, h, query, k):
    """Return [id]: clusters by `q·c`, and waiting tokens by `q·k`, until there are k rows."""
    units, start = [], 0
    for size in learned["sizes"][b, h].tolist():
        if size:
            ids = learned["members"][b, h, start : start + size].tolist()
            mean = keys[b, h, ids].double().mean(0).tolist()
            units.append((literal.dot(mean, query), ids))
        start += size
    waiting = [i for i in learned["waiting"][b].tolist() if i >= 0]
    units += [(literal.dot(keys[b, h, i].tolist(), query), [i]) for i in waiting]
    rows = [i for _, ids in sorted(units, key=lambda unit: -unit[0]) for i in ids]
    return rows[:k]


@pytest.mark.parametrize("k", [1, 7, 30, 70])
def test_rows_are_those_of_the_best_clusters_the_last_one_cut(k):
    case = Case(q_heads=2, kv_heads=2, head_dim=16, batch=2)
    (keys, values), queries = case.tokens(60), case.queries()
    index = case.index("clusterkv", **SMALL)
    valid = left_padding([0, 9], 60)
    index.append(keys[:, :, :30], values[:, :, :30], valid=valid[:, :30])
    index.append(keys[:, :, 30:], values[:, :, 30:])
    assert index._learned["waiting"].shape[1] == 6  # 30 later tokens: 3 blocks of 8, and 6 wait
    ids = index.search(queries, k=k).ids
    for b in range(2):
        for h in range(2):
            want = in_words(index._learned, keys, b, h, queries[b, h].tolist(), k)
            assert ids[b, h].tolist() == want + [-1] * (k - len(want))


@pytest.mark.parametrize("group", ["mean_share", "max_share", "union", "mean_query"])
def test_with_as_many_clusters_as_keys_it_is_exact(group):
    case = Case(q_heads=6, kv_heads=2, head_dim=16, batch=2)
    tokens, queries = case.tokens(60), case.queries()
    one_each = dict(per_cluster=1, block=8, block_clusters=8)
    index, exact = (
        case.index("clusterkv", group=group, **one_each),
        case.index("exact", group=group),
    )
    for target in (index, exact):
        target.append(tokens[0][:, :, :33], tokens[1][:, :, :33])
        target.append(tokens[0][:, :, 33:], tokens[1][:, :, 33:])
    assert (index._learned["sizes"] == 1).all()
    assert_same_hits(index.search(queries, k=12), exact.search(queries, k=12), close=1e-5)


@pytest.mark.parametrize(
    ("options", "match"),
    [
        (dict(per_cluster=0), "per_cluster: got 0, allowed"),
        (dict(block=0), "block: got 0, allowed"),
        (dict(block=4), "block_clusters: got 8, allowed is 1 to 4, the value of block"),
        (dict(iterations=-1), "iterations: got -1, allowed"),
        (dict(seed=2**63), "seed: got 9223372036854775808, allowed"),
    ],
    ids=str,
)
def test_bad_options_are_named(options, match):
    with pytest.raises(ValueError, match=match):
        Case().index("clusterkv", **options)
