"""Which fused step serves a configuration of ParisKV, over which codes."""

from __future__ import annotations

from typing import Any

from kvindex_cuda.memory.layout import BLOCK, Layout, SubspaceLayout
from kvindex_cuda.pariskv.base_step import MOST_HEADS, BaseStep
from kvindex_cuda.pariskv.step import PLANES, Step
from kvindex_cuda.pariskv.table_step import TableStep

STEPS: dict[str, type[BaseStep]] = {"votes": Step, "tiers": TableStep}
"""By kind: of the presets `fast` and `precise`, and of `paper`."""

OPTIONS: dict[str, dict[str, Any]] = {
    "votes": dict(
        coarse="dots", candidates_per="group", block="key", weights="log", weight_bits=16
    ),
    "tiers": dict(coarse="tiers", candidates_per="head", block="subspace", weights="bfloat16"),
}
"""What a kind serves."""

WIDEST = 256
"""Head dimension of steps by look-ups: points of tiers fit a byte, tables fit shared memory."""


def kind_of(index: Any) -> str | None:
    """The kind of step for a ParisKV, or None where its ops run one by one."""
    config, g = index.config, index.geometry
    served = (
        config.group in ("mean_share", "max_share")
        and config.center in (0, BLOCK)
        and config.single_stage_below == 0
        and g.group_size <= MOST_HEADS
        and g.head_dim % 8 == 0
    )
    fits = {
        "votes": min(config.query_max, 2**15 // g.head_dim) <= max(PLANES.values()),
        "tiers": g.head_dim <= WIDEST,
    }
    for kind, options in OPTIONS.items():
        if all(getattr(config, name) == value for name, value in options.items()):
            return kind if served and fits[kind] else None
    return None


def layout_of(index: Any) -> Layout:
    """How the codes of such an index lie."""
    layout = SubspaceLayout if index.config.block == "subspace" else Layout
    return layout(index.geometry.head_dim, index.config.magnitude_bits)


def options_of(kind: str, config: Any) -> dict[str, Any]:
    """What a step of a kind is told of a `ParisKVConfig`."""
    options = dict(seed=config.seed, policy=config.group)
    if kind == "votes":
        options |= dict(query_max=config.query_max, centered=bool(config.center))
    return options


def room_of(kind: str, tokens: int, candidates: int) -> int:
    """What a step of a kind must have room for: its `most`."""
    return candidates if kind == "votes" else tokens
