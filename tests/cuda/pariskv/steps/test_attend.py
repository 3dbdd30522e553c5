"""The attention of a decode step, compared with plain torch in float64.

On a CPU, the kernel is emulated.
"""

import math
import sys
from contextlib import nullcontext
from dataclasses import MISSING, fields, replace
from itertools import product

import pytest
import torch

from kvindex.core.geometry import Geometry
from kvindex.core.protocol import Hits
from kvindex.core.resident import ResidentRows
from kvindex.ops.attention import cap
from kvindex.storage.centers import of_rows
from kvindex.storage.codecs import CODES, codec
from kvindex_cuda.memory.block_store import BlockStore
from kvindex_cuda.memory.layout import Layout
from kvindex_cuda.memory.row_cache import RowCache
from kvindex_cuda.memory.slab_pool import DeviceAllocator
from kvindex_cuda.pariskv.device_state import State
from kvindex_cuda.pariskv.steps.sign_votes import SignVotesStep
from tests.cuda import emulator
from tests.cuda.devices import on_devices_slowly
from tests.cuda.pariskv.steps.test_sign_votes import DEVICES
from tests.support.helpers import Case, mostly_slow, sampled

UNIT = 2.0**-24
"""Relative rounding error of float32."""

CASES = {
    "g4": Case(q_heads=8, kv_heads=2, head_dim=64, value_dim=64, batch=2),
    "g4-D128-bfloat16": Case(8, 2, 128, 128, torch.bfloat16),
    "g3-D80-Dv24-float16": Case(3, 1, 80, 24, torch.float16, batch=2),
    "g1-D256": Case(2, 2, 256, 256),
    "g12-softcap": Case(12, 1, 64, 32, softcap=3.0),
    "g2-D8-Dv136": Case(4, 2, 8, 136),
    "g16": Case(16, 1, 64, 64),
}
TOKENS, NEAR, K = 600, 10, 37
READ = ["plain", *CODES]
"""Codecs of rows that kernels read."""
READ_FAST = [("g4", "plain"), ("g4-D128-bfloat16", "int8"), ("g3-D80-Dv24-float16", "fp8")]


