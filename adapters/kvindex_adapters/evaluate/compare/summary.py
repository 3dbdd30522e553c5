"""The records of a comparison as tables: accuracy, differences, divergence, and what steps cost."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict
from itertools import product
from typing import Any

from kvindex_adapters.evaluate import tasks
from kvindex_adapters.evaluate.compare.depths import depth_rows
from kvindex_adapters.evaluate.compare.records import ANSWERS, FAILURE, FULL, TEXT, Record, Records
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

BLOCK = 16
"""Neighboring steps of a text that a bootstrap draws together."""

MARGIN = 0.02
"""Of accuracy, by which an index may be below full attention and still keep its answers."""

Row = dict[str, Any]
Who = tuple[str, int]
"""An index and its `k`, 0 for full attention."""
Instances = dict[tuple[Any, int, Any], float]
"""Task, tokens, seed -> share right of an instance's questions."""


def summarize(settings: Settings, records: Records) -> dict[str, Any]:
    """What `results.json` holds (docs/adapters/compare.md)."""
    answers = _answers(records)
    bases = _bases(list(answers))
    differences = [row for base in bases for row in _differences(answers, base)]
    return {
        "schema": SCHEMA,
        "settings": asdict(settings),
        "machines": records.machines,
        "tasks": {task: _asks(task) for task in _sorted(answers, 0)},
        "tokens": _sorted(answers, 1),
        "accuracy": [row for who in answers for row in _accuracy(who, answers[who])],
        "differences": _corrected(differences),
        "rows_needed": _rows_needed(differences),
        "text": _texts(records),
        "failures": [
            {"index": key.index, "task": key.task, "tokens": key.tokens, **record}
            for key, record in records.of(FAILURE)
        ],
        "depths": list(depth_rows(records)),
    }


def _answers(records: Records) -> dict[Who, Instances]:
    """By index and `k`, full attention first, then as they came; their instances in order."""
    found: dict[Who, Instances] = {(FULL, 0): {}}
    for key, record in records.of(ANSWERS):
        share = sum(record["scores"]) / len(record["scores"])
        found.setdefault((str(key.index), key.k), {})[key.task, key.tokens, key.seed] = share
    return {who: dict(sorted(instances.items())) for who, instances in found.items()}


def _asks(task: str) -> str:
    """What a task asks; nothing for one that is no longer there."""
    try:
        return tasks.describe(task)
    except ValueError:
        return ""


def _sorted(answers: dict[Who, Instances], place: int) -> list[Any]:
    """The tasks (0) or the lengths (1) that some instance has."""
    return sorted({of[place] for instances in answers.values() for of in instances})


def _scopes(instances: Instances) -> Iterator[tuple[str | None, int | None, list[Any]]]:
    """Task and length, each or all of them (None), and the instances of these."""
    names: list[str | None] = [None, *sorted({task for task, _, _ in instances})]
    lengths: list[int | None] = [None, *sorted({tokens for _, tokens, _ in instances})]
    for task, tokens in product(names, lengths):
        some = [of for of in instances if of[0] in (task or of[0],) and of[1] in (tokens or of[1],)]
        if some:
            yield task, tokens, some


def _accuracy(who: Who, instances: Instances) -> Iterator[Row]:
    for task, tokens, some in _scopes(instances):
        scores = [instances[of] for of in some]
        about = {**_of(who), "task": task, "tokens": tokens, "count": len(some)}
        yield {**about, "accuracy": sum(scores) / len(some), **_ends(wilson(scores))}


def _bases(all_of: list[Who]) -> list[str]:
    """What others are compared with: full attention, `exact`, the index that was named first."""
    named = [index for index, _ in all_of if index != FULL]
    return list(dict.fromkeys([FULL, *(i for i in named if i == "exact"), *named[:1]]))


