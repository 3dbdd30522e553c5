"""Every kernel of a decode step, compared with its reference (`kvindex.pariskv.decode_step`).

Each stage of the reference gets what the kernels before it have written, so integers must be equal
and floats must agree up to rounding. Lists may have any order. On a CPU, kernels are emulated.
"""

from dataclasses import replace
from functools import cache, partial

import pytest
import torch

from kvindex.ops.codes import FACTOR
from kvindex.pariskv import decode_step, sign_regression, tiered_votes
from kvindex.pariskv.block_layout import BLOCK, places
from kvindex.pariskv.sign_votes import integers_of, sample_of, thresholds_of
from kvindex.pariskv.step_state import queries_of, rotated
from kvindex_cuda.pariskv.steps.sign_votes import SignVotesStep
from kvindex_cuda.pariskv.steps.tiered_votes import TieredVotesStep
from tests.cuda.buffers import Buffers, addressed
from tests.cuda.devices import mostly_slow_on_cpu, on
from tests.support.helpers import Case, left_padding, mostly_slow, slow_as
from tests.support.steps import Layer

CASES = {
    "g4": (Case(q_heads=8, kv_heads=2, head_dim=128, value_dim=128), 1500, {}),
    "g1-B2": (Case(q_heads=2, kv_heads=2, head_dim=64, batch=2), 700, dict(pads=[0, 90])),
    "g3-D96": (Case(q_heads=3, kv_heads=1, head_dim=96), 600, {}),
    "g12": (Case(q_heads=12, kv_heads=1, head_dim=64), 400, {}),
    "softcap": (Case(q_heads=4, kv_heads=2, head_dim=64, softcap=5.0), 500, {}),
    "ties": (Case(q_heads=4, kv_heads=2, head_dim=64), 500, dict(ties=True)),
    "max_share": (Case(q_heads=4, kv_heads=2, head_dim=64), 500, dict(group="max_share")),
}
FAST = CASES | {
    "bfloat16": (Case(q_heads=4, kv_heads=2, head_dim=64, dtype=torch.bfloat16), 500, {}),
    "precise": (Case(q_heads=4, kv_heads=2, head_dim=64), 500, dict(preset="precise")),
    "g5-127": (Case(q_heads=5, kv_heads=1, head_dim=128), 600, dict(query_max=85)),
    "int8": (Case(q_heads=4, kv_heads=2, head_dim=64), 500, dict(row_codec="int8")),
    "fp8": (Case(q_heads=4, kv_heads=2, head_dim=64), 500, dict(row_codec="fp8")),
    "257": (Case(q_heads=4, kv_heads=2, head_dim=64), 257, {}),
    "full": (Case(q_heads=4, kv_heads=2, head_dim=64), 500, dict(capacity=90, scales=0)),
    "one": (Case(q_heads=4, kv_heads=2, head_dim=64), 1, {}),
    # more groups than the scan has warps, each with its own weight scale
    "scales": (
        Case(q_heads=3, kv_heads=3, head_dim=32, batch=8),
        300,
        dict(scales=-10, multiprocessors=1),
    ),
}
SPARSE = dict(preset="sampled", least_candidates=1)
SAMPLING = ("g4", "g1-B2", "g3-D96", "g12", "softcap", "ties", "bfloat16", "257", "full", "one")
FAST |= {
    f"drawn-{name}": (FAST[name][0], FAST[name][1], FAST[name][2] | SPARSE)
    for name in (*SAMPLING, "scales", "precise")
}
FAST["drawn-full"][2].update(capacity=100, refine_factor=4)
# more candidates than a thread block of `select_rows` takes
FAST["drawn-finalists"] = (FAST["257"][0], 6000, dict(preset="sampled", k=290))
# more rows than are sorted
FAST["drawn-2100"] = (FAST["257"][0], 2600, dict(SPARSE, k=2100, refine_factor=1))
FAST["together"] = (*FAST["g4"][:2], dict(sign_decoder="regression"))
FAST["together-D120"] = (
    Case(q_heads=5, kv_heads=1, head_dim=120),
    1500,
    dict(sign_decoder="regression"),
)
FAST["alone"] = (FAST["257"][0], 700, dict(SPARSE, sign_decoder="mean", sampling="priority"))
FAST["drawn-D192"] = (Case(q_heads=5, kv_heads=1, head_dim=192), 600, SPARSE)
# a sequence of the batch without tokens
PADDED = Case(q_heads=4, kv_heads=2, head_dim=64, batch=2), 700
FAST["padding"] = (*PADDED, dict(pads=[700, 90]))
FAST["drawn-padding"] = (*PADDED, dict(SPARSE, pads=[700, 90]))
FAST["drawn-few"] = (FAST["257"][0], 900, dict(SPARSE, refine_factor=2))
ELSEWHERE = {"drawn-g3-D96": "drawn-D192", "drawn-g12": "g12", "drawn-bfloat16": "bfloat16"}
"""Shapes that are compiled again only for tests on a GPU, with the case that represents each."""
OWN = {"g3-D96", "g12", "g5-127", "scales", "drawn-scales", "drawn-D192", "together-D120"}
"""Shapes for which no fast test compiles kernels."""
EMULATED_SLOWLY = {"g1-B2", "drawn-g1-B2", "drawn-g4", "max_share", "int8", "fp8"}
"""Shapes and options for which further kernels are compiled, which other tests compile, too."""
OFTEN = [
    pytest.param(
        name, marks=slow_as(True) if name in ELSEWHERE else [pytest.mark.slow] * (name in OWN)
    )
    for name in FAST
]


