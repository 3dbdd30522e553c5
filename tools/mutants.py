"""Mutation testing: make small random changes to the library, and check that a test fails.

    .venv/bin/python tools/mutants.py [--count N] [--seed S] [--limit SECONDS] [--json FILE]

A mutant is the library with one such change: the package mutmut changes one operator, argument or
constant of a function. It does not change decorated functions, such as properties, nor the modules
and lines that `[tool.mutmut]` in pyproject.toml excludes. To test all mutants would take days, so
the script selects a random sample: the same fraction of the mutants of each package.

Each mutant is written into a copy of the checkout. The tests that call the changed function run for
at most `--limit` seconds, until the first test fails. A mutant counts as noticed if a test fails,
if its tests hang, or if its process dies.

To find out which tests call which function, the script first runs all tests once. It stores the
result in `.mutants/reached.json`. Delete this file when tests have changed.

The script prints the fraction of mutants that were noticed, with its 95% interval. It also prints a
diff of each mutant that was not noticed (a survivor). Either a test is missing, or the change
affects no result, but only speed, a message, or the choice of a device on a machine that has only
one. A person has to decide which is the case.
"""

from __future__ import annotations

import argparse
import contextlib
import difflib
import fcntl
import json
import multiprocessing
import os
import queue
import random
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Container, Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvindex_adapters.evaluate.output_files import output, write_json

ROOT = Path(__file__).parents[1]
WORK = ROOT / ".mutants"

TESTS = (
    *("tests/core", "tests/ops", "tests/storage", "tests/selectors", "tests/bases", "tests/layer"),
    *("tests/wrappers", "tests/indexes", "tests/contract", "tests/saving", "tests/pool"),
    *("tests/adapters/hf/cache", "tests/adapters/hf/generation/test_conversation.py"),
)
"""Files and folders of tests that may notice a mutant."""

FORKED = multiprocessing.get_context("forkserver")
FORKED.set_forkserver_preload(
    ["torch", "transformers", "numba", "faiss", "safetensors", "hypothesis", "pytest"]
)
"""A server process imports these modules once. Each process that runs tests is forked from it."""

FILE_LIMIT_S = 900
"""Seconds after which the first run of all tests stops a file of tests.

Tests that have not run by then are not used for mutants.
"""

LEAST = 12
"""Smallest number of mutants of each package in a sample."""

SLOWEST_S = 20
"""Seconds that a single test may take. Slower tests are not used for mutants."""

UNTRACED = {
    "tests/wrappers/test_sharded.py": ("core/ranks", "core/shards", "wrappers/sharded"),
    "tests/core/test_transaction.py": ("core/transaction",),
}
"""File of tests -> modules that it tests.

The first run of all tests cannot record which functions these tests call, because they start other
processes or use `sys.settrace` themselves. So the whole file is run for a mutant of these modules.
"""

UNTRACED_S = 300
"""Seconds that each file of tests in `UNTRACED` may take."""

Reached = dict[str, dict[str, dict[str, float]]]
"""Function (file and qualified name) -> file of tests -> test that calls the function -> its run
time in seconds."""


@dataclass(frozen=True)
class Mutant:
    """One small change to one function of the library.

    Attributes:
        path: File of the function.
        function: Name of the function.
        number: Number of the change among all changes of this function, from 0 on.
        make: Function that returns the text of the changed file.
    """

    path: str
    function: str
    number: int
    make: Callable[[], str]

    @property
    def name(self) -> str:
        """Name of the mutant, in the form that the option `--names` reads."""
        return f"{self.path}:{self.function}:{self.number}"

    @property
    def group(self) -> str:
        """Folder of the file that the mutant changes, such as `kvindex/layer`.

        The function `sample` selects the same fraction of the mutants of each folder.
        """
        return "/".join(Path(self.path).parts[:2])

    def diff(self) -> str:
        """Return the change as a unified diff."""
        before = (ROOT / self.path).read_text(encoding="utf-8").splitlines()
        after, files = self.make().splitlines(), (self.path, self.name)
        return "\n".join(difflib.unified_diff(before, after, *files, n=4, lineterm=""))


