"""Deep copies that share rows and codes behave like separate indexes for any order of calls."""

import copy
import random

import pytest
import torch

import kvindex
from kvindex.layer import AttentionLayer
from tests.contract.test_state import CASE, SPECS, assert_equal, assert_same_state, do, made
from tests.support.helpers import Operations, sampled
from tests.support.sequences import SIZES, Sequence


def separate(spec, index):
    """Return an index of the same state in separate memory."""
    other = made(spec)
    other.load_state_dict({name: part.clone() for name, part in index.state_dict().items()})
    return other


@pytest.mark.parametrize(("spec", "seed"), sampled(SPECS, [0, 1, 2]))
def test_any_interleaving_equals_separate_indexes(spec, seed):
    """Each index is compared with a separate index that shares no memory with it."""
    rng, index = random.Random(seed), made(spec)
    do(index, 1, ("append", 45, [0, 3]))
    do(index, 2, ("end_prompt",))
    pairs = [(index, separate(spec, index))]
    for number in range(3, 30):
        at = rng.randrange(len(pairs))
        index, truth = pairs[at]
        deed = rng.choice(["append"] * 3 + ["fork"] * 2 + ["truncate", "reorder", "back", "drop"])
        if deed == "fork" and len(pairs) < 4:
            pairs.append((copy.deepcopy(index), separate(spec, truth)))
        elif deed == "drop" and len(pairs) > 1:
            del pairs[at]
        elif deed == "back":
            before = index.checkpoint()
            do(index, 1000 + number, ("append", 3, None))
            index.rollback(before)
        else:
            arguments = {
                "append": (rng.choice([1, 17]), None),
                "truncate": (rng.randrange(1, 30),),
                "reorder": (rng.choice([[1, 0], [0, 0]]),),
            }
            if deed in arguments:
                for one in (index, truth):
                    do(one, number, (deed, *arguments[deed]))
        for index, truth in pairs:
            assert_equal(*(do(one, number, ("search",)) for one in (index, truth)))
    for index, truth in pairs:
        assert_same_state(index, truth)


NOT_SHARED = {name for name in kvindex.names() if name.startswith("faiss")}
"""Indexes that contain objects of a library, which are copied."""


@pytest.mark.parametrize("spec", [*kvindex.names(), "pariskv:preset=paper", "exact+reuse"])
def test_a_copy_copies_no_row_and_no_code(spec):
    """No operation of a copy creates as much as one row per token."""
    index = made(spec)
    do(index, 1, ("append", 2000, None))
    with Operations() as operations:
        copy.deepcopy(index)
    assert spec in NOT_SHARED or operations.names == []


def test_rows_of_a_fork_are_where_they_were():
    index = made("pariskv")
    do(index, 1, ("append", 600, None))
    forks = [copy.deepcopy(index) for _ in range(3)]
    stores = [one._store.contiguous_rows().data_ptr() for one in (index, *forks)]
    codes = [one._codes["signs"].data_ptr() for one in (index, *forks)]
    assert len({*stores}) == len({*codes}) == 1


def test_forks_of_a_layer_go_on_by_themselves():
    sizes = {**SIZES, "k": 7}
    case, length = CASE, 70
    text, other = Sequence.of(case, length, [3, 0]), Sequence.of(case, length, [3, 0], seed=5)
    texts = [text, text.then(40, other), text.then(40, other)]
    layer = AttentionLayer(made("pariskv"), **sizes)
    for start, stop in [(0, 30), *((i, i + 1) for i in range(30, 40))]:
        text.feed(layer, start, stop)
    alone = []
    for sequence in texts:
        one = AttentionLayer(made("pariskv"), **sizes)
        one.load_state_dict(layer.state_dict())
        alone.append([sequence.feed(one, i, i + 1) for i in range(40, length)])
    forks = [copy.deepcopy(layer) for _ in texts]
    for place, token in enumerate(range(40, length)):  # in turns
        for fork, sequence, outputs in zip(forks, texts, alone, strict=True):
            assert torch.equal(sequence.feed(fork, token, token + 1), outputs[place])
    assert len(layer) == 40
