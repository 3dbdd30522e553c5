"""The options that `additional_config={"kvindex": {…}}` may contain."""

from __future__ import annotations

import difflib
import re
from collections.abc import Mapping
from dataclasses import dataclass, fields

import kvindex
from kvindex.core import check
from kvindex.core.config import make_config, read_options, split_spec, unknown
from kvindex.pariskv.block_layout import BLOCK, Layout, SubspaceLayout
from kvindex.pariskv.config import ParisKVConfig

BACKEND = "KVINDEX"
"""Optional value of `attention_backend`. vLLM raises an error for it without the plug-in."""

KEY = "kvindex"
"""The key of `additional_config` for the plug-in's options."""

INDEX = "pariskv"
"""The only index that an engine can use, because its codes depend only on the keys of their
block."""

DEFAULT = f"{INDEX}:sign_decoder=mean"
"""The default index. It needs no matrix per sequence, for which pages on a GPU have no room."""

ROWS = "device", "host"
"""Where keys and values may be stored."""


@dataclass(frozen=True)
class Options:
    """Options of the search.

    Args:
        index: Name and options of the index, for example "pariskv:preset=paper".
        k: Rows to retrieve per KV head in a decode step.
        sink: Tokens at the beginning of a sequence that are always attended to.
        local_window: Newest tokens that are always attended to. Up to 255 more tokens are, because
            only whole blocks of 256 tokens are searched.
        dense_below: Length below which a sequence gets full attention.
        rows: Where keys and values are stored: "device" for vLLM's pages, or "host" for pinned
            memory.
        cached_rows: With `rows="host"`, rows per KV head and layer that stay on the device, for all
            sequences together. A power of two.

    Raises:
        ValueError: A value is not supported.
    """

    index: str = DEFAULT
    k: int = 100
    sink: int = 64
    local_window: int = 256
    dense_below: int = 2048
    rows: str = "device"
    cached_rows: int = 4096

    def __post_init__(self) -> None:
        check.wanted_rows(self.k)
        check.at_least("sink", self.sink, 0)
        check.at_least("local_window", self.local_window, 0)
        check.at_least("dense_below", self.dense_below, 0)
        if self.rows not in ROWS:
            raise ValueError(f"rows: got {self.rows!r}, allowed is one of {', '.join(ROWS)}")
        cached = check.at_least("cached_rows", self.cached_rows, 4)
        if cached & (cached - 1):
            raise ValueError(f"cached_rows: got {cached}, allowed is a power of two from 4")
        self.layout(8)

    @staticmethod
    def of(given: object) -> Options:
        """Make options from a mapping. For an unknown name, the ValueError suggests similar
        names."""
        if not isinstance(given, Mapping):
            raise ValueError(f"kvindex: got {given!r}, allowed is a mapping from name to value")
        known = [field.name for field in fields(Options)]
        for name in given:
            if name not in known:
                raise ValueError(unknown("option", name, known))
        return Options(**given)

    @staticmethod
    def from_additional_config(
        additional_config: object, *, required: bool = False
    ) -> Options | None:
        """Read an engine's options from its `additional_config`.

        Args:
            additional_config: vLLM's value: a mapping, or an object of another plug-in.
            required: Whether missing options are an error, because `attention_backend` names the
                plug-in.

        Returns:
            The options, or None if the key "kvindex" is missing.

        Raises:
            ValueError: A key is a misspelling of "kvindex", required options are missing, or an
                option is wrong.
        """
        given = additional_config if isinstance(additional_config, Mapping) else {}
        for key in given:
            if key != KEY and _resembles(str(key)):
                raise ValueError(f"kvindex: additional_config: got {key!r}, allowed is {KEY!r}")
        if KEY in given:
            return Options.of(given[KEY])
        if required:
            raise ValueError(
                f"kvindex: additional_config: got {additional_config!r}, allowed with "
                f'attention_backend="{BACKEND}" is {{"{KEY}": {{…}}}} with options of the search, '
                f'or {{"{KEY}": {{}}}} for the defaults'
            )
        return None

    @property
    def config(self) -> ParisKVConfig:
        """The index's configuration.

        Raises:
            ValueError: The index or its options are not supported.
        """
        name, written = split_spec(self.index)
        if name != INDEX:
            raise ValueError(
                f"index: got {self.index!r}, allowed is {INDEX!r} with its options: sequences "
                "share pages, and only its codes depend on nothing but their own block"
            )
        kind = kvindex.get(INDEX)
        given = read_options(written, kind.Config)
        preset = given.pop("preset", None)
        config: ParisKVConfig = make_config(kind, preset, given)
        return config

    def explain(self) -> str:
        """Describe which rows a decode step retrieves, and in which sequences."""
        return (
            f"By {self.index}: k={self.k} rows of sequences of at least {self.dense_below} tokens, "
            f"in addition to {self.sink} first and {self.local_window} or more newest ones"
        )

    def layout(self, head_dim: int) -> Layout:
        """Return the layout of codes in their pages. Raise ValueError if pages cannot store these
        codes."""
        config = self.config
        kind = config.block, config.weights, config.center
        if kind in (("key", "log", BLOCK), ("key", "log", 0)) and config.weight_bits == 16:
            return Layout(head_dim, config.magnitude_bits)
        if kind == ("subspace", "bfloat16", 0):
            return SubspaceLayout(head_dim, config.magnitude_bits)
        raise ValueError(
            f"index: got {self.index!r}, allowed are options whose codes fill blocks of {BLOCK} "
            "tokens: block='key' with weights='log' of 16 bits and a center of 256 or 0, or "
            "preset='paper'"
        )


def _resembles(key: str) -> bool:
    """Return True if a key of `additional_config` is probably a misspelling of "kvindex"."""
    letters = re.sub("[^a-z]", "", key.lower())
    return letters.startswith(KEY) or bool(difflib.get_close_matches(letters, [KEY], cutoff=0.85))
