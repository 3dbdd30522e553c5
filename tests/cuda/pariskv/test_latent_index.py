"""Indexes of latents with many heads on kernels, compared with the same in plain torch."""

from contextlib import nullcontext
from dataclasses import replace

import pytest
import torch

from kvindex.core.protocol import Attends, CapturesStep, DecodesStep, ErrorLimit, LimitsSteps
from kvindex.core.resident import ResidentRows
from kvindex.layer import AttentionLayer
from kvindex.pariskv import decode_step
from kvindex.testing.contract.attending import check_attention_where_few_tokens_are_valid
from kvindex_cuda.pariskv.dispatch import kind_of, refusal
from kvindex_cuda.pariskv.steps.latents import LatentsStep
from tests.cuda import emulator
from tests.cuda.buffers import addressed
from tests.cuda.devices import (
    DEVICES,
    mostly_slow_on_cpu,
    on,
    on_devices_slowly,
    slow_on_cpu,
    torch_ops_and_an_executor,
)
from tests.cuda.launches import Launches
from tests.cuda.pariskv.test_pool import joined
from tests.support.helpers import (
    ROUNDED,
    Case,
    assert_same_hits,
    follow_changes,
    mostly_slow,
    part,
    sampled,
)
from tests.support.steps import Layer

CASE = Case(20, 1, 64, 48, batch=2, value_in_key=True)
OPTIONS = dict(least_candidates=1)
LAUNCHES = ["prepare_latents", "sample_latents", "vote_latents", "take_candidates"]
LAUNCHES += ["estimate_latents", "select_latents", "attend_latents", "merge_latents"]


@pytest.fixture(params=DEVICES)
def device(request, monkeypatch):
    """The torch ops together with the fused step. On a CPU, kernels are emulated."""
    torch_ops_and_an_executor(monkeypatch, on_host=request.param == "cpu")
    with emulator.emulated() if request.param == "cpu" else nullcontext():
        yield request.param


def pair(device, case=CASE, **options):
    options = OPTIONS | dict(device=device) | options
    return [case.index("pariskv", backend=name, **options) for name in ("cuda", "torch")]


def assert_same(mine, theirs, queries, k=20):
    assert "executor: fused latents" in mine.explain()
    assert_same_hits(mine.search(queries, k=k), theirs.search(queries, k=k), close=ROUNDED)


AUTO = dict(k="auto", error=0.5, sink=4, local_window=16, update_every=64, dense_below=64)


@mostly_slow_on_cpu(
    "heads, length", [(20, 700), (4, 700), (20, 40), (12, 3000)], (20, 700), (4, 700)
)
def test_the_error_determines_the_number_of_rows(device, heads, length):
    """A search finds the rows of plain torch, for few heads by the kernels for plain keys."""
    case = replace(CASE, q_heads=heads)
    mine, theirs = pair(device, case, least_candidates=400)
    for index in (mine, theirs):
        index.append(*(piece.to(device) for piece in case.tokens(length)))
    queries, counts = 2 * case.queries().to(device), set()
    for variance in (30.0, 3.0, 1.0, 0.3, 0.1, 0.03, 0.0):
        for lse in (None, torch.randn(2, heads, device=device) + 3):
            limit = ErrorLimit(torch.full((2, 1), variance, device=device), lse)
            found, want = (one.search_within(queries, k=300, limit=limit) for one in (mine, theirs))
            assert_same_hits(found, want, close=ROUNDED)
            counts |= {*(found.ids >= 0).sum(-1).flatten().tolist()}
    assert len(counts) >= (2 if length == 40 else 4)


@mostly_slow_on_cpu("heads, sinks", [(20, False), (4, False), (20, True)], (20, False))
def test_a_layer_chooses_the_number_of_rows_as_in_plain_torch(device, heads, sinks):
    case = replace(CASE, q_heads=heads)
    indexes = pair(device, case, preset="sampled")
    layers = [AttentionLayer(index, **AUTO) for index in indexes]
    assert indexes[0].capability(LimitsSteps) is not None
    tokens = [piece.to(device) for piece in case.tokens(420)]
    logits = torch.linspace(-1, 3, heads, device=device) if sinks else None
    for t, stop in [(0, 400), *((t, t + 1) for t in range(400, 420))]:
        queries = 2 * case.tensor(t, 2, heads, stop - t, 64).to(device)
        given = queries, *part(tokens, t, stop)
        got, want = (layer.step(*given, sink_logits=logits) for layer in layers)
        torch.testing.assert_close(got, want, rtol=1e-3, atol=1e-3)
    mine, theirs = (layer.traffic for layer in layers)
    assert mine.steps == theirs.steps == 20
    assert torch.equal(mine.found.cpu(), theirs.found.cpu())
    assert (mine.found > 0).sum() > 1


def test_a_step_with_a_limit_is_one_launch_more(device):
    index = pair(device)[0]
    index.append(*(piece.to(device) for piece in CASE.tokens(300)))
    resident = resident_of(index)
    limit = ErrorLimit(torch.ones(2, 1, device=device))
    with Launches() as launches:
        index.attend(CASE.queries().to(device), resident, k=20, limit=limit)
    assert launches.names[-9:] == ["resident_latents", *LAUNCHES]


@slow_on_cpu
@pytest.mark.parametrize("preset", ["fast", pytest.param("sampled", marks=pytest.mark.slow)])
def test_it_follows_appends_truncation_reordering_and_reset(device, preset):
    mine, theirs = pair(device, preset=preset)
    follow_changes(mine, theirs, CASE, device, assert_same)


