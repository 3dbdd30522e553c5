"""The cache that benchmarks/hit_rate.py plays, against the kernels' own."""

import torch

from benchmarks.hit_rate import found, rates


def test_a_row_is_found_once_it_was_used():
    assert found([[1, 2], [2, 3], [1, 3]], 16) == [0, 1, 2]


def test_a_set_gives_up_its_oldest_row():
    ids = list(range(20_000))
    same = [i for i in ids if (i * 2654435761 & 0xFFFFFFFF) >> 12 & 3 == 0][:6]  # one set of 4
    assert found([[same[0]], [same[1]], same[2:4], [same[0]], [same[4]], [same[1]]], 16) == [
        *(0, 0, 0, 1, 0, 0)
    ]
    assert found([same[:5], same[:5]], 16) == [0, 4]  # all four serve the step


def test_the_second_half_counts():
    ids = torch.tensor([[[1, 2]], [[1, 2]], [[1, 9]], [[1, 2]]])
    assert rates(ids, 64) == 3 / 4
