"""`patch`: wrap a method of a class of vLLM."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any


def patch(owner: Any, name: str, wrap: Callable[[Callable[..., Any]], Any], module: str) -> None:
    """Wrap a method of a class, unless it is missing or wrapped already.

    Args:
        owner: The class.
        name: Name of the method.
        wrap: Returns the new method for the class's own.
        module: Name of the module that wraps the method, by which a wrapped method is known.
    """
    own = vars(owner).get(name)
    if own is not None and own.__module__ != module:
        wrapped = wraps(own)(wrap(own))
        wrapped.__module__ = module
        setattr(owner, name, wrapped)
