"""What stands around the calls of an attached model: refusals, one thread at a time, undoing."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from kvindex_adapters.hf.attachment import Attachment, attached
from kvindex_adapters.hf.cache import IndexCache
from kvindex_adapters.hf.unsupported import UnsupportedError, check_generate


class GuardedDecoder(nn.Module):
    """A decoder whose calls are steps of the cache that they are given."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """As the decoder's class does, with the cache in `past_key_values`."""
        attachment = attached.get(self)
        if attachment is None or attachment.decoder is not self:
            return super().__call__(*args, **kwargs)
        return _step(super().__call__, attachment, args, kwargs)


class GuardedModel(nn.Module):
    """A model that refuses ways to generate before it begins."""

    def generate(self, *args: Any, **kwargs: Any) -> Any:
        """As the model's class does."""
        if self in attached:
            check_generate(self, kwargs)
        above: Any = super()
        return above.generate(*args, **kwargs)


def _step(
    forward: Callable[..., Any], attachment: Attachment, args: Any, kwargs: dict[str, Any]
) -> Any:
    """A decoder's call that refuses other caches and undoes a step that fails half way."""
    if kwargs.get("output_attentions"):
        raise UnsupportedError("output_attentions: got True, allowed is False inside attach()")
    cache = kwargs.get("past_key_values")
    if not isinstance(cache, IndexCache) or cache.attachment is not attachment:
        raise UnsupportedError(
            f"past_key_values: got {type(cache).__name__}, allowed inside attach() is the cache "
            "that it gave, or a deep copy of it: model.generate(…, past_key_values=cache)"
        )
    with attachment.exclusive():
        cache.check_usable()
        before = cache.checkpoint()
        ids = args[0] if args else kwargs.get("input_ids")
        cache.ids, known = None, cache.ids  # who knows better says so afterwards
        cache.tokens = ids if isinstance(ids, Tensor) and ids.dtype == torch.int64 else None
        try:
            output = forward(*args, **kwargs)
            cache.check_taken()
        except BaseException:  # an interrupt, too, leaves layers of different lengths
            cache.rollback(before)
            cache.ids = known
            raise
        finally:
            cache.tokens = None
            cache.padding.forget()
    return output
