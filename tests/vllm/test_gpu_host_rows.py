"""With rows on the host, vLLM's engine on a GPU gives its own tokens and those of device rows."""

import pytest
import torch

from kvindex_cuda.memory.page_rows import write_pages
from kvindex_cuda.memory.pages import Pages

pytest.importorskip("vllm")
pytestmark = pytest.mark.gpu

HOST = {"rows": "host", "cached_rows": 2048}

HOPPER = torch.cuda.is_available() and torch.cuda.get_device_capability() == (9, 0)

GRAPHS = dict(mode=0, cudagraph_mode="FULL_DECODE_ONLY", cudagraph_capture_sizes=[1, 2, 4, 8])


@pytest.fixture(scope="module")
def known():
    """A module with a model whose answers do not depend on rounding."""
    from tests.vllm import test_gpu_engine

    return test_gpu_engine


@pytest.fixture(scope="module")
def folder(saved):
    return saved(hidden_size=512, intermediate_size=384, head_dim=128, initializer_range=0.1)


@pytest.fixture(scope="module")
def texts(known, folder):
    return known.teach(folder, [*known.PROMPTS, *known.SHARED, known.ALONE])


@pytest.fixture(scope="module")
def made(engine, folder, texts):
    def make(asked, graphs=True, **options):
        how = dict(enforce_eager=not graphs, dtype="bfloat16", gpu_memory_utilization=0.2)
        if graphs:
            how |= dict(compilation_config=GRAPHS)
        return engine(folder, asked, **how, **options)

    return make


@pytest.mark.parametrize(("graphs", "tokens"), [(False, 256), (True, 256), (True, 512)])
def test_as_many_rows_as_there_are_give_the_engines_own_tokens(made, known, texts, graphs, tokens):
    mine = made(known.EVERY | HOST, graphs, block_size=tokens)
    prompts = [*known.PROMPTS, *known.SHARED]
    for ids, text in zip(prompts, texts, strict=False):
        assert known.written(mine, [ids]) == [text]
    # in a batch with preemption and cached prefixes
    assert known.written(mine, known.PROMPTS) == texts[: len(known.PROMPTS)]
    assert known.written(mine, prompts) == texts[: len(prompts)]


@pytest.mark.parametrize(
    "dtype",
    [
        "auto",
        pytest.param("fp8", marks=pytest.mark.skipif(not HOPPER, reason="FlashAttention needs it")),
    ],
)
@pytest.mark.parametrize("index", ["pariskv:preset=fast", "pariskv:sign_decoder=mean"])
def test_few_rows_are_those_of_rows_on_the_device(made, known, index, dtype):
    few, options = known.EVERY | {"index": index, "k": 64}, dict(kv_cache_dtype=dtype)
    host, device = made(few | HOST, **options), made(few, **options)
    for ids in known.PROMPTS:
        assert known.written(host, [ids]) == known.written(device, [ids])


@pytest.mark.parametrize("error", [0.5, 1e-6])
def test_as_many_rows_as_the_error_asks_for_on_the_host(made, known, texts, error):
    auto = known.AUTO | {"error": error}
    host, device = made(auto | HOST), made(auto)
    for ids, text in zip(known.PROMPTS, texts, strict=False):
        found = known.written(host, [ids])
        assert found == known.written(device, [ids])
        assert error > 0.1 or len(ids) > 1000 or found == [text]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("scale", [1.0, 0.37])
def test_bytes_in_fp8_are_those_of_vllm(dtype, scale):
    """The kernel `write_pages` rounds as vLLM's kernel for pages on the device."""
    from vllm.v1.attention.backends import flash_attn

    pages, tokens, heads, dim = 4, 1024, 1, 64
    numbers = torch.arange(2**16, dtype=torch.int32).to(torch.int16).view(dtype)
    keys = torch.where(numbers.isnan(), 1.0, numbers).view(tokens, heads, dim).cuda()
    values, slots = keys.flip(0).contiguous(), torch.randperm(tokens).cuda()
    scales = tuple(torch.tensor([one], device="cuda") for one in (scale, 2.5))
    shape = pages, tokens // pages, heads, dim
    expected = [torch.zeros(shape, dtype=torch.uint8, device="cuda") for _ in range(2)]
    flash_attn.reshape_and_cache_flash(keys, values, *expected, slots, "fp8", *scales)
    rows = torch.zeros(pages, heads, tokens // pages, 2 * dim, dtype=torch.uint8, device="cuda")
    codes = torch.zeros(pages, heads, 1, 256, dtype=torch.uint8, device="cuda")
    write_pages(Pages([codes], [rows], scales=[scales]), 0, keys, values, slots)
    assert torch.equal(rows, torch.cat(expected, dim=-1).transpose(1, 2))
