"""`Options`: what `Decoder.generate` and `Decoder.stream` take beside a prompt."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any, TypedDict

from kvindex_adapters.common.layer_options import IndexFactory
from kvindex_adapters.decoder.sampling import Sampling

GREEDY = Sampling()
"""The likeliest token each time."""


class Options(TypedDict, total=False):
    """Options of `Decoder.generate` and `Decoder.stream`."""

    index: str | IndexFactory | None
    """A name, a line or a factory as `kvhf.attach` takes it ("pariskv"), or None: no index."""
    k: int
    """Rows per KV head that a step retrieves (100)."""
    attach_options: Mapping[str, Any] | None
    """More keywords of `kvhf.attach`; an index that reads punctuation gets the tokenizer's."""
    max_new_tokens: int
    """Longest answer, in tokens (256)."""
    sampling: Sampling
    """How tokens are chosen (the likeliest)."""
    stop: Collection[int] | None
    """Tokens that end an answer (None: the end tokens of the model's generation configuration)."""
    chunk: int | None
    """Tokens of the prompt that a layer computes at a time (None: 1024 on a CPU; on a GPU up to
    4096, as many as activations have room for)."""
    graphs: bool
    """Whether a token may be one CUDA graph (True); without any, results are the same."""
    fused: bool
    """Whether a token's products run as Triton kernels on a GPU (True); else as torch's."""
