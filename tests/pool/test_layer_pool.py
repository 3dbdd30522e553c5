"""A pool of layers: sequences of any lengths, stepped together, equal layers of their own."""

import copy
import math
import random

import pytest
import torch

import kvindex
from kvindex.layer import AttentionLayer
from tests.support.helpers import Case
from tests.support.sequences import SIZES

CASE = Case(q_heads=4)


def made(spec="pariskv"):
    return AttentionLayer(CASE.index(spec), k=7, **SIZES)


def tokens(count, seed, batch):
    queries = CASE.tensor(90 + seed, batch, CASE.q_heads, count, CASE.head_dim)
    return queries, *CASE.tokens(count, seed, batch)


@pytest.mark.parametrize("spec", ["exact", "pariskv", "quest"])
def test_any_interleaving_equals_separate_layers(spec):
    draw, pool, alone = random.Random(1), kvindex.LayerPool(made(spec)), {}
    for number in range(80):
        deed = draw.choice(["open", "fork", "close", "truncate"] + ["step"] * 6)
        one = draw.choice([*alone]) if alone else None
        if deed == "open" and len(alone) < 5:
            alone[pool.open()] = made(spec)
        elif deed == "fork" and alone and len(alone) < 5:
            twin = made(spec)
            state = alone[one].state_dict() if len(alone[one]) else {}
            if state:
                twin.load_state_dict({name: part.clone() for name, part in state.items()})
            alone[pool.fork(one)] = twin
        elif deed == "close" and len(alone) > 1:
            pool.close(one)
            del alone[one]
        elif deed == "truncate" and alone:
            length = max(0, len(alone[one]) - draw.randrange(5))
            pool.truncate(one, length)
            alone[one].truncate(length)
        elif deed == "step" and alone:
            some = draw.sample([*alone], draw.randint(1, len(alone)))
            given = tokens(draw.choice([1, 1, 1, 9]), number, len(some))
            got = pool.step(some, *given)
            for i, sequence in enumerate(some):
                want = alone[sequence].step(*(part[i : i + 1] for part in given))
                assert torch.equal(got[i : i + 1], want)
        assert [len(pool[each]) for each in pool] == [*map(len, alone.values())]
    assert pool.report().tokens == sum(len(layer.index) for layer in alone.values())


def test_a_step_that_fails_for_one_changes_none():
    pool = kvindex.LayerPool(made())
    some = [pool.open(), pool.open()]
    pool.step(some, *tokens(30, 0, 2))
    twins = [copy.deepcopy(pool[each]) for each in some]
    queries, keys, values = tokens(1, 1, 2)
    keys[1, 0, 0, 3] = math.nan
    with pytest.raises(ValueError, match="keys: got"):
        pool.step(some, queries, keys, values)
    with pytest.raises(ValueError, match="queries: got shape"):
        pool.step(some, queries[:1], keys, values)
    assert [len(pool[each]) for each in some] == [30, 30]
    given = tokens(1, 2, 2)
    got = pool.step(some, *given)
    want = [twin.step(*(part[i : i + 1] for part in given)) for i, twin in enumerate(twins)]
    assert torch.equal(got, torch.cat(want))
