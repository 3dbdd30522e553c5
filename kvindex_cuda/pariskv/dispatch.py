"""Choose the kind of fused decode step for a ParisKV configuration, or report why no kind supports
it."""

from __future__ import annotations

from typing import Any

from kvindex.core.geometry import Geometry
from kvindex.pariskv.config import ParisKVConfig
from kvindex.pariskv.sign_votes import PLANES
from kvindex.storage.codecs import BITS
from kvindex.storage.store import AddressedRows
from kvindex_cuda.memory.layout import BLOCK, Layout, SubspaceLayout
from kvindex_cuda.ops.attend_latents import MOST_HEADS as LATENT_HEADS
from kvindex_cuda.ops.attend_latents import unserved
from kvindex_cuda.pariskv.steps.base import MOST_HEADS, BaseStep
from kvindex_cuda.pariskv.steps.latents import TILE, LatentsStep
from kvindex_cuda.pariskv.steps.sign_votes import SignVotesStep
from kvindex_cuda.pariskv.steps.tiered_votes import TieredVotesStep

STEPS: dict[str, type[BaseStep]] = {
    "sign_votes": SignVotesStep,
    "tiered_votes": TieredVotesStep,
    "latents": LatentsStep,
}
"""The class of each kind of step.

`sign_votes` supports the presets `sampled`, `fast` and `precise`, and `tiered_votes` supports
`paper`. `latents` supports the same presets as `sign_votes`, for latents with more query heads or
coordinates than fit into the kernels of `sign_votes`.
"""

VOTES = dict(
    coarse="sign_votes", candidates_per="group", block="key", weights="log", weight_bits=16
)

OPTIONS: dict[str, dict[str, Any]] = {
    "sign_votes": VOTES,
    "tiered_votes": dict(
        coarse="tiered_votes", candidates_per="head", block="subspace", weights="bfloat16"
    ),
    "latents": VOTES,
}
"""The options that each kind of step requires."""

POLICIES = "mean_share", "max_share"

WIDEST = 256
"""Largest head dimension for tiered votes: up to it, votes fit into a byte and tables into shared
memory.

In other kinds of step, the shared memory has room for the queries of only `TILE` heads beyond this
dimension."""

SCANNED = 352
"""Largest head dimension of `sign_votes`: beyond it, the codes that the kernel `scan` copies do not
fit into the shared memory of a multiprocessor."""


def kind_of(config: ParisKVConfig, geometry: Geometry) -> str | None:
    """Return the kind of fused decode step for a ParisKV index, or None if no kind supports the
    index (`refusal` returns why)."""
    if refusal(config, geometry) is not None:
        return None
    kind = next(kind for kind in OPTIONS if not _unlike(config, kind))
    return "latents" if kind == "sign_votes" and _is_large(geometry) else kind


def _is_large(geometry: Geometry) -> bool:
    """Return True if a step of the kind `sign_votes` does not support a geometry, because of its
    query heads or its head dimension."""
    return geometry.group_size > _most_heads(geometry) or geometry.head_dim > SCANNED


def _most_heads(geometry: Geometry) -> int:
    """Return how many query heads per KV head a fused decode step supports at most.

    The step for latent attention supports more. The result does not apply to it.
    """
    return MOST_HEADS if geometry.head_dim <= WIDEST else TILE


