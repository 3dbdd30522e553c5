"""`OpenSession`: a sequence that takes several prompts, can be forked, and can be saved."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from copy import copy, deepcopy
from functools import partial
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from kvindex.core import check
from kvindex.core.transaction import in_plain_torch
from kvindex.layer import AttentionLayer
from kvindex_adapters.common.exclusive import Exclusive
from kvindex_adapters.common.prompt import Conversation, Messages
from kvindex_adapters.decoder.dense import DenseAttention
from kvindex_adapters.decoder.reading import Reading
from kvindex_adapters.decoder.saving import load_session, save_session
from kvindex_adapters.decoder.session import Session
from kvindex_adapters.llama.fused import Fused


class OpenSession(Session):
    """A sequence that `Decoder.session` opens, and `Decoder.read` and `Decoder.generate` extend.

    Args:
        reading: The weights, and the model from which they were read.
        attentions: As in `Session`.
        fused: As in `Session`.
    """

    _attentions: Sequence[AttentionLayer | DenseAttention]

    def __init__(
        self,
        reading: Reading,
        attentions: Sequence[AttentionLayer | DenseAttention],
        fused: Fused | None,
    ) -> None:
        super().__init__(reading.weights, reading.config, attentions, [0], fused)
        self._reading = reading
        self.ids: Tensor | None = torch.zeros(0, dtype=torch.int64)
        """Ids int64 `[N]` of the tokens, on the CPU; None if a loaded folder does not have them."""
        self.conversation: Conversation | None = None
        """The chat messages of the tokens, or None."""

    def check_reading(self, reading: Reading) -> None:
        """Check that the session was opened with these weights.

        Args:
            reading: The weights that the decoder uses now.

        Raises:
            ValueError: The session belongs to other weights.
        """
        if reading is not self._reading:
            raise ValueError(
                "session: got one of another decoder, or one that was opened before the decoder's "
                "model was changed; allowed is a session that decoder.session() has opened after "
                "the change, into which the text is read again"
            )

    @in_plain_torch
    def fork(self) -> OpenSession:
        """Make an independent session with the same tokens.

        The fork shares rows and codes of indexes as `copy.deepcopy` of an index does, and copies
        the keys and values of layers without an index.

        Returns:
            The new session.
        """
        with self.exclusive():
            other = copy(self)
            other.exclusive = Exclusive("session", "the same session")
            other._attentions = deepcopy(self._attentions)
            other._position, other.token = self._position.clone(), self.token.clone()
            return other

    def truncate(self, length: int) -> None:
        """Remove the tokens from position `length` on.

        Args:
            length: Tokens to keep, at least 0.

        Raises:
            ValueError: `length` is negative.
        """
        check.at_least("length", length, 0)
        with self.exclusive():
            if length >= self.length:
                return
            for layer in self._attentions:
                layer.truncate(length)
            self._position -= self.length - length
            self.length = length
            self.ids = None if self.ids is None else self.ids[:length]

    def complete(self, start: int, ids: Tensor, messages: Messages | None = None) -> None:
        """End a call: store exactly the first `start` tokens and `ids`, and record ids and
        messages.

        When this is called, the session stores all of `ids` except the last one, or all of them, or
        more tokens after them, which are removed.

        Args:
            start: Number of tokens before `ids`.
            ids: Int64 `[N]`, the ids of the prompt and the answer.
            messages: The messages of the whole conversation, or None if the tokens are not a
                conversation.
        """
        known = None if self.ids is None else torch.cat([self.ids, ids.cpu()])
        end = start + len(ids)
        self.truncate(end)
        if self.length < end:
            self.step(ids[-1:])
        self.ids = known
        if known is None or messages is None:
            self.conversation = None
        else:
            self.conversation = Conversation(known, messages)

    @contextmanager
    def undone(self, keep: int | None = None) -> Iterator[None]:
        """Restore the state at the beginning of the context if the body raises.

        If another thread tries to change the session meanwhile, its call raises RuntimeError.

        Args:
            keep: The session is truncated to its first `keep` tokens when the context begins; None
                keeps all.
        """
        with self.exclusive():
            position, length, ids = self._position.clone(), self.length, self.ids
            conversation, attentions = self.conversation, self._attentions
            restores: list[Callable[[], Layer]]
            if keep is None or keep >= length:
                restores = [partial(_roll_back, layer, layer.checkpoint()) for layer in attentions]
            else:
                restores = [_restorer(layer, keep) for layer in attentions]
            try:
                if keep is not None:
                    self.truncate(keep)
                yield
            except BaseException:
                self._attentions = [restore() for restore in restores]
                self._position.copy_(position)
                self.length, self.ids, self.conversation = length, ids, conversation
                raise

    def save(self, folder: str | os.PathLike[str]) -> None:
        """Write all layers, the ids and messages of the tokens if known, and the model's identity.

        If the call fails, no folder is left behind. `load` reads the folder, and so does a cache of
        `kvhf.attach`.

        Args:
            folder: A new folder.

        Raises:
            OSError: The folder exists already, or cannot be written.
            ValueError: The session has no tokens, its decoder has FP8 weights or only a shard of
                the heads, or its model was changed since the session was opened.
            RuntimeError: The model fails for a few fixed tokens (`hf.model_probe`).
        """
        with self.exclusive():
            check.at_least("session.length", self.length, 1)
            model = self._saved_model()
            save_session(folder, self._attentions, self.ids, model, self.conversation)

    @in_plain_torch
    def load(self, folder: str | os.PathLike[str]) -> None:
        """Fill this empty session from a saved session, or from a saved cache of `kvhf.attach`.

        Model and indexes must be the same. `k`, `coverage`, `dense_below`, device, store and
        backend may differ. A call that fails leaves the session unchanged.

        Args:
            folder: The folder that `save` has written.

        Raises:
            FileNotFoundError: The folder, or a file in it, does not exist.
            ValueError: The folder has changed since it was saved; it belongs to another model, to
                other indexes or sizes of regions, or to several sequences; this session stores
                tokens; or its decoder has FP8 weights or only a shard of the heads.
            RuntimeError: The model fails for a few fixed tokens (`hf.model_probe`).
        """
        with self.undone():
            if self.length:
                raise ValueError(
                    f"session: got one that holds {self.length} tokens, allowed is an empty one"
                )
            known = load_session(folder, self._attentions, self._saved_model())
            self.ids, self.conversation = known
            self.length = len(self._attentions[0])
            self._position += self.length

    def _saved_model(self) -> PreTrainedModel:
        """The model whose identity is saved or checked. Raises ValueError if the weights are
        copies."""
        if self._weights.ranks is not None:
            raise ValueError(
                "session: got one of a model whose heads several ranks share, allowed for save and "
                "load is a model that one process has whole: a rank has only the keys and values "
                "of its own heads"
            )
        model = self._reading.model
        if model is None:
            raise ValueError(
                "weights: got 'fp8', allowed is 'plain' to save or load a session: with other "
                "weights the keys and values are those of another model"
            )
        self._reading.check_unchanged()
        return model


Layer = AttentionLayer | DenseAttention


def _roll_back(layer: Layer, checkpoint: Any) -> Layer:
    layer.rollback(checkpoint)
    return layer


def _restorer(layer: Layer, keep: int) -> Callable[[], Layer]:
    """Return a function that restores the layer's present state after a truncation to `keep`.

    A checkpoint cannot do this, because new tokens overwrite those that the truncation removes.
    """
    if isinstance(layer, AttentionLayer):
        copied = deepcopy(layer)
        return lambda: copied
    rows = layer.rows
    removed = rows.keys[:, :, keep:].clone(), rows.values[:, :, keep:].clone()

    def restore() -> Layer:
        layer.truncate(keep)
        layer.append(*removed)
        return layer

    return restore
