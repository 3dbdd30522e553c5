"""`kvindex compare`: compare indexes on one model and the same inputs, and write a report."""

from __future__ import annotations

import functools
import hashlib
import os
import random
import re
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from kvindex_adapters.cli.options import (
    Device,
    Dtype,
    GgufFile,
    Local,
    Prefill,
    PrefillMass,
    PrefillSelector,
    Sink,
    UpdateEvery,
    announce_imports,
    check_stdout,
    number_of_tokens,
)

if TYPE_CHECKING:
    from rich.table import Table as RichTable

    from kvindex_adapters.evaluate.compare.schedule import Progress
    from kvindex_adapters.evaluate.compare.settings import Plan, Settings
    from kvindex_adapters.evaluate.compare.suite import FieldPlan
    from kvindex_adapters.evaluate.compare.tables import Table
    from kvindex_adapters.evaluate.compare.workers import Load

INDEX, K = "pariskv,quest,exact", "256"
"""Default values of the options `--index` and `-k`."""

USUAL: dict[str, Any] = dict(tokens="4K", tries=10, steps=256) | dict(
    tasks="needle,needle-multikey,needle-multivalue,chain,lookup,copy"
)
"""Default values of the options without `--quick`."""

QUICK: dict[str, Any] = USUAL | dict(tries=2, tasks="none")
"""Default values of the options with `--quick`.

A few answers are not enough to see a difference between indexes, but a few hundred decode steps
along a text are. Before these steps, all tokens except for the 256 newest ones are in the index:
4096 - 256 = 256 + 14 * 256.
"""

FIELD: dict[str, Any] = dict(tokens="4K", steps=64)
"""Default values of the options with `--suite field`."""

FIELD_QUICK: dict[str, Any] = FIELD | dict(tokens="2K", steps=16)
"""Default values of the options with `--suite field --quick`."""

FIELD_QUICK_MINUTES = 4
"""CPU minutes that `kvindex compare --suite field --quick` takes with SmolLM2-135M."""

QUICK_MINUTES = 4
"""CPU minutes that `kvindex compare --quick` takes if all other options have their defaults."""

_DEFAULTS = {
    name: f"Default {usual}{f'; with --quick {QUICK[name]}' * (QUICK[name] != usual)}.".replace(
        ",", ", "
    )
    for name, usual in USUAL.items()
}
"""Maps the name of an option to the sentence in its help text that states its defaults."""

SHOWN = (
    *("index", "k", "accuracy", "KL, nats", "KL over exact's", "coverage", "recall"),
    *("rows read", "ms per step", "code bytes per key"),
    *("budget", "error", "worst layer", "bytes read"),
)
"""Columns of the table that the command prints. The report shows more columns."""

OPTIONAL = ("code bytes per key", "KL over exact's", "coverage", "recall")
"""Columns that are left out, in this order, until the table fits the width of the output."""

SOURCE = 400_000
"""Number of characters of Python's source code that a suite reads at most."""

WIDTH = 100
"""Width of the table in characters, if the output is not a terminal."""

NAME_WIDTH = 24
"""Names of indexes with more characters are broken into lines at ":" and "+"."""


