"""Options and checks that several commands share.

This module does not import torch, so that `kvindex --help` is fast.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

INDEX = (
    "Index as name:option=value:option=value (kvindex indexes lists names and options), or as "
    "module:Class:option=value for a class in a file of the current folder"
)


def number_or_auto(text: str) -> int | str:
    """Parse the option `-k` or `--speculative-tokens`: a number, or "auto"."""
    try:
        return text if text == "auto" else int(text)
    except ValueError:
        raise typer.BadParameter(f"got {text!r}, allowed is a number or auto") from None


def number_of_tokens(given: str | int) -> int:
    """Parse a number of tokens, for example "4096" or "4K" (4 * 1024)."""
    text = str(given)
    digits = text.upper().removesuffix("K")
    if not digits.isdecimal():
        raise typer.BadParameter(f"got {text!r}, allowed is a number, for example 4096 or 4K")
    return int(digits) * (1024 if digits != text else 1)


K = Annotated[
    Any,
    typer.Option(
        "-k",
        parser=number_or_auto,
        metavar="ROWS",
        help="Number of tokens that each KV head retrieves per decode step, or auto for as many "
        "as the expected error asks for.",
    ),
]
Error = Annotated[
    float | None,
    typer.Option(
        help="Retrieve fewer than -k tokens if they are expected to give an error of each layer's "
        "output that is at most this fraction of its size (default: 0.1 with -k auto)."
    ),
]
Sink = Annotated[
    int,
    typer.Option(
        help="Number of tokens at the beginning of the prompt that attention always reads."
    ),
]
Local = Annotated[
    int,
    typer.Option(help="Number of newest tokens (the local window) that attention always reads."),
]
UpdateEvery = Annotated[
    int,
    typer.Option(
        help="Number of tokens that leave the local window together and are added to the index."
    ),
]
DenseBelow = Annotated[
    int, typer.Option(help="Full attention is used while the sequence has fewer tokens than this.")
]
Prefill = Annotated[
    str,
    typer.Option(
        help="How the tokens of a prompt attend: dense (to all tokens before them), or sparse (to "
        "chosen blocks of 128 tokens). Sparse is faster for long prompts on a GPU, but can change "
        "the answer."
    ),
]
PrefillMass = Annotated[
    float,
    typer.Option(
        help="With --prefill sparse: fraction of the estimated attention weight that the chosen "
        "blocks must have, above 0 and at most 1. A larger value reads more blocks."
    ),
]
PrefillSelector = Annotated[
    str,
    typer.Option(
        help="With --prefill sparse: how blocks are chosen. sampled compares the exact attention "
        "weights of a quarter of the queries, and pooled means of queries and keys, which takes "
        "less time and misses more."
    ),
]
Model = Annotated[
    str,
    typer.Option(
        help="Folder, .gguf file or Hugging Face id of the model, or smollm2, or smollm2-long."
    ),
]
Lora = Annotated[
    Path | None,
    typer.Option(
        help="File (safetensors) with a LoRA adapter to merge into the model's weights. The "
        "repository has an adapter for smollm2 in the folder benchmarks/models."
    ),
]
GgufFile = Annotated[
    str | None, typer.Option(help="Name of the .gguf file inside the model's folder.")
]
Engine = Annotated[
    str | None,
    typer.Option(
        help="Engine that runs the model: decoder or transformers (default: the decoder on a "
        "GPU if it supports the model, otherwise transformers)."
    ),
]
Dtype = Annotated[
    str,
    typer.Option(
        help="Data type of the model: float32, float16, bfloat16, or int8 (on a CPU: linear "
        "layers with weights in int8, all other numbers in float32)."
    ),
]
Device = Annotated[str, typer.Option(help="Device on which the model runs: cpu or cuda.")]
SpeculativeTokens = Annotated[
    Any,
    typer.Option(
        parser=number_or_auto,
        metavar="TOKENS",
        help="Draft this number of tokens before each verification, or auto for a number by "
        "the acceptance seen. One step then gives several tokens where drafts are right "
        "(default: one token per step).",
    ),
]
Verify = Annotated[
    str,
    typer.Option(
        help="With --speculative-tokens, what verifies the drafts: index (drafts are copied "
        "from the text so far, or written by --draft-model), or full (drafts are written with the "
        "index, and full attention verifies them, so the answer is that of full attention)."
    ),
]
DraftModel = Annotated[
    str | None,
    typer.Option(
        help="With --speculative-tokens, a smaller model with the same vocabulary, which writes "
        "the drafts: a folder, .gguf file or Hugging Face id (default: drafts are copied from the "
        "text so far)."
    ),
]
JsonFile = Annotated[
    Path | None,
    typer.Option(
        "--json",
        help="JSON file to which the result and a description of the machine are written.",
    ),
]


def announce_imports() -> None:
    """Print a message that importing torch and transformers takes some seconds.

    If torchrun has started several processes, only the first one prints the message.
    """
    if "transformers" not in sys.modules and os.environ.get("RANK", "0") == "0":
        typer.echo("importing torch and transformers (some seconds)", err=True)


BEYOND_ASCII = "é…世😀"
"""Characters of two to four bytes in UTF-8 that standard output must be able to print."""


ENCODING_ERROR = (
    "standard output: got the encoding {!r}, which lacks characters that an answer may contain; "
    "set the environment variable PYTHONUTF8=1 to use UTF-8"
)


def check_stdout() -> None:
    """Check that standard output can print every Unicode character.

    Commands call this function first, because computing an answer may take minutes.

    Raises:
        ValueError: Standard output is closed, or its encoding cannot encode every character.
    """
    if sys.stdout is None or sys.stdout.closed:
        raise ValueError("standard output: got a closed stream, allowed is an open stream")
    encoding, errors = sys.stdout.encoding or "utf-8", sys.stdout.errors or "strict"
    try:
        BEYOND_ASCII.encode(encoding, errors)
    except UnicodeEncodeError:
        raise ValueError(ENCODING_ERROR.format(encoding)) from None


def check_arguments(arguments: Sequence[str]) -> None:
    """Check that all arguments of the command line are valid UTF-8, and that none is `--k`.

    Args:
        arguments: The arguments `sys.argv[1:]`.

    Raises:
        ValueError: An argument contains bytes that are not valid UTF-8, or is `--k`.
    """
    for number, argument in enumerate(arguments, start=1):
        try:
            argument.encode()
        except UnicodeEncodeError:  # Python decodes invalid bytes as lone surrogates
            raise ValueError(
                f"command-line argument {number}: got {argument!r}, allowed is UTF-8 text"
            ) from None
        if argument.partition("=")[0] == "--k":
            raise ValueError(
                f"command-line argument {number}: got {argument!r}; did you mean -k, with one "
                "dash? For example -k 100"
            )
