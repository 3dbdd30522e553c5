"""A decoder on two ranks: a decode step is one graph, and gives the tokens of one process."""

import pytest

from tests.adapters.decoder import ranks_cases, ranks_gpu_cases, shares_cases
from tests.cuda import emulator
from tests.support import ranks as processes


def agreed(name, module):
    for rank, said in enumerate(processes.results(module.__name__, 2, False)):
        assert name in said, f"rank {rank} ended before: {next(reversed(said.items()), None)}"
        assert said[name] is None, f"rank {rank}: {said[name]}"


@pytest.mark.skipif(not emulator.available(), reason="no g++ to emulate with")
@pytest.mark.slow
@pytest.mark.parametrize("name", ranks_cases.cases(2, False))
def test_two_ranks_decode_together(name):
    agreed(name, ranks_cases)


@pytest.mark.slow
@pytest.mark.parametrize("name", shares_cases.cases(2, False))
def test_two_ranks_agree(name):
    agreed(name, shares_cases)


@pytest.mark.gpu2
@pytest.mark.parametrize("name", ranks_gpu_cases.cases(2, False))
def test_two_gpus_decode_together(name):
    agreed(name, ranks_gpu_cases)
