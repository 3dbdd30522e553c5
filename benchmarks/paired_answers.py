"""Count right answers to the same questions in several ways, for example with full attention.

    python -m benchmarks.paired_answers [--ways WAY …] [--tasks NAME …] [--tokens N …] [--tries N]
        [--index SPEC] [--batch N] [--part I/N] [--from FILE …] [--seconds S] [--dtype …]
        [--model …] [--gguf-file …] [--lora FILE] [--device …] [--json OUT]

The decoder reads a prompt of a task, and answers its first question greedily in each way:

    full            full attention
    k=N             the index, with N rows (keys and values of tokens) per KV head and step
    auto:ERROR      the index, with as many rows as the error asks for; auto means auto:0.1
    INDEX@N         another index with N rows, for example exact@100 or h2o:budget={k}@512
    INDEX@auto:ERROR  another index with as many rows as the error asks for
    sparse:WAY      one of these after sparse attention in the prompt; sparse means sparse:k=100

The model reads each prompt once with full attention. Keys and values, and queries if an index
learns from them, are recorded, and each index is built from the recording, one after the other.
Ways with the same index and options share it, with any number of rows: it is built once. Only a way
with `sparse:` reads the prompt itself. In the options of an index, `{k}` is the number of rows, and
`{5k/2}` 2.5 times as much. The rows of an index are stored on the device of the model, unless the
index names another `store`.

`--batch 8` answers eight prompts of one task and length together, in one batch. This is faster for
indexes without kernels of their own, whose decode steps mostly wait for the host.

A batch is answered in all ways before the next one begins: first with full attention, then with the
indexes that learn from queries, then with those that need attention outputs (`auto`), then with the
others. Prompts that already have answers come before those that have none. The answers are written
after each way, with the seconds that it took: reading the prompts, building the index (counted for
the first way of an index), and answering. No way is begun after `--seconds` seconds. If the file of
`--json` exists, its answers are kept, and only missing ones are measured. So a run that is stopped
loses the answers of one way, and a later run first completes its prompts.

The recording is in memory until its batch has been answered, and one index at a time. For
SmolLM2-135M in bfloat16, the keys and values of a token take 23 KB: 1.5 GB for a batch of four
prompts of 16,384 tokens. The recording takes 2.5 times as much with queries, which are freed after
the indexes that learn from them. Recording and index together take up to 5.6 times as much as keys
and values, and up to 3.5 times as much without queries (most with `ctkvr` and `socket`, on a CPU).
The way `auto` also needs the outputs of attention, which are as large as the queries.

The result has, for each prompt, the score of every way, the mean number of rows that a step has
retrieved per KV head, and with `auto` how often this was the largest number, 1,024. The summary has
the mean scores, by length and together, and their differences from the first way, with 95%
intervals (a bootstrap over prompts).

`--part 0/4` measures a fourth of the prompts, so that several processes can share the work.
`--from` takes over the answers of further results with the same settings, for example of the other
parts; an answer that is in several files counts once. The summary is written at the end.
"""

from __future__ import annotations

import argparse
import gc
import json
import time
from collections.abc import Collection, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from benchmarks.common import paired
from benchmarks.common.paired import Cell, Key, Way, part, way
from benchmarks.common.reading import add_model, described, loaded, write
from benchmarks.reporting.paired import one
from kvindex.core.config import parse_spec
from kvindex.layer.retrieval import row_bytes
from kvindex_adapters.decoder import Decoder
from kvindex_adapters.decoder.recording import Recording
from kvindex_adapters.decoder.run import Run
from kvindex_adapters.decoder.session import Session
from kvindex_adapters.evaluate import tasks
from kvindex_adapters.evaluate.compare.suite import filled

TASKS = ("needle", "needle-multikey", "needle-multivalue", "chain", "lookup", "copy")

WAYS = ("full", "k=100", "auto:0.1", "auto:0.05", "exact@100")

PARTS = ("reading", "building", "answering")
"""Parts of a way whose seconds are measured."""

SAME = ("model", "lora", "index", "dtype")
"""Names of the settings that results must share."""


