"""Tasks from local files of LongBench, InfiniteBench, AIME and MATH, in their published formats.

A file contains one JSON object per line. From a text that is too long, the middle is removed, as in
LongBench.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from typing import Any

from kvindex.core import check
from kvindex_adapters.evaluate.tasks import infinitebench, longbench, mathematics
from kvindex_adapters.evaluate.tasks.draft import Draft, encode, longest, most_parts
from kvindex_adapters.evaluate.tasks.instance import Instance
from kvindex_adapters.evaluate.tasks.registry import Task, family

FORMATS: tuple[tuple[frozenset[str], Callable[[dict[str, Any], str], Draft]], ...] = tuple(
    (module.FIELDS, module.draft) for module in (longbench, infinitebench, mathematics)
)
"""For each format, the fields that its lines have, and the function that makes a prompt of a line.
"""


@family("file")
def from_file(path: str) -> Task:
    """Make a `Task` whose prompts are the lines of a file.

    The seed of a prompt selects the line: seed `n` gives line `n % lines`, counted from 0.
    """
    name = f"file:{path}"

    def make(tokenizer: Any, tokens: int, seed: int) -> Instance:
        lines = _lines(path, Path(path).stat().st_mtime_ns)
        draft = _read(lines[seed % len(lines)], Path(path).stem)
        return encode(tokenizer, _cut(tokenizer, draft, tokens), task=name, seed=seed)

    return Task(name, f"a line of {Path(path).name}", make, lambda: _missing(path))


def _missing(path: str) -> str | None:
    return None if Path(path).is_file() else "allowed is a file that exists"


@lru_cache(maxsize=1)
def _lines(path: str, changed: int) -> list[str]:
    """Return the lines of a file that are not blank.

    `changed` is the time at which the file was last changed. It is an argument only so that the
    cached result is not used after a change.
    """
    found = [line for line in Path(path).read_text("utf-8-sig").split("\n") if line.strip()]
    if not found:
        raise ValueError(f"file: got {path!r}, which is empty; pass a file of JSON lines")
    return found


def _read(line: str, stem: str) -> Draft:
    """Make a prompt from a line of a benchmark's file.

    Raise ValueError if the line has none of the known formats.
    """
    record = _record(line)
    for fields, draft in FORMATS:
        if fields <= record.keys():
            return draft(record, stem)
    allowed = " or ".join(str(sorted(fields)) for fields, _ in FORMATS)
    raise ValueError(f"file: got a line with the fields {sorted(record)}, allowed is {allowed}")


def _record(line: str) -> dict[str, Any]:
    """Parse a line of JSON, and check the types of its fields."""
    try:
        record = json.loads(line)
    except ValueError as error:
        raise ValueError(f"file: got the line {line[:40]!r}, allowed is JSON ({error})") from error
    if not isinstance(record, dict):
        raise ValueError(f"file: got the line {line[:40]!r}, allowed is a JSON object")
    for name in {"context", "input", "problem", "solution"} & record.keys():
        check.text(name, record[name])
    if not record.get("answers", ["one"]):
        raise ValueError("answers: got an empty list, allowed is at least one answer")
    return record


def _cut(tokenizer: Any, draft: Draft, tokens: int) -> Draft:
    """Remove the middle of the context, so that the prompt has at most `tokens` tokens."""
    if longest(tokenizer, draft) <= tokens:
        return draft
    ids = tokenizer(draft.context, add_special_tokens=False)["input_ids"]

    def ends_of(count: int) -> Draft:
        ends = ids[: count // 2], ids[len(ids) - (count - count // 2) :]
        return replace(draft, context="".join(map(tokenizer.decode, ends)))

    most = most_parts(lambda n: longest(tokenizer, ends_of(n)), tokens, least=0, most=len(ids))
    return ends_of(most)
