"""The calls of an author outside this repository: `check_index`, and `python -m
kvindex.testing`."""

import subprocess
import sys
from pathlib import Path

import pytest

from kvindex.indexes.exact import Exact
from kvindex.testing import ContractError, check_index, contract, outcomes, run
from kvindex.testing.__main__ import main
from kvindex.testing.cases import Case
from tests.contract.test_contract_can_fail import CASE, FetchesTheNext

ROOT = Path(__file__).parents[2]
WITHOUT = """
import sys
sys.modules.update(pytest=None, hypothesis=None)  # as if they were not installed
from kvindex.indexes.exact import Exact
from kvindex.testing import check_index, run
run.CASES = run.CASES[:1]
check_index(Exact)
try:
    check_index(Exact, stateful=True)
except ImportError as error:
    print(error)
"""


@pytest.fixture
def one_case(monkeypatch):
    monkeypatch.setattr(run, "CASES", (CASE,))


def python(*arguments):
    command = [sys.executable, *arguments]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)


@pytest.mark.slow
def test_it_needs_neither_pytest_nor_hypothesis():
    done = python("-c", WITHOUT)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("stateful: got a Python without Hypothesis; run pip install")


@pytest.mark.slow
def test_python_that_drops_assertions_is_refused():
    done = python("-O", "-m", "kvindex.testing", "exact")
    assert done.returncode == 2
    assert done.stderr.startswith("error: python: got the option -O")


def test_an_index_that_breaks_a_promise_is_told_by_check_and_case(one_case):
    with pytest.raises(ContractError, match="check_fetch_returns_the_appended_rows fails in") as e:
        check_index(FetchesTheNext)
    assert str(CASE) in str(e.value)
    assert "expected: `fetch` returns keys and values as they were appended" in str(e.value)
    assert "append.py" in str(e.value)


def test_a_function_that_makes_indexes_and_options_for_them(one_case):
    made = []

    def make(**options):
        made.append(options["group"])
        return Exact(**options)

    assert all(outcome.error is None for outcome in outcomes(make, group="union"))
    assert set(made) == {"union"}


def test_the_first_case_that_fails_ends_a_check():
    seen = []

    def check(make, case):
        """A check that always fails."""
        seen.append(case)
        raise IndexError(len(seen))

    (outcome,) = outcomes(Exact, checks=[check], cases=[CASE, Case()])
    assert seen == [CASE]
    assert "found: IndexError: 1" in str(outcome.error)


def test_interleavings_of_calls_come_last(monkeypatch):
    monkeypatch.setattr(run, "CHECKS", ())
    (outcome,) = outcomes(Exact, stateful=True)
    assert (outcome.name, outcome.error) == ("check_any_interleaving", None)


@pytest.mark.parametrize("given", ["exact", Exact(q_heads=1, kv_heads=1, head_dim=8)])
def test_what_makes_no_index_is_refused(given):
    with pytest.raises(TypeError, match=r"index: got .*, allowed is a class, or a function"):
        check_index(given)


def test_every_module_holds_checks():
    folder = Path(contract.__file__).parent
    modules = {path.stem for path in folder.glob("*.py")} - {"__init__", "common"}
    assert {check.__module__.rpartition(".")[2] for check in contract.CHECKS} == modules


@pytest.mark.parametrize("index", ["exact:group=union", "kvindex.indexes.exact:Exact"])
def test_the_command_prints_a_line_for_each_check(index, one_case, capsys):
    assert main([index]) == 0
    *lines, last = capsys.readouterr().out.splitlines()
    assert len(lines) == len(contract.CHECKS)
    assert all(line.startswith("ok  ") for line in lines)
    assert last == f"{index}: {len(lines)} of {len(lines)} checks passed"


def test_the_command_tells_what_fails(one_case, capsys):
    assert main([f"{FetchesTheNext.__module__}:FetchesTheNext"]) == 1
    out = capsys.readouterr().out
    assert "FAIL" in out
    assert "     check_fetch_returns_the_appended_rows fails in the case" in out


@pytest.mark.parametrize(
    ("index", "says"),
    [
        ("exakt", "index: got 'exakt', allowed is one of"),
        ("no_such_module:Index", "No module named 'no_such_module'"),
        ("kvindex.indexes.exact:Inexact", "index: got 'kvindex.indexes.exact:Inexact', which can"),
        ("kvindex.indexes.exact:Exact:group=no", "group: got 'no', allowed is one of"),
    ],
)
def test_a_users_mistake_is_one_line(index, says, capsys):
    assert main([index]) == 2
    assert says in capsys.readouterr().err
