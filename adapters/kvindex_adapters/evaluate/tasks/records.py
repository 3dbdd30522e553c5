"""The task `table`: find sentences about persons in a long text, and list the persons in JSON."""

from __future__ import annotations

import json
import random
import re
from functools import partial
from typing import Any

from kvindex_adapters.evaluate.tasks.draft import Asked, Draft
from kvindex_adapters.evaluate.tasks.haystack import hidden, prose
from kvindex_adapters.evaluate.tasks.registry import task

RECORDS = 8

FIRST = "Alice Bruno Carla David Elena Felix Greta Henry Irene Jonas Laura Martin"
LAST = "Adler Brandt Costa Duran Evans Fischer Garcia Hansen Ivanov Keller Lopez Moreau"
CITIES = "Athens Berlin Cairo Dublin Geneva Lisbon Madrid Oslo Prague Rome Vienna Warsaw"
JOBS = "baker carpenter chemist dentist farmer judge lawyer nurse painter pilot tailor"

SENTENCE = "{name} is {age} years old, lives in {city} and works as a {job}."


@task("table", "age, city and job of seven persons whom a text describes, as a table in JSON")
def table(rng: random.Random, parts: int) -> Draft:
    """Hide sentences about eight persons in a text, and ask for a JSON array of the persons.

    The prompt ends with the beginning of the array, which contains the first person.
    """
    records = _records(rng)
    facts = [SENTENCE.format(**record) for record in records]
    *others, last = (str(record["name"]) for record in records)
    first, *answers = map(json.dumps, records)
    begin = f'[{first}, {{"name": "{others[1]}", "age": '
    text = (
        f"\n\nWrite the name, age, city and job of {', '.join(others)} and {last} "
        "as a JSON array of objects."
    )
    asked = Asked(text, tuple(answers), 320, partial(cells, begin=begin), begin)
    return Draft("\n\n".join(hidden(rng, prose(rng, parts), facts)), (asked,))


def cells(answer: str, answers: tuple[str, ...], *, begin: str = "") -> float:
    """Return the fraction of fields in a list of JSON objects that are right.

    The first field is the name of a person, and gives no score. Objects that are not valid JSON are
    ignored. All fields of an object that was not asked for count as wrong. If several objects have
    the same name, the first one counts.

    Args:
        answer: The model's answer.
        answers: The right objects as JSON.
        begin: Beginning of the list, which was a part of the prompt.
    """
    wanted, given = [json.loads(text) for text in answers], _objects(begin + answer)
    key, *fields = wanted[0]
    found = {str(record.get(key)): record for record in reversed(given)}
    right = sum(
        str(found.get(record[key], {}).get(field)) == str(record[field])
        for record in wanted
        for field in fields
    )
    count = max(len(wanted), len(given) - len(_objects(begin)))
    return right / (count * len(fields))


def _records(rng: random.Random) -> list[dict[str, str | int]]:
    first, last = (rng.sample(names.split(), RECORDS) for names in (FIRST, LAST))
    names = (f"{before} {after}" for before, after in zip(first, last, strict=True))
    return [{"name": name, **_traits(rng)} for name in names]


def _traits(rng: random.Random) -> dict[str, str | int]:
    age, city, job = rng.randint(21, 79), rng.choice(CITIES.split()), rng.choice(JOBS.split())
    return {"age": age, "city": city, "job": job}


def _objects(answer: str) -> list[dict[str, Any]]:
    """Return the JSON objects of the first array in an answer. Nested objects are not supported."""
    found = []
    for text in re.findall(r"\{[^{}]*\}", answer.partition("]")[0]):
        try:
            found.append(json.loads(text))
        except ValueError:
            continue
    return found
