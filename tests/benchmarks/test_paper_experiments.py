"""The experiments of the ParisKV paper, on a tiny model: figures fit each other and the index."""

import pytest
import torch

from benchmarks import paper_experiments, report
from benchmarks.paper_experiments import analytic, learned, votes
from kvindex.ops import coarse, codes, transform
from tests.benchmarks.running import ran
from tests.support.helpers import Case


def test_votes_are_those_of_the_index():
    case = Case(q_heads=2, kv_heads=2, head_dim=16, value_dim=8, batch=1)
    keys, queries = case.tokens(300)[0], case.queries()
    scores = votes(*analytic(keys[0], queries), 0.25)[0]
    rotation = transform.rotation(16, 0)
    turned = transform.rotate(transform.normalize(keys)[0], rotation)
    signs = codes.pack(turned.unflatten(-1, (-1, 8)) >= 0)
    query = transform.rotate(queries, rotation)[:, :, None]
    limits = [coarse.ceil_fraction(300, 0.25, tier) for tier in coarse.TIERS]
    table = coarse.tier_table(query, coarse.histogram(signs), torch.tensor([limits]))
    index = signs.long().transpose(2, 3)
    want = table[:, :, 0].gather(-1, index).sum(2)
    assert torch.equal(scores, want[0].long())


def test_learned_centroids_are_the_nearest():
    case = Case(q_heads=2, kv_heads=2, head_dim=16, value_dim=8, batch=1)
    keys, queries = case.tokens(300)[0], case.queries()
    table, labels = learned(keys[0], queries, 100)
    assert table.shape == (1, 2, 2, 100)
    first = keys[0, :, :100]  # as many centroids as keys: each key is its own
    exact = queries[:, :, None].unflatten(-1, (-1, 8)) * first.unflatten(-1, (-1, 8))
    got = table.transpose(2, 3).gather(2, labels[None, :, :100])
    torch.testing.assert_close(got, exact.sum(-1))


@pytest.mark.parametrize("command", ["along", "length"])
def test_experiments_are_measured(tiny, monkeypatch, command):
    texts, model = tiny
    given = [command, "--text", texts[1], "--tokens", 200, "--written", 40, "--parts", 1]
    result = ran(
        paper_experiments.main, [*given, "--step", 1, "-k", 5, "--beta", 0.1, *model], monkeypatch
    )
    for cell in result["cells"]:
        assert 0 < cell["recall"] <= 1
    stages = [cell for cell in result["cells"] if "centroids" in cell]
    ranks = {(c["centroids"], c["tokens"], c["beta"] or 0): c["recall"] for c in stages}
    for name, tokens, beta in ranks:  # reranking more keys finds more
        assert ranks[name, tokens, beta] >= ranks[name, tokens, 0]
    if command == "along":
        page = report.TABLES["paper_along"](result) + report.TABLES["paper_stages"](result)
        assert page.count("\n| ") > 10