def refusal(config: ParisKVConfig, geometry: Geometry) -> str | None:
    """Return why no fused decode step supports a ParisKV index: its first unsupported option, and
    the values allowed. Return None if a step supports the index."""
    kind = min(OPTIONS, key=lambda kind: len(_unlike(config, kind)))
    for name in _unlike(config, kind):
        return _said(name, getattr(config, name), f"{OPTIONS[kind][name]!r} for {kind!r}")
    query_max = min(config.query_max, 2**15 // geometry.head_dim)
    most, widest = max(PLANES.values()), f"up to {WIDEST} for {kind!r}"
    limits = [
        ("group", config.group, config.group in POLICIES, " or ".join(map(repr, POLICIES))),
        ("center", config.center, config.center in (0, BLOCK), f"0 or {BLOCK}"),
        ("single_stage_below", config.single_stage_below, not config.single_stage_below, "0"),
        ("sampling", config.sampling, config.sampling == "none" or kind == "sign_votes", "'none'"),
        ("head_dim", geometry.head_dim, geometry.head_dim % 8 == 0, "a multiple of 8"),
    ]
    heads, most_heads = geometry.group_size, _most_heads(geometry)
    if kind == "sign_votes" and geometry.value_in_key and _is_large(geometry):
        most_heads = LATENT_HEADS
        one = geometry.kv_heads == 1
        limits.append(("kv_heads", geometry.kv_heads, one, f"1 with {heads} heads on each"))
    limits.append(("q_heads", heads, heads <= most_heads, f"{most_heads} a head"))
    if kind == "sign_votes":
        limits.append(("query_max", query_max, query_max <= most, f"up to {most}"))
        scanned = geometry.value_in_key or geometry.head_dim <= SCANNED
        limits.append(("head_dim", geometry.head_dim, scanned, f"up to {SCANNED} for {kind!r}"))
    else:
        limits.append(("head_dim", geometry.head_dim, geometry.head_dim <= WIDEST, widest))
    return next(
        (_said(name, got, allowed) for name, got, fits, allowed in limits if not fits), None
    )


def _unlike(config: ParisKVConfig, kind: str) -> list[str]:
    """Return the names of the options in `config` that do not fit the fused decode step `kind`."""
    return [name for name, value in OPTIONS[kind].items() if getattr(config, name) != value]


def _said(name: str, got: object, allowed: str) -> str:
    return f"{name}: got {got!r}, allowed is {allowed}"


def unreadable(rows: object, geometry: Geometry) -> str | None:
    """Return the reason why kernels cannot attend to the rows of a store, or None if they can.

    A row is the key and the value of a token. Kernels need pages of 256 tokens,
    `[G, 256, row_bytes]`, and read 8 elements of a row at a time. For latents there are separate
    kernels (`ops.attend_latents`).
    """
    if geometry.value_in_key and (why := unserved(geometry)):
        return why
    if geometry.value_dim % 8:
        return _said("value_dim", geometry.value_dim, "a multiple of 8")
    if not isinstance(rows, AddressedRows):
        return _said("store", type(rows).__name__, "one that has AddressedRows")
    if rows.row_codec in BITS:
        return _said("row_codec", rows.row_codec, "'plain', 'int8' or 'fp8'")
    strides = rows.page_tokens, rows.head_bytes, rows.row_bytes
    if strides[:2] != (BLOCK, BLOCK * rows.row_bytes):
        allowed = BLOCK, BLOCK * rows.row_bytes, rows.row_bytes
        return _said("store (tokens of a page, bytes of a head, of a row)", strides, str(allowed))
    return None


def layout_of(config: ParisKVConfig, geometry: Geometry) -> Layout:
    """Return the layout of a ParisKV index's codes."""
    layout = SubspaceLayout if config.block == "subspace" else Layout
    return layout(geometry.head_dim, config.magnitude_bits)


def options_of(kind: str, config: ParisKVConfig) -> dict[str, Any]:
    """Convert the configuration of an index to constructor arguments of its decode step class.

    kind: the kind of decode step, for example "tiered_votes".
    """
    options = dict(seed=config.seed, policy=config.group)
    if kind != "tiered_votes":
        options |= dict(query_max=config.query_max, centered=bool(config.center))
        options |= dict(sampled=config.sampling != "none", tempered=config.sampling == "tempered")
        options |= dict(together=config.sign_decoder == "regression")
    return options


def room_of(kind: str, tokens: int, candidates: int) -> int:
    """Return the argument `most` for the constructor of a fused decode step.

    `most` determines the size of the buffers. It is a number of tokens if the step computes tiered
    votes, and a number of candidates for all other kinds of step.
    """
    return tokens if kind == "tiered_votes" else candidates
