"""Summarize the results of a comparison as tables: accuracy, differences, divergence and costs."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from itertools import pairwise, product
from typing import Any

from kvindex_adapters.evaluate import tasks
from kvindex_adapters.evaluate.compare.depths import depth_rows
from kvindex_adapters.evaluate.compare.records import (
    ANSWERS,
    FAILURE,
    FULL,
    SKIPPED,
    TEXT,
    Key,
    Record,
    Records,
)
from kvindex_adapters.evaluate.compare.settings import Settings
from kvindex_adapters.evaluate.compare.statistics import (
    Interval,
    bootstrap,
    bootstrap_ratio,
    holm,
    in_blocks,
    sign_test,
    wilson,
)

SCHEMA = "kvindex.compare/1"

BLOCK, FEWEST = 16, 8
"""`BLOCK`: number of successive tokens of a text that the bootstrap resamples together.

`FEWEST`: smallest number of such blocks. If a text has too few tokens, blocks are shorter.
"""

MARGIN = 0.02
"""Largest loss of accuracy with which an index still counts as equal to full attention."""

Row = dict[str, Any]
Who = tuple[str, int | str]
"""The name of an index and its `k`. For full attention, the name is `FULL` and `k` is 0."""
Instances = dict[tuple[Any, int, Any], float]
"""Maps (task, tokens, seed) of a prompt to the fraction of its questions that were answered right.
"""


def summarize(settings: Settings, records: Records) -> dict[str, Any]:
    """Make the content of the file `results.json`, which docs/adapters/compare.md describes."""
    answers, found = _answers(records), _rows_found(records)
    bases = _bases(list(answers))
    differences = [row for base in bases for row in _differences(answers, base)]
    return {
        "schema": SCHEMA,
        "settings": asdict(settings),
        "machines": records.machines,
        "tasks": {task: _asks(task) for task in _sorted(answers, 0)},
        "tokens": _sorted(answers, 1),
        "accuracy": [
            row for who in answers for row in _accuracy(who, answers[who], found.get(who, {}))
        ],
        "differences": _corrected(differences),
        "rows_needed": _rows_needed(differences),
        "text": _texts(records),
        "failures": [
            {"index": key.index, "k": key.k, "task": key.task, "tokens": key.tokens, **record}
            for key, record in records.of(FAILURE)
        ],
        "depths": list(depth_rows(records)),
        **({} if settings.suite is None else {"field": field_rows(records)}),
    }


def _answers(records: Records) -> dict[Who, Instances]:
    """Return the scores of all prompts for full attention, then for each index and `k`."""
    found: dict[Who, Instances] = {(FULL, 0): {}}
    for key, record in records.of(ANSWERS):
        fraction = sum(record["scores"]) / len(record["scores"])
        found.setdefault((str(key.index), key.k), {})[key.task, key.tokens, key.seed] = fraction
    return {who: dict(sorted(instances.items())) for who, instances in found.items()}


def _rows_found(records: Records) -> dict[Who, Instances]:
    """Return how many rows the steps of answers have retrieved, if searches choose the number."""
    found: dict[Who, Instances] = {}
    for key, record in records.of(ANSWERS):
        if "rows_found" in record:
            rows = found.setdefault((str(key.index), key.k), {})
            rows[key.task, key.tokens, key.seed] = record["rows_found"]
    return found


def _asks(task: str) -> str:
    """Return the description of a task, or "" if no task has this name any more."""
    try:
        return tasks.describe(task)
    except ValueError:
        return ""


def _sorted(answers: dict[Who, Instances], place: int) -> list[Any]:
    """Return all task names (`place` = 0) or all prompt lengths (`place` = 1) in `answers`.

    The list is sorted and contains each value once.
    """
    return sorted({of[place] for instances in answers.values() for of in instances})


def _scopes(instances: Instances) -> Iterator[tuple[str | None, int | None, list[Any]]]:
    """Yield each combination of a task and a prompt length, with the prompts that belong to it.

    The task None stands for all tasks, and the length None for all lengths.
    """
    names: list[str | None] = [None, *sorted({task for task, _, _ in instances})]
    lengths: list[int | None] = [None, *sorted({tokens for _, tokens, _ in instances})]
    for task, tokens in product(names, lengths):
        some = [of for of in instances if of[0] in (task or of[0],) and of[1] in (tokens or of[1],)]
        if some:
            yield task, tokens, some


def _accuracy(who: Who, instances: Instances, rows: Instances) -> Iterator[Row]:
    for task, tokens, some in _scopes(instances):
        scores = [instances[of] for of in some]
        about = {**_of(who), "task": task, "tokens": tokens, "count": len(some)}
        about |= {"accuracy": sum(scores) / len(some), **_ends(wilson(scores))}
        known = [rows[of] for of in some if of in rows]
        yield about | {"rows_found": sum(known) / len(known)} if known else about


def _bases(all_of: list[Who]) -> list[str]:
    """Return what each index is compared with: full attention, `exact` and the first index."""
    named = [index for index, _ in all_of if index != FULL]
    return list(dict.fromkeys([FULL, *(i for i in named if i == "exact"), *named[:1]]))


def _differences(answers: dict[Who, Instances], base: str) -> Iterator[Row]:
    """Yield the difference in accuracy between each index and `base` with the same `k`.

    Only prompts that were answered both with the index and with `base` count.
    """
    for who, instances in answers.items():
        other = answers.get((base, 0 if base == FULL else who[1]))
        if other is None or who[0] in (base, FULL):
            continue
        shared = {of: fraction - other[of] for of, fraction in instances.items() if of in other}
        for task, tokens, some in _scopes(shared):
            values = [shared[of] for of in some]
            about = {"base": base, **_of(who), "task": task, "tokens": tokens, "count": len(some)}
            about |= {"difference": sum(values) / len(some), **_ends(bootstrap(values))}
            yield {**about, "not_inferior": about["low"] > -MARGIN, "p": sign_test(values)}


def _corrected(rows: list[Row]) -> list[Row]:
    """Add corrected p-values to the rows (Holm's correction for multiple comparisons).

    Each row compares an index with a base: full attention or another index. Rows are corrected
    together if they have the same base and the same kind of scope: one task or all tasks, and one
    prompt length or all lengths.
    """
    families: dict[Any, list[Row]] = {}
    for row in rows:
        family = row["base"], row["task"] is None, row["tokens"] is None
        families.setdefault(family, []).append(row)
    for members in families.values():
        for row, p in zip(members, holm([row["p"] for row in members]), strict=True):
            row["p_corrected"] = p
    return rows


def _rows_needed(differences: list[Row]) -> list[Row]:
    """Find the smallest `k` with which each index is as accurate as full attention.

    The result is a list of table rows: one for each index, task and prompt length.
    """
    losses: dict[Any, dict[int, float]] = {}
    for row in differences:
        if row["base"] == FULL and not isinstance(row["k"], str):
            scope = row["index"], row["task"], row["tokens"]
            losses.setdefault(scope, {})[row["k"]] = -row["difference"]
    return [
        {"index": index, "task": task, "tokens": tokens, "ks": sorted(of_k), "rows": _least(of_k)}
        | {"over_exact": _over(of_k, losses.get(("exact", task, tokens), {}))}
        for (index, task, tokens), of_k in losses.items()
    ]


def _least(losses: dict[int, float]) -> int | None:
    """Return the smallest `k` at which, and above which, the loss of accuracy is at most `MARGIN`.

    Return None if there is no such `k`.
    """
    least = None
    for k in sorted(losses, reverse=True):
        if losses[k] > MARGIN + 1e-9:  # 1e-9: a loss equal to the margin may be rounded up
            break
        least = k
    return least


def _over(losses: dict[int, float], exact: dict[int, float]) -> float | None:
    """Compare how many rows `k` an index and the index `exact` need for accurate answers.

    Return the smallest sufficient `k` of the index (`_least`), divided by that of `exact`. Return
    None if one of the two numbers is unknown, or if the index was not measured with the same values
    of `k` as `exact`.
    """
    ends = _least(losses), _least(exact)
    if losses.keys() != exact.keys() or ends[0] is None or ends[1] is None:
        return None
    return ends[0] / ends[1]


def _texts(records: Records) -> list[Row]:
    """Return a table row for each index, `k` and text length, with the divergence and the costs.

    If a suite has measured several texts of the same length, the row is about all of them.
    """
    texts: dict[Any, dict[str | None, Record]] = {}
    for key, record in records.of(TEXT):
        texts.setdefault((key.tokens, key.index, key.k), {})[key.text] = record
    rows = []
    for (tokens, index, k), of_text in texts.items():
        best = texts.get((tokens, "exact", k), {})
        if isinstance(k, str):
            every = [one for (n, who, _), one in texts.items() if (n, who) == (tokens, "exact")]
            best = _exact_at_equal_rows(of_text, every)
        exact = pooled([best[text] for text in of_text]) if best.keys() >= of_text.keys() else None
        record = pooled(list(of_text.values()))
        about = {**_of((str(index), k)), "tokens": tokens, **divergence(record, exact)}
        rows.append(about | {name: record[name] for name in (*FOUND, "weighted", *COSTS)})
        rows[-1]["key_bytes"] = record.get("key_bytes")  # older folders do not contain it
    return rows


def _exact_at_equal_rows(
    found: dict[str | None, Record], exact: Sequence[dict[str | None, Record]]
) -> dict[str | None, Record]:
    """Return the divergence of exact search for as many rows as another index has found.

    It is interpolated between the two nearest numbers of rows for which exact search was measured:
    its mean as a power of the number of rows, and the single steps linearly. A text whose number
    of rows is outside of the measured ones is left out.

    Args:
        found: The results of the other index, by text.
        exact: The results of exact search by text, for each number of rows.
    """
    interpolated = {}
    for text, record in found.items():
        rows = record["rows_found"]
        own = sorted((one[text]["rows_found"], one[text]["kl"]) for one in exact if text in one)
        for (few, more_kl), (many, less_kl) in pairwise([*own, *own[-1:]]):
            means = [sum(kl) / len(kl) for kl in (more_kl, less_kl)]
            if 0 < few <= rows <= many and min(means) > 0:
                part = math.log(rows / few) / math.log(many / few) if many > few else 0.0
                steps = [a + part * (b - a) for a, b in zip(more_kl, less_kl, strict=True)]
                mean = means[0] ** (1 - part) * means[1] ** part
                scale = mean / (sum(steps) / len(steps))
                interpolated[text] = {"kl": [scale * step for step in steps]}
                break
    return interpolated


def pooled(records: Sequence[Record]) -> Record:
    """Join the results of one index on several texts.

    Lists of values by step are concatenated, and numbers are means. A number that is unknown on a
    text counts only on the other texts.
    """
    first = records[0]
    if len(records) == 1:
        return {name: first.get(name) for name in (*UNTIMED, *first)}
    found: Record = {name: None for name in UNTIMED}
    for name, value in first.items():
        values = [record[name] for record in records if record[name] is not None]
        if name.endswith("_by_layer"):
            found[name] = [_mean(part) for part in zip(*values, strict=True)]
        elif isinstance(value, list):
            found[name] = [one for part in values for one in part]
        elif isinstance(value, dict):
            found[name] = {place: _mean([one.get(place, 0) for one in values]) for place in value}
        elif isinstance(value, bool | str):
            found[name] = value
        else:
            found[name] = _mean(values)
    return found


def _mean(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return sum(known) / len(known) if known else None


UNTIMED = ("step_s", "peak_bytes")
"""Fields that the results of a suite lack, because a suite measures no times."""


FOUND = ("coverage", "recall")
"""Fields with the quality of searches. The summary copies them from each result on a text."""

COSTS = ("step_s", "rows_read", "rows_full", "rows_found", "step_bytes", "nbytes", "peak_bytes")
"""Fields with the costs of a decode step, which the summary copies as well."""


def divergence(record: Record, exact: Record | None) -> Row:
    """Return the mean KL divergence of an index and its agreement with full attention.

    If the index `exact` was measured, there is a third value: the index's divergence divided by
    that of `exact`. Each value comes with a 95% confidence interval.
    """
    kl, same = _blocks(record["kl"]), record["same"]
    row: Row = {"steps": len(same), "kl": sum(record["kl"]) / len(same)}
    row |= _ends(bootstrap(kl), "kl_") | {"agreement": sum(same) / len(same)}
    row |= _ends(wilson(same), "agreement_")
    best = [] if exact is None else _blocks(exact["kl"])
    if exact is not None and min(best) > 0:
        row["over_exact"] = row["kl"] / (sum(exact["kl"]) / len(same))
        row |= _ends(bootstrap_ratio(kl, best), "over_exact_")
    return row


def _blocks(values: Sequence[float]) -> list[float]:
    """Return the means of the blocks of successive values that the bootstrap resamples."""
    return in_blocks(values, min(BLOCK, max(len(values) // FEWEST, 1)))


def _of(who: Who) -> Row:
    return {"index": who[0], "k": who[1] or None}


def _ends(interval: Interval, name: str = "") -> Row:
    return {f"{name}low": interval[0], f"{name}high": interval[1]}


def field_rows(records: Records) -> list[Row]:
    """Return a row for each cell of the suite `field`: one method, budget and prompt length.

    The row is about all texts on which the cell was measured. If it was measured on none, its
    field `reason` says why, and it has no figures.
    """
    cells: dict[Any, dict[str, list[tuple[Key, Record]]]] = {}
    for kind in (TEXT, SKIPPED):
        for key, record in records.of(kind):
            for budget in record.get("budgets", []):
                cell = record["method"], budget, key.tokens
                kinds = cells.setdefault(cell, {TEXT: [], SKIPPED: []})
                kinds[kind].append((key, record))
    exact = {
        (key.tokens, key.k, key.text): record
        for key, record in records.of(TEXT)
        if key.index == "exact"
    }
    rows = []
    for (method, budget, tokens), kinds in sorted(cells.items(), key=lambda cell: _place(*cell[0])):
        key, _ = (kinds[TEXT] or kinds[SKIPPED])[0]
        row: Row = {"method": method, "budget": budget, **_of((str(key.index), key.k))}
        row |= {"tokens": tokens, "texts": [str(one.text) for one, _ in kinds[TEXT]]}
        row["reason"] = kinds[SKIPPED][0][1]["words"] if kinds[SKIPPED] else None
        if kinds[TEXT]:
            best = [exact.get((tokens, key.k, one.text)) for one, _ in kinds[TEXT]]
            known = [one for one in best if one is not None]
            record = pooled([record for _, record in kinds[TEXT]])
            row |= _figures(record, pooled(known) if known and len(known) == len(best) else None)
        rows.append(row)
    return rows


def _place(method: str, budget: str, tokens: int) -> tuple[Any, ...]:
    """Return the place of a cell in the table: by length, by method, and by budget."""
    return tokens, method != "exact", method, not budget.isdigit(), int(budget.isdigit() and budget)


READ = ("rows_read", "rows_full", "rows_found", "key_bytes", "step_bytes", "scan_bytes")
"""Fields with what a decode step reads, which cells of the suite have."""


def _figures(record: Record, exact: Record | None) -> Row:
    """Return the figures of a cell of the suite."""
    errors = record["error_by_layer"]
    worst = max(range(len(errors)), key=errors.__getitem__)
    row = divergence(record, exact) | {"error": sum(errors) / len(errors)}
    row |= _ends(bootstrap(_blocks(record["error_by_step"])), "error_")
    row |= {"error_worst": errors[worst], "worst_layer": worst}
    row |= {name: record[name] for name in (*FOUND, "weighted", *READ, "read_bytes", "full_bytes")}
    read = record["read_bytes"]
    row["read_fraction"] = None if read is None else read / record["full_bytes"]
    return row