@cache
def ran(name, preset, device):
    """A layer, and what the kernels of one of its steps have written."""
    case, count, options = FAST[name]
    options = dict(preset=preset) | options
    pads, capacity = options.pop("pads", None), options.pop("capacity", None)
    multiprocessors = options.pop("multiprocessors", 4)
    keys, values = case.tokens(count + 40)
    if options.pop("ties", False):
        keys[:, :, 5:] = keys[:, :, 5:6]
    if (least := options.pop("scales", None)) is not None:  # one power of two per head
        powers = torch.arange(case.batch * case.kv_heads) % 12 + least
        keys *= torch.exp2(powers.float()).view(*keys.shape[:2], 1, 1)
    valid = None if pads is None else left_padding(pads, count)
    layer = Layer.of(case, count, tokens=(keys, values), valid=valid, **options)
    config, sizes = layer.config, dict(batch=case.batch, k=layer.k, multiprocessors=multiprocessors)
    options = dict(seed=config.seed, policy=config.policy) | sizes
    geometry = replace(config.geometry, device=torch.device(device))
    if preset == "paper":
        step = TieredVotesStep(geometry, config.layout, most=count, **options)
    else:
        options |= dict(query_max=config.query_max, centered=config.centered)
        options |= dict(sampled=config.sampled, tempered=config.tempered)
        options |= dict(together=layer.state.regression is not None)
        behind = places()[1 + (count - 1) % BLOCK :]
        config.layout.views(layer.state.codes)["weights"][:, -1, :, behind] = 255
        step = SignVotesStep(geometry, config.layout, most=int(layer.state.wanted.max()), **options)
    step.capacity = capacity or step.capacity
    state, wrong, _blocks = addressed(layer.state, device)
    with on(device):
        step(layer.queries.to(device), state)
    return layer, Buffers(step, count, wrong)


def fast(test):
    """Run a test for each case of `fast` and `precise`, with a layer and what its kernels have
    written.
    """
    names = [case.values[0] for case in OFTEN if not case.marks]
    fast = set(names) - EMULATED_SLOWLY
    return mostly_slow_on_cpu("name", OFTEN, *fast, indirect=False)(test)