def arguments(given: list[str] | None = None) -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--ways", nargs="+", type=way, default=[*map(way, WAYS)], metavar="WAY")
    parser.add_argument("--tasks", nargs="+", default=list(TASKS))
    parser.add_argument("--tokens", nargs="+", type=int, default=[16384, 30720])
    parser.add_argument("--tries", type=int, default=10, help="Prompts of each task and length")
    parser.add_argument("--index", default="pariskv")
    parser.add_argument("--batch", type=int, default=1, help="Prompts answered together")
    parser.add_argument("--part", type=part, default=(0, 1), metavar="I/N")
    parser.add_argument("--from", dest="earlier", nargs="*", type=Path, default=[], metavar="FILE")
    parser.add_argument("--seconds", type=float, default=600.0)
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="bfloat16")
    add_model(parser)
    found = parser.parse_args(given)
    if found.batch < 1:
        parser.error(f"--batch: got {found.batch}, allowed is at least 1")
    if found.batch > 1 and any(one_way.sparse for one_way in found.ways):
        parser.error("--batch: got a way with sparse prompts, which a batch does not support")
    found.ways = list(dict.fromkeys(found.ways))
    return found


def prompts(given: argparse.Namespace) -> list[Key]:
    """Return the prompts of this part, in the order in which they are measured.

    Each seed is divided among the parts in another way, so that every part gets all tasks and
    lengths.
    """
    keys = [
        (task, tokens, seed)
        for seed in range(given.tries)
        for tokens in given.tokens
        for task in given.tasks
    ]
    (number, count), each = given.part, len(given.tokens) * len(given.tasks)
    return [key for i, key in enumerate(keys) if (i % each + i // each) % count == number]


class Group(NamedTuple):
    """Ways that share an index, which is built once for all of them.

    Args:
        index: The index; None for full attention without an index.
        sparse: Whether the prompt is read with sparse attention, instead of from the recording.
        ways: The ways.
    """

    index: str | None
    sparse: bool
    ways: list[Way]

    @property
    def automatic(self) -> bool:
        """True if a way has `k="auto"`, which needs the outputs of attention in the prompt."""
        return any(one_way.error is not None for one_way in self.ways)


class Clock:
    """Measures the seconds of the parts of a way: reading, building and answering."""

    def __init__(self, device: torch.device) -> None:
        self._device, self._part, self._since = device, "", 0.0
        self._seconds: dict[str, float] = {}

    def begin(self, part: str) -> None:
        """End the present part, and begin another one."""
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        now = time.perf_counter()
        if self._part:
            self._seconds[self._part] = self._seconds.get(self._part, 0.0) + now - self._since
        self._part, self._since = part, now

    def stop(self) -> dict[str, float]:
        """End the present part. Return the seconds of each part since the last call."""
        self.begin("")
        seconds, self._seconds = self._seconds, {}
        return {part: round(seconds[part], 2) for part in PARTS if part in seconds}


def answers(
    decoder: Decoder,
    tokenizer: Any,
    keys: list[Key],
    ways: list[Way],
    index: str,
    learning: Collection[str],
) -> Iterator[list[Cell]]:
    """Answer the first questions of several prompts of a task, together in one batch.

    After each way, yield a cell with its answer for each prompt. Rows and seconds in a cell are
    those of the whole batch. `learning` are the indexes that learn from queries
    (`learning_from_queries`).
    """
    recording, clock = Recording(queries=True, outputs=True), Clock(decoder.device)
    clock.begin("reading")
    instances = [tasks.make(task, tokenizer, tokens=n, seed=seed) for task, n, seed in keys]
    prompts = [torch.cat([one.context, one.questions[0].ids]) for one in instances]
    most = max(one.questions[0].max_new_tokens for one in instances)
    groups = grouped(ways, index, learning)
    for i, group in enumerate(groups):
        queries, outputs = zip(*(needs(each, learning) for each in groups[i:]), strict=True)
        recording.forget(queries=not any(queries), outputs=not any(outputs))
        clock.begin("building")
        run = begun(decoder, prompts, group, max_new_tokens=most)
        for one_way, session, ids in answered(run, group, recording, clock):
            seconds, cells = clock.stop(), []
            for key, instance, answer in zip(keys, instances, ids, strict=True):
                text = tokenizer.decode(answer, skip_special_tokens=True)
                cells.append(cell_of(key, one_way, instance.score(0, text), session, seconds))
            yield cells
            del session
        del run
        free(decoder.device)


def answered(
    run: Run, group: Group, recording: Recording, clock: Clock
) -> Iterator[tuple[Way, Session, list[Tensor]]]:
    """Build the index of a group, and answer in its ways, each in a copy of the session.

    Yield each way, the session with the answers, and their ids.
    """

    def read(*given: Any) -> Tensor:
        clock.begin("reading")
        recording.record(*given[:-2])
        clock.begin("building")
        return recording.read(*given)

    if group.sparse:
        clock.begin("reading")
    else:
        run.session.reader = read
    logits = run.read()
    run.session.begin_decoding()
    for one_way in group.ways:
        clock.begin("answering")
        session = run.session if one_way is group.ways[-1] else run.session.duplicate()
        if one_way.k is not None:
            session.set_rows(one_way.k, error=one_way.error)
        with session.fully(one_way.k is None):
            tokens = [*replace(run, session=session).tokens(logits=logits)]
        yield one_way, session, run.cut(tokens)
        del session


def begun(decoder: Decoder, prompts: list[Tensor], group: Group, **options: Any) -> Run:
    """Prepare to answer prompts in the ways of a group.

    A layer reads the prompts in one chunk, so that an index receives them in one append. Some
    indexes learn from their first append, and their papers assume that it is the whole prompt. With
    `k="auto"`, the session measures sizes while it reads, which a way with another error
    needs. Rows are stored on the device of the model, if the index names no other `store`.
    """
    options["chunk"] = max(2, *map(len, prompts))
    if group.index is None:
        return decoder.start(prompts, index=None, **options)
    attach: dict[str, Any] = {"prefill": "sparse"} if group.sparse else {}
    if "store" not in parse_spec(group.index.partition("+")[0])[1]:
        attach["index_options"] = {"store": "device"}
    k: int | str = "auto" if group.automatic else paired.ROWS
    return decoder.start(prompts, index=group.index, k=k, attach_options=attach, **options)


def free(device: torch.device) -> None:
    """Return unused memory to the device, for other processes."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()


def cell_of(
    key: Key, one_way: Way, score: float, session: Session, seconds: dict[str, float]
) -> Cell:
    """Return a cell with the answer of one way, which a session has generated."""
    task, tokens, seed = key
    name, rows = str(one_way), mean_rows(session)
    cell: Cell = dict(task=task, tokens=tokens, seed=seed, scores={name: score})
    cell |= dict(rows={} if rows is None else {name: rows}, ceiling={}, seconds={name: seconds})
    if one_way.error is not None and (found := session.report().rows_found) is not None:
        cell["ceiling"][name] = found.ceiling
    return cell


def batches(missing: list[tuple[Key, list[Way]]], size: int) -> list[tuple[list[Key], list[Way]]]:
    """Divide prompts into batches of one task and length, in the order of their first prompts."""
    groups: dict[tuple[Any, ...], list[tuple[Key, list[Way]]]] = {}
    for key, ways in missing:
        groups.setdefault((*key[:2], *map(str, ways)), []).append((key, ways))
    found = [group[i : i + size] for group in groups.values() for i in range(0, len(group), size)]
    found.sort(key=lambda batch: missing.index(batch[0]))
    return [([key for key, _ in batch], batch[0][1]) for batch in found]


def grouped(ways: list[Way], index: str, learning: Collection[str] = ()) -> list[Group]:
    """Divide ways into groups that share an index, in the order in which they are measured.

    The first is full attention. Then come the groups that need the queries of the recording, and
    then those that need its outputs.
    """
    groups: dict[tuple[str | None, bool], list[Way]] = {}
    for one_way in ways:
        groups.setdefault((index_of(one_way, index), one_way.sparse), []).append(one_way)
    found = [Group(*which, some) for which, some in groups.items()]

    def place(group: Group) -> tuple[bool, ...]:
        return group.index is not None, *(not needed for needed in needs(group, learning))

    return sorted(found, key=place)


def needs(group: Group, learning: Collection[str]) -> tuple[bool, bool]:
    """Return whether a group needs the queries of the recording, and whether it needs outputs."""
    return not group.sparse and group.index in learning, not group.sparse and group.automatic


def index_of(one_way: Way, index: str) -> str | None:
    """Return the index of the session that answers in a way; None for full attention without one.

    After a sparse prompt, full attention reads the rows of the index, unless a row codec has
    changed them.
    """
    if one_way.k is None and not one_way.sparse:
        return None
    if one_way.k is None and "row_codec" in index:
        return "exact"
    mine = index if one_way.index is None else one_way.index
    return filled(mine, one_way.k) if isinstance(one_way.k, int) else mine


def mean_rows(session: Session) -> float | None:
    """Return the mean number of rows that steps of a session have retrieved per KV head.

    None if no step has searched.
    """
    indexes = session.indexes()
    if not indexes or not (report := session.report()).steps:
        return None
    row = sum(row_bytes(index) * index.geometry.kv_heads for index in indexes)
    return report.bytes_fetched / (row * len(session.padding)) / report.steps


def learning_from_queries(decoder: Decoder, ways: list[Way], index: str) -> set[str]:
    """Return the indexes that learn from the queries of a prompt.

    Raise ValueError if an index does not exist, or cannot answer in the ways that use it.
    """
    prompt, found = [torch.zeros(1, dtype=torch.int64)], set()
    for group in grouped(ways, index):
        if begun(decoder, prompt, group).session.observes_queries and group.index is not None:
            found.add(group.index)
    return found


def earlier(files: list[Path], result: dict[str, Any]) -> tuple[list[Cell], list[dict[str, Any]]]:
    """Read the cells and machines of earlier results.

    Raise SystemExit if one was measured with other settings than `result` has.
    """
    cells, machines = list[Cell](), list[dict[str, Any]]()
    for file in files:
        before = json.loads(file.read_text(encoding="utf-8"))
        for name in SAME:
            if before[name] != result[name]:
                raise SystemExit(
                    f"--from: got {file} with {name}={before[name]!r}, allowed is {result[name]!r}"
                )
        cells += before["cells"]
        machines += before.get("machines", [before["machine"]])
    return cells, machines


def main(given: list[str] | None = None) -> None:
    """Measure, print a line for each prompt, and write the results."""
    options = arguments(given)
    end = time.monotonic() + options.seconds
    result = {**described(options), "index": options.index, "dtype": options.dtype}
    own = [options.json] if options.json is not None and options.json.exists() else []
    found, machines = earlier([*own, *options.earlier], result)
    cells = paired.merged(found)

    def summed_up(*, full: bool = True) -> dict[str, Any]:
        every = [*cells.values()]
        ways = paired.measured(every, [*map(str, options.ways)])
        some = [machine for i, machine in enumerate(machines) if machine not in machines[:i]]
        more = {"machine": some[0]} | ({"machines": some} if len(some) > 1 else {})
        lines = [*paired.summary(every, ways)] if full else []
        about = {"ways": ways, "summary": lines, "cells": every}
        return result | more | about

    missing = [(key, lacking(cells.get(key), options.ways)) for key in prompts(options)]
    missing = [(key, ways) for key, ways in missing if ways]
    missing.sort(key=lambda one: one[0] not in cells)  # prompts with answers come first
    if missing and options.seconds > 0:
        model, tokenizer = loaded(options, dtype=getattr(torch, options.dtype))
        decoder = Decoder.of(model, tokenizer)
        learning = learning_from_queries(decoder, options.ways, options.index)
        todo = (
            made
            for keys, ways in batches(missing, options.batch)
            for made in answers(decoder, tokenizer, keys, ways, options.index, learning)
        )
        while time.monotonic() <= end and (made := next(todo, None)) is not None:
            machines.append(result["machine"])
            cells = paired.merged([*cells.values(), *made])
            print(told(made, decoder.device), flush=True)
            write(summed_up(full=False), options.json)
    if cells:
        found_all = summed_up()
        write(found_all, options.json)
        print(one(found_all))


def told(cells: list[Cell], device: torch.device) -> str:
    """Return a line about the answers of a batch in one way: times, and peak of device memory."""
    first = cells[0]
    [(name, seconds)] = first["seconds"].items()
    seeds = ", ".join(str(cell["seed"]) for cell in cells)
    score = sum(cell["scores"][name] for cell in cells) / len(cells)
    parts = [f"{part} {number:.1f} s" for part, number in seconds.items()]
    if device.type == "cuda":
        parts.append(f"{torch.cuda.max_memory_allocated(device) / 2**30:.1f} GiB")
        torch.cuda.reset_peak_memory_stats(device)
    about = f"{first['task']}, {first['tokens']:,} tokens, seeds {seeds}: {name}"
    return f"{about}: score {score:.2f}, {', '.join(parts)}"


def lacking(cell: Cell | None, ways: list[Way]) -> list[Way]:
    """Return the ways in which a prompt has not been answered yet."""
    return [one_way for one_way in ways if cell is None or str(one_way) not in cell["scores"]]


if __name__ == "__main__":
    main()
