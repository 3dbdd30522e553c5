"""Every published setting of the suite `field` is an index that can be created."""

import pytest
import torch

import kvindex
from kvindex_adapters.evaluate.compare.suite import BUDGETS, LINES, PUBLISHED, FieldPlan, names

ROPE = 10 ** -(torch.arange(32) / 32)


def test_every_index_has_three_budgets():
    plan = FieldPlan(methods=tuple(names()), names=("a",), tokens=(16384,))
    found = {}
    for (_, k), about in plan._at(16384).items():
        for budget in about["budgets"]:
            found.setdefault(about["method"], {})[budget] = k
    assert found.keys() == set(kvindex.names())
    for name, budgets in found.items():
        assert {str(k): k for k in BUDGETS}.items() <= budgets.items()
        assert ("published" in budgets) == (name in PUBLISHED)
    assert found["pqcache"]["published"] == 820  # 5% of 16,384
    assert found["streaming"]["published"] == 2004


def test_budgets_are_filled_in():
    plan = FieldPlan(methods=("ctkvr", "h2o"), names=("a",), tokens=(4096,))
    assert plan.pairs(4096) == [
        ("ctkvr:rho=320", 128),
        ("ctkvr:rho=1280", 512),
        ("ctkvr:rho=5120", 2048),
        ("h2o:budget=128", 128),
        ("h2o:budget=512", 512),
        ("h2o:budget=2048", 2048),
    ]
    assert plan.indexes[0] == "ctkvr:rho=320"


@pytest.mark.parametrize("name", sorted({*PUBLISHED, *LINES}))
def test_an_index_with_these_options_exists(name):
    plan = FieldPlan(methods=(name,), names=("a",), tokens=(4096,))
    for index in plan.indexes:
        kvindex.create(index, q_heads=4, kv_heads=2, head_dim=64, rope=ROPE)
    if name in PUBLISHED:
        assert PUBLISHED[name].source


def test_a_repeated_method_or_text_is_an_error():
    with pytest.raises(ValueError, match=r"index: got .* without repeated values"):
        FieldPlan(methods=("exact", "exact"), names=("a",), tokens=(4096,))
    with pytest.raises(ValueError, match="text: got the same text twice"):
        FieldPlan(methods=("exact",), names=("a", "a"), tokens=(4096,))
    with pytest.raises(ValueError, match="tokens: got no value"):
        FieldPlan(methods=("exact",), names=("a",), tokens=())
