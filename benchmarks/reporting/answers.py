"""Tables of answer accuracy: by index, by prompt length, by `k` and by depth of the answer.

`k` is the number of tokens that a decode step retrieves per KV head.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from benchmarks.reporting.field import MIDDLE
from benchmarks.reporting.parts import (
    Result,
    machine,
    mean,
    named,
    some,
    stored_beside,
    table,
    values,
)
from kvindex_adapters.evaluate.compare.records import FULL

DEFAULT = "pariskv"

STRONGEST = 10
"""Number of indexes in the table by prompt length, in addition to full attention and `exact`."""

Row = dict[str, Any]


def field(result: Result) -> str:
    """Make tables of the accuracy and cost of every index, and of its accuracy by task.

    They show the shortest prompt length of the results.
    """
    return "\n\n".join(_field(each) for each in stored_beside("answers_field", result))


def _field(result: Result) -> str:
    k, tokens = _middle(result), result["tokens"][0]
    here = {"k": k, "tokens": tokens}
    rows = [
        (
            _name(index),
            *_prompts(result, index, here),
            _share(_one(result, "accuracy", index, here, task=None)),
            *(points(_one(result, "differences", index, here, base=b)) for b in (FULL, "exact")),
            *_cost(_one(result, "text", index, here)),
        )
        for index in _ranked(result, [here])
    ]
    counted = ("prompts",) if _prompts(result, FULL, here) else ()
    head = ("index", *counted, "accuracy", "minus full attention's", "minus `exact`'s")
    head = (*head, "KL over `exact`'s")
    names = list(result["tasks"])
    by_task = [
        (
            _name(index),
            *(_percent(_one(result, "accuracy", index, here, task=name)) for name in names),
        )
        for index in _ranked(result, [here])
    ]
    about = (
        f"**Prompts of {tokens:,} tokens, {k} rows per KV head** ({_model(result)}): "
        f"{_counts(result, here)}. The table shows the fraction of correct answers in percent and "
        "differences in percentage points, with 95% intervals. KL is the divergence of the next "
        "token's distribution from that of full attention."
    )
    parts = [about, table((*head, "rows read", "MiB per step"), rows)]
    parts += ["Accuracy by task, in percent:"]
    parts += [table(("index", *(f"`{name}`" for name in names)), by_task), *_failures(result)]
    return "\n\n".join([*parts, _where(result)])


def _prompts(result: Result, index: str, here: Row) -> tuple[str, ...]:
    """Return a cell with the number of prompts that an index answered.

    Return no cell if all indexes answered the same number of prompts.
    """
    rows = some(result["accuracy"], tokens=here["tokens"], task=None)
    if len({row["count"] for row in rows if row["k"] in (None, here["k"])}) == 1:
        return ()
    row = _one(result, "accuracy", index, here, task=None)
    return ("" if row is None else f"{row['count']:,}",)


def summary(result: Result) -> str:
    """Write a sentence that compares the answers of pariskv, full attention and exact search."""
    here = {"k": _middle(result), "tokens": None}
    full, best, mine = (
        _one(result, "accuracy", index, here, task=None) for index in (FULL, "exact", DEFAULT)
    )
    return (
        f"Correct answers about long texts: {_percent(mine)}% with `{DEFAULT}`, {_percent(full)}% "
        f"with full attention, {_percent(best)}% with exact search for the same number of rows "
        "([answers](docs/results/answers.md))."
    )


def lengths(result: Result) -> str:
    """Make tables of the accuracy and KL divergence of the best indexes by prompt length."""
    return "\n\n".join(_lengths(each) for each in stored_beside("answers_lengths", result))


def _lengths(result: Result) -> str:
    k, at = _middle(result), result["tokens"]
    pooled, shown = {"k": k, "tokens": None}, values(result["text"], "tokens")
    ranked = _ranked(result, [{**pooled, "tokens": n} for n in at])
    others = [index for index in ranked if index not in (FULL, "exact")][:STRONGEST]
    rows = [
        (
            _name(index),
            *(
                _share(_one(result, "accuracy", index, {**pooled, "tokens": n}, task=None))
                for n in at
            ),
            points(_one(result, "differences", index, pooled, base=FULL)),
            *(_cost(_one(result, "text", index, {**pooled, "tokens": n}))[0] for n in shown),
        )
        for index in ranked
        if index in (FULL, "exact", *others)
    ]
    head = ("index", *map(_short, at), "all lengths, minus full attention's")
    head = (*head, *(f"KL over `exact`'s, {_short(n)}" for n in shown))
    about = (
        f"**{k} rows per KV head** ({_model(result)}): {_counts(result, pooled)}. The table shows "
        "the fraction of correct answers in percent, for each length of the prompt, with 95% "
        "intervals."
    )
    return "\n\n".join([about, table(head, rows), *_failures(result), _where(result)])


def rows(result: Result) -> str:
    """Make tables of accuracy by `k`, with the smallest `k` that is enough for each index.

    `k` is enough if the accuracy is at most 2 points below that of full attention.
    """
    return "\n\n".join(_rows(each) for each in stored_beside("answers_rows", result))


def _rows(result: Result) -> str:
    ks = _ks(result)
    tokens = result["tokens"][0] if len(result["tokens"]) == 1 else None
    found = {
        index: [_one(result, "accuracy", index, dict(k=k, tokens=tokens), task=None) for k in ks]
        for index in _ranked(result, [{"k": k, "tokens": tokens} for k in ks])
    }
    needed = {row["index"]: row for row in some(result["rows_needed"], task=None, tokens=tokens)}
    lines = [
        (_name(index), *map(_percent, cells), _needed(needed.get(index)))
        for index, cells in found.items()
    ]
    head = ("index", *(f"{k} rows" for k in ks), "fewest rows that are enough (over `exact`'s)")
    about = (
        "The table shows the fraction of correct answers in percent, for each number of rows per "
        f"KV head ({_model(result)}; {_counts(result, dict(k=ks[-1], tokens=tokens))}). A number "
        "of rows is enough if the fraction stays within 2 percentage points of that of full "
        "attention."
    )
    return "\n\n".join([about, table(head, lines), _where(result)])


def _needed(row: Row | None) -> str:
    """Return a cell with the smallest `k` that is enough, and its ratio to that of exact search."""
    if row is None or row["rows"] is None:
        return "–"
    over = row["over_exact"]
    return f"{row['rows']}" if over is None else f"{row['rows']} ({over:.2f})"


def depth(result: Result) -> str:
    """Write a sentence that explains the picture of accuracy by prompt length and depth."""
    parts = []
    for each in stored_beside("answers_depth", result):
        counts = [row["count"] for row in each["depths"] if row["index"] == FULL]
        parts.append(
            f"The picture shows {sum(counts):,} questions whose answer is at one place of the text "
            f"(tasks {', '.join(f'`{name}`' for name in each['tasks'])}), with {_middle(each)} "
            f"rows per KV head. Each cell of the picture has {min(counts)} to {max(counts)} "
            f"questions. The model is {_model(each)}. "
            f"{_where(each)}"
        )
    return "\n\n".join(parts)


def depth_cells(result: Result, index: str) -> dict[tuple[int, float], float]:
    """Return the accuracy of full attention by (prompt length, depth of the answer).

    For any other index, return the difference of its accuracy from that of full attention.
    """
    k = _middle(result)
    full = {_place(row): row for row in some(result["depths"], index=FULL)}
    if index == FULL:
        return {place: row["accuracy"] for place, row in full.items()}
    return {
        _place(row): row["accuracy"] - full[_place(row)]["accuracy"]
        for row in some(result["depths"], index=index, k=k)
        if row["count"] == full[_place(row)]["count"]  # both answered the same prompts
    }


def _place(row: Row) -> tuple[int, float]:
    return row["tokens"], row["depth"]


def _ks(result: Result) -> list[int]:
    return sorted(set(values(result["accuracy"], "k")) - {None})


def _middle(result: Result) -> int:
    """Return the `k` for tables that show a single value of `k`."""
    return MIDDLE if MIDDLE in _ks(result) else _ks(result)[0]


def _one(result: Result, name: str, index: str, here: Row, **more: Any) -> Row | None:
    """Return the row for an index in the table `name` of the results, or None if there is none.

    `here` and `more` are values that the row must have, such as its task.
    """
    where = {**here, **more, "index": index}
    if index == FULL:
        where["k"] = None
    return next(iter(some(result[name], **where)), None)


def _ranked(result: Result, places: Sequence[Row]) -> list[str]:
    """Return the indexes that were measured at all `places`, the best index first.

    A place is a `k` and a prompt length. Full attention comes before all indexes. Indexes are
    sorted by their loss of accuracy against full attention, and then by KL divergence.
    """
    found = {}
    for index in values(result["accuracy"], "index"):
        answers = [_one(result, "accuracy", index, here, task=None) for here in places]
        lost = [_one(result, "differences", index, here, base=FULL) for here in places]
        if None not in answers:
            text = [row for row in result["text"] if row["index"] == index]
            gained = sum(row["difference"] for row in lost if row is not None)
            found[index] = index != FULL, -gained, mean(text, "kl")
    return sorted(found, key=found.__getitem__)


def _name(index: str) -> str:
    return index if index == FULL else f"`{index}`"


def _percent(row: Row | None) -> str:
    return f"{100 * row['accuracy']:.1f}" if row else ""


def _share(row: Row | None) -> str:
    return f"{_percent(row)} ({100 * row['low']:.0f} to {100 * row['high']:.0f})" if row else ""


def points(row: Row | None) -> str:
    """Return a difference in percentage points with its 95% interval."""
    if row is None:
        return ""
    return "{:+.1f} ({:+.1f} to {:+.1f})".format(
        *(100 * row[name] for name in ("difference", "low", "high"))
    )


def _cost(row: Row | None) -> tuple[str, str, str]:
    """Return three cells: the KL divergence divided by that of exact search, the tokens that a step
    reads per KV head, and the MiB that it reads."""
    if row is None:
        return "", "", ""
    ratio = "{over_exact:.2f} ({over_exact_low:.2f} to {over_exact_high:.2f})"
    shown = ratio.format(**row) if "over_exact" in row else ""
    return shown, f"{row['rows_read']:,.0f}", f"{row['step_bytes'] / 2**20:.1f}"


def _counts(result: Result, here: Row) -> str:
    """Return a phrase with the number of prompts, and the number of compared tokens of a text."""
    answers = _one(result, "accuracy", FULL, here, task=None)
    count, settings = answers["count"] if answers else 0, result["settings"]
    tasks = len(result["tasks"])
    prompts = f"{count:,} prompts of {tasks} task{'s' * (tasks > 1)}"
    if not result["text"]:
        return prompts
    return f"{prompts}, and {settings['steps']} steps along {settings['text'].partition(' (')[0]}"


def _failures(result: Result) -> Iterator[str]:
    """Yield a sentence for each measurement that failed, with the error message."""
    for row in result["failures"]:
        at = f"{row['task'] or 'text'}, {row['tokens']:,} tokens"
        yield f"Not measured: {_name(row['index'] or 'all')} at {at}: {row['words']}"


def _model(result: Result) -> str:
    settings = result["settings"]
    return f"{named(settings['model'], settings['lora'])}, {settings['dtype']}"


def _where(result: Result) -> str:
    regions = result["settings"]["regions"].items()
    sizes = ", ".join(f"{name.replace('_', ' ')} {size}" for name, size in regions)
    return f"{machine(result)} Sizes of the layers' regions, in tokens: {sizes}."


def _short(tokens: int) -> str:
    return f"{tokens // 1024}K" if tokens % 1024 == 0 else f"{tokens:,}"