def main() -> int:
    """Parse the command line, test a sample of mutants, and print a report.

    Returns the exit status: 1 if the tests noticed less than the fraction `--least` of the mutants.
    """
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--count", type=int, default=200, help="number of mutants to test")
    parser.add_argument("--seed", type=int, default=0, help="seed for sampling the mutants")
    parser.add_argument(
        "--limit", type=float, default=60, help="seconds that the tests of each mutant may take"
    )
    parser.add_argument(
        "--least",
        type=float,
        default=0.8,
        help="exit with status 0 if tests notice at least this fraction of the mutants",
    )
    parser.add_argument("--jobs", type=int, default=2, help="number of mutants to test in parallel")
    parser.add_argument(
        "--names", type=Path, help="file with names of mutants to test, instead of a random sample"
    )
    parser.add_argument("--json", type=output(".json"), help="file for the outcome of each mutant")
    options = parser.parse_args()
    WORK.mkdir(exist_ok=True)
    with (WORK / "lock").open("w") as lock:  # the folder is reused, so allow one run at a time
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        trees = [copy_tree(WORK / f"tree{i}") for i in range(options.jobs)]
        found = run_sample(trees, options)
    print(report(found))
    return is_noticed(found) < options.least


def run_sample(trees: list[Path], options: argparse.Namespace) -> list[dict[str, Any]]:
    """Test the mutants (changes of the library) that the options select. Return the outcomes."""
    stored = WORK / "reached.json"
    if not stored.exists():
        stored.write_text(json.dumps(find_reached(trees)), encoding="utf-8")
    reached = json.loads(stored.read_text(encoding="utf-8"))
    if options.names:
        names = set(options.names.read_text(encoding="utf-8").split())
        mutants = all_mutants({name.partition(":")[0] for name in names})
        mutants = [mutant for mutant in mutants if mutant.name in names]
    else:
        mutants = sample(all_mutants(), options.count, options.seed)
    found: list[dict[str, Any]] = []

    def run(mutant: Mutant, tree: Path) -> None:
        outcome = {"name": mutant.name, "diff": mutant.diff()}
        found.append(outcome | run_mutant(mutant, tree, reached, options.limit))
        print(f"{len(found):4} {found[-1]['outcome']:9}", mutant.name, flush=True)
        if options.json:
            write_json(options.json, found)

    in_trees(run, mutants, trees)
    return found


def all_mutants(paths: Container[str] | None = None) -> list[Mutant]:
    """Return all mutants that mutmut makes of the modules that pyproject.toml lists.

    If `paths` is given, return only the mutants of these modules.
    """
    from libcst import ClassDef, FunctionDef, IndentedBlock
    from mutmut.configuration import config
    from mutmut.mutation.file_mutation import create_mutations, deep_replace

    found = []
    os.chdir(ROOT)
    for path in sorted(path for top in config().source_paths for path in top.rglob("*.py")):
        if not config().should_mutate(path) or (paths is not None and str(path) not in paths):
            continue
        module, mutations, _, _ = create_mutations(str(path), path.read_text(encoding="utf-8"))
        methods = {
            id(method): f"{node.name.value}.{method.name.value}"
            for node in module.body
            if isinstance(node, ClassDef) and isinstance(node.body, IndentedBlock)
            for method in node.body.body
            if isinstance(method, FunctionDef)
        }
        count: defaultdict[str, int] = defaultdict(int)
        for mutation in mutations:
            function = mutation.contained_by_top_level_function
            if not isinstance(function, FunctionDef):  # a constant of a module or class
                continue
            name = methods.get(id(function), function.name.value)

            def make(module: Any = module, change: Any = mutation) -> str:
                return deep_replace(module, change.original_node, change.mutated_node).code

            found.append(Mutant(str(path), name, count[name], make))
            count[name] += 1
    return found


def sample(mutants: list[Mutant], count: int, seed: int) -> list[Mutant]:
    """Select about `count` random mutants: the same fraction of the mutants of each package.

    At least `LEAST` mutants of each package are selected, or all if it has fewer.
    """
    groups: defaultdict[str, list[Mutant]] = defaultdict(list)
    for mutant in mutants:
        groups[mutant.group].append(mutant)
    chosen = []
    for group, some in groups.items():
        size = max(LEAST, round(count * len(some) / len(mutants)))
        chosen += random.Random(f"{seed} {group}").sample(some, min(size, len(some)))
    random.Random(seed).shuffle(chosen)
    return chosen


