"""Local files of LongBench, InfiniteBench, AIME and MATH: JSON lines in their published formats.

Texts that are too long are cut in the middle, as LongBench does.
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
"""Each format: the fields that its lines have, and the function that makes a draft from a line."""


@family("file")
def from_file(path: str) -> Task:
    """Make the task of a file. Seed n uses line n, counted from 0, modulo the number of lines."""
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
    """Return the lines of a file. The file is read again only if it has changed."""
    found = [line for line in Path(path).read_text("utf-8-sig").split("\n") if line.strip()]
    if not found:
        raise ValueError(f"file: got {path!r}, which is empty; allowed is a JSON object a line")
    return found


def _read(line: str, stem: str) -> Draft:
    """Make the draft of a line. Raise ValueError for an unknown format."""
    record = _record(line)
    for fields, draft in FORMATS:
        if fields <= record.keys():
            return draft(record, stem)
    allowed = " or ".join(str(sorted(fields)) for fields, _ in FORMATS)
    raise ValueError(f"file: got a line with {sorted(record)}, allowed is {allowed}")


def _record(line: str) -> dict[str, Any]:
    """Parse a line, and check the types of its fields."""
    try:
        record = json.loads(line)
    except ValueError as error:
        raise ValueError(f"file: got {line[:40]!r}, allowed is JSON ({error})") from error
    if not isinstance(record, dict):
        raise ValueError(f"file: got {line[:40]!r}, allowed is an object of JSON")
    for name in {"context", "input", "problem", "solution"} & record.keys():
        check.text(name, record[name])
    if not record.get("answers", ["one"]):
        raise ValueError("answers: got none, allowed is at least one")
    return record


def _cut(tokenizer: Any, draft: Draft, tokens: int) -> Draft:
    """Cut the draft's context in the middle, so that the prompt fits into the tokens."""
    if longest(tokenizer, draft) <= tokens:
        return draft
    ids = tokenizer(draft.context, add_special_tokens=False)["input_ids"]

    def ends_of(count: int) -> Draft:
        ends = ids[: count // 2], ids[len(ids) - (count - count // 2) :]
        return replace(draft, context="".join(map(tokenizer.decode, ends)))

    most = most_parts(lambda n: longest(tokenizer, ends_of(n)), tokens, least=0, most=len(ids))
    return ends_of(most)
