"""Variable chains: a value that passes from variable to variable, after RULER."""

from __future__ import annotations

import random

from kvindex_adapters.evaluate.tasks.draft import Asked, Draft
from kvindex_adapters.evaluate.tasks.haystack import hidden, prose
from kvindex_adapters.evaluate.tasks.registry import task
from kvindex_adapters.evaluate.tasks.vocabulary import variables

VARIABLES = 5
"""Four hops, as in RULER."""


@task("chain", "all five variables that have a value, which one passes to the next")
def chain(draw: random.Random, pieces: int) -> Draft:
    """Five assignments hidden in order, and the value asked for."""
    names, value = tuple(variables(draw, VARIABLES)), str(draw.randint(10**4, 10**5 - 1))
    links = zip(names[1:], names, strict=False)
    facts = [f"VAR {names[0]} = {value}.", *(f"VAR {new} = VAR {old}." for new, old in links)]
    assigned = f"{VARIABLES} variables are assigned the value {value} in the text above"
    text = f"\n\nList all variables that are assigned the value {value} in the text above."
    asked = Asked(text, names, max_new_tokens=30, begin=f"{assigned}, they are:")
    return Draft("\n\n".join(hidden(draw, prose(draw, pieces), facts)), (asked,))
