"""Kernels of a decode step over latents with many heads, compared with their reference
(`kvindex.pariskv.decode_step`).

Each stage of the reference gets what the kernels before it have written, so integers must be equal
and floats must agree up to rounding. On a CPU, kernels are emulated.
"""

from dataclasses import replace
from functools import cache, partial

import pytest
import torch

from kvindex.ops import priority
from kvindex.pariskv import decode_step
from kvindex.pariskv.decode_step import Prepared, SamplingTerms, Scanned, Selected
from kvindex.pariskv.sign_votes import center_products, planes_of, sample_of, thresholds_of
from kvindex.pariskv.step_state import EMPTY, id_of, vote_of
from kvindex_cuda.pariskv.steps.latents import LatentsStep, tile_of
from tests.cuda.buffers import addressed, places_of_words
from tests.cuda.devices import on, on_devices
from tests.support.helpers import Case, left_padding
from tests.support.steps import Layer

LATENT = dict(kv_heads=1, value_in_key=True)
SMALL = Case(20, head_dim=128, value_dim=96, **LATENT)
LARGE = Case(16, head_dim=576, value_dim=512, dtype=torch.bfloat16, **LATENT)
MANY = Case(128, head_dim=128, value_dim=96, dtype=torch.bfloat16, batch=2, **LATENT)
SAMPLING = dict(preset="sampled", least_candidates=1)
CASES = {
    "h20": (SMALL, 900, {}),
    "h20-drawn": (SMALL, 900, SAMPLING),
    "h16-D576": (LARGE, 600, SAMPLING),
    "h8-D576": (replace(LARGE, q_heads=8), 300, {}),
    "h2-D576-drawn": (replace(LARGE, q_heads=2), 300, SAMPLING),
    "h128": (MANY, 600, {}),
    "h128-drawn": (MANY, 600, SAMPLING),
    "h128-D576": (replace(LARGE, q_heads=128), 300, {}),
    "padding": (MANY, 600, dict(pads=[0, 90])),
    "padding-drawn": (MANY, 600, dict(SAMPLING, pads=[600, 90])),
    "ties": (SMALL, 1500, dict(ties=True, beta=0.9)),
    "ties-drawn": (SMALL, 900, dict(SAMPLING, ties=True)),
    "softcap": (replace(SMALL, softcap=5.0), 500, {}),
    "max_share": (SMALL, 500, dict(group="max_share")),
    "int8": (SMALL, 500, dict(row_codec="int8")),
    "precise": (replace(SMALL, q_heads=36), 500, dict(preset="precise")),
    "h17": (replace(SMALL, q_heads=17, head_dim=72, value_dim=40), 500, {}),
    "full": (SMALL, 900, dict(capacity=100)),
    "full-drawn": (SMALL, 900, dict(SAMPLING, capacity=400)),
    "one": (SMALL, 1, {}),
    "one-drawn": (SMALL, 1, SAMPLING),
    "few-drawn": (SMALL, 15, SAMPLING),
    "no-warpgroups": (SMALL, 900, dict(warpgroups=0)),
    "h16-no-warpgroups": (LARGE, 300, dict(SAMPLING, warpgroups=0)),
    "rows-2100": (SMALL, 2600, dict(SAMPLING, k=2100, refine_factor=1)),
}
SLOW = {
    "h128-D576",
    "h8-D576",
    "h2-D576-drawn",
    "rows-2100",
    "precise",
    "h128-drawn",
    "ties-drawn",
    "padding",
    "one-drawn",
}
SLOW |= {"h128", "h17", "padding-drawn", "softcap", "h16-no-warpgroups"}


@cache
def ran(name, device, order="forward"):
    """A layer, and the step that kernels have run."""
    case, count, options = CASES[name]
    options = dict(preset="fast") | options
    pads, capacity = options.pop("pads", None), options.pop("capacity", None)
    by_warpgroups = options.pop("warpgroups", 1)
    keys, values = case.tokens(count + 40)
    if options.pop("ties", False):
        keys[:, :, 5:] = keys[:, :, 5:6]
        values = keys[..., : case.value_dim].clone()
    valid = None if pads is None else left_padding(pads, count)
    layer = Layer.of(case, count, tokens=(keys, values), valid=valid, **options)
    c = layer.config
    step = LatentsStep(
        replace(c.geometry, device=torch.device(device)),
        c.layout,
        most=max(1, int(layer.state.wanted.max())),
        batch=case.batch,
        k=layer.k,
        multiprocessors=4,
        seed=c.seed,
        policy=c.policy,
        query_max=c.query_max,
        centered=c.centered,
        sampled=c.sampled,
        tempered=c.tempered,
        together=layer.state.regression is not None,
    )
    step.capacity = capacity or step.capacity
    step._by_warpgroups["WARPGROUPS"] &= by_warpgroups
    state, wrong, _blocks = addressed(layer.state, device)
    with on(device, **(dict(order=order) if device == "cpu" else {})):
        step(layer.queries.to(device), state)
    assert not wrong
    return layer, step


