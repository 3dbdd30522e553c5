"""`FaissIndex`: base of the indexes that search with the FAISS library.

Each pair of sequence and KV head has its own FAISS index, because FAISS cannot search a batch of
indexes. Building and searching therefore loop over sequences and KV heads. All searches rank by
inner product.

Trained parameters are learned once and stored as tensors (`_learned`). These parameters and the
keys of the valid tokens, in their order, determine a FAISS index. So it can be deleted at any time,
and rebuilt from the keys in the row store.

Source: Douze et al., The Faiss library (2024).
"""

from __future__ import annotations

import sys
from abc import abstractmethod
from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from kvindex.bases.faiss_library import check_gpu, in_threads, library, resources, threads
from kvindex.bases.index import BaseIndex
from kvindex.core import check, forks
from kvindex.core.protocol import UNUSED, Codes, Hits
from kvindex.ops import group

BLOCK = 16_384
"""Number of tokens that are read from the store at a time."""

PLACES = ("cpu", "gpu")

_LOCK = forks.lock(sys.modules[__name__], "_LOCK")
"""Held while FAISS indexes are built, so that two threads do not build the same index."""

LARGEST_K = 2048
"""Largest number of rows that FAISS can select on a GPU."""


@dataclass(frozen=True)
class FaissConfig:
    """Options of all FAISS indexes.

    Args:
        pool: Each query head retrieves `pool · k` candidates.
        where: Device of the FAISS indexes: "cpu", or "gpu" for the GPU that contains the keys.
            "gpu" needs the package faiss-gpu.
        group: How the scores of the query heads that share a KV head are combined
            (`kvindex.ops.group`).
    """

    pool: int = 1
    where: str = "cpu"
    group: str = "mean_share"

    def __post_init__(self) -> None:
        check.at_least("pool", self.pool, 1)
        check.one_of("where", self.where, PLACES)
        check.one_of("group", self.group, group.POLICIES)


@dataclass
class _Changes:
    """Number of changes of the FAISS indexes. A rollback does not restore it."""

    count: int = 0


