"""`generate`: generate an answer to a prompt in one call, with an index or with full attention."""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Iterator, Mapping, Sized
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from difflib import get_close_matches
from typing import Any

import torch
from torch import Tensor
from transformers import (
    DynamicCache,
    GenerationConfig,
    GenerationMixin,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)
from transformers.generation.streamers import BaseStreamer

from kvindex.core import check
from kvindex.core.capability import capability
from kvindex.core.protocol import RunsOps
from kvindex.layer.arguments import DEFAULT_K
from kvindex_adapters.common.context import check_not_of_index
from kvindex_adapters.common.layer_options import OF_SINGLE_LAYERS, IndexFactory
from kvindex_adapters.common.placement import make_room
from kvindex_adapters.common.prompt import Prompt, encode_prompt
from kvindex_adapters.common.prompt_chunks import Progress, check_prompt
from kvindex_adapters.common.speculation import (
    Acceptance,
    about_draft_model,
    check_verifiable,
    different_sizes,
    named,
    speculation_of,
)
from kvindex_adapters.common.token_timer import TokenTimer
from kvindex_adapters.hf.attach import attach
from kvindex_adapters.hf.cache.report import Report
from kvindex_adapters.hf.generation.conversation import (
    StoredTokens,
    Turn,
    check_follows,
    check_model,
    check_past_known,
    following,
    next_turn,
    past_ids,
    remember,
)
from kvindex_adapters.hf.generation.plain_cache import PlainCache
from kvindex_adapters.hf.generation.prefill import default_chunk, prefill, vocabulary_of
from kvindex_adapters.hf.generation.speculate import Drafter, speculating_options
from kvindex_adapters.hf.generation.tokenizer import punctuated
from kvindex_adapters.hf.graph.run_ahead import decoding_options
from kvindex_adapters.hf.model.cache_argument import CACHE, OLD
from kvindex_adapters.hf.model.info import check_follows_none
from kvindex_adapters.hf.model.reread import prefilled, unread
from kvindex_adapters.hf.model.wrapped import unwrapped
from kvindex_adapters.hf.unsupported import assisted

INDEX, K = "pariskv", DEFAULT_K
"""Default values of the arguments `index` and `k` of `generate`."""

PADDING = 1024
"""Models with the same tokenizer have different numbers of tokens because of padding. The numbers
differ by less than this."""

ONE_ANSWER = dict(num_beams=1, num_return_sequences=1, return_dict_in_generate=False)
"""Options of `model.generate` that `generate` always sets, whatever the model's generation
configuration contains."""

RESERVED = {"inputs", "input_ids", "attention_mask", OLD, CACHE}
"""Arguments of `model.generate` that callers of `generate` may not pass, because `generate` sets
them."""


@dataclass(frozen=True)
class Generation:
    """An answer, with its token ids, times, and a report on the index.

    `print` shows the text, the times and the report.

    Args:
        text: The answer.
        prompt_ids: Int64 `[N]`, the prompt ids that this call processed. If the cache already
            contained the beginning of a chat, only the ids after that beginning.
        answer_ids: Int64 `[M]`, the token ids of the answer.
        prefill_s: Seconds until the first token of the answer.
        token_s: Mean seconds per token after the first one.
        report: Number of rows read and memory in use, or None for full attention.
        config: The configuration of the index, or None for full attention.
        backend: Name of the backend that ran the index's operations. None for full attention, or if
            the index does not report its backend.
        acceptance: How many drafted tokens this call has accepted. None without
            `speculative_tokens`.
    """

    text: str
    prompt_ids: Tensor = field(repr=False)
    answer_ids: Tensor = field(repr=False)
    prefill_s: float
    token_s: float
    report: Report | None
    config: Any = field(repr=False)
    backend: str | None = None
    acceptance: Acceptance | None = None

    @property
    def summary(self) -> str:
        """The report in one line, or that attention was full."""
        if self.report is not None:
            return str(self.report)
        return "Full attention" + (f"; {self.acceptance}." if self.acceptance else ".")

    def __str__(self) -> str:
        return (
            f"{self.text}\n({len(self.prompt_ids)} tokens of the prompt in {self.prefill_s:.1f} s, "
            f"then {len(self.answer_ids)} tokens at {self.token_s * 1000:.0f} ms per token)\n"
            f"{self.summary}"
        )


