"""`context`: like `contextlib.contextmanager`, with errors that say how to correct a wrong call."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from functools import wraps
from types import TracebackType
from typing import TYPE_CHECKING, Any, Generic, NoReturn, ParamSpec, TypeVar

from kvindex.core.config import split_spec, unknown
from kvindex.registry import option_names

P = ParamSpec("P")
T = TypeVar("T")


class Context(AbstractContextManager[T], Generic[T]):
    """A context manager that raises an error if it is used without a `with` statement.

    Args:
        usage: The `with` statement to show in the error.
        inner: The context manager that does the work.
    """

    def __init__(self, usage: str, inner: AbstractContextManager[T]) -> None:
        self._usage, self._inner = usage, inner

    def __enter__(self) -> T:
        return self._inner.__enter__()

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> bool | None:
        return self._inner.__exit__(kind, error, traceback)

    if not TYPE_CHECKING:  # with this method, type checkers would accept any attribute name

        def __getattr__(self, name: str) -> NoReturn:
            if name.startswith("__"):  # Python looks up special methods, for example to copy
                raise AttributeError(name, name=name, obj=self)
            raise AttributeError(
                f"{name}: got a context manager that no with statement has entered; write "
                f"`{self._usage}` and use the object after `as`",
                name=name,
                obj=self,
            )


def context(usage: str) -> Callable[[Callable[P, Iterator[T]]], Callable[P, Context[T]]]:
    """Make a decorator that is used like `contextlib.contextmanager`.

    The decorated function must have an argument `index`, whose options `check_keywords` knows.

    Args:
        usage: The `with` statement to show if somebody forgets it.
    """

    def decorate(function: Callable[P, Iterator[T]]) -> Callable[P, Context[T]]:
        make, names = contextmanager(function), inspect.signature(function).parameters

        @wraps(function)
        def wrapper(*args: P.args, **kwargs: P.kwargs) -> Context[T]:
            check_keywords(function.__name__, names, kwargs, kwargs.get("index", "pariskv"))
            return Context(usage, make(*args, **kwargs))

        return wrapper

    return decorate


def check_keywords(
    called: str, allowed: Iterable[str], given: Mapping[str, Any], index: object
) -> None:
    """Raise TypeError if a keyword argument is unknown.

    The error lists the known arguments and suggests similar ones. If the argument is an option of
    the index, the error says how to pass it.

    Args:
        called: The name of the function, for the error.
        allowed: Names of its arguments.
        given: The keyword arguments of the call.
        index: The argument `index` of the call.
    """
    allowed = list(allowed)
    for name, value in given.items():
        if name not in allowed:
            check_not_of_index(called, name, value, index)
            raise TypeError(unknown(f"{called}: argument", name, allowed))


def check_not_of_index(called: str, name: str, value: object, index: object) -> None:
    """Raise TypeError if a keyword argument is an option of the index.

    The error says how to pass the option. Two other mistakes raise TypeError as well: a name with
    capital letters, such as `K`, and a name for the system message, such as `system_prompt`.

    Args:
        called: The name of the function, for the error.
        name: The name of the argument.
        value: Its value.
        index: The argument `index` of the call.
    """
    if name != name.lower():  # no argument and no option has capital letters
        raise TypeError(f"{called}: got the argument {name!r}; did you mean {name.lower()!r}?")
    if name.partition("_")[0] == "system":
        raise TypeError(
            f"{called}: got the argument {name!r}; did you mean 'system', an argument of Chat? For "
            "generate() and read(), put a message with the role 'system' into the prompt"
        )
    if not isinstance(index, str):
        return
    first, plus, wrappers = index.partition("+")
    if name not in option_names(split_spec(first)[0]):
        return
    line = f'index="{first}:{name}={value}{plus}{wrappers}" or '
    option = f"index_options={{{name!r}: {value!r}}}"
    if not called.startswith("attach"):
        option = f"attach_options={{'index_options': {{{name!r}: {value!r}}}}}"
    raise TypeError(
        f"{called}: got the argument {name!r}, which is an option of the index; pass "
        + (line if isinstance(value, str | int | float) else "")
        + option
    )
