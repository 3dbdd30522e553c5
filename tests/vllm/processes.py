"""Run a script in a process of its own, with an engine whose core and workers are processes."""

import json
import os
import subprocess
import sys

ENVIRONMENT = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "1",
    "VLLM_LOGGING_LEVEL": "INFO",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",  # otherwise each worker needs a NUMA node of its own
}

START = """
import json, sys
from vllm import LLM, SamplingParams

if __name__ == "__main__":
    engine, prompts = json.loads(sys.argv[1])
    llm = LLM(**engine)
    if prompts:
        given = [{"prompt_token_ids": ids} for ids in prompts]
        params = SamplingParams(temperature=0, max_tokens=16, ignore_eos=True, detokenize=False)
        found = llm.generate(given, params, use_tqdm=False)
        print("TOKENS", json.dumps([list(one.outputs[0].token_ids) for one in found]))
"""
"""Start an engine with options, and print the answers to prompts."""


def run(folder, engine, prompts=(), script=START, env=()):
    """Run a script from a file in `folder`. Return the finished process, with its output."""
    path = folder / "script.py"
    path.write_text(script)
    command = [sys.executable, str(path), json.dumps([engine, list(prompts)])]
    env = os.environ | ENVIRONMENT | dict(env)
    return subprocess.run(command, env=env, capture_output=True, text=True, timeout=400)


def printed_tokens(done):
    """Return the tokens of each answer that `START` printed."""
    (line,) = (line for line in done.stdout.splitlines() if line.startswith("TOKENS "))
    return [[answer] for answer in json.loads(line.removeprefix("TOKENS "))]
