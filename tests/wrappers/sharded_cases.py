"""Cases of `test_sharded.py`; each one runs on all ranks together."""

from __future__ import annotations

import copy
import tempfile
from functools import partial
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

import kvindex
from kvindex.core.capability import capability
from kvindex.core.protocol import Attends, SearchesShard, WeighsRows
from kvindex.layer import AttentionLayer
from kvindex.testing.cases import CASES as SHAPES
from kvindex.wrappers import Sharded
from tests.contract import CHECKS
from tests.support.helpers import (
    Case,
    all_rows,
    assert_same_hits,
    assert_well_formed,
    hits_of,
    left_padding,
    part,
)
from tests.support.sequences import SIZES, Sequence, steps_of

LINE = "sharded:block=8:timeout_s=60"
"""Blocks of 8 tokens, so that the contract's 40 tokens are 5 blocks."""

CLOSE = 1e-5
"""Tolerance of scores: sums of up to 100 similar float32 numbers in another order."""


def of(case, index="exact", line=LINE, **options):
    return case.index(f"{index}+{line}", **options)


# The contract

NOT_TOGETHER = {
    "check_an_append_that_runs_out_of_memory_changes_nothing": "memory of one rank",
    "check_a_reorder_that_runs_out_of_memory_changes_nothing": "memory of one rank",
    "check_nbytes_counts_rows_and_grows": "bytes are those of this rank",
}
"""Checks of requirements that hold only in a single process."""


def alone(index):
    return capability(index, SearchesShard) is None


def learns(index):
    return any(name[:8] == "learned." and "open_keys" not in name for name in index.state_dict())


def draws(index):
    return capability(index, WeighsRows) is not None


OF_ITS_TOKENS = {
    # padding moves tokens to other ranks, so only results that do not depend on neighbors are equal
    "check_padding_changes_nothing_but_ids": alone,
    # a rank learns from its part of the first append of which it gets tokens
    "check_append_in_chunks_equals_one_call": learns,
    "check_truncated_ids_never_return": learns,
    "check_truncate_then_append_equals_fresh": learns,
    # each rank returns its part of the sampled rows
    "check_ties_go_to_the_lower_id": draws,
}
"""Checks, and the indexes for which they do not hold."""

OF_ALL_RANKS = {"check_attention_where_few_tokens_are_valid": f"{LINE}:rows=best"}
"""Checks that attention reads the rows of a search: by default each rank reads its own `k` rows."""


def units(index):
    """Make an index that answers what the contract asks of subclasses of `BaseIndex`."""

    class Units(type(index)):
        unit = property(lambda self: self.inner.unit)
        scattered = property(lambda self: self.inner.scattered)

    index.__class__ = Units
    return index


def held_to(check, name, case):
    excused = OF_ITS_TOKENS.get(check.__name__)
    if excused is not None:
        index = case.index(name)
        index.append(*case.tokens(40))
        if excused(index):
            return
    line = OF_ALL_RANKS.get(check.__name__, LINE)
    check(lambda **options: units(of(case, name, line, **options)), case)


# One process

SHAPE = Case(q_heads=6, kv_heads=2, value_dim=24, batch=2)
FLAT = Case(q_heads=2, kv_heads=2, batch=2)


def finds_what_one_process_finds(policy, case):
    one, many = case.index("exact", group=policy), of(case, group=policy)
    tokens, done = case.tokens(103), 0
    for step, count in enumerate((1, 6, 1, 1, 31, 3, 60)):  # some appends go to one rank alone
        pads = left_padding([1, 0][: case.batch], 1) if step == 0 else None
        for index in (one, many):
            index.append(*part(tokens, done, done + count), valid=pads)
        done += count
        for k in (1, 9, 200):
            got, want = (index.search(case.queries(step), k=k) for index in (many, one))
            assert_well_formed(got, many, case.batch, k)
            assert torch.equal(got.ids, want.ids)
            assert_same_hits(got, want, close=CLOSE)
        assert torch.equal(many.fetch(got).values, one.fetch(want).values)
    assert torch.equal(many.counts, one.counts)
    assert torch.equal(many.valid, one.valid)
    total = torch.tensor(many.nbytes()["rows"])
    dist.all_reduce(total)
    assert int(total) == one.nbytes()["rows"]


