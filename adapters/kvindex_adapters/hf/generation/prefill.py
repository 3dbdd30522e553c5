"""Chunked prefill: run a transformers model on a prompt, one chunk at a time."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from kvindex.core import check
from kvindex.core.protocol import KVIndex
from kvindex_adapters.common.placement import expect
from kvindex_adapters.common.prompt import Prompt
from kvindex_adapters.common.prompt_chunks import (
    MIN_CHUNK,
    Progress,
    check_prompt,
    chunk_of,
    chunks,
)
from kvindex_adapters.hf.cache.cache import IndexCache
from kvindex_adapters.hf.generation.conversation import (
    StoredTokens,
    check_follows,
    check_model,
    following,
    next_turn,
    past_ids,
    remember,
)
from kvindex_adapters.hf.model.cache_argument import CACHE
from kvindex_adapters.hf.model.info import check_follows_none, reads_chunks, text_positions
from kvindex_adapters.hf.model.reread import unread
from kvindex_adapters.hf.model.rotary import counting_ahead, length_dependent
from kvindex_adapters.hf.model.wrapped import unwrapped


def read(
    model: PreTrainedModel,
    tokenizer: Any,
    prompt: Prompt,
    *,
    cache: StoredTokens,
    used: str = "refuse",
    chunk: int | None = None,
    on_progress: Progress | None = None,
) -> None:
    """Append a prompt to a cache of `attach`, without generating an answer.

    A call that fails leaves the cache unchanged.

    Args:
        model: The attached model.
        tokenizer: The model's tokenizer.
        prompt: Plain text, chat messages, or token ids int64 `[N]`. Messages are converted to text
            by the chat template, with `add_generation_prompt=False`.
        cache: The cache that `attach` yielded.
        used: What to do if the cache already contains tokens. "refuse" raises ValueError.
            "continue" appends the prompt.
        chunk: Number of tokens per forward pass, at least 2. None means 1024 on a CPU, and 1024 to
            4096 on a GPU.
        on_progress: Function that is called with the phase "prefill", the number of tokens done,
            and the number of tokens in total.

    Raises:
        ValueError: The prompt is empty, an option is out of range, or the cache contains tokens and
            `used` is "refuse".
        UnsupportedError: The cache belongs to another model.
        TypeError: The prompt is neither text, messages nor ids.
    """
    model = unwrapped(model)
    chunk = default_chunk(model) if chunk is None else check.at_least("chunk", chunk, 2)
    check_follows(cache, used, allowed=("refuse", "continue"))
    check_model(cache, model)
    turn = next_turn(tokenizer, prompt, cache, cache.get_seq_length(), cue=False)
    check_prompt(turn.ids, vocabulary_of(model))
    ids = turn.ids.to(model.device)
    with following(cache, used, turn.keep), torch.no_grad():
        past = past_ids(cache)
        new = unread(model, cache, past, ids)
        room = turn.keep + len(ids)
        prefill(model, new, cache, stop=len(new), chunk=chunk, room=room, report=on_progress)
        remember(cache, past, ids, turn.messages)


def default_chunk(model: PreTrainedModel) -> int:
    """Choose the default chunk size, in tokens, for a transformers model."""
    sizes = model.config.get_text_config().to_dict()
    width = sizes.get("hidden_size")
    if width is None:
        return MIN_CHUNK
    inner = sizes.get("intermediate_size") or 4 * width
    count = 4 * width + 3 * (max(inner) if isinstance(inner, list) else inner)
    return chunk_of(count * model.dtype.itemsize, model.device)


def vocabulary_of(model: PreTrainedModel) -> int:
    """Return the number of token ids that a model can embed. It may exceed the configured
    `vocab_size`."""
    named = model.config.get_text_config(decoder=True).to_dict().get("vocab_size") or 0
    rows = model.get_input_embeddings()
    return max(named, rows.num_embeddings if isinstance(rows, nn.Embedding) else 0)


def prefill(
    model: PreTrainedModel,
    ids: Tensor,
    cache: Any,
    *,
    stop: int,
    chunk: int,
    room: int = 0,
    prompt: int | None = None,
    report: Progress | None = None,
) -> None:
    """Run a model on the first `stop` tokens of a prompt, in chunks.

    If the rotary frequencies depend on the sequence length, each chunk uses the frequencies for the
    whole prompt. Models that do not support chunks get all tokens in one call. No chunk has only
    one token, because a forward pass of one token would search the index.

    Args:
        model: The model.
        ids: Int64 `[N]`, the ids of the whole prompt.
        cache: The cache.
        stop: Number of ids to process.
        chunk: Number of ids per forward pass. The last chunk may have one more.
        room: Number of tokens for which the indexes reserve memory in the background: from the
            start if the cache contains tokens, and otherwise after the first chunk. If the prompt
            fails, this ends. 0 reserves nothing.
        prompt: Number of ids that are the prompt, if others follow it. None means all ids. With
            `attach(prefill="sparse")`, the last tokens of the prompt attend to all tokens.
        report: Called after each chunk with "prefill", the number of tokens done, and the total
            number.
    """
    embeddings, before = length_dependent(model), cache.get_seq_length()
    check_follows_none(model, before, stop)
    unit = 1
    if isinstance(cache, IndexCache):
        cache.expect_prompt(before + (len(ids) if prompt is None else prompt))
        unit = cache.chunk_unit
    parts = chunks(stop, chunk if reads_chunks(model) else stop, first=before, unit=unit)
    announced: list[KVIndex] = []
    try:
        for start, end in parts:
            # an index that no token has reached does not exist yet
            if room and before + start and not announced and isinstance(cache, IndexCache):
                announced = cache.indexes()
                expect(announced, room, batch=1)
            positions = text_positions(model, before + start, before + end)
            with counting_ahead(embeddings, len(ids) - end):
                model(
                    input_ids=ids[None, start:end],
                    use_cache=True,
                    logits_to_keep=1,
                    **{CACHE: cache},
                    **({} if positions is None else {"position_ids": positions}),
                )
            if report:
                report("prefill", end, len(ids))
    except BaseException:
        expect(announced, 0, batch=1)
        if isinstance(cache, IndexCache):
            cache.expect_prompt(None)
        raise
