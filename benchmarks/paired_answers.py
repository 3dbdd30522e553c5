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
Only a way with `sparse:` reads the prompt itself. In the options of an index, `{k}` is the number
of rows, and `{5k/2}` 2.5 times as much. On a GPU, `--index pariskv:store=device` stores rows there,
so `full` is faster.

A recording is in the memory of the model's device until the prompt has been answered in all ways.
For 57K tokens of SmolLM2-135M in bfloat16 it takes 1.3 GB, with queries 3.3 GB. The way `auto` also
needs the outputs of attention, which are as large as the queries.

`--batch 8` answers eight prompts of one task and length together, in one batch. Full attention then
uses no index. This is faster for indexes without kernels of their own, whose decode steps mostly
wait for the host.

The result has, for each prompt, the score of every way, the mean number of rows that a step has
retrieved per KV head, and with `auto` how often this was the largest number, 1,024. The summary has
the mean scores, by length and together, and their differences from the first way, with 95%
intervals (a bootstrap over prompts).

`--part 0/4` measures a fourth of the prompts, so that several processes can share the work. No
prompt is begun after `--seconds` seconds. The answers are written after each prompt, and the
summary at the end. If the file of `--json` exists, its answers are kept, and only missing ones are
measured. `--from` takes over the answers of further results with the same settings, for example of
the other parts; an answer that is in several files counts once.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Collection
from pathlib import Path
from typing import Any

import torch

from benchmarks.common import paired
from benchmarks.common.paired import Cell, Key, Way, part, way
from benchmarks.common.reading import add_model, described, loaded, write
from benchmarks.reporting.paired import one
from kvindex.layer.retrieval import row_bytes
from kvindex_adapters.decoder import Decoder, OpenSession
from kvindex_adapters.decoder.recording import Recording
from kvindex_adapters.decoder.session import Session
from kvindex_adapters.evaluate import tasks
from kvindex_adapters.evaluate.compare.suite import filled

TASKS = ("needle", "needle-multikey", "needle-multivalue", "chain", "lookup", "copy")

WAYS = ("full", "k=100", "auto:0.1", "auto:0.05", "exact@100")

LAST = 2
"""Number of tokens at the end of a prompt that each way reads itself.

With a single token, the decoder would run a decode step, which searches.
"""

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


def answers(
    decoder: Decoder,
    tokenizer: Any,
    key: Key,
    ways: list[Way],
    index: str,
    learning: Collection[str],
) -> Cell:
    """Read a prompt and answer its first question in several ways. Return the cell.

    `learning` are the indexes that learn from queries (`learning_from_queries`).
    """
    instance, cell = asked(tokenizer, key)
    question = instance.questions[0]
    prompt = torch.cat([instance.context, question.ids])
    recording = recording_for(ways, index, learning)

    def answer(name: str, group: list[Way], *, sparse: bool) -> None:
        session = opened(decoder, name, group, sparse=sparse)
        if not sparse:
            session.reader = recording.read
        decoder.read(prompt[:-LAST], session)
        for one_way in group:
            fork = session.fork(k=one_way.k, error=one_way.error)
            with fork.fully(one_way.k is None):
                made = decoder.generate(
                    prompt[-LAST:], session=fork, max_new_tokens=question.max_new_tokens
                )
            note(cell, one_way, instance.score(0, made.text), fork)

    for (name, sparse), group in grouped(ways, index).items():
        answer(name, group, sparse=sparse)  # a function, so that one index is freed before the next
    return cell


def answers_together(
    decoder: Decoder,
    tokenizer: Any,
    keys: list[Key],
    ways: list[Way],
    index: str,
    learning: Collection[str],
) -> list[Cell]:
    """Answer the first questions of several prompts in one batch, in several ways.

    Return a cell for each prompt. The number of rows in a cell is the mean of the batch. `learning`
    are the indexes that learn from queries.
    """
    instances, cells = zip(*(asked(tokenizer, key) for key in keys), strict=True)
    prompts = [torch.cat([one.context, one.questions[0].ids]) for one in instances]
    most = max(one.questions[0].max_new_tokens for one in instances)
    recording = recording_for(ways, index, learning)

    def answer(one_way: Way) -> None:
        run = decoder.start(
            prompts,
            index=None if one_way.k is None else index_of(one_way, index),
            k=paired.ROWS if one_way.k is None else one_way.k,
            attach_options=None if one_way.error is None else {"error": one_way.error},
            max_new_tokens=most,
        )
        run.session.reader = recording.read
        for cell, instance, ids in zip(cells, instances, run.cut([*run.tokens()]), strict=True):
            text = tokenizer.decode(ids, skip_special_tokens=True)
            note(cell, one_way, instance.score(0, text), run.session)

    for one_way in ways:
        answer(one_way)
    return [*cells]