def equal_scores_go_to_the_lower_id():
    index, (keys, values) = of(SHAPE), SHAPE.tokens(60)
    index.append(keys[:, :, :1].expand_as(keys), values)
    assert (index.search(SHAPE.queries(), k=50).ids == torch.arange(50)).all()


def lives_as_one_process_does():
    """Truncations within a block, reorders, forks, rollbacks and resets give the same as one
    process."""
    one, many = SHAPE.index("exact"), of(SHAPE)

    def same(queries=None, pair=None):
        mine, theirs = pair or (many, one)
        queries = SHAPE.queries() if queries is None else queries
        got, want = (index.search(queries, k=30) for index in (mine, theirs))
        assert len(mine) == len(theirs)
        assert_same_hits(got, want, close=CLOSE)
        assert torch.equal(all_rows(mine, len(queries)).keys, all_rows(theirs, len(queries)).keys)

    for length in (45, 21, 3, 0):
        for index in (many, one):
            index.append(*SHAPE.tokens(50, seed=length))
            index.truncate(length)
        same()
    for index in (many, one):
        index.append(*SHAPE.tokens(50))
        index.reorder(torch.tensor([1, 1, 0]))
    same(SHAPE.queries(batch=3))
    forks = copy.deepcopy(many), copy.deepcopy(one)
    before = many.checkpoint(), one.checkpoint()
    for index in (many, one):
        index.append(*SHAPE.tokens(20, seed=5, batch=3))
    for index in forks:
        index.append(*SHAPE.tokens(7, seed=6, batch=3))
    same(SHAPE.queries(batch=3))
    same(SHAPE.queries(batch=3), forks)
    for index, checkpoint in zip((many, one), before, strict=True):
        index.rollback(checkpoint)
    same(SHAPE.queries(batch=3))
    for index in (many, one):
        index.reset()
        index.append(*SHAPE.tokens(9))
    same()


def codes_are_those_of_one_process():
    """Codes of full blocks are equal if an index's codes depend only on their block."""
    case = Case(head_dim=64, value_dim=64)
    many = of(case, "pariskv", "sharded:timeout_s=60")
    one = case.index("pariskv")
    for index in (many, one):
        index.append(*case.tokens(1100))
    rank, ranks = dist.get_rank(), dist.get_world_size()
    own, every = many.inner.state_dict(), one.state_dict()
    ids = torch.cat([torch.arange(b * 256, (b + 1) * 256) for b in range(rank, 4, ranks)])
    assert {"codes.signs", "codes.magnitudes", "codes.weights"} <= own.keys()
    for name in own.keys() & {"codes.signs", "codes.magnitudes", "codes.weights"}:
        assert torch.equal(own[name], every[name][:, :, ids])


# Attention

ATTENDING = {
    "groups of 3": (Case(q_heads=6, value_dim=8), None),
    "softcap": (Case(q_heads=4, softcap=2.0, batch=2), None),
    "padded": (Case(q_heads=6, value_dim=24, batch=3), [0, 7, 16]),
    "bfloat16": (Case(q_heads=8, dtype=torch.bfloat16, batch=2), [3, 0]),
}


def attends_to_all(name, rows, index="exact", **options):
    """A layer whose `k` covers all tokens computes dense attention, whichever rank has the
    tokens."""
    case, pads = ATTENDING[name]
    sequence = Sequence.of(case, 44, pads)
    layer = AttentionLayer(of(case, index, f"{LINE}:rows={rows}", **options), k=1000, **SIZES)
    want = sequence.dense()
    for start, stop in steps_of(7, 9, *[1] * 28):
        sequence.assert_equals(sequence.feed(layer, start, stop), want, start)
    assert layer.traffic.steps == 28


