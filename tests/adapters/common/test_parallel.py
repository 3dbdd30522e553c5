"""A model in two processes, with heads or tokens distributed, gives the results of one process."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace
from transformers import PreTrainedTokenizerFast
from typer.testing import CliRunner

from kvindex_adapters.cli import app, common
from kvindex_adapters.common.parallel import waiting
from tests.adapters import tiny
from tests.adapters.common import parallel_cases
from tests.support import ranks as processes
from tests.support.helpers import slow_as

COMMAND = ["-m", "kvindex_adapters", "generate"]
TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]


SAMPLE = [
    pytest.param(name, marks=slow_as(elsewhere=True)) for name in parallel_cases.cases(2, False)
]


def agreed(name, every):
    for rank, said in enumerate(processes.results(parallel_cases.__name__, 2, every)):
        assert name in said, f"rank {rank} ended before: {said}"
        assert said[name] is None, f"rank {rank}: {said[name]}"


@pytest.mark.parametrize("name", SAMPLE)
def test_two_ranks_are_as_one_process(name):
    agreed(name, every=False)


@pytest.mark.slow
@pytest.mark.parametrize("name", parallel_cases.cases(2, True))
def test_two_ranks_are_as_one_process_in_every_case(name):
    agreed(name, every=True)


def test_one_process_waits_for_nobody():
    assert waiting([]) == {}


@pytest.fixture
def folder(tmp_path):
    """A folder with a tiny model and its tokenizer."""
    tiny.build("llama", vocab_size=parallel_cases.WORDS).save_pretrained(tmp_path)
    words = {f"w{i}": i for i in range(parallel_cases.WORDS)}
    tokenizer = Tokenizer(WordLevel(words, unk_token="w0"))
    tokenizer.pre_tokenizer = Whitespace()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer).save_pretrained(tmp_path)
    return tmp_path


def arguments(folder, index, *more):
    prompt = " ".join(f"w{3 + i * i % 97}" for i in range(60))
    options = ["--model", str(folder), "--prompt", prompt, "--index", index, "-k", "1000"]
    options += ["--sink", "3", "--local-window", "4", "--update-every", "5", "--dense-below", "0"]
    return [*options, "--max-new-tokens", "8", *more]


def printed(command, folder, index, *more):
    paths = os.pathsep.join(str(processes.ROOT / part) for part in ("", "adapters"))
    environment = {**os.environ, "PYTHONPATH": paths, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [*command, *arguments(folder, index, *more)],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


@pytest.mark.slow
@pytest.mark.parametrize("index", ["exact", parallel_cases.SHARDED])
def test_the_command_prints_once_what_one_process_prints(folder, index):
    one, all_ranks = (["--json", str(folder / name)] for name in ("one.json", "all.json"))
    alone = CliRunner().invoke(app, ["generate", *arguments(folder, "exact", *one)])
    assert alone.exit_code == 0, alone.output
    assert alone.stdout.strip()
    assert printed([*TORCHRUN, *COMMAND], folder, index, *all_ranks) == alone.stdout
    rows = [json.loads(Path(path).read_text())["nbytes"]["rows"] for _, path in (one, all_ranks)]
    assert rows[0] == rows[1] > 0


@pytest.mark.slow
@pytest.mark.parametrize("index", ["exact", parallel_cases.SHARDED])
def test_the_decoder_prints_once_what_one_process_prints(folder, index):
    engine = ["--engine", "decoder"]
    alone = CliRunner().invoke(app, ["generate", *arguments(folder, "exact", *engine)])
    assert alone.exit_code == 0, alone.output
    assert alone.stdout.strip()
    assert printed([*TORCHRUN, *COMMAND], folder, index, *engine) == alone.stdout


def test_what_processes_do_not_do_together_is_refused(tmp_path):
    with pytest.raises(ValueError, match="save-cache, load-cache: got one of them under torchrun"):
        common.check_alone(tmp_path, None)