def generate(
    model: PreTrainedModel,
    tokenizer: Any,
    prompt: Prompt,
    *,
    index: str | IndexFactory | None = INDEX,
    k: int | str = K,
    cache: StoredTokens | None = None,
    used: str = "refuse",
    max_new_tokens: int = 256,
    chunk: int | None = None,
    streamer: BaseStreamer | None = None,
    on_progress: Progress | None = None,
    attach_options: dict[str, Any] | None = None,
    speculative_tokens: int | str | None = None,
    verify: str = "index",
    draft_model: PreTrainedModel | None = None,
    **generate_options: Any,
) -> Generation:
    """Generate an answer to one prompt.

    For beam search, batches or several answers, call `attach` and `model.generate` instead.

    If the cache already contains a chat, pass either the new messages or the whole conversation.
    The chat template is applied to the whole conversation, and the longest prefix of its tokens in
    the cache is reused. A call that fails leaves the cache unchanged.

    Args:
        model: A transformers model, or a `PeftModel` around one.
        tokenizer: The model's tokenizer.
        prompt: Plain text, messages for the tokenizer's chat template, or token ids int64 `[N]`.
        index: As in `attach`, by default "pariskv"; None for full attention with transformers' own
            cache. If an index has the option `punctuation`, it is set from the tokenizer.
        k: As in `attach`, by default 256.
        cache: A cache that the caller's `attach` yielded, instead of `index`, `k` and
            `attach_options`.
        used: How to treat a cache that already stores tokens. "refuse" raises ValueError.
            "continue" reads the prompt after the stored tokens, and keeps prompt and answer in the
            cache. "branch" reads the prompt after the stored tokens, and restores the cache
            afterwards.
        max_new_tokens: Maximum number of tokens of the answer, at least 1.
        chunk: Number of tokens of the prompt that are read at a time, at least 2. None means 1024
            on a CPU, and on a GPU the largest power of two from 1024 to 4096 for which a layer's
            activations fit in half a GiB.
        streamer: A streamer of transformers, which receives each token.
        on_progress: Function that is called with the phase ("prefill" or "decode"), the number of
            tokens done, and the number of tokens in total.
        attach_options: Further keyword arguments of `attach`.
        speculative_tokens: Number of tokens to draft before each verification, "auto" for a number
            by the acceptance seen, or None for one token at a time (docs/speculation.md).
        verify: What verifies the drafts. "index": drafts are copied from the text so far, or
            written by `draft_model`, and verified by attention with the index. "full": drafts are
            written with the index, and verified by full attention, whose tokens the answer then
            has.
        draft_model: A smaller model with the same tokenizer, which writes the drafts. Its number of
            tokens may differ from the model's by padding: the two need the same `model_type`,
            neither may have fewer tokens than the tokenizer, and the numbers must differ by less
            than 1,024. It attends through an index with the options
            `index`, `k` and `attach_options`; with `cache`, it uses full attention. It reads all
            tokens in each call.
        **generate_options: Further keyword arguments of `model.generate`. Decoding is greedy
            unless they contain `do_sample=True`.

    Returns:
        The answer, with its times and a report.

    Raises:
        ValueError: The prompt is empty, an id or an option is out of range, options contradict each
            other, the cache contains tokens and `used` is "refuse", `attach` rejects a model or its
            options, or `draft_model` has another vocabulary.
        UnsupportedError: The cache belongs to another model, or `speculative_tokens` is given and
            the model's cache cannot remove tokens. (UnsupportedError is a ValueError.)
        TypeError: The prompt is neither text, messages nor ids. Or `draft_model` is no model of
            transformers. Or an option of `attach` or of the
            index was passed as an option of `model.generate`.

    Examples:
        ```python
        question = [{"role": "user", "content": text + "Who is the author?"}]
        answer = kvhf.generate(model, tokenizer, question, index="pariskv", max_new_tokens=64)
        print(answer.text, answer.report)
        ```
    """
    model = unwrapped(model)
    check_attach_options(attach_options)
    check_generate_options(generate_options, index)
    chunk = default_chunk(model) if chunk is None else check.at_least("chunk", chunk, 2)
    check.at_least("max_new_tokens", max_new_tokens, 1)
    check_cache(cache, used, index, k, attach_options)
    has_draft = draft_model is not None
    speculation = speculation_of(speculative_tokens, verify, draft_model=has_draft)
    check_model(cache, model)
    index = None if isinstance(cache, PlainCache) else index
    small = None if draft_model is None else _draft_model(draft_model, model, tokenizer, index)
    if cache is None:
        turn = Turn(0, encode_prompt(tokenizer, prompt), None)
    else:
        turn = next_turn(tokenizer, prompt, cache, cache.get_seq_length())
    check_prompt(turn.ids, vocabulary_of(model))
    past_length, ids = turn.keep, turn.ids.to(model.device)
    timer = TokenTimer(streamer, on_progress, ids, max_new_tokens)
    options = {**ONE_ANSWER, "do_sample": False, **generate_options}
    if cache is not None:
        context: Any = following(cache, used, turn.keep)
    elif index is None:
        check_full_attention(k, attach_options)
        context = nullcontext(DynamicCache(config=model.config))
    else:
        context = attach(model, index=index, k=k, **punctuated(index, tokenizer, attach_options))
    own: Any = nullcontext()
    if small is not None and cache is None and index is not None:
        own = _drafting(small, index, k, punctuated(index, tokenizer, attach_options))
    elif small is not None:
        own = nullcontext(_drafter(small, DynamicCache(config=small.config)))
    with context as holder, own as drafter, torch.no_grad():
        past = past_ids(holder)
        whole = _check_past(model, options, past_length, past)
        if speculation is None:
            loop, decoding = None, decoding_options(model, tokenizer, holder, timer, options)
        else:
            if speculation.full and index is None:
                check_verifiable([])
            given = model, tokenizer, holder, timer, options, speculation, drafter
            decoding, loop = speculating_options(*given)
        new = unread(model, holder, past, ids, more=max_new_tokens)
        check_follows_none(model, past_length, len(new))
        # model.generate() reads the last chunk of the prompt. This chunk has several tokens, so
        # the model uses full attention for it, and the first token of the answer is exact.
        stop = 0 if whole else prefilled(model, holder, len(new), chunk)
        if loop is not None:
            loop.unread = len(new) - stop
        length = past_length + len(ids)
        room = length + max_new_tokens
        prefill(model, new, holder, stop=stop, chunk=chunk, room=room, report=on_progress)
        if index is not None:
            make_room(holder.indexes(), room)
        # model.generate() gets all ids, and skips those in the cache. If the ids in the cache are
        # unknown, it gets only the new ids, and a mask that covers all tokens.
        input_ids = new[stop:] if past is None else torch.cat([past.to(ids), ids])
        sequence = model.generate(
            input_ids=input_ids[None],
            attention_mask=input_ids.new_ones(1, length),
            max_new_tokens=max_new_tokens,
            streamer=timer,
            **{CACHE: holder},
            **decoding,
        )
        if cache is not None:
            cache.stop_recording()
        answer = sequence[0, len(input_ids) :]
        text = tokenizer.decode(answer, skip_special_tokens=True)
        if cache is not None and used != "branch":
            new_ids = torch.cat([ids, answer])
            with nullcontext() if loop is None else loop.fully(verify == "full"):
                _append_answer(model, cache, past, new_ids, past_length + len(new_ids), chunk)
            remember(cache, past, new_ids, turn.answered(text))
        report = None if index is None else holder.report()
        acceptance = None if loop is None else loop.acceptance
        if report is not None:
            report = replace(report, acceptance=acceptance)
        made = None if index is None else holder.indexes()[0]
        runs = None if made is None else capability(made, RunsOps)
    return Generation(
        text=text,
        prompt_ids=ids,
        answer_ids=answer,
        prefill_s=timer.first - timer.start,
        token_s=(timer.last - timer.first) / max(len(answer) - 1, 1),
        report=report,
        config=None if made is None else made.config,
        backend=None if runs is None else runs.backend,
        acceptance=acceptance,
    )