def compare(
    out: Annotated[
        Path,
        typer.Option(
            help="Folder for the report. Measurements that are already in the folder are reused."
        ),
    ],
    model: Annotated[
        str | None,
        typer.Option(
            help="Folder, .gguf file or Hugging Face id of the model (default: SmolLM2-135M)."
        ),
    ] = None,
    suite: Annotated[
        str | None,
        typer.Option(
            help="Measure a fixed set of cells: field, every index at three budgets and at its "
            "published setting, by the error of each layer's output, divergence and recall."
        ),
    ] = None,
    index: Annotated[
        str | None,
        typer.Option(
            help="Indexes to compare, separated by commas. Each has the form "
            "name:option=value:option=value (kvindex indexes lists names and options), or "
            "module:Class:option=value for a class in a file of the current folder. "
            f"Default {INDEX.replace(',', ', ')}; with --suite field all indexes."
        ),
    ] = None,
    k: Annotated[
        str | None,
        typer.Option(
            "-k",
            help="Number of tokens that each KV head retrieves per decode step, or auto for as "
            "many as the expected error asks for (auto:0.05 sets the allowed error). Separate "
            f"several values by commas, for example 100,256. Default {K}.",
        ),
    ] = None,
    tasks: Annotated[
        str | None,
        typer.Option(
            help="Names of the tasks that the model answers, separated by commas, or none. "
            f"{_DEFAULTS['tasks']}"
        ),
    ] = None,
    tokens: Annotated[
        str | None,
        typer.Option(
            help="Prompt lengths in tokens, separated by commas, for example 4K,16K. "
            f"{_DEFAULTS['tokens']} With --suite field --quick {FIELD_QUICK['tokens']}."
        ),
    ] = None,
    tries: Annotated[
        int | None,
        typer.Option(help=f"Number of prompts per task and length. {_DEFAULTS['tries']}"),
    ] = None,
    text: Annotated[
        list[Path] | None,
        typer.Option(
            help="Text file on which next-token predictions are compared with those of full "
            "attention (default: the Python language reference). With --suite field, the option "
            "may be given several times (default: also Python's source code)."
        ),
    ] = None,
    steps: Annotated[
        int | None,
        typer.Option(
            help="Compare the predictions for this number of tokens of the text. 0 measures only "
            "the answers to tasks. "
            f"{_DEFAULTS['steps']} With --suite field {FIELD['steps']}, and with --quick as well "
            f"{FIELD_QUICK['steps']}."
        ),
    ] = None,
    quick: Annotated[
        bool,
        typer.Option(
            help="Compare next-token predictions and recall on one text only, which takes about "
            f"{QUICK_MINUTES} minutes of CPU time. With --suite field: 16 steps on one text of "
            f"2K tokens, about {FIELD_QUICK_MINUTES} minutes of CPU time."
        ),
    ] = False,
    minutes: Annotated[
        float | None,
        typer.Option(
            help="Stop after this many minutes, with a report of what was measured. Run the same "
            "command again to continue."
        ),
    ] = None,
    jobs: Annotated[
        int | None,
        typer.Option(
            help="Number of processes that measure in parallel. Each process loads the model "
            "(default: 1; 2 with --suite field --quick and the default model on a CPU)."
        ),
    ] = None,
    gguf_file: GgufFile = None,
    lora: Annotated[
        Path | None, typer.Option(help="File with a LoRA adapter to merge into the model.")
    ] = None,
    sink: Sink = 64,
    local_window: Local = 256,
    update_every: UpdateEvery = 256,
    prefill: Prefill = "dense",
    prefill_mass: PrefillMass = 0.95,
    prefill_selector: PrefillSelector = "sampled",
    store: Annotated[
        str | None,
        typer.Option(
            help="Memory that stores keys and values: device, host, or auto (device memory until "
            "it is full, then host memory). Default: the memory that each index chooses."
        ),
    ] = None,
    dtype: Dtype = "float32",
    device: Device = "cpu",
) -> None:
    """Compare indexes on one model, and write an HTML report.

    The report shows the accuracy of answers, the divergence from full attention, the recall of
    searches, the fraction of keys and values that attention reads, time and memory. To continue an
    interrupted run, run the same command again. If you add indexes, lengths or tasks, only the
    missing measurements are made.

    With --suite field, every index is measured at 128, 512 and 2,048 rows and at its published
    setting, and the folder also contains the table field.json.
    """
    check_stdout()
    announce_imports()
    import torch

    from kvindex.core import check
    from kvindex_adapters.cli import common
    from kvindex_adapters.evaluate.compare.measuring import load
    from kvindex_adapters.evaluate.compare.settings import Settings
    from kvindex_adapters.evaluate.compare.suite import SUITES
    from kvindex_adapters.hf.model import load_model

    number = common.check_dtype(dtype)
    if gguf_file is not None and model is None:
        raise ValueError(
            f"gguf_file: got {gguf_file!r} without --model; pass the folder of the file as --model"
        )
    if jobs is None:
        light = quick and suite is not None and model is None and device == "cpu"
        jobs = min(2, torch.get_num_threads()) if light else 1
    common.check_size("jobs", jobs, 1)
    load_model.check_device(device)
    regions: dict[str, Any] = dict(sink=sink, local_window=local_window, update_every=update_every)
    sparse = dict(prefill_mass=prefill_mass, prefill_selector=prefill_selector)
    common.check_search("exact", 1, "cpu", {"prefill": prefill, **sparse})
    if prefill == "sparse":  # results of dense prompts do not depend on the other options
        regions |= {"prefill": prefill, **sparse}
    if minutes is not None:
        check.positive("minutes", minutes)
    texts = _texts(text or [], suite=suite, quick=quick)
    given = dict(tasks=tasks, tokens=tokens, tries=tries, steps=steps)
    if suite is not None:
        check.one_of("suite", suite, SUITES)
        unfit: dict[str, Any] = {"k": k, "tasks": tasks, "tries": tries}
        unfit["prefill"] = prefill if prefill != "dense" else None
        _check_fits(suite, unfit)
        chosen = _given(FIELD_QUICK if quick else FIELD, given)
        plan: Plan = _field_plan(index, chosen, tuple(texts))
        content: str | dict[str, str] = texts
    else:
        chosen = _given(QUICK if quick else USUAL, given)
        plan = _plan(index or INDEX, k or K, chosen)
        (content,) = texts.values()
    named = plan.indexes if suite is None or index is not None else ("exact", "pariskv")
    for line in named:  # of the other indexes of a suite, a report says why they do not work
        for asked in _asked(plan.ks_of(line)):
            common.check_search(line, asked.pop("k"), device, regions | asked, store)
    if lora is not None and not lora.is_file():
        raise FileNotFoundError(f"lora: got {str(lora)!r}, allowed is a file that exists")
    if model is None:
        model, gguf_file = map(str, load_model.smollm2())
    settings = Settings(
        model=gguf_file or model,
        text="named in each result" if suite else next(iter(texts)),
        lora=None if lora is None else lora.name,
        steps=common.check_size("steps", chosen["steps"], 0 if suite is None else 1),
        regions=regions,
        store=store,
        suite=suite,
        **dict(dtype=dtype, device=device),
    )
    settings.claim(out)
    options: Any = dict(gguf_file=gguf_file, lora=lora, dtype=number, device=device)
    for line in named:
        common.wait_for_compiler(line, device)  # compilation began in `check_search`
    _announce(plan, settings, quick)
    loads = functools.partial(load, model, content, **options)
    left = _compare(loads, settings, plan, out, jobs, minutes)
    _report(out, settings)
    if left:
        print(
            f"stopped after {minutes:g} minutes: {left} results are missing; run the same command "
            "again to continue"
        )