def run_mutant(mutant: Mutant, tree: Path, reached: Reached, limit: float) -> dict[str, Any]:
    """Test a mutant in `tree`, a copy of the checkout. Return the outcome and the log."""
    tests = in_order(mutant, reached.get(f"{mutant.path}:{mutant.function}", {}))
    modules = {file: tuple(f"kvindex/{name}" for name in UNTRACED[file]) for file in UNTRACED}
    whole = [file for file in UNTRACED if mutant.path.startswith(modules[file])]
    if not tests and not whole:
        return {"outcome": "no tests"}
    chosen, spent = [], 0.0
    for test, seconds in tests.items():
        if spent + seconds < limit:
            chosen.append(test)
            spent += seconds
    target, log = tree / mutant.path, tree / "log.txt"
    target.write_text(mutant.make(), encoding="utf-8")
    log.unlink(missing_ok=True)
    most = 300 + 20 * spent + UNTRACED_S * len(whole)
    status = run_forked(run_selected, (tree, [*chosen, *whole], log), most)
    shutil.copy2(ROOT / mutant.path, target)
    if status == NO_TESTS:  # tests were renamed since the first run
        return {"outcome": "no tests"}
    if status:
        text = log.read_text(encoding="utf-8") if log.exists() else ""
        return {"outcome": "hung" if status == HUNG else "failed", "log": text[-3000:]}
    return {"outcome": "survived", "tests": len(chosen), "of": len(tests)}


def in_order(mutant: Mutant, files: dict[str, dict[str, float]]) -> dict[str, float]:
    """Sort the tests of a mutant so that those most likely to fail come first.

    First comes one case of each parametrized test, then a second case of each, and so on. Within
    such a group of cases, tests in the folder of the mutant's package come first, and fast tests
    come before slow ones.

    Returns:
        Name of a test -> its run time in seconds.
    """
    top, package, *_ = Path(mutant.path).parts
    own = f"tests/{package if top == 'kvindex' else top}/"
    count: defaultdict[str, int] = defaultdict(int)
    ranked = []
    for tests in files.values():
        for test, seconds in sorted(tests.items(), key=lambda item: item[1]):
            function = test.partition("[")[0]
            ranked.append((count[function], not test.startswith(own), seconds, test))
            count[function] += 1
    return {test: seconds for _, _, seconds, test in sorted(ranked)}


def is_noticed(found: list[dict[str, Any]]) -> float:
    """Return the fraction of the mutants that made a test fail, hang or crash."""
    return sum(one["outcome"] in ("failed", "hung") for one in found) / len(found)


def report(found: list[dict[str, Any]]) -> str:
    """Return the text to print: the fraction of noticed mutants with its 95% confidence interval.

    The diffs of all other mutants follow.
    """
    from kvindex_adapters.evaluate.compare.statistics import wilson

    noticed = [one["outcome"] in ("failed", "hung") for one in found]
    low, high = wilson(list(map(float, noticed)))
    lines = [
        f"{is_noticed(found):.1%} of {len(found)} noticed (95% interval {low:.1%} to {high:.1%})"
    ]
    for one, seen in zip(found, noticed, strict=True):
        if not seen:
            lines.append(f"\n{one['outcome']}: {one['name']}\n{one['diff']}")
    return "\n".join(lines)


def copy_tree(tree: Path) -> Path:
    """Copy the files of the checkout to the folder `tree`, and return the folder.

    Files that an earlier run copied there are overwritten.
    """
    listed = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    for name in subprocess.check_output(listed, cwd=ROOT, text=True).split("\0"):
        if name and (ROOT / name).is_file():
            (tree / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, tree / name)
    return tree


def find_reached(trees: list[Path]) -> Reached:
    """Run all tests on the unchanged library, and record which functions each test calls."""
    files = []
    for name in TESTS:
        path = ROOT / name
        files += sorted(path.rglob("test_*.py")) if path.is_dir() else [path]
    reached: Reached = {}

    def run(file: Path, tree: Path) -> None:
        name, result, begun = str(file.relative_to(ROOT)), tree / "calls.json", time.monotonic()
        result.unlink(missing_ok=True)
        status = run_forked(run_traced, (tree, name, tree / "log.txt", result), FILE_LIMIT_S)
        print(f"{time.monotonic() - begun:6.1f} s, exit status {status}: {name}", flush=True)
        if result.exists():
            for test, (seconds, functions) in json.loads(
                result.read_text(encoding="utf-8")
            ).items():
                for function in functions if seconds < SLOWEST_S else ():
                    reached.setdefault(function, {}).setdefault(name, {})[test] = seconds

    in_trees(run, files, trees)
    return reached


