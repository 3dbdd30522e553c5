"""`OpenSession`: one sequence that takes more prompts, is forked, and goes to a folder and back."""

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
from kvindex.core.guard import in_plain_torch
from kvindex.layer import AttentionLayer
from kvindex_adapters.decoder.dense import DenseAttention
from kvindex_adapters.decoder.reading import Reading
from kvindex_adapters.decoder.saving import load_session, save_session
from kvindex_adapters.decoder.session import Session
from kvindex_adapters.hf.exclusive import Exclusive
from kvindex_adapters.hf.prompt import Conversation, Messages
from kvindex_adapters.llama.fused import Fused


class OpenSession(Session):
    """What `Decoder.session` gives: `Decoder.read` and `Decoder.generate` append to it.

    reading: the weights, and the model that they are of; attentions, fused: as of `Session`.
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
        """Ids int64 `[N]` of its tokens, on the CPU; None where a loaded folder does not tell."""
        self.conversation: Conversation | None = None
        """As of `IndexCache`."""

    def check_reading(self, reading: Reading) -> None:
        """Raises ValueError unless it is of these weights."""
        if reading is not self._reading:
            raise ValueError(
                "session: got one of another decoder, or one that was opened before this one's "
                "model was changed; allowed is one that decoder.session() has opened since, which "
                "reads its text again"
            )

    @in_plain_torch
    def fork(self) -> OpenSession:
        """A session that goes on from here by itself.

        It shares rows and codes of indexes as `copy.deepcopy` of an index does, and copies the
        rows of layers without an index.
        """
        with self.exclusive():
            twin = copy(self)
            twin.exclusive = Exclusive("session", "the same session")
            twin._attentions = deepcopy(self._attentions)
            twin._position, twin.token = self._position.clone(), self.token.clone()
            return twin

    def truncate(self, length: int) -> None:
        """Forget the tokens from position `length` on. Raises ValueError below 0."""
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
        """Hold ids int64 `[N]` after the first `start` tokens, and no more.

        Of them it holds all but the last, or all, or some that came after them. messages: of the
        whole conversation, or None where the tokens are not those of one.
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

        Other threads cannot change the session meanwhile: they get a RuntimeError.

        keep: tokens that it holds inside, the first ones; None for all.
        """
        with self.exclusive():
            position, length, ids = self._position.clone(), self.length, self.ids
            conversation, attentions = self.conversation, self._attentions
            restores: list[Callable[[], Layer]]
            if keep is None or keep >= length:
                restores = [partial(_roll_back, layer, layer.checkpoint()) for layer in attentions]
            else:
                restores = [_restores(layer, keep) for layer in attentions]
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
        """Write all layers, ids and messages of the tokens if known, and which model they are of.

        To a new folder, which is whole or not there; `load` reads it, and so does a cache of
        `kvhf.attach`. Raises OSError for a folder that is there already or cannot be written,
        ValueError for a session without tokens, of a decoder in FP8, or whose model was changed
        since it was opened, RuntimeError where the model fails (`hf.model_probe`).
        """
        with self.exclusive():
            check.at_least("session.length", self.length, 1)
            model = self._saved_model()
            save_session(folder, self._attentions, self.ids, model, self.conversation)

    @in_plain_torch
    def load(self, folder: str | os.PathLike[str]) -> None:
        """Hold what a session, or a cache of `kvhf.attach`, held that was saved.

        Of the same model, with the same indexes; `k`, `coverage`, `dense_below`, device, store and
        backend may be others. Raises FileNotFoundError or ValueError, in words, for a folder that
        is not as it was saved, another model, other indexes or sizes of regions, several sequences,
        or where this session holds tokens or is of a decoder in FP8, RuntimeError where the model
        fails (`hf.model_probe`); it stays as it was.
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
        """The model that a folder names. Raises ValueError where weights are copies."""
        if self._weights.ranks is not None:
            raise ValueError(
                "session: got one of a model whose heads several ranks share, allowed for save and "
                "load is one whose weights are whole: a rank has the rows of its own heads alone"
            )
        model = self._reading.model
        if model is None:
            raise ValueError(
                "weights: got 'fp8', allowed is 'plain' to save or load a session: rows of other "
                "weights are of another model"
            )
        self._reading.check()
        return model


Layer = AttentionLayer | DenseAttention


def _roll_back(layer: Layer, checkpoint: Any) -> Layer:
    layer.rollback(checkpoint)
    return layer


def _restores(layer: Layer, keep: int) -> Callable[[], Layer]:
    """What gives the layer as it is now, after all but the first `keep` tokens were cut off.

    A checkpoint does not: other tokens are written in the place of those.
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
