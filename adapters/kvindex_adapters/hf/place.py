"""Where an index runs that nobody has told: on kernels, with rows on the host, where they can."""

from __future__ import annotations

import warnings
from collections.abc import Collection
from typing import Any

import torch

from kvindex.core import backend
from kvindex.core.config import parse_spec


def placed(
    device: torch.device | str | None, index: str, options: Collection[str] = ()
) -> dict[str, Any]:
    """Options for an index on this device, but for those that its line or `options` name.

    None on a CPU. On a GPU `backend="cuda"` and `store="host"` (pinned memory that kernels read),
    or none where the kernels cannot run, with a warning that says why.
    """
    given = {*parse_spec(index.partition("+")[0])[1], *options}
    if device is None or torch.device(device).type != "cuda" or "backend" in given:
        return {}
    try:
        backend.resolve("cuda").ready(torch.device(device))
    except (ImportError, RuntimeError) as error:
        warnings.warn(f"the index runs as plain torch on the GPU: {error}", stacklevel=2)
        return {}
    ours = {"backend": "cuda", "store": "host"}
    return {name: value for name, value in ours.items() if name not in given}
