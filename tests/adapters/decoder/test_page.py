"""The page's example runs unchanged."""

import re
from pathlib import Path

from torch import Tensor

from kvindex_adapters.decoder import Decoder
from tests.adapters.decoder.families import model_of
from tests.adapters.tiny import VOCABULARY

PAGE = (Path(__file__).parents[3] / "docs/adapters/decoder.md").read_text()


class Letters:
    """A tokenizer with one token per letter."""

    def __call__(self, text, **options):
        return {"input_ids": [ord(letter) % VOCABULARY for letter in text]}

    def apply_chat_template(self, messages, **options):
        return "".join(message["content"] for message in messages)[-400:]

    def decode(self, ids, **options):
        ids = ids.tolist() if isinstance(ids, Tensor) else ids
        return "".join(chr(97 + token % 26) for token in ([ids] if isinstance(ids, int) else ids))


def test_the_example_runs(capsys, monkeypatch):
    made = Decoder.of(model_of("llama"), Letters())
    monkeypatch.setattr(Decoder, "from_pretrained", lambda *_, **__: made)
    given = {}
    exec(re.search(r"```python\n(.*?)```", PAGE, re.DOTALL)[1], given)
    printed = capsys.readouterr().out
    assert printed.startswith(given["answer"].text)
    assert str(given["answer"].report) in printed
    assert len(printed.splitlines()[-1]) == 24


def test_the_page_names_every_file():
    folder = Path(__file__).parents[3] / "adapters/kvindex_adapters/decoder"
    files = {path.name for path in folder.glob("*.py")} - {"__init__.py"}
    rows = re.findall(r"^\| (`.*\.py`) \|", PAGE, re.MULTILINE)
    named = {name for row in rows for name in re.findall(r"`(\w+\.py)`", row)}
    assert files - {"layers.py"} == named
    assert "Start with `decoder/layers.py`" in PAGE