def _draft_model(
    draft_model: PreTrainedModel, model: PreTrainedModel, tokenizer: Any, index: object
) -> PreTrainedModel:
    """Check that a model can write drafts for another one, and return it without its wrapper."""
    try:
        small = unwrapped(draft_model)
    except TypeError as error:
        raise TypeError(f"draft_{error}") from None  # the message begins with "model: got"
    if small is model and index is not None:
        raise ValueError(
            "draft_model: got the model itself, whose attention searches the index of its own "
            "cache; pass another model, or leave out draft_model"
        )
    _check_sizes(model, small, tokenizer)
    return small


def _check_sizes(model: PreTrainedModel, small: PreTrainedModel, tokenizer: Any) -> None:
    """Check that a draft model has as many tokens as the model, apart from padding.

    The draft model's tokenizer is unknown. Models of one family may pad its tokens to other sizes.
    """
    sizes = vocabulary_of(model), vocabulary_of(small)
    if sizes[0] == sizes[1]:
        return
    large_type, small_type = (
        one.config.get_text_config(decoder=True).model_type for one in (model, small)
    )
    tokens = len(tokenizer) if isinstance(tokenizer, Sized) else None
    if (
        tokens is not None
        and tokens > min(sizes)
        and isinstance(tokenizer, PreTrainedTokenizerBase)
    ):
        tokens = len(named(tokenizer.get_vocab()))
    near = abs(sizes[0] - sizes[1]) < PADDING
    if large_type != small_type or tokens is None or tokens > min(sizes) or not near:
        known = "an unknown number" if tokens is None else f"{tokens:,}"
        raise different_sizes(
            sizes,
            f"both models have the same model_type (got {small_type!r} for {large_type!r}), "
            f"neither has fewer tokens than the tokenizer (got {known}), and they differ by less "
            f"than {PADDING:,} tokens of padding",
        )


