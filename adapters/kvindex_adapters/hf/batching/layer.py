"""`PagedLayer`: an attention layer for continuous batching, with an index for each long request.

The paged cache always contains the keys and values of all tokens. A request's index is built from
them at the first search, and can be rebuilt at any time. So when a request ends, is preempted or
fails, its index is simply deleted. Each layer has one `Pool`, in which the index of each request is
one sequence.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from kvindex.core.capability import capability
from kvindex.core.protocol import Attended, KVIndex, ObservesQueries, Rows
from kvindex.layer.retrieval import row_bytes
from kvindex.layer.stats import Counts, Tally
from kvindex.ops.attention import attend, merge
from kvindex.pool.pool import Pool
from kvindex_adapters.common.unsupported import UnsupportedError
from kvindex_adapters.hf.batching.cache import PagedRows
from kvindex_adapters.hf.batching.step import Part


@dataclass(frozen=True)
class Regions:
    """Options that say which tokens of a sequence are in the index.

    Attention reads all other tokens in every decode step.
    """

    k: int
    sink: int
    local_window: int
    update_every: int
    dense_below: int

    def indexed(self, length: int) -> int:
        """Return how many tokens of a sequence are in its index. 0 means full attention.

        The number includes the sink tokens, which are in the index as invalid tokens, so that no
        search retrieves them.
        """
        left = length - max(self.local_window, 1)  # at least 1, because a token attends to itself
        left = max(left, 0) // self.update_every * self.update_every
        return left if length >= self.dense_below and left > self.sink else 0


class PagedLayer:
    """One attention layer, which uses an index for each long request in decode steps.

    Args:
        regions: Sizes of sink and local window, `k`, and the number of tokens from which on a
            request searches its index.
        make: Function that makes an empty index from keyword arguments such as `head_dim`.
    """

    def __init__(self, regions: Regions, make: Callable[..., KVIndex]) -> None:
        self.regions = regions
        self._make = make
        self.pool: Pool | None = None
        self._opened: dict[
            int, tuple[Any, int]
        ] = {}  # id of a request -> (the request, its sequence number in `pool`)
        self.tally = Tally()

    @property
    def stored_bytes(self) -> int:
        """Bytes of the indexes of running requests. Memory that requests share is counted once."""
        pool = self.pool  # read only once, because another thread may set it
        return 0 if pool is None else pool.report().stored_bytes

    def searches(self, part: Part) -> bool:
        """Return True if this request uses its index in this forward pass."""
        return part.count == 1 and self.regions.indexed(part.length) > 0

    def attend(
        self, queries: Tensor, parts: Sequence[Part], rows: PagedRows, scale: float | None
    ) -> Tensor:
        """Compute the attention of one new token of each of `n` requests with their indexes.

        Args:
            queries: `[n, H, D]`.
            parts: The `n` requests.
            rows: Access to the layer's keys and values in the paged cache.
            scale: Factor by which `q·k` is multiplied. None means `D**-0.5`.

        Returns:
            Output `[n, H, Dv]`.
        """
        pool = self._pool_for(queries, rows.like, scale)
        sequences = list[int]()
        for part in parts:
            sequences.append(self._filled(pool, part, parts[: len(sequences)], rows))
        found = pool.attend(sequences, queries, k=self.regions.k)
        dense = self._attend_dense(queries, parts, rows, pool.geometry.scale)
        cost = row_bytes(pool[sequences[0]])
        for number, part in enumerate(parts):
            dense_rows = self.regions.sink + part.length - self.regions.indexed(part.length)
            own = found.found[number : number + 1]
            self.tally.count(Counts(own, dense_rows, 0.0, part.length, 0.0, cost))
        return merge([found, dense]).output

    def keep(self, active: Sequence[Any]) -> None:
        """Delete the indexes of all requests that are not in `active`."""
        alive = set(map(id, active))
        for key in self._opened.keys() - alive:
            _, sequence = self._opened.pop(key)
            assert self.pool is not None
            self.pool.close(sequence)

    def _pool_for(self, queries: Tensor, like: Rows, scale: float | None) -> Pool:
        if self.pool is None:
            index = self._make(
                q_heads=queries.shape[1],
                kv_heads=like.keys.shape[1],
                head_dim=like.keys.shape[3],
                value_dim=like.values.shape[3],
                scale=scale,
                dtype=like.keys.dtype,
                device=like.keys.device,
            )
            check_index(index)
            self.pool = Pool(index)
        return self.pool

    def _filled(self, pool: Pool, part: Part, others: Sequence[Part], rows: PagedRows) -> int:
        """Append to a request's index all tokens that should be in it and are missing.

        Return the number of the request's sequence in `pool`.
        """
        slots, key = rows.slots[part.slots], id(part.request)
        wanted = self.regions.indexed(part.length)
        if key not in self._opened:
            shared = self._same_rows(pool, slots, wanted, others, rows)
            sequence = pool.open() if shared is None else pool.fork(shared)
            self._opened[key] = part.request, sequence
        sequence = self._opened[key][1]
        stored = len(pool[sequence])
        if wanted > stored:
            new = rows.read(slots[stored:wanted])
            valid = torch.arange(stored, wanted, device=slots.device) >= self.regions.sink
            pool.append([sequence], new.keys, new.values, valid=valid[None])
            if not stored:
                pool[sequence].end_prompt()
        return sequence

    def _same_rows(
        self, pool: Pool, slots: Tensor, wanted: int, others: Sequence[Part], rows: PagedRows
    ) -> int | None:
        """Find another request whose rows in the index are also the first rows of this request.

        Return the number of that request's sequence in the pool, or None.
        """
        for other in others:
            sequence = self._opened[id(other.request)][1]
            stored = len(pool[sequence])
            if stored <= wanted and torch.equal(slots[:stored], rows.slots[other.slots][:stored]):
                return sequence
        return None

    def _attend_dense(
        self, queries: Tensor, parts: Sequence[Part], rows: PagedRows, scale: float
    ) -> Attended:
        """Compute exact attention to the sink and to the tokens that are not in the index yet."""
        sink, outputs, logarithms = self.regions.sink, list[Tensor](), list[Tensor]()
        for number, part in enumerate(parts):
            slots, indexed = rows.slots[part.slots], self.regions.indexed(part.length)
            read = rows.read(torch.cat([slots[:sink], slots[indexed:]]))
            given = queries[number][None], read.keys, read.values
            output, lse = attend(*given, scale=scale, return_lse=True)
            outputs.append(output)
            logarithms.append(lse)
        none = torch.zeros((len(parts), read.keys.shape[1]), dtype=torch.int32)
        return Attended(torch.cat(outputs), torch.cat(logarithms), none.to(queries.device))


def check_index(index: KVIndex) -> None:
    """Raise UnsupportedError for an index that needs the queries of the prompt."""
    if capability(index, ObservesQueries) is not None:
        raise UnsupportedError(
            f"index: got {type(index).__name__}, which learns from the queries of a prompt; "
            "continuous batching needs an index that uses only keys"
        )
