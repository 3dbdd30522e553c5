"""The `kvindex` command with its subcommands. It exits with status 2 after an invalid option.

Subcommands import torch and transformers only when they run, so that `--help` and `--version` stay
fast.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable
from importlib.metadata import PackageNotFoundError, version
from typing import Annotated

import typer

from kvindex_adapters.cli.chat import chat
from kvindex_adapters.cli.compare import compare
from kvindex_adapters.cli.demo import demo
from kvindex_adapters.cli.generate import generate
from kvindex_adapters.cli.list import indexes
from kvindex_adapters.cli.options import ENCODING_ERROR, check_arguments

app = typer.Typer(
    help="Run language models whose KV cache is a vector database.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)


def _help(command: Callable[..., None]) -> str:
    """Return the docstring of a command with one line per paragraph.

    Typer keeps the line breaks of all paragraphs except the first.
    """
    paragraphs = (inspect.getdoc(command) or "").split("\n\n")
    return "\n\n".join(" ".join(paragraph.split()) for paragraph in paragraphs)


for _command in (demo, generate, chat, compare, indexes):
    app.command(help=_help(_command))(_command)


def _version(requested: bool) -> None:
    if not requested:
        return
    try:
        typer.echo(f"kvindex {version('kvindex-torch')}")
    except PackageNotFoundError:
        typer.echo("kvindex, version unknown: the package is not installed")
    raise typer.Exit


@app.callback()
def kvindex(
    version: Annotated[
        bool,
        typer.Option(
            "--version", callback=_version, is_eager=True, help="Show the version and exit."
        ),
    ] = False,
) -> None:
    """Run language models whose KV cache is a vector database."""


EXTRAS = dict.fromkeys(("transformers", "safetensors", "gguf", "accelerate"), "hf")
EXTRAS |= dict.fromkeys(("rich", "matplotlib", "jinja2"), "cli")
"""Maps each package that commands import to the extra of kvindex that installs it.

An extra is the name in brackets in `pip install "kvindex-torch[…]"`.
"""


def main() -> None:
    """Run the command line.

    Invalid options, missing files and missing packages print one line on standard error and exit
    with status 2.
    """
    try:
        check_arguments(sys.argv[1:])
        app()
    except ModuleNotFoundError as error:
        extra, how = EXTRAS.get((error.name or "").partition(".")[0]), ""
        if extra:
            from kvindex.core.extras import how_to_install

            how = f"; install it with {how_to_install(extra)}"
        print(f"error: {error}{how}", file=sys.stderr)
        sys.exit(2)
    except UnicodeEncodeError as error:  # raised, for example, while help is printed
        print(f"error: {ENCODING_ERROR.format(error.encoding)}", file=sys.stderr)
        sys.exit(2)
    except (ValueError, OSError, ImportError) as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)
