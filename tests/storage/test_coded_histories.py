"""After any history, an index's rows have the bytes and the center that its tokens determine."""

import random
from contextlib import nullcontext
from copy import deepcopy
from dataclasses import dataclass, replace
from functools import partial

import pytest
import torch

import kvindex
from kvindex.core.geometry import Geometry
from kvindex.storage.centers import center_of, is_centered, of_rows
from kvindex.storage.codecs import NAMES, codec
from kvindex.storage.store import TensorStore
from kvindex_cuda.memory.block_store import BlockStore
from kvindex_cuda.memory.budget import Budget
from kvindex_cuda.memory.slab_pool import DeviceAllocator, Tier
from tests.cuda.host_memory import FakeAllocator, OnDeviceAllocator, finish
from tests.support.helpers import hits_of, sampled

SIZES = dict(q_heads=4, kv_heads=2, head_dim=8, value_dim=4)
GEOMETRY = Geometry.of(**SIZES)
PLACES = ["device", "host", "blocks", "pinned", "mixed"]
COUNTS = [0, 1, 1, 5, 20, 20, 255, 256, 257, 300, 520]
MOST = 2000
"""Largest number of tokens of a sequence."""


def store_of(place, name):
    if place in ("device", "host"):
        return TensorStore(GEOMETRY, place, name)
    slab = 3 * 2 * 256 * codec(name, GEOMETRY).row_bytes
    sizes = dict(row_codec=name, slab_bytes=slab, budget=Budget(), max_tokens=4096)
    if place == "blocks":
        return BlockStore(GEOMETRY, DeviceAllocator(GEOMETRY.device), **sizes)
    on_device = Tier(OnDeviceAllocator(), Budget(2 * slab)) if place == "mixed" else None
    return BlockStore(GEOMETRY, FakeAllocator(), preferred=on_device, **sizes)


def index_of(place, name):
    return kvindex.create("exact", **SIZES, backend="torch", store=store_of(place, name))


def tokens(count, batch, seed):
    """Return tokens around an offset that differs each time."""
    generator = torch.Generator().manual_seed(seed)
    keys, values = (torch.randn(batch, 2, count, D, generator=generator) for D in (8, 4))
    return keys + 30 * torch.randn(batch, 2, 1, 8, generator=generator), values


@dataclass(frozen=True)
class Truth:
    """The rows that the codec should give, with the center of the first tokens."""

    name: str
    batch: int | None = None
    rows: torch.Tensor | None = None
    center: torch.Tensor | None = None

    def __len__(self):
        return 0 if self.rows is None else self.rows.shape[2]

    def appended(self, keys, values, valid=None):
        if not keys.shape[2]:
            return self
        made, center = codec(self.name, GEOMETRY), self.center
        if not len(self):
            center = center_of(keys, valid) if is_centered(self.name, GEOMETRY) else None
        rows = made.encode(keys, values, of_rows(center))
        rows = torch.cat([self.rows, rows], 2) if len(self) else rows
        return replace(self, batch=len(keys), rows=rows, center=center)

    def cut(self, length):
        return replace(self, rows=None if self.rows is None else self.rows[:, :, :length])

    def reordered(self, order):
        parts = {name: getattr(self, name) for name in ("rows", "center")}
        parts = {name: None if part is None else part[order] for name, part in parts.items()}
        return replace(self, batch=len(order), **parts)

    def hold(self, index):
        """Return True if every way to read the index's rows gives these rows."""
        assert len(index) == len(self)
        if not len(self):
            return
        assert torch.equal(index._store.encoded(), self.rows)
        if self.center is not None:
            assert torch.equal(index.state_dict()["row_center"], self.center)
        want = codec(self.name, GEOMETRY).decode(self.rows, of_rows(self.center))
        ids = torch.randint(-1, len(self), (self.batch, 2, 6))
        got = index.fetch(hits_of(ids))
        read = [rows for _, rows in index._store.blocks(97)]
        for part in ("keys", "values"):
            rows = getattr(want, part)
            assert torch.equal(torch.cat([getattr(some, part) for some in read], 2), rows)
            at = ids.clamp_min(0)[..., None].expand(*ids.shape, rows.shape[-1])
            found = rows.gather(2, at).masked_fill(ids[..., None] < 0, 0)
            assert torch.equal(getattr(got, part), found)


