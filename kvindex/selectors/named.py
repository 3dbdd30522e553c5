"""Create a block selector from its name and options, such as `"pooled:mass=0.9"`."""

from __future__ import annotations

import inspect

from kvindex.core import check
from kvindex.core.config import unknown
from kvindex.selectors.antidiagonal import AntidiagonalSelector
from kvindex.selectors.base import BlockSelector
from kvindex.selectors.index import IndexSelector
from kvindex.selectors.max_threshold import MaxThresholdSelector
from kvindex.selectors.oracle import OracleSelector
from kvindex.selectors.pooled import PooledSelector
from kvindex.selectors.sampled import SampledSelector
from kvindex.selectors.skip import SkipSelector
from kvindex.selectors.vertical_slash import VerticalSlashSelector

SELECTORS: dict[str, type[BlockSelector]] = {
    "pooled": PooledSelector,
    "max-threshold": MaxThresholdSelector,
    "antidiagonal": AntidiagonalSelector,
    "vertical-slash": VerticalSlashSelector,
    "sampled": SampledSelector,
    "index": IndexSelector,
    "skip": SkipSelector,
    "oracle": OracleSelector,
}
"""Name of each selector -> its class."""


def create(selector: str) -> BlockSelector:
    """Create a block selector.

    Args:
        selector: A name of `SELECTORS`, then the selector's options with a colon before each, such
            as `"pooled:mass=0.9"`. All options are numbers.

    Raises:
        ValueError: The name or an option is unknown, or a value is not allowed.
    """
    name, *parts = check.text("selector", selector).split(":")
    if name not in SELECTORS:
        raise ValueError(unknown("selector", name, SELECTORS))
    kind = SELECTORS[name]
    known, options = inspect.signature(kind).parameters, {}
    for part in parts:
        option, _, value = part.partition("=")
        if option not in known:
            raise ValueError(unknown(f"option of the selector {name!r}", option, known))
        options[option] = _number(option, value)
    return kind(**options)


def _number(option: str, value: str) -> int | float:
    """Convert an option's value to a number."""
    for kind in (int, float):
        try:
            return kind(value)
        except ValueError:
            continue
    raise ValueError(f"{option}: got {value!r}, allowed is a number")