@pytest.mark.slow
def test_it_attends_where_few_tokens_are_valid(device):
    case = replace(CASE, device=device)
    options = OPTIONS | dict(preset="sampled", backend="cuda")
    check_attention_where_few_tokens_are_valid(
        lambda **others: case.index("pariskv", **options, **others), case
    )


@mostly_slow_on_cpu(
    "preset, rows", sampled(["fast", "sampled"], ["plain", "int8"]), ("fast", "plain")
)
def test_a_layer_attends_in_one_go(device, preset, rows):
    mine, theirs = pair(device, preset=preset, row_codec=rows)
    sizes = dict(k=20, sink=4, local_window=16, update_every=4, dense_below=64)
    layers = [AttentionLayer(index, **sizes) for index in (mine, theirs)]
    tokens = [piece.to(device) for piece in CASE.tokens(307)]
    for t, stop in [(0, 300), *((t, t + 1) for t in range(300, 307))]:
        queries = CASE.tensor(t, 2, 20, stop - t, 64).to(device)
        got, want = (layer.step(queries, *part(tokens, t, stop)) for layer in layers)
        torch.testing.assert_close(got, want, rtol=1e-3, atol=1e-3)
    assert "attend: in one go" in mine.explain()
    assert "cache" not in mine.explain()
    for name in ("rows_read", "bytes_fetched"):
        got, want = (float(vars(layer.traffic)[name]) for layer in layers)
        assert got == want, name
    for offered in (Attends, DecodesStep, CapturesStep):
        assert mine.capability(offered) is not None
        assert theirs.capability(offered) is None


def test_a_step_is_eight_launches(device):
    index = pair(device)[0]
    index.append(*(piece.to(device) for piece in CASE.tokens(300)))
    queries = CASE.queries().to(device)
    index.warm_up(k=20, tokens=300)
    resident = resident_of(index)
    with Launches() as launches:
        index.attend(queries, resident, k=20)
    assert launches.names == LAUNCHES


def resident_of(index):
    return ResidentRows(index.geometry, CASE.batch, 3)


def test_a_chosen_row_is_read_where_it_lies(device):
    case = replace(CASE, q_heads=4)
    indexes = [case.index("exact", backend=name, device=device) for name in ("cuda", "torch")]
    layers = [AttentionLayer(index, k=5, sink=4, local_window=16) for index in indexes]
    tokens = [piece.to(device) for piece in case.tokens(303)]
    ids = torch.tensor([299, 3, 7, 200, 298, -1, 150, 0], device=device).expand(2, 1, 1, -1)
    for layer in layers:
        layer.step(case.tensor(1, 2, 4, 300, 64).to(device), *part(tokens, 0, 300))
    for t in range(300, 303):
        query = case.tensor(t, 2, 4, 1, 64).to(device)
        with Launches() as launches:
            got, want = (layer.step(query, *part(tokens, t, t + 1), ids=ids) for layer in layers)
        torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-4)
        assert launches.names[:2] == ["attend_latents", "merge_latents"]


@on_devices_slowly
@pytest.mark.parametrize("preset", mostly_slow(["sampled", "fast"], "fast"))
def test_a_ragged_step_is_that_of_each_row_alone(preset, device):
    case, lengths = replace(CASE, batch=1), [700, 5, 256, 1]
    layers = [
        Layer.of(case, count, preset=preset, tokens=case.tokens(count + 40, seed), **OPTIONS)
        for seed, count in enumerate(lengths)
    ]
    config, state = layers[0].config, joined([layer.state for layer in layers])
    queries, k = case.queries(7, len(layers)), layers[0].k
    step = LatentsStep(
        replace(config.geometry, device=torch.device(device)),
        config.layout,
        most=int(state.wanted.max()),
        batch=len(layers),
        k=k,
        multiprocessors=2,
        ragged=True,
        seed=config.seed,
        query_max=config.query_max,
        centered=config.centered,
        sampled=config.sampled,
        tempered=config.tempered,
        together=state.regression is not None,
    )
    read, _, _blocks = addressed(state, device)
    for b, count in enumerate(lengths):
        for table in (read.codes, read.rows):
            table[b, -(-count // 256) :] = 0
    with on(device):
        step(queries.to(device), read)
    want = decode_step.decode_step(queries, state, k, config)
    torch.testing.assert_close(step.output.cpu(), want.output, rtol=2e-5, atol=2e-5)
    torch.testing.assert_close(step.lse.cpu(), want.lse, rtol=2e-5, atol=2e-5)
    assert torch.equal(step.found.cpu(), want.found[:, 0])


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (dict(), None),
        (dict(q_heads=128, head_dim=576, value_dim=512), None),
        (dict(q_heads=8, head_dim=576, value_dim=512), None),
        (dict(q_heads=8, head_dim=320, value_dim=256), None),
        (
            dict(q_heads=8, head_dim=512, value_dim=512, value_in_key=False),
            "head_dim: got 512, allowed is up to 352 for 'sign_votes'",
        ),
        (dict(q_heads=129), "q_heads: got 129, allowed is 128 a head"),
        (dict(q_heads=40, kv_heads=2), "kv_heads: got 2, allowed is 1 with 20 heads on each"),
        (dict(value_in_key=False), "q_heads: got 20, allowed is 16 a head"),
        (
            dict(q_heads=9, head_dim=320, value_in_key=False),
            "q_heads: got 9, allowed is 8 a head",
        ),
    ],
    ids=str,
)
def test_which_geometries_a_step_serves(change, said):
    index = replace(CASE, **change).index("pariskv")
    assert refusal(index.config, index.geometry) == said
    kind = None if said else "sign_votes" if change.get("head_dim") == 320 else "latents"
    assert kind_of(index.config, index.geometry) == kind
