"""Models that read the whole prompt again where their rotary frequencies change: the Phi-3 family.

These models have one set of frequencies up to `original_max_position_embeddings` tokens and another
one above. When `generate` crosses that length, their `prepare_inputs_for_generation` drops the
cache and passes all ids to the model, so that all keys get the frequencies of the new length.
Inside `attach` the tokens are read again into the same cache, and so do `read` and `generate` of
this package before they read a prompt that crosses the length.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from kvindex_adapters.common.unsupported import UnsupportedError
from kvindex_adapters.hf.cache.cache import IndexCache
from kvindex_adapters.hf.model.calls import TransactionDecoder, TransactionModel
from kvindex_adapters.hf.model.info import reads_chunks

FAMILIES = ("phi3", "phimoe", "phi4_multimodal")
"""Types of models whose own `prepare_inputs_for_generation` drops a cache."""


def crosses(model: PreTrainedModel, before: int, after: int) -> bool:
    """Return True if the model drops a cache of `before` tokens for a sequence of `after`."""
    config = model.config
    switch = vars(config).get("original_max_position_embeddings")
    return config.model_type in FAMILIES and switch is not None and before <= switch < after


def prefilled(model: PreTrainedModel, tokens: int, chunk: int) -> int:
    """Return how many tokens of a prompt to read before `model.generate` reads the others.

    All but the last `chunk`; none for a model that reads no chunks. Where the model would drop what
    was read, one token more than it drops; or none, where fewer than two would be left.
    """
    stop = max(tokens - chunk, 0) if reads_chunks(model) else 0
    if not crosses(model, stop, tokens):
        return stop
    count: int = vars(model.config)["original_max_position_embeddings"] + 1
    return count if tokens - count >= 2 else 0


def unread(
    model: PreTrainedModel, cache: Any, past: Tensor | None, ids: Tensor, *, more: int = 0
) -> Tensor:
    """Return the ids that the model must read so that the cache contains `ids` after its tokens.

    These are `ids`, or all ids where the cached keys have the frequencies of a shorter sequence.
    In that case the cache is emptied; `cache.rollback` restores it.

    Args:
        past: Ids int64 `[P]` of the cached tokens, or None where they are not known.
        ids: int64 `[N]`.
        more: Tokens that `model.generate` may add, for which it needs all ids as well.

    Raises:
        UnsupportedError: The tokens must be read again, and `past` is None.
    """
    before = cache.get_seq_length()
    if past is None and crosses(model, before, before + len(ids) + more):
        name = type(model).__name__
        switch = vars(model.config)["original_max_position_embeddings"]
        raise UnsupportedError(
            f"cache: got one of {before} tokens of which the ids are not known, and a prompt with "
            f"an answer of up to {len(ids) + more} more, allowed are {switch} in all: above that "
            f"{name} has other rotary frequencies and must read all tokens again; fill the cache "
            "by kvhf.read and kvhf.generate, which keep the ids, or begin with all ids anew"
        )
    if past is None or not before or not crosses(model, before, before + len(ids)):
        return ids
    cache.restart()
    return torch.cat([past.to(ids), ids])


class RereadingModel(TransactionModel):
    """A model that may drop its cache, and gets it back to read all tokens again."""

    def prepare_inputs_for_generation(
        self,
        input_ids: Tensor,
        past_key_values: Any = None,
        next_sequence_length: int | None = None,
        **kwargs: Any,
    ) -> dict[str, Any]:
        """Run the model's own method; where it drops an `IndexCache`, mark it to be read again."""
        parent: Any = super()
        given = {**kwargs, "past_key_values": past_key_values}
        inputs: dict[str, Any] = parent.prepare_inputs_for_generation(
            input_ids, next_sequence_length=next_sequence_length, **given
        )
        cache = past_key_values
        if not isinstance(cache, IndexCache) or inputs.get("past_key_values") is not None:
            return inputs
        if length := cache.get_seq_length():
            # transformers leaves out a mask of ones, and positions where the model takes none
            by_token = [kwargs.get(name) for name in ("attention_mask", "position_ids")]
            total = max((one.shape[-1] for one in by_token if one is not None), default=0)
            if total > (new := input_ids.shape[1]):
                raise UnsupportedError(
                    f"input_ids: got {new} new ids after a cache of {length} tokens, allowed are "
                    f"all {total} ids: {type(self).__name__} has other rotary frequencies for so "
                    "many and must read all tokens again"
                )
            # phi4_multimodal drops the cache, but passes the last id alone, without its images
            given["is_first_iteration"] = kwargs.get("inputs_embeds") is None
            inputs = parent.prepare_inputs_for_generation(input_ids, **given)
            cache.rereads = input_ids.shape[1]
        inputs["past_key_values"] = cache
        return inputs


class RereadingDecoder(nn.Module):
    """A decoder that empties the cache before it reads all tokens again."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the decoder's own call."""
        cache, ids = kwargs.get("past_key_values"), kwargs.get("input_ids")
        if isinstance(cache, IndexCache):
            rereads, cache.rereads = cache.rereads, 0
            if rereads and isinstance(ids, Tensor) and ids.shape[1] == rereads:
                cache.restart()
        return super().__call__(*args, **kwargs)


class RereadingTransactionDecoder(TransactionDecoder, RereadingDecoder):
    """Inside the guard, so that a step that reads all tokens again is undone as any other."""


def patched_classes(model: PreTrainedModel) -> tuple[type[nn.Module], type[nn.Module]]:
    """Return the classes that `attach` puts before those of the model and of its decoder."""
    if model.config.model_type in FAMILIES:
        return RereadingModel, RereadingTransactionDecoder
    return TransactionModel, TransactionDecoder
