"""Run a plan in several processes, each of which loads the model. Instances are measured in
parallel, texts one at a time."""

from __future__ import annotations

import functools
import io
import signal
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stderr, suppress
from dataclasses import KW_ONLY, dataclass
from multiprocessing import get_all_start_methods, get_context
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
"""Loads the model in every worker. It must be possible to pickle it, so it is a function of a
module or a `functools.partial`."""

PATIENCE_S = 5
"""Seconds to wait for processes that are stopped, before they are killed."""


@dataclass(eq=False, repr=False)
class ParallelComparison:
    """A plan for a model that each of `jobs` processes loads, and the records that it fills.

    A script must use this under `if __name__ == "__main__"`, because the processes import the
    script.
    """

    load: Load
    _: KW_ONLY
    settings: Settings
    plan: Plan
    records: Records
    jobs: int

    def __post_init__(self) -> None:
        check.at_least("jobs", self.jobs, 1)

    def run(self, on_progress: Progress = lambda done, total, what: None) -> None:
        """Run the measurements that the records lack, as `Comparison.run` does.

        Texts come first, in one process while the others are idle, so that times are those of an
        idle machine.

        Raises:
            ChildProcessError: A process failed. The message is that of the process. Records so far
                are kept.
        """
        settings, plan = self.settings, self.plan
        schedule = Schedule(settings, plan, self.records, on_progress, jobs=self.jobs)
        workers: list[_Worker] = []
        try:
            for works, most in ((schedule.texts, 1), (schedule.instances, self.jobs)):
                count = min(most, len(works))
                while len(workers) < count:
                    workers.append(_Worker(len(workers), self.load, settings, plan))
                _distribute(schedule, works, workers[:count])
        finally:
            _stop([worker.process for worker in workers])


def _distribute(schedule: Schedule, works: list[Work], workers: list[_Worker]) -> None:
    """Give each worker one unit of work at a time, and store the records that workers send."""
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
            else:
                schedule.end(work)
                worker.give(next(left, None), threads)


def _stop(processes: list[BaseProcess]) -> None:
    """Stop all processes, even in the middle of their work."""
    for process in processes:
        process.terminate()
    deadline = time.monotonic() + PATIENCE_S
    for process in processes:
        process.join(max(deadline - time.monotonic(), 0))
        process.kill()
        process.join()


def _context() -> Any:
    """Return the multiprocessing context: new processes are forks of a server process that has
    imported modules but not used a GPU."""
    if "forkserver" not in get_all_start_methods():  # Windows
        return get_context("spawn")
    context = get_context("forkserver")
    context.set_forkserver_preload([Measuring.__module__])
    return context


class _Worker:
    """A process that measures units of work, its current unit, and a pipe to it."""

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
        """Let the process measure a unit of work with a number of threads; None does nothing."""
        self.work = work
        if work is not None:
            with suppress(BrokenPipeError):  # `take` reports the reason
                self.pipe.send((work, threads))

    def take(self) -> Measured | None:
        """Return the next record of the current unit, or None after the last. Raises
        ChildProcessError."""
        try:
            message: Measured | str | None = self.pipe.recv()
        except (EOFError, ConnectionResetError) as error:
            self.process.join()
            raise ChildProcessError(
                f"jobs: a worker ended with exit code {self.process.exitcode} (a negative code is "
                "a signal; -9 often means that memory ran out); fewer jobs need less memory"
            ) from error
        if isinstance(message, str):
            raise ChildProcessError(message)
        return message


def _serve(pipe: Connection, number: int, load: Load, settings: Settings, plan: Plan) -> None:
    """Measure units of work that come through a pipe, until its other end is closed."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit())  # so that libraries free resources
    if settings.device == "cuda":  # workers take the GPUs in turn
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
    """Start processes in this context that ignore Ctrl-C. This process stops them."""
    if sys.platform == "win32":  # signal masks do not exist on Windows
        yield
        return
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
