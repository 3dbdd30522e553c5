"""Command-line options that several commands share; imports no torch, so that help is quick."""

from __future__ import annotations

import os
import sys
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