def paper(test):
    names = mostly_slow(CASES, *CASES.keys() - OWN)
    return mostly_slow_on_cpu("name", names, "g4", "ties", "max_share", indirect=False)(test)


def assert_equal(got, want, *names):
    for name in names:
        mine, theirs = getattr(got, name), getattr(want, name)
        assert mine.dtype == theirs.dtype, name
        assert torch.equal(mine, theirs), name


def assert_operands(got, layer):
    """Operands have 22 bits, of a query whose rotation adds up in another order."""
    directions, norms, wrong = rotated(layer.queries, layer.config)
    assert not wrong
    error = queries_of(got.operands, got.ups) - directions * norms[..., None]
    assert (error.abs() <= 2**-20 * norms[..., None]).all()


close = partial(torch.testing.assert_close, rtol=1e-5, atol=1e-5)


# fast and precise


@fast
def test_a_query_is_rotated_and_rounded(name, device):
    layer, kernels = ran(name, "fast", device)
    got = kernels.prepared
    want = decode_step.prepare_query(layer.queries, layer.state, layer.config)
    directions, norms, _ = rotated(layer.queries, layer.config)
    if (matrix := layer.state.regression) is not None:
        directions = sign_regression.voting(directions, matrix)
    peaks = directions.double().abs().amax(-1, keepdim=True)
    integers = integers_of(got.planes)
    exact = directions.double() * (layer.config.largest / peaks)
    assert ((integers - exact).abs() <= 0.5 + 1e-4).all()
    assert torch.equal(got.sums, integers.sum(-1, dtype=torch.int32))
    torch.testing.assert_close(got.units, want.units, rtol=2e-6, atol=0)
    unit = layer.config.level * layer.state.weight_scale[..., None] * norms * peaks[..., 0]
    unit = unit / (layer.config.largest * FACTOR)
    torch.testing.assert_close(got.units.double(), 1 / unit, rtol=2e-6, atol=0)
    assert_equal(got, want, "ups", "wrong")
    assert_operands(got, layer)


@fast
def test_the_sample_tells_the_threshold(name, device):
    layer, kernels = ran(name, "fast", device)
    got, products = kernels.prepared, kernels.scanned.products
    want = sample_of(decode_step.ranked(layer.state, got, products, layer.config))
    places = (part.unflatten(-1, (-1, 32)).sort(-1).values for part in (got.sample, want))
    assert torch.equal(*places)
    for part, tensor in thresholds_of(got.sample, layer.state, layer.config).items():
        assert torch.equal(getattr(got, part), tensor), part


@fast
def test_votes_come_to_one_scale_and_noise_has_a_seed(name, device):
    layer, kernels = ran(name, "fast", device)
    got = kernels.prepared.sampling
    want = decode_step.prepare_query(layer.queries, layer.state, layer.config).sampling
    assert (got is None) == (want is None) == (not layer.config.sampled)
    if want is not None:
        torch.testing.assert_close(got.gains, want.gains, rtol=2e-6, atol=0)
        torch.testing.assert_close(got.totals, want.totals, rtol=1e-5, atol=8)  # 1e-4 of an octave
        assert torch.equal(got.seeds, want.seeds)


@fast
def test_the_list_is_of_all_votes_from_the_threshold_on(name, device):
    layer, kernels = ran(name, "fast", device)
    got = kernels.scanned
    want = decode_step.list_keys(layer.state, kernels.prepared, got.products, layer.config)
    assert_equal(got, want, "counts", "histogram")
    if name.endswith("full"):
        assert (got.counts > got.list.shape[-1]).all()
        assert torch.isin(got.list, want.list).all()
    else:
        assert_equal(got, want, "list")
    want = decode_step.scan(layer.queries, layer.state, kernels.prepared, layer.config)
    centers = layer.config.layout.centers(layer.state.codes).double().norm(dim=-1)
    norms = layer.queries.double().norm(dim=-1).view(*centers.shape[:2], 1, -1)
    bound = 16 * torch.finfo(torch.float32).eps * centers[..., None] * norms
    assert ((got.products - want.products).abs() <= bound).all()


