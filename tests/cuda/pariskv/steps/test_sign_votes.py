"""The kernels of a decode step with sign votes, compared with the torch reference.

On a CPU, they are emulated.

This is one file because every test builds the same state by hand (`setting`, `run`, `expected`).
"""

from contextlib import nullcontext
from dataclasses import replace
from functools import partial

import pytest
import torch

from kvindex.core.check import LARGEST
from kvindex.ops.attention import attend
from kvindex.pariskv.block_layout import words_of
from kvindex_cuda.memory.layout import BLOCK, Layout
from kvindex_cuda.memory.row_cache import RowCache
from kvindex_cuda.pariskv.device_state import State
from kvindex_cuda.pariskv.dispatch import STEPS, kind_of, layout_of, options_of, room_of
from kvindex_cuda.pariskv.steps.sign_votes import SignVotesStep
from kvindex_cuda.runtime.constants import BINS
from tests.cuda import emulator
from tests.cuda.devices import DEVICES, mostly_slow_on_cpu, on_devices_slowly
from tests.cuda.pariskv.steps.test_reference import FAST
from tests.support.helpers import Case, left_padding, mostly_slow, sampled, slow_as
from tests.support.steps import codes_of


def setting(case, count, *, resident=40, valid=None, device="cpu", tokens=None, **options):
    """An index of `count` tokens, the state that a step reads, and the tensors that the state
    points to.
    """
    keys, values = (part.to(device) for part in tokens or case.tokens(count + resident))
    options = dict(preset="fast", candidates_per="group", device=device) | options
    index = case.index("pariskv", **options)
    index.append(keys[:, :, :count], values[:, :, :count], valid=valid)
    layout, kind = layout_of(index.config, index.geometry), kind_of(index.config, index.geometry)
    codes, centers, weight_scale = codes_of(index)
    blocks = layout.pack(codes, centers)
    S, rows = blocks.shape[1], torch.cat([keys, values], dim=-1)
    padded = rows.new_zeros(*rows.shape[:2], S * BLOCK, rows.shape[-1])
    padded[:, :, :count] = rows[:, :, :count]
    host = padded.unflatten(2, (S, BLOCK)).transpose(1, 2).contiguous()  # [B, S, G, 256, D + Dv]

    def table(part):
        start, size = part.data_ptr(), part[0, 0].numel() * part.element_size()
        flat = start + size * torch.arange(case.batch * S, device=device)
        return flat.view(case.batch, S)

    flags = index.valid
    if flags is None:
        flags = torch.ones(case.batch, count, dtype=torch.bool, device=device)
    counts = flags.sum(1)
    k = 20
    wanted = index.config.limits(index.counts, k)[1].tolist()
    state = State(
        codes=table(blocks),
        rows=table(host),
        valid=words_of(flags, S),
        length=torch.tensor([count], device=device),
        wanted=torch.tensor(wanted, dtype=torch.int32, device=device),
        counted=counts.int(),
        weight_scale=weight_scale,
        regression=index._regressed(),
        resident=rows[:, :, count:].contiguous(),
        resident_mask=torch.ones(case.batch, resident, dtype=torch.uint8, device=device),
        resident_count=torch.tensor([resident], device=device),
        row_bytes=host.shape[-1] * host.element_size(),
        histogram=index._histogram if kind == "tiered_votes" else None,
        tiers=index.config.limits(index.counts, k)[0].to(device)
        if kind == "tiered_votes"
        else None,
    )
    return index, layout, state, (blocks, host, keys, values), k