def _asked(ks: Sequence[int | str]) -> list[dict[str, Any]]:
    """Return the arguments of `attach` for the largest number among `ks`, and for each value that
    is not a number."""
    from kvindex_adapters.evaluate.compare.records import automatic

    numbers = [k for k in ks if not isinstance(k, str)]
    largest = [dict[str, Any](k=max(numbers))] if numbers else []
    return [*largest, *(asked for k in ks if (asked := automatic(k)))]


def _given(defaults: dict[str, Any], given: dict[str, Any]) -> dict[str, Any]:
    """Return the values of options: the given ones, and defaults for the others."""
    return defaults | {name: value for name, value in given.items() if value is not None}


def _check_fits(suite: str, given: dict[str, Any]) -> None:
    """Raise ValueError if an option is given that does not fit a suite.

    `given` maps the name of each such option to its value, or to None if it is not given.
    """
    for name, value in given.items():
        if value is not None:
            option = "-k" if name == "k" else f"--{name}"
            raise ValueError(
                f"{name}: got {value!r} with --suite {suite}, which reads each text densely, and "
                f"has its own budgets and no tasks; leave out {option}"
            )


def _field_plan(index: str | None, chosen: dict[str, Any], names: tuple[str, ...]) -> FieldPlan:
    """Make the plan of the suite `field`. Raise ValueError if an option is invalid."""
    from kvindex_adapters.evaluate.compare import suite

    methods = tuple(suite.names() if index is None else _parts("index", index))
    return suite.FieldPlan(
        methods=methods,
        names=names,
        tokens=tuple(_count("tokens", part) for part in _parts("tokens", chosen["tokens"])),
        explicit=index is not None,
    )


def _announce(plan: Plan, settings: Settings, quick: bool) -> None:
    """Print which measurements are going to be made, and how many."""
    from kvindex_adapters.cli.progress import console

    count = len(plan.tasks) * plan.tries
    if settings.suite is not None:
        cells = sum(len(plan.pairs(tokens)) for tokens in plan.tokens) * len(plan.texts)
        console.print(
            f"suite {settings.suite}: {cells} measurements of {settings.steps} steps, on "
            f"{len(plan.texts)} texts of {', '.join(f'{tokens:,}' for tokens in plan.tokens)} "
            "tokens"
        )
        if quick:
            console.print(
                f"--quick takes about {FIELD_QUICK_MINUTES} minutes of CPU time with "
                "SmolLM2-135M, and longer while other programs use the processor"
            )
        return
    what = [f"{settings.steps} steps along a text"] if settings.steps else []
    what += [f"{count} prompts"] if count else []
    console.print(
        f"measuring full attention and {', '.join(plan.indexes)} with k = "
        f"{', '.join(map(str, plan.ks))}: {' and '.join(what)}, at "
        f"{', '.join(f'{tokens:,}' for tokens in plan.tokens)} tokens"
    )
    if quick:
        console.print(
            f"--quick takes about {QUICK_MINUTES} minutes of CPU time with SmolLM2-135M and three "
            "indexes, and longer while other programs use the processor"
        )


