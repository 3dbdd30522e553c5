"""`PlainCache`: transformers' own cache, for full attention in `generate`, `read` and `Chat`."""

from __future__ import annotations

import os
from copy import deepcopy
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor
from transformers import DynamicCache, PreTrainedModel
from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer

from kvindex.layer import AttentionLayer
from kvindex_adapters.common.prompt import Conversation
from kvindex_adapters.common.unsupported import UnsupportedError
from kvindex_adapters.hf.cache.report import Report, sum_up
from kvindex_adapters.hf.cache.saving import load_cache, open_cache, save_cache
from kvindex_adapters.hf.model.info import find_decoder, reads_chunks

REPLACED_TENSORS = DynamicLayer, DynamicSlidingWindowLayer
"""Classes of layers that never write into their tensors. So copies may share the tensors."""


@dataclass(frozen=True)
class FullReport(Report):
    """The report of a cache without an index."""

    @property
    def read(self) -> str:
        """One line that says how many rows decode steps have read."""
        return "full attention: each step reads all rows"

    def __str__(self) -> str:
        return f"{self.tokens} tokens; {self.read}; memory: {self.plain_nbytes / 2**20:.1f} MiB"


class PlainCache(DynamicCache):
    """A cache without an index, with the methods of `IndexCache` that prompts and chats call.

    Args:
        model: The model, which must not be attached.

    Raises:
        UnsupportedError: The model must process a prompt in one call, so no prompt can follow the
            tokens in a cache.
    """

    layers: list[Any]

    def __init__(self, model: PreTrainedModel) -> None:
        if not reads_chunks(model):
            raise UnsupportedError(
                f"model: got {type(model).__name__}, which must process a prompt in one call, so "
                "nothing can follow a prompt that was read; pass each whole prompt to "
                "kvhf.generate(…, index=None)"
            )
        super().__init__(config=model.config)
        self._model = model
        self.ids: Tensor | None = None
        """Ids int64 `[N]` of all tokens, or None if unknown."""
        self.conversation: Conversation | None = None
        """The chat messages of the tokens. Valid only if `conversation.ids` is the same tensor
        object as `self.ids`."""

    def check_usable(self) -> None:
        """Do nothing: this cache can always be used."""

    def attention_layers(self) -> list[AttentionLayer]:
        """Return an empty list, because no layer has an index."""
        return []

    def report(self) -> Report:
        """Report the number of tokens and the memory of the cache."""
        rows = [vars(one).get(name) for one in self.layers for name in ("keys", "values")]
        size = sum(tensor.nbytes for tensor in rows if tensor is not None)
        return full_report(self.get_seq_length(), size)

    def crop(self, tokens_to_remove: int) -> None:
        """Remove the newest tokens. A call that fails changes nothing.

        Args:
            tokens_to_remove: The number of tokens to remove, negated.

        Raises:
            RuntimeError: A full sliding window or linear attention cannot remove tokens.
        """
        before = self.checkpoint()
        try:
            super().crop(tokens_to_remove)
        except BaseException:
            self.rollback(before)
            raise
        self.ids = None

    def reset(self) -> None:
        """Remove all tokens."""
        self.restart()
        self.ids = self.conversation = None

    def restart(self) -> None:
        """Remove all tokens, in a way that `rollback` can undo."""
        self.layers = DynamicCache(config=self._model.config).layers

    def checkpoint(self) -> tuple[list[Any], list[dict[str, Any]]]:
        """Return a snapshot of the layers, for `rollback`. It shares their tensors if possible."""
        return self.layers, [_attributes(layer) for layer in self.layers]

    def rollback(self, checkpoint: tuple[list[Any], list[dict[str, Any]]]) -> None:
        """Return to the state that `checkpoint` has recorded."""
        self.layers, states = checkpoint
        for layer, state in zip(self.layers, states, strict=True):
            vars(layer).clear()
            vars(layer).update(state)

    def fork(self) -> PlainCache:
        """Return an independent copy. It shares the tensors of the stored tokens if possible."""
        other = PlainCache(self._model)
        for layer, copied in zip(self.layers, other.layers, strict=True):
            vars(copied).update(_attributes(layer))
        other.ids, other.conversation = self.ids, self.conversation
        return other

    def restore(self, fork: PlainCache) -> None:
        """Take over the layers of a fork of this cache. The fork must not be used afterwards."""
        self.layers, self.ids, self.conversation = fork.layers, fork.ids, fork.conversation

    def save(self, folder: str | os.PathLike[str]) -> None:
        """Save the cache to a new folder, as `IndexCache.save` does."""
        known = self.ids, find_decoder(self._model), self._model.config, self.conversation
        save_cache(folder, self.layers, *known)

    def load(self, folder: str | os.PathLike[str]) -> None:
        """Load a saved cache without an index into this empty cache.

        A call that fails leaves this cache empty.
        """
        layers = DynamicCache(config=self._model.config).layers
        known = load_cache(folder, layers, find_decoder(self._model), self._model.config)
        self.layers, (self.ids, self.conversation) = layers, known


def check_saved_index(
    folder: str | os.PathLike[str], *, indexed: bool, name: str = "folder"
) -> None:
    """Check that a cache was saved with an index, or with full attention.

    Args:
        folder: Folder with a saved cache.
        indexed: Whether the cache that loads the folder has an index.
        name: Name of the argument, for the error message.

    Raises:
        FileNotFoundError: The folder does not exist.
        ValueError: The folder contains no saved cache, or one of the other kind.
    """
    layers = open_cache(folder).about.get("layers")
    described = [one for one in layers if isinstance(one, dict)] if isinstance(layers, list) else []
    saved = any("geometry" in one for one in described)
    if not described or saved == indexed:  # other damage is reported while the folder is loaded
        return
    kinds = {True: "an index", False: "full attention"}
    remedy = "the same index=… (--index …)" if saved else "index=None (--index none)"
    raise ValueError(
        f"{name}: got {str(folder)!r}, which was saved with {kinds[saved]}, but this cache has "
        f"{kinds[indexed]}; pass {remedy} as for the saved cache"
    )


def full_report(tokens: int, nbytes: int) -> Report:
    """Make the report of a cache without an index.

    Args:
        tokens: Length of the sequence.
        nbytes: Bytes of all keys and values.
    """
    return FullReport(**vars(replace(sum_up([], 0, nbytes), tokens=tokens)))


def _attributes(layer: Any) -> dict[str, Any]:
    """Copy the attributes of a layer, without the tensors if the layer never writes into them."""
    memo: dict[int, Any] = {}
    if type(layer) in REPLACED_TENSORS:
        memo = {id(rows): rows for rows in (layer.keys, layer.values) if rows is not None}
    return deepcopy(vars(layer), memo)
