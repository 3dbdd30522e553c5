"""Check what the documentation site shows: examples of docstrings run, and listed members exist."""

import functools
import importlib
import inspect
import re
import textwrap
from pathlib import Path

import pytest
import torch
import yaml
from tokenizers import ByteLevelBPETokenizer
from transformers import PreTrainedTokenizerFast

import kvindex
import kvindex_adapters.decoder as kvdecoder
import kvindex_adapters.hf as kvhf
from tests.adapters.tiny import build
from tests.support.helpers import slow

ROOT = Path(__file__).parents[1]
CONFIG = (ROOT / "mkdocs.yml").read_text()
API = "\n".join(path.read_text() for path in sorted((ROOT / "docs/api").glob("*.md")))
EXAMPLE = re.compile(r"^Examples:\n +```python\n(.*?)^ +```$", re.DOTALL | re.MULTILINE)
TEMPLATE = (
    "{% for message in messages %}<{{ message['role'] }}> {{ message['content'] }}\n{% endfor %}"
)

SHOWN = [
    *(kvindex.create, kvindex.BaseIndex, kvindex.AttentionLayer),
    *(kvhf.attach, kvhf.generate, slow(kvhf.Chat), kvdecoder.Decoder, kvdecoder.Chat),
]
"""Functions and classes that have an example."""


@pytest.fixture(scope="module")
def names():
    """The names that examples use: a tiny model, a text for it, and tensors for an index."""
    made = ByteLevelBPETokenizer()
    made.train_from_iterator(["a text"], vocab_size=260, show_progress=False)
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=made._tokenizer, chat_template=TEMPLATE)
    model = build("llama", vocab_size=300, max_position_embeddings=4096, num_hidden_layers=1)
    text = "A long text. " * 10
    return {
        **{"kvindex": kvindex, "kvhf": kvhf, **vars(kvdecoder), **vars(kvindex)},
        **{"model": model, "tokenizer": tokenizer, "text": text},
        "inputs": {"input_ids": tokenizer(text, return_tensors="pt").input_ids},
        "decoder": kvdecoder.Decoder.of(model, tokenizer),
        "keys": torch.randn(1, 8, 300, 128),
        "values": torch.randn(1, 8, 300, 128),
    }


@pytest.mark.parametrize("shown", SHOWN, ids=lambda shown: f"{shown.__module__}.{shown.__name__}")
def test_examples_of_docstrings_run(shown, names, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (code,) = EXAMPLE.findall(inspect.getdoc(shown))
    length = (300,) if shown is kvindex.AttentionLayer else ()
    exec(textwrap.dedent(code), {**names, "queries": torch.randn(1, 32, *length, 128)})


def listed():
    """Return the members that the pages of the API list, as (owner, name)."""
    for owner, members in re.findall(
        r"^::: (\S+)\n(?:    .*\n)*?      members: \[(.*)\]$", API, re.M
    ):
        module, _, name = owner.rpartition(".")
        kind = getattr(importlib.import_module(module), name)
        yield from ((kind, member) for member in members.split(", ") if member)


def test_the_members_that_pages_list_exist():
    found, source_of = list(listed()), functools.cache(inspect.getsource)
    assert {"search", "step", "report", "generate"} <= {member for _, member in found}
    for kind, member in found:
        sources = [source_of(base) for base in kind.__mro__[:-1] if "kvindex" in base.__module__]
        assert hasattr(kind, member) or any(f"self.{member}" in text for text in sources), member


@pytest.mark.parametrize("module", ["kvindex", "kvindex.testing", "kvindex_adapters.decoder"])
def test_packages_list_their_public_names(module):
    package = importlib.import_module(module)
    assert dir(package) == sorted(package.__all__)


def test_search_works_in_pages_that_are_opened_from_disk():
    """Without a script whose name contains "iframe-worker", the plugin `offline` loads one from the
    network."""
    given = yaml.load(CONFIG.partition("\nmarkdown_extensions:")[0], yaml.BaseLoader)
    assert "offline" in given["plugins"]
    (script,) = given["extra"]["polyfills"]
    assert "iframe-worker" in script
    for path in (script, *given["extra_css"], *given["extra_javascript"]):
        assert (ROOT / "docs" / path).is_file()
        assert "http" not in (ROOT / "docs" / path).read_text()
