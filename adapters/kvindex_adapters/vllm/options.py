"""`Options`: the options of the plug-in in vLLM's `additional_config={"kvindex": {…}}`."""

from __future__ import annotations

import difflib
import re
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

import kvindex
from kvindex.core import check
from kvindex.core.config import make_config, read_options, split_spec, unknown
from kvindex.layer.arguments import AUTO_ERROR, AUTO_ROWS, DEFAULT_K
from kvindex.layer.sparse import PREFILL_DEFAULTS, check_prefill
from kvindex.pariskv.block_layout import BLOCK, Layout, SubspaceLayout
from kvindex.pariskv.config import ParisKVConfig
from kvindex_adapters.vllm import costs, reports
from kvindex_adapters.vllm.reading import Reading

BACKEND = "KVINDEX"
"""Value of vLLM's option `attention_backend` that switches the plug-in on. Without the plug-in,
vLLM raises an error for it."""

KEY = "kvindex"
"""Key of the plug-in's options in `additional_config`."""


def is_named(attention_config: Any) -> bool:
    """Return True if an engine's `AttentionConfig`, or None, has the plug-in's backend."""
    backend = None if attention_config is None else attention_config.backend
    return backend is not None and backend.name == BACKEND


CODES = "kvindex.codes."
"""First letters of the names of the layers that contain codes, among vLLM's layers of an engine."""

INDEX = "pariskv"
"""The only supported index. vLLM shares blocks between sequences, so codes may depend only on the
keys of their own block."""

DEFAULT = f"{INDEX}:sign_decoder=mean"
"""The default index. The option `sign_decoder=mean` avoids a matrix per sequence, for which vLLM's
pages have no room."""

ROWS = "device", "host"
"""Values of the option `rows`: where keys and values are stored."""


