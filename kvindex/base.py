"""What all indexes share: checks, growth, storage, fetch, housekeeping.

An index on this base writes `_encode` and `_search`. `_learn` lets it learn parameters, once; the
`_with_…` hooks, `_keep` and `_cleared` let it keep statistics of its tokens. The public methods
check their arguments first, and change nothing before everything that may fail (for want of
memory, say) has succeeded.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from copy import copy
from typing import Any, ClassVar, Self

import torch
from torch import Tensor

from kvindex import backend as backends
from kvindex import check as checks
from kvindex.columns import Columns, Valid
from kvindex.config import NoConfig, make_config
from kvindex.geometry import Geometry
from kvindex.near import Near
from kvindex.protocol import UNUSED, Codes, Hits, Rows
from kvindex.store import PLACES, Store


class BaseIndex(ABC):
    """Base of the indexes in `kvindex/indexes/`.

    Keywords: those of `Geometry.of`; `backend` ("torch" or "cuda": whose ops run); `store`
    ("device" or "host": where rows live); `rows` ("plain": kept as they are; "int8" or "fp8": as a
    byte per number and a scale for each key and value, and then `fetch`, and whatever else reads
    rows, gives what these stand for); `check` (True: NaN in keys raises at once; False: it is
    never looked for; None: at once on a CPU, and on a CUDA device, where looking would stop it, at
    the next call that stops it anyway); `preset` and single fields of the index's own `Config`.
    """

    Config: ClassVar[type] = NoConfig
    presets: ClassVar[Mapping[str, Mapping[str, Any]]] = {}
    default_preset: ClassVar[str | None] = None
    scattered: ClassVar[bool] = False
    """Whether tokens that come together may lie anywhere, not one after the other."""
    needs_rope: ClassVar[bool] = False
    """Whether it cannot do without `Geometry.rope`."""

    def __init__(
        self,
        *,
        q_heads: int,
        kv_heads: int,
        head_dim: int,
        value_dim: int | None = None,
        scale: float | None = None,
        softcap: float | None = None,
        rope: Any = None,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
        backend: str = "torch",
        store: str = "device",
        rows: str = "plain",
        check: bool | None = None,
        preset: str | None = None,
        **options: Any,
    ) -> None:
        self.geometry = Geometry.of(
            q_heads=q_heads,
            kv_heads=kv_heads,
            head_dim=head_dim,
            value_dim=value_dim,
            scale=scale,
            softcap=softcap,
            rope=rope,
            dtype=dtype,
            device=device,
        )
        self.config: Any = make_config(type(self), preset, options)
        self.backend = backend
        self.ops: Any = backends.resolve(backend)
        if backend != "torch":
            self.ops.ready(self.geometry.device)
        if check is not None and not isinstance(check, bool):
            raise ValueError(f"check: got {check!r}, allowed is True, False or None")
        self._check = check
        self._codes = Columns()
        checks.one_of("store", store, PLACES)
        make_store: Callable[..., Store] = getattr(self.ops, "store", Store)
        self._store = make_store(self.geometry, store, rows)
        if self.needs_rope and self.geometry.rope is None:
            raise ValueError(
                "rope: got None, allowed are the inverse frequencies of the keys' rotary "
                f"embedding, float [F], which {type(self).__name__} needs"
            )
        self._valid = Valid()
        self._learnt: Codes = {}
        self._batch: int | None = None  # unknown until the first append
        self._length = 0
        self._counts = torch.zeros(0, dtype=torch.int64)
        self._deferred: dict[str, tuple[Tensor, str]] = {}  # argument -> (flag, message)
        self._cleared()

    # What an index writes

    @abstractmethod
    def _encode(self, keys: Tensor, learnt: Codes) -> Codes:
        """Codes `[B, G, N, ...]` of finite keys `[B, G, N, D]`; invalid tokens come as zeros.

        learnt: what `_learn` gave; it will hold once these keys are appended.
        """

    @abstractmethod
    def _search(self, queries: Tensor, k: int) -> Hits:
        """Hits for finite queries `[B, H, D]`; the index holds at least one valid token."""

    def _search_mass(self, queries: Tensor, k: int, mass: float) -> Hits:
        """As `_search`, but no more rows than hold the share `mass`, and `Hits.mass`."""
        raise ValueError(
            f"mass: got {mass}, allowed is None: {type(self).__name__} does not know what share "
            "of the attention its rows hold"
        )

    def _learn(self, keys: Tensor, valid: Tensor | None) -> Codes:
        """Parameters, tensors `[B, ...]`, once these tokens are appended; changes nothing.

        A row of the batch learns from the first append that holds a valid token of it (an index
        may ask for more), and keeps what it has learnt until `reset`, or until what it was learnt
        from is gone (`_learnt_before`).
        """
        return {}

    def _learnt_before(self, length: int) -> Codes:
        """What stays learnt once the tokens from `length` on are gone; changes nothing."""
        return self._learnt

    def _prepared(self, keys: Tensor, valid: Tensor | None) -> tuple[Codes, Any]:
        """What is learnt once these tokens are appended, and their codes as `Columns` take them.

        Changes nothing that a search reads. Raises ValueError for valid keys that are not finite.
        """
        known = keys if valid is None else keys.masked_fill(~valid[:, None, :, None], 0)
        self._check_finite("keys", known)
        learnt = self._learn(known, valid)
        return learnt, self._encode(known, learnt)

    def _with_appended(self, codes: Codes, valid: Tensor | None) -> Any:
        """The statistics once `codes` are appended; changes nothing."""

    def _with_truncated(self, length: int) -> Any:
        """The statistics once the tokens from `length` on are gone; changes nothing."""

    def _with_reordered(self, batch_indices: Tensor) -> Any:
        """The statistics once the batch is reordered; changes nothing."""

    def _keep(self, statistics: Any) -> None:
        """What one of the three above returned becomes the index's statistics. Must not fail."""

    def _held(self) -> list[Tensor]:
        """Tensors that the index keeps on the device beside the codes, for `nbytes`."""
        return []

    def _cleared(self) -> None:
        """Everything was forgotten. Must not fail."""

    def _scanned(self) -> list[Tensor]:
        """What a search reads of every token `[B, G, N, ...]`: all codes unless an index says."""
        return [self._codes[name] for name in self._codes]

    # The protocol

    def encode(self, keys: Tensor) -> Codes:
        """Codes of keys `[B, G, N, D]`. Raises ValueError or TypeError for a wrong tensor.

        With parameters that are learnt: as `append` would encode these keys.
        """
        shape = {"B": self._batch, **self._per_token(self.geometry.head_dim)}
        self._check_tensor("keys", keys, shape)
        self._check_finite("keys", keys)
        keys = keys.detach()
        return self._encode(keys, self._learn(keys, None))

    def append(self, keys: Tensor, values: Tensor, *, valid: Tensor | None = None) -> None:
        """Add tokens: keys `[B, G, N, D]`, values `[B, G, N, Dv]`, valid bool `[B, N]`.

        An invalid token (left padding) keeps its id and its row, is never returned by `search`
        and counts in no statistic.
        Raises ValueError or TypeError for wrong shapes, dtypes, devices, a changed batch size,
        NaN or infinity in valid keys; the index stays as it was.
        """
        self.begin_append(keys, values, valid=valid)()

    def begin_append(
        self, keys: Tensor, values: Tensor, *, valid: Tensor | None = None
    ) -> Callable[[], None]:
        """The first part of an append, the long one where it can be; what is returned is the rest.

        In between the index is as it was, to be searched and read, and the tensors must stay as
        they are. So a CUDA stream may do the first part while another one searches (docs/cuda.md):
        a layer has it done so where `appends_beside`.
        Raises as `append`; the rest raises ValueError if the index has changed.
        """
        g = self.geometry
        batch = {"B": self._batch}
        self._check_tensor("keys", keys, {**batch, **self._per_token(g.head_dim)})
        batch, count = {"B": keys.shape[0]}, keys.shape[2]
        self._check_tensor("values", values, {**batch, **self._per_token(g.value_dim, count)})
        if valid is not None:
            checks.tensor("valid", valid, {**batch, "N": count}, torch.bool, g.device)
        if keys.numel() == 0:
            return lambda: None
        length, held, known = self._length, self._codes, self._learnt
        learnt, codes = self._prepared(keys.detach(), valid)
        rows = self._store.join(keys, values)
        counts = valid.sum(1).cpu() if valid is not None else torch.tensor(count)
        self._codes.reserve(codes)
        self._store.reserve(rows)
        statistics = self._with_appended(codes, valid)
        for part, new in ((self._codes, codes), (self._store, rows)):
            if hasattr(part, "write"):
                part.write(new)

        def end() -> None:
            if length != self._length or held is not self._codes or known is not self._learnt:
                raise ValueError("append: the index has changed between its beginning and its end")
            flags = self._valid.reserve(self._length, keys, valid)
            # from here on nothing fails
            self._codes.append(codes)
            self._store.append(rows)
            self._valid.append(flags)
            self._learnt = learnt
            self._batch = keys.shape[0]
            self._counts = self._counts + counts if self._length else counts.expand(self._batch)
            self._length += count
            self._keep(statistics)

        return end

    @property
    def appends_beside(self) -> bool:
        """Whether the first part leaves the host and other streams alone: only where said so."""
        return False

    def search(self, queries: Tensor, *, k: int, mass: float | None = None) -> Hits:
        """The `k` rows per KV head that queries `[B, H, D]` should attend to.

        mass: in (0, 1]: slots stay unused once every head of the group is believed to find this
        share of the index's attention in the rows before; `Hits.mass` is what each finds.

        Raises ValueError or TypeError for a wrong tensor, NaN or infinity in it, k < 1, or a mass
        out of range or of an index that cannot tell it.
        """
        checks.at_least("k", k, 1)
        if mass is not None:
            checks.within("mass", mass, 0, 1)
        g = self.geometry
        self._check_tensor("queries", queries, {"B": self._batch, "H": g.q_heads, "D": g.head_dim})
        self._check_finite("queries", queries)
        if self._length == 0 or int(self._counts.max()) == 0:
            shape = (queries.shape[0], g.kv_heads, k)
            ids = torch.full(shape, UNUSED, device=g.device)
            none = torch.full(shape, float("-inf"), device=g.device)
            found = None if mass is None else torch.ones(queries.shape[:2], device=g.device)
            return Hits(ids, none, mass=found)
        if mass is not None:
            return self._search_mass(queries.detach(), k, float(mass))
        return self._search(queries.detach(), k)

    def fetch(self, hits: Hits) -> Rows:
        """Full-precision rows of `hits`; unused slots are zero.

        Raises ValueError or TypeError for ids of a wrong shape, or that name no row.
        """
        summaries = self._summaries()
        ids = self._checked_ids(hits, 0 if summaries is None else summaries.keys.shape[2])
        rows = self._store.gather(ids)
        if summaries is None:
            return rows
        named = ids < UNUSED  # id -2 is row 0 of the summaries, -3 row 1, …
        row = torch.where(named, UNUSED - 1 - ids, UNUSED)
        gather = self.ops.fetch.gather_rows
        return Rows(
            torch.where(named[..., None], gather(summaries.keys, row), rows.keys),
            torch.where(named[..., None], gather(summaries.values, row), rows.values),
        )

    @property
    def attends(self) -> bool:
        """Whether `attend` serves: not unless an index says so."""
        return False

    def attend(self, queries: Tensor, near: Near, *, k: int) -> tuple[Tensor, Tensor]:
        """Search, fetch and attend in one go: `[B, H, Dv]`, and the rows found, int32 `[B, G]`.

        The attention of queries `[B, H, D]` over the best `k` rows and those that `near` shows;
        each head needs one at least. Raises as `search`, or where the index does not attend.
        """
        raise NotImplementedError(f"{type(self).__name__} does not attend; search and fetch")

    def attend_to(self, queries: Tensor, hits: Hits, near: Near) -> Tensor:
        """Attention of queries `[B, H, D]` over the rows of `hits`, with their weights, and those
        that `near` shows: `[B, H, Dv]`. Raises as `fetch`, or where the index does not attend.
        """
        raise NotImplementedError(f"{type(self).__name__} does not attend; search and fetch")

    def seal(self) -> None:
        """The prompt is complete. Nothing to do unless an index says so."""

    def observe(self, queries: Tensor, positions: Tensor) -> None:
        """The newest queries `[B, H, T, D]`, ids int64 `[T]`. Nothing to do by default."""

    def mark_boundary(self) -> None:
        """A segment ends here. Nothing to do unless an index says so."""

    def read(self, tokens: Tensor, *, first: int) -> None:
        """Ids of the tokens from `first` on, int64 `[B, T]` or `[T]`. Nothing to do by default."""

    def __len__(self) -> int:
        """Tokens held, `N`, invalid ones included."""
        return self._length

    def truncate(self, length: int) -> None:
        """Forget the tokens with ids from `length` on. Raises ValueError below 0."""
        checks.at_least("length", length, 0)
        self.raise_deferred()
        if length >= self._length:
            return
        gone = torch.tensor(self._length - length)
        if self.valid is not None:
            gone = self.valid[:, length:].sum(1).cpu()
        statistics, learnt = self._with_truncated(length), self._learnt_before(length)
        for part in (self._codes, self._store, self._valid):
            part.truncate(length)
        self._learnt = learnt
        self._counts = self._counts - gone
        self._length = length
        self._keep(statistics)

    def reorder(self, batch_indices: Tensor) -> None:
        """Row `b` becomes what row `batch_indices[b]` was; int64 `[B']`, `B'` may differ.

        Raises ValueError or TypeError for a wrong tensor or an index outside the batch.
        """
        checks.rows("batch_indices", batch_indices, self._batch)
        if self._batch is None:
            return
        self.raise_deferred()
        statistics = self._with_reordered(batch_indices.to(self.geometry.device))
        codes, valid = self._codes.reordered(batch_indices), self._valid.reordered(batch_indices)
        order = batch_indices.to(self.geometry.device)
        learnt = {name: tensor[order] for name, tensor in self._learnt.items()}
        self._store = self._store.reordered(batch_indices)
        self._codes, self._valid, self._learnt = codes, valid, learnt
        self._batch = len(batch_indices)
        self._counts = self._counts[batch_indices.cpu()]
        self._keep(statistics)

    def reset(self) -> None:
        """Forget everything, learnt parameters and batch size included."""
        for part in (self._codes, self._store, self._valid):
            part.reset()
        self._learnt = {}
        self._batch, self._length = None, 0
        self._counts = torch.zeros(0, dtype=torch.int64)
        self._deferred = {}
        self._cleared()

    def nbytes(self) -> dict[str, int]:
        """Bytes in use per tier: `codes` (and statistics and constants) on the compute device,
        `rows` in the store.
        """
        self.raise_deferred()
        codes = self._codes.nbytes() + self._valid.nbytes()
        codes += sum(tensor.nbytes for tensor in [*self._learnt.values(), *self._held()])
        return {"codes": codes, "rows": self._store.nbytes()}

    def bytes_per_key(self) -> dict[str, float]:
        """Bytes per token and KV head: `kept` (codes and what is learnt), `scanned` by a search.

        Raises ValueError for an empty index, whose codes have no shape yet.
        """
        checks.at_least("len(index)", self._length, 1)
        tokens = self._length * self.geometry.kv_heads * int(self._batch or 1)
        scanned = sum(tensor.nbytes for tensor in self._scanned())
        kept = self._codes.nbytes() + sum(tensor.nbytes for tensor in self._learnt.values())
        return {"kept": kept / tokens, "scanned": scanned / tokens}

    def repeated(self, count: int) -> Self:
        """`count` rows that all read the one row of this index: for as many queries at once.

        A view, to search and to fetch from while this index stays as it is. Raises ValueError for
        a batch other than 1.
        """
        checks.at_least("count", count, 1)
        if self._batch != 1:
            raise ValueError(f"repeated: got a batch of {self._batch}, allowed is 1")
        rows = torch.zeros(count, dtype=torch.int64)
        view = copy(self)
        view._codes, view._store = self._codes.repeated(count), self._store.repeated(count)
        view._valid = self._valid.reordered(rows)
        view._learnt = {name: t.expand(count, *t.shape[1:]) for name, t in self._learnt.items()}
        view._counts, view._batch = self._counts.expand(count), count
        view._keep(self._with_reordered(rows.to(self.geometry.device)))
        return view

    # Shared parts

    @property
    def unit(self) -> int:
        """Tokens that come together at most: 1, unless an index selects whole pages."""
        return 1

    @property
    def row_bytes(self) -> int:
        """Bytes of a token's key and value for one head, as they are stored and fetched."""
        return self._store.row_bytes

    @property
    def valid(self) -> Tensor | None:
        """Which tokens are real, bool `[B, N]`, or None where all are."""
        return self._valid.flags

    @property
    def counts(self) -> Tensor:
        """Valid tokens of each row of the batch, int64 `[B]`, on the CPU."""
        return self._counts

    def raise_deferred(self) -> None:
        """Raise what a check on a CUDA device has found since the last call (it waits for it)."""
        found = [message for flag, message in self._deferred.values() if bool(flag)]
        if found:
            for flag, _ in self._deferred.values():
                flag.zero_()
            raise ValueError(found[0])

    def _summaries(self) -> Rows | None:
        """Rows that are not tokens, keys `[B, G, S, D]`: row `s` has the id `-2 - s`."""
        return None

    def _checked_ids(self, hits: Hits, summaries: int) -> Tensor:
        """Ids of `hits`, of so many summaries too; one that names no row is an unused slot.

        Raises TypeError or ValueError, on a CUDA device later for a value.
        """
        if not isinstance(hits, Hits):
            raise TypeError(f"hits: got {type(hits).__name__}, allowed is a kvindex.Hits")
        g, lowest = self.geometry, UNUSED - summaries
        shape = {"B": self._batch, "G": g.kv_heads, "K": None}
        checks.tensor("hits.ids", hits.ids, shape, torch.int64, g.device)
        wrong = (hits.ids >= self._length) | (hits.ids < lowest)
        span = "" if lowest == self._length - 1 else f" to {self._length - 1}"
        self._raise_if("hits.ids", hits.ids, wrong, f"{lowest}{span}")
        return hits.ids.masked_fill(wrong, UNUSED)  # a deferred error must not read outside

    def _per_token(self, width: int, count: int | None = None) -> dict[str, int | None]:
        return {"G": self.geometry.kv_heads, "N": count, "D": width}

    def _check_tensor(self, name: str, value: Tensor, shape: dict[str, int | None]) -> None:
        checks.tensor(name, value, shape, self.geometry.dtype, self.geometry.device)

    def _check_finite(self, name: str, value: Tensor) -> None:
        if self._check is False:
            return
        if self._defers:
            self._defer(name, (value - value).sum() != 0, "a finite number")  # else NaN - NaN
        else:
            self._raise_if(name, value, ~torch.isfinite(value), "a finite number")

    @property
    def _defers(self) -> bool:
        """Whether errors in values wait for the next call that stops the device anyway."""
        return self.geometry.device.type == "cuda" and not self._check

    def _raise_if(self, name: str, value: Tensor, wrong: Tensor, allowed: str) -> None:
        """Raise where `wrong` is True, now or (see `check`) later."""
        if self._defers:
            self._defer(name, wrong.any(), allowed)
        elif bool(wrong.any()):
            raise ValueError(f"{name}: got {value[wrong][0].item()}, allowed is {allowed}")

    def _defer(self, name: str, wrong: Tensor, allowed: str) -> None:
        """Keep `wrong`, bool `[]`, in the argument's flag: one, at one address, for all calls."""
        flag = self._deferred[name][0] if name in self._deferred else torch.zeros_like(wrong)
        message = f"{name}: got (in an earlier call) what is not, allowed is {allowed}"
        self._deferred[name] = flag.logical_or_(wrong), message
