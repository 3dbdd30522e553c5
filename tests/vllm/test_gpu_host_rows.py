"""Rows on the host in vLLM's engine on a GPU: FlashAttention's tokens, and those of rows on it."""

import pytest

pytest.importorskip("vllm")
pytestmark = pytest.mark.gpu

# whose import skips where there is no vLLM, hence one that is not at the top (E402)
from tests.vllm.conftest import prompt  # noqa: E402
from tests.vllm.test_gpu_engine import (  # noqa: E402
    EVERY,
    LENGTHS,
    agree,
    exact,
    made,
    wide,
)

__all__ = ["exact", "made", "wide"]  # fixtures

HOST = {"rows": "host", "cached_rows": 2048}


@pytest.mark.parametrize("graphs", [False, True])
def test_as_many_rows_as_there_are_give_the_engines_own_tokens(made, exact, graphs):
    mine = made(EVERY | HOST, graphs)
    prompts = [prompt(length, seed) for seed, length in enumerate(LENGTHS)]
    for ids in prompts:
        assert agree(mine, exact, [ids]) > 0.2
    assert agree(mine, exact, prompts) > 0.5  # in a batch, preempted, and its prefixes found again
    start = prompt(600, seed=10)
    for length in (5, 150, 400):
        assert agree(mine, exact, [start + prompt(length, seed=11 + length)]) > 0.2


@pytest.mark.parametrize("index", ["pariskv:preset=fast", "pariskv:signs=alone"])
def test_few_rows_are_those_of_rows_on_the_device(made, index):
    few = EVERY | {"index": index, "k": 30}
    host, device = made(few | HOST, True), made(few, True)
    for seed, length in enumerate(LENGTHS):
        assert agree(host, device, [prompt(length, seed)]) > 0.5
