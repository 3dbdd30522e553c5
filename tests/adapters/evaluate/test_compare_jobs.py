"""Several processes measure the same numbers as one, also after an interruption."""

import dataclasses
import functools
import multiprocessing
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from kvindex_adapters.evaluate import tasks
from kvindex_adapters.evaluate.compare.records import FAILURE, FULL, SKIPPED, TEXT, Records
from kvindex_adapters.evaluate.compare.run import Comparison
from kvindex_adapters.evaluate.compare.schedule import READING
from kvindex_adapters.evaluate.compare.settings import Settings
from kvindex_adapters.evaluate.compare.suite import FieldPlan
from kvindex_adapters.evaluate.compare.workers import ParallelComparison
from tests.adapters.evaluate.test_compare_command import PLANES
from tests.adapters.evaluate.test_compare_run import PLAN, SETTINGS, asked, ids_of, numbers
from tests.adapters.hf.generation.test_generation import Words
from tests.adapters.tiny import build

ROOT = Path(__file__).parents[3]


def load():
    """Load a model in every worker, which measures the tasks of these tests."""
    tasks.make = asked
    return build("llama", num_hidden_layers=2), Words(), ids_of(120, 9)


def die():
    os._exit(3)


def refuse():
    raise FileNotFoundError("model: got 'nowhere', allowed is a folder that exists")


def parallel(folder, load=load, jobs=2):
    folder.mkdir(exist_ok=True)
    options = dict(settings=SETTINGS, plan=PLAN, records=Records(folder))
    return ParallelComparison(load, **options, jobs=jobs)


def alone(folder, on_progress=lambda *progress: None):
    folder.mkdir(exist_ok=True)
    options = dict(settings=SETTINGS, plan=PLAN, records=Records(folder))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tasks, "make", asked)
        Comparison(*load(), **options).run(on_progress)


@pytest.mark.slow
def test_they_come_to_the_numbers_of_one_process(tmp_path):
    def interrupt(done, total, what):
        if done > total / 3:
            raise KeyboardInterrupt

    done, at_once = [], {"ask": 0, "text": 0}

    def see(*progress):
        done.append(progress)
        name = progress[2].partition(",")[0]
        at_once[name] = max(at_once[name], len(multiprocessing.active_children()))

    alone(tmp_path / "one")
    with pytest.raises(KeyboardInterrupt):
        alone(tmp_path / "two", interrupt)
    before = (tmp_path / "two" / "results.jsonl").read_bytes()
    parallel(tmp_path / "two").run(see)
    assert (tmp_path / "two" / "results.jsonl").read_bytes().startswith(before)
    assert numbers(tmp_path / "two") == numbers(tmp_path / "one")
    assert at_once == {"ask": 2, "text": 1}
    assert done[0][0] == 0
    assert done[-1][0] == done[-1][1]


SUITE = Settings("tiny", "several", steps=8, regions=dict(SETTINGS.regions), suite="field")
FIELD = FieldPlan(methods=("exact", "quest", "snapkv"), names=("a", "b"), tokens=(400,))


def load_texts(folder=None):
    """Load a model and texts in every worker, which measures the suite. Leave a file in `folder`
    for each process."""
    if folder is not None:
        (folder / str(os.getpid())).touch()
    return build("llama", num_hidden_layers=2), Words(), {"a": ids_of(400, 1), "b": ids_of(400, 2)}


@pytest.mark.slow
def test_in_a_suite_they_divide_the_indexes(tmp_path):
    def found(folder, run, **options):
        records = Records(folder)
        left = run(**options, settings=SUITE, plan=FIELD, records=records).run(minutes=minutes)
        return left, {key: record["error_by_step"] for key, record in records.of(TEXT)}

    folders = [tmp_path / name for name in ("one", "two", "three")]
    for folder in folders:
        folder.mkdir()
    minutes = None
    model, tokenizer, texts = load_texts()
    alone = functools.partial(Comparison, model, tokenizer, texts)
    (workers := tmp_path / "workers").mkdir()
    shared = functools.partial(ParallelComparison, functools.partial(load_texts, workers), jobs=2)
    _, expected = found(folders[0], alone)
    assert {key.index for key in expected} == {FULL, "exact", "quest", "snapkv:budget=128"}
    assert len({tuple(errors) for key, errors in expected.items() if key.index == "quest"}) == 2
    left, told = found(folders[1], shared)
    assert left == 0
    assert len([*workers.iterdir()]) == 2
    assert told.keys() == expected.keys()
    for key, errors in told.items():
        assert errors == pytest.approx(expected[key], rel=1e-4), key
    minutes = 1e-9
    left, told = found(folders[2], shared)  # ends with the first result
    planned, stored = (
        sum(len([*Records(folder).of(kind)]) for kind in (TEXT, SKIPPED))
        for folder in (folders[0], folders[2])
    )
    assert 0 < stored < planned
    assert left == planned - stored
    assert multiprocessing.active_children() == []


