"""Which model keys and values are of: another one must not go on from them.

Two models are the same where their configurations are equal and they compute the same for a few
fixed tokens (`model_probe`).
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

from torch import nn

from kvindex.storage.state import State
from kvindex_adapters.hf.model_probe import difference, probe

PASSING = ("_name_or_path", "transformers_version", "architectures", "dtype", "torch_dtype")
"""Fields of a configuration that do not say which model it is."""


def identity(decoder: nn.Module, config: Any) -> tuple[dict[str, Any], State]:
    """Name, configuration and dtype of a decoder, as JSON, and what it computes, as tensors.

    config: its configuration. Runs the decoder, and raises as `probe`.
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
    """Raise ValueError for a model that is not the one of which `identity` returned these.

    Its name and place do not matter. parts: reads the tensors, called where all else is equal.
    """
    name = about["name"]
    mine, theirs = _fields(config), about["config"]
    for field in sorted(mine.keys() | theirs.keys()):
        if mine.get(field) != theirs.get(field):
            raise ValueError(
                f"model: got a cache of one with {field} = {theirs.get(field)!r} ({name!r}), "
                f"allowed is {mine.get(field)!r}, as of the attached one"
            )
    if "weights" in about:
        raise ValueError(
            f"folder: got a cache of {name!r} that was saved by an earlier version of kvindex, "
            "without what its model computes, so that no model can be compared with it; allowed "
            "is one that this version has saved: read the text again, and save the cache"
        )
    computed = probe(decoder, config)
    if str(computed.dtype) != about["dtype"]:
        raise ValueError(
            f"model: got a cache of one with other dtype, {about['dtype']} ({name!r}), "
            f"allowed is {computed.dtype}, as of the attached one"
        )
    worst = difference(computed.parts, parts(), max(computed.eps, about["eps"]))
    if worst.size > worst.tolerance:
        raise ValueError(
            f"model: got a cache of one with other weights, or with an adapter that was on, off or "
            f"scaled otherwise ({name!r}): for the same tokens, {worst.name} of layer "
            f"{worst.layer} differ by {worst.size:.2g} of their size, allowed is "
            f"{worst.tolerance:.2g}, which rounding in {computed.dtype} explains; load the cache "
            "with the model as it was when the cache was saved"
        )


def _fields(config: Any) -> dict[str, Any]:
    """A configuration's fields as JSON, without those that do not say which model it is."""
    fields = {name: value for name, value in config.to_diff_dict().items() if name not in PASSING}
    return dict(json.loads(json.dumps(fields, default=str)))
