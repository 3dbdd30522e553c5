"""With rows on the host, vLLM's engine on a GPU gives its own tokens and those of device rows."""

import pytest

pytest.importorskip("vllm")
pytestmark = pytest.mark.gpu

HOST = {"rows": "host", "cached_rows": 2048}

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


@pytest.mark.parametrize("index", ["pariskv:preset=fast", "pariskv:sign_decoder=mean"])
def test_few_rows_are_those_of_rows_on_the_device(made, known, index):
    few = known.EVERY | {"index": index, "k": 64}
    host, device = made(few | HOST), made(few)
    for ids in known.PROMPTS:
        assert known.written(host, [ids]) == known.written(device, [ids])
