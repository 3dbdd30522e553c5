"""Options of `Decoder.generate` and `Decoder.stream`, in addition to the prompt."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any, TypedDict

from kvindex_adapters.common.layer_options import IndexFactory
from kvindex_adapters.decoder.sampling import Sampling

GREEDY = Sampling()
"""Choose the most likely token each time."""


class Options(TypedDict, total=False):
    """Options of `Decoder.generate` and `Decoder.stream`."""

    index: str | IndexFactory | None
    """Name and options of an index or a factory, as in `kvhf.attach` (default "pariskv"); None for
    full attention."""
    k: int
    """Rows to retrieve per KV head and step (default 100)."""
    attach_options: Mapping[str, Any] | None
    """Further keywords of `kvhf.attach`. An index with the option `punctuation` gets the tokens
    that end a sentence from the tokenizer."""
    max_new_tokens: int
    """Longest answer, in tokens (default 256)."""
    sampling: Sampling
    """How tokens are chosen (default: the most likely one)."""
    stop: Collection[int] | None
    """Tokens that end an answer (default None: the end tokens of the model's generation
    configuration)."""
    chunk: int | None
    """Tokens of the prompt that a layer computes at a time (default None: 1024 on a CPU; on a GPU
    up to 4096, limited by memory)."""
    graphs: bool
    """Whether a decode step may be one CUDA graph (default True). Results do not depend on it."""
    fused: bool
    """Whether Triton kernels run the matrix products of a decode step on a GPU (default True)."""