CASES = {
    "g4": (Case(q_heads=8, kv_heads=2, head_dim=128, value_dim=128), 1500, {}),
    "g4-B8": (Case(q_heads=8, kv_heads=2, head_dim=64, batch=8), 600, {}),
    "g1-B2": (Case(q_heads=2, kv_heads=2, head_dim=64, batch=2), 700, {}),
    "g3-D96": (Case(q_heads=3, kv_heads=1, head_dim=96), 600, {}),
    "g2-D80": (Case(q_heads=2, kv_heads=1, head_dim=80), 600, {}),
    "g3-D120": (Case(q_heads=3, kv_heads=1, head_dim=120, dtype=torch.float16), 600, {}),
    "g1-D192": (Case(q_heads=1, kv_heads=1, head_dim=192), 400, {}),
    "g8-D256": (Case(q_heads=8, kv_heads=1, head_dim=256, value_dim=64), 300, {}),
    "g12": (Case(q_heads=12, kv_heads=1, head_dim=64), 400, {}),
    "g16": (Case(q_heads=16, kv_heads=1, head_dim=72), 400, {}),
    # two policies of `agree`
    "blocks": (Case(q_heads=4, kv_heads=1, head_dim=64), 6000, dict(beta=0.9)),
    "g5-127": (Case(q_heads=5, kv_heads=1, head_dim=128), 600, dict(query_max=85)),
    "g2-7": (Case(q_heads=4, kv_heads=2, head_dim=64), 600, dict(query_max=5)),
    "one": (Case(q_heads=4, kv_heads=2, head_dim=64), 1, {}),
    "256": (Case(q_heads=4, kv_heads=2, head_dim=64), 256, {}),
    "257": (Case(q_heads=4, kv_heads=2, head_dim=64), 257, {}),
    "softcap": (Case(q_heads=4, kv_heads=2, head_dim=64, softcap=5.0), 500, {}),
    "max_share": (Case(q_heads=4, kv_heads=2, head_dim=64), 500, dict(group="max_share")),
    "precise": (Case(q_heads=4, kv_heads=2, head_dim=64), 500, dict(preset="precise")),
    "bfloat16": (Case(q_heads=4, kv_heads=2, head_dim=64, dtype=torch.bfloat16), 500, {}),
    "float16": (Case(q_heads=4, kv_heads=2, head_dim=64, dtype=torch.float16), 500, {}),
}


WHOLE = {"g8-D256", "blocks"}
"""Beside what `test_reference.py` compares launch by launch, the ends: the others are slow, and not
in CI where a case of that file is the same."""

POISONED = ("ids", "cleared", "edge", "finalists", "candidates", "list", "sample")
POISONED += ("pieces", "votes")


def run(
    index,
    layout,
    state,
    queries,
    k,
    *,
    device="cpu",
    order="forward",
    capacity=None,
    multiprocessors=4,
    votes=None,
    look=None,
):
    """Run a step whose outputs start as garbage.

    Return its output, and the ids of each group in ascending order.

    votes: macros for the kernels that vote. look: called with the step when it is done.
    """
    kind = kind_of(index.config, index.geometry)
    sizes = dict(batch=len(queries), k=k, multiprocessors=multiprocessors)
    most = room_of(kind, int(state.length), max(1, int(state.wanted.max())))
    options = options_of(kind, index.config) | sizes
    step = STEPS[kind](index.geometry, layout, most=most, **options)
    if capacity:
        step.capacity = capacity
    if votes:
        step._vote_defines |= votes
    for part in (step.output, step.estimates, step.scores, step.partial):
        part.fill_(float("nan"))
    for name in POISONED:
        if isinstance(part := getattr(step, name, None), torch.Tensor):
            part.fill_(0x5A5A5A5A)
    with emulator.emulated(order=order, seed=1) if device == "cpu" else nullcontext():
        output = step(queries, state)
    if look:
        look(step)
    found = step.found.tolist()
    ids = [row[:n].tolist() for row, n in zip(step.ids, found, strict=True)]
    assert ids == [sorted(row) for row in ids]  # so that outputs do not change from run to run
    return output, ids


def expected(index, queries, state, k):
    """Return the reference's hits, and its attention over them and the resident rows."""
    hits = index.search(queries, k=k)
    rows, D = index.fetch(hits), index.geometry.head_dim
    resident = state.resident.tensor_split([D], dim=-1)
    group = index.geometry.group_size
    bias = torch.zeros(hits.ids.shape, device=queries.device).masked_fill(hits.ids < 0, -torch.inf)
    shown = state.resident_mask[:, None].expand(-1, resident[0].shape[1], -1)
    bias = torch.cat([bias, torch.where(shown > 0, 0.0, -torch.inf)], -1)
    keys = torch.cat([rows.keys, resident[0]], 2)
    values = torch.cat([rows.values, resident[1]], 2)
    bias = bias.repeat_interleave(group, 1)
    g = index.geometry
    return hits, attend(queries, keys, values, scale=g.scale, softcap=g.softcap, bias=bias)


