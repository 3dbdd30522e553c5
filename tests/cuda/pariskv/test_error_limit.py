"""With a limit of the error, kernels select as many rows as the search in plain torch.

The number of rows may differ only if an expected error is within a thousandth of the limit.
"""

import math

import pytest
import torch

import kvindex
from kvindex.core.capability import capability
from kvindex.core.graphs import GRAPHS
from kvindex.core.protocol import ErrorLimit, LimitsSteps
from kvindex.core.resident import ResidentRows
from kvindex.layer import AttentionLayer
from tests.cuda.devices import mostly_slow_on_cpu, slow_on_cpu
from tests.cuda.graphs import KeptGraph

# `graphs` is a fixture
from tests.cuda.pariskv.test_captured_step import CASE, PADDED, Replayed, graphs  # noqa: F401
from tests.support.helpers import Case, left_padding

G, H, D = 2, 6, 32


def pair(device, **options):
    """Return an index with kernels, and one in plain torch."""
    sizes = dict(q_heads=H, kv_heads=G, head_dim=D) | options
    mine = kvindex.create("pariskv", **sizes, backend="cuda", device=device)
    return mine, kvindex.create("pariskv", **sizes, backend="torch", device=device)


def filled(device, batch, length, pads=None, **options):
    """Return both indexes with the same keys and values, and queries."""
    indexes, make = pair(device, **options), torch.Generator().manual_seed(length)
    g = indexes[0].geometry
    keys = torch.randn(batch, g.kv_heads, length, g.head_dim, generator=make).to(device)
    values = torch.randn(batch, g.kv_heads, length, g.value_dim, generator=make).to(device)
    valid = None if pads is None else left_padding(pads, length).to(device)
    for index in indexes:
        index.append(keys.to(g.dtype), values.to(g.dtype), valid=valid)
    queries = 2 * torch.randn(batch, g.q_heads, g.head_dim, generator=make)
    return *indexes, queries.to(device, g.dtype)


def same(mine, theirs, queries, k, limit):
    """Return the number of rows that both indexes find. The order of rows may differ slightly."""
    found, expected = (each.search_within(queries, k=k, limit=limit) for each in (mine, theirs))
    (ids, scores, weights), others = (by_id(hits) for hits in (found, expected))
    assert torch.equal(ids, others[0])
    torch.testing.assert_close(scores, others[1], atol=1e-2, rtol=1e-3)  # errors of estimates
    torch.testing.assert_close(weights, others[2], atol=1e-2, rtol=1e-3)
    assert (found.scores[..., 1:] <= found.scores[..., :-1]).all()
    return (ids >= 0).sum(-1)


def by_id(hits):
    """Return ids, scores and log weights, sorted by id."""
    ids, order = hits.ids.sort(dim=-1)
    weights = hits.log_weight.unflatten(1, (G, -1))
    assert (weights == weights[:, :, :1]).all()
    return ids, hits.scores.gather(-1, order), weights[:, :, 0].gather(-1, order)


@mostly_slow_on_cpu(
    "batch, length, sampling",
    [(b, n, s) for b in (1, 2) for n in (40, 700, 3000) for s in ("tempered", "priority")],
    (2, 700, "tempered"),
    (1, 40, "priority"),
)
def test_the_same_rows_and_weights(device, batch, length, sampling):
    mine, theirs, queries = filled(device, batch, length, sampling=sampling)
    counts = set()
    for variance in (10.0, 0.3, 0.03, 0.003, 0.0):
        for lse in (None, torch.randn(batch, H).to(device) + 3):
            limit = ErrorLimit(torch.full((batch, G), variance, device=device), lse)
            counts |= {*same(mine, theirs, queries, 300, limit).flatten().tolist()}
    assert len(counts) >= 4


@mostly_slow_on_cpu("k", [5, 16, 17, 100, 1024], 17)
def test_any_largest_number_of_rows(device, k):
    mine, theirs, queries = filled(device, 1, 1300)
    for variance in (0.2, 0.0):
        limit = ErrorLimit(torch.full((1, G), variance, device=device))
        rows = same(mine, theirs, queries, k, limit)
        assert variance or (rows == k).all()
        step = mine._executor._newest(k, True).step
        for ids, count in zip(step.ids.tolist(), step.found.tolist(), strict=True):
            assert ids[:count] == sorted({*ids[:count]})
    assert torch.equal(mine.search(queries, k=90).ids, theirs.search(queries, k=90).ids)


