"""Recognize a model, so that a saved cache cannot be continued with another model.

Two models count as the same if their configurations are equal, and they compute the same keys,
values and hidden states for a few fixed tokens (`probe.py`).
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

from torch import nn

from kvindex.storage.state import State
from kvindex_adapters.hf.model.probe import difference, probe

PASSING = ("_name_or_path", "transformers_version", "architectures", "dtype", "torch_dtype")
"""Fields of a configuration that do not affect the results of a model."""


def identity(decoder: nn.Module, config: Any) -> tuple[dict[str, Any], State]:
    """Describe a model, so that `check_identity` can later recognize it.

    This runs the model's decoder layers on a few fixed tokens.

    Args:
        decoder: The module of the model whose forward pass takes the cache.
        config: The model's configuration.

    Returns:
        Two parts. The first can be written as JSON: name, configuration, dtype, and the relative
        rounding error of this dtype. The second contains tensors: samples of the keys, values and
        hidden states that the decoder computed for the fixed tokens.

    Raises:
        RuntimeError: The decoder failed on the fixed tokens.
    """
    computed = probe(decoder, config)
    about = {
        "name": config.name_or_path,
        "config": _fields(config),
        "dtype": str(computed.dtype),
        "eps": computed.eps,
    }
    return about, computed.parts


def check_identity(
    about: dict[str, Any], parts: Callable[[], State], decoder: nn.Module, config: Any
) -> None:
    """Check that a model is the same as a model that `identity` has described.

    The model's name and path are not compared.

    Args:
        about: The description that `identity` returned.
        parts: Function that returns the tensors that `identity` returned. It is called only if the
            descriptions are equal.
        decoder: The decoder of the model to check.
        config: The configuration of the model to check.

    Raises:
        ValueError: The models differ.
        RuntimeError: The decoder failed on the fixed tokens.
    """
    name = about["name"]
    mine, theirs = _fields(config), about["config"]
    for field in sorted(mine.keys() | theirs.keys()):
        if mine.get(field) != theirs.get(field):
            raise ValueError(
                f"model: got a cache of a model with {field} = {theirs.get(field)!r} ({name!r}), "
                f"but the attached model has {field} = {mine.get(field)!r}"
            )
    computed = probe(decoder, config)
    if str(computed.dtype) != about["dtype"]:
        raise ValueError(
            f"model: got a cache of a model with dtype {about['dtype']} ({name!r}), but the "
            f"attached model has {computed.dtype}"
        )
    worst = difference(computed.parts, parts(), max(computed.eps, about["eps"]))
    if worst.size > worst.tolerance:
        raise ValueError(
            "model: got a cache of a model with other weights, another quantization or another "
            f"adapter ({name!r}): for the same tokens, the {worst.name} of layer {worst.layer} "
            f"have a relative difference of {worst.size:.2g}, but rounding in {computed.dtype} "
            f"explains at most {worst.tolerance:.2g}; load the cache with the model that saved it"
        )


def _fields(config: Any) -> dict[str, Any]:
    """Return the fields of a configuration that affect the model's results, as JSON."""
    fields = {name: value for name, value in config.to_diff_dict().items() if name not in PASSING}
    return dict(json.loads(json.dumps(fields, default=str)))
