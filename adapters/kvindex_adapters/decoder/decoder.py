"""`Decoder`: generates text with a model of the Llama family, with an index or with full
attention."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Iterator, Mapping, Sequence
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
from kvindex_adapters.common.context import check_keywords
from kvindex_adapters.common.layer_options import (
    OF_SINGLE_LAYERS,
    IndexFactory,
    LayerOptions,
)
from kvindex_adapters.common.parallel import BOTH_SHARDED, is_sharded
from kvindex_adapters.common.prompt import Prompt
from kvindex_adapters.common.prompt_chunks import Progress, check_prompt
from kvindex_adapters.common.speculation import (
    Acceptance,
    about_draft_model,
    check_vocabularies,
    speculation_of,
)
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
from kvindex_adapters.decoder.drafter import Drafter
from kvindex_adapters.decoder.open_session import OpenSession
from kvindex_adapters.decoder.options import GREEDY, DraftModel, Options
from kvindex_adapters.decoder.prefill import default_chunk
from kvindex_adapters.decoder.quantized import PLAIN, check_weights
from kvindex_adapters.decoder.reading import Reading
from kvindex_adapters.decoder.run import Run
from kvindex_adapters.decoder.sampling import Sampling
from kvindex_adapters.decoder.session import Session
from kvindex_adapters.hf.generate import (
    INDEX,
    Generation,
    K,
    check_attach_options,
    check_full_attention,
)
from kvindex_adapters.hf.generation.conversation import Turn, next_turn
from kvindex_adapters.hf.generation.tokenizer import punctuated
from kvindex_adapters.hf.model.load_model import load
from kvindex_adapters.llama.fused import Fused
from kvindex_adapters.llama.fused import refusal as fused_refusal
from kvindex_adapters.llama.heads import HeadRanks
from kvindex_adapters.llama.weights import Weights


class Decoder:
    """Generates answers with a model's weights, its tokenizer, and an index or full attention.

    Make a decoder with `Decoder.of` or `Decoder.from_pretrained`. Each call of `generate` begins a
    new sequence, unless a session is passed.

    The decoder uses the tensors of the model without copying them. Each call checks whether the
    model has changed. If so, the decoder reads the model again, or raises an error if it cannot run
    the changed model. With `weights="fp8"` or `ranks`, the matrices are copies, and a call raises
    ValueError if the model has changed.

    Examples:
        ```python
        decoder = Decoder.of(model, tokenizer)
        answer = decoder.generate(text, index="pariskv", max_new_tokens=64)
        print(answer.text, answer.report)
        ```
    """

    def __init__(self, reading: Reading, tokenizer: Any, ends: Collection[int]) -> None:
        self._reading, self.tokenizer = reading, tokenizer
        self.ends = frozenset(ends)
        """Default stop tokens, for calls without the option `stop`."""

    @classmethod
    def of(
        cls,
        model: PreTrainedModel,
        tokenizer: Any = None,
        *,
        weights: str = PLAIN,
        ranks: HeadRanks | None = None,
    ) -> Self:
        """Make a decoder from a loaded model.

        Args:
            model: The transformers model. The decoder does not change it.
            tokenizer: The model's tokenizer, or None if all prompts are ids.
            weights: "plain" to use the model's weights, or "fp8" to copy the layers' matrices as
                float8 e4m3 with a scale per matrix row. The original matrices are freed when the
                model is deleted.
            ranks: The processes that shard the model's heads, or None for one process. Each process
                passes the whole model, on any device, and copies its shard to `ranks.device`. All
                processes must make the same calls; they get the same tokens (docs/distributed.md).

        Returns:
            The decoder.

        Raises:
            TypeError: `model` is not a transformers model.
            UnsupportedError: The decoder does not support the model, or the number of ranks does
                not divide the heads. (UnsupportedError is a ValueError.)
            ValueError: `weights` is neither "plain" nor "fp8", it is "fp8" and Triton is not
                installed, or the ranks have different models.
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
        """Load a model and its tokenizer, and make a decoder from them.

        Args:
            model: A folder with safetensors, a .gguf file, or the id of a model on the Hugging Face
                Hub.
            gguf_file: Name of the .gguf file inside the folder.
            lora: A LoRA adapter to merge into the model.
            dtype: Dtype of the weights and activations.
            device: Device of the weights. None means the device of `ranks`, or the CPU without
                `ranks`.
            weights: "plain" for weights of `dtype`, or "fp8" to convert the layers' matrices to
                float8 e4m3. With "fp8" the original matrices are freed.
            ranks: The processes that shard the model's heads, or None for one process. Each process
                reads the whole model into host memory, and keeps only its shard.

        Returns:
            The decoder.

        Raises:
            FileNotFoundError: The model or a file does not exist.
            ValueError: The model cannot be loaded, `device` is not the device of `ranks`, or
                `Decoder.of` rejects the arguments.
        """
        check_weights(weights)
        if ranks is not None and device is not None and not ranks.on(torch.device(device)):
            raise ValueError(
                f"device: got {device!r}, allowed is the device of the argument ranks, "
                f"{str(ranks.device)!r}"
            )
        place = "cpu" if device is None or ranks is not None else device
        loaded = load(model, gguf_file=gguf_file, lora=lora, dtype=dtype, device=place)
        return cls.of(*loaded, weights=weights, ranks=ranks)

    @property
    def weights(self) -> Weights:
        """The weights in the decoder, as last read from the model."""
        return self._reading.weights

    @property
    def config(self) -> DecoderConfig:
        """Sizes of the model. If several ranks shard the heads, sizes of this rank's shard."""
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

        Of the model's generation configuration, only the EOS tokens are used. Sampling and length
        are set by `options`. (`kvhf.generate` uses the whole configuration.)

        Args:
            prompt: Text (without a chat template), chat messages, ids int64 `[N]`, or a list of
                prompts.
            session: A session of this decoder, which already has an index and `k`. The prompt
                continues the tokens of the session, and the call appends prompt and answer to the
                session. Chat messages continue the conversation as in `kvhf.generate`. A call that
                fails leaves the session unchanged. To keep a session, pass `session.fork()`.
            streamer: A transformers streamer, which gets the prompt and each token of the answer.
                Only for a single prompt.
            on_progress: Called with the phase ("prefill" or "decode"), the number of tokens done,
                and the total number. In a batch, "prefill" counts the tokens of the longest prompt.
            **options: See `Options`.

        Returns:
            One answer for a single prompt, or a list of answers for a list of prompts. An answer
            includes its stop token. Times and the report in an answer cover the whole batch.

        Raises:
            ValueError: A prompt is empty, or an option is out of range or conflicts with `session`.
            TypeError: An option is unknown.
        """
        self._follow()
        prompts = prompts_of(prompt)
        for name, given in {"streamer": streamer, "session": session}.items():
            if given is not None and len(prompts) > 1:
                count = len(prompts)
                raise ValueError(f"{name}: got a {name} for {count} prompts; pass a single prompt")
        if session is None or not prompts:
            turn, rows = None, encode(self.tokenizer, prompts, self.config)
        else:
            turn = self._turn(prompts[0], session)
            rows = [turn.ids]
        kept = None if turn is None else turn.keep
        run = self._begin(rows, session, kept, **options)
        before = run.session.acceptance
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
                ids, full = torch.cat([run.ids[0], answers[0]]), run.verifies_fully
                session.complete(turn.keep, ids, messages, full=full)
        pairs = zip(rows, answers, strict=True)
        accepted = None
        if run.speculation is not None:
            accepted = run.session.acceptance.since(before)
        made = [
            self._generation(ids, answer, timer, run.session, accepted) for ids, answer in pairs
        ]
        return made[0] if is_one(prompt) else made

    def session(
        self,
        *,
        index: str | IndexFactory | None = INDEX,
        k: int | str = K,
        attach_options: Mapping[str, Any] | None = None,
        graphs: bool = True,
        fused: bool = True,
    ) -> OpenSession:
        """Open an empty session, to which `read` and `generate` append tokens.

        Args:
            index: Name of an index, possibly with options, or a factory; None for full attention.
            k: Number of rows to retrieve per KV head and decode step.
            attach_options: Further keyword arguments of `kvhf.attach`.
            graphs: Whether a decode step may run as one CUDA graph.
            fused: Whether Triton kernels compute the matrix products of a decode step on a GPU.

        Returns:
            The session.
        """
        self._follow()
        layers = self._attentions(index, k, attach_options, graphs)
        options = dict(index=index, k=k, attach_options=attach_options, graphs=graphs, fused=fused)
        return OpenSession(self._reading, layers, self._fused_for(1, fused), options)

    def read(
        self,
        prompt: Prompt,
        session: OpenSession,
        *,
        chunk: int | None = None,
        on_progress: Progress | None = None,
    ) -> None:
        """Append a prompt to a session, without generating an answer.

        A call that fails leaves the session unchanged.

        Args:
            prompt: Text, chat messages, or ids int64 `[N]`. Messages are converted to text by the
                chat template, with `add_generation_prompt=False`.
            session: A session of this decoder.
            chunk: Number of prompt tokens that a layer computes at a time; None for the default.
            on_progress: Called with "prefill", the number of tokens read, and the total number.

        Raises:
            ValueError: The prompt is empty, `chunk` is below 2, or the session belongs to another
                decoder.
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

        The iteration ends when every sequence has produced a stop token, or after `max_new_tokens`.
        In a batch, ignore what a sequence yields after its stop token.

        Args:
            prompt: Text, chat messages, ids int64 `[N]`, or a list of prompts.
            **options: See `Options`.

        Returns:
            An iterator of tensors int64 `[B]` on the CPU, each with the next token of every
            sequence.

            Raises:
                ValueError: A prompt is empty, or an option is out of range.
        """
        return self.start(prompt, **options).tokens()

    def start(self, prompt: Prompt | Prompts, **options: Unpack[Options]) -> Run:
        """Prepare a generation. The prompts are read only when the method `tokens()` of the result
        is called.

        Args:
            prompt: Text, chat messages, ids int64 `[N]`, or a list of prompts.
            **options: See `Options`.

        Returns:
            A `Run`. Its method `tokens()` yields the same tokens as `stream`.

        Raises:
            ValueError: A prompt is empty, or an option is out of range.
        """
        self._follow()
        rows = encode(self.tokenizer, prompts_of(prompt), self.config)
        return self._begin(rows, **options)

    def explain(self, *, batch: int = 1, **options: Unpack[Options]) -> str:
        """Describe how a decode step would run: dtype, kernels, CUDA graph and index, with reasons.

        Some facts are unknown before a layer contains tokens; the text says so. To describe a
        generation in progress, call the method `explain` of its `Run`.

        Args:
            batch: Number of prompts.
            **options: See `Options`.

        Returns:
            Text of several lines.

        Raises:
            ValueError: An option is out of range.
        """
        self._follow()
        check.at_least("batch", batch, 1)
        return self._begin([torch.zeros(1, dtype=torch.int64)] * batch, **options).explain()

    def _turn(self, prompt: Prompt, session: OpenSession, *, cue: bool = True) -> Turn:
        """Convert a prompt that continues a session to token ids.

        Raises ValueError if the prompt is empty or invalid.
        """
        check_tokenizer(self.tokenizer, [prompt])
        turn = next_turn(self.tokenizer, prompt, session, session.length, cue=cue)
        check_prompt(turn.ids, self.config.vocabulary)
        return turn

    def _text(self, answer: Tensor) -> str:
        """Decode the ids of an answer. Without a tokenizer the text is empty."""
        tokenizer = self.tokenizer
        return "" if tokenizer is None else tokenizer.decode(answer, skip_special_tokens=True)

    def _begin(
        self,
        rows: list[Tensor],
        session: OpenSession | None = None,
        kept: int | None = None,
        *,
        index: str | IndexFactory | None = INDEX,
        k: int | str = K,
        attach_options: Mapping[str, Any] | None = None,
        max_new_tokens: int = 256,
        sampling: Sampling = GREEDY,
        stop: Collection[int] | None = None,
        chunk: int | None = None,
        graphs: bool = True,
        fused: bool = True,
        speculative_tokens: int | str | None = None,
        verify: str = "index",
        draft_model: DraftModel | None = None,
    ) -> Run:
        """Make a `Run` (one generation) for encoded prompts.

        `kept` is the number of tokens of the session that stay; None for all.

        Raise ValueError if an option is out of range.
        """
        given_chunk, chunk = chunk, self._chunk(chunk, batch=len(rows))
        check.at_least("max_new_tokens", max_new_tokens, 1)
        check.flag("graphs", graphs)
        check.flag("fused", fused)
        has_draft = draft_model is not None
        speculation = speculation_of(speculative_tokens, verify, draft_model=has_draft)
        small = None if draft_model is None else self._draft_decoder(draft_model)
        ids, padding = left_padded(rows, self.device)
        if session is not None:
            session.check_reading(self._reading)
            passed = {"index": index != INDEX, "k": k != K}
            passed |= {"attach_options": attach_options is not None, "fused": not fused}
            for name in (name for name, changed in passed.items() if changed):
                raise ValueError(
                    f"{name}: got a value together with session, which has its own {name}; "
                    f"pass {name} to Decoder.session instead"
                )
        given: Session = session or Session(
            self.weights,
            self.config,
            self._attentions(index, k, attach_options, graphs),
            padding,
            self._fused_for(len(ids), fused),
        )
        if speculation is not None and speculation.full:
            given.check_verifiable()
        drafter = None
        if small is not None:
            if given.ranks is not None or small.weights.ranks is not None:
                raise UnsupportedError(
                    "draft_model: got a model in several processes, allowed is one process; leave "
                    "out draft_model, so that drafts are copied from the text so far"
                )
            how: Any = dict(index=index, k=k, attach_options=attach_options, fused=fused)
            how |= dict(graphs=graphs, chunk=given_chunk, vocabulary=self.config.vocabulary)
            drafter = small._drafter_for(session, padding, **how)
        return Run(
            given,
            self._reading,
            ids,
            sampling=sampling,
            max_new_tokens=max_new_tokens,
            chunk=chunk,
            stops=self.ends if stop is None else frozenset(stop),
            graphs=graphs,
            speculation=speculation,
            known=None if session is None or session.ids is None else session.ids[:kept],
            drafter=drafter,
        )

    def _draft_decoder(self, draft_model: DraftModel) -> Decoder:
        """Check that a model can write drafts for this decoder."""
        if not isinstance(draft_model, Decoder):
            raise TypeError(
                f"draft_model: got a {type(draft_model).__name__}, allowed is a Decoder; pass "
                "Decoder.of(model, tokenizer)"
            )
        with about_draft_model():
            draft_model._follow()
        sizes = self.config.vocabulary, draft_model.config.vocabulary
        check_vocabularies(sizes, (self.tokenizer, draft_model.tokenizer))
        return draft_model

    def _drafter_for(
        self,
        session: OpenSession | None,
        padding: Sequence[int],
        *,
        graphs: bool,
        chunk: int | None,
        vocabulary: int,
        **options: Any,
    ) -> Drafter:
        """Return an object that writes drafts with this decoder for another decoder.

        Args:
            session: The other decoder's session, if it is an open one. Then its options are used,
                and its drafter is continued.
            padding: Number of padding tokens on the left of each sequence.
            graphs: As in `Options`.
            chunk: As in `Options`.
            vocabulary: Number of tokens that the other decoder's model has.
            **options: The options `index`, `k`, `attach_options` and `fused`.
        """
        if session is not None:
            if session.drafter is not None and session.drafter.serves(self._reading):
                return session.drafter
            options = {"graphs": graphs, **session.options}
            graphs = options.pop("graphs")
        fused = options.pop("fused")
        some = dict(options.pop("attach_options") or {})
        usual = {name: some[name] for name in some.keys() - OF_SINGLE_LAYERS}
        with about_draft_model():
            layers = self._attentions(attach_options=usual or None, graphs=graphs, **options)
        kernels = self._fused_for(len(padding), fused)
        own = Session(self.weights, self.config, layers, padding, kernels)
        chunk = self._chunk(chunk, batch=len(padding))
        drafter = Drafter(own, self._reading, chunk, vocabulary)
        if session is not None:
            session.drafter = drafter
        return drafter

    def _chunk(self, chunk: int | None, *, batch: int) -> int:
        """Return the chunk size: how many tokens of each prompt a layer computes at a time."""
        if chunk is None:
            return default_chunk(self.weights, batch, self.device)
        return check.at_least("chunk", chunk, 2)

    def _attentions(
        self,
        index: str | IndexFactory | None,
        k: int | str,
        attach_options: Mapping[str, Any] | None,
        graphs: bool,
    ) -> list[AttentionLayer | DenseAttention]:
        """Make the attention object of each layer. The objects contain no tokens yet."""
        options = None
        if index is None:
            check_full_attention(k, attach_options)
        else:
            check_attach_options(attach_options)
            given = {"graphs": graphs, **punctuated(index, self.tokenizer, attach_options)}
            names = [field.name for field in dataclasses.fields(LayerOptions)]
            check_keywords("attach_options", names, given, index)
            options = LayerOptions(index=index, k=k, **given)
        made = make_attentions(self.config, self._reading.ropes, self.weights.embedding, options)
        indexed = [layer for layer in made if isinstance(layer, AttentionLayer)]
        if self.weights.ranks is not None and any(is_sharded(layer.index) for layer in indexed):
            raise UnsupportedError(BOTH_SHARDED)
        return made

    def _fused_for(self, batch: int, fused: bool) -> Fused | None:
        """Return the Triton kernels for decode steps of `batch` sequences, or None to use plain
        torch."""
        runs = fused and fused_refusal(self.weights, batch) is None
        return self._reading.kernels if runs else None

    def _follow(self) -> None:
        """Read the weights again if the model has changed.

        Raise ValueError if the decoder cannot do this, because its weights are copies, or if it
        does not support the changed model.
        """
        if not self._reading.current:
            self._reading = self._reading.read_again()

    def _generation(
        self,
        ids: Tensor,
        answer: Tensor,
        timer: TokenTimer,
        session: Session,
        acceptance: Acceptance | None,
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
            acceptance=acceptance,
        )
