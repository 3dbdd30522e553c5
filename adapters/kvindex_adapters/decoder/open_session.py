"""`OpenSession`: a token sequence that can be extended, forked and saved.

Calls of `Decoder.read` and `Decoder.generate` extend it.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from copy import deepcopy
from functools import partial
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from kvindex.core import check
from kvindex.core.transaction import in_plain_torch
from kvindex.layer import AttentionLayer
from kvindex_adapters.common.prompt import Conversation, Messages
from kvindex_adapters.decoder.dense import DenseAttention
from kvindex_adapters.decoder.drafter import Drafter
from kvindex_adapters.decoder.reading import Reading
from kvindex_adapters.decoder.saving import load_session, save_session
from kvindex_adapters.decoder.session import Session
from kvindex_adapters.llama.fused import Fused


class OpenSession(Session):
    """A token sequence that several calls of `Decoder.read` and `Decoder.generate` extend.

    `Decoder.session` makes an object of this class.

    Args:
        reading: The decoder's weights, and the model from which they were read.
        attentions: The attention object of each layer, without tokens.
        fused: Kernels for decode steps, or None to use plain torch.
        options: The arguments of `Decoder.session`.
    """

    _attentions: Sequence[AttentionLayer | DenseAttention]

    def __init__(
        self,
        reading: Reading,
        attentions: Sequence[AttentionLayer | DenseAttention],
        fused: Fused | None,
        options: Mapping[str, Any],
    ) -> None:
        super().__init__(reading.weights, reading.config, attentions, [0], fused)
        self._reading = reading
        self.options = dict(options)
        """The arguments of `Decoder.session`, with which a draft model's session is opened."""
        self.drafter: Drafter | None = None
        """The draft model's session, after a call with `draft_model`. Later calls continue it."""
        self.ids: Tensor | None = torch.zeros(0, dtype=torch.int64)
        """Ids int64 `[N]` of all tokens, on the CPU. None if the session was loaded from a folder
        without ids."""
        self.conversation: Conversation | None = None
        """The chat messages that the tokens represent, or None if the tokens are not a chat."""

    def check_reading(self, reading: Reading) -> None:
        """Check that the session uses the decoder's present weights.

        Args:
            reading: The weights that the decoder uses now.

        Raises:
            ValueError: The session was opened with other weights.
        """
        if reading is not self._reading:
            raise ValueError(
                "session: got a session of another decoder, or a session that was opened before "
                "the decoder's model changed; open a new session with decoder.session(), and read "
                "the text into it again"
            )

    @in_plain_torch
    def fork(self, *, k: int | str | None = None, error: float | None = None) -> OpenSession:
        """Make an independent session with the same tokens.

        As with `copy.deepcopy` of an index, the rows and codes of indexes are shared, not copied.
        The keys and values of layers without an index are copied.

        Args:
            k: Number of rows that the new session retrieves per KV head and decode step, or
                "auto"; None for the same as this session. "auto" needs sizes that are measured
                while a prompt is read, so open this session with `k="auto"`. Layers without an
                index ignore it. The reports of a session with another number count from the fork
                on.
            error: Allowed error of a layer's output, as for `kvhf.attach`; with `k` alone, none.

        Returns:
            The new session.

        Raises:
            ValueError: `k` or `error` is out of range, or the session has no index, or one that
                does not support it.
        """
        if (k is not None or error is not None) and not self._indexed():
            raise ValueError(
                f"k, error: got {k!r} and {error!r} for a session without an index, allowed is None"
            )
        with self.exclusive():
            other = self.duplicate()
            other.drafter = None if self.drafter is None else self.drafter.fork()
        if k is not None or error is not None:
            other.set_rows(k, error=error)
        return other

    def truncate(self, length: int) -> None:
        """Keep the first `length` tokens, and remove the rest.

        Args:
            length: Number of tokens to keep, at least 0. A number beyond the session's length has
                no effect.

        Raises:
            ValueError: `length` is negative.
        """
        check.at_least("length", length, 0)
        with self.exclusive():
            if length >= self.length:
                return
            self.keep(length)
            self.ids = None if self.ids is None else self.ids[:length]

    def complete(
        self, start: int, ids: Tensor, messages: Messages | None = None, *, full: bool = False
    ) -> None:
        """Finish a call of the decoder, so that the session contains `ids` after position `start`.

        If the last id has not been processed yet, this runs one more step. If decode steps ran past
        the last id, their tokens are removed. Then ids and messages are recorded.

        Args:
            start: Number of tokens before `ids`.
            ids: Int64 `[N]`, the ids of the prompt and the answer.
            messages: All messages of the chat, or None if the tokens are not a chat.
            full: If one more step runs, attend to all tokens in it.
        """
        known = None if self.ids is None else torch.cat([self.ids, ids.cpu()])
        end = start + len(ids)
        self.truncate(end)
        if self.length < end:
            self.step(ids[-1:], full=full)
        self.ids = known
        if known is None or messages is None:
            self.conversation = None
        else:
            self.conversation = Conversation(known, messages)

    @contextmanager
    def undone(self, keep: int | None = None) -> Iterator[None]:
        """Context manager that restores the session if the `with` block raises an exception.

        Calls of other threads that change the session during the block raise RuntimeError.

        Args:
            keep: Number of tokens to which the session is truncated at the beginning of the block.
                None keeps all tokens.
        """
        with self.exclusive():
            position, length, ids = self._position.clone(), self.length, self.ids
            conversation, attentions = self.conversation, self._attentions
            acceptance = self.acceptance
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
                self.forget_prepared()
                self._attentions = [restore() for restore in restores]
                self._position.copy_(position)
                self.length, self.ids, self.conversation = length, ids, conversation
                self.acceptance = acceptance
                raise

    def save(self, folder: str | os.PathLike[str]) -> None:
        """Save the session to a folder.

        The folder contains the KV cache and index of each layer, the token ids and messages if
        they are known, and data that identify the model. `load` reads the folder. A cache of
        `kvhf.attach` can read it as well. A call that fails leaves no folder behind.

        Args:
            folder: Path of a folder that does not exist yet.

        Raises:
            OSError: The folder exists already, or cannot be written.
            ValueError: The session has no tokens, its decoder has FP8 weights or only a shard of
                the heads, or the model has changed since the session was opened.
            RuntimeError: The model failed when it was run on a few fixed tokens to identify it.
        """
        with self.exclusive():
            check.at_least("session.length", self.length, 1)
            model = self._saved_model()
            self.forget_prepared()  # saving a layer finishes its pending append
            save_session(folder, self._attentions, self.ids, model, self.conversation)

    @in_plain_torch
    def load(self, folder: str | os.PathLike[str]) -> None:
        """Load a saved session, or a saved cache of `kvhf.attach`, into this empty session.

        The model and the indexes must be those of the saved session. `k`, `coverage`,
        `dense_below`, device, store and backend may differ. A call that fails leaves the session
        empty.

        Args:
            folder: A folder that `save` has written.

        Raises:
            FileNotFoundError: The folder, or a file in it, does not exist.
            ValueError: The folder was modified after it was saved. Or it was saved with another
                model, other indexes, other values of `sink`, `local_window` or `update_every`, or
                several sequences. Or this session already contains tokens, or its decoder has FP8
                weights or only a shard of the heads.
            RuntimeError: The model failed when it was run on a few fixed tokens to identify it.
        """
        with self.undone():
            if self.length:
                raise ValueError(
                    f"session: got a session with {self.length} tokens; load needs an empty session"
                )
            known = load_session(folder, self._attentions, self._saved_model())
            self.ids, self.conversation = known
            self.length = len(self._attentions[0])
            self._position += self.length

    def _saved_model(self) -> PreTrainedModel:
        """Return the transformers model from which the session's weights were read.

        `save` stores a fingerprint of this model, and `load` compares it. Raise ValueError if the
        decoder's weights are copies (FP8 weights, or a shard of the heads).
        """
        if self._weights.ranks is not None:
            raise ValueError(
                "session: got a session of a decoder with ranks=; save and load need a decoder in "
                "one process, because each rank has only the keys and values of its own heads"
            )
        model = self._reading.model
        if model is None:
            raise ValueError(
                "weights: got 'fp8', allowed is 'plain' to save or load a session, because keys "
                "and values that FP8 weights computed do not match the original model"
            )
        self._reading.check_unchanged()
        return model


Layer = AttentionLayer | DenseAttention


def _roll_back(layer: Layer, checkpoint: Any) -> Layer:
    layer.rollback(checkpoint)
    return layer


def _restorer(layer: Layer, keep: int) -> Callable[[], Layer]:
    """Return a function that undoes a later truncation of the layer to `keep` tokens.

    The function restores the tokens that the layer contains now. For this, they are copied. A
    checkpoint of the layer would not be enough, because tokens that are appended after the
    truncation overwrite the removed tokens.
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
