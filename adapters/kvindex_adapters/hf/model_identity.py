"""Which model keys and values are of: another one must not go on from them."""

from __future__ import annotations

import hashlib
import json
from typing import Any

import torch
from torch import nn

PASSING = ("_name_or_path", "transformers_version", "architectures", "dtype", "torch_dtype")
"""Fields of a configuration that do not say which model it is."""

SAMPLES = 64
"""Entries of each weight that are looked at, evenly spaced: whatever trains a model further changes
most entries of the weights that it changes."""


def identity(decoder: nn.Module, config: Any) -> dict[str, Any]:
    """Name, configuration and weights of a decoder, as JSON.

    config: its configuration; weights: a digest of names, shapes and samples. Waits for the device.
    """
    fields = {name: value for name, value in config.to_diff_dict().items() if name not in PASSING}
    return {
        "name": config.name_or_path,
        "config": json.loads(json.dumps(fields, default=str)),
        "dtype": str(next(decoder.parameters()).dtype),
        "weights": _weights(decoder),
    }


def check_identity(got: dict[str, Any], decoder: nn.Module, config: Any) -> None:
    """Raises ValueError, in words, for a model that is not the one of which `identity` gave `got`.

    Its name and place do not matter.
    """
    allowed = identity(decoder, config)
    mine, theirs = allowed["config"], got["config"]
    for name in sorted(mine.keys() | theirs.keys()):
        if mine.get(name) != theirs.get(name):
            raise ValueError(
                f"model: got a cache of one with {name} = {theirs.get(name)!r} ({got['name']!r}), "
                f"allowed is {mine.get(name)!r}, as of the attached one"
            )
    for name in ("dtype", "weights"):
        if allowed[name] != got[name]:
            raise ValueError(
                f"model: got a cache of one with other {name}, {got[name]} ({got['name']!r}), "
                f"allowed is {allowed[name]}, as of the attached one"
            )


@torch.no_grad()
def _weights(decoder: nn.Module) -> str:
    digest = hashlib.sha256()
    for name, weight in decoder.named_parameters():
        digest.update(f"{name} {weight.dtype} {list(weight.shape)}".encode())
        if weight.numel() and weight.device.type != "meta":
            step = max(weight.numel() // SAMPLES, 1)
            some = weight.detach().reshape(-1)[::step].contiguous().cpu()
            digest.update(some.view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()
