"""`generate`: one call from a prompt to an answer, with or without an index."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel
from transformers.generation.streamers import BaseStreamer

from kvindex.core import check
from kvindex.core.capability import capability
from kvindex.core.protocol import RunsOps
from kvindex_adapters.common.layer_options import IndexFactory
from kvindex_adapters.common.placement import make_room
from kvindex_adapters.common.prompt import Prompt, encode_prompt
from kvindex_adapters.common.prompt_chunks import Progress, check_prompt
from kvindex_adapters.common.token_timer import TokenTimer
from kvindex_adapters.hf.attach import attach
from kvindex_adapters.hf.cache.cache import IndexCache
from kvindex_adapters.hf.cache.report import Report
from kvindex_adapters.hf.generation.conversation import (
    Turn,
    check_follows,
    check_past_known,
    following,
    next_turn,
    past_ids,
    remember,
)
from kvindex_adapters.hf.generation.prefill import default_chunk, prefill, vocabulary_of
from kvindex_adapters.hf.generation.tokenizer import punctuated
from kvindex_adapters.hf.graph.run_ahead import decoding_options
from kvindex_adapters.hf.model.reread import prefilled, unread
from kvindex_adapters.hf.model.wrapped import unwrapped
from kvindex_adapters.hf.unsupported import assisted

INDEX, K = "pariskv", 100
"""Defaults of `generate`."""

ONE_ANSWER = dict(num_beams=1, num_return_sequences=1, return_dict_in_generate=False)
"""Options that `generate` fixes, whatever the model's own generation configuration says."""

RESERVED = {"inputs", "input_ids", "attention_mask", "past_key_values"}
"""Options of `model.generate` that `generate` sets itself."""


@dataclass(frozen=True)
class Generation:
    """An answer, its time and its traffic.

    Args:
        text: The answer.
        prompt_ids: Int64 `[N]`, the ids that the call read. If a cache already stored the beginning
            of a chat, only the ids after it.
        answer_ids: Int64 `[N]`, the ids of the answer.
        prefill_s: Seconds until the first token of the answer.
        token_s: Seconds per token after that.
        report: Rows read, and memory; None for full attention.
        config: The index's configuration; None for full attention.
        backend: The backend of the index's operations; None for full attention.
    """

    text: str
    prompt_ids: Tensor
    answer_ids: Tensor
    prefill_s: float
    token_s: float
    report: Report | None
    config: Any
    backend: str | None = None


def generate(
    model: PreTrainedModel,
    tokenizer: Any,
    prompt: Prompt,
    *,
    index: str | IndexFactory | None = INDEX,
    k: int = K,
    cache: IndexCache | None = None,
    used: str = "refuse",
    max_new_tokens: int = 256,
    chunk: int | None = None,
    streamer: BaseStreamer | None = None,
    on_progress: Progress | None = None,
    attach_options: dict[str, Any] | None = None,
    **generate_options: Any,
) -> Generation:
    """Generate an answer to one prompt.

    For beams, batches or several answers, call `attach` and `model.generate`.

    If the cache stores messages, pass either new messages or the whole conversation. The chat
    template is applied to the whole conversation, and the longest prefix that the cache stores is
    reused (`conversation.next_turn`). A call that fails leaves the cache as it was.

    Args:
        model: A model of transformers, or a `PeftModel` around one, as in `attach`.
        tokenizer: The model's tokenizer.
        prompt: Text as it is, messages for the tokenizer's chat template, or ids int64 `[N]`.
        index: As in `attach`; None for full attention with transformers' own cache. An index that
            reads punctuation gets the tokenizer's.
        k: As in `attach`.
        cache: A cache of the caller's `attach`, in place of `index`, `k` and `attach_options`.
        used: How to treat a cache that already stores tokens. "refuse": raise ValueError.
            "continue": the prompt follows the stored tokens; prompt and answer stay in the cache.
            "branch": the prompt follows the stored tokens; the cache is restored afterwards.
        max_new_tokens: Tokens of the answer, at most.
        chunk: Tokens of the prompt that are read at a time. None: 1024 on a CPU; on a GPU as many,
            up to 4096, as fit in half a GiB of a layer's activations.
        streamer: A streamer of transformers, which gets each token.
        on_progress: Called with a phase, the tokens done and the tokens in total.
        attach_options: Further keywords of `attach`.
        **generate_options: Passed to `model.generate`. Decoding is greedy unless they contain
            `do_sample=True`.

    Returns:
        The answer, with its times and a report.

    Raises:
        ValueError: The prompt is empty, ids or sizes are out of range, options do not fit, or the
            cache stores tokens and `used` is "refuse"; also what `attach` raises.
        TypeError: The prompt is of another kind.
    """
    model = unwrapped(model)
    check_attach_options(attach_options)
    _check_options(generate_options)
    chunk = default_chunk(model) if chunk is None else check.at_least("chunk", chunk, 2)
    check.at_least("max_new_tokens", max_new_tokens, 1)
    _check_cache(cache, used, index, k, attach_options)
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
        context = nullcontext(DynamicCache(config=model.config))
    else:
        context = attach(model, index=index, k=k, **punctuated(index, tokenizer, attach_options))
    with context as holder, torch.no_grad():
        past = past_ids(holder)
        whole = _check_past(model, options, past_length, past)
        new = unread(model, holder, past, ids, more=max_new_tokens)
        # generate() reads the last chunk: several queries, so the first answer token is exact
        stop = 0 if whole else prefilled(model, len(new), chunk)
        length = past_length + len(ids)
        room = length + max_new_tokens
        prefill(model, new, holder, stop=stop, chunk=chunk, room=room, report=on_progress)
        if index is not None:
            make_room(holder.indexes(), room)
        # all ids, of which it slices off the cache's; or the new ones alone under a longer mask
        input_ids = new[stop:] if past is None else torch.cat([past.to(ids), ids])
        sequence = model.generate(
            input_ids=input_ids[None],
            attention_mask=input_ids.new_ones(1, length),
            past_key_values=holder,
            max_new_tokens=max_new_tokens,
            streamer=timer,
            **decoding_options(model, tokenizer, holder, timer, options),
        )
        answer = sequence[0, len(input_ids) :]
        text = tokenizer.decode(answer, skip_special_tokens=True)
        if cache is not None and used != "branch":
            new_ids = torch.cat([ids, answer])
            _append_answer(model, cache, past, new_ids, past_length + len(new_ids), chunk)
            remember(cache, past, new_ids, turn.answered(text))
        report = None if index is None else holder.report()
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
    )