def assert_close(got, want, hits, *, missing=0.0):
    """Ids are equal except for `missing` of them, whose scores agree within rounding."""
    output, ids = got
    rows = hits.ids.flatten(0, 1).tolist()
    mine = [{i for i in row if i >= 0} for row in rows]
    assert [len(row) for row in ids] == [len(row) for row in mine]
    lost = sum(len(want - set(row)) for row, want in zip(ids, mine, strict=True))
    assert lost <= missing * sum(map(len, mine))
    if not lost:
        close = 1e-4 if output.dtype == torch.float32 else 2e-2
        torch.testing.assert_close(output, want, rtol=close, atol=close)


@mostly_slow_on_cpu(
    "name",
    [pytest.param(n, marks=() if n in WHOLE else slow_as(n in FAST)) for n in CASES],
    "blocks",
    indirect=False,
)
def test_a_step_selects_and_attends_as_the_reference(name, device):
    case, count, options = CASES[name]
    index, layout, state, _kept, k = setting(case, count, device=device, **options)
    queries = case.queries().to(device)
    got = run(index, layout, state, queries, k, device=device)
    hits, want = expected(index, queries, state, k)
    assert_close(got, want, hits, missing=0.01)


@mostly_slow_on_cpu(
    "options",
    [
        pytest.param(dict(multiprocessors=1), id="more than a warp reads at once"),
        pytest.param(dict(votes=dict(BINNED=800)), id="a histogram that fills"),
        pytest.param(dict(votes=dict(BINNED=0)), marks=pytest.mark.slow, id="none"),
    ],
    dict(multiprocessors=1),
    indirect=False,
)
def test_a_long_list(device, options):
    case, count, index_options = CASES["blocks"]
    index, layout, state, _kept, k = setting(case, count, device=device, **index_options)
    queries = case.queries().to(device)

    def counted(step):  # as `bin_of` in common.cuh
        for group, n in enumerate(step.counts.tolist()):
            votes = (step.list[group, :n] >> 32) + 2**31
            votes = torch.where(votes >= 2**31, votes - 2**32, votes)
            base, shift = int(step.bases[group]), int(step.shifts[group])
            bins = (votes - base >> shift).clamp(0, BINS - 1)
            want = torch.bincount(bins, minlength=BINS)
            assert step.hist.view(-1, BINS)[group].tolist() == want.tolist()

    got = run(index, layout, state, queries, k, device=device, look=counted, **options)
    hits, want = expected(index, queries, state, k)
    assert_close(got, want, hits, missing=0.01)


@on_devices_slowly
def test_padded_tokens_and_hidden_rows_are_never_read(device):
    case = Case(q_heads=4, kv_heads=2, head_dim=64, batch=3)
    valid = left_padding([0, 130, 600], 600).to(device)
    valid[0, 290:340] = valid[1, 500:505] = valid[1, 590:] = False  # and at any address
    index, layout, state, _kept, k = setting(case, 600, valid=valid, device=device)
    state.resident_mask[1, ::3] = 0
    queries = case.queries().to(device)
    got = run(index, layout, state, queries, k, device=device)
    hits, want = expected(index, queries, state, k)
    assert_close(got, want, hits, missing=0.01)
    assert got[1][4] == got[1][5] == []


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(
    ("count", "capacity", "options"),
    [(1300, None, {}), (1300, 500, {}), (1300, 90, {}), (6000, None, dict(beta=0.8))],
    ids=["edge", "full", "short", "blocks"],
)
def test_ties_go_to_the_lower_ids(device, count, capacity, options):
    """Nearly all keys are equal: a bin that does not fit into shared memory, or a list that
    overflows.
    """
    case = Case(q_heads=4, kv_heads=2, head_dim=64)
    keys, values = case.tokens(count + 40)
    keys[:, :, 5:] = keys[:, :, 5:6]
    tokens = keys, values
    index, layout, state, _kept, k = setting(case, count, device=device, tokens=tokens, **options)
    queries = case.queries().to(device)
    got = run(index, layout, state, queries, k, device=device, capacity=capacity)
    hits, want = expected(index, queries, state, k)
    assert_close(got, want, hits)


@pytest.mark.parametrize("device", DEVICES)
def test_a_list_that_overflows_is_made_right(device):
    case, count = Case(q_heads=4, kv_heads=2, head_dim=64, batch=2), 900
    index, layout, state, _kept, k = setting(case, count, device=device)
    queries = case.queries().to(device)
    got = run(index, layout, state, queries, k, device=device, capacity=int(state.wanted.max()))
    hits, want = expected(index, queries, state, k)
    assert_close(got, want, hits, missing=0.01)