def _drafter(model: PreTrainedModel, cache: Any) -> Drafter:
    return Drafter(model, cache, default_chunk(model))


@contextmanager
def _drafting(
    model: PreTrainedModel,
    index: str | IndexFactory,
    k: int | str,
    attach_options: Mapping[str, Any],
) -> Iterator[Drafter]:
    """Context manager in which a smaller model writes drafts with an index."""
    usual = {name: attach_options[name] for name in attach_options.keys() - OF_SINGLE_LAYERS}
    with ExitStack() as stack:
        with about_draft_model():
            cache = stack.enter_context(attach(model, index=index, k=k, **usual))
        yield _drafter(model, cache)


def _check_past(
    model: PreTrainedModel, options: dict[str, Any], past_length: int, past: Tensor | None
) -> bool:
    """Return True if `model.generate` must process the whole prompt, because decoding is assisted.

    Raise ValueError if the cache contains tokens, which assisted decoding would process again.
    """
    config = options.get("generation_config") or model.generation_config
    if past is None:
        check_past_known(config, options)
    name = assisted(config, options)
    if name and past_length:
        raise ValueError(
            f"{name}: got a value with a cache of {past_length} tokens; assisted decoding of "
            "transformers would process these tokens again, so it needs an empty cache"
        )
    return name is not None


