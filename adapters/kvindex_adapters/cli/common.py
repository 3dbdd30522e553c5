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
"""Seconds after which the compilation of kernels is reported. Loading compiled kernels takes
less."""

MOST = check.MOST_ROWS
"""Largest number of rows or tokens that an option accepts."""


def check_dtype(dtype: str) -> torch.dtype:
    """Return the torch dtype of that name, or raise ValueError."""
    return DTYPES[check.one_of("dtype", dtype, sorted(DTYPES))]


def check_size(name: str, value: int, minimum: int, most: int = MOST) -> int:
    """Return `value` if it is from `minimum` to `most`, or raise ValueError."""
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
    """Raise ValueError if the index cannot be created, or a size is out of range.

    Args:
        index: Name and options of the index.
        k: Rows to retrieve per KV head and step.
        device: Name of the torch device.
        regions: Sizes of the regions as keywords of `attach`, or None for its defaults.
        store: Where rows are stored, or None to leave it to the index's options.
    """
    regions = dict(regions or {})
    check_size("k", k, 1)
    for name in regions.keys() & {"sink", "local_window", "update_every"}:
        check_size(name, regions[name], int(name == "update_every"))
    AttentionLayer(_trial(index, device, **({"store": store} if store else {})), k=k, **regions)


def wait_for_compiler(index: str, device: str) -> None:
    """Wait until the index's CPU kernels are compiled, and report a wait of more than `PATIENCE_S`.

    Creating an index starts the compilation.
    """
    from kvindex_adapters.cli.progress import console

    trial = _trial(index, device)
    runs, warms = capability(trial, RunsOps), capability(trial, WarmsUp)
    if runs is not None and warms is not None and runs.backend == "cpu":
        row = torch.ones(1, 1, 1, 8)
        timer = Timer(PATIENCE_S, console.print, ["compiling kernels for this CPU (once)"])
        timer.start()
        try:
            trial.append(row, row)
            warms.warm_up(k=1, tokens=1)
        finally:
            timer.cancel()


def _trial(index: str, device: str, **options: Any) -> KVIndex:
    check_spec(index)
    rope = torch.ones(4, device=device)  # a placeholder: `attach` passes the model's frequencies
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
    """Return options for `model.generate`. Any sampling option turns sampling on.

    Raises:
        ValueError: A value is out of range.
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
    """Return the text of `--prompt` or of `--prompt-file`. Raise ValueError unless exactly one is
    given."""
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
    """Return the questions, or raise ValueError if one is blank."""
    return [_not_blank("ask", question) for question in questions or ()]


def check_alone(save_cache: Path | None, load_cache: Path | None) -> None:
    """Raise ValueError if torchrun has started this process and a cache is saved or loaded."""
    if save_cache or load_cache:
        raise ValueError(
            "save-cache, load-cache: got one of them under torchrun, allowed is one process"
        )


def check_folders(index: str | None, save_cache: Path | None, load_cache: Path | None) -> None:
    """Raise OSError or ValueError if the cache cannot be saved or loaded as the options say."""
    if index is None and (save_cache or load_cache):
        raise ValueError(
            "save-cache, load-cache: got one of them with --index none, allowed is an index"
        )
    if save_cache is not None:
        check_new(save_cache)
    if load_cache is not None:
        open_cache(load_cache)


def read_text(path: Path, name: str = "prompt-file") -> str:
    """Read a text file, or standard input if the path is `-`.

    A UTF-8 byte order mark at the beginning is removed.

    Args:
        path: The file, or `-`.
        name: Name of the option, for error messages.

    Raises:
        FileNotFoundError: There is no such file.
        ValueError: The text is empty or not UTF-8.
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