@fast
def test_candidates_and_their_estimates(name, device):
    layer, kernels = ran(name, "fast", device)
    got, scanned = kernels.reranked, kernels.scanned
    if name.endswith("full"):  # as if the list were too short
        scanned = replace(scanned, counts=torch.zeros_like(scanned.counts))
    want = decode_step.rerank(layer.state, kernels.prepared, scanned, layer.config)
    assert_reranked(got, want)
    assert_equal(got, want, "edge", "edge_counts", "cuts")
    close(got.edge_estimates, want.edge_estimates)


def assert_reranked(got, want):
    assert_equal(got, want, "candidates", "candidate_counts")
    close(got.estimates, want.estimates, atol=4e-5)
    sums = (part.buckets.double() for part in (got, want))
    torch.testing.assert_close(*sums, rtol=1e-4, atol=1)


@fast
def test_the_best_rows(name, device):
    assert_selected(*ran(name, "fast", device))


@fast
def test_attention_over_them(name, device):
    assert_attended(*ran(name, "fast", device))


def assert_selected(layer, kernels):
    """In these cases, scores are equal or further apart than rounding errors."""
    got = kernels.selected
    sampling = None if isinstance(kernels.step, TieredVotesStep) else kernels.prepared.sampling
    want = decode_step.select_rows(layer.state, kernels.reranked, layer.k, layer.config, sampling)
    assert_equal(got, want, "ids", "found")
    close(got.scores, want.scores)
    if sampling is not None:
        close(got.weights, want.weights, rtol=1e-4, atol=1e-4)


def assert_attended(layer, kernels):
    got = kernels.attended
    want = decode_step.attend(layer.queries, layer.state, kernels.selected, layer.config)
    assert_equal(got, want, "found")
    bound = 1e-5 if got.output.dtype == torch.float32 else 1e-2
    assert got.output.dtype == want.output.dtype
    close(got.lse, want.lse)
    torch.testing.assert_close(got.output, want.output, rtol=bound, atol=bound)


# paper


@paper
def test_a_table_of_the_query(name, device):
    """Tables are equal except for centroids whose order depends on the last bit of a
    rotated query.
    """
    layer, kernels = ran(name, "paper", device)
    got = kernels.query
    want = tiered_votes.query_table(layer.queries, layer.state, layer.config)
    assert_equal(got, want, "ups", "wrong")
    assert_operands(got, layer)
    assert got.table.shape == want.table.shape
    assert (got.table != want.table).float().mean() < 1e-3


@paper
def test_votes_of_all_keys(name, device):
    layer, kernels = ran(name, "paper", device)
    got = kernels.voted
    want = tiered_votes.vote(layer.state, kernels.query, layer.config)
    assert_equal(got, want, "votes", "totals")
    pieces = -(
        -layer.state.tokens // tiered_votes.CHUNK
    )  # one chunk each; no kernel reads the others
    assert torch.equal(got.pieces[..., :pieces, :], want.pieces[..., :pieces, :])


@paper
def test_candidates_of_any_head(name, device):
    layer, kernels = ran(name, "paper", device)
    want = tiered_votes.candidates(layer.state, kernels.voted)
    assert_equal(kernels.chosen, want, "candidates", "candidate_counts")


@paper
def test_estimates_with_a_weight_for_each_subspace(name, device):
    layer, kernels = ran(name, "paper", device)
    want = tiered_votes.rerank_blocks(layer.state, kernels.query, kernels.chosen, layer.config)
    assert_reranked(kernels.reranked, want)


@paper
def test_the_best_rows_of_paper(name, device):
    assert_selected(*ran(name, "paper", device))


@paper
def test_attention_over_those_of_paper(name, device):
    assert_attended(*ran(name, "paper", device))