class FaissIndex(BaseIndex):
    """Base of the indexes that search with FAISS. A subclass overrides `_new` and `_token_bytes`.

    The query heads that share a KV head each retrieve candidates, and a search ranks the union of
    these candidates. The score of a candidate is `q·k` with the key that FAISS reconstructs from
    its index, combined over the query heads by `group.agree`.
    """

    Config = FaissConfig
    needs: ClassVar = "faiss"  # a package in addition to torch and numpy
    removes: ClassVar = True  # True if FAISS can remove the last tokens

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self._faiss = library()
        if self.config.where == "gpu":
            check_gpu(self._faiss, self.geometry.device)

    # Methods that a subclass overrides

    @abstractmethod
    def _new(self, b: int, g: int) -> Any:
        """Return a trained FAISS index without tokens, on the CPU, for sequence `b` and KV head
        `g`.
        """

    @abstractmethod
    def _token_bytes(self) -> float:
        """Return the number of bytes per token in a FAISS index."""

    def _reconstructed(self, keys: Tensor, ids: Tensor) -> Tensor:
        """Return the float32 keys `[B, G, C, D]` as a FAISS index on a GPU would reconstruct them.

        keys: the exact keys of the candidates `ids`, from the row store.
        """
        return keys

    def _add(self, faiss_index: Any, keys: Tensor) -> None:
        faiss_index.add_c(len(keys), self._floats(keys))

    def _candidate_count(self, k: int) -> int:
        pool: int = self.config.pool
        return pool * k

    # Add the valid tokens to the FAISS indexes

    def _encode(self, keys: Tensor, learned: Codes) -> Codes:
        return {}

    def _cleared(self) -> None:
        self._faiss_indexes: list[list[Any]] = []  # [b][g], None where one must be created
        self._synchronized = True
        self._changes = _Changes()
        self._synchronized_at = 0  # `_changes.count` after the last `_synchronize` that succeeded

    def _after_rollback(self) -> None:
        self._synchronized = False
        if self._synchronized_at != self._changes.count:  # they have changed since the checkpoint
            self._faiss_indexes = []

    def _after_copy(self) -> None:
        super()._after_copy()
        self._drop()

    def _after_fork(self) -> None:
        if not self._synchronized:
            self._drop()

    def _drop(self) -> None:
        """Forget the FAISS indexes. They are built again before the next search."""
        self._faiss_indexes, self._synchronized = [], False
        self._changes, self._synchronized_at = _Changes(), 0

    def _changing(self) -> None:
        """Invalidate the FAISS indexes of all earlier checkpoints, because one is about to change.

        A checkpoint refers to the FAISS indexes, but does not copy them.
        """
        self._changes.count += 1

    def _with_reordered(self, batch_indices: Tensor) -> list[list[Any]]:
        """Return the FAISS indexes in the new order of sequences.

        A sequence that occurs twice gets the same FAISS index twice. The index is copied when
        tokens are added to one of the two sequences.
        """
        self._synchronize()
        return [list(self._faiss_indexes[b]) for b in batch_indices.tolist()]

    def _commit(self, statistics: list[list[Any]] | None) -> None:
        if statistics is not None:
            self._faiss_indexes = statistics
        self._synchronized = False
        with suppress(RuntimeError, MemoryError):  # the next search tries again, or raises
            self._synchronize()

    def _synchronize(self) -> None:
        """Add new tokens to the FAISS indexes and remove truncated tokens.

        If this fails, drop all FAISS indexes, so that they are rebuilt later.
        """
        if self._synchronized:
            return
        with _LOCK:  # two concurrent searches may both have to synchronize
            if self._synchronized:
                return
            try:
                self._prepare()
                while (counts := self._token_counts()) != self.counts.tolist():
                    self._fill(counts)
            except BaseException:
                self._faiss_indexes = []  # FAISS may be in any state
                raise
            self._synchronized_at = self._changes.count
            self._synchronized = True

    def _token_counts(self) -> list[int]:
        """Return for each sequence the smallest number of tokens in any of its FAISS indexes."""
        return [min(index.ntotal if index else 0 for index in rows) for rows in self._faiss_indexes]

    def _prepare(self) -> None:
        """Create missing FAISS indexes, and remove truncated tokens.

        A FAISS index that several sequences share is copied before it is changed.
        """
        heads = self.geometry.kv_heads
        if not self._faiss_indexes:
            self._faiss_indexes = [[None] * heads for _ in range(len(self.counts))]
        uses = Counter(id(index) for rows in self._faiss_indexes for index in rows)
        for b, rows in enumerate(self._faiss_indexes):
            count = int(self.counts[b])
            for g, index in enumerate(rows):
                if index is not None and index.ntotal != count:
                    self._changing()
                    uses[id(index)] -= 1
                    if uses[id(index)]:  # another sequence uses the same FAISS index
                        index = self._copy(index)
                    if index is not None and index.ntotal > count:
                        index = self._cut(index, count)
                if index is None and count:
                    self._changing()
                    index = self._to_device(self._new(b, g))
                rows[g] = index

    def _fill(self, counts: list[int]) -> None:
        """Add up to `BLOCK` valid tokens of each sequence to the FAISS indexes.

        For sequence `b`, the first `counts[b]` valid tokens are skipped.
        """
        g, B = self.geometry, len(counts)
        new = [self._tokens(b)[counts[b] : counts[b] + BLOCK] for b in range(B)]
        ids = torch.full((B, max(map(len, new))), UNUSED, device=g.device)
        for b, tokens in enumerate(new):
            ids[b, : len(tokens)] = tokens
        keys = self._store.gather(ids[:, None].expand(-1, g.kv_heads, -1).contiguous()).keys
        keys = self._for_faiss(keys)
        if self.config.where == "gpu":
            resources(g.device.index)  # let FAISS use torch's current stream
        jobs = []
        for b, rows in enumerate(self._faiss_indexes):
            for head, index in enumerate(rows):
                first = index.ntotal - counts[b] if index else 0  # other heads may have fewer
                if first < len(new[b]):
                    jobs.append((index, keys[b, head, first : len(new[b])]))
        at_once = 1 if self.config.where == "gpu" else torch.get_num_threads()
        in_threads(lambda job: self._add(*job), jobs, at_once)

    def _tokens(self, b: int) -> Tensor:
        """Return the ids of a sequence's valid tokens, int64 `[n]`.

        FAISS numbers the tokens of a sequence by their position in this list.
        """
        if self.valid is None:
            return torch.arange(len(self), device=self.geometry.device)
        return self.valid[b].nonzero()[:, 0]

    def _copy(self, faiss_index: Any) -> Any:
        return self._faiss.clone_index(faiss_index) if self.config.where == "cpu" else None

    def _cut(self, faiss_index: Any, count: int) -> Any:
        """Remove all but the first `count` tokens from a FAISS index, and return the index.

        Return None if the FAISS index must be rebuilt instead.
        """
        if not self.removes or self.config.where == "gpu":
            return None
        faiss_index.remove_ids(self._faiss.IDSelectorRange(count, faiss_index.ntotal))
        return faiss_index

    # Search

    def _search(self, queries: Tensor, k: int) -> Hits:
        self._synchronize()
        g, policy = self.geometry, self.config.group
        folded = group.fold(queries, g.kv_heads, policy)
        ids, keys = self._candidates(folded, min(self._candidate_count(k), int(self.counts.max())))
        ids, order = ids.sort(dim=-1)
        again = ids[..., 1:] == ids[..., :-1]
        ids[..., 1:] = ids[..., 1:].masked_fill(again, UNUSED)
        if keys is None:
            keys = self._reconstructed(self._store.gather(ids).keys.float(), ids)
        else:
            keys = keys.gather(2, order[..., None].expand_as(keys))
        estimates = (folded @ keys.mT).masked_fill((ids < 0)[:, :, None], float("-inf"))
        agreed = self.ops.group.agree(estimates, policy, scale=g.scale, softcap=g.softcap)
        scores, slots = self.ops.select.top_k(agreed, k)  # ids ascend: equal scores stay in order
        return Hits(ids.gather(-1, slots.clamp_min(0)).masked_fill(slots < 0, UNUSED), scores)

    def _candidates(self, queries: Tensor, count: int) -> tuple[Tensor, Tensor | None]:
        """Search FAISS for the candidates of each query head.

        Args:
            queries: Float32 `[B, G, g, D]`, for `g` query heads per KV head.
            count: Number of candidates per query head.

        Returns:
            Candidate ids, int64 `[B, G, g · count]`, -1 for an unused slot; and the keys that FAISS
            reconstructs, float32 `[B, G, g · count, D]`, or None on a GPU, where FAISS does not
            return them with the search.
        """
        B, G, heads, D = queries.shape
        on_gpu = self.config.where == "gpu"
        if on_gpu and count > LARGEST_K:
            raise ValueError(
                f"k: got {count} candidates per query head, allowed with where='gpu' is at most "
                f"{LARGEST_K}"
            )
        inputs = self._for_faiss(queries)
        best = torch.full((B, G, heads * count), UNUSED, device=inputs.device)
        keys = None if on_gpu else inputs.new_empty((B, G, heads * count, D)).zero_()
        with threads(torch.get_num_threads()):
            for b, g, rows in self._searches():
                # For a single sequence, use a slice. Indexing with a list would make the host wait
                # for the GPU.
                row: Any = slice(b, b + 1) if rows == [b] else rows
                batch = inputs[row, g].contiguous()  # [b, g, D]
                ids, vectors = self._query_faiss(
                    self._faiss_indexes[b][g], batch.flatten(0, 1), count
                )
                best[row, g] = ids.view(len(rows), -1)
                if keys is not None and vectors is not None:
                    keys[row, g] = vectors.view(len(rows), -1, D)
        device = self.geometry.device
        best = best.to(device)
        if self.valid is not None:
            for b in range(B):
                tokens = self._tokens(b)
                if len(tokens):
                    best[b] = torch.where(best[b] < 0, UNUSED, tokens[best[b].clamp_min(0)])
        return best, None if keys is None else keys.to(device)

    def _searches(self) -> Iterator[tuple[int, int, list[int]]]:
        """Yield `(b, g, sequences)` for each FAISS index that contains tokens.

        The FAISS index is `_faiss_indexes[b][g]`, and `sequences` are all sequences that share it.
        """
        for g in range(self.geometry.kv_heads):
            alike: dict[int, list[int]] = {}
            for b, rows in enumerate(self._faiss_indexes):
                if int(self.counts[b]):
                    alike.setdefault(id(rows[g]), []).append(b)
            for rows_alike in alike.values():
                yield rows_alike[0], g, rows_alike

    def _query_faiss(
        self, faiss_index: Any, queries: Tensor, count: int
    ) -> tuple[Tensor, Tensor | None]:
        """Search one FAISS index.

        Returns:
            Token ids int64 `[n, count]`, and the keys of these tokens `[n, count, D]`. On a GPU the
            keys are None, because FAISS does not return keys with a search there.
        """
        scores = queries.new_empty((len(queries), count))
        ids = torch.empty(scores.shape, dtype=torch.int64, device=queries.device)
        to_ids = self._faiss.cast_integer_to_idx_t_ptr(ids.data_ptr())
        arguments = (len(queries), self._floats(queries), count, self._floats(scores), to_ids)
        if self.config.where == "gpu":
            resources(self.geometry.device.index)  # let FAISS use torch's current stream
            faiss_index.search_c(*arguments)
            return ids, None
        keys = queries.new_empty((*scores.shape, queries.shape[1]))
        faiss_index.search_and_reconstruct_c(*arguments, self._floats(keys))
        return ids, keys.masked_fill((ids < 0)[..., None], 0)

    # Conversions for FAISS

    def _for_faiss(self, tensor: Tensor) -> Tensor:
        device = self.geometry.device if self.config.where == "gpu" else torch.device("cpu")
        return tensor.to(device, torch.float32).contiguous()

    def _floats(self, tensor: Tensor) -> Any:
        """Return the address of a contiguous float32 tensor as the C pointer type of FAISS."""
        return self._faiss.cast_integer_to_float_ptr(tensor.data_ptr())

    def _to_device(self, faiss_index: Any) -> Any:
        if self.config.where == "cpu":
            return faiss_index
        device = self.geometry.device.index or 0
        return self._faiss.index_cpu_to_gpu(resources(device), device, faiss_index)

    # Bytes

    def nbytes(self) -> dict[str, int]:
        """Return the bytes in use per memory tier (see `BaseIndex.nbytes`).

        `codes` includes the FAISS indexes, as an estimate from their bytes per token.
        """
        tokens = int(self.counts.sum()) * self.geometry.kv_heads
        sizes = super().nbytes()
        return {**sizes, "codes": sizes["codes"] + int(tokens * self._token_bytes())}

    def bytes_per_key(self) -> dict[str, float]:
        """Return the bytes per token and KV head (see `BaseIndex.bytes_per_key`).

        The entry `stored` includes the FAISS index. The entry `scanned` is the number of bytes that
        a search reads. The documentation page of each FAISS index explains it.
        """
        sizes = super().bytes_per_key()
        stored = sizes["stored"] + self._token_bytes()
        return {"stored": stored, "scanned": self._scanned_bytes()}

    def _scanned_bytes(self) -> float:
        return self._token_bytes()
