"""ParisKV with `sign_decoder="regression"`: the fit depends on tokens, not on how they arrived."""

from copy import deepcopy

import pytest
import torch

from kvindex.pariskv import sign_regression
from tests.support.helpers import Case, left_padding

CASE = Case(q_heads=4, kv_heads=2, head_dim=64, batch=2)
COUNT = 2100  # 8 full blocks


def made(keys, values, **options):
    index = CASE.index("pariskv", sign_decoder="regression", **options)
    index.append(keys, values)
    return index


def test_it_does_not_matter_how_tokens_came():
    keys, values = CASE.tokens(COUNT)
    whole = made(keys, values)
    chunked = CASE.index("pariskv", sign_decoder="regression")
    for start, end in ((0, 1), (1, 900), (900, 1024), (1024, COUNT)):
        chunked.append(keys[:, :, start:end], values[:, :, start:end])
        chunked._regressed()
    assert torch.equal(whole._regressed(), chunked._regressed())
    assert not torch.equal(
        whole._regressed(), made(keys[:, :, :900], values[:, :, :900])._regressed()
    )


def test_nothing_is_fitted_before_somebody_asks(monkeypatch):
    calls, fit = [], sign_regression.fit
    monkeypatch.setattr(sign_regression, "fit", lambda *given: calls.append(1) or fit(*given))
    keys, values = CASE.tokens(COUNT)
    index = CASE.index("pariskv", sign_decoder="regression")
    for start, end in ((0, 300), (300, 700), (700, COUNT)):
        index.append(keys[:, :, start:end], values[:, :, start:end])
    assert not calls
    for _ in range(2):
        index.search(CASE.queries(), k=5)
    assert len(calls) == 1
    index.append(keys[:, :, :100], values[:, :, :100])  # as many fitted blocks
    index.search(CASE.queries(), k=5)
    assert len(calls) == 1


def test_a_copy_that_nobody_asked_keeps_its_own():
    keys, values = CASE.tokens(COUNT)
    index = made(keys, values)
    copied = deepcopy(index)
    index.truncate(100)
    index.append(keys.flip(2)[:, :, 100:], values[:, :, 100:])
    assert torch.equal(copied._regressed(), made(keys, values)._regressed())
    assert not torch.equal(copied._regressed(), index._regressed())


def test_it_follows_truncation_reordering_views_and_copies():
    keys, values = CASE.tokens(COUNT)
    index = made(keys, values)
    want = index._regressed()
    copied = deepcopy(index)
    copied.reorder(torch.tensor([1, 0, 1]))
    assert torch.equal(copied._regressed(), want[[1, 0, 1]])
    index.truncate(1500)
    assert torch.equal(
        index._regressed(), made(keys[:, :, :1024], values[:, :, :1024])._regressed()
    )
    others = keys.flip(2)
    index.append(others[:, :, 1500:], values[:, :, 1500:])
    mixed = torch.cat([keys[:, :, :1500], others[:, :, 1500:]], dim=2)
    assert torch.equal(index._regressed(), made(mixed, values)._regressed())
    assert torch.equal(copied._regressed(), want[[1, 0, 1]])
    one = Case(q_heads=4, kv_heads=2, head_dim=64).index("pariskv", sign_decoder="regression")
    one.append(keys[:1], values[:1])
    assert torch.equal(one.expand_batch(3)._regressed(), want[[0, 0, 0]])


def test_a_state_is_fitted_again():
    keys, values = CASE.tokens(COUNT)
    index, loaded = made(keys, values), CASE.index("pariskv", sign_decoder="regression")
    loaded.load_state_dict(index.state_dict())
    assert torch.equal(index._regressed(), loaded._regressed())


def test_padding_does_not_count():
    keys, values = CASE.tokens(COUNT)
    valid = left_padding([0, 300], COUNT)
    noise = keys.masked_fill(~valid[:, None, :, None], 100.0)
    found = []
    for some in (keys, noise):
        index = CASE.index("pariskv", sign_decoder="regression")
        index.append(some, values, valid=valid)
        found.append(index._regressed())
    assert torch.equal(*found)


@pytest.mark.parametrize(
    ("options", "name"),
    [
        (dict(block="subspace"), "block"),
        (dict(preset="paper"), "coarse"),
        (dict(sampling="none", coarse="none"), "coarse"),
    ],
)
def test_what_votes_cannot_use_is_refused(options, name):
    with pytest.raises(
        ValueError, match=f"{name}: got .* with sign_decoder='regression', allowed is"
    ):
        CASE.index("pariskv", **options | dict(sign_decoder="regression"))
