"""Check whether the kernels support the options of a ParisKV index, and if not, explain why."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

from kvindex.core.geometry import Geometry
from kvindex.ops.coarse import TIERS
from kvindex.ops.codes import SUBSPACE
from kvindex.pariskv.config import ParisKVConfig
from kvindex.storage.store import TensorStore

SERVED: dict[str, dict[str, Any]] = {
    "sign_votes": dict(
        candidates_per="group",
        block="key",
        weights="log",
        weight_bits=16,
        single_stage_below=0,
    ),
    "tiered_votes": dict(
        candidates_per="head", block="subspace", weights="bfloat16", single_stage_below=0
    ),
}
"""Value of the option `coarse` -> values of other options that the kernels require with it."""

POLICIES = "mean_share", "max_share"


def refusal(config: ParisKVConfig, geometry: Geometry) -> str | None:
    """Return None if the kernels support all options of the index.

    Otherwise, return a message about the first option that they do not support.
    """
    if config.coarse not in SERVED:
        return f"coarse: got {config.coarse!r}, allowed is {' or '.join(map(repr, SERVED))}"
    got = {field.name: value for field in fields(config) for value in [vars(config)[field.name]]}
    for name, value in SERVED[config.coarse].items():
        if got[name] != value:
            return f"{name}: got {got[name]!r}, allowed is {value!r}"
    if config.group not in POLICIES and geometry.group_size > 1:
        return f"group: got {config.group!r}, allowed is {' or '.join(map(repr, POLICIES))}"
    if config.coarse == "tiered_votes":
        return too_wide(geometry)
    if query_max_of(config, geometry) * geometry.head_dim >= 2**15:
        return f"query_max: got {config.query_max}, allowed is below 2^15 over head_dim"
    return None


def too_wide(geometry: Geometry) -> str | None:
    """Return an error message if the head dimension is too large for tiered votes, else None.

    Tiered votes are one kind of coarse scores of keys. The score of a key must fit in one byte.
    """
    most = 255 // len(TIERS) * SUBSPACE
    if geometry.head_dim > most:
        got = f"head_dim: got {geometry.head_dim}"
        return f"{got}, allowed is at most {most} with coarse='tiered_votes'"
    return None


def query_max_of(config: ParisKVConfig, geometry: Geometry) -> int:
    """Return the largest integer that a coordinate of a quantized query may have.

    This is the option `query_max`, but at most `2^15 / D`.
    """
    return min(config.query_max, 2**15 // geometry.head_dim)


def unreadable(rows: object) -> str | None:
    """Return a message if kernels cannot attend to the rows of a store, else None."""
    if not isinstance(rows, TensorStore):
        return f"store: got {type(rows).__name__}, allowed is TensorStore"
    if rows.row_codec != "plain":
        return f"row_codec: got {rows.row_codec!r}, allowed is 'plain'"
    return None
