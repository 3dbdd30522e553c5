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
    stored_like,
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

    The tables show results of the shortest prompts only.
    """
    return "\n\n".join(_field(each) for each in stored_like("answers_field", result))


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
        f"**Prompts of {tokens:,} tokens, {k} retrieved tokens per KV head** ({_model(result)}). "
        f"The table is for {_counts(result, here)}. Intervals in parentheses are 95% intervals.\n\n"
        "- *Accuracy* is the fraction of correct answers in percent. Its differences are in "
        "percentage points.\n"
        "- *KL over `exact`'s* is the KL divergence of the next token's distribution from that "
        "with full attention, divided by the KL divergence with the index `exact`.\n"
        "- *Rows read* is the number of tokens whose keys and values a decode step reads per KV "
        "head."
    )
    parts = [about, table((*head, "rows read", "MiB per step"), rows)]
    parts += ["Accuracy by task, in percent:"]
    parts += [table(("index", *(f"`{name}`" for name in names)), by_task), *_failures(result)]
    return "\n\n".join([*parts, _where(result)])


def _prompts(result: Result, index: str, here: Row) -> tuple[str, ...]:
    """Return a table cell with the number of prompts that an index answered.

    Return no cell if all indexes answered the same number of prompts.
    """
    rows = some(result["accuracy"], tokens=here["tokens"], task=None)
    if len({row["count"] for row in rows if row["k"] in (None, here["k"])}) == 1:
        return ()
    row = _one(result, "accuracy", index, here, task=None)
    return ("" if row is None else f"{row['count']:,}",)


def summary(result: Result) -> str:
    """Write the fractions of correct answers of pariskv, of full attention and of exact search,
    for all lengths of the prompt together, and for the longest ones of another model."""
    full, best, mine = _three(result, None)
    counts = [
        f"{row['count']} of {_short(tokens)} tokens"
        for tokens in result["tokens"]
        if (row := _one(result, "accuracy", FULL, {"tokens": tokens}, task=None))
    ]
    said = (
        f"Correct answers about long texts: {_percent(mine)}% with `{DEFAULT}`, {_percent(full)}% "
        f"with full attention, {_percent(best)}% with exact search for the same number of tokens "
        f"(k = {_middle(result)}; {named(result['settings']['model'], None)}; prompts: "
        f"{', '.join(counts)}; [answers](docs/results/answers.md))."
    )
    others = stored_like("answers_lengths", result)
    models = [one for one in others if one["settings"]["model"] != result["settings"]["model"]]
    for other in sorted(models, key=lambda one: one["tokens"][-1])[-1:]:
        tokens = other["tokens"][-1]
        full, _, mine = _three(other, tokens)
        here = {"k": _middle(other), "tokens": tokens}
        lost = _one(other, "differences", DEFAULT, here, base=FULL, task=None)
        said += (
            f" The larger {named(other['settings']['model'], None)} loses more at "
            f"{_short(tokens)} tokens: {_percent(mine)}% against {_percent(full)}%, "
            f"{points(lost)} percentage points."
        )
    return said


def _three(result: Result, tokens: int | None) -> list[Row | None]:
    """Return the accuracy of full attention, of `exact` and of pariskv at one length of the prompt,
    or at all lengths together (None)."""
    here = {"k": _middle(result), "tokens": tokens}
    return [_one(result, "accuracy", index, here, task=None) for index in (FULL, "exact", DEFAULT)]


def lengths(result: Result) -> str:
    """Make tables of accuracy and KL divergence by prompt length, for the best indexes."""
    return "\n\n".join(_lengths(each) for each in stored_like("answers_lengths", result))


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
        f"**{k} retrieved tokens per KV head** ({_model(result)}). The table is for "
        f"{_counts(result, pooled)}. It shows the fraction of correct answers in percent, for each "
        "length of the prompt, with 95% intervals. The column *all lengths, minus full "
        "attention's* is the difference from full attention, in percentage points."
    )
    return "\n\n".join([about, table(head, rows), *_failures(result), _where(result)])


def rows(result: Result) -> str:
    """Make tables of accuracy by `k`, the number of tokens that a decode step retrieves.

    The last column has the smallest `k` that is enough: with it, and with every larger `k`, the
    accuracy is at most 2 percentage points below that of full attention.
    """
    return "\n\n".join(_rows(each) for each in stored_like("answers_rows", result))


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
        "The table shows the fraction of correct answers in percent, by the number of rows (tokens "
        f"that a decode step retrieves per KV head). It is for "
        f"{_counts(result, dict(k=ks[-1], tokens=tokens))}, and the model {_model(result)}. The "
        "last column shows the smallest number of rows that is enough. A number is called enough "
        "if the fraction of correct answers is at most 2 percentage points below that of full "
        "attention, with this number of rows and with every larger number. The ratio in "
        "parentheses is this number divided by the number that is enough with the index `exact`."
    )
    return "\n\n".join([about, table(head, lines), _where(result)])


def _needed(row: Row | None) -> str:
    """Return the text of a table cell: the smallest `k` with which an index is accurate enough.

    `k` is the number of rows that a search returns. In parentheses follows this `k` divided by the
    smallest `k` with which exact search is accurate enough, if it is known.
    """
    if row is None or row["rows"] is None:
        return "–"
    over = row["over_exact"]
    return f"{row['rows']}" if over is None else f"{row['rows']} ({over:.2f})"


def depth(result: Result) -> str:
    """Write the text that explains the picture of accuracy by prompt length and depth.

    The depth of an answer is its relative position in the prompt.
    """
    parts = []
    for each in stored_like("answers_depth", result):
        counts = [row["count"] for row in each["depths"] if row["index"] == FULL]
        parts.append(
            f"The picture is for {sum(counts):,} questions whose answer is at one place of the "
            f"text (tasks {', '.join(f'`{name}`' for name in each['tasks'])}). A decode step "
            f"retrieves {_middle(each)} tokens per KV head. Each cell of the picture has "
            f"{min(counts)} to {max(counts)} questions. The model is {_model(each)}. "
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
    """Return the number of rows `k` for tables that show the results of only one `k`."""
    return MIDDLE if MIDDLE in _ks(result) else _ks(result)[0]


def _one(result: Result, name: str, index: str, here: Row, **more: Any) -> Row | None:
    """Return one result of an index, or None if there is none.

    Args:
        result: All results.
        name: Key of the list of results to search, such as "accuracy".
        index: Name and options of the index.
        here: Values that the result must have, such as its `k`.
        more: Further values that the result must have, such as its task.
    """
    where = {**here, **more, "index": index}
    if index == FULL:
        where["k"] = None
    return next(iter(some(result[name], **where)), None)


def _ranked(result: Result, places: Sequence[Row]) -> list[str]:
    """Return the indexes that have results for all `places`, the best index first.

    A place is a combination of a `k` and a prompt length. Full attention comes before all indexes.
    Indexes are sorted by their loss of accuracy compared with full attention, and then by KL
    divergence.
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
        *(round(100 * row[name], 1) + 0.0 for name in ("difference", "low", "high"))  # no -0.0
    )