def broken(rng, index, method):
    """Make a call during which something raises, before it is done or after."""
    (kind, name) = rng.choice(
        [
            (type(index._valid), "append"),
            (type(index._store), "append"),
            (type(index._valid), "reserve"),
        ]
    )
    works, late = getattr(kind, name), rng.random() < 0.5

    def fails(*given, **how):
        if late:
            works(*given, **how)
        raise MemoryError("none left")

    setattr(kind, name, fails)
    try:
        with pytest.raises(MemoryError):
            method()
    finally:
        setattr(kind, name, works)


def between(rng, index, truth, seed):
    """Make a change between the beginning and the end of an append, and return the resulting
    index."""
    for _ in range(rng.randrange(4)):
        some = tokens(max(len(truth), 1), truth.batch or 2, seed)
        deed = rng.choice(["empty", "as many", "fails", "begins", "back", "copy", "order"])
        if deed == "empty":
            index.truncate(0)
            truth = truth.cut(0)
        elif deed == "as many" and 2 * len(truth) < MOST:
            index.append(*some)
            truth = truth.appended(*some)
        elif deed == "fails":
            broken(rng, index, partial(index.append, *some))
        elif deed == "begins":
            index.start_append(*some)
        elif deed == "back":
            before = index.checkpoint()
            index.append(*some)
            index.rollback(before)
        elif deed == "copy":
            deepcopy(index)
        elif truth.batch:
            order = torch.arange(truth.batch)
            index.reorder(order)
            truth = truth.reordered(order)
    return truth


CONTEXTS = [nullcontext, nullcontext, lambda: torch.autocast("cpu"), torch.inference_mode]
DEEDS = ["append"] * 4 + ["begin"] * 2 + ["fail"] * 2
DEEDS += ["cut", "empty", "reorder", "reset", "copy", "view", "move", "back", "drop"]


@pytest.mark.parametrize(
    ("name", "place", "seed"),
    sampled(NAMES, PLACES, range(5)),
)
def test_rows_after_any_history_are_those_of_their_tokens(name, place, seed):
    rng = random.Random(seed)
    pairs = [(index_of(place, name), Truth(name))]
    for number in range(60):
        at, deed = rng.randrange(len(pairs)), rng.choice(DEEDS)
        index, truth = pairs[at]
        count, batch = rng.choice(COUNTS), truth.batch or rng.randrange(1, 4)
        some = tokens(0 if len(truth) + count > MOST else count, batch, number)
        valid = None
        if not len(truth) and rng.random() < 0.4:
            first = torch.tensor([rng.choice([0, 0, 3, count]) for _ in range(batch)])
            valid = torch.arange(some[0].shape[2]) >= first[:, None]
        with rng.choice(CONTEXTS)():
            if deed == "append":
                index.append(*some, valid=valid)
                truth = truth.appended(*some, valid)
            elif deed == "begin":
                end, before = index.start_append(*some, valid=valid), truth
                truth = between(rng, index, truth, 1000 + number)
                truth.hold(index)
                try:
                    end()
                except ValueError:
                    refused = True
                else:
                    refused, truth = False, truth.appended(*some, valid)
                assert not refused or truth is not before
            elif deed == "fail" and some[0].numel():
                broken(rng, index, partial(index.append, *some))
            elif deed == "cut" or deed == "empty":
                length = rng.randrange(len(truth) + 1) if deed == "cut" else 0
                index.truncate(length)
                truth = truth.cut(length)
            elif deed == "reorder" and truth.batch:
                order = torch.tensor(rng.choice([[0], [0, 0], [1, 0], [2, 1, 0]])) % truth.batch
                index.reorder(order)
                truth = truth.reordered(order)
            elif deed == "reset":
                index.reset()
                truth = Truth(name)
            elif deed == "copy" and len(pairs) < 4:
                pairs.append((deepcopy(index), truth))
            elif deed == "view" and truth.batch == 1:
                view, many = index.expand_batch(3), truth.reordered(torch.zeros(3).long())
                many.hold(view)
                with pytest.raises(RuntimeError, match="got a view of expand_batch"):
                    view.append(*tokens(5, 3, number))
                if len(pairs) < 4:
                    pairs.append((deepcopy(view), many))
            elif deed == "move":
                other = index_of(rng.choice(PLACES), name)
                other.load_state_dict(index.state_dict())
                index = other
            elif deed == "back":
                before = index.checkpoint()
                if some[0].numel():
                    index.append(*some)
                index.rollback(before)
        pairs[at] = index, truth
        if deed == "drop" and len(pairs) > 1:
            del pairs[at]
        for index, truth in pairs:
            truth.hold(index)
    finish()
