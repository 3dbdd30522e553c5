"""Transactions around the calls of an attached model.

Each call is checked and holds a lock. If a call fails, its changes of the cache are undone.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from kvindex_adapters.common.unsupported import UnsupportedError
from kvindex_adapters.hf.cache.cache import IndexCache
from kvindex_adapters.hf.graph.token_graph import TokenGraph
from kvindex_adapters.hf.model.attachment import Attachment, attached
from kvindex_adapters.hf.model.cache_argument import CACHE, renamed
from kvindex_adapters.hf.unsupported import check_generate

CLOSE = 2**-5
"""Tolerance for comparing the outputs of two forward passes, as a fraction of the largest output.
Another order of summation in bfloat16 (relative error 2^-8) causes a smaller difference, even over
many layers. Positions that are wrong by one token cause a larger difference
(`test_token_graph.py`)."""


class TransactionDecoder(nn.Module):
    """Mixin that wraps each forward pass of a decoder in a transaction of the cache that it is
    called with."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the forward pass of the model's decoder layers. After an error, restore the cache."""
        attachment = attached.get(self)
        if attachment is None or attachment.decoder is not self:
            return super().__call__(*args, **kwargs)
        if len(args) > 1:  # the cache may be a positional argument
            args, kwargs = (), _by_name(self, args, kwargs)
        return _step(super().__call__, attachment, args, renamed(kwargs))


class TransactionModel(nn.Module):
    """Mixin that restores the cache if a call of the model, or of its method `generate`, fails."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the model. If this fails after the decoder's forward pass, undo the forward pass."""
        attachment = attached.get(self)
        if attachment is None:
            return super().__call__(*args, **kwargs)
        with attachment.transaction():
            return super().__call__(*args, **renamed(kwargs))

    def generate(self, *args: Any, **kwargs: Any) -> Any:
        """Check the arguments, then call transformers' `generate`. After an error, restore the
        cache.

        During the call, calls of other threads raise RuntimeError.
        """
        parent: Any = super()
        attachment = attached.get(self)
        if attachment is None:
            return parent.generate(*args, **kwargs)
        kwargs = check_generate(self, args, renamed(kwargs))
        cache = kwargs.get(CACHE)
        if not isinstance(cache, IndexCache) or cache.attachment is not attachment:
            return parent.generate(
                *args, **kwargs
            )  # the first forward pass of this call raises an error
        with attachment.exclusive(), cache.undone():
            return parent.generate(*args, **kwargs)


def _step(
    forward: Callable[..., Any], attachment: Attachment, args: Any, kwargs: dict[str, Any]
) -> Any:
    """Run a forward pass of the model's decoder layers, as a CUDA graph replay if possible.

    After an error, the changes of this forward pass to the cache are undone.

    Raises UnsupportedError if the cache was not yielded by the current `attach`.
    """
    if kwargs.get("output_attentions"):
        raise UnsupportedError("output_attentions: got True, allowed is False inside attach()")
    cache = kwargs.get(CACHE)
    if not isinstance(cache, IndexCache) or cache.attachment is not attachment:
        raise UnsupportedError(
            f"{CACHE}: got {type(cache).__name__}, allowed inside attach() is the cache that "
            f"attach() yielded, or its deep copy: model.generate(…, {CACHE}=cache)"
        )
    with attachment.exclusive():
        cache.check_usable()
        graph = cache.token_graph
        if isinstance(graph, TokenGraph):
            args, kwargs = (), _by_name(cache.decoder, args, kwargs)
            if graph.takes(forward, cache, kwargs):
                before = cache.get_seq_length(), cache.ids
                output = graph.replay(cache)
                attachment.add_undo(cache, partial(cache.undo_replay, *before))
                return output
            if graph.comparing:
                return _compared(graph, forward, cache, kwargs)
        return _undone_if_failed(forward, cache, args, kwargs)


def _compared(
    graph: TokenGraph, forward: Callable[..., Any], cache: IndexCache, kwargs: dict[str, Any]
) -> Any:
    """Run a decode step, and record its operations in a trace.

    `TokenGraph` compares this trace with that of the previous decode step. If both contain the same
    operations, a CUDA graph can replace later decode steps. If the traced step fails, run the step
    again without a trace.
    """
    plain = partial(_undone_if_failed, forward, cache, (), kwargs)
    ids = cache.ids
    try:
        expected = None
        if graph.checks and not cache.overwrites:
            before, expected = cache.checkpoint(), plain()
            cache.rollback(before)
        before = cache.checkpoint()
        output = _undone_if_failed(partial(graph.run, forward, cache), cache, (), kwargs)
        if expected is None or _agree(output, expected):
            return output
        cache.rollback(before)
        graph.give_up("attention_mask: got one that the model reads outside of attention")
    except Exception as error:
        graph.give_up(f"{type(error).__name__} while it was compared: {error}")
        if graph.raises or not cache.usable:
            raise
    cache.ids = ids
    return plain()


def _agree(output: Any, expected: Any) -> bool:
    """Return True if two outputs of a model are equal up to rounding errors.

    Only the first tensor in each output is compared.
    """
    one, other = (next(filter(torch.is_tensor, tree_leaves(each))) for each in (output, expected))
    return bool((one - other).abs().max() <= CLOSE * other.abs().max())


def _undone_if_failed(
    forward: Callable[..., Any], cache: IndexCache, args: Any, kwargs: dict[str, Any]
) -> Any:
    """Run one forward pass without a graph. After an error, restore the cache."""
    attachment, before = cache.attachment, cache.checkpoint()
    ids = args[0] if args else kwargs.get("input_ids")
    cache.steps += 1
    cache.ids, past_ids = None, cache.ids  # `read` and `generate` set the ids afterwards
    cache.tokens = ids if isinstance(ids, Tensor) and ids.dtype == torch.int64 else None
    attachment.running = cache
    try:
        output = forward(*args, **_whole(attachment, kwargs))
        cache.check_attended()
    except BaseException:  # KeyboardInterrupt would leave layers with different lengths
        cache.undo(before, past_ids)
        raise
    finally:
        cache.tokens = attachment.running = None
        cache.padding.forget()
    attachment.add_undo(cache, partial(cache.undo, before, past_ids))
    return output


def _by_name(decoder: nn.Module, args: Any, kwargs: dict[str, Any]) -> dict[str, Any]:
    """Return all arguments of a decoder's call as keyword arguments."""
    if not args:
        return kwargs
    names = list(inspect.signature(decoder.forward).parameters)
    return {**dict(zip(names[: len(args)], args, strict=True)), **kwargs}


def _whole(attachment: Attachment, kwargs: dict[str, Any]) -> dict[str, Any]:
    """Remove `logits_to_keep` from the arguments if layers share keys and sequences are padded.

    With `logits_to_keep`, a layer that uses the keys of another layer processes only the last
    tokens. It would also truncate the padding mask `[B, N]` to the last tokens, although attention
    needs the mask of all tokens.
    """
    if not attachment.sharing or "logits_to_keep" not in kwargs:
        return kwargs
    masks = kwargs.get("attention_mask")
    for mask in (
        masks.values() if isinstance(masks, dict) else [masks]
    ):  # the mask is a tensor, or a dict with one mask per layer type
        if isinstance(mask, Tensor) and mask.ndim == 2 and not bool(mask.all()):
            return {**kwargs, "logits_to_keep": None}
    return kwargs