def in_trees(run: Callable[[Any, Path], None], items: Iterable[Any], trees: list[Path]) -> None:
    """Call `run` for the items in parallel. No two calls use the same copy of the checkout at once.

    Args:
        run: Function to call with an item and a copy of the checkout.
        items: The items, for example mutants.
        trees: Folders of the copies. As many calls run in parallel as there are copies.
    """
    free: queue.SimpleQueue[Path] = queue.SimpleQueue()
    for tree in trees:
        free.put(tree)

    def one(item: Any) -> None:
        tree = free.get()
        try:
            run(item, tree)
        finally:
            free.put(tree)

    with ThreadPoolExecutor(len(trees)) as pool:
        list(pool.map(one, items))


HUNG, NO_TESTS = -1000, 5
"""Exit status of a process that took too long, and of pytest if it finds no tests."""

NOT_IMPORTED = {"", *map(str, (ROOT, ROOT / "adapters", ROOT / "tools"))}
"""Folders of the original checkout. Tests in a copy must not import from them."""


def run_forked(target: Callable[..., None], args: tuple[Any, ...], limit: float) -> int | None:
    """Call `target` in a new process. Return its exit status, or `HUNG` after `limit` seconds."""
    process = FORKED.Process(target=target, args=args)
    process.start()
    process.join(limit)
    alive = process.is_alive()
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)  # the process, and all processes that it started
    process.join()
    return HUNG if alive else process.exitcode


def begin(tree: Path, log: Path) -> None:
    """Prepare this process to run the tests of `tree`, a copy of the checkout.

    The output of the process is written to `log`.
    """
    os.setsid()
    os.chdir(tree)
    places = [str(tree), str(tree / "adapters")]
    sys.path[:] = [*places, *(place for place in sys.path if place not in NOT_IMPORTED)]
    os.environ |= {"PYTHONPATH": os.pathsep.join(places), "OMP_NUM_THREADS": "1"}
    output = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(output, 1)
    os.dup2(output, 2)


def run_selected(tree: Path, tests: list[str], log: Path) -> None:
    """Run tests until the first one fails. `tests` contains names of tests, or of whole files."""
    begin(tree, log)
    import pytest

    chosen = set(tests)

    class Selected:
        @pytest.hookimpl(trylast=True)
        def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
            named = [item for item in items if item.nodeid in chosen]
            items[:] = named + [item for item in items if item.nodeid.partition("::")[0] in chosen]

    files = list(dict.fromkeys(test.partition("::")[0] for test in tests))
    os._exit(pytest.main(["-x", "-q", *PLAIN, *files], plugins=[Selected()]))


def run_traced(tree: Path, file: str, log: Path, result: Path) -> None:
    """Run a file of tests. For each test that passes, write its run time and called functions."""
    begin(tree, log)
    import pytest

    seen: dict[int, Any] = {}  # code objects by their id, because hashing them is slow
    found: dict[str, tuple[float, list[str]]] = {}
    top = f"{tree}{os.sep}"

    def trace(frame: Any, event: str, argument: Any) -> None:
        seen[id(frame.f_code)] = frame.f_code

    class Traced:
        def pytest_runtest_logstart(self) -> None:
            seen.clear()
            self.begun, self.passed = time.process_time(), True
            threading.settrace(trace)
            sys.settrace(trace)

        def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
            self.passed &= report.passed

        def pytest_runtest_logfinish(self, nodeid: str) -> None:
            sys.settrace(None)
            threading.settrace(None)  # type: ignore[arg-type]
            if self.passed:
                places = {(code.co_filename, code.co_qualname) for code in list(seen.values())}
                functions = {
                    f"{file.removeprefix(top)}:{name.partition('.<locals>')[0]}"
                    for file, name in places
                    if file.startswith((f"{top}kvindex/", f"{top}adapters/"))
                }
                found[nodeid] = time.process_time() - self.begun, sorted(functions)
                if time.monotonic() - self.written > 10:
                    self.write()

        written = 0.0

        def write(self) -> None:
            self.written = time.monotonic()
            result.with_suffix(".part").write_text(json.dumps(found), encoding="utf-8")
            result.with_suffix(".part").rename(result)

    traced = Traced()
    status = pytest.main(["-q", *PLAIN, file], plugins=[traced])
    traced.write()
    os._exit(status)


PLAIN = ("-p", "no:cacheprovider", "-p", "no:xdist", "--tb=short")
"""Options with which pytest runs the tests of mutants."""

if __name__ == "__main__":
    sys.exit(main())