def rounded(pieces, heads, width):
    """Rounded queries `[B, heads, width]`, read in the layout of byte_votes.cuh."""
    order = [lane % 2 * 16 + lane // 2 % 4 * 4 + lane // 8 for lane in range(32)]
    halves = pieces.view(len(pieces), -1, 2, pieces.shape[2], 16)  # 32 coordinates, heads
    words = halves.transpose(2, 3).flatten(3)[..., order]
    return words.transpose(1, 2).flatten(2)[:, :heads, :width]


class Found:
    """Return what the kernels wrote, in the reference's form, for one group."""

    def __init__(self, layer, step):
        g, B = layer.config.geometry, len(layer.queries)
        tile, tiles = tile_of(g.q_heads), g.q_heads // tile_of(g.q_heads)

        def heads(part):  # of tiles: `[B, tiles, room for the heads of a tile, ...]`
            return part.cpu().view(B, tiles, *part.shape[1:])[:, :, :tile].flatten(1, 2)[:, None]

        integers = rounded(step.integers.cpu(), g.q_heads, g.head_dim)[:, None].int()
        planes = planes_of(integers, layer.config.largest)
        thresholds, bases, shifts = (
            part.cpu()[:, None] for part in (step.thresholds[:B], step.bases, step.shifts)
        )
        halves = step.operands.cpu().view(B, tiles, -1).view(torch.float16)
        operands = halves[:, :, places_of_words(tile, g.head_dim)].flatten(1, 2)[:, None]
        sampling = None
        if layer.config.sampled:
            gains, totals = heads(step.scales).unbind(-1)
            sampling = SamplingTerms(gains, totals, step.seeds.cpu()[:, None].long() & 0xFFFFFFFF)
        self.prepared = Prepared(
            planes=planes,
            sums=heads(step.sums),
            units=heads(step.units),
            operands=operands,
            ups=heads(step.ups),
            sample=step.sample.cpu()[:B, None],
            thresholds=thresholds,
            bases=bases,
            shifts=shifts,
            wrong=torch.zeros(()),
            sampling=sampling,
        )
        blocks = -(-layer.state.tokens // 256)
        self.products = step.products[:, None, :blocks].cpu()
        self.counts = step.counts.cpu()[:, None]
        there = torch.arange(step.capacity) < self.counts[..., None]
        raw = step.list.cpu().flatten()[: B * step.capacity].view(B, 1, -1)
        entries = torch.where(there, raw ^ EMPTY, EMPTY)
        self.scanned = Scanned(
            counts=self.counts,
            list=entries.sort(-1, descending=True).values[..., : int(self.counts.max())],
            histogram=step.hist.cpu().view(B, 1, -1),
            products=self.products,
        )
        self.votes = step.votes.cpu()[:, None, : layer.state.tokens]
        counts = step.candidate_counts.cpu()
        raw = step.candidates.cpu().flatten()[: B * step.capacity].view(B, -1)
        self.candidates = [row[:n] ^ EMPTY for row, n in zip(raw, counts, strict=True)]
        flat = step.estimates.cpu().flatten()[: B * step.capacity * g.q_heads]
        estimates = flat.view(B, -1, g.q_heads)
        self.estimates = [row[:n] for row, n in zip(estimates, counts, strict=True)]
        found, k = step.found.cpu(), step.k
        none = torch.arange(k) >= found[:, None]
        ids, scores = step.ids.cpu().masked_fill(none, 2**62), step.scores.cpu()
        weights = scores if step.weights is None else step.weights.cpu()
        if k > 2048:  # kernels write them in any order
            ids, order = ids.sort(-1)
            scores, weights = scores.gather(-1, order), weights.gather(-1, order)
        scores, weights = (part.masked_fill(none, -torch.inf) for part in (scores, weights))
        self.selected = Selected(
            ids.masked_fill(ids == 2**62, -1)[:, None],
            scores[:, None],
            found[:, None],
            None if step.weights is None else weights[:, None],
        )


def each_case(test):
    names = [pytest.param(n, marks=[pytest.mark.slow] if n in SLOW else []) for n in CASES]
    return on_devices(pytest.mark.parametrize("name", names)(test))


@each_case
def test_votes_of_all_keys_are_the_twins(name, device):
    layer, step = ran(name, device)
    found = Found(layer, step)
    want = decode_step.ranked(layer.state, found.prepared, found.products, layer.config)
    assert torch.equal(found.votes, want)
    assert torch.equal(found.prepared.sample, sample_of(want))
    for name, part in thresholds_of(sample_of(want), layer.state, layer.config).items():
        assert torch.equal(getattr(found.prepared, name), part)
    products = center_products(layer.queries, layer.state, layer.config)
    torch.testing.assert_close(found.products, products, rtol=1e-5, atol=1e-4)


@each_case
def test_what_a_query_is_made_of_is_the_twins(name, device):
    layer, step = ran(name, device)
    mine, want = (
        Found(layer, step).prepared,
        decode_step.prepare_query(layer.queries, layer.state, layer.config),
    )
    torch.testing.assert_close(mine.units, want.units, rtol=1e-4, atol=0)
    exact, near = ((part.operands.float().sum(-1) / part.ups[..., None]) for part in (want, mine))
    torch.testing.assert_close(near, exact, rtol=1e-3, atol=1e-4)
    if layer.config.sampled:
        assert torch.equal(mine.sampling.seeds, want.sampling.seeds)
        torch.testing.assert_close(mine.sampling.totals, want.sampling.totals, rtol=1e-4, atol=16)


@each_case
def test_the_best_keys_are_candidates(name, device):
    layer, step = ran(name, device)
    found, state = Found(layer, step), layer.state
    listed = (found.votes >= found.prepared.thresholds[..., None]).sum(-1)
    assert torch.equal(found.counts, listed.int())
    target = state.target[:, 0].tolist()
    for b, entries in enumerate(found.candidates):
        votes = found.votes[b, 0]
        if layer.config.sampled:
            limits = priority.thresholds(found.votes[b : b + 1], state.wanted[b : b + 1])[0, 0]
            want = (votes >= limits[1]).nonzero()[:, 0].tolist()
            assert step.cuts[b].tolist() == limits.tolist()
        else:
            order = votes.long().argsort(descending=True, stable=True)
            want = sorted(order[: target[b]].tolist())
        assert sorted(id_of(entries).tolist()) == want
        assert torch.equal(vote_of(entries).int(), votes[id_of(entries)])


@each_case
def test_estimates_and_rows_are_the_twins(name, device):
    layer, step = ran(name, device)
    found, c = Found(layer, step), layer.config
    reranked = decode_step.rerank(layer.state, found.prepared, found.scanned, c)
    if name.startswith("full") and not c.sampled:
        scanned = decode_step.list_keys(layer.state, found.prepared, found.products, c)
        reranked = decode_step.rerank(layer.state, found.prepared, scanned, c)
    for b, entries in enumerate(found.candidates):
        mine = dict(zip(id_of(entries).tolist(), found.estimates[b], strict=True))
        ids = id_of(reranked.candidates[b, 0]).tolist()
        theirs = zip(ids, reranked.estimates[b, 0], strict=True)
        pairs = [(mine[i], row) for i, row in theirs if i in mine]
        assert len(pairs) == len(mine)
        if pairs:
            got, want = (torch.stack(part) for part in zip(*pairs, strict=True))
            torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-4)
    want = decode_step.select_rows(layer.state, reranked, step.k, c, found.prepared.sampling)
    got = found.selected
    assert torch.equal(got.found, want.found)
    same = got.ids == want.ids
    assert same.float().mean() > 0.99 or name.startswith("ties")  # nearly equal scores
    if not name.startswith("ties"):
        close = partial(torch.testing.assert_close, rtol=1e-4, atol=1e-4)
        close(got.scores[same], want.scores[same])
        if c.sampled:
            close(got.weights[same], want.weights[same])


@each_case
def test_attention_is_the_twins(name, device):
    layer, step = ran(name, device)
    found = Found(layer, step)
    want = decode_step.attend(layer.queries, layer.state, found.selected, layer.config)
    tolerance = dict(rtol=1e-2, atol=1e-2) if step.output.dtype != torch.float32 else {}
    torch.testing.assert_close(step.output.cpu(), want.output, **tolerance)
    torch.testing.assert_close(step.lse.cpu(), want.lse, rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("order", ["backward", "random"])
@pytest.mark.parametrize("name", ["h20", "h20-drawn"])
def test_any_order_of_threads_gives_the_same(name, order):
    _, first = ran(name, "cpu")
    _, other = ran(name, "cpu", order)
    assert torch.equal(first.ids, other.ids)
    assert torch.equal(first.output, other.output)
    assert torch.equal(first.lse, other.lse)


def test_more_kv_heads_are_refused():
    case = Case(40, 2, 64, 32, value_in_key=True)
    layer = Layer.of(case, 10, preset="fast")
    with pytest.raises(ValueError, match="kv_heads: got 2, allowed is 1"):
        LatentsStep(layer.config.geometry, layer.config.layout, most=1, batch=1, k=1)
