"""Which fused step serves a configuration of ParisKV, over which codes."""

from __future__ import annotations

from typing import Any

from kvindex_cuda.memory.layout import BLOCK, Layout, SubspaceLayout
from kvindex_cuda.pariskv.base_step import MOST_HEADS, BaseStep
from kvindex_cuda.pariskv.one_stage import OneStage
from kvindex_cuda.pariskv.step import PLANES, Step
from kvindex_cuda.pariskv.table_step import TableStep

STEPS: dict[str, type[BaseStep]] = {
    "votes": Step,
    "all": OneStage,
    "tiers": TableStep,
    "dots": TableStep,
}
"""By kind: `fast` and `precise`; `scan`; `paper`; `accurate`, and what shares their fields."""

WIDEST = 256
"""Head dimension of steps by look-ups: points of tiers fit a byte, tables fit shared memory."""

PER_KEY = dict(weights="log", weight_bits=16, block="key")


def kind_of(index: Any) -> str | None:
    """The kind of step for a ParisKV, or None where its ops run one by one."""
    config, g = index.config, index.geometry
    served = (
        config.group in ("mean_share", "max_share")
        and config.center in (0, BLOCK)
        and g.group_size <= MOST_HEADS
        and g.head_dim % 8 == 0
    )
    if not served:
        return None
    if all(getattr(config, name) == value for name, value in PER_KEY.items()):
        if config.coarse == "none":
            return "all"
        planes = min(config.query_max, 2**15 // g.head_dim) <= max(PLANES.values())
        return (
            "votes"
            if (config.coarse, config.candidates_per) == ("dots", "group") and planes
            else None
        )
    log = config.weights == "log"
    if config.block != "subspace" or g.head_dim > WIDEST or (log and config.weight_bits == 16):
        return None
    if (config.coarse, config.candidates_per) == ("tiers", "head"):
        return "tiers"
    return "dots" if (config.coarse, config.candidates_per) == ("dots", "group") and log else None


def layout_of(index: Any) -> Layout:
    """How the codes of such an index lie."""
    config, D = index.config, index.geometry.head_dim
    if config.block == "key":
        return Layout(D, config.magnitude_bits)
    weight_bytes = 1 if config.weights == "log" else 2
    return SubspaceLayout(D, config.magnitude_bits, weight_bytes, bool(config.center))


def options_of(kind: str, config: Any) -> dict[str, Any]:
    """What a step of a kind is told of a `ParisKVConfig`."""
    options = dict(seed=config.seed, policy=config.group)
    if kind in ("votes", "all"):
        options["centered"] = bool(config.center)
    if kind != "all":
        options["query_max"] = config.query_max
    if kind in ("tiers", "dots"):
        options |= dict(dots=kind == "dots", weight_bits=config.weight_bits)
    return options


def room_of(kind: str, tokens: int, candidates: int) -> int:
    """What a step of a kind must have room for: its `most`."""
    return candidates if kind == "votes" else tokens
