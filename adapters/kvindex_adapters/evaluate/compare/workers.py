"""Run the measurements of a comparison in several processes, each of which loads the model.

Answers to prompts are measured in parallel. Texts, whose decode steps are timed, are measured one
at a time. In a suite, which times nothing, the indexes are divided among the processes.
"""

from __future__ import annotations

import functools
import io
import math
import signal
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stderr, suppress
from dataclasses import KW_ONLY, dataclass
from multiprocessing import get_all_start_methods, get_context, resource_tracker
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from typing import Any

import torch

from kvindex.core import check
from kvindex_adapters.evaluate.compare.measuring import Loaded, Measured, Measuring
from kvindex_adapters.evaluate.compare.records import Records
from kvindex_adapters.evaluate.compare.schedule import Progress, Schedule, Work
from kvindex_adapters.evaluate.compare.settings import Plan, Settings

Load = Callable[[], Loaded]
"""Function that loads the model in each process.

It must support pickling: use a function at the top level of a module, or a `functools.partial` of
such a function.
"""

PATIENCE_S = 5
"""Time in seconds that processes have to end after SIGTERM, before they are killed."""


@dataclass(eq=False, repr=False)
class ParallelComparison:
    """A comparison of indexes whose measurements run in several processes.

    A script must use this class under `if __name__ == "__main__"`, because the processes import the
    script.

    Args:
        load: Function that loads the model in each process.
        settings: Settings that all results of the comparison share.
        plan: The indexes, tasks and prompt lengths to measure.
        records: The file of results. New results are appended.
        jobs: Number of processes.
    """

    load: Load
    _: KW_ONLY
    settings: Settings
    plan: Plan
    records: Records
    jobs: int

    def __post_init__(self) -> None:
        check.at_least("jobs", self.jobs, 1)

    def run(
        self,
        on_progress: Progress = lambda done, total, what: None,
        minutes: float | None = None,
    ) -> int:
        """Run those planned measurements that have no result yet, and store their results.

        The measurements on whole texts come first, because they time decode steps. A single process
        runs them, and no other process works at that time. Afterwards, `jobs` processes answer
        prompts. In a suite, each process reads every text, and measures one index on it after the
        other.

        Args:
            on_progress: Function that is called with the work done, the total work, and the name of
                the current measurement.
            minutes: Stop after the first result that is known this many minutes after the start.
                None for no limit.

        Returns:
            Number of results that are still missing. 0 unless the time was over.

        Raises:
            ChildProcessError: A process failed. The message is that of the process. Results that
                the processes have sent before are kept.
        """
        settings, plan = self.settings, self.plan
        deadline = math.inf if minutes is None else time.monotonic() + 60 * minutes
        schedule = Schedule(settings, plan, self.records, on_progress, jobs=self.jobs)
        if settings.suite is None:
            phases = [(schedule.texts, 1), (schedule.instances, self.jobs)]
        else:
            phases = [([part for text in schedule.texts for part in text.divided()], self.jobs)]
        workers: list[_Worker] = []
        try:
            for works, most in phases:
                count = min(most, len(works))
                while len(workers) < count:
                    workers.append(_Worker(len(workers), self.load, settings, plan))
                if not _distribute(schedule, works, workers[:count], deadline):
                    break
            else:
                return 0
        finally:
            _stop([worker.process for worker in workers])
            for worker in workers:
                for measured in worker.sent():
                    self.records.add(*measured)
        return schedule.left