def _compare(
    load: Load, settings: Settings, plan: Plan, out: Path, jobs: int, minutes: float | None
) -> int:
    """Run the measurements that the folder `out` lacks.

    Ctrl-C prints a message and exits with status 130.

    Returns:
        Number of results that are still missing, because `minutes` are over.
    """
    from kvindex_adapters.cli.progress import console
    from kvindex_adapters.evaluate.compare.records import Records
    from kvindex_adapters.evaluate.compare.run import Comparison
    from kvindex_adapters.evaluate.compare.workers import ParallelComparison

    options: Any = dict(settings=settings, plan=plan, records=Records(out))
    console.print("loading the model")  # transformers shows its own progress bars
    try:
        if jobs > 1:
            parallel = ParallelComparison(load, **options, jobs=jobs)
            with _progress_bar() as on_progress:
                return parallel.run(on_progress, minutes)
        comparison = Comparison(*load(), **options)
        with _progress_bar() as on_progress:
            return comparison.run(on_progress, minutes)
    except KeyboardInterrupt:
        console.print("interrupted; run the same command again to continue")
        raise typer.Exit(130) from None


def _report(out: Path, settings: Settings) -> None:
    """Write the report of all measurements in the folder `out`.

    Print the first table of the report on standard output, and failed measurements on standard
    error.
    """
    from rich.console import Console

    from kvindex_adapters.evaluate.compare.records import Records
    from kvindex_adapters.evaluate.compare.report import write_report
    from kvindex_adapters.evaluate.compare.tables import tables

    summary = write_report(out, settings, Records(out))
    first, *others = tables(summary)
    output = Console()
    if not output.is_terminal and "COLUMNS" not in os.environ:
        output = Console(width=WIDTH)
    for table in [first, *(other for other in others if other.title.startswith("The field"))]:
        output.print(_fitting(table, output.width))
    for line in _rows_in_words(summary):
        print(line)
    for row in summary["failures"]:
        what = f"{row['index'] or 'all'} at {row['task'] or 'text'}, {row['tokens']} tokens"
        print(f"not measured: {what}: {row['words']}", file=sys.stderr)
    reasons = [
        f"{row['index']} at {row['k']} rows, {row['tokens']} tokens: {row['reason']}"
        for row in summary.get("field", [])
        if row["reason"] is not None
    ]
    for reason in dict.fromkeys(reasons):  # a published budget may be one of the others
        print(f"not measured: {reason}", file=sys.stderr)
    print(out / "report.html")


def _fitting(table: Table, most: int) -> RichTable:
    """Make a table of the columns `SHOWN`. If it is wider than `most` characters, leave out columns
    of `OPTIONAL`."""
    from rich import box
    from rich.table import Table as RichTable
    from rich.text import Text

    cells = {  # name of a column -> its cells
        column: [_broken(row[i].text) if column == "index" else row[i].text for row in table.rows]
        for i, column in enumerate(table.columns)
        if column in SHOWN
    }
    parts = {column: [*column.split(), *"\n".join(cells[column]).split("\n")] for column in cells}
    widths = {column: max(map(len, parts[column])) for column in cells}
    for column in OPTIONAL:
        if sum(widths.values()) + 2 * (len(widths) - 1) > most:  # two spaces between columns
            widths.pop(column, None)
    made = RichTable(box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False, padding=(0, 0, 0, 1))
    for column, width in widths.items():
        made.add_column(column, justify="left" if column == "index" else "right", width=width)
    for row in zip(*(cells[column] for column in widths), strict=True):
        made.add_row(*map(Text, row))
    return made


def _broken(name: str) -> str:
    """Break the name of an index before options and wrappers, into lines of at most `NAME_WIDTH`
    characters where this is possible."""
    lines = [""]
    for part in re.split(r"(?=[:+])", name):
        if lines[-1] and len(lines[-1]) + len(part) > NAME_WIDTH:
            lines.append(f"  {part}")
        else:
            lines[-1] += part
    return "\n".join(lines)


