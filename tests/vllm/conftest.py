"""Small models and engines for the plug-in's tests with vLLM, which `make test-vllm` installs."""

import os
import sysconfig
from contextlib import contextmanager

import pytest
import torch

from tests.cuda import emulator

SMALL = dict(
    vocab_size=128,
    hidden_size=128,
    intermediate_size=192,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=32,
    max_position_embeddings=2048,
    initializer_range=0.15,  # large, so that attention is far from uniform
    pad_token_id=0,
    bos_token_id=1,
    eos_token_id=2,
)

# set before vLLM is imported: the engine runs in this process, where tests can inspect it
os.environ |= {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_LOGGING_LEVEL": "ERROR",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "HF_HUB_OFFLINE": "1",
}

EVERY = {"k": 2048, "dense_below": 0, "sink": 4, "local_window": 16}
"""Number of rows to retrieve: all, so that a search gives full attention."""


@pytest.fixture
def environment(tmp_path):
    """Return an environment in which the package vllm-cpu is found as vllm.

    The command `vllm` asks for the version of a package of this name.
    """
    package = tmp_path / "vllm-0.32.0.dist-info"
    package.mkdir()
    (package / "METADATA").write_text("Metadata-Version: 2.1\nName: vllm\nVersion: 0.32.0+cpu\n")
    path = os.pathsep.join([*filter(None, [os.environ.get("PYTHONPATH")]), str(tmp_path)])
    scripts = os.pathsep.join([sysconfig.get_path("scripts"), os.environ["PATH"]])
    return {"PYTHONPATH": path, "PATH": scripts, "VLLM_LOGGING_LEVEL": "INFO"}


@contextmanager
def kernels_on_a_cpu():
    """Put the GPU backend in place of the CPU's, with emulated kernels."""
    from vllm.v1.attention import selector
    from vllm.v1.attention.backends import registry

    own = registry.AttentionBackendEnum.CPU_ATTN
    before = own.get_path()
    registry.register_backend(own, "tests.vllm.on_a_cpu.Backend")
    selector._cached_get_attn_backend.cache_clear()
    try:
        with emulator.emulated():
            yield
    finally:
        registry.register_backend(own, before)
        selector._cached_get_attn_backend.cache_clear()


@pytest.fixture(scope="session")
def saved(tmp_path_factory):
    """Make a folder with a model of random weights, or return that of an earlier call.

    An engine may change classes of transformers, so that no second model can be made with them.
    """
    transformers, folders = pytest.importorskip("transformers"), {}

    def save(family="Llama", model=None, **config):
        if (known := repr((family, model, config))) in folders:
            return folders[known]
        torch.manual_seed(0)
        made = getattr(transformers, f"{family}Config")(**{**SMALL, **config})
        folder = tmp_path_factory.mktemp("model")
        getattr(transformers, model or f"{family}ForCausalLM")(made).save_pretrained(folder)
        folders[known] = str(folder)
        return str(folder)

    return save


def settings(folder, asked=None, **options):
    """Return options of an engine with few blocks, so that sequences are preempted and chunked."""
    settings = dict(
        model=folder,
        skip_tokenizer_init=True,
        dtype="float32",
        enforce_eager=True,
        block_size=256,
        max_model_len=2048,
        max_num_batched_tokens=512,
        max_num_seqs=8,
        num_gpu_blocks_override=12,
    )
    if asked is not None:
        settings["attention_backend"] = "KVINDEX"
        settings["additional_config"] = {"kvindex": asked}
    return settings | options


@pytest.fixture(scope="session")
def engine():
    """Make an engine of vLLM, with or without search.

    All engines stay until the end, because the first one that ends would remove the process groups.
    """
    vllm, made = pytest.importorskip("vllm"), []

    def make(folder, asked=None, **options):
        made.append(vllm.LLM(**settings(folder, asked, **options)))
        return made[-1]

    yield make
    made.clear()


@pytest.fixture(scope="session")
def model(saved):
    return saved()


@pytest.fixture(scope="session")
def stock(engine, model):
    return engine(model)


@pytest.fixture(scope="session")
def searching(engine, model):
    return engine(model, EVERY)


def prompt(length, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(3, SMALL["vocab_size"], (length,), generator=generator).tolist()


def answers(llm, prompts, count=16, **options):
    """Return the results of requests: greedy, unless options say otherwise."""
    from vllm import SamplingParams

    options = dict(temperature=0, max_tokens=count, ignore_eos=True, detokenize=False) | options
    given = [{"prompt_token_ids": ids} for ids in prompts]
    return llm.generate(given, SamplingParams(**options), use_tqdm=False)


def tokens(llm, prompts, count=16, **options):
    """Return the tokens of each request's outputs."""
    outcomes = answers(llm, prompts, count, **options)
    return [[list(output.token_ids) for output in outcome.outputs] for outcome in outcomes]