def _distribute(
    schedule: Schedule, works: list[Work], workers: list[_Worker], deadline: float
) -> bool:
    """Let each process measure one text or prompt at a time, and store the results it sends.

    Return False if a result has arrived after `deadline`, in seconds of `time.monotonic`. Then the
    processes are still measuring.
    """
    left = schedule.begin(works)
    threads = max(torch.get_num_threads() // max(len(workers), 1), 1)
    for worker in workers:
        worker.give(next(left, None), threads)
    while busy := [(worker, worker.work) for worker in workers if worker.work]:
        ready = wait([worker.pipe for worker, _ in busy])
        for worker, work in busy:
            if worker.pipe not in ready:
                continue
            if (measured := worker.take()) is not None:
                schedule.take(*measured)
                if time.monotonic() >= deadline:
                    return False
            else:
                schedule.end(work)
                worker.give(next(left, None), threads)
    return True


def _stop(processes: list[BaseProcess]) -> None:
    """Stop all processes, even if they are measuring."""
    for process in processes:
        process.terminate()
    deadline = time.monotonic() + PATIENCE_S
    for process in processes:
        process.join(max(deadline - time.monotonic(), 0))
        process.kill()
        process.join()


def _context() -> Any:
    """Return the multiprocessing context "forkserver", or "spawn" on Windows.

    New processes are forks of a server process, which has imported torch but has not used a GPU.
    """
    if "forkserver" not in get_all_start_methods():  # on Windows
        return get_context("spawn")
    context = get_context("forkserver")
    context.set_forkserver_preload([Measuring.__module__])
    return context


class _Worker:
    """A worker process, which makes measurements, and a pipe to it. `work` is the text or prompt
    that the worker process is measuring.
    """

    def __init__(self, number: int, load: Load, settings: Settings, plan: Plan) -> None:
        context = _context()
        self.pipe, end = context.Pipe()
        self.work: Work | None = None
        arguments = (end, number, load, settings, plan)
        self.process = context.Process(target=_serve, args=arguments, daemon=True)
        with _uninterrupted():
            self.process.start()
        end.close()

    def give(self, work: Work | None, threads: int) -> None:
        """Let the process measure `work` with `threads` threads. Do nothing if `work` is None."""
        self.work = work
        if work is not None:
            with suppress(BrokenPipeError):  # the process has ended; `take` reports the reason
                self.pipe.send((work, threads))

    def take(self) -> Measured | None:
        """Wait for the next result of the process. Return it, or None after the last result.

        Raises:
            ChildProcessError: The process failed.
        """
        try:
            message: Measured | str | None = self.pipe.recv()
        except (EOFError, ConnectionResetError) as error:
            self.process.join()
            assert self.work is not None
            raise ChildProcessError(
                f"jobs: a worker process ended with exit code {self.process.exitcode} (a negative "
                "code is a signal; -9 often means that memory ran out; fewer jobs need less). It "
                f"was to measure {self.work.described()}"
            ) from error
        if isinstance(message, str):
            raise ChildProcessError(message)
        return message

    def sent(self) -> Iterator[Measured]:
        """Yield the results that the process had sent before it was stopped."""
        with suppress(EOFError, OSError):  # the process may have been stopped while it sent
            while self.pipe.poll():
                message: Measured | str | None = self.pipe.recv()
                if isinstance(message, tuple):
                    yield message


def _serve(pipe: Connection, number: int, load: Load, settings: Settings, plan: Plan) -> None:
    """Run in a worker process: measure the texts and prompts that arrive through a pipe.

    The function returns when the other end of the pipe is closed.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # `_uninterrupted` covers the time before
    # exit normally after SIGTERM, so that libraries free resources
    signal.signal(signal.SIGTERM, lambda *_: sys.exit())
    if settings.device == "cuda":  # distribute the processes over all GPUs
        torch.cuda.set_device(number % torch.cuda.device_count())
    measuring = functools.cache(lambda: _loaded(load, settings, plan))
    with suppress(EOFError, BrokenPipeError):
        while True:
            work, threads = pipe.recv()
            torch.set_num_threads(threads)
            try:
                for measured in measuring().measure(work):
                    pipe.send(measured)
                pipe.send(None)
            except (ValueError, OSError, ImportError) as error:
                pipe.send(str(error))
            except Exception:
                pipe.send(f"a worker failed: {traceback.format_exc()}")


def _loaded(load: Load, settings: Settings, plan: Plan) -> Measuring:
    with redirect_stderr(io.StringIO()):  # hides the loading bars of several models
        loaded = load()
    return Measuring(*loaded, settings=settings, plan=plan)


@contextmanager
def _uninterrupted() -> Iterator[None]:
    """Context manager inside which new processes ignore Ctrl-C.

    Only the main process reacts to Ctrl-C, and then stops the others.
    """
    if sys.platform == "win32":  # signal masks do not exist on Windows
        yield
        return
    resource_tracker.ensure_running()  # the start of this helper process would unblock the signal
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