def _rows_in_words(summary: dict[str, Any]) -> Iterator[str]:
    """Describe in sentences how many rows (tokens) a decode step reads.

    There is one sentence for each `k` and each length of the text. If indexes weigh rows, the
    first sentence names these indexes.
    """
    from kvindex_adapters.evaluate.compare.records import FULL

    sampled = dict.fromkeys(row["index"] for row in summary["text"] if row["weighted"])
    if sampled:
        yield (
            f"{', '.join(sampled)}: weighs rows that stand for several, which lowers coverage and "
            "recall by design; compare its KL divergence"
        )
    if "field" in summary:
        return
    seen = set()
    for row in summary["text"]:
        place = row["tokens"], row["k"]
        if row["index"] != FULL and place not in seen:
            seen.add(place)
            others = row["rows_read"] - row["rows_found"]
            how = f" with k = {row['k']}" if isinstance(row["k"], str) else ""
            yield (
                f"{row['tokens']:,} tokens, {row['index']}{how}: a step reads "
                f"{row['rows_read']:.0f} of {row['rows_full']:,.0f} rows per KV head, "
                f"{row['rows_found']:.0f} from the index and {others:.0f} of the first and newest "
                "tokens"
            )


def _plan(index: str, k: str, chosen: dict[str, Any]) -> Plan:
    """Make the plan of measurements from the options of the command.

    Raises:
        ValueError: An option is invalid, or a task is not available.
    """
    from kvindex_adapters.evaluate.compare.settings import Plan
    from kvindex_adapters.evaluate.tasks import available

    tasks = () if chosen["tasks"] == "none" else tuple(_parts("tasks", chosen["tasks"]))
    if not tasks and not chosen["steps"]:
        raise ValueError(
            "tasks, steps: got tasks none and steps 0, so there is nothing to measure; pass task "
            "names, or a number of steps above 0"
        )
    for name in tasks:
        if (missing := available(name)) is not None:
            raise ValueError(f"tasks: got {name!r}, {missing}")
    return Plan(
        indexes=tuple(_parts("index", index)),
        ks=tuple(part if part.startswith("auto") else _count("k", part) for part in _parts("k", k)),
        tasks=tasks,
        tokens=tuple(_count("tokens", part) for part in _parts("tokens", chosen["tokens"])),
        tries=chosen["tries"],
    )


def _parts(name: str, text: str) -> list[str]:
    """Split the value of an option at commas. Raise ValueError if a part is empty."""
    parts = [part.strip() for part in text.split(",")]
    if not all(parts):
        raise ValueError(
            f"{name}: got {text!r}, which has an empty part; separate the values by single commas"
        )
    return parts


def _count(name: str, text: str) -> int:
    """Convert a text such as "4096" or "4K" to a number.

    Raises:
        ValueError: The text is not a number, or the number is out of range.
    """
    from kvindex_adapters.cli.common import check_size

    try:
        return check_size(name, number_of_tokens(text), 1)
    except typer.BadParameter as error:
        raise ValueError(f"{name}: {error.message}") from None


def _texts(paths: Sequence[Path], *, suite: str | None, quick: bool) -> dict[str, str]:
    """Return the texts to measure on, by their names with a hash of their content.

    Without the option `--text`, the text is the Python language reference. A suite that is not
    quick also measures on source code.

    Raises:
        ValueError: There are several files without a suite.
        OSError: A file cannot be read.
    """
    from kvindex_adapters.cli.early import read_text
    from kvindex_adapters.evaluate.texts import python_reference, python_source

    if len(paths) > 1 and suite is None:
        raise ValueError(
            f"text: got {len(paths)} files, allowed is one; several are allowed with --suite field"
        )
    contents = {path.name: read_text(path, "text") for path in paths}
    if len(contents) < len(paths):
        raise ValueError("text: got two files with the same name, allowed are different names")
    if not paths:
        paragraphs = python_reference()
        random.Random(0).shuffle(paragraphs)
        contents["the Python reference"] = "\n\n".join(paragraphs)
        if suite is not None and not quick:
            contents["the Python library"] = python_source()[:SOURCE]
    return {f"{name} (sha256 {_digest(text)})": text for name, text in contents.items()}


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:12]


@contextmanager
def _progress_bar() -> Iterator[Progress]:
    """Show a progress bar with the current measurement and the estimated remaining time.

    If the output is not a terminal, lines of text show the progress meanwhile.
    """
    from rich import progress

    from kvindex_adapters.cli.progress import Lines, console

    columns = (
        progress.TextColumn("{task.description:<32}"),
        *(progress.BarColumn(), progress.TaskProgressColumn()),
        *(
            progress.TimeElapsedColumn(),
            progress.TextColumn("left"),
            progress.TimeRemainingColumn(),
        ),
    )
    with progress.Progress(*columns, console=console, speed_estimate_period=3600) as bar:
        task, lines = bar.add_task("reading", total=None), Lines(console)

        def update(done: int, total: int, what: str) -> None:
            bar.update(task, completed=done, total=total, description=what)
            lines.update("measuring", done, total, what)

        yield update
