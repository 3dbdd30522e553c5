"""Launches of few groups: what is divided how, and that 8 groups and more have what they had."""

import pytest

from kvindex_cuda.pariskv import few_groups

MANY = [
    (groups, multiprocessors) for groups in (8, 9, 64, 1000) for multiprocessors in (1, 108, 132)
]


@pytest.mark.parametrize(("groups", "multiprocessors"), MANY)
@pytest.mark.parametrize("resident", [1, 2])
def test_many_groups_are_reranked_by_two_blocks_a_multiprocessor(groups, multiprocessors, resident):
    splits = few_groups.rerank_splits(groups, multiprocessors, resident=resident)
    assert splits == max(1, 2 * multiprocessors // groups)


@pytest.mark.parametrize("groups", range(1, 8))
@pytest.mark.parametrize("resident", [1, 2])
def test_few_groups_are_reranked_in_one_wave(groups, resident):
    splits = few_groups.rerank_splits(groups, 132, resident=resident)
    assert splits * groups <= 132 * resident
    assert splits <= 66
    assert few_groups.rerank_splits(groups, 1, resident=resident) == 1
