"""The regression of coordinates on signs: its fit, and how votes improve with it."""

import pytest
import torch

from kvindex.ops import codes, transform
from kvindex.pariskv import sign_regression

D = 64


def encoded(keys):
    """Return the rotated directions of keys, their codes, and the levels."""
    levels = codes.levels(D, 3)
    directions, norms = transform.normalize(keys)
    rotated = transform.rotate(directions, transform.rotation(D, 0, "cpu"))
    return rotated, codes.encode(rotated, norms, levels, block=D), levels


def fitted(own, levels, real=None):
    """Fit the matrix to codes; `real` flags those that count, by default all."""
    signs, level = own["signs"], codes.lloyd_max(D, 0)[0]
    real = torch.ones(signs.shape[:3], dtype=torch.bool) if real is None else real
    return sign_regression.fit(signs, own["magnitudes"], real, levels, level)


def keys_of(rank, count=4096, seed=0):
    """Make keys in a subspace of `rank` dimensions, `[1, 2, count, D]`."""
    generator = torch.Generator().manual_seed(seed)
    low = torch.randn(1, 2, count, rank, generator=generator)
    return low @ torch.randn(rank, D, generator=generator) / rank**0.5


def test_keys_of_all_directions_give_the_identity():
    keys = torch.randn(1, 2, 4096, D, generator=torch.Generator().manual_seed(1))
    _, own, levels = encoded(keys)
    error = fitted(own, levels).float() - torch.eye(D)
    assert error.abs().max() < 0.08  # four standard errors of a coefficient
    assert error.square().mean().sqrt() < 0.02


@pytest.mark.parametrize(("rank", "ratio"), [(4, 0.5), (16, 0.75)])
def test_of_keys_near_few_directions_votes_know_more(rank, ratio):
    _, own, levels = encoded(keys_of(rank))
    matrix = fitted(own, levels)
    others, theirs, _ = encoded(
        keys_of(rank, seed=0)[:, :, ::2] * -1
    )  # keys that the fit did not use
    signs = codes.unpack(theirs["signs"]).flatten(-2).float() * 2 - 1
    queries = torch.randn(1, 2, 8, D, generator=torch.Generator().manual_seed(2))
    exact, level = queries @ others.mT, codes.lloyd_max(D, 0)[0]

    def error(asked):
        left = asked @ signs.mT * level - exact
        return left.square().mean().sqrt()

    assert error(sign_regression.voting(queries, matrix)) < ratio * error(queries)


def test_keys_that_do_not_count_change_nothing():
    _, own, levels = encoded(keys_of(8))
    real = torch.arange(4096).expand(1, 2, -1) % 3 > 0
    some = {name: part[:, :, real[0, 0]] for name, part in own.items()}
    assert torch.equal(fitted(own, levels, real), fitted(some, levels))


def test_few_keys_stay_near_the_prior():
    _, own, levels = encoded(keys_of(4, 8))
    assert (fitted(own, levels).float() - torch.eye(D)).abs().max() < 0.3


def test_at_most_so_many_keys_are_read():
    for power in range(8, 23):
        tokens = 2**power
        assert tokens // sign_regression.stride(tokens) == min(tokens, sign_regression.KEYS)