class Attending:
    """A step that attends to rows of a store with a codec, and to 10 resident rows, one of them
    masked.

    bytes: the rows as they are stored. rows: their numbers, float64 keys `[B, G, N, D]` and values
    `[B, G, N, Dv]`. resident: the same for the resident rows.
    """

    def __init__(self, case, name, device, offset=0.0):
        self.geometry = g = case.index("exact", device=device).geometry
        keys, values = (part.to(device) for part in case.tokens(TOKENS))
        keys = keys + offset * case.tokens(1, seed=5)[0].to(device)
        allocator = DeviceAllocator(g.device)
        self.store = BlockStore(g, allocator, row_codec=name, max_tokens=1024)
        self.store.append(self.store.join(keys, values))
        self.store.wait()
        self.center = self.store.center
        self.bytes = codec(name, g).encode(keys, values, of_rows(self.center))
        # the same bytes, not rounded to the geometry's dtype
        exact = dict(q_heads=g.q_heads, kv_heads=g.kv_heads, head_dim=g.head_dim)
        exact = Geometry.of(**exact, value_dim=g.value_dim, device=device)
        decoding = codec(name, g if name == "plain" else exact)
        rows = decoding.decode(self.bytes, of_rows(self.center))
        self.rows = rows.keys.double(), rows.values.double()
        resident = ResidentRows(g, case.batch, NEAR + 3)
        resident.rows.fill_(float("nan"))
        beside = [part.to(device) for part in case.tokens(NEAR, seed=1)]
        resident.add(*beside, torch.arange(NEAR, device=device).expand(case.batch, -1) != 4)
        self.resident = tuple(part.double() for part in beside)
        empty = torch.zeros(0, device=device)
        needed = {field.name: empty for field in fields(State) if field.default is MISSING}
        self.state = State(
            **needed
            | dict(
                resident=resident.rows,
                resident_mask=resident.mask,
                resident_count=resident.count,
                rows=self.store.table,
            )
            | dict(row_bytes=self.store.row_bytes, codec=name, row_center=self.center)
        )
        sizes = dict(batch=case.batch, k=K, most=1, multiprocessors=4)
        self.step = SignVotesStep(g, Layout(g.head_dim, 3), **sizes)

    def hits(self, case, device, weighted):
        """Rows in any order, with the last slots unused; and weights, some of which hide a row."""
        generator = torch.Generator().manual_seed(3)
        order = torch.rand(case.batch, case.kv_heads, TOKENS, generator=generator).argsort(-1)
        ids = order[..., :K].clone()
        ids[:, -1, -5:] = -1
        weights = None
        if weighted:
            weights = 2 * torch.randn(case.batch, case.q_heads, K, generator=generator)
            weights[torch.rand(weights.shape, generator=generator) < 0.2] = float("-inf")
            weights[:, 0] = float("-inf")  # a head that sees only resident rows
            weights = weights.to(device)
        ids = ids.to(device)
        return Hits(ids, torch.zeros(ids.shape, device=device), weights)

    def logits(self, queries, hits):
        """Return logits in float64 `[B, H, R]`, the error of float32 `[B, H]`, and the values of
        the rows.
        """
        g = self.geometry
        at = hits.ids.clamp_min(0)[..., None]
        both = []
        for rows, resident in zip(self.rows, self.resident, strict=True):
            some = rows.gather(2, at.expand(-1, -1, -1, rows.shape[-1]))
            both.append(torch.cat([some, resident], 2).repeat_interleave(g.group_size, 1))
        keys, values = both
        asked = queries.double()[:, :, None]
        logits = cap((asked * keys).sum(-1), g.scale, g.softcap)
        k = hits.ids.shape[-1]
        masked = torch.nn.functional.pad(hits.ids < 0, (0, NEAR))
        masked[..., k:] = self.state.resident_mask[:, None, :NEAR] == 0
        bias = torch.zeros_like(logits).masked_fill(
            masked.repeat_interleave(g.group_size, 1), float("-inf")
        )
        if hits.log_weight is not None:
            bias[..., :k] += hits.log_weight
        logits = logits + bias
        # roundings: products, their sum in any order, scale, tanh, weight, subtraction of the
        # maximum; for coded rows, code and center separately, whose sum is rounded in `rows`
        sizes = keys.abs()
        if self.center is not None:
            sizes = sizes + 2 * self.center.double().abs()[:, :, None].repeat_interleave(
                g.group_size, 1
            )
        spread = (asked.abs() * sizes).sum(-1) * g.scale * (g.head_dim + 5)
        seen = logits.masked_fill(logits == float("-inf"), 0).abs()
        return logits, UNIT * (spread + 8 * seen + 4 * (g.softcap or 0)).amax(-1), values

    def wanted(self, queries, hits):
        """Return the attention in float64 `[B, H, Dv]`, and the largest error of float32."""
        g, (logits, off, values) = self.geometry, self.logits(queries, hits)
        weights = logits.softmax(-1)
        mean = (weights[..., None] * values.abs()).sum(2)
        rounding = torch.finfo(g.dtype).eps if g.dtype != torch.float32 else UNIT
        want = (weights[..., None] * values).sum(2)
        return want, torch.expm1(2 * off)[..., None] * mean + (
            UNIT * (values.shape[2] + 16) * mean + rounding * want.abs() + 1e-30
        )

    def wanted_lse(self, queries, hits):
        """Return the log-sum-exp in float64 `[B, H]`, and the largest error of float32.

        Logits are off by `off`, the sum by an error per term, and its logarithm and the addition of
        the largest logit by one rounding each.
        """
        logits, off, values = self.logits(queries, hits)
        want, rows = logits.logsumexp(-1), values.shape[2]
        return want, off + UNIT * (rows + 16 + 2 * math.log(rows) + want.abs())


def emulating(device):
    return emulator.emulated() if device == "cpu" else nullcontext()


