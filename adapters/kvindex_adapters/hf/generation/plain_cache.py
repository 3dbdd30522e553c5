"""`PlainCache`: transformers' own cache, for full attention in `generate`, `read` and `Chat`."""

from __future__ import annotations

import os
from copy import deepcopy
from dataclasses import dataclass, replace
from typing import Any, NoReturn

from torch import Tensor
from transformers import DynamicCache, PreTrainedModel
from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer

from kvindex.core import check
from kvindex.layer import AttentionLayer
from kvindex_adapters.common.prompt import Conversation
from kvindex_adapters.common.unsupported import UnsupportedError
from kvindex_adapters.hf.cache.recording import check_window, linear_states, stop_recording
from kvindex_adapters.hf.cache.report import Report, sum_up
from kvindex_adapters.hf.cache.saving import load_cache, open_cache, save_cache, saved_index
from kvindex_adapters.hf.model.cache_argument import CACHE
from kvindex_adapters.hf.model.info import find_decoder, one_call_error, reads_chunks

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
            raise one_call_error(
                model,
                "so nothing can follow a prompt that was read; pass each whole prompt to "
                "kvhf.generate(…, index=None)",
            )
        super().__init__(config=model.config)
        self._model = model
        self.ids: Tensor | None = None
        """Ids int64 `[N]` of all tokens. None if a call other than `kvhf.read` or `kvhf.generate`
        added tokens."""
        self.conversation: Conversation | None = None
        """The chat messages of the tokens. Valid only if `conversation.ids` is the same tensor
        object as `self.ids`."""

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Append the keys and values of a layer, as transformers does. The ids become unknown."""
        self.ids = None
        rows: tuple[Tensor, Tensor] = super().update(
            key_states, value_states, layer_idx, *args, **kwargs
        )
        return rows

    def update_conv_state(self, *args: Any, **kwargs: Any) -> Tensor:
        """Replace a convolution state, as transformers does. The ids become unknown."""
        self.ids = None
        state: Tensor = super().update_conv_state(*args, **kwargs)
        return state

    def update_recurrent_state(self, *args: Any, **kwargs: Any) -> Tensor:
        """Replace a recurrent state, as transformers does. The ids become unknown."""
        self.ids = None
        state: Tensor = super().update_recurrent_state(*args, **kwargs)
        return state

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Replace each sequence of the batch, as transformers does. The ids become unknown."""
        self.ids = None
        super().reorder_cache(beam_idx)

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Repeat each sequence of the batch, as transformers does. The ids become unknown."""
        self.ids = None
        super().batch_repeat_interleave(repeats)

    def batch_select_indices(self, indices: Tensor) -> None:
        """Keep only the selected sequences, as transformers does. The ids become unknown."""
        self.ids = None
        super().batch_select_indices(indices)

    def check_usable(self) -> None:
        """Raise RuntimeError if a forward pass has failed half way, and was not undone."""
        lengths = _lengths(self.layers)
        if len(lengths) > 1 or (lengths == {0} and any(map(linear_states, self.layers))):
            raise RuntimeError(
                f"{CACHE}: got a cache with a forward pass that failed half way "
                f"({_counted(lengths)}); call reset() first"
            )

    def check_model(self, model: PreTrainedModel) -> None:
        """Raise UnsupportedError if the cache belongs to another model.

        Args:
            model: The model that is called with this cache, without the `PeftModel` around it.
        """
        if model is not self._model:
            raise UnsupportedError(
                f"model: got a {type(model).__name__} other than the {type(self._model).__name__} "
                "that this cache belongs to; pass the model with which the cache was made"
            )

    @property
    def sequences(self) -> int:
        """Number of sequences in the batch, or 1 for an empty cache."""
        rows = [vars(layer).get("keys") for layer in self.layers]
        return max((keys.shape[0] for keys in rows if keys is not None), default=1)

    def attention_layers(self) -> list[AttentionLayer]:
        """Return an empty list, because no layer has an index."""
        return []

    def report(self) -> Report:
        """Report the number of tokens and the memory of the cache."""
        return full_report(self.get_seq_length(), sum(map(_nbytes, self.layers)))

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
            for layer in self.layers:
                check_window(layer)
        except BaseException:
            self.rollback(before)
            raise
        self.ids = None

    def stop_recording(self) -> None:
        """Delete the older tokens that assisted decoding has recorded in layers of fixed size."""
        for layer in self.layers:
            stop_recording(layer)

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

    def __deepcopy__(self, memo: dict[int, Any]) -> PlainCache:
        """Implement `copy.deepcopy`: make an independent copy for the same model."""
        other = memo[id(self)] = self.fork()
        return other

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        raise TypeError(
            "cache: got pickle or copy.copy; use copy.deepcopy(cache), or cache.save(folder) and "
            "cache.load(folder) for another process"
        )

    def save(self, folder: str | os.PathLike[str]) -> None:
        """Save the cache to a new folder, as `IndexCache.save` does.

        Raises:
            OSError: The folder exists already, or cannot be written.
            ValueError: The cache is empty, or does not have as many ids as tokens.
            RuntimeError: A forward pass has failed half way.
        """
        self.check_usable()
        length = check.at_least("len(cache)", self.get_seq_length(), 1)
        if self.ids is not None and len(self.ids) != length:
            raise ValueError(
                f"cache.ids: got {len(self.ids)} ids, allowed is one for each of the {length} "
                "tokens, or None"
            )
        known = self.ids, find_decoder(self._model), self._model.config, self.conversation
        save_cache(folder, self.layers, *known)

    def load(self, folder: str | os.PathLike[str]) -> None:
        """Load a saved cache without an index into this empty cache.

        A call that fails leaves this cache unchanged.

        Raises:
            FileNotFoundError: The folder, or a file in it, does not exist.
            ValueError: The folder was modified after it was saved, or was saved with another model.
                Or this cache already contains tokens.
        """
        if length := self.get_seq_length():
            raise ValueError(
                f"cache: got a cache with {length} tokens; use an empty cache or call reset()"
            )
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
    remedy = "index=None (--index none) as for the saved cache"
    if saved:
        spec = saved_index(folder)
        remedy = (
            "the same index=… (--index …) as for the saved cache"
            if spec is None
            else f"index={spec!r} (--index {spec})"
        )
    raise ValueError(
        f"{name}: got {str(folder)!r}, which was saved with {kinds[saved]}, but this cache has "
        f"{kinds[indexed]}; pass {remedy}"
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


def _lengths(layers: list[Any]) -> set[int]:
    """Return the different numbers of tokens in the layers with keys and values."""
    return {layer.get_seq_length() for layer in layers if isinstance(layer, DynamicLayer)}


def _counted(lengths: set[int]) -> str:
    if len(lengths) > 1:
        return f"its layers have {' or '.join(map(str, sorted(lengths)))} tokens"
    return "its layers with linear attention have processed tokens, and the others have not"


def _nbytes(layer: Any) -> int:
    """Return the bytes of a layer's keys and values, and of its linear-attention states."""
    rows = [vars(layer).get(name) for name in ("keys", "values")]
    stored = [*linear_states(layer), *(tensor for tensor in rows if tensor is not None)]
    return sum(tensor.nbytes for tensor in stored)
