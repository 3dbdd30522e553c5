"""`Decoder`: a model of the Llama family that generates through any index, or without one."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from functools import cached_property
from pathlib import Path
from typing import Any, Self, TypedDict, Unpack, overload

import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers.generation.streamers import BaseStreamer

from kvindex.core import check
from kvindex.core.capability import capability
from kvindex.core.protocol import RunsOps
from kvindex_adapters.decoder.batch import Prompts, encode, is_one, left_padded, prompts_of
from kvindex_adapters.decoder.config import DecoderConfig, check_model
from kvindex_adapters.decoder.dense import DenseAttention
from kvindex_adapters.decoder.fused import Fused
from kvindex_adapters.decoder.fused import refusal as fused_refusal
from kvindex_adapters.decoder.quantized import PLAIN, check_weights, quantize
from kvindex_adapters.decoder.run import Run
from kvindex_adapters.decoder.sampling import Sampling
from kvindex_adapters.decoder.session import Attention, Session
from kvindex_adapters.decoder.weights import Weights, read_weights
from kvindex_adapters.hf.cache import check_dense
from kvindex_adapters.hf.generate import INDEX, Generation, K, check_attach_options
from kvindex_adapters.hf.layer_options import IndexFactory, LayerOptions, Ropes
from kvindex_adapters.hf.load_model import load
from kvindex_adapters.hf.prefill import Progress, Prompt
from kvindex_adapters.hf.rotary import rotary_frequencies
from kvindex_adapters.hf.token_timer import TokenTimer
from kvindex_adapters.hf.tokenizer import punctuated

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
    chunk: int
    """Tokens of the prompt that are read at a time (1024)."""
    graphs: bool
    """Whether a token may be one CUDA graph (True); without any, results are the same."""
    fused: bool
    """Whether a token's products run as Triton kernels on a GPU (True); else as torch's."""


class Decoder:
    """A model's weights and its tokenizer; each call of `generate` is a sequence of its own.

    Made by `of` or `from_pretrained`. The weights are the model's own, which must not move
    meanwhile; of `weights="fp8"` the layers' matrices are copies.
    """

    def __init__(
        self,
        weights: Weights,
        config: DecoderConfig,
        ropes: Ropes,
        tokenizer: Any,
        ends: Collection[int],
    ) -> None:
        self.weights, self.config, self.tokenizer = weights, config, tokenizer
        self.ends = frozenset(ends)
        """Tokens that end an answer, unless a call names others."""
        self._ropes = ropes

    @classmethod
    def of(cls, model: PreTrainedModel, tokenizer: Any = None, *, weights: str = PLAIN) -> Self:
        """A decoder of a loaded model; tokenizer: None where prompts are ids.

        weights: "plain", as the model has them, or "fp8": the layers' matrices are copies, float8
        e4m3 with a scale for each row. The model stays as it is; its matrices are freed with it.

        Raises TypeError for what is no transformers model, UnsupportedError (a ValueError) for one
        that the decoder does not run, ValueError for weights of another kind, or without Triton.
        """
        check_weights(weights)
        check_model(model)
        config = DecoderConfig.of(model)
        ropes = {number: rotary_frequencies(model.model, number) for number in range(config.layers)}
        end = model.generation_config.eos_token_id
        ends = [] if end is None else [end] if isinstance(end, int) else list(end)
        read = read_weights(model)
        made = read if weights == PLAIN else quantize(read)
        return cls(made, config, ropes, tokenizer, ends)

    @classmethod
    def from_pretrained(
        cls,
        model: str | Path,
        *,
        gguf_file: str | None = None,
        lora: Path | None = None,
        dtype: torch.dtype = torch.float32,
        device: str = "cpu",
        weights: str = PLAIN,
    ) -> Self:
        """A decoder of a folder with safetensors, a .gguf file, or a hub id.

        gguf_file: its name inside the folder; lora: a low-rank addition to merge; weights: as of
        `of`, where those that were quantized are freed. Raises FileNotFoundError for what is not
        there, ValueError for what cannot be loaded, and what `of` raises.
        """
        check_weights(weights)
        loaded = load(model, gguf_file=gguf_file, lora=lora, dtype=dtype, device=device)
        return cls.of(*loaded, weights=weights)

    @property
    def device(self) -> torch.device:
        """Where the weights are."""
        return self.weights.embedding.device

    @overload
    def generate(
        self,
        prompt: Prompt,
        *,
        streamer: BaseStreamer | None = None,
        on_progress: Progress | None = None,
        **options: Unpack[Options],
    ) -> Generation: ...

    @overload
    def generate(
        self,
        prompt: Prompts,
        *,
        streamer: None = None,
        on_progress: Progress | None = None,
        **options: Unpack[Options],
    ) -> list[Generation]: ...

    def generate(
        self,
        prompt: Prompt | Prompts,
        *,
        streamer: BaseStreamer | None = None,
        on_progress: Progress | None = None,
        **options: Unpack[Options],
    ) -> Generation | list[Generation]:
        """Generate an answer to a prompt, or to each of a list of prompts in one batch.

        prompt: text as it is, messages for the tokenizer's chat template, or ids int64 `[N]`;
        streamer: one of transformers, which gets the tokens of one prompt as they come;
        on_progress: called with a phase, tokens done and tokens in all (of the longest prompt);
        options: `Options`. An answer ends with its stop token, if it has one. Times and the report
        are those of the whole batch.

        Of the model's generation configuration it takes the end tokens alone, where `kvhf.generate`
        takes all of it: temperature, penalties and lengths are what the options say.

        Raises ValueError for an empty prompt, sizes out of range or options that do not fit,
        TypeError for an option that does not exist.
        """
        rows = encode(self.tokenizer, prompts_of(prompt), self.config)
        if streamer is not None and len(rows) > 1:
            raise ValueError(f"streamer: got one for {len(rows)} prompts, allowed is one prompt")
        run = self._begin(rows, **options)
        timer = TokenTimer(streamer, on_progress, run.ids[0], run.max_new_tokens)
        timer.put(run.ids[:1])
        tokens = []
        for token in run.tokens(on_progress):
            tokens.append(token)
            timer.put(token[:1])
        timer.end()
        pairs = zip(rows, run.cut(tokens), strict=True)
        made = [self._generation(ids, answer, timer, run.session) for ids, answer in pairs]
        return made[0] if is_one(prompt) else made

    def stream(self, prompt: Prompt | Prompts, **options: Unpack[Options]) -> Iterator[Tensor]:
        """Tokens int64 `[B]` on the CPU as they come, one of each prompt at a time.

        prompt, options: as of `generate`, whose errors it raises. It ends when each row has had a
        stop token; what a row gets after its own means nothing.
        """
        return self.start(prompt, **options).tokens()

    def start(self, prompt: Prompt | Prompts, **options: Unpack[Options]) -> Run:
        """A run that has not read its prompts yet, which holds what `stream` goes through.

        prompt, options: as of `generate`, whose errors it raises.
        """
        rows = encode(self.tokenizer, prompts_of(prompt), self.config)
        return self._begin(rows, **options)

    def explain(self, *, batch: int = 1, **options: Unpack[Options]) -> str:
        """Which path a token of so many prompts would take, and why, a line each.

        options: as of `generate`, whose errors it raises. A layer that must hold tokens before it
        can tell says so; `start(prompt, …).explain()` tells of a run as it is.
        """
        check.at_least("batch", batch, 1)
        return self._begin([torch.zeros(1, dtype=torch.int64)] * batch, **options).explain()

    def _begin(
        self,
        rows: list[Tensor],
        *,
        index: str | IndexFactory | None = INDEX,
        k: int = K,
        attach_options: Mapping[str, Any] | None = None,
        max_new_tokens: int = 256,
        sampling: Sampling = GREEDY,
        stop: Collection[int] | None = None,
        chunk: int = 1024,
        graphs: bool = True,
        fused: bool = True,
    ) -> Run:
        """A run that has not read its prompts yet. Raises for bad options."""
        check.at_least("chunk", chunk, 2)
        check.at_least("max_new_tokens", max_new_tokens, 1)
        check.flag("graphs", graphs)
        check.flag("fused", fused)
        ids, padding = left_padded(rows, self.device)
        room = ids.shape[1] + max_new_tokens
        if index is None:
            layers = self._dense_layers(room)
        else:
            check_attach_options(attach_options)
            given = {"graphs": graphs, **punctuated(index, self.tokenizer, attach_options)}
            layers = self._indexed_layers(LayerOptions(index=index, k=k, **given), room)
        serves = fused and fused_refusal(self.weights, len(ids)) is None
        kernels = self._kernels if serves else None
        session = Session(self.weights, self.config, layers, padding, kernels)
        return Run(
            session,
            ids,
            sampling=sampling,
            max_new_tokens=max_new_tokens,
            chunk=chunk,
            stops=self.ends if stop is None else frozenset(stop),
            graphs=graphs,
        )

    @cached_property
    def _kernels(self) -> Fused:
        return Fused(self.weights)

    def _dense_layers(self, capacity: int) -> list[Attention]:
        return [DenseAttention(self.config.scale, capacity) for _ in range(self.config.layers)]

    def _indexed_layers(self, options: LayerOptions, capacity: int) -> list[Attention]:
        """The attention of each layer: of `dense_layers` without an index."""
        numbers = list(range(self.config.layers))
        check_dense(options.dense_layers, len(numbers), numbers, {})
        ropes = {i: rope for i, rope in self._ropes.items() if i not in options.dense_layers}
        options.probe(ropes, lambda number: self._geometry())
        return [
            options.make(ropes, i, **self._geometry())
            if i in ropes
            else DenseAttention(self.config.scale, capacity)
            for i in numbers
        ]

    def _geometry(self) -> dict[str, Any]:
        """What an index of one layer is told of the model."""
        config, width = self.config, self.config.head_dim
        sizes = dict(q_heads=config.q_heads, kv_heads=config.kv_heads)
        where = dict(dtype=self.weights.embedding.dtype, device=self.device)
        return {**sizes, "head_dim": width, "value_dim": width, "scale": config.scale, **where}

    def _generation(
        self, ids: Tensor, answer: Tensor, timer: TokenTimer, session: Session
    ) -> Generation:
        made = next(iter(session.indexes()), None)
        runs = None if made is None else capability(made, RunsOps)
        tokenizer = self.tokenizer
        return Generation(
            text="" if tokenizer is None else tokenizer.decode(answer, skip_special_tokens=True),
            prompt_ids=ids.to(self.device),
            answer_ids=answer,
            prefill_s=timer.first - timer.start,
            token_s=(timer.last - timer.first) / max(len(answer) - 1, 1),
            report=None if made is None else session.report(),
            config=None if made is None else made.config,
            backend=None if runs is None else runs.backend,
        )
