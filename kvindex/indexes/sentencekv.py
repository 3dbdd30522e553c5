"""SentenceKV: selects whole sentences by the inner product of a mean query and the mean of a
sentence's keys.

The mean query is the mean of the queries of the sentence that is being generated. The caller marks
where sentences end, or passes the token ids of the text.

Zhu et al., SentenceKV: Efficient LLM Inference via Sentence-Level Semantic KV Caching (2025,
arXiv 2504.00970).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from kvindex.bases.index import BaseIndex
from kvindex.bases.pages import PageColumns, Tail
from kvindex.bases.sentences import Sentences, split
from kvindex.core import check
from kvindex.core.protocol import UNUSED, Codes, Hits
from kvindex.ops import group
from kvindex.ops.select import compact
from kvindex.storage.layout import Layout, StateSizes, TensorSpec, ascending

BLOCK = 16_384
"""Token slots of sentences that are averaged at a time; bounds the memory for copies."""

QUERIES = ("sentence", "token")


@dataclass(frozen=True)
class SentenceKVConfig:
    """Options of SentenceKV.

    Args:
        longest: Maximum number of tokens per sentence. Longer sentences are divided.
        punctuation: Token id or ids that end a sentence, for `observe_tokens`.
        query: Query that is compared with the mean keys. "sentence": the mean query of the current
            sentence (published). "token": the query of the newest token alone.
        group: How the scores of the query heads that share a KV head are combined
            (`kvindex.ops.group`).
    """

    longest: int = 64
    punctuation: tuple[int, ...] | int = ()
    query: str = "sentence"
    group: str = "mean_share"

    def __post_init__(self) -> None:
        check.at_least("longest", self.longest, 1)
        ids = self.punctuation
        ids = tuple(ids) if isinstance(ids, tuple | list | set | frozenset) else (ids,)
        for token in ids:
            check.at_least("punctuation", token, 0)
        object.__setattr__(self, "punctuation", tuple(sorted(ids)))
        check.one_of("query", self.query, QUERIES)
        check.one_of("group", self.group, group.POLICIES)


class SentenceKV(BaseIndex):
    """Selects whole sentences by the inner product of a mean query and a sentence's mean key.

    The mean query is the mean of the query that is passed to `search` and of the queries of the
    current sentence that were observed since `end_prompt`. The query of the search counts only
    once, even if it was also observed. In `Hits.scores`, each row has the score of its sentence.

    Source: Zhu et al., SentenceKV (arXiv 2504.00970).
    """

    Config = SentenceKVConfig

    statistics = ("_signals",)

    _signals: Sentences

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self._codes = PageColumns()  # means [B, G, S, D], sizes int32 [B, 1, S], 0 for none

    @property
    def unit(self) -> int:
        """Maximum number of tokens per sentence."""
        return int(self.config.longest)

    @property
    def depends_on_queries(self) -> bool:
        """True if the result of a search depends on queries that were observed before.

        That is the case with the option `query="sentence"`.
        """
        return bool(self.config.query == "sentence")

    # Signals

    def end_prompt(self) -> None:
        """End the prompt. Mean queries contain only queries that are observed after this call."""
        self._signals = replace(self._signals, prompt_ended=True)

    def observe_queries(self, queries: Tensor, positions: Tensor) -> None:
        """Store queries `[B, H, T, D]` of the tokens `positions`, int64 `[T]`, ascending.

        If earlier calls stored queries at the first of these positions or later, these old queries
        are dropped, because their tokens have been replaced.
        """
        g = self.geometry
        shape = {"B": self._batch, "H": g.q_heads, "T": None, "D": g.head_dim}
        self._check_tensor("queries", queries, shape)
        check.tensor("positions", positions, {"T": queries.shape[2]}, torch.int64)
        if queries.numel():
            most = self.config.longest if self.config.query == "sentence" else 1
            self._signals = self._signals.with_queries(queries.detach(), positions, most)

    def mark_boundary(self) -> None:
        """Mark the newest token of each sequence as the end of a sentence.

        The newest token is the last one whose query or key the index has received. Sentence ends
        that were marked at later tokens are dropped.
        """
        last = max(self._signals.newest, len(self) - 1)
        if last >= 0:
            ends = torch.ones((1, 1), dtype=torch.bool, device=self.geometry.device)
            self._set_ends(ends, last)

    def observe_tokens(self, tokens: Tensor, *, first: int) -> None:
        """Find the ends of sentences in the token ids of the text.

        A token whose id is in the option `punctuation` ends a sentence. Without this option, the
        call has no effect.

        Args:
            tokens: Token ids of the tokenizer, int64 `[T]`, or `[B, T]` if the sequences differ.
                The keys of these tokens may be appended before or after this call.
            first: Position of the first token. Sentence ends that earlier calls marked at this
                position or later are dropped.

        Raises:
            ValueError: A shape, dtype or device does not fit, or `first` is negative.
            TypeError: `tokens` is not a tensor.
        """
        check.at_least("first", first, 0)
        if isinstance(tokens, Tensor) and tokens.ndim == 2:
            check.tensor("tokens", tokens, {"B": self._batch, "T": None}, torch.int64)
        else:
            tokens = check.tensor("tokens", tokens, {"T": None}, torch.int64)[None]
        if self.config.punctuation:
            tokens = tokens.to(self.geometry.device)
            self._set_ends(torch.isin(tokens, tokens.new_tensor(self.config.punctuation)), first)

    def _set_ends(self, ends: Tensor, first: int) -> None:
        """Store which tokens are the last token of a sentence.

        Args:
            ends: True for the last token of a sentence, bool `[B, T]`, or `[1, T]` for all
                sequences.
            first: Position of the first of these `T` tokens.
        """
        signals = self._signals.with_ends(ends, first)
        if first < len(self) - 1:
            past = self._held_before(first)
            kept = (self._sizes().cumsum(1) <= past[:, None]) & (self._sizes() > 0)
            tail = self._tail(kept.sum(1), self._held_before(len(self)), None, None, signals)
            self._codes.append(tail)
        self._signals = signals

    def truncate(self, length: int) -> None:
        """Remove the tokens from `length` on, and the sentence ends among them."""
        super().truncate(length)
        self._signals = self._signals.truncated(length)

    def reorder(self, batch_indices: Tensor) -> None:
        """Reorder the sequences of the batch, and their sentence ends and observed queries."""
        super().reorder(batch_indices)
        if self._batch is None:
            self._signals = self._signals.reordered(batch_indices.to(self.geometry.device))

    def _layout(self, sizes: StateSizes) -> Layout:
        g, name = self.geometry, "codes.sizes"
        layout = super()._layout(sizes)
        if sizes.length:
            layout["codes.means"] = TensorSpec(f"B G S<={sizes.length} D", g.dtype)
            layout[name] = TensorSpec(
                "B 1 S",
                torch.int32,
                least=0,
                most=self.config.longest,
                allowed="adding up to the number of valid tokens",
                rule=lambda state: (
                    sizes.counts is not None
                    and (state[name].sum((1, 2)).cpu() == sizes.counts).all()
                ),
            )
        alike = dict[str, Any](
            allowed="of one sequence, or of the batch", rule=partial(_of_batch, sizes.batch)
        )
        signals = {
            "ends": TensorSpec("E X", torch.bool, **alike),
            "queries": TensorSpec("Q H R D", g.dtype, **alike),
            "positions": TensorSpec(
                "R",
                torch.int64,
                least=0,
                allowed="ascending",
                rule=lambda state: ascending(state["statistics.signals.positions"]),
            ),
            "newest": TensorSpec("", torch.int64, least=-1),
        }
        return layout | {f"statistics.signals.{name}": spec for name, spec in signals.items()}

    # Sentences

    def _encode(self, keys: Tensor, learned: Codes) -> Codes:
        """Compute the mean keys of sentences from the keys alone.

        This method does not know where sentences end in the text. So it treats all keys as one long
        sentence that is cut after every `longest` tokens.
        """
        present = keys.new_ones((len(keys), keys.shape[2]), dtype=torch.bool)
        none, ids = Sentences.empty(self.geometry), torch.zeros_like(present, dtype=torch.int64)
        means, sizes = self._sentences(keys, ids, present, none)
        return {"means": means, "sizes": sizes}

    def _prepared(self, keys: Tensor, valid: Tensor | None) -> tuple[Codes, Any]:
        known = keys if valid is None else keys.masked_fill(~valid[:, None, :, None], 0)
        self._check_finite("keys", known)
        if len(self._signals.ends) not in (1, len(keys)):
            raise ValueError(
                f"keys: got a batch of {len(keys)}, but the index was given the text of "
                f"{len(self._signals.ends)} sequences"
            )
        counts = self._held_before(len(self)) if len(self) else None
        past = torch.zeros(len(keys), dtype=torch.int64, device=keys.device)
        kept = past
        if counts is not None:
            past, kept = counts, ((self._sizes() > 0).sum(1) - 1).clamp_min(0)
        return self._learned, self._tail(kept, past, known, valid, self._signals)

    def _with_truncated(self, length: int) -> tuple[Sentences, Tail]:
        past, signals, sizes = (
            self._held_before(length),
            self._signals.truncated(length),
            self._sizes(),
        )
        kept = ((sizes.cumsum(1) <= past[:, None]) & (sizes > 0)).sum(1)
        return signals, self._tail(kept, past, None, None, signals)

    def _with_reordered(self, batch_indices: Tensor) -> tuple[Sentences, None]:
        return self._signals.reordered(batch_indices), None

    def _commit(self, statistics: tuple[Sentences, Tail | None] | None) -> None:
        if statistics is None:  # after an append: keep the signals that came meanwhile
            return
        self._signals, tail = statistics
        if tail is not None:
            self._codes.append(tail)

    def _other_tensors(self) -> list[Tensor]:
        return [self._signals.ends, self._signals.queries]

    def _cleared(self) -> None:
        self._signals = Sentences.empty(self.geometry)

    def _sizes(self) -> Tensor:
        """Return the number of tokens in each sentence of a non-empty index, int64 `[B, S]`."""
        return self._codes["sizes"][:, 0].long()

    def _held_before(self, length: int) -> Tensor:
        """Return the number of valid tokens among the first `length` tokens, int64 `[B]`."""
        if self.valid is not None:
            return self.valid[:, :length].sum(1)
        return torch.full((len(self.counts),), length, device=self.geometry.device)

    def _members(self) -> Tensor:
        """Return the ids of the valid tokens, int64 `[B, n]`, padded with -1."""
        if self.valid is not None:
            ids: Tensor = self.ops.select.compact(self.valid)
            return ids
        every = torch.arange(len(self), device=self.geometry.device)
        return every.expand(len(self.counts), -1)

    def _tail(
        self,
        kept: Tensor,
        past: Tensor,
        keys: Tensor | None,
        valid: Tensor | None,
        signals: Sentences,
    ) -> Tail:
        """Compute the mean keys and sizes of sentences that have changed or are new.

        In each sequence, these are all sentences after the first `kept` sentences. They consist of
        new tokens, and of stored tokens, whose keys are read from the row store.

        Args:
            kept: Number of sentences that do not change, int64 `[B]`.
            past: Number of valid stored tokens, int64 `[B]`; later stored tokens are ignored.
            keys: Keys of new tokens, `[B, G, T, D]`, or None if there are none.
            valid: Mask of valid new tokens, bool `[B, T]`, or None if all are valid.
            signals: Ends of sentences.
        """
        g, device, parts = self.geometry, past.device, []  # keys, ids, present
        start, S = int(kept.min()), 0
        if len(self):
            sizes = self._sizes()
            S = sizes.shape[1]
            passed = (sizes * (torch.arange(S, device=device) < kept[:, None])).sum(1)
            rank = passed[:, None] + torch.arange(int((past - passed).max()), device=device)
            present, members = rank < past[:, None], self._members()
            old = members.gather(1, rank.clamp_max(max(members.shape[1] - 1, 0)))
            old = old.masked_fill(~present, UNUSED)
            rows = self._store.gather(old[:, None].expand(-1, g.kv_heads, -1))
            parts.append((rows.keys, old, present))
        if keys is not None:
            new = (len(self) + torch.arange(keys.shape[2], device=device)).expand(len(keys), -1)
            present = torch.ones_like(new, dtype=torch.bool) if valid is None else valid
            parts.append((keys, new, present))
        all_keys, all_ids, all_there = zip(*parts, strict=True)
        means, sizes = self._sentences(
            torch.cat(all_keys, 2), torch.cat(all_ids, 1), torch.cat(all_there, 1), signals
        )
        if not S:
            return Tail(0, {"means": means, "sizes": sizes})
        count = (sizes[:, 0] > 0).sum(1)
        # position of each sentence
        place = torch.arange(start, int((kept + count).max()), device=device)
        new = place - kept[:, None]  # [B, W]: number among the new ones
        source = torch.where(new < 0, place - start, S - start + new)
        source = torch.where(new < sizes.shape[2], source, S - start + sizes.shape[2])
        replaced = {}
        for name, fresh in (("means", means), ("sizes", sizes[..., None])):
            old = self._codes[name][:, :, start:].reshape(*fresh.shape[:2], -1, fresh.shape[3])
            whole = pad(torch.cat([old, fresh], dim=2), (0, 0, 0, 1))  # the last one is empty
            index = source[:, None, :, None].expand(-1, whole.shape[1], -1, whole.shape[3])
            replaced[name] = whole.gather(2, index)
        return Tail(start, {"means": replaced["means"], "sizes": replaced["sizes"][..., 0]})

    def _sentences(
        self, keys: Tensor, ids: Tensor, present: Tensor, signals: Sentences
    ) -> tuple[Tensor, Tensor]:
        """Divide tokens into sentences, and compute the mean key and the size of each sentence.

        Args:
            keys: Keys of the tokens, `[B, G, n, D]`.
            ids: Positions of the tokens in the index, int64 `[B, n]`.
            present: True for tokens to include, bool `[B, n]`.
            signals: Ends of sentences.

        Returns:
            Mean keys `[B, G, U, D]` and numbers of tokens int32 `[B, 1, U]`.
        """
        (B, G, n, D), longest = keys.shape, self.config.longest
        if not n:
            return keys, torch.zeros((B, 1, 0), dtype=torch.int32, device=keys.device)
        order = compact(present)  # [B, m]
        ended = signals.ends_at(ids).gather(1, order.clamp_min(0))
        starts, sizes = split(ended, present.sum(1), longest)
        offset, means = torch.arange(longest, device=keys.device), [keys[:, :, :0]]
        step = max(BLOCK // longest, 1)
        for first in range(0, starts.shape[1], step):
            block = slice(first, first + step)
            inside = offset < sizes[:, block, None]  # [B, u, longest]
            slot = torch.where(inside, starts[:, block, None] + offset, 0).flatten(1)
            place = order.gather(1, slot).clamp_min(0)[:, None, :, None]
            rows = keys.gather(2, place.expand(-1, G, -1, D)).float()
            rows = rows.reshape(B, G, -1, longest, D).masked_fill(~inside[:, None, ..., None], 0)
            mean = rows.sum(3) / sizes[:, block].clamp_min(1)[:, None, :, None]
            means.append(mean.to(keys.dtype))
        return torch.cat(means, dim=2), sizes[:, None].int()

    # Search

    def _search(self, queries: Tensor, k: int) -> Hits:
        g, policy, sizes = self.geometry, self.config.group, self._sizes()
        if self.config.query == "sentence":
            queries = self._signals.mean_query(queries, self.config.longest)
        folded = group.fold(queries, g.kv_heads, policy)
        estimates = folded @ self._codes["means"].float().mT  # [B, G, g, S]
        estimates = estimates.masked_fill((sizes == 0)[:, None, None], float("-inf"))
        starts, members = sizes.cumsum(1) - sizes, self._members()
        per_head = (t[:, None].expand(-1, g.kv_heads, -1) for t in (starts, sizes, members))
        starts, sizes, members = per_head
        agreed = self.ops.group.agree(
            estimates, policy, scale=g.scale, softcap=g.softcap, sizes=sizes
        )
        hits: Hits = self.ops.units.best_rows(agreed, starts, sizes, members, k)
        return hits


def _of_batch(batch: int | None, state: Mapping[str, Tensor]) -> bool:
    """Return True if sentence ends and queries in a saved state fit a batch of `batch` sequences.

    All sequences may share the same sentence ends.
    """
    ends, queries = (state[f"statistics.signals.{name}"] for name in ("ends", "queries"))
    rows = {len(ends)} - {1} | ({len(queries)} if queries.shape[2] else set())
    return 0 not in rows and len(rows) <= 1 and (batch is None or rows <= {batch})
