"""Engines of several worker processes give the tokens of one process."""

import json
import os
import subprocess
import sys
from types import SimpleNamespace

import pytest

from tests.vllm.conftest import EVERY, prompt, settings, tokens
from tests.vllm.processes import ENVIRONMENT, printed_tokens, run

pytest.importorskip("vllm")

PROMPTS = [prompt(length, seed) for seed, length in enumerate((700, 300, 20, 1000))]

FEW = EVERY | {"k": 8}

CASES = {
    "one KV head for each of two processes": ("Llama", {}, FEW),
    "two KV heads for each, and normalized keys": ("Qwen3", dict(num_key_value_heads=4), FEW),
    # with few rows, each process would select rows for its own half of the query heads
    "the same KV head for both": ("Llama", dict(num_key_value_heads=1), EVERY),
}


@pytest.mark.parametrize("name", CASES)
def test_two_processes_with_half_of_the_query_heads_each(engine, saved, tmp_path, name):
    family, sizes, asked = CASES[name]
    folder = saved(family, **sizes)
    done = run(tmp_path, settings(folder, asked, tensor_parallel_size=2), PROMPTS)
    assert done.returncode == 0, done.stderr
    found = printed_tokens(done)
    assert found == tokens(engine(folder, asked), PROMPTS)
    assert (found == tokens(engine(folder), PROMPTS)) == (asked is EVERY)
    # the layers are logged once, although both processes have the layers
    assert (done.stdout + done.stderr).count("2 of 2 attention layers search") == 1


def test_two_processes_with_half_of_the_layers_each(engine, saved, tmp_path):
    """On a CPU, vLLM needs the warm-up of a compiled model for this (enforce_eager=False)."""
    folder = saved("Llama", num_hidden_layers=3)
    done = run(
        tmp_path, settings(folder, FEW, pipeline_parallel_size=2, enforce_eager=False), PROMPTS
    )
    assert done.returncode == 0, done.stderr
    assert printed_tokens(done) == tokens(engine(folder, FEW), PROMPTS)
    text = done.stdout + done.stderr
    for layers in ("2 of 2 attention layers search: model.layers.0.", "1 of 1 attention layers"):
        assert text.count(layers) == 1


def test_two_hosts(engine, model, environment, tmp_path):
    """The second host is a command of its own, which shares no temporary files with the first."""
    hosts = dict(tensor_parallel_size=2, nnodes=2, master_addr="127.0.0.1", master_port=29531)
    asked = settings(model, FEW, **hosts, distributed_executor_backend="mp")
    words = [sys.executable, "-m", "vllm.entrypoints.cli.main", "serve", model, "--headless"]
    for name, value in (asked | {"node_rank": 1}).items():
        if name != "model":
            given = json.dumps(value) if isinstance(value, dict) else str(value)
            words += [f"--{name.replace('_', '-')}"] + [given] * (value is not True)
    (tmp_path / "second").mkdir()
    env = os.environ | ENVIRONMENT | environment | {"TMPDIR": str(tmp_path / "second")}
    with (tmp_path / "log").open("w") as log:
        second = subprocess.Popen(words, env=env, stdout=log, stderr=log)
        try:
            done = run(tmp_path, asked | {"node_rank": 0}, PROMPTS)
        finally:
            second.terminate()
            second.wait(120)
    assert done.returncode == 0, done.stderr
    assert printed_tokens(done) == tokens(engine(model, FEW), PROMPTS)


def test_layers_of_codes_have_different_names_in_all_stages():
    from kvindex_adapters.vllm.engine import CodesLayer, first_layer

    def stage(rank):
        context = {}
        parallel = SimpleNamespace(pipeline_parallel_size=2, rank=rank)
        model = SimpleNamespace(
            get_layers_start_end_indices=lambda given: [(0, 2), (2, 3)][given.rank]
        )
        config = SimpleNamespace(
            parallel_config=parallel,
            model_config=model,
            compilation_config=SimpleNamespace(static_forward_context=context),
        )
        assert first_layer(config) == 2 * rank
        for _ in range(2 - rank):
            CodesLayer(config, 1, 300)
        return list(context)

    assert stage(0) + stage(1) == [f"kvindex.codes.{number}" for number in range(3)]
