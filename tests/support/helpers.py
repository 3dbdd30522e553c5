"""Builders and comparators that several tests share."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from itertools import product

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

import kvindex
from kvindex import Hits, KVIndex, Rows

ROUNDED = 1e-2
"""Scores may differ by this share of the largest one where only rounding differs. The products
of torch depend in the last bit on the shape of a batch, and such a bit can tip a stored code:
a bfloat16 weight by 2^-8, a magnitude to the next level. A wrong row or sign is off by far more
(`test_contract_can_fail.py`)."""


@dataclass(frozen=True)
class Case:
    """An attention layer's shape, and the tensors that go with it."""

    q_heads: int = 2
    kv_heads: int = 2
    head_dim: int = 16
    value_dim: int = 16
    dtype: torch.dtype = torch.float32
    softcap: float | None = None
    device: str = "cpu"
    batch: int = 1

    def __str__(self) -> str:
        dtype = str(self.dtype).removeprefix("torch.")
        shape = f"H{self.q_heads}-G{self.kv_heads}-D{self.head_dim}-Dv{self.value_dim}"
        cap = "" if self.softcap is None else "-softcap"
        device = "" if self.device == "cpu" else f"-{self.device}"
        return f"{dtype}-B{self.batch}-{shape}{cap}{device}"

    def index(self, name: str, **options: object) -> kvindex.BaseIndex:
        geometry = {key: value for key, value in asdict(self).items() if key != "batch"}
        if kvindex.get(name.partition("+")[0].partition(":")[0]).needs_rope:
            geometry["rope"] = rope(self.head_dim, self.device)
        return kvindex.create(name, **{**geometry, **options})

    def tensor(self, seed: int, *shape: int) -> Tensor:
        """Normal entries, the same for a seed whatever the dtype and device."""
        generator = torch.Generator().manual_seed(seed)
        return torch.randn(shape, generator=generator).to(self.device, self.dtype)

    def tokens(self, count: int, seed: int = 0, batch: int | None = None) -> tuple[Tensor, Tensor]:
        """Keys `[B, G, count, D]` and values `[B, G, count, Dv]`."""
        batch = self.batch if batch is None else batch
        keys = self.tensor(2 * seed, batch, self.kv_heads, count, self.head_dim)
        values = self.tensor(2 * seed + 1, batch, self.kv_heads, count, self.value_dim)
        return keys, values

    def queries(self, seed: int = 0, batch: int | None = None) -> Tensor:
        """Queries `[B, H, D]`."""
        batch = self.batch if batch is None else batch
        return self.tensor(10_000 + seed, batch, self.q_heads, self.head_dim)


def rope(head_dim: int, device: str | torch.device = "cpu") -> Tensor:
    """Inverse frequencies `[D / 2]` as most models have them."""
    return 10_000.0 ** -(torch.arange(0, head_dim, 2, device=device) / head_dim)


def sampled(*lists: object) -> list[object]:
    """The product of lists as parameters of a test: `slow` but for a diagonal with every value."""
    lists = [list(one) for one in lists]
    longest = max(map(len, lists))
    fast = {tuple(step % len(one) for one in lists) for step in range(longest)}
    return [
        pytest.param(
            *(one[place] for one, place in zip(lists, places, strict=True)),
            marks=() if places in fast else pytest.mark.slow,
        )
        for places in product(*(range(len(one)) for one in lists))
    ]


def left_padding(pads: list[int], count: int, device: str = "cpu") -> Tensor:
    """Valid flags bool `[B, count]`: row `b` starts with `pads[b]` padded tokens."""
    return torch.arange(count, device=device) >= torch.tensor(pads, device=device)[:, None]


def part(tokens: tuple[Tensor, Tensor], start: int, stop: int) -> tuple[Tensor, Tensor]:
    """The tokens from `start` to `stop`."""
    return tokens[0][:, :, start:stop], tokens[1][:, :, start:stop]