def _cost(row: Row | None) -> tuple[str, str, str]:
    """Return three table cells about the cost of an index.

    The first cell contains the KL divergence, divided by that of exact search. The second contains
    the number of tokens that a decode step reads per KV head, and the third the MiB that it reads.
    """
    if row is None:
        return "", "", ""
    ratio = "{over_exact:.2f} ({over_exact_low:.2f} to {over_exact_high:.2f})"
    shown = ratio.format(**row) if "over_exact" in row else ""
    return shown, f"{row['rows_read']:,.0f}", f"{row['step_bytes'] / 2**20:.1f}"


def _counts(result: Result, here: Row) -> str:
    """Return a phrase about the amount of data in a table.

    The phrase contains the number of prompts. If KL divergence was measured, it also contains the
    number of tokens at which it was measured.
    """
    answers = _one(result, "accuracy", FULL, here, task=None)
    count, settings = answers["count"] if answers else 0, result["settings"]
    tasks = len(result["tasks"])
    prompts = f"{count:,} prompts of {tasks} task{'s' * (tasks > 1)}"
    if not result["text"]:
        return prompts
    name = settings["text"].partition(" (")[0]
    return f"{prompts} (KL: for {settings['steps']} tokens of {name})"


def _failures(result: Result) -> Iterator[str]:
    """Yield a sentence for each measurement that failed, with the error message."""
    for row in result["failures"]:
        at = f"{row['task'] or 'text'}, {row['tokens']:,} tokens"
        yield f"Not measured: {_name(row['index'] or 'all')} at {at}: {row['words']}"


def _model(result: Result) -> str:
    settings = result["settings"]
    return f"{named(settings['model'], settings['lora'])} in {settings['dtype']}"


def _where(result: Result) -> str:
    regions = result["settings"]["regions"].items()
    sizes = ", ".join(f"`{name}={size}`" for name, size in regions)
    return f"{machine(result)} The options of `attach` were {sizes} (numbers of tokens)."


def _short(tokens: int) -> str:
    return f"{tokens // 1024}K" if tokens % 1024 == 0 else f"{tokens:,}"