def _differences(answers: dict[Who, Instances], base: str) -> Iterator[Row]:
    """Of each index from the base at the same `k`, over the instances that both have answered."""
    for who, instances in answers.items():
        other = answers.get((base, 0 if base == FULL else who[1]))
        if other is None or who[0] in (base, FULL):
            continue
        shared = {of: share - other[of] for of, share in instances.items() if of in other}
        for task, tokens, some in _scopes(shared):
            values = [shared[of] for of in some]
            about = {"base": base, **_of(who), "task": task, "tokens": tokens, "count": len(some)}
            about |= {"difference": sum(values) / len(some), **_ends(bootstrap(values))}
            yield {**about, "not_inferior": about["low"] > -MARGIN, "p": sign_test(values)}


def _corrected(rows: list[Row]) -> list[Row]:
    """With probabilities corrected among those of one base and one kind of scope."""
    families: dict[Any, list[Row]] = {}
    for row in rows:
        family = row["base"], row["task"] is None, row["tokens"] is None
        families.setdefault(family, []).append(row)
    for members in families.values():
        for row, p in zip(members, holm([row["p"] for row in members]), strict=True):
            row["p_corrected"] = p
    return rows


def _rows_needed(differences: list[Row]) -> list[Row]:
    """The least `k` from which on an index stays within the margin of full attention, by scope."""
    losses: dict[Any, dict[int, float]] = {}
    for row in differences:
        if row["base"] == FULL:
            scope = row["index"], row["task"], row["tokens"]
            losses.setdefault(scope, {})[row["k"]] = -row["difference"]
    return [
        {"index": index, "task": task, "tokens": tokens, "ks": sorted(of_k), "rows": _least(of_k)}
        | {"over_exact": _over(of_k, losses.get(("exact", task, tokens), {}))}
        for (index, task, tokens), of_k in losses.items()
    ]


def _least(losses: dict[int, float]) -> int | None:
    """The least `k` whose loss, and that of all above it, is within the margin."""
    least = None
    for k in sorted(losses, reverse=True):
        if losses[k] > MARGIN + 1e-9:  # a loss of as much is within, however it is rounded
            break
        least = k
    return least


def _over(losses: dict[int, float], exact: dict[int, float]) -> float | None:
    """The ratio of two such `k`, of losses at the same ones."""
    ends = _least(losses), _least(exact)
    if losses.keys() != exact.keys() or ends[0] is None or ends[1] is None:
        return None
    return ends[0] / ends[1]


def _texts(records: Records) -> list[Row]:
    """Divergence and costs by index, `k` and length."""
    texts = {(key.tokens, key.index, key.k): record for key, record in records.of(TEXT)}
    rows = []
    for (tokens, index, k), record in texts.items():
        exact = texts.get((tokens, "exact", k))
        about = {**_of((str(index), k)), "tokens": tokens, **_divergence(record, exact)}
        rows.append(about | {name: record[name] for name in COSTS})
    return rows


COSTS = ("step_s", "rows_read", "rows_full", "step_bytes", "nbytes", "peak_bytes")
"""Fields of a text's record that stay as they are."""


def _divergence(record: Record, exact: Record | None) -> Row:
    """Mean divergence and agreement, each with its interval, and the divergence over exact's."""
    kl, same = in_blocks(record["kl"], BLOCK), record["same"]
    row: Row = {"steps": len(same), "kl": sum(record["kl"]) / len(same)}
    row |= _ends(bootstrap(kl), "kl_") | {"agreement": sum(same) / len(same)}
    row |= _ends(wilson(same), "agreement_")
    best = [] if exact is None else in_blocks(exact["kl"], BLOCK)
    if exact is not None and min(best) > 0:
        row["over_exact"] = row["kl"] / (sum(exact["kl"]) / len(same))
        row |= _ends(bootstrap_ratio(kl, best), "over_exact_")
    return row


def _of(who: Who) -> Row:
    return {"index": who[0], "k": who[1] or None}


def _ends(interval: Interval, name: str = "") -> Row:
    return {f"{name}low": interval[0], f"{name}high": interval[1]}