@pytest.mark.parametrize("device", DEVICES)
def test_a_zero_query_and_a_single_key_give_numbers(device):
    case = Case(q_heads=4, kv_heads=2, head_dim=64)
    index, layout, state, _kept, k = setting(case, 300, device=device)
    queries = torch.zeros_like(case.queries()).to(device)
    output, ids = run(index, layout, state, queries, k, device=device)
    assert output.isfinite().all()
    assert [len(row) for row in ids] == [k, k]
    want = expected(index, queries, state, k)[1]
    torch.testing.assert_close(output, want, rtol=1e-4, atol=1e-4)


# `test_reference.py` compares these products in each case, within a similar bound
@pytest.mark.slow
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
def test_centers_meet_queries_as_in_float32(dtype, device):
    """Matrix units take queries as bfloat16 numbers: what one such number leaves out must be in the
    others.
    """
    case = Case(q_heads=8, kv_heads=2, head_dim=96, dtype=dtype)
    index, layout, state, _kept, k = setting(case, 600, device=device)
    sizes = dict(batch=1, k=k, most=int(state.wanted.max()), multiprocessors=4)
    step = SignVotesStep(index.geometry, layout, **sizes, **options_of("sign_votes", index.config))
    queries = case.queries().to(device)
    with emulator.emulated() if device == "cpu" else nullcontext():
        step.select(queries, state)
    centers, asked = codes_of(index)[1].double(), queries.double().view(1, 2, 4, 96)
    want = torch.einsum("bgsd,bghd->bgsh", centers, asked)
    terms = torch.einsum("bgsd,bghd->bgsh", centers.abs(), asked.abs())
    got = step.products.view(1, 2, -1, 4)[:, :, : want.shape[2]].double()
    assert want.shape[2] == 3
    assert ((got - want).abs() <= 8 * torch.finfo(torch.float32).eps * terms).all()


@pytest.mark.parametrize("device", DEVICES)
def test_queries_may_begin_anywhere(device):
    """Kernels read 16 bytes of a query in one load."""
    case, count, options = CASES["bfloat16"]
    index, layout, state, _kept, k = setting(case, count, device=device, **options)
    queries = case.queries().to(device)
    shifted = queries.new_zeros(queries.numel() + 1)[1:].view(queries.shape)
    shifted.copy_(queries)
    assert shifted.data_ptr() % 16
    want, ids = run(index, layout, state, queries, k, device=device)
    got, its = run(index, layout, state, shifted, k, device=device)
    assert its == ids
    assert torch.equal(got, want)


@mostly_slow_on_cpu(
    "name, bad",
    sampled(["g4", "g12", "bfloat16"], [torch.nan, torch.inf, -torch.inf, 1e20])
    + [pytest.param("g2-D80", bad, marks=pytest.mark.slow) for bad in (torch.nan, 1e20)],
    *(("g4", 1e20), ("bfloat16", -torch.inf)),
    indirect=False,
)
def test_a_query_out_of_range_is_told_and_harms_no_other_group(name, bad, device):
    case, count, options = CASES[name]
    index, layout, state, _kept, k = setting(case, count, device=device, **options)
    wrong, queries = torch.zeros((), dtype=torch.int32, device=device), case.queries().to(device)
    state = replace(state, wrong=wrong)
    want, ids = run(index, layout, state, queries, k, device=device)
    queries[-1, -1, 3] = min(LARGEST, torch.finfo(case.dtype).max)
    run(index, layout, state, queries, k, device=device)
    assert int(wrong) == 0
    queries[-1, -1, 3] = bad
    got, its = run(index, layout, state, queries, k, device=device)
    assert int(wrong) == 1
    assert its[:-1] == ids[:-1]
    assert [len(set(row)) for row in its] == [k] * len(its)
    assert min(map(min, its)) >= 0
    assert max(map(max, its)) < count
    group = case.q_heads // case.kv_heads
    others = [part.flatten(0, 1)[:-group] for part in (got, want)]
    torch.testing.assert_close(*others, rtol=1e-2, atol=1e-2)  # rows come in any order
    run(index, layout, state, torch.zeros_like(queries), k, device=device)
    assert int(wrong) == 1  # until somebody has read the flag
    run(index, layout, replace(state, wrong=None), queries, k, device=device)


