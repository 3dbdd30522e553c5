"""Captured layers in a file of safetensors: tensors and numbers, nothing that runs when read."""

from __future__ import annotations

import json
from pathlib import Path

from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from kvindex_adapters.evaluate.capture import Captured
from kvindex_adapters.files import replacing


def save(layers: list[Captured], file: Path) -> None:
    """Write the layers to `file`."""
    tensors = {f"{i}.keys": layer.keys.contiguous() for i, layer in enumerate(layers)}
    tensors |= {f"{i}.queries": layer.queries.contiguous() for i, layer in enumerate(layers)}
    numbers = [{"scale": layer.scale, "softcap": layer.softcap} for layer in layers]
    with replacing(file, "keep") as new:
        save_file(tensors, new, metadata={"layers": json.dumps(numbers)})


def load(file: Path) -> list[Captured]:
    """The layers that `save` wrote. Raises ValueError for another file."""
    try:
        with safe_open(file, framework="pt") as held:
            numbers = json.loads((held.metadata() or {})["layers"])
            return [
                Captured(held.get_tensor(f"{i}.keys"), held.get_tensor(f"{i}.queries"), **layer)
                for i, layer in enumerate(numbers)
            ]
    except (SafetensorError, KeyError) as error:
        raise ValueError(
            f"keep: got {str(file)!r}, allowed is a file that this script has written ({error})"
        ) from error
