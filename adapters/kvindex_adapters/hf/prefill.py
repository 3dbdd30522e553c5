"""Prefill: encode a prompt and read it into a cache, chunk by chunk."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from kvindex.core import check
from kvindex_adapters.hf.cache import IndexCache
from kvindex_adapters.hf.conversation import check_follows, following, past_ids, remember
from kvindex_adapters.hf.placement import expect
from kvindex_adapters.hf.wrapped import unwrapped

Progress = Callable[[str, int, int], None]
"""Called with a phase ("prefill" or "decode"), tokens done, tokens in all."""

FEWEST, MOST = 1024, 4096
"""Tokens of a piece: what a CPU computes at a time, and the most that a GPU does."""

PIECE_BYTES = 2**29
"""Of a layer's activations of a piece of more than `FEWEST` tokens, in all rows of a batch."""

Prompt = str | list[dict[str, str]] | Tensor
"""Text as it is, messages for the tokenizer's chat template, or ids int64 `[N]`."""


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

    prompt, chunk: as `generate` takes them, but messages get no cue to answer; used: "refuse" a
    cache that holds tokens, or "continue": the prompt follows them. A call that fails leaves the
    cache as it was.

    Raises ValueError for an empty prompt, sizes out of range or a used cache, and what `attach`
    raises.
    """
    model = unwrapped(model)
    chunk = default_chunk(model) if chunk is None else check.at_least("chunk", chunk, 2)
    check_follows(cache, used, allowed=("refuse", "continue"))
    follows = cache.get_seq_length() > 0
    ids = encode_prompt(tokenizer, prompt, follows=follows, cue=False)
    check_prompt(ids, vocabulary_of(model))
    ids = ids.to(model.device)
    past = past_ids(cache)
    with following(cache, used), torch.no_grad():
        prefill(model, ids, cache, stop=len(ids), chunk=chunk, report=on_progress)
        remember(cache, past, ids)


def chunk_of(token_bytes: int, device: torch.device) -> int:
    """Tokens of a piece, where nobody says: token_bytes, a layer's activations of one of them.

    The host launches as many kernels for a piece however long it is. So on a GPU pieces are the
    largest power of two, from 1,024 to 4,096 tokens, whose activations take at most `PIECE_BYTES`.
    """
    if device.type != "cuda":
        return FEWEST
    room = PIECE_BYTES // token_bytes
    return min(MOST, max(FEWEST, 1 << room.bit_length() >> 1))


def default_chunk(model: PreTrainedModel) -> int:
    """`chunk_of` a transformers model, by the sizes that its configuration names."""
    sizes = model.config.get_text_config().to_dict()
    width = sizes.get("hidden_size")
    if width is None:
        return FEWEST
    inner = sizes.get("intermediate_size") or 4 * width
    count = 4 * width + 3 * (max(inner) if isinstance(inner, list) else inner)
    return chunk_of(count * model.dtype.itemsize, model.device)


def vocabulary_of(model: PreTrainedModel) -> int:
    """How many ids a model has rows for; an embedding may have more than its configuration says."""
    named = model.config.get_text_config(decoder=True).to_dict().get("vocab_size") or 0
    rows = model.get_input_embeddings()
    return max(named, rows.num_embeddings if isinstance(rows, nn.Embedding) else 0)


def check_prompt(ids: Tensor, vocabulary: int) -> None:
    """Raises ValueError for a prompt without tokens, or with an id that the model has no row for.

    ids: int64 `[N]`; vocabulary: how many there are, 0 where nobody knows.
    """
    if len(ids) == 0:
        raise ValueError("prompt: got no tokens, allowed is at least one")
    last = (vocabulary or 2**63) - 1
    wrong = ids[(ids < 0) | (ids > last)]
    if len(wrong):
        raise ValueError(f"prompt: got id {int(wrong[0])}, allowed is 0 to {last}")


def encode_prompt(
    tokenizer: Any, prompt: Prompt, *, follows: bool = False, cue: bool = True
) -> Tensor:
    """Ids int64 `[N]` of a text, of chat messages, or as given.

    follows: other tokens come before, so a text gets no token that begins a sequence; cue: messages
    end with the cue to answer. Raises TypeError for a prompt of another kind.
    """
    if isinstance(prompt, Tensor):
        return check.tensor("prompt", prompt, {"N": None}, torch.int64)
    if isinstance(prompt, str):
        encoded = tokenizer(prompt, add_special_tokens=False) if follows else tokenizer(prompt)
        return torch.tensor(encoded["input_ids"], dtype=torch.int64)
    if not isinstance(prompt, Sequence) or not all(isinstance(one, Mapping) for one in prompt):
        kind = type(prompt).__name__
        kind += f" of {type(prompt[0]).__name__}" if isinstance(prompt, Sequence) else ""
        raise TypeError(
            f"prompt: got {kind}, allowed is one text, messages (a list of dicts with role and "
            "content), or ids as a tensor int64 [N]"
        )
    text = tokenizer.apply_chat_template(prompt, tokenize=False, add_generation_prompt=cue)
    ids = tokenizer(text, add_special_tokens=False)["input_ids"]
    return torch.tensor(ids, dtype=torch.int64)


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

    A chunk of one token would be a searching step, so the last chunk takes what would be left.
    room: tokens in all for which memory is got meanwhile, once the first chunk has made indexes.
    """
    for start, end in chunks(stop, chunk):
        if start and room and isinstance(cache, IndexCache):
            expect(cache.indexes(), room, batch=1)
            room = 0
        model(
            input_ids=ids[None, start:end],
            past_key_values=cache,
            use_cache=True,
            logits_to_keep=1,
        )
        if report:
            report("prefill", end, len(ids))


def chunks(stop: int, chunk: int) -> Iterator[tuple[int, int]]:
    """First and end of the pieces in which `prefill` reads `stop` tokens."""
    start = 0
    while start < stop:
        end = start + chunk if stop - start - chunk > 1 else stop
        yield start, end
        start = end
