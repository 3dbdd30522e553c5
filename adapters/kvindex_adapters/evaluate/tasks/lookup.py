"""Key-value lookup: find the value of one key in a long JSON object of UUIDs."""

from __future__ import annotations

import json
import random

from kvindex_adapters.evaluate.tasks.draft import Asked, Draft
from kvindex_adapters.evaluate.tasks.registry import task
from kvindex_adapters.evaluate.tasks.vocabulary import uuids


@task("lookup", "the value of one key in a JSON object of UUIDs")
def lookup(draw: random.Random, pieces: int) -> Draft:
    """Make a JSON object with `pieces` keys, and ask for the value of one."""
    depth = draw.random()
    found = uuids(draw, 2 * pieces)
    pairs = dict(zip(found[::2], found[1::2], strict=True))
    key, value = list(pairs.items())[int(depth * pieces)]
    text = f'\n\nWhat is the value of the key "{key}" in the JSON object above?'
    body = f"A JSON object:\n{json.dumps(pairs, indent=0)}"
    return Draft(body, (Asked(text, (value,), max_new_tokens=48, begin=f'"{key}": "'),))