@slow_on_cpu
def test_several_thread_blocks_share_the_candidates_of_a_head(device):
    """There are more candidates than registers of a thread block, and than rows it can sort."""
    mine, theirs, queries = filled(device, 1, 5000)
    for variance in (0.1, 0.003, 0.0):
        limit = ErrorLimit(torch.full((1, G), variance, device=device))
        same(mine, theirs, queries, 2100, limit)
    assert (mine._executor._newest(2100, True).step.found == 2100).all()


@slow_on_cpu
def test_sequences_have_their_own_limits_and_padding(device):
    mine, theirs, queries = filled(device, 3, 900, [0, 300, 880])
    limit = ErrorLimit(torch.tensor([[0.01, 1.0], [0.1, 0.0], [5.0, 0.05]], device=device))
    assert len({*same(mine, theirs, queries, 200, limit).flatten().tolist()}) > 3


@mostly_slow_on_cpu("k", [200, 1500], 200)
def test_nearly_all_candidates_have_tiny_weights(device, k):
    """With 1,500 rows, too many priorities are in coarse bins of the histogram to sort them."""
    mine, theirs = pair(device)
    one = torch.zeros(1, G, 1, D, device=device)
    one[..., 0] = 40 * D**0.5
    keys = torch.randn(1, G, 3500, D, device=device) / 50
    keys[:, :, 700:740] += one / one.norm(dim=-1, keepdim=True)
    for index in (mine, theirs):
        index.append(keys, keys)
    queries = one[:, :, 0].repeat_interleave(H // G, dim=1)
    limit = ErrorLimit(torch.full((1, G), 1e-5, device=device))
    assert (same(mine, theirs, queries, k, limit) == 48).all()


SHAPES = {
    "plain": dict(q_heads=4),
    "one head": dict(q_heads=2, head_dim=64, value_dim=32),
    "many heads": dict(q_heads=32, head_dim=64),
    "wide": dict(q_heads=4, head_dim=144, softcap=6.0),
    "float16": dict(q_heads=8, dtype=torch.float16),
}


@mostly_slow_on_cpu("shape", list(SHAPES), "plain", "wide")
@pytest.mark.parametrize("fewer", [False, True])
def test_resident_rows_have_a_part_of_the_attention_weight(device, shape, fewer):
    """Rows that the mask hides, or that come after the last row, do not count."""
    mine, theirs, queries = filled(device, 2, 800, **SHAPES[shape])
    g, rows = mine.geometry, 3 if fewer else 70
    resident = ResidentRows(g, 2, 90)
    resident.rows.fill_(math.nan)
    keys, values = (
        torch.randn(2, G, rows, size, device=device).to(g.dtype)
        for size in (g.head_dim, g.value_dim)
    )
    keys = keys + queries.view(2, G, -1, g.head_dim).mean(2, keepdim=True) / 8
    mask = left_padding([0, rows // 2], rows).to(device)
    resident.add(keys, values, mask)
    logits = queries.float().view(2, G, -1, g.head_dim) @ keys.float().mT * g.scale
    logits = logits if g.softcap is None else g.softcap * (logits / g.softcap).tanh()
    lse = logits.flatten(1, 2).masked_fill(~mask[:, None], -math.inf).logsumexp(-1)
    sinks = torch.randn(2, g.q_heads, device=device) + 2
    every = set()
    for variance in (0.3, 0.01, 1e-4, 1e-6):
        limits = torch.full((2, G), variance, device=device)
        for more in (None, sinks):
            whole = lse if more is None else torch.logaddexp(lse, more)
            hits = theirs.search_within(queries, k=200, limit=ErrorLimit(limits, whole))
            attended = mine.attend(queries, resident, k=200, limit=ErrorLimit(limits, more))
            assert torch.equal(attended.found, (hits.ids >= 0).sum(-1).int())
            expected = mine.attend_hits(queries, hits, resident)
            small = 5e-4 if g.dtype == torch.float32 else 2e-2  # estimates are rounded differently
            loose = dict(atol=small, rtol=small)
            torch.testing.assert_close(attended.output, expected.output, **loose)
            torch.testing.assert_close(attended.lse, expected.lse, atol=1e-4, rtol=1e-4)
            every |= {*attended.found.flatten().tolist()}
    assert len(every) > 1


def test_what_the_kernels_do_not_support_is_refused(device):
    sizes = dict(q_heads=2, kv_heads=1, head_dim=64, backend="cuda", device=device)
    paper = kvindex.create("pariskv", preset="paper", **sizes)
    assert capability(paper, LimitsSteps) is None
    mine, theirs, queries = filled(device, 1, 300)
    assert capability(theirs, LimitsSteps) is None
    assert capability(mine, LimitsSteps) is mine
    resident = ResidentRows(mine.geometry, 1, 4)
    with pytest.raises(ValueError, match=r"limit\.variance: got"):
        mine.attend(queries, resident, k=20, limit=ErrorLimit(torch.ones(1, 3, device=device)))


def batched(device):
    """Return two indexes of one sequence each, and a function that runs a step of both.

    The function takes a limit, and returns the numbers of rows `[2, G]`.
    """
    indexes = [filled(device, 1, length)[0] for length in (400, 300)]
    geometry, batch = indexes[0].geometry, indexes[0].new_batch()
    resident = ResidentRows(geometry, 2, 8, ragged=True)
    queries = 2 * torch.randn(2, H, D, generator=torch.Generator().manual_seed(1)).to(device)

    def found(limit):
        rows = [one.batch_row(queries[i, None], k=200) for i, one in enumerate(indexes)]
        return batch.attend(rows, queries, resident, k=200, limit=limit).found.clone()

    return indexes, queries, found


@pytest.mark.parametrize("inference", [False, True])
def test_a_limit_may_change_in_place(device, inference):
    """Also if it was made in the inference mode of torch, where tensors do not count changes."""
    (one, _), queries, together = batched(device)
    resident = ResidentRows(one.geometry, 1, 8)

    def alone(limit):
        return one.attend(queries[:1], resident, k=200, limit=limit).found.clone()

    for found, batch in ((alone, 1), (together, 2)):
        with torch.inference_mode(inference):
            limit = ErrorLimit(torch.full((batch, G), 1e-6, device=device))
            assert found(limit).min() > 16
            limit.variance.fill_(1e6)
            assert (found(limit) == 16).all()


@pytest.mark.parametrize(
    ("limit", "said"),
    [
        (ErrorLimit(torch.ones(1, G)), r"limit\.variance: got shape \[1, 2\], allowed is \[B=2"),
        (ErrorLimit(torch.ones(2, 1)), r"limit\.variance: got shape \[2, 1\], allowed is \[B=2"),
        (ErrorLimit(torch.ones(2, G).double()), r"limit\.variance: got dtype torch\.float64"),
        (ErrorLimit(torch.ones(2, G, device="meta")), r"limit\.variance: got .*meta"),
        (ErrorLimit(torch.ones(2, G), torch.ones(2, H)), r"limit\.resident_lse: got a tensor"),
    ],
)
def test_a_batch_refuses_a_limit_that_does_not_fit(device, limit, said):
    """A later step gives what it would give without the error."""
    found, right = batched(device)[2], ErrorLimit(torch.full((2, G), 0.01, device=device))
    before = found(right)
    if limit.variance.device.type == "cpu":
        parts = limit.variance, limit.resident_lse
        limit = ErrorLimit(*(None if part is None else part.to(device) for part in parts))
    with pytest.raises(ValueError, match=said):
        found(limit)
    assert torch.equal(found(right), before)


AUTO = dict(k="auto", error=0.4, dense_below=70)
SIZES = dict(local_window=8, update_every=64)


@mostly_slow_on_cpu("sinks", [False, True], False)
def test_a_layer_decodes_with_kernels_as_in_plain_torch(device, sinks):
    layers = [AttentionLayer(index, sink=4, **SIZES, **AUTO) for index in pair(device)]
    make = torch.Generator().manual_seed(1)
    logits = torch.randn(H, generator=make).to(device) if sinks else None
    for step in range(40):
        tokens = 300 if step == 0 else 1
        shapes = ((1, heads, tokens, D) for heads in (H, G, G))
        token = [torch.randn(shape, generator=make).to(device) for shape in shapes]
        token[0] *= 2
        mine, theirs = (layer.step(*token, sink_logits=logits) for layer in layers)
        torch.testing.assert_close(mine, theirs, atol=1e-3, rtol=1e-3)
    mine, theirs = (layer.traffic for layer in layers)
    assert mine.steps == theirs.steps == 39
    assert torch.equal(mine.found.cpu(), theirs.found.cpu())
    assert (mine.found > 0).sum() > 1


@mostly_slow_on_cpu("sinks", [False, True], False)
def test_a_graph_of_a_layer_reads_the_limit_on_the_device(device, sinks, monkeypatch):
    """A chunk of tokens changes the limit between replays of the same graph."""
    index, other = (pair(device)[0] for _ in range(2))
    made = [AttentionLayer(index, sink=4, **SIZES, **AUTO) for index in (index, other)]
    made[1].graphs = False
    make = torch.Generator().manual_seed(1)
    logits = torch.randn(H, generator=make).to(device) if sinks else None
    counting = type("Counting", (KeptGraph,), dict(made=0, replays=0))
    if device == "cpu":
        monkeypatch.setitem(GRAPHS, device, counting)
    for tokens in (300, 1, 1, 1, 1, 20, 1, 1, 1):
        shapes = ((1, heads, tokens, D) for heads in (H, G, G))
        token = [torch.randn(shape, generator=make).to(device) for shape in shapes]
        mine, theirs = (layer.step(*token, sink_logits=logits) for layer in made)
        assert torch.equal(mine, theirs)
    assert device != "cpu" or (counting.made, counting.replays) == (1, 5)
    assert index._executor._replays.replay is not None
    assert torch.equal(*(layer.traffic.found for layer in made))


def auto(device, pads=None, **options):
    """Return a pair of layers, one of which decodes in a graph, and read 200 tokens."""
    case = CASE if pads is None else PADDED
    made = Replayed(device, case, pads, **SIZES | AUTO, **options)
    made.feed(200)
    return made


@mostly_slow_on_cpu("pads, sinks", [(None, False), ([0, 5], False), (None, True)], (None, False))
def test_a_graph_of_the_caller_reads_the_limit_on_the_device(device, pads, sinks):
    """A chunk of tokens, read between replays, changes the limit, but needs no other graph."""
    made = auto(device, pads, sinks=torch.randn(2) if sinks else None)
    made.feed(times=6)
    assert (made.made, made.replays) == (1, 5)
    before = made.layers[0]._wanted().variance
    made.feed(30)
    assert made.layers[0]._wanted().variance is not before
    made.feed(times=6)
    assert made.made == 1
    assert made.replays >= 10
    mine, theirs = (layer.traffic for layer in made.layers)
    assert float(mine.rows_read) == float(theirs.rows_read)
    assert torch.equal(mine.found, theirs.found)
    assert mine.found.sum() == mine.steps * (1 if pads is None else 2)


@slow_on_cpu
def test_a_graph_of_the_caller_searches_latents(device):
    case = Case(20, 1, 64, 48, value_in_key=True)
    made = Replayed(device, case, None, **SIZES | AUTO)
    made.feed(200)
    made.feed(times=5)
    made.feed(30)
    made.feed(times=4)
    assert made.made == 1
    mine, theirs = (layer.traffic for layer in made.layers)
    assert torch.equal(mine.found, theirs.found)
    assert mine.found.sum() == mine.steps >= 9


@slow_on_cpu
def test_a_rollback_restores_the_numbers_of_rows(device):
    made = auto(device)
    made.feed(times=4)
    layer = made.layers[0]
    before, point = layer.traffic.found, layer.checkpoint()
    made.feed(times=3)
    assert layer.traffic.found.sum() == before.sum() + 3
    layer.rollback(point)
    assert torch.equal(layer.traffic.found, before)


@slow_on_cpu
def test_a_fixed_number_of_rows_may_follow(device):
    made = auto(device)
    made.feed(times=3)
    error = made.layers[0].error
    for layer in made.layers:
        layer.k, layer.error = 20, None
    made.feed(times=3)
    assert made.made == 2
    for layer in made.layers:
        layer.k, layer.error = 1024, error
    made.feed(times=3)
    mine, theirs = (layer.traffic for layer in made.layers)
    assert float(mine.rows_read) == float(theirs.rows_read)
    found = [part.found.cpu() for part in (mine, theirs)]
    for part in found:
        part[20] = 0  # only steps without a graph count a fixed number
    assert torch.equal(*found)


def test_few_measured_outputs_need_a_normal_step(device):
    index, _ = pair(device)
    layer = AttentionLayer(index, **SIZES, **AUTO)
    keys, values = torch.randn(2, 1, G, 200, D, device=device)
    layer.append(keys, values)
    layer.step(*(torch.randn(1, heads, 1, D, device=device) for heads in (H, G, G)))
    assert "too few outputs are measured" in layer.capture_refusal()
    assert layer.prepare_replay() is None
