"""Variable tracking (after RULER): find all variables of a chain of assignments.

The first variable gets a number, and each other variable gets the value of the one before.
"""

from __future__ import annotations

import random

from kvindex_adapters.evaluate.tasks.draft import Asked, Draft
from kvindex_adapters.evaluate.tasks.haystack import hidden, prose
from kvindex_adapters.evaluate.tasks.registry import task
from kvindex_adapters.evaluate.tasks.vocabulary import variables

VARIABLES = 5
"""Number of variables in a chain. Five variables make four hops, as in RULER."""


@task("chain", "all five variables of a chain that passes on one value")
def chain(rng: random.Random, parts: int) -> Draft:
    """Hide five assignments in a text, and ask for all variables that have the given value."""
    names, value = tuple(variables(rng, VARIABLES)), str(rng.randint(10**4, 10**5 - 1))
    links = zip(names[1:], names, strict=False)
    facts = [f"VAR {names[0]} = {value}.", *(f"VAR {new} = VAR {old}." for new, old in links)]
    assigned = f"{VARIABLES} variables are assigned the value {value} in the text above"
    text = f"\n\nList all variables that are assigned the value {value} in the text above."
    asked = Asked(text, names, max_new_tokens=30, begin=f"{assigned}, they are:")
    return Draft("\n\n".join(hidden(rng, prose(rng, parts), facts)), (asked,))
