"""`kvindex compare`: indexes on one model with the same inputs, and a report of it."""

from __future__ import annotations

import functools
import hashlib
import random
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from kvindex_adapters.cli.options import (
    Device,
    Dtype,
    Local,
    Sink,
    UpdateEvery,
    announce_imports,
    check_stdout,
)

if TYPE_CHECKING:
    from kvindex_adapters.evaluate.compare.schedule import Progress
    from kvindex_adapters.evaluate.compare.settings import Plan, Settings
    from kvindex_adapters.evaluate.compare.workers import Load

USUAL: dict[str, Any] = dict(tokens="4K", tries=10, steps=256) | dict(
    tasks="needle,needle-multikey,needle-multivalue,chain,lookup,copy"
)
QUICK: dict[str, Any] = dict(tokens="2K", tries=2, steps=64, tasks="needle,needle-multikey,chain")
"""What is measured unless it is given, and with `--quick`, which is to end in minutes."""

_UNLESS = {name: f"{usual} unless given; {QUICK[name]} if quick." for name, usual in USUAL.items()}
"""What help says of them."""

SHOWN = ("index", "k", "accuracy", "KL, nats", "rows read", "ms per step")
"""Columns that the command prints; all are in the report."""


def compare(
    out: Annotated[Path, typer.Option(help="Folder of the report; what is in it is kept.")],
    model: Annotated[
        str | None,
        typer.Option(help="Folder, .gguf file or hub id of the model; SmolLM2-135M unless given."),
    ] = None,
    index: Annotated[
        str, typer.Option(help="Indexes, as name:option=value:…, with commas between them.")
    ] = "pariskv,quest,exact",
    k: Annotated[
        str, typer.Option("-k", help="Rows retrieved per KV head and step, as 32,100.")
    ] = "100",
    tasks: Annotated[
        str | None, typer.Option(help=f"Tasks, with commas between them. {_UNLESS['tasks']}")
    ] = None,
    tokens: Annotated[
        str | None, typer.Option(help=f"Lengths of a prompt, as 4K,16K. {_UNLESS['tokens']}")
    ] = None,
    tries: Annotated[
        int | None, typer.Option(help=f"Prompts of each task and length. {_UNLESS['tries']}")
    ] = None,
    text: Annotated[
        Path | None,
        typer.Option(
            help="Text file on which next tokens are compared; Python's reference unless given."
        ),
    ] = None,
    steps: Annotated[
        int | None,
        typer.Option(
            help=f"Tokens of it on which they are; 0 for answers alone. {_UNLESS['steps']}"
        ),
    ] = None,
    quick: Annotated[bool, typer.Option(help="Few and short prompts: some minutes.")] = False,
    jobs: Annotated[
        int, typer.Option(help="Processes that measure at once, each with the model.")
    ] = 1,
    gguf_file: Annotated[str | None, typer.Option(help="Name of the GGUF file inside it.")] = None,
    lora: Annotated[Path | None, typer.Option(help="Low-rank addition to the model.")] = None,
    sink: Sink = 64,
    local_window: Local = 256,
    update_every: UpdateEvery = 256,
    store: Annotated[
        str | None,
        typer.Option(help="Where rows lie: device, host or auto; as usual unless given."),
    ] = None,
    dtype: Dtype = "float32",
    device: Device = "cpu",
) -> None:
    """Compare indexes on one model: answers, divergence from full attention, rows, time, memory.

    A run that was interrupted goes on where it was; the same command with more of anything adds it.
    """
    check_stdout()
    announce_imports()
    from kvindex_adapters.cli import common
    from kvindex_adapters.evaluate.compare.measuring import load
    from kvindex_adapters.evaluate.compare.settings import Settings
    from kvindex_adapters.hf.model import load_model

    number = common.check_dtype(dtype)
    common.check_size("jobs", jobs, 1)
    load_model.check_device(device)
    regions = dict(sink=sink, local_window=local_window, update_every=update_every)
    given = dict(tasks=tasks, tokens=tokens, tries=tries, steps=steps)
    chosen = (QUICK if quick else USUAL) | {n: v for n, v in given.items() if v is not None}
    plan = _plan(index, k, chosen)
    for line in plan.indexes:
        common.check_search(line, max(plan.ks), device, regions, store)
    content, text_name = _text(text)
    if lora is not None and not lora.is_file():
        raise FileNotFoundError(f"lora: got {str(lora)!r}, allowed is a file that exists")
    if model is None:
        model, gguf_file = map(str, load_model.smollm2())
    settings = Settings(
        model=gguf_file or model,
        text=text_name,
        lora=None if lora is None else lora.name,
        steps=common.check_size("steps", chosen["steps"], 0),
        regions=regions,
        store=store,
        **dict(dtype=dtype, device=device),
    )
    settings.claim(out)
    options: Any = dict(gguf_file=gguf_file, lora=lora, dtype=number, device=device)
    for line in plan.indexes:
        common.wait_for_compiler(line, device)  # which began at the check
    _compare(functools.partial(load, model, content, **options), settings, plan, out, jobs)
    _report(out, settings)


