"""ParisKV on compiled kernels fulfills every requirement of the protocol."""

import pytest

from kvindex.testing import contract
from kvindex.testing.cases import CASES
from tests.support.helpers import mostly_slow

CHECKS = [check for check in contract.CHECKS if check.__module__.rpartition(".")[2] != "devices"]
"""All checks except those on another device, which this backend does not support."""

RUNS = [(check, CASES[(i + more) % 5]) for i, check in enumerate(CHECKS) for more in (0, 2)]
LINES = ["pariskv", "pariskv:preset=paper", "pariskv:preset=sampled"]


@pytest.mark.parametrize(
    ("check", "case"),
    mostly_slow(RUNS, *RUNS[::2]),
    ids=lambda part: getattr(part, "__name__", str(part)),
)
@pytest.mark.parametrize("line", mostly_slow(LINES, *LINES[:2]))
def test_pariskv_keeps_the_contract_on_kernels(check, case, line):
    check(lambda **options: case.index(line, **{"backend": "cpu", **options}), case)
