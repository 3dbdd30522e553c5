"""Checks of command-line arguments that run before a model is loaded."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from threading import Timer
from typing import Any

import torch

import kvindex
from kvindex.core import check
from kvindex.core.capability import capability
from kvindex.core.protocol import KVIndex, RunsOps, WarmsUp
from kvindex.layer import AttentionLayer
from kvindex.storage.saved import check_new
from kvindex_adapters.common.layer_options import check_spec
from kvindex_adapters.hf.cache.saving import open_cache

DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}

PATIENCE_S = 2.0
"""Seconds of silence: kernels that are kept on disk are loaded in less."""

MOST = check.MOST_ROWS
"""Largest number of rows or tokens of an option: more than any prompt has, less than memory."""


def check_dtype(dtype: str) -> torch.dtype:
    """The type of that name. Raises ValueError for another."""
    return DTYPES[check.one_of("dtype", dtype, sorted(DTYPES))]


def check_size(name: str, value: int, minimum: int, most: int = MOST) -> int:
    """`value`, if it is from `minimum` to `most`. Raises ValueError."""
    if check.at_least(name, value, minimum) > most:
        raise ValueError(f"{name}: got {value}, allowed is {minimum} to {most}")
    return value


def check_search(
    index: str,
    k: int,
    device: str,
    regions: Mapping[str, Any] | None = None,
    store: str | None = None,
) -> None:
    """Raises ValueError for an index that cannot be made, or for sizes out of range.

    regions: sizes as `attach` takes them, where they are not its defaults; store: where rows lie,
    or None for what the index's line says.
    """
    regions = dict(regions or {})
    check_size("k", k, 1)
    for name in regions.keys() & {"sink", "local_window", "update_every"}:
        check_size(name, regions[name], int(name == "update_every"))
    AttentionLayer(_trial(index, device, **({"store": store} if store else {})), k=k, **regions)


def wait_for_compiler(index: str, device: str) -> None:
    """Return once an index's kernels for a CPU are compiled, which making one has begun.

    A wait of more than `PATIENCE_S` is told.
    """
    from kvindex_adapters.cli.progress import console

    trial = _trial(index, device)
    runs, warms = capability(trial, RunsOps), capability(trial, WarmsUp)
    if runs is not None and warms is not None and runs.backend == "cpu":
        row = torch.ones(1, 1, 1, 8)
        timer = Timer(PATIENCE_S, console.print, ["compiling kernels for this CPU, once"])
        timer.start()
        try:
            trial.append(row, row)
            warms.warm_up(k=1, tokens=1)
        finally:
            timer.cancel()


def _trial(index: str, device: str, **options: Any) -> KVIndex:
    check_spec(index)
    rope = torch.ones(4, device=device)  # the model gives its own later
    sizes: dict[str, Any] = dict(q_heads=1, kv_heads=1, head_dim=8, device=device, rope=rope)
    return kvindex.create(index, **sizes, **options)


def sampling(
    sample: bool,
    *,
    temperature: float | None,
    top_p: float | None,
    top_k: int | None,
    min_p: float | None,
    repetition_penalty: float | None,
) -> dict[str, Any]:
    """Options of `model.generate`; any option of sampling turns sampling on.

    Raises ValueError for a value out of range.
    """
    options: dict[str, Any] = {}
    if temperature is not None:
        options["temperature"] = check.positive("temperature", temperature)
    if top_p is not None:
        options["top_p"] = check.within("top_p", top_p, 0, 1)
    if top_k is not None:
        options["top_k"] = check.at_least("top_k", top_k, 1)
    if min_p is not None:
        options["min_p"] = check.within("min_p", min_p, 0, 1)
    options = {"do_sample": sample or bool(options), **options}
    if repetition_penalty is not None:
        options["repetition_penalty"] = check.positive("repetition_penalty", repetition_penalty)
    return options


def prompt_of(prompt: str | None, prompt_file: Path | None) -> str:
    """The text of `--prompt` or of `--prompt-file`. Raises ValueError unless one is given."""
    if (prompt is None) == (prompt_file is None):
        raise ValueError(
            f"prompt: got {'neither' if prompt is None else 'both'}, allowed is either --prompt or "
            "--prompt-file"
        )
    if prompt_file is not None:
        return read_text(prompt_file)
    assert prompt is not None
    return _not_blank("prompt", prompt)


def check_questions(questions: Sequence[str] | None) -> list[str]:
    """The questions, each with some text. Raises ValueError."""
    return [_not_blank("ask", question) for question in questions or ()]


def check_alone(save_cache: Path | None, load_cache: Path | None) -> None:
    """Raises ValueError for what several processes of torchrun do not do together."""
    if save_cache or load_cache:
        raise ValueError("save-cache, load-cache: got one in torchrun, allowed is one process")


def check_folders(index: str | None, save_cache: Path | None, load_cache: Path | None) -> None:
    """Raises OSError or ValueError for a cache that cannot be saved there, or loaded."""
    if index is None and (save_cache or load_cache):
        raise ValueError("save-cache, load-cache: got one with --index none, allowed is an index")
    if save_cache is not None:
        check_new(save_cache)
    if load_cache is not None:
        open_cache(load_cache)


def read_text(path: Path, name: str = "prompt-file") -> str:
    """The text of a file, or of standard input for `-`; name: of the option.

    A UTF-8 byte order mark at the beginning is removed. Raises FileNotFoundError or ValueError.
    """
    if str(path) == "-":
        if sys.stdin is None or sys.stdin.closed:
            raise ValueError(
                f"{name}: got '-' with a closed standard input, allowed is an open standard input"
            )
        content = sys.stdin.buffer.read()
    elif path.is_file():
        content = path.read_bytes()
    else:
        raise FileNotFoundError(f"{name}: got {str(path)!r}, allowed is a file that exists, or -")
    try:
        text = content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise ValueError(f"{name}: got {str(path)!r}, allowed is UTF-8 text") from error
    if not text.strip():
        raise ValueError(f"{name}: got {str(path)!r}, which is empty; allowed is some text")
    return text


def _not_blank(name: str, text: str) -> str:
    if not text.strip():
        raise ValueError(f"{name}: got {text!r}, allowed is some text")
    return text
