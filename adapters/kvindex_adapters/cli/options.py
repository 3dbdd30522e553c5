"""Options and checks that several commands share. This module does not import torch, so that help
is fast."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer

INDEX = "Index, as name:option=value:option=value (kvindex indexes lists them)"

K = Annotated[
    int,
    typer.Option("-k", help="Number of tokens that each KV head retrieves per decode step."),
]
Sink = Annotated[
    int, typer.Option(help="Number of tokens at the beginning that are always attended to.")
]
Local = Annotated[int, typer.Option(help="Number of newest tokens that are always attended to.")]
UpdateEvery = Annotated[
    int,
    typer.Option(
        help="Number of tokens that leave the local window together and are added to the index."
    ),
]
DenseBelow = Annotated[
    int, typer.Option(help="Number of tokens below which full attention is used.")
]
Model = Annotated[
    str,
    typer.Option(help="Folder, .gguf file or hub id of the model, or smollm2, or smollm2-long."),
]
Lora = Annotated[
    Path | None,
    typer.Option(
        help="Low-rank adapter (safetensors) to merge into the model's weights, as in "
        "benchmarks/models."
    ),
]
GgufFile = Annotated[
    str | None, typer.Option(help="Name of the .gguf file inside the model's folder.")
]
Dtype = Annotated[str, typer.Option(help="Data type to compute in: float32, float16 or bfloat16.")]
Device = Annotated[str, typer.Option(help="Device to run on: cpu or cuda.")]
JsonFile = Annotated[
    Path | None,
    typer.Option("--json", help="JSON file to write the result and the machine's description to."),
]


def announce_imports() -> None:
    """Print that imports take time. If torchrun has started several processes, only the first
    prints."""
    if "transformers" not in sys.modules and os.environ.get("RANK", "0") == "0":
        typer.echo("importing torch and transformers (some seconds)", err=True)


BEYOND_ASCII = "é…世😀"
"""Characters that answers may contain, of two to four bytes in UTF-8."""


ENCODING_ERROR = (
    "standard output: got the encoding {!r}, which lacks characters that the output may have; "
    "allowed is UTF-8, for example with PYTHONUTF8=1 in the environment"
)


def check_stdout() -> None:
    """Check that standard output can print every answer.

    Commands call this first, because computing an answer takes minutes.

    Raises:
        ValueError: Standard output is closed, or its encoding lacks characters.
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
