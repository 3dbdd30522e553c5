"""Tokens of one sequence in several processes give the same results as in one process."""

import copy

import pytest
import torch
import torch.distributed as dist

from kvindex.core.protocol import Attends
from kvindex.core.ranks import Ranks
from kvindex.core.resident import ResidentRows
from kvindex.core.shards import Shard
from kvindex.wrappers import Sharded
from tests.cuda import emulator
from tests.support import ranks as processes
from tests.support.helpers import Case, assert_same_hits, mostly_slow
from tests.wrappers import (
    sharded_cases,
    sharded_gpu_cases,
    sharded_graph_cases,
    sharded_graph_gpu_cases,
)

MODULE = sharded_cases.__name__
TOGETHER = [
    pytest.param(ranks, name, marks=[pytest.mark.slow] * (ranks == 3))
    for ranks in (2, 3)
    for name in sharded_cases.cases(ranks, False)
]
CASE = Case(q_heads=6, kv_heads=2, batch=2)


def agreed(ranks, name, every=False, module=MODULE):
    """Raise an error if any rank reports that the case failed or did not run."""
    for rank, said in enumerate(processes.results(module, ranks, every)):
        assert name in said, f"rank {rank} ended before: {next(reversed(said.items()), None)}"
        assert said[name] is None, f"rank {rank}: {said[name]}"


@pytest.mark.parametrize(("ranks", "name"), TOGETHER)
def test_ranks_together(ranks, name):
    agreed(ranks, name)


@pytest.mark.slow
@pytest.mark.longest
@pytest.mark.parametrize("ranks", [2, 3])
def test_the_whole_contract_of_every_index(ranks):
    for name in sharded_cases.EVERY:
        agreed(ranks, name, every=True)


@pytest.mark.gpu2
@pytest.mark.parametrize("name", sharded_gpu_cases.cases(2, False))
def test_two_gpus_together(name):
    agreed(2, name, module=sharded_gpu_cases.__name__)


@pytest.mark.slow
@pytest.mark.skipif(not emulator.available(), reason="no g++ to emulate with")
@pytest.mark.parametrize("name", sharded_graph_cases.cases(2, False))
def test_steps_in_a_graph(name):
    agreed(2, name, module=sharded_graph_cases.__name__)


@pytest.mark.gpu2
@pytest.mark.parametrize("name", sharded_graph_gpu_cases.cases(2, False))
def test_steps_in_a_graph_of_two_gpus(name):
    agreed(2, name, module=sharded_graph_gpu_cases.__name__)


@pytest.mark.parametrize("fault", mostly_slow(["dies", "hangs"], "dies"))
def test_a_rank_that_is_gone_ends_the_others_and_is_named(fault, tmp_path):
    said = processes.started("tests.wrappers.sharded_faults", [fault], 3, tmp_path)
    for rank, line in enumerate(said[:2]):
        assert line.startswith(f"1 2 True ranks: lost rank 2 of 3 (this is rank {rank}, "), line


@pytest.mark.parametrize("ranks", [1, 2, 3, 5])
@pytest.mark.parametrize("block", [1, 4, 256])
def test_ids_of_shards_are_those_of_the_sequence(ranks, block):
    ids, seen = torch.arange(-9, 1700), []
    for rank in range(ranks):
        shard = Shard(rank, ranks, block)
        own = shard.to_own(ids)
        mine = ids[own != -1]
        assert torch.equal(shard.to_whole(own[own != -1]), mine)
        tokens = mine[mine >= 0]
        assert torch.equal(own[own >= 0], torch.arange(len(tokens))), "dense, in order"
        assert ((tokens // block) % ranks == rank).all()
        for start, stop in ((0, 1700), (3, 5), (250, 520), (7, 7)):
            parts = [ids[9:][start:stop][part] for part in shard.parts(start, stop)]
            want = tokens[(tokens >= start) & (tokens < stop)]
            assert torch.equal(torch.cat([want[:0], *parts]), want)
            assert shard.tokens(stop) == int((tokens < stop).sum())
        at = shard.to_own_positions(torch.arange(1700))
        assert torch.equal(at, ((tokens[:, None] <= ids[9:]).sum(0) - 1).clamp_min(0))
        seen.append(mine)
    assert torch.equal(torch.cat(seen).sort().values, ids[ids != -1]), "each of one rank"


def test_one_process_needs_no_group():
    index, one = Sharded(CASE.index("exact")), CASE.index("exact")
    for each in (index, one):
        each.append(*CASE.tokens(300))
    assert_same_hits(index.search(CASE.queries(), k=9), one.search(CASE.queries(), k=9), close=1e-5)
    assert index.explain().endswith(
        "ranks: this is 0 of 1; rows of a step: each its own, outputs merged"
    )
    assert copy.deepcopy(index)._ranks is index._ranks


def test_what_nobody_attends_to_has_no_weight():
    """A rank without tokens adds nothing, although its kernels may return any numbers."""
    index = Sharded(CASE.index("exact"))
    index.append(*CASE.tokens(3))
    queries, empty = CASE.queries(), ResidentRows(CASE.index("exact").geometry, 2, 1)
    index._shard = Shard(1, 2, 256)  # the rank without tokens
    index.inner.reset()
    attended = index.attend(queries, empty, k=4)
    assert attended.lse.isneginf().all()
    assert not attended.output.any()
    assert not attended.found.any()


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"block": 0}, "block: got 0, allowed is an integer of at least 1"),
        ({"rows": "all"}, "rows: got 'all', allowed is one of"),
        ({"timeout_s": 0}, "timeout_s: got 0, allowed is a positive finite number"),
    ],
)
def test_bad_options_are_refused(options, match):
    with pytest.raises(ValueError, match=match):
        Sharded(CASE.index("exact"), **options)


def test_what_it_does_not_do_is_refused():
    filled = CASE.index("exact")
    filled.append(*CASE.tokens(4))
    with pytest.raises(ValueError, match="inner: got an index with 4 tokens, allowed is"):
        Sharded(filled)
    index = Sharded(CASE.index("exact"))
    with pytest.raises(TypeError, match="start_append: got a sharded index"):
        index.start_append(*CASE.tokens(3))
    with pytest.raises(TypeError, match="expand_batch: got a sharded index"):
        index.expand_batch(3)
    resident = ResidentRows(index.geometry, 2, 1)
    with pytest.raises(ValueError, match=r"len\(index\): got 0"):
        index.capability(Attends).attend(CASE.queries(), resident, k=3)


def test_a_process_of_torchrun_without_a_group_is_refused(monkeypatch):
    monkeypatch.setattr(dist, "is_torchelastic_launched", lambda: True)
    with pytest.raises(ValueError, match="group: got none in a process that torchrun started"):
        Ranks.of()