@dataclass(frozen=True)
class Options:
    """Options of the plug-in.

    Args:
        index: Name and options of the index, for example "pariskv:preset=paper".
        k: Number of rows (a row is one token's key and value) to retrieve per KV head in a decode
            step, or "auto" for as many as `error` asks for, at most 1,024.
        error: Allowed error of a layer's output, relative to the size of its outputs. A step
            retrieves fewer than `k` rows if fewer are expected to give this error. None: always `k`
            rows, or with `k="auto"` the same as 0.1.
        sink: Number of first tokens that each step attends to exactly.
        local_window: Minimum number of newest tokens that each step attends to exactly. A step
            attends to up to 255 more, because only whole blocks of 256 tokens are searched.
        dense_below: Sequences with fewer tokens use full attention. "auto" for the number that
            `costs` computes: on a CPU 2,048.
        dense_graphs: With `dense_below="auto"`, whether vLLM also captures a CUDA graph of a decode
            step with FlashAttention for each batch size (see `two_graphs`). "auto" for True where
            it is supported.
        rows: Where keys and values are stored: "device" for vLLM's pages, or "host" for pinned
            memory.
        cached_rows: With `rows="host"`, number of rows per KV head and layer in the device's cache,
            for all sequences together. A power of two.
        prefill: How the tokens of a prompt attend: "dense" to all tokens before them, or "sparse"
            to chosen blocks.
        prefill_selector: With `prefill="sparse"`, the rule that chooses blocks: "sampled" or
            "pooled".
        prefill_mass: With `prefill="sparse"`, fraction of the estimated attention weight that the
            chosen blocks of each query head have, in (0, 1].
        prefill_last: With `prefill="sparse"`, number of tokens at the end of a prompt that attend
            to all tokens.

    Raises:
        ValueError: A value is not supported.
    """

    index: str = DEFAULT
    k: int | str = DEFAULT_K
    sink: int = 64
    local_window: int = 256
    dense_below: int | str = costs.AUTO
    dense_graphs: bool | str = costs.AUTO
    rows: str = "device"
    cached_rows: int = 4096
    prefill: str = "dense"
    prefill_selector: str = "sampled"
    prefill_mass: float = 0.95
    prefill_last: int = 128
    error: float | None = None

    def __post_init__(self) -> None:
        if isinstance(self.k, str) and self.k != "auto":
            raise ValueError(f"k: got {self.k!r}, allowed is a number of at least 1, or 'auto'")
        check.wanted_rows(self.most_rows)
        if self.error is not None:
            check.positive("error", self.error)
        if self.allowed_error is not None and self.config.sampling == "none":
            asked = "k: got 'auto'" if self.k == "auto" else f"error: got {self.error}"
            raise ValueError(
                f"{asked}, but the index {self.index!r} does not sample its rows, and cannot "
                "predict the error of fewer rows; pass a number for k and no error, or the preset "
                "'sampled'"
            )
        check.at_least("sink", self.sink, 0)
        check.at_least("local_window", self.local_window, 0)
        costs.checked(self.dense_below)
        if not (isinstance(self.dense_graphs, bool) or self.dense_graphs == costs.AUTO):
            raise ValueError(
                f"dense_graphs: got {self.dense_graphs!r}, allowed is True, False or {costs.AUTO!r}"
            )
        if self.rows not in ROWS:
            raise ValueError(f"rows: got {self.rows!r}, allowed is one of {', '.join(ROWS)}")
        cached = check.at_least("cached_rows", self.cached_rows, 4)
        if cached & (cached - 1):
            raise ValueError(f"cached_rows: got {cached}, allowed is a power of two, at least 4")
        _ = self.reading  # checks its options
        self.layout(8)

    @staticmethod
    def of(given: object) -> Options:
        """Make options from a mapping.

        Args:
            given: Names and values of options.

        Raises:
            ValueError: Options are unknown or out of range. The message reports all of them.
        """
        if not isinstance(given, Mapping):
            raise ValueError(f"{KEY}: got {given!r}, allowed is a mapping of options")
        known = [field.name for field in fields(Options)]
        reasons = [unknown("option", name, known) for name in given if name not in known]
        for name in known:
            if name in given:
                try:
                    Options(**{name: given[name]})
                except ValueError as error:
                    reasons.append(str(error))
        if reasons:
            raise ValueError(reports.joined(reasons))
        options = Options(**given)
        check_prefill(options.prefill, {name: vars(options)[name] for name in PREFILL_DEFAULTS})
        return options

    @staticmethod
    def of_engine(config: Any) -> Options | None:
        """Read an engine's options.

        The backend "KVINDEX" switches the plug-in on. The key "kvindex" of `additional_config` has
        its options.

        Args:
            config: vLLM's `VllmConfig`.

        Returns:
            The options, or None for an engine that does not use kvindex.

        Raises:
            ValueError: Options are wrong, a key is a misspelling of "kvindex", or there are options
                without the backend.
        """
        extra = config.additional_config
        given = extra if isinstance(extra, Mapping) else {}  # or an object of another plug-in
        reasons = [
            f"additional_config: got {key!r}, allowed is {KEY!r}"
            for key in given
            if key != KEY and _resembles(str(key))
        ]
        on = is_named(config.attention_config)
        if KEY in given and not on and not _is_draft(config):
            reasons.append(
                f"attention_backend: got no {BACKEND!r}, although additional_config has options "
                f'for it; allowed is "{BACKEND}" (--attention-backend {BACKEND})'
            )
        options = None
        try:
            options = Options.of(given.get(KEY, {})) if on else None
        except ValueError as error:
            reasons += reports.split(str(error))
        if reasons:
            raise ValueError(reports.joined(reasons))
        return options

    @property
    def most_rows(self) -> int:
        """Largest number of rows to retrieve per KV head."""
        return AUTO_ROWS if isinstance(self.k, str) else self.k

    @property
    def usual_rows(self) -> int:
        """Number of rows with which the time of a search is estimated. If an error decides how many
        rows a search retrieves, it is not known before."""
        return self.most_rows if self.allowed_error is None else min(self.most_rows, costs.ROWS)

    @property
    def allowed_error(self) -> float | None:
        """Allowed error of a layer's output, or None if each search retrieves `k` rows."""
        return AUTO_ERROR if self.error is None and self.k == "auto" else self.error

    @property
    def config(self) -> ParisKVConfig:
        """The configuration of the index.

        Raises:
            ValueError: The index or its options are not supported.
        """
        name, written = split_spec(self.index)
        if name != INDEX:
            raise ValueError(
                f"index: got {self.index!r}, allowed is {INDEX!r}, with or without options; "
                "sequences share pages, so the codes of a block must depend only on its own keys"
            )
        kind = kvindex.get(INDEX)
        given = read_options(written, kind.Config)
        preset = given.pop("preset", None)
        config: ParisKVConfig = make_config(kind, preset, given)
        return config

    @property
    def reading(self) -> Reading:
        """How the tokens of a prompt attend."""
        how = self.prefill, self.prefill_selector, self.prefill_mass, self.prefill_last
        return Reading(*how)

    def explain(self, limit: costs.Limit) -> str:
        """Describe how many rows a decode step retrieves, and in which sequences.

        Args:
            limit: The sequences that search.
        """
        rows = f"k={self.k} rows"
        if self.allowed_error is not None:
            rows = f"up to {self.most_rows} rows, as many as error={self.allowed_error} asks for,"
        return (
            f"By {self.index}: {rows} of {limit.explain()}, in addition to {self.sink} "
            f"first and {self.local_window} or more newest ones"
        )

    def layout(self, head_dim: int) -> Layout:
        """Return the layout of codes in pages. Raise ValueError if codes with these options cannot
        be stored in pages."""
        config = self.config
        kind = config.block, config.weights, config.center
        if kind in (("key", "log", BLOCK), ("key", "log", 0)) and config.weight_bits == 16:
            return Layout(head_dim, config.magnitude_bits)
        if kind == ("subspace", "bfloat16", 0):
            return SubspaceLayout(head_dim, config.magnitude_bits)
        raise ValueError(
            f"index: got {self.index!r}, but codes are stored per block of {BLOCK} tokens; allowed "
            "are the options block='key' with weights='log', weight_bits=16 and center=256 or "
            "center=0, or preset='paper'"
        )


def _is_draft(config: Any) -> bool:
    """Return True for the configuration that vLLM makes for the draft model of an engine that uses
    kvindex. It has the layers of the engine, and a backend of its own."""
    compilation = vars(config).get("compilation_config")
    return compilation is not None and any(
        name.startswith(CODES) for name in compilation.static_forward_context
    )


def _resembles(key: str) -> bool:
    """Return True if a key of `additional_config` is probably a misspelling of "kvindex"."""
    letters = re.sub("[^a-z]", "", key.lower())
    return letters.startswith(KEY) or bool(difflib.get_close_matches(letters, [KEY], cutoff=0.85))