def _append_answer(
    model: PreTrainedModel,
    cache: StoredTokens,
    past: Tensor | None,
    new_ids: Tensor,
    length: int,
    chunk: int,
) -> None:
    """Append the last tokens of an answer, which the model has not processed yet, to the cache.

    Args:
        model: The model.
        cache: The cache.
        past: Ids int64 `[P]` of the tokens before the prompt, or None if unknown.
        new_ids: Ids int64 `[N]` of prompt and answer.
        length: Number of tokens in the cache afterwards.
        chunk: Number of tokens per forward pass.
    """
    if missing := length - cache.get_seq_length():
        before = None if past is None else torch.cat([past.to(new_ids), new_ids[:-missing]])
        new = unread(model, cache, before, new_ids[-missing:])
        prefill(model, new, cache, stop=len(new), chunk=max(chunk, missing + 1))


def check_cache(
    cache: StoredTokens | None, used: str, index: object, k: int | str, attach_options: object
) -> None:
    """Raise ValueError for arguments of `generate` that contradict each other.

    `used` must fit the tokens in the cache. `index`, `k` and `attach_options` are allowed only
    without a cache, except for `index=None` with a cache that has no index.
    """
    if cache is None:
        if used != "refuse":
            raise ValueError(
                f"used: got {used!r} without cache=, but used says what to do with the tokens of a "
                "cache; pass cache= as well, or leave out used"
            )
        return
    check_follows(cache, used)
    other_index = index != INDEX and not (index is None and isinstance(cache, PlainCache))
    passed = {"index": other_index, "k": k != K, "attach_options": attach_options is not None}
    for name in (name for name, changed in passed.items() if changed):
        raise ValueError(
            f"{name}: got a value together with cache=; pass {name} to attach() instead"
        )


def check_attach_options(attach_options: Any) -> None:
    """Raise ValueError if `attach_options` contain `index` or `k`, which are separate arguments."""
    for name in sorted({"index", "k"} & set(attach_options or {})):
        raise ValueError(f"attach_options: got {name}; pass {name} as a separate argument")


def check_full_attention(k: int | str, attach_options: Mapping[str, Any] | None) -> None:
    """Check the arguments of a call with `index=None`, for full attention.

    Raise ValueError for a wrong `k`, although full attention does not use it, and for
    `attach_options`.
    """
    if k != "auto":
        check.wanted_rows(k)
    if attach_options:
        raise ValueError(
            f"attach_options: got {dict(attach_options)!r} with index=None, which attends to all "
            "tokens and attaches no index; pass an index, or leave out attach_options"
        )


def check_generate_options(
    generate_options: Mapping[str, Any], index: object, also: Iterable[str] = ()
) -> None:
    """Check the options that are passed on to `model.generate`.

    Raise an error for an option that `kvhf.generate` sets itself, for an option of `attach` or of
    the index, and for a name that resembles the name of an option of `model.generate` or one of the
    names `also`.
    """
    functions = generate, GenerationMixin.generate
    known = {*vars(GenerationConfig()), *RESERVED, *also}
    known |= {name for each in functions for name in inspect.signature(each).parameters}
    for name, value in generate_options.items():
        if name in inspect.signature(attach).parameters:
            raise TypeError(
                f"generate: got the argument {name!r}, which is an option of attach; pass "
                f"attach_options={{{name!r}: {value!r}}}"
            )
        check_not_of_index("generate", name, value, index)
        near = get_close_matches(name, known, n=1, cutoff=0.8)
        if near and name not in known:
            raise TypeError(f"generate: got the argument {name!r}; did you mean {near[0]!r}?")
    for name in sorted(RESERVED & set(generate_options)):
        raise ValueError(f"{name}: got a value, but generate() sets {name} itself; leave it out")
    for name, fixed in ONE_ANSWER.items():
        if generate_options.get(name, fixed) != fixed:
            raise ValueError(
                f"{name}: got {generate_options[name]}, allowed is {fixed}; for other values "
                "use attach() and model.generate"
            )
