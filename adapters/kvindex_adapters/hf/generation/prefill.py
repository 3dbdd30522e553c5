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
    """Read a prompt into the cache that `attach` gave, without answering.

    A call that fails leaves the cache as it was.

    Args:
        model: The attached model.
        tokenizer: The model's tokenizer.
        prompt: As in `generate`, but messages get no generation prompt after them.
        cache: The cache that `attach` gave.
        used: How to treat a cache that already stores tokens. "refuse": raise ValueError.
            "continue": the prompt follows the stored tokens, and messages as in `generate`.
        chunk: As in `generate`.
        on_progress: As in `generate`.

    Raises:
        ValueError: The prompt is empty, a size is out of range, or the cache stores tokens and
            `used` is "refuse"; also what `attach` raises.
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
    """`chunk_of` a transformers model, by the sizes that its configuration names."""
    sizes = model.config.get_text_config().to_dict()
    width = sizes.get("hidden_size")
    if width is None:
        return MIN_CHUNK
    inner = sizes.get("intermediate_size") or 4 * width
    count = 4 * width + 3 * (max(inner) if isinstance(inner, list) else inner)
    return chunk_of(count * model.dtype.itemsize, model.device)


def vocabulary_of(model: PreTrainedModel) -> int:
    """How many ids a model has rows for; an embedding may have more than its configuration says."""
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
    """Read the first `stop` of ids int64 `[N]` into a cache, about `chunk` at a time.

    All ids are one prompt: where rotary frequencies depend on the length of the sequence, each
    chunk gets those of the last id's position, as if the prompt were read in one call. Models of
    `ONE_CALL` do read it in one call.
    A chunk of one token would be a searching step, so the last chunk takes what would be left.
    room: tokens in all for which memory is got meanwhile, once the first chunk has made indexes.
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
