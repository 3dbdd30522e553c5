"""A server with search and one without give the same answers to an OpenAI client.

All rows are retrieved, and the model runs in float32, so that rounding does not decide a token.
"""

import json
from concurrent.futures import ThreadPoolExecutor

import pytest

from tests.vllm.conftest import EVERY
from tests.vllm.test_page import MODULE, PORT, environment, folder, served

openai = pytest.importorskip("openai")
pytest.importorskip("vllm")

__all__ = ["environment", "folder"]  # fixtures

FORM = {"backend": "xgrammar", "disable_any_whitespace": True}

OPTIONS = (
    "--dtype float32 --enforce-eager --max-model-len 4096 --max-num-batched-tokens 512 "
    f"--structured-outputs-config '{json.dumps(FORM)}'"
)

ASKED = EVERY | {"index": "pariskv:preset=fast"}

SEARCH = f"--attention-backend KVINDEX --additional-config '{json.dumps({'kvindex': ASKED})}'"

TEXTS = [
    "".join(chr(97 + (i * i + seed) % 26) for i in range(count))
    for seed, count in enumerate((600, 530, 30))
]

SCHEMA = {
    "type": "object",
    "properties": {"number": {"type": "integer", "minimum": 0, "maximum": 9}},
    "required": ["number"],
    "additionalProperties": False,
}

COUNT = 6

GREEDY = dict(temperature=0, max_tokens=COUNT)


class Client:
    """Asks a server for the model that it serves."""

    def __init__(self, port):
        own = openai.OpenAI(
            base_url=f"http://127.0.0.1:{port}/v1", api_key="none", timeout=600, max_retries=0
        )
        self.models, self._own = own.models, own
        self.model = own.models.list().data[0].id

    def complete(self, text, **options):
        more = {"ignore_eos": True} | options.pop("extra_body", {})
        given = dict(model=self.model, prompt=text, extra_body=more) | GREEDY | options
        return self._own.completions.create(**given)

    def chat(self, text, **options):
        more = {"ignore_eos": True} | options.pop("extra_body", {})
        messages = [{"role": "user", "content": text}]
        given = dict(model=self.model, messages=messages, extra_body=more) | GREEDY | options
        return self._own.chat.completions.create(**given)


def answers(client):
    """Return what a client receives for requests of many kinds."""
    found = {}
    several = client.complete(TEXTS)
    found["completions"] = [one.text for one in several.choices]
    found["usage"] = several.usage.completion_tokens
    found["chat"] = client.chat(TEXTS[0]).choices[0].message.content
    parts = client.complete(TEXTS[1], stream=True)
    found["streamed"] = [part.choices[0].text for part in parts]
    parts = client.chat(TEXTS[1], stream=True)
    found["streamed chat"] = "".join(part.choices[0].delta.content or "" for part in parts)
    own = client.complete(TEXTS[0], logprobs=2).choices[0].logprobs
    found["logprobs"] = [own.tokens, [round(number, 3) for number in own.token_logprobs]]
    both = client.chat(TEXTS[2], n=2, temperature=1, seed=5, logprobs=True)
    found["n"] = [one.message.content for one in both.choices]
    text = found["completions"][0]
    stopped = client.complete(TEXTS[0], stop=text[3]).choices[0]
    found["stop"] = stopped.text, stopped.finish_reason
    form = {"type": "json_schema", "json_schema": {"name": "number", "schema": SCHEMA}}
    more = {"ignore_eos": False}
    given = dict(response_format=form, max_tokens=40, extra_body=more)
    found["json"] = client.chat(TEXTS[0], **given).choices[0].message.content
    return found


def at_once(client):
    """Return the answers to requests that run at the same time."""
    with ThreadPoolExecutor(6) as pool:
        asked = pool.map(client.complete, [text for text in TEXTS for _ in range(2)])
        return [answer.choices[0].text for answer in asked]


def ends_early(client):
    """Close the connection of a long answer. The server frees its blocks and continues."""
    parts = client.complete(TEXTS[0], stream=True, max_tokens=2000)
    for _ in range(3):
        next(parts)
    parts.close()


def test_all_kinds_of_requests(folder, environment, tmp_path):
    found = []
    for number, more in enumerate((SEARCH, "")):
        command = f"{MODULE} {folder} {OPTIONS} {more}"
        with served(command, environment, folder, tmp_path / f"log{number}"):
            client = Client(PORT)
            found.append(answers(client))
            if number == 0:
                ends_early(client)
                found.append(at_once(client))
    at_the_same_time = found.pop(1)
    assert at_the_same_time == [text for text in found[0]["completions"] for _ in range(2)]
    assert found[0] == found[1]
    mine = found[0]
    assert mine["usage"] == 3 * COUNT
    assert "".join(mine["streamed"]) == mine["completions"][1]
    assert len(mine["streamed"]) > 1
    assert mine["streamed chat"] == mine["completions"][1]  # the template adds nothing
    assert len(set(mine["n"])) == 2
    assert mine["stop"] == (mine["completions"][0].partition(mine["completions"][0][3])[0], "stop")
    assert 0 <= json.loads(mine["json"])["number"] <= 9
