"""ParisKV on compiled kernels fulfills every requirement of the protocol."""

import pytest

from kvindex.testing import contract
from kvindex.testing.cases import CASES

CHECKS = [check for check in contract.CHECKS if check.__module__.rpartition(".")[2] != "devices"]
"""All checks except those on another device, which this backend does not support."""

RUNS = [(check, CASES[(i + more) % 5]) for i, check in enumerate(CHECKS) for more in (0, 2)]


@pytest.mark.parametrize(
    ("check", "case"), RUNS, ids=lambda part: getattr(part, "__name__", str(part))
)
@pytest.mark.parametrize("line", ["pariskv", "pariskv:preset=paper", "pariskv:preset=sampled"])
def test_pariskv_keeps_the_contract_on_kernels(check, case, line):
    check(lambda **options: case.index(line, **{"backend": "cpu", **options}), case)
