"""Multi-head latent attention by the GPU backend in vLLM's engine, with kernels emulated on a CPU."""

import pytest

from kvindex_adapters.vllm.unsupported import can_pack
from tests.cuda import emulator
from tests.vllm.conftest import EVERY, answers, prompt, tokens
from tests.vllm.test_latents import LATENTS, layers_of

pytest.importorskip("vllm")
pytestmark = [
    pytest.mark.skipif(not emulator.available(), reason="no g++ to emulate with"),
    pytest.mark.skipif(not can_pack(), reason="vLLM before 0.28 has no latents on a CPU"),
]

PROMPTS = [prompt(length, seed) for seed, length in enumerate((700, 300, 20, 508))]

ASKED = EVERY | {"index": "pariskv:preset=fast", "k": 1024, "dense_below": 350}


@pytest.fixture(scope="module")
def latents(saved):
    return saved("DeepseekV3", **LATENTS)


@pytest.fixture(scope="module")
def stock(engine, latents):
    return engine(latents, attention_backend="CPU_MLA", num_gpu_blocks_override=600)  # of 16 tokens


@pytest.fixture
def emulated(stock, engine, latents):
    """Make engines on a CPU whose decode steps search with the GPU kernels."""
    from tests.vllm.latents_on_a_cpu import kernels_for_latents

    with kernels_for_latents():
        yield lambda asked, **options: engine(latents, asked, **options)


def test_the_engine_decodes_by_the_kernels(emulated, stock):
    """The batch has mixed lengths and blocks that fill."""
    from tests.vllm.latents_on_a_cpu import Attention

    mine, before = emulated(ASKED), Attention.steps
    assert tokens(mine, PROMPTS, 8) == tokens(stock, PROMPTS, 8)
    assert Attention.steps - before >= 3 * 7
    for layer in layers_of(mine).values():
        assert type(layer.impl) is Attention
        assert layer.impl.codes.records.any()
