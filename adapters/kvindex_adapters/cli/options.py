"""Options and checks that several commands share. Imports no torch, so that help is quick."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer

INDEX = "Index, as name:option=value:…"

K = Annotated[int, typer.Option("-k", help="Rows retrieved per KV head and step.")]
Sink = Annotated[int, typer.Option(help="First tokens, which are always attended to.")]
Local = Annotated[int, typer.Option(help="Newest tokens, which are always attended to.")]
UpdateEvery = Annotated[int, typer.Option(help="Tokens that wait until they join the index.")]
DenseBelow = Annotated[int, typer.Option(help="Below this length attention is dense.")]
Dtype = Annotated[str, typer.Option(help="float32, float16 or bfloat16.")]
Device = Annotated[str, typer.Option(help="cpu, or cuda.")]
JsonFile = Annotated[
    Path | None, typer.Option("--json", help="Write the result and the machine here.")
]


def announce_imports() -> None:
    """Say what the first seconds of a command go to; of several processes the first one says it."""
    if "transformers" not in sys.modules and os.environ.get("RANK", "0") == "0":
        typer.echo("importing torch and transformers", err=True)


BEYOND_ASCII = "é…世😀"
"""Characters as answers may contain them, of two to four bytes in UTF-8."""


ENCODING_ERROR = (
    "standard output: got the encoding {!r}, which lacks characters that the output may have; "
    "allowed is UTF-8, for example with PYTHONUTF8=1 in the environment"
)


def check_stdout() -> None:
    """Check that the standard output can print every answer.

    Commands call this first, because it takes minutes until an answer is printed.

    Raises:
        ValueError: The standard output is closed, or its encoding lacks characters.
    """
    if sys.stdout is None or sys.stdout.closed:
        raise ValueError("standard output: got a closed one, allowed is an open one")
    encoding, errors = sys.stdout.encoding or "utf-8", sys.stdout.errors or "strict"
    try:
        BEYOND_ASCII.encode(encoding, errors)
    except UnicodeEncodeError:
        raise ValueError(ENCODING_ERROR.format(encoding)) from None


def check_arguments(arguments: Sequence[str]) -> None:
    """Check that all arguments of the command line are UTF-8.

    Args:
        arguments: As in `sys.argv`, without the program's name.

    Raises:
        ValueError: An argument has bytes that are not UTF-8.
    """
    for number, argument in enumerate(arguments, start=1):
        try:
            argument.encode()
        except UnicodeEncodeError:  # Python decodes invalid bytes as lone surrogates
            raise ValueError(f"argument {number}: got {argument!r}, allowed is UTF-8") from None
