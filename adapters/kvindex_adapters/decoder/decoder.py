"""`Decoder`: run a model of the Llama family with any index, or with full attention."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from contextlib import nullcontext
from pathlib import Path
from typing import Any, Self, Unpack, overload

import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers.generation.streamers import BaseStreamer

from kvindex.core import check
from kvindex.core.capability import capability
from kvindex.core.protocol import RunsOps
from kvindex.layer import AttentionLayer
from kvindex_adapters.common.layer_options import IndexFactory, LayerOptions
from kvindex_adapters.common.parallel import BOTH_SHARDED, is_sharded
from kvindex_adapters.common.prompt import Prompt
from kvindex_adapters.common.prompt_chunks import Progress, check_prompt
from kvindex_adapters.common.token_timer import TokenTimer
from kvindex_adapters.common.unsupported import UnsupportedError
from kvindex_adapters.decoder.attentions import make_attentions
from kvindex_adapters.decoder.batch import (
    Prompts,
    check_tokenizer,
    encode,
    is_one,
    left_padded,
    prompts_of,
)
from kvindex_adapters.decoder.config import DecoderConfig, check_model
from kvindex_adapters.decoder.dense import DenseAttention
from kvindex_adapters.decoder.open_session import OpenSession
from kvindex_adapters.decoder.options import GREEDY, Options
from kvindex_adapters.decoder.prefill import default_chunk
from kvindex_adapters.decoder.quantized import PLAIN, check_weights
from kvindex_adapters.decoder.reading import Reading
from kvindex_adapters.decoder.run import Run
from kvindex_adapters.decoder.sampling import Sampling
from kvindex_adapters.decoder.session import Session
from kvindex_adapters.hf.generate import INDEX, Generation, K, check_attach_options
from kvindex_adapters.hf.generation.conversation import Turn, next_turn
from kvindex_adapters.hf.generation.tokenizer import punctuated
from kvindex_adapters.hf.model.load_model import load
from kvindex_adapters.llama.fused import Fused
from kvindex_adapters.llama.fused import refusal as fused_refusal
from kvindex_adapters.llama.heads import HeadRanks
from kvindex_adapters.llama.weights import Weights


class Decoder:
    """A model's weights and its tokenizer, which generate answers with an index.

    Make one with `of` or `from_pretrained`. Each call of `generate` is a new sequence, unless it
    gets a session. The weights are the model's own. Each call checks whether the model has changed;
    if so, it reads the model again or raises an error. With `weights="fp8"` or `ranks`, the layers'
    matrices are copies, and the model must not change as long as it exists.
    """

    def __init__(self, reading: Reading, tokenizer: Any, ends: Collection[int]) -> None:
        self._reading, self.tokenizer = reading, tokenizer
        self.ends = frozenset(ends)
        """Tokens that end an answer, unless a call names others."""

    @classmethod
    def of(
        cls,
        model: PreTrainedModel,
        tokenizer: Any = None,
        *,
        weights: str = PLAIN,
        ranks: HeadRanks | None = None,
    ) -> Self:
        """Make a decoder of a loaded model.

        Args:
            model: The transformers model. The decoder does not change it.
            tokenizer: The model's tokenizer, or None if all prompts are ids.
            weights: "plain" to use the model's weights, or "fp8" to copy the layers' matrices as
                float8 e4m3 with a scale per matrix row. The model's own matrices are freed with the
                model.
            ranks: The processes over which the model's heads are sharded, or None for one process.
                Each process passes the whole model, on any device, and copies its own shard to the
                ranks' device. All processes make the same calls and get the same tokens
                (docs/distributed.md).

        Returns:
            The decoder.

        Raises:
            TypeError: `model` is not a transformers model.
            UnsupportedError: The decoder does not support the model, or the ranks cannot divide its
                heads. This is a ValueError.
            ValueError: `weights` has another value, or "fp8" without Triton, or the ranks have
                different models.
        """
        check_weights(weights)
        check_model(model)
        end = model.generation_config.eos_token_id
        ends = [] if end is None else [end] if isinstance(end, int) else list(end)
        return cls(Reading(model, weights=weights, ranks=ranks), tokenizer, ends)

    @classmethod
    def from_pretrained(
        cls,
        model: str | Path,
        *,
        gguf_file: str | None = None,
        lora: Path | None = None,
        dtype: torch.dtype = torch.float32,
        device: str | None = None,
        weights: str = PLAIN,
        ranks: HeadRanks | None = None,
    ) -> Self:
        """Load a model and its tokenizer, and make a decoder of them.

        Args:
            model: A folder with safetensors, a .gguf file, or a hub id.
            gguf_file: Name of the .gguf file inside the folder.
            lora: A LoRA adapter to merge into the model.
            dtype: Data type to compute in.
            device: Device of the weights; None for the device of `ranks`, or the CPU without
                `ranks`.
            weights: As in `of`. With "fp8" the original matrices are freed.
            ranks: As in `of`. Each process reads the model into host memory and keeps its shard.

        Returns:
            The decoder.

        Raises:
            FileNotFoundError: The model or a file does not exist.
            ValueError: The model cannot be loaded, or `device` is not that of `ranks`; also what
                `of` raises.
        """
        check_weights(weights)
        if ranks is not None and device is not None and not ranks.on(torch.device(device)):
            raise ValueError(f"device: got {device!r}, allowed is that of ranks, {ranks.device}")
        place = "cpu" if device is None or ranks is not None else device
        loaded = load(model, gguf_file=gguf_file, lora=lora, dtype=dtype, device=place)
        return cls.of(*loaded, weights=weights, ranks=ranks)

    @property
    def weights(self) -> Weights:
        """The weights that the decoder last read from the model."""
        return self._reading.weights

    @property
    def config(self) -> DecoderConfig:
        """Sizes of the model, or of this rank's shard of it."""
        return self._reading.config

    @property
    def device(self) -> torch.device:
        """Device of the weights."""
        return self.weights.embedding.device

    @overload
    def generate(
        self,
        prompt: Prompt,
        *,
        session: OpenSession | None = None,
        streamer: BaseStreamer | None = None,
        on_progress: Progress | None = None,
        **options: Unpack[Options],
    ) -> Generation: ...

    @overload
    def generate(
        self,
        prompt: Prompts,
        *,
        session: None = None,
        streamer: None = None,
        on_progress: Progress | None = None,
        **options: Unpack[Options],
    ) -> list[Generation]: ...

    def generate(
        self,
        prompt: Prompt | Prompts,
        *,
        session: OpenSession | None = None,
        streamer: BaseStreamer | None = None,
        on_progress: Progress | None = None,
        **options: Unpack[Options],
    ) -> Generation | list[Generation]:
        """Generate an answer to a prompt, or to each of a list of prompts in one batch.

        Only the end tokens come from the model's generation configuration. Temperature, penalties
        and lengths come from the options. (`kvhf.generate` uses the whole configuration.)

        Args:
            prompt: Text (used unchanged), messages for the tokenizer's chat template, ids int64
                `[N]`, or a list of these.
            session: A session of this decoder, in place of `index`, `k` and `attach_options`. The
                prompt follows its tokens, and prompt and answer are appended to it. Messages
                continue the chat in it as in `kvhf.generate`. A call that fails leaves the session
                unchanged. Pass a `fork` of the session to keep it unchanged in any case.
            streamer: A streamer of transformers, which gets each token of one prompt.
            on_progress: Called with a phase, the tokens done and the tokens in total (of the
                longest prompt).
            **options: `Options`.

        Returns:
            The answer to the prompt, or a list of answers to a list of prompts. An answer ends with
            its stop token, if it has one. Times and the report are of the whole batch.

        Raises:
            ValueError: A prompt is empty, a size is out of range, or options do not fit.
            TypeError: An option does not exist.
        """
        self._follow()
        prompts = prompts_of(prompt)
        for name, given in {"streamer": streamer, "session": session}.items():
            if given is not None and len(prompts) > 1:
                count = len(prompts)
                raise ValueError(f"{name}: got one for {count} prompts, allowed is one prompt")
        if session is None or not prompts:
            turn, rows = None, encode(self.tokenizer, prompts, self.config)
        else:
            turn = self._turn(prompts[0], session)
            rows = [turn.ids]
        run = self._begin(rows, session, **options)
        timer = TokenTimer(streamer, on_progress, run.ids[0], run.max_new_tokens)
        with nullcontext() if session is None or turn is None else session.undone(turn.keep):
            timer.put(run.ids[:1])
            tokens = []
            for token in run.tokens(on_progress):
                tokens.append(token)
                timer.put(token[:1])
            timer.end()
            answers = run.cut(tokens)
            if session is not None and turn is not None:
                messages = turn.answered(self._text(answers[0]))
                session.complete(turn.keep, torch.cat([run.ids[0], answers[0]]), messages)
        pairs = zip(rows, answers, strict=True)
        made = [self._generation(ids, answer, timer, run.session) for ids, answer in pairs]
        return made[0] if is_one(prompt) else made

    def session(
        self,
        *,
        index: str | IndexFactory | None = INDEX,
        k: int = K,
        attach_options: Mapping[str, Any] | None = None,
        graphs: bool = True,
        fused: bool = True,
    ) -> OpenSession:
        """Open a session without tokens, for `read` and `generate`.

        Args:
            index: As in `Options`.
            k: As in `Options`.
            attach_options: As in `Options`.
            graphs: As in `Options`.
            fused: As in `Options`.

        Returns:
            The session.
        """
        self._follow()
        layers = self._attentions(index, k, attach_options, graphs)
        return OpenSession(self._reading, layers, self._fused_for(1, fused))

    def read(
        self,
        prompt: Prompt,
        session: OpenSession,
        *,
        chunk: int | None = None,
        on_progress: Progress | None = None,
    ) -> None:
        """Read a prompt into a session, after the tokens that it stores, without answering.

        If the call fails, the session keeps its state.

        Args:
            prompt: As in `generate`. Messages get no generation prompt.
            session: A session of this decoder.
            chunk: As in `Options`.
            on_progress: As in `generate`.

        Raises:
            ValueError: As in `generate`.
        """
        self._follow()
        chunk = self._chunk(chunk, batch=1)
        session.check_reading(self._reading)
        turn = self._turn(prompt, session, cue=False)
        ids = turn.ids.to(self.device)
        with session.undone(turn.keep):
            session.read_prompt(ids[None], chunk, turn.keep + len(ids), on_progress)
            session.complete(turn.keep, ids, turn.messages)
            if on_progress:
                on_progress("prefill", len(ids), len(ids))

    def stream(self, prompt: Prompt | Prompts, **options: Unpack[Options]) -> Iterator[Tensor]:
        """Yield the tokens of an answer while they are generated.

        The iteration ends when each sequence has had a stop token. Ignore the tokens of a sequence
        after its own stop token.

        Args:
            prompt: As in `generate`.
            **options: `Options`.

        Returns:
            An iterator of int64 `[B]` on the CPU: one token of each prompt at a time.

        Raises:
            ValueError: As in `generate`.
        """
        return self.start(prompt, **options).tokens()

    def start(self, prompt: Prompt | Prompts, **options: Unpack[Options]) -> Run:
        """Prepare a run that has not read its prompts yet.

        Args:
            prompt: As in `generate`.
            **options: `Options`.

        Returns:
            The run, whose `tokens()` are those that `stream` yields.

        Raises:
            ValueError: As in `generate`.
        """
        self._follow()
        rows = encode(self.tokenizer, prompts_of(prompt), self.config)
        return self._begin(rows, **options)

    def explain(self, *, batch: int = 1, **options: Unpack[Options]) -> str:
        """Report how a decode step would run, and why.

        Some layers can only report after they store tokens; the text says so. For a run in its
        present state, call `start(prompt, …).explain()`.

        Args:
            batch: Number of prompts.
            **options: `Options`.

        Returns:
            Text of several lines.

        Raises:
            ValueError: As in `generate`.
        """
        self._follow()
        check.at_least("batch", batch, 1)
        return self._begin([torch.zeros(1, dtype=torch.int64)] * batch, **options).explain()

    def _turn(self, prompt: Prompt, session: OpenSession, *, cue: bool = True) -> Turn:
        """Find how a prompt continues the tokens of a session. Raises as `generate`."""
        check_tokenizer(self.tokenizer, [prompt])
        turn = next_turn(self.tokenizer, prompt, session, session.length, cue=cue)
        check_prompt(turn.ids, self.config.vocabulary)
        return turn

    def _text(self, answer: Tensor) -> str:
        """Decode an answer's ids; "" if there is no tokenizer."""
        tokenizer = self.tokenizer
        return "" if tokenizer is None else tokenizer.decode(answer, skip_special_tokens=True)

    def _begin(
        self,
        rows: list[Tensor],
        session: OpenSession | None = None,
        *,
        index: str | IndexFactory | None = INDEX,
        k: int = K,
        attach_options: Mapping[str, Any] | None = None,
        max_new_tokens: int = 256,
        sampling: Sampling = GREEDY,
        stop: Collection[int] | None = None,
        chunk: int | None = None,
        graphs: bool = True,
        fused: bool = True,
    ) -> Run:
        """Make a run that has not read its prompts yet. Raise ValueError for bad options."""
        chunk = self._chunk(chunk, batch=len(rows))
        check.at_least("max_new_tokens", max_new_tokens, 1)
        check.flag("graphs", graphs)
        check.flag("fused", fused)
        ids, padding = left_padded(rows, self.device)
        if session is not None:
            session.check_reading(self._reading)
            passed = {"index": index != INDEX, "k": k != K}
            passed["attach_options"] = attach_options is not None
            for name in (name for name, changed in passed.items() if changed):
                raise ValueError(
                    f"{name}: got a value, allowed is none with session=, which has its own"
                )
        given: Session = session or Session(
            self.weights,
            self.config,
            self._attentions(index, k, attach_options, graphs),
            padding,
            self._fused_for(len(ids), fused),
        )
        return Run(
            given,
            self._reading,
            ids,
            sampling=sampling,
            max_new_tokens=max_new_tokens,
            chunk=chunk,
            stops=self.ends if stop is None else frozenset(stop),
            graphs=graphs,
        )

    def _chunk(self, chunk: int | None, *, batch: int) -> int:
        """Return how many tokens of each prompt a layer computes at a time."""
        if chunk is None:
            return default_chunk(self.weights, batch, self.device)
        return check.at_least("chunk", chunk, 2)

    def _attentions(
        self,
        index: str | IndexFactory | None,
        k: int,
        attach_options: Mapping[str, Any] | None,
        graphs: bool,
    ) -> list[AttentionLayer | DenseAttention]:
        """Make the attention of each layer, without tokens."""
        options = None
        if index is not None:
            check_attach_options(attach_options)
            given = {"graphs": graphs, **punctuated(index, self.tokenizer, attach_options)}
            options = LayerOptions(index=index, k=k, **given)
        made = make_attentions(self.config, self._reading.ropes, self.weights.embedding, options)
        indexed = [layer for layer in made if isinstance(layer, AttentionLayer)]
        if self.weights.ranks is not None and any(is_sharded(layer.index) for layer in indexed):
            raise UnsupportedError(BOTH_SHARDED)
        return made

    def _fused_for(self, batch: int, fused: bool) -> Fused | None:
        """Return the kernels that run decode steps of `batch` sequences, or None to use torch."""
        runs = fused and fused_refusal(self.weights, batch) is None
        return self._reading.kernels if runs else None

    def _follow(self) -> None:
        """Read the model again if it has changed. Raises an error if that is not possible."""
        if not self._reading.current:
            self._reading = self._reading.read_again()

    def _generation(
        self, ids: Tensor, answer: Tensor, timer: TokenTimer, session: Session
    ) -> Generation:
        made = next(iter(session.indexes()), None)
        runs = None if made is None else capability(made, RunsOps)
        return Generation(
            text=self._text(answer),
            prompt_ids=ids.to(self.device),
            answer_ids=answer,
            prefill_s=timer.first - timer.start,
            token_s=(timer.last - timer.first) / max(len(answer) - 1, 1),
            report=None if made is None else session.report(),
            config=None if made is None else made.config,
            backend=None if runs is None else runs.backend,
        )
