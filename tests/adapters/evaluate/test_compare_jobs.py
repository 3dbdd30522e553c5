"""Several processes come to the numbers of one, after any interruption; what fails is told."""

import os
from pathlib import Path

import pytest

from kvindex_adapters.evaluate import tasks
from kvindex_adapters.evaluate.compare.records import Records
from kvindex_adapters.evaluate.compare.run import Comparison
from kvindex_adapters.evaluate.compare.workers import ParallelComparison
from tests.adapters.evaluate.test_compare_run import PLAN, SETTINGS, asked, ids_of, numbers
from tests.adapters.test_generation import Words
from tests.adapters.tiny import build

ROOT = Path(__file__).parents[3]


def load():
    """What every worker loads: it measures the tasks of these tests."""
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


def test_they_come_to_the_numbers_of_one_process(tmp_path):
    def interrupt(done, total, what):
        if done > total / 3:
            raise KeyboardInterrupt

    done = []
    alone(tmp_path / "one")
    with pytest.raises(KeyboardInterrupt):
        alone(tmp_path / "two", interrupt)
    before = (tmp_path / "two" / "results.jsonl").read_bytes()
    parallel(tmp_path / "two").run(lambda *progress: done.append(progress))
    assert (tmp_path / "two" / "results.jsonl").read_bytes().startswith(before)
    assert numbers(tmp_path / "two") == numbers(tmp_path / "one")
    assert done[0][0] == 0
    assert done[-1][0] == done[-1][1]
