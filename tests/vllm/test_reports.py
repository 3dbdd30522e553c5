"""Reasons of errors come from worker processes to the process that started the engine."""

import multiprocessing
import os
import subprocess
import sys

import pytest

from kvindex_adapters.vllm import reports


@pytest.fixture
def owner(monkeypatch):
    """Return the folder of this process, which is removed as when the process ends."""
    monkeypatch.setenv(reports.FOLDER, "no folder")
    monkeypatch.setattr(reports, "_owner", None)
    path = reports.open_folder()
    yield path
    reports._close_folder(path, os.getpid() + 1)  # a forked process does not remove it
    assert path.is_dir()
    reports._close_folder(path, os.getpid())
    assert not path.exists()


@pytest.fixture
def worker(owner, monkeypatch):
    """Turn this process into one that another process has started."""
    monkeypatch.setattr(reports, "_owner", os.getpid() + 1)
    monkeypatch.setattr(multiprocessing, "parent_process", lambda: "another process")
    return owner


def test_one_folder_for_all_processes_of_a_program(worker, monkeypatch):
    assert reports.open_folder() == worker
    monkeypatch.setattr(multiprocessing, "parent_process", lambda: None)
    other = reports.open_folder()  # of a program that this program has started
    assert other != worker
    assert other == reports.folder() == reports.open_folder()
    reports._close_folder(other, os.getpid())


def test_the_folder_goes_with_the_process():
    code = "from kvindex_adapters.vllm import reports; print(reports.open_folder())"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert "kvindex-vllm-" in done.stdout
    assert not os.path.exists(done.stdout.strip())


def test_reasons_are_taken_once(worker, monkeypatch):
    reports.add(["one", "two"])
    monkeypatch.setattr(os, "getpid", lambda: 7)
    reports.add(["two", "three"])
    reports.add([])
    assert sorted(reports.take()) == ["one", "three", "two"]
    assert reports.take() == []


def test_the_first_process_writes_none(owner, monkeypatch):
    reports.add(["one"])
    assert reports.take() == []
    monkeypatch.delenv(reports.FOLDER)
    reports.add(["one"])
    assert reports.take() == []


def test_messages():
    for reasons in (["one"], ["one", "two: got 1, allowed is 2"]):
        assert reports.split(reports.joined(reasons)) == reasons
    assert reports.joined(["one", "one"]) == "kvindex: one"


@pytest.mark.parametrize("first", [True, False])
def test_an_error_is_raised_again_with_the_reason(worker, monkeypatch, first):
    def start(reasons):
        reports.add(reasons)
        if first:
            monkeypatch.setattr(reports, "_owner", os.getpid())
        raise RuntimeError("Engine core initialization failed")

    wrapped = reports.restating(start)
    assert reports.restating(wrapped) is wrapped
    with pytest.raises(RuntimeError, match="initialization failed"):
        wrapped([])
    monkeypatch.setattr(reports, "_owner", None)
    with pytest.raises(ValueError, match=r"^kvindex: one$") as caught:
        wrapped(["one"])
    assert isinstance(caught.value.__cause__, RuntimeError)
    # a process that was itself started by another one passes the reason on
    assert reports.take() == ([] if first else ["one"])
    assert reports.restating(lambda: 5)() == 5