def assert_near(got, wanted):
    want, bound = wanted
    got = got.double()
    assert ((got == want) | ((got - want).abs() <= bound)).all()  # −inf equals −inf


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(("name", "rows"), mostly_slow(product(CASES, READ), *READ_FAST))
def test_rows_of_every_codec_are_attended_to(name, rows, device):
    case = CASES[name]
    one, queries = Attending(case, rows, device), case.queries().to(device)
    hits = one.hits(case, device, weighted=False)
    one.step.ids.copy_(hits.ids.flatten(0, 1))
    one.step.found.copy_((hits.ids >= 0).sum(-1).flatten())
    with emulating(device):
        output, lse = one.step.attend(queries, one.state).clone(), one.step.lse.clone()
        again = one.step.attend(queries, one.state, hits)
    wanted, sums = one.wanted(queries, hits), one.wanted_lse(queries, hits)
    for part in output, again:
        assert_near(part, wanted)
    for part in lse, one.step.lse:
        assert_near(part, sums)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("rows", sorted(CODES))
def test_codes_are_read_from_the_center_on(rows, device):
    """Keys are close to their center, so the center of another head or sequence gives wrong
    logits.
    """
    case = CASES["g4"]
    one, queries = Attending(case, rows, device, offset=50.0), case.queries().to(device) / 8
    hits = one.hits(case, device, weighted=True)
    wanted = one.wanted(queries, hits)
    with emulating(device):
        assert_near(one.step.attend(queries, one.state, hits), wanted)
        assert_near(one.step.lse, one.wanted_lse(queries, hits))
        for wrong in (None, one.center[[1, 0]], one.center[:, [1, 0]].contiguous()):
            one.step.attend(queries, replace(one.state, row_center=wrong), hits)
            with pytest.raises(AssertionError):
                assert_near(one.step.output, wanted)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(("name", "rows"), sampled(CASES, READ))
def test_weights_are_added_to_the_logits_of_each_head(name, rows, device):
    case = CASES[name]
    one, queries = Attending(case, rows, device), case.queries().to(device)
    hits = one.hits(case, device, weighted=True)
    with emulating(device):
        output = one.step.attend(queries, one.state, hits)
    assert_near(output, one.wanted(queries, hits))
    assert_near(one.step.lse, one.wanted_lse(queries, hits))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(
    "group", [pytest.param(1, marks=pytest.mark.slow), 5, pytest.param(16, marks=pytest.mark.slow)]
)
def test_of_no_visible_row_the_log_sum_exp_is_minus_infinity(group, device):
    case = Case(q_heads=2 * group, kv_heads=2, head_dim=32, value_dim=16, softcap=2.0)
    one, queries = Attending(case, "plain", device), case.queries().to(device)
    one.state.resident_mask.zero_()
    hits = one.hits(case, device, weighted=True)
    hits.ids[:, 1] = -1
    with emulating(device):
        output = one.step.attend(queries, one.state, hits)
    unseen = torch.arange(2 * group, device=device) >= group
    unseen[0] = True  # `hits` hides all rows from this head
    assert (one.step.lse[:, unseen] == float("-inf")).all()
    assert (output[:, unseen] == 0).all()
    assert_near(one.step.lse, one.wanted_lse(queries, hits))


@pytest.mark.parametrize("change", ["weights", "rows", "masked"])
@pytest.mark.parametrize("rows", READ)
def test_the_comparison_can_fail(rows, change):
    case = CASES["g4"]
    one, queries = Attending(case, rows, "cpu"), case.queries()
    hits = one.hits(case, "cpu", weighted=True)
    want, _ = one.wanted(queries, hits)
    if change == "weights":
        hits.log_weight[1, 5, 3] = hits.log_weight[1, 5, 3].clamp_min(-2) + 1e-3
    elif change == "rows":
        one.rows[1][1, 1, hits.ids[1, 1, 4], 7] += 1e-2
    else:
        hits.ids[0, 0, 0] = -1
    with pytest.raises(AssertionError):
        assert_near(want, one.wanted(queries, hits))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", sorted(CODES))
def test_a_code_is_its_number_to_the_bit(name, device):
    """Attention over one row returns its value, for every possible code."""
    case = Case(q_heads=1, kv_heads=1, head_dim=8, value_dim=256)
    one = Attending(case, name, device)
    row = one.store._table._block(0)[0, 0]  # uint8 [row_bytes]
    row[8 : 8 + 256] = torch.arange(256).byte()
    if name == "fp8":
        row[8 + 0x7F], row[8 + 0xFF] = 0, 0  # not a number
    row[8 + 256 + 4 :][:4] = torch.tensor([0.7123]).view(torch.uint8)
    one.state.resident_mask.zero_()
    hits = Hits(torch.zeros((1, 1, 1), dtype=torch.int64, device=device), torch.zeros(1, 1, 1))
    with emulating(device):
        output = one.step.attend(case.queries().to(device), one.state, hits)
    want = codec(name, one.geometry).decode(row[None, None, None]).values
    assert torch.equal(output[0, 0], want[0, 0, 0].to(device))


