"""Models that read the whole prompt again where their rotary frequencies change: the Phi-3 family.

These models use one set of frequencies for sequences of up to `original_max_position_embeddings`
tokens, and another set for longer sequences. When `generate` crosses that length, their
`prepare_inputs_for_generation` drops the cache and passes all ids to the model, so that all keys
get the frequencies of the new length. Inside `attach`, the tokens are read again into the same
cache. `read` and `generate` of this package do the same before they read a prompt that crosses that
length.
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
"""Types of models whose `prepare_inputs_for_generation` drops the cache."""


def crosses(model: PreTrainedModel, before: int, after: int) -> bool:
    """Return True if the model drops its cache when a sequence grows from `before` to `after`."""
    config = model.config
    switch = vars(config).get("original_max_position_embeddings")
    return config.model_type in FAMILIES and switch is not None and before <= switch < after


def prefilled(model: PreTrainedModel, tokens: int, chunk: int) -> int:
    """Return how many tokens of a prompt to read before `model.generate` reads the rest.

    The number is that of all tokens but the last `chunk`, or 0 for a model that must read its
    prompt in one call. If the model would drop its cache in between, the number is the smallest at
    which it does not, or 0 if fewer than two tokens would remain.
    """
    stop = max(tokens - chunk, 0) if reads_chunks(model) else 0
    if not crosses(model, stop, tokens):
        return stop
    count: int = vars(model.config)["original_max_position_embeddings"] + 1
    return count if tokens - count >= 2 else 0


def unread(
    model: PreTrainedModel, cache: Any, past: Tensor | None, ids: Tensor, *, more: int = 0
) -> Tensor:
    """Return the ids that the model must read to append `ids` to the tokens of the cache.

    The result is `ids`; or, if the cached keys have the frequencies of a shorter sequence, `past`
    and `ids`. In the latter case the cache is emptied; `cache.rollback` restores it.

    Args:
        model: The model.
        cache: The cache.
        past: Ids int64 `[P]` of the cached tokens, or None if unknown.
        ids: Int64 `[N]`, the new ids.
        more: Number of tokens that `model.generate` may add afterwards.

    Returns:
        Int64 `[N]` or `[P + N]`.

    Raises:
        UnsupportedError: The tokens must be read again, and `past` is None.
    """
    before = cache.get_seq_length()
    if past is None and crosses(model, before, before + len(ids) + more):
        name = type(model).__name__
        switch = vars(model.config)["original_max_position_embeddings"]
        raise UnsupportedError(
            f"cache: got one of {before} tokens of which the ids are not known, and a prompt with "
            f"an answer of up to {len(ids) + more} more, allowed are {switch} in total: above that "
            f"{name} has other rotary frequencies and must read all tokens again; fill the cache "
            "with kvhf.read and kvhf.generate, which record the ids, or pass all ids to an empty "
            "cache"
        )
    if past is None or not before or not crosses(model, before, before + len(ids)):
        return ids
    cache.restart()
    return torch.cat([past.to(ids), ids])


class RereadingModel(TransactionModel):
    """Lets a model that drops its cache read all tokens into it again."""

    def prepare_inputs_for_generation(
        self,
        input_ids: Tensor,
        past_key_values: Any = None,
        next_sequence_length: int | None = None,
        **kwargs: Any,
    ) -> dict[str, Any]:
        """Run the model's own method. If it drops an `IndexCache`, pass the cache again."""
        parent: Any = super()
        given = {**kwargs, "past_key_values": past_key_values}
        inputs: dict[str, Any] = parent.prepare_inputs_for_generation(
            input_ids, next_sequence_length=next_sequence_length, **given
        )
        cache = past_key_values
        if not isinstance(cache, IndexCache) or inputs.get("past_key_values") is not None:
            return inputs
        if length := cache.get_seq_length():
            # transformers omits a mask of ones, and positions that the model does not take
            by_token = [kwargs.get(name) for name in ("attention_mask", "position_ids")]
            total = max((one.shape[-1] for one in by_token if one is not None), default=0)
            if total > (new := input_ids.shape[1]):
                raise UnsupportedError(
                    f"input_ids: got {new} new ids after a cache of {length} tokens, allowed are "
                    f"all {total} ids: {type(self).__name__} has other rotary frequencies for "
                    "this number and must read all tokens again"
                )
            # phi4_multimodal drops the cache, but passes only the last id, without images
            given["is_first_iteration"] = kwargs.get("inputs_embeds") is None
            inputs = parent.prepare_inputs_for_generation(input_ids, **given)
            cache.rereads = input_ids.shape[1]
        inputs["past_key_values"] = cache
        return inputs


class RereadingDecoder(nn.Module):
    """Empties the cache before a decoder reads all tokens again."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the decoder's own call."""
        cache, ids = kwargs.get("past_key_values"), kwargs.get("input_ids")
        if isinstance(cache, IndexCache):
            rereads, cache.rereads = cache.rereads, 0
            if rereads and isinstance(ids, Tensor) and ids.shape[1] == rereads:
                cache.restart()
        return super().__call__(*args, **kwargs)


class RereadingTransactionDecoder(TransactionDecoder, RereadingDecoder):
    """Empties the cache inside the transaction, so that a failed step restores it."""


def patched_classes(model: PreTrainedModel) -> tuple[type[nn.Module], type[nn.Module]]:
    """Return the classes that `attach` adds to the bases of the model's and the decoder's class."""
    if model.config.model_type in FAMILIES:
        return RereadingModel, RereadingTransactionDecoder
    return TransactionModel, TransactionDecoder
