"""Key-value lookup: the model must find the value of a key in a long JSON object of UUIDs."""

from __future__ import annotations

import json
import random

from kvindex_adapters.evaluate.tasks.draft import Asked, Draft
from kvindex_adapters.evaluate.tasks.registry import task
from kvindex_adapters.evaluate.tasks.vocabulary import uuids


@task("lookup", "the value of one key in a JSON object of UUIDs")
def lookup(rng: random.Random, parts: int) -> Draft:
    """Make a JSON object with `parts` keys, and ask for the value of one key."""
    depth = rng.random()
    found = uuids(rng, 2 * parts)
    pairs = dict(zip(found[::2], found[1::2], strict=True))
    key, value = list(pairs.items())[int(depth * parts)]
    text = f'\n\nWhat is the value of the key "{key}" in the JSON object above?'
    body = f"A JSON object:\n{json.dumps(pairs, indent=0)}"
    return Draft(body, (Asked(text, (value,), max_new_tokens=48, begin=f'"{key}": "'),))
