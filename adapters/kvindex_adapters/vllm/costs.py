"""When a decode step searches: the option `dense_below`, and the model of times behind "auto".

A search reads less than full attention, but runs more kernels one after another. So it does not
pay for short sequences. With `dense_below="auto"`, this module estimates the time of a layer's
attention in a decode step on a GPU:

    full attention = full_us + bytes of keys and values / full_bytes
    search         = search_us + heads · (head_us + (k - 100) · row_us) + keys · key_us

`heads` is the number of query heads of all sequences, and `keys` counts each token once for each KV
head, or once for each four query heads if that is more: `scan` computes the scores of four query
heads for each key that it reads. `key_us` holds for 128 coordinates.

**Where the numbers come from.** `costs.json` has the numbers of each kind of GPU.
`tools/vllm_costs.py` computes them from the benchmark's result files `decode_step*.json` (32 query
heads, 8 KV heads, bfloat16, k = 100, 4,096 to 4,194,304 tokens, 1 and 8 sequences), in which torch
computes full attention. The model is within 5% of each of these times.

All of these steps retrieve 100 rows per KV head with `pariskv:preset=fast`. What further rows cost
(`row_us`) follows from decode steps of a whole model in vLLM on an H200, with 100 and with 256 rows
of the plug-in's default index (`serving_k100.json` and `serving.json`). An H100 gets the same
number. With `k="auto"`, the number of rows is not known before, and the estimate is that for 100
rows.

**Two decisions.**

- *Which sequences of a batch search* (`Limit.dense_below`). All sequences share the launches of a
  step, so full attention saves only what a search adds for one sequence. In exchange, the kernel
  `attend` reads all rows of this sequence, at the addresses of their pages. It is limited by its
  instructions, so it does not reach the rate of the memory. `pages_bytes` is the rate of the kernel
  `attend_pages`, which does the same in another way (decision 0056). `attend` has not been measured
  with that many rows.
- *Whether a batch searches at all* (`Limit.searches`), if no CUDA graph decides it. Otherwise
  FlashAttention computes the batch.

This module does not import vLLM.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cache
from importlib.resources import files
from typing import Any

import numpy as np

from kvindex.core import check
from kvindex.core.geometry import Geometry

AUTO = "auto"
"""Value of the option `dense_below` with which this module decides."""

LEAST = 2048
"""With "auto", sequences of fewer tokens never search. On a CPU, all others do."""

LATENTS_LEAST = 32_768
"""The same number for multi-head latent attention on a GPU, for whose kernels `costs.json` has no
times. It is a guess: about where a search reads a tenth of the bytes of full attention (sink,
window and selected rows included), but has eight launches in place of two."""

FALLBACK = "H100"
"""Kind of GPU whose numbers are used for a GPU that is not in the table."""

ROWS = 100
"""Rows per KV head and step in the measurements, except those that `row_us` follows from."""

HEADS, DIM = 4, 128
"""Query heads that share the reading of a key, and coordinates of a key in the measurements."""


@dataclass(frozen=True)
class Costs:
    """Times of the attention of one layer in a decode step on one kind of GPU, in microseconds.

    Args:
        full_us: Full attention of an empty sequence.
        full_bytes: Bytes that full attention reads in a microsecond.
        search_us: A search of an empty batch.
        head_us: What a search adds for each query head of a sequence, with `ROWS` rows.
        row_us: What each further row adds for each query head of a sequence.
        key_us: What a search adds for each key.
        pages_bytes: Bytes of keys and values that a step reads in a microsecond for sequences with
            full attention.
        row_bytes: Bytes of a token's keys and values in the model's dtype, in all KV heads of the
            layer.
        heads: Number of query heads of the layer.
        keys: Number of keys of a token.
    """

    full_us: float
    full_bytes: float
    search_us: float
    head_us: float
    row_us: float
    key_us: float
    pages_bytes: float
    row_bytes: int = 0
    heads: int = 0
    keys: int = 0

    def of_layer(self, geometry: Geometry, *, k: int = ROWS, fp8: bool = False) -> Costs:
        """Return the times for layers of this geometry.

        Args:
            geometry: Geometry of the layers.
            k: Number of rows that each KV head retrieves.
            fp8: Whether keys and values are in FP8. Full attention then reads one byte per number.
                The kernel `attend` is limited by its instructions, so it is no faster.
        """
        g = geometry
        width = g.head_dim if g.value_in_key else g.head_dim + g.value_dim
        return replace(
            self,
            full_bytes=self.full_bytes * (g.dtype.itemsize if fp8 else 1),
            head_us=self.head_us + (k - ROWS) * self.row_us,
            key_us=self.key_us * g.head_dim / DIM,
            row_bytes=g.kv_heads * width * g.dtype.itemsize,
            heads=g.q_heads,
            keys=max(g.kv_heads, -(-g.q_heads // HEADS)),
        )

    def full(self, lengths: Any) -> float:
        """Return the time of full attention, for sequences of these lengths."""
        return float(self.full_us + np.sum(lengths) * self.row_bytes / self.full_bytes)

    def search(self, lengths: Any, dense_below: int = 0) -> float:
        """Return the time of a step that searches in sequences of at least `dense_below` tokens.

        Args:
            lengths: Length of each sequence, integers `[B]`.
            dense_below: Shorter sequences get full attention in the same step.
        """
        lengths = np.asarray(lengths)
        long = lengths >= dense_below
        searched = long.sum() * self.heads * self.head_us
        searched += lengths[long].sum() * self.keys * self.key_us
        others = lengths[~long].sum() * self.row_bytes / self.pages_bytes
        return float(self.search_us + searched + others)

    def dense_below(self) -> int:
        """Return the length from which a search takes less time than full attention in the same
        launches."""
        saved = self.row_bytes / self.pages_bytes - self.keys * self.key_us
        if saved <= 0:
            return 2**31 - 1  # no sequence is as long
        return max(LEAST, math.ceil(self.heads * self.head_us / saved))


@dataclass(frozen=True)
class Limit:
    """Decides which sequences search in a decode step.

    Args:
        dense_below: Sequences of fewer tokens get full attention.
        costs: Times of a layer, or None if whole batches are not decided by their time: on a CPU,
            with rows in host memory, and if the user has set `dense_below` to a number.
    """

    dense_below: int
    costs: Costs | None = None

    def searches(self, lengths: Any, steps: Any = None) -> bool:
        """Return False if full attention takes less time for a whole batch.

        Args:
            lengths: Length of each sequence, integers `[B]`.
            steps: Length of the sequence at each decode step. They differ from `lengths` if several
                tokens of a sequence are verified: then full attention reads its rows once.
        """
        if self.costs is None:
            return True
        taken = self.costs.search(lengths if steps is None else steps, self.dense_below)
        return taken < self.costs.full(lengths)

    def explain(self) -> str:
        """Describe which sequences search."""
        text = f"sequences of at least {self.dense_below} tokens"
        if self.costs is None:
            return text
        return f"{text}, unless FlashAttention is estimated to be faster for the whole batch"


def limit_of(
    given: int | str,
    geometry: Geometry,
    gpu: str | None,
    *,
    batches: bool,
    k: int = ROWS,
    fp8: bool = False,
) -> Limit:
    """Return the `Limit` of an engine's layers.

    Args:
        given: The option `dense_below`.
        geometry: Geometry of the layers.
        gpu: Name of the GPU, or None on a CPU.
        batches: Whether FlashAttention can compute a whole batch instead.
        k: Number of rows that each KV head retrieves.
        fp8: Whether keys and values are in FP8.
    """
    if given != AUTO:
        return Limit(int(given))
    if gpu is None:
        return Limit(LEAST)
    if geometry.value_in_key:
        return Limit(LATENTS_LEAST)
    costs = kind_of(gpu).of_layer(geometry, k=k, fp8=fp8)
    return Limit(costs.dense_below(), costs if batches else None)


def checked(given: object) -> int | str:
    """Return the option `dense_below` if it is "auto" or an integer of at least 0, otherwise raise
    ValueError."""
    if given == AUTO:
        return AUTO
    try:
        return check.at_least("dense_below", given, 0)
    except ValueError as error:
        raise ValueError(f"{error}, or {AUTO!r}") from None


def kind_of(gpu: str) -> Costs:
    """Return the times of a GPU, without those that depend on the layer.

    Args:
        gpu: Name of the GPU, as torch reports it.
    """
    table = read()
    kind = next((kind for kind in table if kind in gpu.split()), FALLBACK)
    return Costs(**table[kind])


@cache
def read() -> Mapping[str, Any]:
    """Read `costs.json`: kind of GPU -> name of a field of `Costs` -> number."""
    text = files("kvindex_adapters.vllm").joinpath("costs.json").read_text(encoding="utf-8")
    kinds: Mapping[str, Any] = json.loads(text)["gpus"]
    return kinds
