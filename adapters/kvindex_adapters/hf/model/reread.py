"""Support for the Phi-3 family, which recomputes all keys when a sequence exceeds a certain length.

These models use one set of rotary frequencies for sequences of up to
`original_max_position_embeddings` tokens, and another set for longer sequences. When transformers'
`generate` exceeds this length, the model's `prepare_inputs_for_generation` drops the cache and
passes all ids again, so that all keys get the new frequencies. Inside `attach`, the cache is
emptied and filled again instead. `kvhf.read` and `kvhf.generate` do the same before a prompt that
exceeds the length.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from kvindex_adapters.common.prompt_chunks import aligned
from kvindex_adapters.common.unsupported import UnsupportedError
from kvindex_adapters.hf.cache.cache import IndexCache
from kvindex_adapters.hf.model.cache_argument import CACHE, given_cache, renamed
from kvindex_adapters.hf.model.calls import TransactionDecoder, TransactionModel
from kvindex_adapters.hf.model.info import reads_chunks

FAMILIES = ("phi3", "phimoe", "phi4_multimodal")
"""Model types whose `prepare_inputs_for_generation` drops the cache."""


def crosses(model: PreTrainedModel, before: int, after: int) -> bool:
    """Return True if the model drops its cache when a sequence grows from `before` to `after`."""
    config = model.config
    switch = vars(config).get("original_max_position_embeddings")
    return config.model_type in FAMILIES and switch is not None and before <= switch < after


def prefilled(model: PreTrainedModel, cache: Any, tokens: int, chunk: int) -> int:
    """Return how many tokens of a prompt to prefill before `model.generate` gets the rest.

    Usually these are all tokens except the last `chunk`. The result is 0 for a model that must
    process its prompt in one call. A model of the Phi-3 family drops its cache when the sequence
    becomes longer than a certain length. If the rest of the prompt would cross this length, the
    result is this length plus 1, so that the model keeps its cache while it reads the rest. The
    result is 0 if fewer than two tokens would then remain.

    If the cache prefers chunks that end at multiples of some number of tokens, these tokens end at
    such a multiple.
    """
    stop = max(tokens - chunk, 0) if reads_chunks(model) else 0
    if isinstance(cache, IndexCache):
        stop = aligned(stop, cache.get_seq_length(), cache.chunk_unit)
        stop = 0 if stop == 1 else stop  # a chunk of one token would run as a decode step
    if not crosses(model, stop, tokens):
        return stop
    count: int = vars(model.config)["original_max_position_embeddings"] + 1
    return count if tokens - count >= 2 else 0


def unread(
    model: PreTrainedModel, cache: Any, past: Tensor | None, ids: Tensor, *, more: int = 0
) -> Tensor:
    """Return the ids that the model must process to append `ids` to a cache.

    Usually these are `ids`. If the keys in the cache have the rotary frequencies of shorter
    sequences, the cache is emptied, and the result is `past` followed by `ids`. `cache.rollback`
    can restore the cache.

    Args:
        model: The model.
        cache: The cache.
        past: Ids int64 `[P]` of the cached tokens, or None if unknown.
        ids: Int64 `[N]`, the new ids.
        more: Number of tokens that `model.generate` may append later.

    Returns:
        Ids int64, `[N]` or `[P + N]`.

    Raises:
        UnsupportedError: The tokens in the cache must be processed again, but `past` is None.
    """
    before = cache.get_seq_length()
    if past is None and crosses(model, before, before + len(ids) + more):
        name = type(model).__name__
        switch = vars(model.config)["original_max_position_embeddings"]
        raise UnsupportedError(
            f"cache: got a cache of {before} tokens with unknown ids, and a prompt and answer of "
            f"up to {len(ids) + more} tokens; above {switch} tokens in total, {name} changes its "
            "rotary frequencies and must process all tokens again; fill the cache with kvhf.read "
            "and kvhf.generate, which record the ids, or pass all ids to an empty cache"
        )
    if past is None or not before or not crosses(model, before, before + len(ids)):
        return ids
    cache.restart()
    return torch.cat([past.to(ids), ids])


class RereadingModel(TransactionModel):
    """Mixin for models that drop their cache when the rotary frequencies change (Phi-3 family).

    Without the mixin, the model would continue without a cache. The mixin passes the `IndexCache`
    to the decoder nevertheless. The decoder then empties the cache, and reads all tokens again.
    """

    def prepare_inputs_for_generation(
        self,
        input_ids: Tensor,
        next_sequence_length: int | None = None,
        **kwargs: Any,
    ) -> dict[str, Any]:
        """Call this method of the model's class. If the result no longer contains the `IndexCache`,
        add it again."""
        parent: Any = super()
        given = renamed(kwargs)
        inputs: dict[str, Any] = parent.prepare_inputs_for_generation(
            input_ids, next_sequence_length=next_sequence_length, **given
        )
        cache = given.get(CACHE)
        if not isinstance(cache, IndexCache) or inputs.get(CACHE) is not None:
            return inputs
        if length := cache.get_seq_length():
            # Take the number of tokens from the mask or the positions, whichever is longer. Either
            # may be missing: transformers passes no mask if all entries are ones, and no positions
            # if the model has no such argument.
            by_token = [kwargs.get(name) for name in ("attention_mask", "position_ids")]
            total = max((one.shape[-1] for one in by_token if one is not None), default=0)
            if total > (new := input_ids.shape[1]):
                raise UnsupportedError(
                    f"input_ids: got {new} new ids with a cache of {length} tokens, but "
                    f"{type(self).__name__} has other rotary frequencies for {total} tokens and "
                    f"must process all of them again; pass all {total} ids"
                )
            # The call above has dropped the cache, but may have returned only the last token id
            # (phi4_multimodal, for text without images). The call below returns all ids.
            given["is_first_iteration"] = kwargs.get("inputs_embeds") is None
            inputs = parent.prepare_inputs_for_generation(input_ids, **given)
            cache.rereads = input_ids.shape[1]
        inputs[CACHE] = cache
        return inputs


class RereadingDecoder(nn.Module):
    """Mixin that empties the cache before a decoder processes all tokens again."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Empty the cache if the input contains all tokens of the sequence again, then run the
        forward pass of this module."""
        cache, ids = given_cache(kwargs), kwargs.get("input_ids")
        if isinstance(cache, IndexCache):
            rereads, cache.rereads = cache.rereads, 0
            if rereads and isinstance(ids, Tensor) and ids.shape[1] == rereads:
                cache.restart()
        return super().__call__(*args, **kwargs)


class RereadingTransactionDecoder(TransactionDecoder, RereadingDecoder):
    """Decoder that empties the cache if its input contains all tokens of the sequence again.

    It empties the cache inside a transaction, so the cache is restored if the forward pass fails.
    """


def patched_classes(model: PreTrainedModel) -> tuple[type[nn.Module], type[nn.Module]]:
    """Return two mixins: one that `attach` adds to the class of the model, and one that it adds to
    the class of the model's inner module, whose forward pass takes the cache."""
    if model.config.model_type in FAMILIES:
        return RereadingModel, RereadingTransactionDecoder
    return TransactionModel, TransactionDecoder