def join(*pieces: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    """Pieces of tokens one after the other."""
    keys, values = zip(*pieces, strict=True)
    return torch.cat(keys, dim=2), torch.cat(values, dim=2)


def far_apart(tensor: Tensor) -> Tensor:
    """A tensor `[1, 2, ...]` whose heads lie more than 2^31 elements apart.

    Of so much a CPU takes memory for the pages that are touched, a GPU for all.
    """
    far, one = 2**31 + 2**20, tensor[0, 0].contiguous()
    spread = torch.empty(far + one.numel(), dtype=tensor.dtype, device=tensor.device)
    return spread.as_strided(tensor.shape, (0, far, *one.stride())).copy_(tensor)


def hits_of(ids: Tensor) -> Hits:
    """Hits with these ids and no scores, to fetch."""
    return Hits(ids, torch.zeros(ids.shape, device=ids.device))


def all_rows(index: KVIndex, batch: int) -> Rows:
    """Every row of an index, in order."""
    g = index.geometry
    ids = torch.arange(len(index), device=g.device).expand(batch, g.kv_heads, -1)
    return index.fetch(hits_of(ids))


def assert_well_formed(hits: Hits, index: KVIndex, batch: int, k: int) -> None:
    """What every search promises about its slots, whatever it found."""
    g = index.geometry
    assert hits.ids.shape == hits.scores.shape == (batch, g.kv_heads, k)
    assert (hits.ids.dtype, hits.scores.dtype) == (torch.int64, torch.float32)
    assert hits.ids.device == hits.scores.device == g.device
    assert not hits.scores.isnan().any()
    unused = hits.ids == -1
    assert (hits.scores[unused] == float("-inf")).all()
    assert (hits.scores[~unused] > float("-inf")).all()
    assert (hits.ids < len(index)).all()
    if hits.log_weight is not None:
        assert hits.log_weight.shape == (batch, g.q_heads, k)
        wide = unused.repeat_interleave(g.group_size, dim=1)
        assert (hits.log_weight[wide] == float("-inf")).all()
    above, below = hits.scores[..., :-1], hits.scores[..., 1:]
    assert (above >= below).all(), "scores descend"
    tied = (above == below) & ~unused[..., 1:]
    first, second = hits.ids[..., :-1][tied], hits.ids[..., 1:][tied]
    assert (first < second).all(), "equal scores: the lower id first"
    ordered = hits.ids.sort(dim=-1).values
    repeated = (ordered[..., 1:] == ordered[..., :-1]) & (ordered[..., 1:] != -1)
    assert not repeated.any(), "ids are distinct"


def assert_same_hits(got: Hits, want: Hits, *, close: float = 0.0, shift: Tensor | int = 0) -> None:
    """The same rows with the same scores; to the bit, or `close` (see `ROUNDED`).

    shift: added to the wanted ids, int or int64 `[B]`. Where scores are close, so are the ids'
    places: a row may be missing only if its score is close to that of the last slot.
    """
    shift = torch.as_tensor(shift, device=want.ids.device).reshape(-1, 1, 1)
    ids = torch.where(want.ids < 0, want.ids, want.ids + shift)  # below -1: no token
    if not close:
        assert torch.equal(got.ids, ids)
        assert torch.equal(got.scores, want.scores)
        return
    assert got.ids.shape == ids.shape
    assert torch.equal(got.ids == -1, ids == -1), "as many slots are used"
    used = ids != -1
    if not used.any():
        return
    slack = close * (1 + float(want.scores[used].abs().max()))
    assert ((got.scores - want.scores)[used].abs() <= slack).all(), "scores differ"
    flat = [tensor.flatten(0, 1).tolist() for tensor in (got.ids, got.scores, ids, want.scores)]
    for got_ids, got_scores, want_ids, want_scores in zip(*flat, strict=True):
        ours = dict(zip(got_ids, got_scores, strict=True))
        theirs = dict(zip(want_ids, want_scores, strict=True))
        last = min(want_scores)
        for row in (ours.keys() | theirs.keys()) - {-1}:
            assert abs(ours.get(row, last) - theirs.get(row, last)) <= slack, f"row {row} differs"


def snapshot(index: KVIndex, queries: Tensor, k: int = 7) -> tuple[object, ...]:
    """Everything that can be seen of an index from outside."""
    hits = index.search(queries, k=k)
    rows = all_rows(index, len(queries))
    return len(index), index.nbytes(), hits.ids, hits.scores, rows.keys, rows.values


def assert_same_snapshot(got: tuple[object, ...], want: tuple[object, ...]) -> None:
    """Two snapshots agree to the bit."""
    for ours, theirs in zip(got, want, strict=True):
        if isinstance(theirs, Tensor):
            torch.testing.assert_close(ours, theirs, rtol=0, atol=0, equal_nan=True)
        else:
            assert ours == theirs


class Operations(TorchDispatchMode):
    """While it is entered: names of torch's operations but views, and how many there are in all."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []
        self.count = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.count += 1
        if not function.is_view:
            self.names.append(str(function))
        return function(*args, **kwargs or {})


def follow_changes(mine, theirs, case, device, assert_same):
    """Two indexes of a batch of 2 through appends, a cut, another order and a reset.

    assert_same: of both and queries, after each change.
    """
    tokens = [piece.to(device) for piece in case.tokens(900)]
    queries, pair = case.queries().to(device), (mine, theirs)
    for index in pair:
        index.append(*part(tokens, 0, 300), valid=left_padding([0, 70], 300).to(device))
    assert_same(mine, theirs, queries)
    for start, stop in ((300, 301), (301, 700)):
        for index in pair:
            index.append(*part(tokens, start, stop))
        assert_same(mine, theirs, queries)
    for index in pair:
        index.truncate(500)
        index.append(*part(tokens, 700, 900))
    assert_same(mine, theirs, queries)
    for index in pair:
        index.reorder(torch.tensor([1, 1, 0]))
    assert_same(mine, theirs, case.queries(batch=3).to(device))
    for index in pair:
        index.reset()
        index.append(*part(tokens, 0, 200))
    assert_same(mine, theirs, queries)
