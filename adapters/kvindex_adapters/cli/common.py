"""Checks of command-line arguments that run before a model is loaded."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from pathlib import Path
from threading import Timer
from typing import Any

import torch

import kvindex
from kvindex.core import check
from kvindex.core.capability import capability
from kvindex.core.config import split_spec
from kvindex.core.protocol import KVIndex, RunsOps, WarmsUp
from kvindex.layer import AttentionLayer
from kvindex.layer.sparse import PREFILL_DEFAULTS
from kvindex.storage.saved import check_new
from kvindex_adapters.common.layer_options import check_spec
from kvindex_adapters.common.speculation import check_verifiable, speculation_of
from kvindex_adapters.hf.generation.plain_cache import check_saved_index
from kvindex_adapters.hf.model.load_model import DTYPES

PATIENCE_S = 2.0
"""Seconds after which a message says that kernels are being compiled.

Loading kernels that are already compiled takes less time.
"""

MOST = check.MOST_ROWS
"""Largest number of rows or tokens that an option accepts."""


def check_dtype(dtype: str) -> torch.dtype:
    """Return the torch dtype with this name. Raise ValueError if the name is not in `DTYPES`."""
    return DTYPES[check.one_of("dtype", dtype, sorted(DTYPES))]


def check_size(name: str, value: int, minimum: int, most: int = MOST) -> int:
    """Check that `minimum <= value <= most`, and return `value`. Otherwise raise ValueError."""
    if check.at_least(name, value, minimum) > most:
        raise ValueError(f"{name}: got {value}, allowed is {minimum} to {most}")
    return value


def check_search(
    index: str,
    k: int | str,
    device: str,
    regions: Mapping[str, Any] | None = None,
    store: str | None = None,
) -> None:
    """Raise ValueError if the index cannot be created, or a size is out of range.

    Args:
        index: Name and options of the index.
        k: Number of tokens to retrieve per KV head in each decode step, or "auto".
        device: Name of the torch device.
        regions: Sizes of the sink, the local window and so on, as keyword arguments of `attach`.
            None for the defaults of `attach`.
        store: Memory that stores keys and values, as in `--store`. None if `index` sets it.
    """
    regions = dict(regions or {})
    _find_modules_here(index)
    if not isinstance(k, str):
        check_size("k", k, 1)
    for name in regions.keys() & {"sink", "local_window", "update_every"}:
        check_size(name, regions[name], int(name == "update_every"))
    AttentionLayer(_trial(index, device, **({"store": store} if store else {})), k=k, **regions)


def check_attention(index: str, k: int | str, device: str, regions: Mapping[str, Any]) -> None:
    """Check the options of a command that also accepts `--index none`, for full attention.

    Raise ValueError for the same reasons as `check_search`, or if there is no index and a prompt
    would be read sparsely, an option of sparse prompts is given, or an error is allowed.
    """
    if index != "none":
        check_search(index, k, device, regions)
    elif "error" in regions:
        raise ValueError(
            f"error: got {regions['error']} with --index none, which reads all tokens; pass an "
            "index, or leave out --error"
        )
    elif regions["prefill"] != "dense":
        raise ValueError(
            f"prefill: got {regions['prefill']!r} with --index none, which allows only 'dense'; "
            "pass an index or --prefill dense"
        )
    else:
        for name, default in PREFILL_DEFAULTS.items():
            if regions.get(name, default) != default:
                raise ValueError(
                    f"{name}: got {regions[name]!r} with --index none, which reads prompts with "
                    f"full attention; pass an index, or leave out --{name.replace('_', '-')}"
                )


def _find_modules_here(index: str) -> None:
    """If `index` has the form `module:Class`, let Python import modules from the current folder.

    Python does this by itself for `python -m`, but not for a script in another folder such as the
    command `kvindex`. The current folder is added at the end of `sys.path`.
    """
    if ":" in split_spec(index.partition("+")[0])[0] and os.getcwd() not in sys.path:
        sys.path.append(os.getcwd())


def wait_for_compiler(index: str, device: str) -> None:
    """Wait until the CPU kernels of the index are compiled.

    Creating an index has started the compilation. If it takes more than `PATIENCE_S` seconds, a
    message is printed.
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
    """Return the sampling options of the command line as options of `model.generate`.

    `do_sample` is True if `sample` is True or if `temperature`, `top_p`, `top_k` or `min_p` is
    given.

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


def speculation(
    speculative_tokens: int | str | None, verify: str, index: str, draft_model: str | None = None
) -> dict[str, Any]:
    """Return the options of speculation, as `kvhf.generate` and the decoder take them.

    `draft_model` is the name of the model that writes drafts, or None; it is only checked.

    Raise ValueError if a value is not allowed, or if drafts of an index shall be verified without
    an index.
    """
    has_draft = draft_model is not None
    if speculation_of(speculative_tokens, verify, draft_model=has_draft) is None:
        return {}
    if verify == "full" and index == "none":
        check_verifiable([])
    return {"speculative_tokens": speculative_tokens, "verify": verify}


def check_alone(
    save_cache: Path | None, load_cache: Path | None, *, draft_model: str | None = None
) -> None:
    """Raise ValueError if `--save-cache`, `--load-cache` or `--draft-model` is given.

    A command that torchrun has started in several processes calls this function, because it cannot
    save or load a cache, and cannot use a draft model.
    """
    if draft_model is not None:
        raise ValueError(
            f"draft_model: got {draft_model!r} under torchrun, but a draft model needs one "
            "process; run the command without torchrun, or leave out --draft-model"
        )
    if save_cache or load_cache:
        raise ValueError(
            "save-cache, load-cache: got one of them under torchrun, but several processes cannot "
            "save or load a cache; run the command without torchrun, or without these options"
        )


def check_folders(index: str | None, save_cache: Path | None, load_cache: Path | None) -> None:
    """Check the folders of `--save-cache` and `--load-cache`.

    Raises:
        ValueError: The folder to save in exists already, or the folder to load contains no valid
            cache, or a cache with an index although `index` is None, or the reverse.
        OSError: A folder cannot be read or created.
    """
    if save_cache is not None:
        check_new(save_cache)
    if load_cache is not None:
        check_saved_index(load_cache, indexed=index is not None, name="load-cache")
