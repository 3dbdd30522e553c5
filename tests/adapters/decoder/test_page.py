"""The page's example runs as it stands."""

import re
from pathlib import Path

from tests.adapters.decoder.families import model_of
from tests.adapters.tiny import VOCABULARY

PAGE = (Path(__file__).parents[3] / "docs/adapters/decoder.md").read_text()


class Letters:
    """A tokenizer of letters."""

    def __call__(self, text, **options):
        return {"input_ids": [ord(letter) % VOCABULARY for letter in text]}

    def decode(self, ids, **options):
        return "".join(chr(97 + token % 26) for token in ids.tolist())


def test_the_example_runs(capsys):
    code = re.search(r"```python\n(.*?)```", PAGE, re.DOTALL)[1]
    given = {"model": model_of("llama"), "tokenizer": Letters()}
    exec(code, given)
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == given["answer"].text
    assert "attention was dense" in lines[1]
    assert [len(line) for line in lines[2:]] == [1] * 64
    assert [len(answer.text) for answer in given["answers"]] == [64, 64]


def test_the_page_names_every_file():
    folder = Path(__file__).parents[3] / "adapters/kvindex_adapters/decoder"
    files = {path.name for path in folder.glob("*.py")} - {"__init__.py"}
    assert files == set(re.findall(r"^\| `(\w+\.py)` \|", PAGE, re.MULTILINE))
