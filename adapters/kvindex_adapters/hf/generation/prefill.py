"""Prefill: read a prompt into a cache, chunk by chunk."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from kvindex.core import check
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
    check_follows,
    following,
    next_turn,
    past_ids,
    remember,
)
from kvindex_adapters.hf.model.info import reads_chunks, text_positions
from kvindex_adapters.hf.model.reread import unread
from kvindex_adapters.hf.model.rotary import counting_ahead, length_dependent
from kvindex_adapters.hf.model.wrapped import unwrapped


def read(
    model: PreTrainedModel,
    tokenizer: Any,
    prompt: Prompt,
    *,
    cache: IndexCache,
    used: str = "refuse",
    chunk: int | None = None,
    on_progress: Progress | None = None,
) -> None:
    """Read a prompt into a cache of `attach`, without answering it.

    A call that fails leaves the cache unchanged.

    Args:
        model: The attached model.
        tokenizer: The model's tokenizer.
        prompt: Plain text, messages for the tokenizer's chat template, or token ids int64 `[N]`, as
            in `generate`. But no generation prompt is added after messages.
        cache: The cache that `attach` yielded.
        used: How to treat a cache that already stores tokens. "refuse" raises ValueError.
            "continue" reads the prompt after the stored tokens, as in `generate`.
        chunk: Number of tokens that are read at a time, at least 2. None chooses it as in
            `generate`.
        on_progress: Function that is called with the phase "prefill", the number of tokens done,
            and the number of tokens in total.

    Raises:
        ValueError: The prompt is empty, a size is out of range, or the cache stores tokens and
            `used` is "refuse".
        TypeError: The prompt is neither text, messages nor ids.
    """
    model = unwrapped(model)
    chunk = default_chunk(model) if chunk is None else check.at_least("chunk", chunk, 2)
    check_follows(cache, used, allowed=("refuse", "continue"))
    turn = next_turn(tokenizer, prompt, cache, cache.get_seq_length(), cue=False)
    check_prompt(turn.ids, vocabulary_of(model))
    ids = turn.ids.to(model.device)
    with following(cache, used, turn.keep), torch.no_grad():
        past = past_ids(cache)
        new = unread(model, cache, past, ids)
        prefill(model, new, cache, stop=len(new), chunk=chunk, report=on_progress)
        remember(cache, past, ids, turn.messages)


def default_chunk(model: PreTrainedModel) -> int:
    """Choose the chunk size of a transformers model from the sizes in its configuration."""
    sizes = model.config.get_text_config().to_dict()
    width = sizes.get("hidden_size")
    if width is None:
        return MIN_CHUNK
    inner = sizes.get("intermediate_size") or 4 * width
    count = 4 * width + 3 * (max(inner) if isinstance(inner, list) else inner)
    return chunk_of(count * model.dtype.itemsize, model.device)


def vocabulary_of(model: PreTrainedModel) -> int:
    """Count the ids that a model can embed. They may be more than the configured `vocab_size`."""
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
    report: Progress | None = None,
) -> None:
    """Read the beginning of a prompt into a cache, chunk by chunk.

    If rotary frequencies depend on the length of the sequence, each chunk gets those of the whole
    prompt, as if it were read in one call. Models that cannot read chunks read it in one call.
    Since a step of one token would search, no chunk has only one token.

    Args:
        model: The model.
        ids: Int64 `[N]`, the ids of the whole prompt.
        cache: The cache.
        stop: Number of ids to read.
        chunk: Number of ids to read at a time. The last chunk may have one more.
        room: Number of tokens for which to reserve memory in the background after the first chunk,
            or 0.
        report: Called after each chunk, as `on_progress` of `generate`.
    """
    embeddings, before = length_dependent(model), cache.get_seq_length()
    for start, end in chunks(stop, chunk if reads_chunks(model) else stop):
        if start and room and isinstance(cache, IndexCache):
            expect(cache.indexes(), room, batch=1)
            room = 0
        positions = text_positions(model, before + start, before + end)
        with counting_ahead(embeddings, len(ids) - end):
            model(
                input_ids=ids[None, start:end],
                past_key_values=cache,
                use_cache=True,
                logits_to_keep=1,
                **({} if positions is None else {"position_ids": positions}),
            )
        if report:
            report("prefill", end, len(ids))
