"""Follow docs/adding-an-index.md: write its files, run its commands and its Python code."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import kvindex
import kvindex_adapters.hf as kvhf
from kvindex.testing import check_index, run
from kvindex.testing.__main__ import main
from tests.adapters.tiny import build

ROOT = Path(__file__).parents[1]
PAGE = (ROOT / "docs/adding-an-index.md").read_text()
BLOCKS = re.findall(r"^([^\n]*)\n\n```(\w+)\n(.*?)^```$", PAGE, flags=re.M | re.S)
"""The line before a block, its language, its code."""

METADATA = "from setuptools import build_meta as b; b.prepare_metadata_for_build_editable('.')"
COMMAND = "from kvindex_adapters.cli import main; main()"


def plain(text):
    """Remove what differs from run to run: seconds, widths of columns."""
    return re.sub(r"\d+\.\d s", "0.0 s", re.sub(r"[ \t]+", " ", text))


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """The author's folder, with the metadata that `pip install -e .` would write for it."""
    folder = tmp_path_factory.mktemp("sign-dot")
    for before, _, code in BLOCKS:
        if named := re.search(r"`([\w.]+)`:$", before):
            (folder / named[1]).write_text(code)
    assert {path.name for path in folder.iterdir()} == {"pyproject.toml", "sign_dot.py"}
    ran(folder, [sys.executable, "-c", METADATA])
    return folder


@pytest.fixture
def installed(folder, monkeypatch):
    monkeypatch.syspath_prepend(str(folder))
    yield folder
    sys.modules.pop("sign_dot", None)


def ran(folder, command):
    path = os.pathsep.join([str(folder), str(ROOT), str(ROOT / "adapters")])
    env = {**os.environ, "PYTHONPATH": path, "COLUMNS": "200"}
    done = subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def commands():
    """Return each command of the page, and its output as shown there."""
    for _, language, code in BLOCKS:
        if language == "console":
            for part in code.split("$ ")[1:]:
                command, _, output = part.partition("\n")
                yield command, output


def follow(command, folder, capsys):
    """Return what a command of the page prints."""
    if command == "pip install -e .":
        return ""  # installed by `folder`
    if command == "kvindex indexes":
        return ran(folder, [sys.executable, "-c", COMMAND, "indexes"])
    assert command.startswith("python -m kvindex.testing "), command
    assert main(command.split()[3:]) == 0
    return capsys.readouterr().out


def hold(installed, capsys):
    shown = []
    for command, output in commands():
        got = [plain(line).strip() for line in follow(command, installed, capsys).splitlines()]
        for line in filter(None, plain(output).splitlines()):
            assert line.strip() in got, command
            shown.append(line)
    assert len(shown) == 4


@pytest.mark.slow
def test_the_commands_print_what_the_page_shows(installed, capsys, monkeypatch):
    monkeypatch.setattr(run, "CASES", run.CASES[-1:])
    hold(installed, capsys)


@pytest.mark.slow
def test_the_commands_print_it_in_every_case(installed, capsys):
    hold(installed, capsys)


def test_the_python_runs_in_order(installed, capsys, monkeypatch):
    monkeypatch.setattr(run, "CASES", run.CASES[:1])
    monkeypatch.setattr(kvhf, "load_model", lambda name: (build("llama"), None), raising=False)
    torch.manual_seed(0)
    names, count = {"__name__": "page"}, 0
    monkeypatch.setitem(sys.modules, "page", type(sys)("page"))  # dataclasses look modules up here
    for before, language, code in BLOCKS:
        if language == "python" and not before.endswith("`:"):
            exec(compile(code, f"{PAGE[:20]!r}…", "exec"), names)
            count += 1
            said = capsys.readouterr().out
            assert (" searching steps read " in said) == ("attach" in code)
            for expected in re.findall(r"^ *print\(.*\)  # (.*)$", code, flags=re.M):
                assert expected in said
    assert count == 5
    assert_constants_need_not_be_saved(names["rotated"], names["Rotated"])
    assert names["index"].config.factor == 2
    assert "sign-dot" in kvindex.names()


def assert_constants_need_not_be_saved(index, kind):
    torch.manual_seed(1)
    index.append(torch.randn(1, 2, 40, 64), torch.randn(1, 2, 40, 64))
    assert not any("rotation" in name for name in index.state_dict())
    again = kind(**index.geometry.options(), **vars(index.config))
    again.load_state_dict(index.state_dict())
    queries = torch.randn(1, 4, 64)
    assert torch.equal(again.search(queries, k=5).ids, index.search(queries, k=5).ids)
    check_index(kind, seed=7)


def test_every_block_is_run():
    languages = [language for _, language, _ in BLOCKS]
    assert sorted(set(languages)) == ["console", "python", "toml"]
    assert len(BLOCKS) == PAGE.count("\n```") / 2