def attends_to_the_best(k):
    """With `rows="best"`, the output is that of one process, even for few rows."""
    case, pads = ATTENDING["padded"]
    sequence = Sequence.of(case, 60, pads)
    line = f"{LINE}:rows=best"
    many, one = (
        AttentionLayer(index, k=k, **SIZES) for index in (of(case, line=line), of_one(case))
    )
    for start, stop in steps_of(30, *[1] * 30):
        got, want = sequence.feed(many, start, stop), sequence.feed(one, start, stop)
        torch.testing.assert_close(got, want, rtol=CLOSE, atol=CLOSE)
    assert float(many.traffic.rows_read) == pytest.approx(float(one.traffic.rows_read))


def of_one(case):
    return case.index("exact")


def kernels_attend():
    """An inner index attends with its own kernels, also on a rank without tokens."""
    case = Case(q_heads=4, kv_heads=2, head_dim=64, value_dim=64)
    index = of(case, "pariskv:preset=fast", backend="cpu")
    index.append(*case.tokens(20))
    rank = dist.get_rank()
    assert (capability(index.inner, Attends) is not None) == (len(index.inner) > 0 or rank == 0)
    sequence = Sequence.of(case, 30)
    for rows in ("own", "best"):
        many = AttentionLayer(
            of(case, "pariskv:preset=fast", f"{LINE}:rows={rows}", backend="cpu"), k=100, **SIZES
        )
        want = sequence.dense()
        for start, stop in steps_of(20, *[1] * 10):
            sequence.assert_equals(sequence.feed(many, start, stop), want, start)


def drawn_rows_stand_for_all():
    """If each rank samples rows, attention is that of all rows on average over 60 token orders."""
    case = Case(q_heads=2, kv_heads=1, head_dim=32, value_dim=4)
    keys, values = case.tokens(64)
    generator, queries = torch.Generator().manual_seed(0), case.queries()
    sums, scale = [], case.index("exact").geometry.scale
    want = (scale * queries @ keys[:, 0].mT).exp().sum(-1)
    for _ in range(60):
        order = torch.randperm(64, generator=generator)
        index = of(case, "exact+sample:share=0.7:pool=8")
        index.append(keys[:, :, order], values[:, :, order])
        hits = index.search(queries, k=12)
        assert_well_formed(hits, index, 1, 12)
        logits = scale * queries @ index.fetch(hits).keys[:, 0].mT
        sums.append((logits + hits.log_weight).exp().sum(-1))
    mean, spread = torch.stack(sums).mean(0), torch.stack(sums).std(0)
    # 4.5 standard errors: the two means fail with probability 1e-5 together for a new seed
    assert ((mean - want).abs() <= 4.5 * spread / 60**0.5).all()


# State, and errors


def state_goes_on():
    index, (rank, ranks) = of(SHAPE), (dist.get_rank(), dist.get_world_size())
    index.append(*SHAPE.tokens(43), valid=left_padding([0, 3], 43))
    want = index.search(SHAPE.queries(), k=20)
    with tempfile.TemporaryDirectory() as folder:
        index.save(Path(folder) / "index")
        assert_same_hits(kvindex.load(Path(folder) / "index").search(SHAPE.queries(), k=20), want)
    state, other = index.state_dict(), of(SHAPE, line="sharded:block=16:timeout_s=60")
    with pytest.raises(ValueError, match="state: got a state with block = 8, allowed is 16"):
        other.load_state_dict(state)
    with pytest.raises(ValueError, match="index: got an index with 43 tokens"):
        index.load_state_dict(state)
    told: list[object] = [None] * ranks
    dist.all_gather_object(told, state)
    with pytest.raises(ValueError, match=f"state: got a state with rank = {(rank + 1) % ranks}"):
        of(SHAPE).load_state_dict(told[(rank + 1) % ranks])
    index.truncate(0)  # an index without tokens remembers its batch size
    emptied = of(SHAPE)
    emptied.load_state_dict(index.state_dict())
    with pytest.raises(ValueError, match="keys"):
        emptied.append(*(part[:1].expand(3, -1, -1, -1) for part in SHAPE.tokens(4)))


