"""`backend="cuda"`: every preset on its kernels, compared with the same preset in plain torch."""

import torch

from kvindex.layer import AttentionLayer
from kvindex.pariskv.index import ParisKV
from kvindex_cuda.memory.async_copy import PinnedAllocator
from kvindex_cuda.memory.block_store import BlockStore
from tests.cuda.devices import mostly_slow_on_cpu
from tests.cuda.host_memory import FakeAllocator
from tests.support.beside import alone
from tests.support.helpers import (
    ROUNDED,
    Case,
    assert_same_hits,
    left_padding,
    mostly_slow,
    part,
    sampled,
)

PRESETS = [
    f"pariskv:preset={preset}:candidates_per={lists}"
    for preset in ("paper", "fast", "accurate", "precise", "scan")
    for lists in ("head", "group")
]
SPECS = ["exact", *PRESETS, "pariskv:single_stage_below=500"]
LAYERED = "fast", "paper", "accurate", "scan:magnitude_bits=2"
CASE = Case(q_heads=4, kv_heads=2, head_dim=64, batch=2)


def pair(spec, device, case=CASE, **options):
    return [case.index(spec, backend=name, device=device, **options) for name in ("cuda", "torch")]


def moved(tokens, device):
    return tuple(piece.to(device) for piece in tokens)


def assert_found(mine, theirs, queries, k=20):
    """Hits are equal except for a few whose scores are as close as a flipped code can move them."""
    hits = [index.search(queries, k=k) for index in (mine, theirs)]
    same = (hits[0].ids[..., None] == hits[1].ids[..., None, :]).any(-1).float().mean()
    assert same > 0.97
    if same == 1:
        assert_same_hits(*hits, close=ROUNDED)


@mostly_slow_on_cpu("spec", mostly_slow(SPECS, *SPECS[::2]), SPECS[0], SPECS[4], SPECS[10])
def test_every_preset_searches_as_in_torch(spec, device):
    mine, theirs = pair(spec, device)
    tokens, queries = moved(CASE.tokens(600), device), CASE.queries().to(device)
    valid = left_padding([0, 70], 600).to(device)
    valid[0, 290:310] = valid[1, 200:230] = valid[1, 400:405] = False
    for index in (mine, theirs):
        index.append(*part(tokens, 0, 300), valid=valid[:, :300])
        index.append(*part(tokens, 300, 450), valid=valid[:, 300:450])
        index.append(*part(tokens, 450, 600))
    assert_found(mine, theirs, queries)
    for index in (mine, theirs):
        index.truncate(400)
        index.reorder(torch.tensor([1, 0, 1]))
    three = CASE.queries(batch=3).to(device)
    assert_found(mine, theirs, three)
    hits = mine.search(three, k=5)
    rows = [index.fetch(hits) for index in (mine, theirs)]
    assert torch.equal(rows[0].keys, rows[1].keys)
    assert torch.equal(rows[0].values, rows[1].values)


@mostly_slow_on_cpu(
    "spec, pinned",
    sampled([f"pariskv:preset={name}" for name in LAYERED], [False, True]),
    ("pariskv:preset=paper", True),
)
def test_a_layer_attends_as_in_torch(spec, pinned, device, monkeypatch):
    """Rows enter both indexes at the same steps, asynchronously where kernels write the codes."""
    indexes = pair(spec, device)
    if pinned:
        place = indexes[0].geometry
        allocator = FakeAllocator() if device == "cpu" else PinnedAllocator(place.device)
        if device == "cpu":
            allocator.shift = 0  # the emulated kernels read memory that the host writes
        store = BlockStore(place, allocator)
        indexes[0] = CASE.index(spec, backend="cuda", device=device, store=store)
    moves = [not index.supports_async_append for index in indexes]
    monkeypatch.setattr(ParisKV, "supports_async_append", True)
    sizes = dict(k=20, sink=4, local_window=16, update_every=8, dense_below=64)
    layers = [
        AttentionLayer(alone(index) if moving else index, **sizes)
        for index, moving in zip(indexes, moves, strict=True)
    ]
    tokens = moved(CASE.tokens(316), device)
    for layer in layers:
        queries = CASE.tensor(5, 2, 4, 300, 64).to(device)
        layer.step(queries, *part(tokens, 0, 300))
    off = []
    for t in range(300, 316):
        query = CASE.tensor(100 + t, 2, 4, 1, 64).to(device)
        mine, theirs = (layer.step(query, *part(tokens, t, t + 1)) for layer in layers)
        off.append(float((mine - theirs).norm() / theirs.norm()))
    assert [len(layer.index) for layer in layers] == [292] * 2
    assert [layer._window.leaving for layer in layers] == [8] * 2
    assert sorted(off)[len(off) // 2] < 1e-3
    assert max(off) < 0.1  # another row of nearly the same score
