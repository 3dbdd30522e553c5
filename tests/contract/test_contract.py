"""Every index in the folder is checked for every invariant."""

import pytest
import torch

import kvindex
from kvindex.testing import contract
from kvindex.testing.cases import CASES, Case
from kvindex.testing.contract.common import K, N, filled, searched
from tests.contract import CHECKS

SPECS = [
    spec
    for name in kvindex.names()
    for spec in [
        name,
        *(f"{name}:preset={p}" for p, changed in kvindex.get(name).presets.items() if changed),
    ]
]
ON_GPU = Case(6, 2, 64, 64, torch.bfloat16, device="cuda", batch=2)


def case_of(check, name):
    """Return one of the cases, so that each index meets all cases, and so does each check."""
    return CASES[(CHECKS.index(check) + SPECS.index(name)) % len(CASES)]


@pytest.mark.parametrize(
    ("check", "name", "case"),
    [(check, name, case_of(check, name)) for check in CHECKS for name in SPECS],
    ids=lambda part: getattr(part, "__name__", str(part)),
)
def test_index_keeps_the_contract(check, name, case):
    check(lambda **options: case.index(name, **options), case)


@pytest.mark.slow
@pytest.mark.parametrize("name", SPECS)
@pytest.mark.parametrize("check", contract.CHECKS, ids=lambda check: check.__name__)
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


@pytest.mark.parametrize("name", ["exact", "exact+sample"])
def test_an_index_says_what_it_is_and_holds(name):
    case = Case(batch=2)
    index = case.index(name)
    told = f"q_heads={case.q_heads}, kv_heads={case.kv_heads}, head_dim={case.head_dim}, dtype="
    assert told in repr(index)
    assert "0 sequences of 0 tokens" in repr(index)
    index.append(*case.tokens(7))
    assert "2 sequences of 7 tokens" in repr(index)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_exact_with_k_of_all_tokens_returns_them_all(case):
    index = filled(lambda: case.index("exact"), case.tokens(N))
    hits = searched(index, case, k=N + K)
    ids = hits.ids[..., :N].sort(dim=-1).values
    assert (ids == torch.arange(N)).all()
    assert (hits.ids[..., N:] == -1).all()
