"""Accuracy of answers by depth, the position in the context at which the answer is hidden."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from kvindex_adapters.evaluate.compare.records import ANSWERS, Records

PARTS = 10
"""Number of equal parts into which a context is divided. Each part has one accuracy."""


def depth_rows(records: Records) -> Iterator[dict[str, Any]]:
    """Yield a row with the accuracy for each index, `k`, prompt length and tenth of the context.

    Only tasks with a single answer count, because several answers have no single position. The
    field `depth` is the position at which the tenth begins, from 0 to 0.9.
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
