"""`Options`: the keyword options of `Decoder.generate`, `stream`, `start` and `explain`."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any, Protocol, TypedDict

from kvindex_adapters.common.layer_options import IndexFactory
from kvindex_adapters.decoder.config import DecoderConfig
from kvindex_adapters.decoder.sampling import Sampling

GREEDY = Sampling()
"""Greedy decoding: always choose the most likely token."""


class DraftModel(Protocol):
    """A model that writes drafts: a `Decoder`."""

    @property
    def config(self) -> DecoderConfig:
        """Sizes of the model."""
        ...


class Options(TypedDict, total=False):
    """Keyword options of `Decoder.generate`, `stream`, `start` and `explain`."""

    index: str | IndexFactory | None
    """Name of an index, possibly with options, or a factory, as in `kvhf.attach` (default
    "pariskv"). None means full attention."""
    k: int | str
    """Number of rows to retrieve per KV head and decode step (default 256), or "auto"."""
    attach_options: Mapping[str, Any] | None
    """Further keyword arguments of `kvhf.attach`. For an index with the option `punctuation`, the
    decoder sets it to the tokenizer's sentence-ending tokens."""
    max_new_tokens: int
    """Maximum number of tokens in the answer (default 256)."""
    sampling: Sampling
    """Sampling parameters (default: always choose the most likely token)."""
    stop: Collection[int] | None
    """Stop tokens (default None: the EOS tokens of the model's generation configuration)."""
    chunk: int | None
    """Number of prompt tokens that a layer computes at a time (default None: 1024 on a CPU, 1024 to
    4096 on a GPU)."""
    graphs: bool
    """Whether a decode step may run as one CUDA graph (default True). The answer is the same
    without."""
    fused: bool
    """Whether Triton kernels compute the matrix products of a decode step on a GPU (default
    True)."""
    speculative_tokens: int | str | None
    """Number of tokens to draft before each verification, "auto" for a number by the acceptance
    seen, or None for one token at a time (default None). See docs/speculation.md."""
    verify: str
    """What verifies the drafts. "index" (default): drafts are copied from the text so far, or
    written by `draft_model`, and verified by attention with the index. "full": drafts are written
    with the index, and verified by full attention, whose tokens the answer then has."""
    draft_model: DraftModel | None
    """A `Decoder` with a smaller model and the same tokenizer, which writes the drafts (default
    None). It uses the same index options, except for those of single layers."""