def _compare(load: Load, settings: Settings, plan: Plan, out: Path, jobs: int) -> None:
    """Measure what is missing; an interruption is told in words, with exit status 130."""
    from kvindex_adapters.cli.progress import console
    from kvindex_adapters.evaluate.compare.records import Records
    from kvindex_adapters.evaluate.compare.run import Comparison
    from kvindex_adapters.evaluate.compare.workers import ParallelComparison

    options: Any = dict(settings=settings, plan=plan, records=Records(out))
    console.print("loading the model")  # transformers shows bars of its own
    try:
        run = (
            Comparison(*load(), **options).run
            if jobs == 1
            else ParallelComparison(load, **options, jobs=jobs).run
        )
        with _left() as on_progress:
            run(on_progress)
    except KeyboardInterrupt:
        console.print("interrupted: the same command goes on from here")
        raise typer.Exit(130) from None


def _report(out: Path, settings: Settings) -> None:
    """Write the report of all that the folder holds; print its first table, and what failed."""
    from rich.console import Console
    from rich.table import Table

    from kvindex_adapters.evaluate.compare.records import Records
    from kvindex_adapters.evaluate.compare.report import write_report
    from kvindex_adapters.evaluate.compare.tables import tables

    summary = write_report(out, settings, Records(out))
    overview, *_ = tables(summary)
    shown = [i for i, column in enumerate(overview.columns) if column in SHOWN]
    table = Table(*(overview.columns[i] for i in shown))
    for row in overview.rows:
        table.add_row(*(row[i].text for i in shown))
    Console().print(table)
    for row in summary["failures"]:
        what = f"{row['index'] or 'all'} at {row['task'] or 'text'}, {row['tokens']} tokens"
        print(f"not measured: {what}: {row['words']}", file=sys.stderr)
    print(out / "report.html")


def _plan(index: str, k: str, chosen: dict[str, Any]) -> Plan:
    """The plan that the options name. Raises ValueError, or for a task that cannot be made."""
    from kvindex_adapters.evaluate.compare.settings import Plan
    from kvindex_adapters.evaluate.tasks import available

    tasks = tuple(_parts("tasks", chosen["tasks"]))
    for name in tasks:
        if (missing := available(name)) is not None:
            raise ValueError(f"tasks: got {name!r}, {missing}")
    return Plan(
        indexes=tuple(_parts("index", index)),
        ks=tuple(_count("k", part) for part in _parts("k", k)),
        tasks=tasks,
        tokens=tuple(_count("tokens", part) for part in _parts("tokens", chosen["tokens"])),
        tries=chosen["tries"],
    )


def _parts(name: str, text: str) -> list[str]:
    """What stands between commas. Raises ValueError where nothing does."""
    parts = [part.strip() for part in text.split(",")]
    if not all(parts):
        raise ValueError(f"{name}: got {text!r}, allowed are entries with commas between them")
    return parts


def _count(name: str, text: str) -> int:
    """A number; "4K" is 4096. Raises ValueError for another, or one out of range."""
    from kvindex_adapters.cli.common import check_size

    digits = text.upper().removesuffix("K")
    if not digits.isdecimal():
        raise ValueError(f"{name}: got {text!r}, allowed is a number, as 4096 or 4K")
    return check_size(name, int(digits) * (1024 if digits != text else 1), 1)


def _text(path: Path | None) -> tuple[str, str]:
    """The text of `--text`, or prose of Python's reference; its name, with a hash of it."""
    from kvindex_adapters.cli.common import read_text
    from kvindex_adapters.evaluate.texts import python_reference

    paragraphs = python_reference() if path is None else []
    random.Random(0).shuffle(paragraphs)
    text = "\n\n".join(paragraphs) if path is None else read_text(path, "text")
    digest = hashlib.sha256(text.encode()).hexdigest()[:12]
    return text, f"{'the Python reference' if path is None else path.name} (sha256 {digest})"


@contextmanager
def _left() -> Iterator[Progress]:
    """A bar with what is done now and the time left."""
    from rich import progress

    from kvindex_adapters.cli.progress import console

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
        task = bar.add_task("reading", total=None)

        def update(done: int, total: int, what: str) -> None:
            bar.update(task, completed=done, total=total, description=what)

        yield update