def differing_ranks_are_refused():
    rank = dist.get_rank()
    match = "sharded: got block = 8 on rank 1, allowed is the value of rank 0, 9"
    with pytest.raises(ValueError, match=match):
        Sharded(SHAPE.index("exact"), block=8 if rank else 9, timeout_s=60)
    policy = "union" if rank == 1 else "mean_share"
    with pytest.raises(ValueError, match=r"got config = .*union.* on rank 1, allowed is the value"):
        of(SHAPE, group=policy)
    of(SHAPE)  # all ranks can continue


def wrong_calls_are_refused_everywhere():
    index = of(SHAPE)
    index.append(*SHAPE.tokens(20))
    with pytest.raises(ValueError, match=r"hits.ids: got -5, allowed is an id that a search has"):
        index.fetch(hits_of(torch.full((2, 2, 3), -5)))
    with pytest.raises(ValueError, match=r"coverage: got 0.5, allowed is None, because tokens are"):
        index.search(SHAPE.queries(), k=3, coverage=0.5)
    with pytest.raises(ValueError, match=r"coverage: got 0.5"):
        AttentionLayer(of(SHAPE), coverage=0.5)
    bad = SHAPE.tokens(20)[0].clone()
    bad[1, 1, 17, 3] = float("nan")  # in a block of one rank
    with pytest.raises(ValueError, match="keys: got nan"):
        index.append(bad, SHAPE.tokens(20)[1])
    assert len(index) == 20
    assert (
        index.search(SHAPE.queries(), k=25).ids[..., :20].sort(-1).values == torch.arange(20)
    ).all()


def of_the_ranks():
    """Map names to the cases of this module."""
    for policy in ("mean_share", "max_share", "mean_query"):
        yield f"finds by {policy}", partial(finds_what_one_process_finds, policy, SHAPE)
    yield "finds for heads alone", partial(finds_what_one_process_finds, "union", FLAT)
    for name in ATTENDING:
        for rows in ("own", "best"):
            yield f"attends, {name}, {rows}", partial(attends_to_all, name, rows)
    yield "attends, quest", partial(attends_to_all, "padded", "best", "quest")
    yield "attends, pariskv", partial(attends_to_all, "groups of 3", "own", "pariskv")
    for k in (1, 6):
        yield f"attends to the best {k}", partial(attends_to_the_best, k)
    for case in (
        *(equal_scores_go_to_the_lower_id, lives_as_one_process_does),
        *(codes_are_those_of_one_process, kernels_attend, drawn_rows_stand_for_all),
        *(state_goes_on, differing_ranks_are_refused, wrong_calls_are_refused_everywhere),
    ):
        yield case.__name__, case


def of_the_contract():
    """Map names to cases that run every check on every index, with one shape each."""
    checks = [check for check in CHECKS if check.__name__ not in NOT_TOGETHER]
    for i, name in enumerate(kvindex.names()):
        for j, check in enumerate(checks):
            yield f"{name}: {check.__name__}", partial(held_to, check, name, SHAPES[(i + j) % 5])


EVERY = dict(of_the_contract())
CHECKED = len({name.partition(":")[2] for name in EVERY})
SAMPLE = {2: (2,), 3: (3, 10, 11)}
"""Of 16 cases of the contract in a row, those that 2 ranks run, and those that 3 run: each index
meets a quarter of the checks, and each check a quarter of the indexes."""


def cases(ranks, every):
    """Map names to the cases for a number of ranks. With `every`, include the whole contract."""
    sampled = {
        name: case
        for place, (name, case) in enumerate(EVERY.items())
        if (place + place // CHECKED) % 16 in SAMPLE[ranks]
    }
    return EVERY if every else {**dict(of_the_ranks()), **sampled}
