"""Base class of `Sharded`, with the methods that need no communication between ranks."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from kvindex.core import check
from kvindex.core.capability import capability
from kvindex.core.protocol import KVIndex, ObservesQueries
from kvindex.core.ranks import Ranks
from kvindex.core.shards import Shard
from kvindex.storage.columns import Valid
from kvindex.storage.layout import Layout, TensorSpec, scalar
from kvindex.storage.state import below, length_and_batch
from kvindex.wrappers.base import Wrapper


class ShardedTokens(Wrapper):
    """Receives all tokens of a sequence, and stores those of this rank in the wrapped index.

    Raises:
        ValueError: The wrapped index is not empty.
    """

    statistics = ("_length", "_batch", "_valid")

    _length: int
    _batch: int | None
    _valid: Valid  # padding flags of the tokens of all ranks

    def __init__(self, inner: KVIndex, ranks: Ranks, block: int) -> None:
        super().__init__(inner)
        if len(inner):
            count = len(inner)
            raise ValueError(f"inner: got an index with {count} tokens, allowed is an empty index")
        self._ranks, self._shard = ranks, Shard(ranks.rank, ranks.count, block)
        self._forget()

    @property
    def ranks(self) -> int:
        """Number of processes over which the tokens are distributed."""
        return self._ranks.count

    def first(self, tensor: Tensor) -> Tensor:
        """Broadcast the tensor of rank 0, and return it on all ranks."""
        return self._ranks.first(tensor)

    def wait_for(self, event: Any) -> None:
        """Wait for a CUDA event, and raise `RankError` if another rank does not answer."""
        self._ranks.wait_for(event)

    def _forget(self) -> None:
        self._length, self._batch, self._valid = 0, None, Valid()

    def _runs_alone(self, name: str) -> bool:
        return True  # so that collectives of two threads never interleave

    def append(self, keys: Tensor, values: Tensor, *, valid: Tensor | None = None) -> None:
        """Append tokens. Each rank stores only some of them, without communication.

        Args:
            keys: `[B, G, N, D]`.
            values: `[B, G, N, Dv]`.
            valid: Bool `[B, N]`, False for padding; None where no token is padded.

        Raises:
            ValueError: A shape, dtype or device does not fit, or a key that is not padding is NaN
                or infinite. All ranks raise it.
            MemoryError: Memory is exhausted. Only this rank raises it.
        """
        self._check_tokens(keys, values, valid)
        if not keys.numel():
            return
        start, count = self._length, keys.shape[2]
        flags = self._valid.reserve(start, keys, valid)
        parts = self._shard.parts(start, start + count)
        if parts:
            some = None if valid is None else _taken(valid, parts, 1)
            self.inner.append(_taken(keys, parts, 2), _taken(values, parts, 2), valid=some)
        self._valid.append(flags, all_real=valid is None)
        self._batch, self._length = keys.shape[0], start + count

    def _check_tokens(self, keys: Tensor, values: Tensor, valid: Tensor | None) -> None:
        g = self.geometry
        shape = {"B": self._batch, "G": g.kv_heads, "N": None, "D": g.head_dim}
        check.tensor("keys", keys, shape, g.dtype, g.device)
        sizes: dict[str, int | None] = {"B": keys.shape[0], "N": keys.shape[2]}
        check.tensor("values", values, {**shape, **sizes, "D": g.value_dim}, g.dtype, g.device)
        if valid is not None:
            check.tensor("valid", valid, sizes, torch.bool, g.device)
        if g.device.type != "cuda":  # on a GPU each rank only checks its own tokens, and later
            known = keys if valid is None else keys.masked_fill(~valid[:, None, :, None], 0)
            check.finite("keys", known)
            if g.value_in_key:
                check.in_keys(values, keys)

    def observe_queries(self, queries: Tensor, positions: Tensor) -> None:
        """Pass queries to the wrapped index, if it learns from queries.

        `positions` count the tokens of the whole sequence, but the wrapped index contains only the
        tokens of this rank. So each position `p` is converted: among the tokens of this rank at
        positions up to `p`, the last one is found, and its id in the wrapped index is passed.
        """
        if capability(self.inner, ObservesQueries) is not None:
            self.inner.observe_queries(queries, self._shard.to_own_positions(positions))

    def observe_tokens(self, tokens: Tensor, *, first: int) -> None:
        """Pass the vocabulary ids of this rank's tokens to the wrapped index."""
        parts = self._shard.parts(first, first + tokens.shape[-1])
        if parts:
            some = _taken(tokens, parts, tokens.ndim - 1)
            self.inner.observe_tokens(some, first=self._shard.tokens(first))

    def __len__(self) -> int:
        return self._length

    @property
    def counts(self) -> Tensor:
        """Number of valid tokens of each sequence on all ranks, int64 `[B]`, on the CPU."""
        if self._valid.flags is None:
            return torch.full((self._batch or 0,), self._length)
        return self._valid.flags.sum(1).cpu()

    @property
    def valid(self) -> Tensor | None:
        """Mask of the tokens of all ranks, bool `[B, N]`: False for padding.

        The result is None if no token is padding.
        """
        return self._valid.flags

    def truncate(self, length: int) -> None:
        """Remove the tokens with ids from `length` on.

        Raises:
            ValueError: `length` is negative.
        """
        if check.at_least("length", length, 0) < self._length:
            self.inner.truncate(self._shard.tokens(length))
            self._valid.truncate(length)
            self._length = length

    def reorder(self, batch_indices: Tensor) -> None:
        """Reorder the batch of the wrapped index, on all ranks."""
        check.rows("batch_indices", batch_indices, self._batch)
        if self._batch is None:
            return
        valid = self._valid.reordered(batch_indices)
        self.inner.reorder(batch_indices)
        self._valid, self._batch = valid, len(batch_indices)

    def reset(self) -> None:
        """Remove all tokens, and everything that the wrapped index has learned."""
        super().reset()
        self._forget()

    def nbytes(self) -> dict[str, int]:
        """Return the bytes that this rank uses, per memory tier."""
        inner = self.inner.nbytes()
        return {**inner, "codes": inner.get("codes", 0) + self._valid.nbytes()}

    def reserve(self, tokens: int) -> None:
        """Reserve memory for this rank's tokens of a sequence of `tokens` tokens."""
        super().reserve(max(self._shard.tokens(check.at_least("tokens", tokens, 1)), 1))

    def reserve_ahead(self, tokens: int, *, batch: int) -> None:
        """Start to pin host memory for this rank's tokens of a sequence of `tokens` tokens."""
        own = self._shard.tokens(check.at_least("tokens", tokens, 0))
        super().reserve_ahead(own, batch=batch)

    def warm_up(self, *, k: int, tokens: int) -> None:
        """Prepare the wrapped index for searches, if it is not empty.

        `tokens` is the length of the whole sequence. This rank stores only some of its tokens.
        """
        own = max(self._shard.tokens(check.at_least("tokens", tokens, 1)), 1)
        if len(self.inner):
            super().warm_up(k=k, tokens=own)

    def _whose(self) -> dict[str, Any]:
        shard = self._shard
        return {**super()._whose(), "rank": shard.rank, "ranks": shard.count, "block": shard.block}

    def _check_own(self, state: Mapping[str, Tensor]) -> None:
        length, batch = scalar("length", state), None
        if length or "batch" in state:
            batch = scalar("batch", state, least=1)
        inner = length_and_batch(below("inner", state))
        own = self._shard.tokens(length)
        if inner and inner["N"] != own:
            raise ValueError(
                f"state['inner.length']: got {inner['N']}, allowed is {own} (this rank's share of "
                f"{length} tokens)"
            )
        if inner.get("B", batch) != batch:
            raise ValueError(
                f"state['batch']: got {batch}, allowed is {inner['B']} as in the wrapped index"
            )
        super()._check_own(state)

    def _layout(self, state: Mapping[str, Tensor], length: int) -> Layout:
        tokens, batch = int(state["length"]), int(state.get("batch", torch.tensor(0)))
        return {"valid": TensorSpec(f"{batch} {tokens}", torch.bool, optional=True)}

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Load a state that was saved by the same rank of a group of the same size.

        Raises:
            ValueError: The state does not fit, or this index is not empty.
            TypeError: The state is not a mapping from names to tensors.
        """
        if self._batch is not None:
            raise ValueError(
                f"index: got an index with {self._length} tokens, allowed is an empty index; call "
                "reset() first"
            )
        super().load_state_dict(state)


def _taken(tensor: Tensor, parts: list[slice], dim: int) -> Tensor:
    """Concatenate slices of the dimension `dim`. A single slice is returned as a view."""
    some = [tensor.narrow(dim, part.start, part.stop - part.start) for part in parts]
    return some[0] if len(some) == 1 else torch.cat(some, dim=dim)