@pytest.mark.parametrize("device", DEVICES)
def test_a_subnormal_float16_is_its_number_to_the_bit(device):
    case = Case(q_heads=1, kv_heads=1, head_dim=8, value_dim=2048, dtype=torch.float16)
    one = Attending(case, "plain", device)
    row = one.store._table._block(0)[0, 0].view(torch.int16)
    numbers = torch.arange(2048, dtype=torch.int16)  # half of these numbers are subnormal
    row[8 : 8 + 2048] = numbers
    one.state.resident_mask.zero_()
    hits = Hits(torch.zeros((1, 1, 1), dtype=torch.int64, device=device), torch.zeros(1, 1, 1))
    with emulating(device):
        output = one.step.attend(case.queries().to(device), one.state, hits)
    assert torch.equal(output[0, 0].cpu().view(torch.int16), numbers)


def cached(one, rows):
    """Give a step's state a cache of n rows, and return the cache."""
    cache = RowCache(one.step.groups, one.store.row_bytes, one.state.resident.device, capacity=rows)
    cache.data.fill_(0xFF)
    one.state = replace(one.state, cache=cache)
    return cache


def assert_kept(one, cache):
    """Each tag is in the cache once, and its slot contains the row as it is stored."""
    g = one.geometry
    used = g.head_dim + g.value_dim
    used = used * 2 if one.state.codec == "plain" else used + 8
    rows = one.bytes.flatten(0, 1)
    for group, tags in enumerate(cache.tags.tolist()):
        at = {tag: slot for slot, tag in enumerate(tags) if tag >= 0}
        assert len(at) == sum(tag >= 0 for tag in tags)
        assert torch.equal(cache.data[group, [*at.values()], :used], rows[group, [*at], :used])


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(("rows", "given"), sampled(READ, [False, True]))
def test_a_cache_keeps_rows_as_they_are_stored(rows, given, device):
    case = CASES["g3-D80-Dv24-float16"]
    one, queries = Attending(case, rows, device), case.queries().to(device)
    cache = cached(one, 1024)
    hits = one.hits(case, device, weighted=given)
    one.step.ids.copy_(hits.ids.flatten(0, 1))
    some = (hits.ids >= 0).sum(-1).flatten()
    one.step.found.copy_(some)
    wanted = one.wanted(queries, hits)
    more = (hits,) if given else ()
    with emulating(device):
        assert_near(one.step.attend(queries, one.state, *more), wanted)
        assert cache.counts.tolist() == [[n, 0] for n in some.tolist()]
        tags = [{tag for tag in row if tag >= 0} for row in cache.tags.tolist()]
        assert tags == [{i for i in row if i >= 0} for row in hits.ids.flatten(0, 1).tolist()]
        assert_kept(one, cache)
        for block in range(3 * case.batch):
            # this call reads what the cache stored before
            one.store._table._block(block).fill_(0xFF)
        assert_near(one.step.attend(queries, one.state, *more), wanted)
    assert cache.counts.tolist() == [[2 * n, n] for n in some.tolist()]
    assert cache.clocks.tolist() == [2] * len(some)


ONE = Case(q_heads=1, kv_heads=1, head_dim=8, value_dim=8)
"""For a single head, so that only its thread blocks look rows up."""


def chosen(rows, device):
    ids = torch.tensor([[rows]], device=device)
    return Hits(ids, torch.zeros(ids.shape, device=device))


