"""`kvindex chat`, as a user types into it."""

import re

import pytest
from typer.testing import CliRunner

from kvindex_adapters.cli import app
from tests.adapters.cli.test_cli import REGIONS, words
from tests.adapters.hf.test_chat import Tokenizer
from tests.adapters.tiny import build
from tests.support.helpers import mostly_slow


@pytest.fixture(autouse=True)
def tiny(monkeypatch):
    """Let the command load a small model that never ends, with numbers as words."""
    model = build("llama", eos_token_id=None)
    monkeypatch.setattr(
        "kvindex_adapters.hf.model.load_model.load", lambda *args, **options: (model, Tokenizer())
    )


def typed(*lines, arguments=(), index="exact"):
    given = ("chat", *arguments, "--index", index, "-k", 500, "--max-new-tokens", 6, *REGIONS)
    text = "".join(line + "\n" for line in lines)
    result = CliRunner().invoke(app, list(map(str, given)), input=text)
    assert result.exit_code == 0, result.output
    return result


@pytest.mark.parametrize("engine", mostly_slow(["decoder", "transformers"], "transformers"))
def test_documents_questions_and_commands(tmp_path, engine):
    document, folder = tmp_path / "document.txt", tmp_path / "saved"
    document.write_text(words(60))
    more = (document, "--engine", engine)
    first = typed(words(8), f"/save {folder}", words(5, 1), "/undo", "/stats", arguments=more)
    answer, saved, second, removed, report = first.stdout.splitlines()
    assert "tokens read; each question reads only its own" in first.stderr
    assert saved.startswith("saved ")
    assert removed == "removed 2 messages"
    assert "indexed layers" in report
    assert len(answer.split()) == len(second.split()) == 6
    again = typed("", f"/load {folder}", words(5, 1), "/quit", words(3), arguments=more)
    assert again.stdout.splitlines()[1:] == [second]
    at_once = typed(words(5, 1), arguments=("--load", folder, "--engine", engine))
    assert at_once.stdout.splitlines() == [second]


@pytest.mark.parametrize("engine", ["decoder", "transformers"])
def test_a_chat_with_full_attention(tmp_path, engine):
    document = tmp_path / "document.txt"
    document.write_text(words(60))
    more = dict(arguments=(document, "--engine", engine))
    lines = words(8), "/undo", words(5, 1), "/stats"
    full, indexed = typed(*lines, index="none", **more), typed(*lines, **more)
    assert full.stdout.splitlines()[:3] == indexed.stdout.splitlines()[:3]
    assert "full attention: each step reads all rows" in full.stdout
    again = re.findall(r"read (\d+) tokens", full.stderr)
    assert max(map(int, again)) < 20
    wrong = failed("--prefill", "sparse", index="none")
    assert wrong.startswith("prefill: got 'sparse' with --index none")


def test_mistakes_are_one_line_and_the_chat_goes_on():
    result = typed("/nothing", "/save", "/load /nowhere", "/undo", "/help", words(4))
    errors = [line for line in result.stderr.splitlines() if line.startswith("error: ")]
    assert [error.split()[1] for error in errors] == ["command:", "/save:", "folder:", "messages:"]
    assert len(result.stdout.splitlines()[-1].split()) >= 6  # an id may be two words


@pytest.mark.parametrize(
    ("line", "answer"),
    [
        ("/stat", "got /stat; did you mean /stats? /help lists"),
        ("/exit", "got /exit; did you mean /quit? /help lists"),
        ("/hlep", "got /hlep; did you mean /help? /help lists"),
        ("/123", "got /123; /help lists the commands"),
    ],
)
def test_similar_commands_are_suggested(line, answer):
    assert f"error: command: {answer}" in typed(line).stderr


def test_help_says_how_to_ask_two_questions_from_one_state():
    assert "to ask two follow-up questions from one\n" in typed("/help").stdout


@pytest.mark.parametrize("engine", ["decoder", "transformers"])
def test_a_chat_with_a_draft_model(tmp_path, monkeypatch, engine):
    document, tokenizer = tmp_path / "document.txt", Tokenizer()
    document.write_text(words(60))
    models = {"small": build("llama", eos_token_id=None, num_hidden_layers=2)}
    usual = build("llama", eos_token_id=None)
    monkeypatch.setattr(
        "kvindex_adapters.hf.model.load_model.load",
        lambda name, **options: (models.get(name, usual), tokenizer),
    )
    lines = words(8), words(5, 1), "/undo", words(5, 2)
    arguments = (document, "--engine", engine)
    drafted = (*arguments, "--speculative-tokens", 3, "--draft-model", "small")
    told = typed(*lines, arguments=drafted)
    assert told.stdout == typed(*lines, arguments=arguments).stdout
    assert "loading the draft model" in told.stderr
    assert "draft_model: got a model without specul" in failed("--draft-model", "small")
    assert failed("--draft-model", "./none").startswith("draft_model: got './none', which does")


def failed(*arguments, index="exact"):
    given = ("chat", *arguments, "--index", index, *REGIONS)
    result = CliRunner().invoke(app, list(map(str, given)), input="")
    assert result.exit_code == 1
    return str(result.exception)


def test_a_saved_chat_that_cannot_be_loaded_is_told_with_its_option(tmp_path, monkeypatch):
    typed(words(8), f"/save {tmp_path / 'saved'}")
    error = failed("--load", tmp_path / "saved", index="quest")
    assert "got 'quest', but the folder was saved with 'exact'" in error
    assert "--index exact to the command" in error

    def load(*args, **options):
        raise AssertionError("a model is loaded")

    monkeypatch.setattr("kvindex_adapters.hf.model.load_model.load", load)
    error = failed("--load", tmp_path / "saved", "--system", "Be brief.")
    assert error.startswith("system: got 'Be brief.' together with --load")
    assert failed("--load", "/no/where").startswith(
        "load: got '/no/where', which does not exist; allowed is a folder that"
    )


@pytest.mark.parametrize("engine", mostly_slow(["decoder", "transformers"], "transformers"))
def test_a_chat_that_was_read_sparsely_names_the_option_to_load_it(tmp_path, engine):
    document, folder = tmp_path / "document.txt", tmp_path / "saved"
    document.write_text(words(400))
    sparse, load = ("--prefill", "sparse", "--engine", engine), ("--load", folder)
    typed(words(8), f"/save {folder}", arguments=(document, *sparse))
    remedy = (
        "prefill: got 'dense', but the folder was saved with 'sparse'; pass prefill='sparse' to "
        "attach(), or --prefill sparse to the command"
    )
    assert failed(*load, "--engine", engine).endswith(remedy)
    assert remedy in typed(f"/load {folder}", arguments=("--engine", engine)).stderr
    assert "loaded " in typed(arguments=(*load, *sparse)).stderr


def test_a_saved_chat_is_what_the_user_sees(tmp_path):
    folder, question = tmp_path / "saved", words(5, 2)
    lines = words(8), words(5, 1), "/undo", f"/save {folder}", question, "/undo", "/undo"
    _, _, removed, saved, answer, *undone = typed(*lines).stdout.splitlines()
    assert saved == f"saved 2 messages and their KV cache in {folder}"
    assert [removed, *undone] == ["removed 2 messages"] * 3
    again = typed("/stats", question, arguments=("--load", folder))
    report, other = again.stdout.splitlines()
    first = typed(words(8), "/stats").stdout.splitlines()[1]
    tokens, fewest = (int(line.split()[0]) for line in (report, first))
    assert fewest <= tokens <= fewest + 2  # the template closes the answer
    assert other == answer
