"""The identity of a model: a saved cache must not be continued with another model.

Two models count as the same if their configurations are equal and they compute the same keys,
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
    """Describe a model, so that `check_identity` can recognize it. Runs the decoder.

    Args:
        decoder: The module with a forward pass that takes `past_key_values`.
        config: The model's configuration.

    Returns:
        Name, configuration, dtype and rounding, for JSON, and the tensors of the probe.

    Raises:
        RuntimeError: The decoder fails, as in `probe`.
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
    """Check that a model is the one that `identity` has described.

    Its name and its location do not matter.

    Args:
        about: The description that `identity` returned (its first value).
        parts: Function that returns the probe's tensors (the second value of `identity`). It is
            only called if everything in `about` is equal.
        decoder: The decoder of the model to check.
        config: The configuration of the model to check.

    Raises:
        ValueError: It is another model.
        RuntimeError: The decoder fails, as in `probe`.
    """
    name = about["name"]
    mine, theirs = _fields(config), about["config"]
    for field in sorted(mine.keys() | theirs.keys()):
        if mine.get(field) != theirs.get(field):
            raise ValueError(
                f"model: got a cache of one with {field} = {theirs.get(field)!r} ({name!r}), "
                f"allowed is {mine.get(field)!r}, as in the attached model"
            )
    computed = probe(decoder, config)
    if str(computed.dtype) != about["dtype"]:
        raise ValueError(
            f"model: got a cache of one with another dtype, {about['dtype']} ({name!r}), "
            f"allowed is {computed.dtype}, as in the attached model"
        )
    worst = difference(computed.parts, parts(), max(computed.eps, about["eps"]))
    if worst.size > worst.tolerance:
        raise ValueError(
            f"model: got a cache of one with other weights, or with an adapter that was switched "
            f"or scaled differently ({name!r}): for the same tokens, {worst.name} of layer "
            f"{worst.layer} have a relative difference of {worst.size:.2g}, allowed is at most "
            f"{worst.tolerance:.2g}, which rounding in {computed.dtype} explains; load the cache "
            "with the model as it was when the cache was saved"
        )


def _fields(config: Any) -> dict[str, Any]:
    """Return the fields of a configuration as JSON, without those of `PASSING`."""
    fields = {name: value for name, value in config.to_diff_dict().items() if name not in PASSING}
    return dict(json.loads(json.dumps(fields, default=str)))
