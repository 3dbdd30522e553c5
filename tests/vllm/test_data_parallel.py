"""A server with two engines (data parallelism): each searches on its own, and counts its steps."""

import json
import re
from concurrent.futures import ThreadPoolExecutor

import pytest

from tests.vllm.conftest import EVERY
from tests.vllm.test_page import MODULE, ask, environment, folder, served

pytest.importorskip("vllm")

__all__ = ["environment", "folder"]  # fixtures

ASKED = EVERY | {"index": "pariskv:preset=fast"}

OPTIONS = (
    "--dtype float32 --enforce-eager --max-model-len 2048 --attention-backend KVINDEX "
    f"--additional-config '{json.dumps({'kvindex': ASKED})}'"
)

TEXTS = [chr(97 + number) * 500 for number in range(6)]


def test_two_engines(folder, environment, tmp_path):
    given = {"model": folder, "max_tokens": 4, "temperature": 0, "ignore_eos": True}

    def answer(text):
        found = json.loads(ask("/v1/completions", given | {"prompt": text}))
        return found["choices"][0]["text"]

    command, answers, steps = f"{MODULE} {folder} {OPTIONS}", [], []
    for number in (2, 1):
        log = tmp_path / f"log{number}"
        with served(f"{command} --data-parallel-size {number}", environment, folder, log):
            with ThreadPoolExecutor(len(TEXTS)) as pool:
                answers.append(list(pool.map(answer, TEXTS)))
            pattern = r'^vllm:kvindex_searched_steps_total\{.*engine="(\d)".*\} (.+)$'
            steps.append(dict(re.findall(pattern, ask("/metrics"), re.MULTILINE)))
    assert answers[0] == answers[1]
    assert steps[0].keys() == {"0", "1"}
    counted = [sum(map(float, one.values())) for one in steps]
    assert counted == [len(TEXTS) * 3] * 2  # the first token comes from the prompt
    assert all(float(value) for value in steps[0].values())