@pytest.mark.parametrize("device", DEVICES)
def test_a_row_whose_slot_is_taken_in_the_same_step_is_fetched(device):
    """A team has read the tag of the row that it will need next when it takes that row's slot for
    another row.
    """
    one, queries = Attending(ONE, "plain", device), ONE.queries().to(device)
    cache = cached(one, 4)
    one.step.splits = 1  # so that a team of 8 lanes gets every 32nd row
    with emulating(device):
        for rows in [7], [20], [300], [599], [8, *[-1] * 63, 7]:
            hits = chosen(rows, device)
            assert_near(one.step.attend(queries, one.state, hits), one.wanted(queries, hits))
        assert cache.counts.tolist() == [[6, 0]]
        assert sorted(cache.tags[0].tolist()) == [8, 20, 300, 599]  # this row is not cached
        assert_kept(one, cache)
        one.step.attend(queries, one.state, chosen([599, 8, 20, 7], device))
    assert cache.counts.tolist() == [[10, 3]]
    assert sorted(cache.tags[0].tolist()) == [7, 8, 20, 599]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("heads", [1, 2], ids=["alone", "parts"])
def test_a_clock_begins_anew_before_stamps_would_be_negative(device, heads):
    case = replace(ONE, q_heads=heads)
    one, queries = Attending(case, "plain", device), case.queries().to(device)
    cache = cached(one, 4)
    cache.clocks.fill_(2**30 - 2)
    with emulating(device):
        for rows in [7, 20], [7, 300], [599, 20], [8, 7]:
            hits = chosen(rows, device)
            assert_near(one.step.attend(queries, one.state, hits), one.wanted(queries, hits))
            assert_kept(one, cache)
            assert int(cache.stamps.min()) >= 0
    assert cache.clocks.tolist() == [2]


@pytest.mark.skipif(not emulator.available(), reason="no g++ to emulate with")
def test_a_tag_is_read_while_others_take_its_slot(monkeypatch):
    """Lanes of a team read a tag before and after another row takes its slot."""
    monkeypatch.setattr(sys.modules[__name__], "K", 400)
    one, queries = Attending(ONE, "plain", "cpu"), ONE.queries()
    cache, one.step.splits = cached(one, 256), 1  # so that a team looks up a dozen rows
    for seed in range(10):
        order = torch.rand(TOKENS, generator=torch.Generator().manual_seed(seed))
        order[:200] += 0.7  # which most steps need
        hits = chosen(order.argsort(descending=True)[:400].tolist(), "cpu")
        with emulator.emulated(order="random", seed=seed):
            output = one.step.attend(queries, one.state, hits)
        assert_near(output, one.wanted(queries, hits))
        assert_kept(one, cache)


@on_devices_slowly
def test_values_may_be_wide(device):
    # 256 KB if as many of these rows were in flight as of others
    case = replace(ONE, value_dim=2048)
    one, queries = Attending(case, "plain", device), case.queries().to(device)
    hits = chosen([*range(0, 600, 20)], device)
    with emulating(device):
        assert_near(one.step.attend(queries, one.state, hits), one.wanted(queries, hits))


@pytest.mark.skipif(not emulator.available(), reason="no g++ to emulate with")
@pytest.mark.parametrize("order", emulator.ORDERS)
@pytest.mark.parametrize("heads", [1, 2], ids=["alone", "parts"])
def test_rows_may_look_for_places_in_any_order(order, heads):
    """In each step, more rows of a set are needed than it has slots, by warps in any order.

    Each of 2 heads has its own thread blocks, and those of the first insert rows into the cache.
    """
    case = replace(ONE, q_heads=heads)
    one, queries = Attending(case, "plain", "cpu"), case.queries()
    cache = cached(one, 4)
    lost = 0
    for seed in range(30):
        rows = torch.randperm(7, generator=torch.Generator().manual_seed(seed))[:5].tolist()
        here, before = set(cache.tags[0].tolist()) & set(rows), cache.counts[0].tolist()
        hits = chosen([*rows, -1], "cpu")
        with emulator.emulated(order=order, seed=seed):
            output = one.step.attend(queries, one.state, hits)
        assert_near(output, one.wanted(queries, hits))
        asked, found = (cache.counts[0] - torch.tensor(before)).tolist()
        assert asked == 5
        assert 0 <= found <= len(here)
        lost += len(here) - found
        assert_kept(one, cache)
        assert cache.clocks.tolist() == [seed + 1]
        assert set(cache.tags[0, cache.stamps[0] // 2 > seed].tolist()) <= set(rows)
    # so the cache was used; the second head may have used all slots before
    assert lost or heads == 2