def asked(tokenizer: Any, key: Key) -> tuple[tasks.Instance, Cell]:
    """Return a prompt, and its cell without answers."""
    task, tokens, seed = key
    cell: Cell = dict(task=task, tokens=tokens, seed=seed, **{name: {} for name in paired.BY_WAY})
    return tasks.make(task, tokenizer, tokens=tokens, seed=seed), cell


def recording_for(ways: list[Way], index: str, learning: Collection[str]) -> Recording:
    """Return an empty recording for a prompt that is answered in several ways."""
    dense = [one_way for one_way in ways if not one_way.sparse]
    return Recording(
        queries=any(index_of(one_way, index) in learning for one_way in dense),
        outputs=any(one_way.error is not None for one_way in dense),
    )


def note(cell: Cell, one_way: Way, score: float, session: Session) -> None:
    """Add the answer of a way, which a session has generated, to a cell."""
    name = str(one_way)
    cell["scores"][name] = score
    if (rows := mean_rows(session)) is not None:
        cell["rows"][name] = rows
    if one_way.error is not None and (found := session.report().rows_found) is not None:
        cell["ceiling"][name] = found.ceiling


def batches(missing: list[tuple[Key, list[Way]]], size: int) -> list[tuple[list[Key], list[Way]]]:
    """Divide prompts into batches of one task and length, in the order of their first prompts."""
    groups: dict[tuple[Any, ...], list[tuple[Key, list[Way]]]] = {}
    for key, ways in missing:
        groups.setdefault((*key[:2], *map(str, ways)), []).append((key, ways))
    found = [group[i : i + size] for group in groups.values() for i in range(0, len(group), size)]
    found.sort(key=lambda batch: missing.index(batch[0]))
    return [([key for key, _ in batch], batch[0][1]) for batch in found]


def grouped(ways: list[Way], index: str) -> dict[tuple[str, bool], list[Way]]:
    """Divide ways into groups that share a session: by index and by kind of prompt."""
    groups: dict[tuple[str, bool], list[Way]] = {}
    for one_way in ways:
        groups.setdefault((index_of(one_way, index), one_way.sparse), []).append(one_way)
    return groups


def index_of(one_way: Way, index: str) -> str:
    """Return the index of the session that answers in a way.

    Full attention reads the rows of the index, unless a row codec has changed them.
    """
    if one_way.k is None and "row_codec" in index:
        return "exact"
    mine = index if one_way.index is None else one_way.index
    return filled(mine, one_way.k) if isinstance(one_way.k, int) else mine


def opened(decoder: Decoder, index: str, ways: list[Way], *, sparse: bool) -> OpenSession:
    """Open a session for a prompt that is answered in several ways.

    With `k="auto"`, it measures sizes while it reads, which a fork with another error needs.
    """
    automatic = any(one_way.error is not None for one_way in ways)
    options = {"prefill": "sparse"} if sparse else None
    k: int | str = "auto" if automatic else paired.ROWS
    return decoder.session(index=index, k=k, attach_options=options)


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
    return {
        name
        for (name, sparse), group in grouped(ways, index).items()
        if opened(decoder, name, group, sparse=sparse).observes_queries
    }


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
    if missing and options.seconds > 0:
        model, tokenizer = loaded(options, dtype=getattr(torch, options.dtype))
        decoder = Decoder.of(model, tokenizer)
        learning = learning_from_queries(decoder, options.ways, options.index)
        for keys, ways in batches(missing, options.batch):
            if (start := time.monotonic()) > end:
                break
            if options.batch == 1:
                made = [answers(decoder, tokenizer, keys[0], ways, options.index, learning)]
            else:
                made = answers_together(decoder, tokenizer, keys, ways, options.index, learning)
            machines.append(result["machine"])
            cells |= paired.merged([*(cells[key] for key in keys if key in cells), *made])
            print(*made, f"{time.monotonic() - start:.1f} s", sep="\n", flush=True)
            write(summed_up(full=False), options.json)
    if cells:
        found_all = summed_up()
        write(found_all, options.json)
        print(one(found_all))


def lacking(cell: Cell | None, ways: list[Way]) -> list[Way]:
    """Return the ways in which a prompt has not been answered yet."""
    return [one_way for one_way in ways if cell is None or str(one_way) not in cell["scores"]]


if __name__ == "__main__":
    main()