@pytest.mark.skipif(not emulator.available(), reason="no g++ to emulate with")
def test_neither_the_order_of_threads_nor_of_blocks_changes_a_bit():
    case, count, _ = CASES["g4"]
    index, layout, state, _kept, k = setting(case, count)
    found = [
        run(index, layout, state, case.queries(), k, order=order)
        for order in ("forward", "backward", "random")
    ]
    for output, ids in found[1:]:
        assert ids == found[0][1]
        assert torch.equal(output, found[0][0])


@pytest.mark.skipif(not emulator.available(), reason="no g++ to emulate with")
def test_a_batch_equals_its_rows():
    case = Case(q_heads=4, kv_heads=2, head_dim=64, batch=3)
    index, layout, state, _kept, k = setting(case, 500)
    queries = case.queries()
    output, ids = run(index, layout, state, queries, k)
    for b in range(3):
        some = slice(b, b + 1)
        parts = {
            name: getattr(state, name)[some].contiguous()
            for name in (
                "codes",
                "rows",
                "valid",
                "wanted",
                "counted",
                "weight_scale",
                "resident",
                "resident_mask",
            )
        }
        alone = replace(state, **parts)
        one, its = run(index, layout, alone, queries[some].contiguous(), k)
        assert its == ids[2 * b : 2 * b + 2]
        torch.testing.assert_close(one[0], output[b], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (dict(q_heads=34, kv_heads=2), "q_heads: got 17 per KV head, allowed are up to 16"),
        (dict(policy="union"), "group: got 'union', allowed is"),
    ],
    ids=str,
)
def test_what_the_kernels_do_not_serve_is_refused(options, message):
    policy = options.pop("policy", "mean_share")
    case = replace(Case(), head_dim=64, **options)
    geometry = case.index("exact").geometry
    with pytest.raises(ValueError, match=message):
        SignVotesStep(geometry, Layout(64, 3), batch=1, k=5, most=20, policy=policy)


@on_devices_slowly
def test_rows_that_were_fetched_are_read_from_the_cache(device):
    case = Case(q_heads=8, kv_heads=2, head_dim=64, batch=2)
    index, layout, state, kept, k = setting(case, 700, device=device)
    cache = RowCache(4, state.row_bytes, torch.device(device), capacity=64)
    cached = replace(state, cache=cache)
    queries = case.queries().to(device)
    plain = run(index, layout, state, queries, k, device=device)
    first = run(index, layout, cached, queries, k, device=device)
    assert first[1] == plain[1]
    close = partial(torch.testing.assert_close, rtol=1e-5, atol=1e-5)  # rows come in any order
    close(first[0], plain[0])
    assert cache.hit_rate() == 0
    held = (cache.tags >= 0).sum(1).tolist()
    kept[1].fill_(float("nan"))  # rows on the host: this call reads what the cache stored before
    if held == [k] * 4:
        again = run(index, layout, cached, queries, k, device=device)
        close(again[0], plain[0])
        assert cache.hit_rate() == 0.5
    cache.forget()
    assert run(index, layout, cached, queries, k, device=device)[0].isnan().any()


@on_devices_slowly
@pytest.mark.parametrize("rows", mostly_slow([4, 16, 1024], 16))
def test_a_cache_of_any_size_changes_no_output(rows, device):
    """The cache may be smaller than a step's rows: those that find no slot are fetched."""
    case = Case(q_heads=4, kv_heads=2, head_dim=64, dtype=torch.bfloat16)
    index, layout, state, _kept, k = setting(case, 900, device=device)
    cache = RowCache(2, state.row_bytes, torch.device(device), capacity=rows)
    for seed in range(6):
        queries = case.queries(seed=seed % 4).to(device)
        got = run(index, layout, replace(state, cache=cache), queries, k, device=device)
        want = run(index, layout, state, queries, k, device=device)
        assert got[1] == want[1]
        torch.testing.assert_close(got[0], want[0], rtol=1e-2, atol=1e-2)  # rows come in any order
    looked_up, found = cache.counts.sum(0).tolist()
    assert looked_up == 6 * 2 * k
    assert found >= (2 * 2 * k if rows == 1024 else 0)
    tags = cache.tags[cache.tags >= 0]
    assert len(tags.unique()) >= len(tags) / 2  # an id is in at most one slot of its KV head


@pytest.mark.parametrize("rows", [0, 2, 12])
def test_sizes_of_a_cache_are_checked(rows):
    with pytest.raises(ValueError, match=f"capacity: got {rows}, allowed is"):
        RowCache(1, 256, torch.device("cpu"), capacity=rows)