@pytest.mark.slow
def test_results_that_were_sent_before_an_interruption_are_stored(tmp_path):
    def interrupt(done, total, what):
        if done > READING * 400:  # the first skipped result of `exact`; the second one follows
            time.sleep(2)
            raise KeyboardInterrupt

    records = Records(tmp_path)
    options = dict(settings=SUITE, plan=FIELD, records=records)
    with pytest.raises(KeyboardInterrupt):
        ParallelComparison(load_texts, **options, jobs=1).run(interrupt)
    assert len([*records.of(SKIPPED)]) == 2


@pytest.mark.slow
def test_they_find_the_modules_that_the_first_process_finds(tmp_path, monkeypatch):
    (tmp_path / "their_planes.py").write_text(PLANES)
    monkeypatch.syspath_prepend(str(tmp_path))
    plan = dataclasses.replace(PLAN, indexes=("their_planes:Planes",), tries=1)
    records = Records(tmp_path)
    ParallelComparison(load, settings=SETTINGS, plan=plan, records=records, jobs=2).run()
    assert [*records.of(FAILURE)] == []
    assert {key.index for key, _ in records.of(TEXT)} == {FULL, "their_planes:Planes"}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("load", "message"),
    [
        (die, r"jobs: a worker process ended with exit code 3 .* measure full attention"),
        (refuse, "model: got 'nowhere', allowed is a folder that exists"),
    ],
)
def test_a_worker_that_fails_is_told_in_words(tmp_path, load, message):
    with pytest.raises(ChildProcessError, match=message):
        parallel(tmp_path, load).run()
    assert multiprocessing.active_children() == []


RUN = """
import signal, time
from pathlib import Path
from tests.adapters.evaluate.test_compare_jobs import parallel
def told(done, *others):
    if done:
        print(done, flush=True)
        time.sleep(60)  # until it is interrupted
# A shell without job control starts processes in the background with SIGINT ignored
signal.signal(signal.SIGINT, signal.default_int_handler)
parallel(Path(%r)).run(told)
"""


@pytest.mark.slow
def test_an_interruption_ends_all_workers(tmp_path):
    command = [sys.executable, "-c", RUN % str(tmp_path)]
    options = dict(stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=ROOT)
    with subprocess.Popen(command, start_new_session=True, **options) as run:
        assert run.stdout.readline()  # a record is written
        os.killpg(run.pid, signal.SIGINT)  # as a terminal does on Ctrl-C
        _, said = run.communicate(timeout=60)  # workers also have the pipes open
    assert said.splitlines()[-1] == "KeyboardInterrupt"
    assert said.count("Traceback") == 1
    assert len([*Records(tmp_path).of(TEXT)]) > 0


BLOCKED = """
import signal
from tests.adapters.evaluate.test_compare_jobs import parallel, report_blocked
parallel(Path(%r), report_blocked).run()
"""


def report_blocked():
    """Fail with a message that says how this process reacts to Ctrl-C."""
    blocked = signal.SIGINT in signal.pthread_sigmask(signal.SIG_BLOCK, [])
    raise FileNotFoundError(f"blocked {blocked}, {signal.getsignal(signal.SIGINT).name}")


@pytest.mark.slow
def test_workers_never_react_to_an_interruption(tmp_path):
    command = [sys.executable, "-c", "from pathlib import Path" + BLOCKED % str(tmp_path)]
    run = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, check=False)
    assert run.stderr.splitlines()[-1] == "ChildProcessError: blocked True, SIG_IGN"
