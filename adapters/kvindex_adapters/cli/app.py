"""The commands of `kvindex`; each lives in a file of its own."""

from __future__ import annotations

import sys

import typer

from kvindex_adapters.cli.demo import demo
from kvindex_adapters.cli.generate import generate
from kvindex_adapters.cli.indexes import indexes

app = typer.Typer(
    help="The KV cache of a language model as a vector database.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
app.command()(demo)
app.command()(generate)
app.command()(indexes)


def main() -> None:
    """Run a command; a user's mistake is a line on standard error and exit status 2."""
    try:
        app()
    except (ValueError, OSError, ImportError) as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)