def _check_past(
    model: PreTrainedModel, options: dict[str, Any], past_length: int, past: Tensor | None
) -> bool:
    """Whether `model.generate` must read the whole prompt. Raises ValueError where it cannot."""
    config = options.get("generation_config") or model.generation_config
    if past is None:
        check_past_known(config, options)
    name = assisted(config, options)
    if name and past_length:
        raise ValueError(
            f"{name}: got a value, allowed is none with a cache that holds tokens: assisted "
            "decoding of transformers would read them once more"
        )
    return name is not None


def _append_answer(
    model: PreTrainedModel,
    cache: IndexCache,
    past: Tensor | None,
    new_ids: Tensor,
    length: int,
    chunk: int,
) -> None:
    """Read the end of an answer, which no step has read, so that the cache has `length` tokens.

    new_ids: ids int64 `[N]` of prompt and answer, after the past.
    """
    if missing := length - cache.get_seq_length():
        before = None if past is None else torch.cat([past.to(new_ids), new_ids[:-missing]])
        new = unread(model, cache, before, new_ids[-missing:])
        prefill(model, new, cache, stop=len(new), chunk=max(chunk, missing + 1))


def _check_cache(
    cache: IndexCache | None, used: str, index: object, k: int, attach_options: object
) -> None:
    """Raises ValueError for a cache that cannot be used so, or options that `attach` decided."""
    if cache is None:
        if used != "refuse":
            raise ValueError(f'used: got {used!r}, allowed is "refuse" without cache=')
        return
    check_follows(cache, used)
    passed = {"index": index != INDEX, "k": k != K, "attach_options": attach_options is not None}
    for name in (name for name, changed in passed.items() if changed):
        raise ValueError(f"{name}: got a value, allowed is none with cache=: attach() decided it")


def check_attach_options(attach_options: Any) -> None:
    """Raises ValueError for what callers of `attach` name as arguments of their own."""
    for name in sorted({"index", "k"} & set(attach_options or {})):
        raise ValueError(f"attach_options: got {name}, allowed is {name} as an argument of its own")


def _check_options(generate_options: dict[str, Any]) -> None:
    for name in sorted(RESERVED & set(generate_options)):
        raise ValueError(f"{name}: got a value, allowed is none: the prompt decides it")
    for name, fixed in ONE_ANSWER.items():
        if generate_options.get(name, fixed) != fixed:
            raise ValueError(
                f"{name}: got {generate_options[name]}, allowed is {fixed}; for more call "
                "attach() and model.generate"
            )
