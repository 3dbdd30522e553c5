"""Accuracy of answers by depth, the position in the context at which the answer is hidden."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from kvindex_adapters.evaluate.compare.records import ANSWERS, Records

PARTS = 10
"""Number of equal parts into which a context is divided. Each part has one accuracy."""


def depth_rows(records: Records) -> Iterator[dict[str, Any]]:
    """Yield table rows that show how accuracy depends on where in the context the answer is.

    The context is divided into ten equal parts. There is a table row for each index, `k`, prompt
    length and part. Its field `depth` is the position at which the part begins, from 0 to 0.9. Only
    tasks with a single answer are used, because several answers have no single position.
    """
    found: dict[Any, list[float]] = {}
    for key, record in records.of(ANSWERS):
        if (depth := record.get("depth")) is not None:
            part = min(int(PARTS * depth), PARTS - 1)
            found.setdefault((key.index, key.k or None, key.tokens, part), []).extend(
                record["scores"]
            )
    for (index, k, tokens, part), scores in found.items():
        about = {"index": index, "k": k, "tokens": tokens, "depth": part / PARTS}
        yield {**about, "count": len(scores), "accuracy": sum(scores) / len(scores)}
