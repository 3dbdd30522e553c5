"""Every index that the folder holds, against every invariant."""

import pytest
import torch

import kvindex
from tests.contract import CHECKS
from tests.contract.common import K, N, filled, searched
from tests.support.helpers import Case

CASES = [
    Case(q_heads=2, kv_heads=2, head_dim=8, value_dim=8),
    Case(q_heads=3, kv_heads=1, head_dim=64, value_dim=24, batch=3),
    Case(q_heads=8, kv_heads=2, head_dim=80, value_dim=80, dtype=torch.float16, batch=2),
    Case(q_heads=3, kv_heads=3, head_dim=96, value_dim=128, dtype=torch.bfloat16, batch=2),
    Case(q_heads=6, kv_heads=2, head_dim=16, value_dim=8, softcap=1.0, batch=2),
]
SPECS = [
    spec
    for name in kvindex.names()
    for spec in [name, *(f"{name}:preset={preset}" for preset in kvindex.get(name).presets)]
    if not spec.endswith(f"={kvindex.get(name).default_preset}")  # what the name alone gives
]
ON_GPU = Case(6, 2, 64, 64, torch.bfloat16, device="cuda", batch=2)


def cases_of(check, name):
    """Two of the cases: each index meets all of them, and so does each check."""
    first = CHECKS.index(check) + SPECS.index(name)
    return [CASES[(first + later) % len(CASES)] for later in (0, 2)]


@pytest.mark.parametrize(
    ("check", "name", "case"),
    [(check, name, case) for check in CHECKS for name in SPECS for case in cases_of(check, name)],
    ids=lambda part: getattr(part, "__name__", str(part)),
)
def test_index_keeps_the_contract(check, name, case):
    check(lambda **options: case.index(name, **options), case)


@pytest.mark.slow
@pytest.mark.parametrize("name", SPECS)
@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
def test_index_keeps_the_contract_in_every_shape(check, name):
    for case in CASES:
        check(lambda case=case, **options: case.index(name, **options), case)


@pytest.mark.gpu
@pytest.mark.parametrize("name", SPECS)
@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
def test_index_keeps_the_contract_on_a_gpu(check, name):
    check(lambda **options: ON_GPU.index(name, **options), ON_GPU)


@pytest.mark.parametrize("name", kvindex.names())
def test_index_is_a_kvindex(name):
    assert isinstance(Case().index(name), kvindex.KVIndex)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_exact_with_k_of_all_tokens_returns_them_all(case):
    index = filled(lambda: case.index("exact"), case.tokens(N))
    hits = searched(index, case, k=N + K)
    ids = hits.ids[..., :N].sort(dim=-1).values
    assert (ids == torch.arange(N)).all()
    assert (hits.ids[..., N:] == -1).all()
