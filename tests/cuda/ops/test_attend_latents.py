"""Attention to latents in blocks, compared with float64. On a CPU, kernels are emulated."""

from dataclasses import replace
from itertools import product

import pytest
import torch

from kvindex.core.protocol import Attends, Hits
from kvindex.core.resident import ResidentRows
from kvindex.ops.attention import cap
from kvindex.storage.codecs import CODES, codec
from kvindex_cuda.memory.block_store import BlockStore
from kvindex_cuda.memory.slab_pool import DeviceAllocator
from kvindex_cuda.ops import attend_latents
from tests.cuda.devices import mostly_slow_on_cpu, on, on_devices, on_devices_slowly, poisoned
from tests.support.helpers import Case, mostly_slow

UNIT = 2.0**-24
"""Relative rounding error of float32."""

LATENT = dict(kv_heads=1, value_in_key=True)
CASES = {
    "h16": Case(16, head_dim=576, value_dim=512, dtype=torch.bfloat16, **LATENT),
    "h128": Case(128, head_dim=576, value_dim=512, dtype=torch.bfloat16, **LATENT),
    "h16-D128": Case(16, head_dim=128, value_dim=96, batch=2, **LATENT),
    "h128-D128": Case(128, head_dim=128, value_dim=96, dtype=torch.bfloat16, batch=2, **LATENT),
    "h128-D128-float32": Case(128, head_dim=128, value_dim=96, **LATENT),
    "h20-float16": Case(20, head_dim=72, value_dim=40, dtype=torch.float16, batch=2, **LATENT),
    "h5-softcap": Case(5, head_dim=24, value_dim=8, softcap=3.0, **LATENT),
    "g2": Case(80, 2, 64, 32, dtype=torch.bfloat16, value_in_key=True),
}
TOKENS, NEAR, K = 600, 37, 75
READ = ["plain", *CODES]
READ_FAST = [("h16", "plain"), ("h128", "int8"), ("h16-D128", "fp8"), ("h5-softcap", "plain")]


class Attending:
    """A store of `TOKENS` latents, resident rows of which one is masked, hits and queries."""

    def __init__(self, case, name, device, weighted):
        self.geometry = g = case.index("exact", device=device).geometry
        keys, values = (part.to(device) for part in case.tokens(TOKENS))
        self.store = BlockStore(g, DeviceAllocator(g.device), row_codec=name, max_tokens=1024)
        self.store.append(self.store.join(keys, values))
        self.keys = codec(name, g).decode(codec(name, g).encode(keys, values)).keys
        self.resident = ResidentRows(g, case.batch, NEAR + 3)
        self.resident.rows.fill_(float("nan"))
        self.beside, values = (part.to(device) for part in case.tokens(NEAR, seed=1))
        seen = torch.arange(NEAR, device=device).expand(case.batch, -1) != 4
        self.resident.add(self.beside, values, seen)
        self.queries = case.queries().to(device)
        generator = torch.Generator().manual_seed(3)
        order = torch.rand(case.batch, case.kv_heads, TOKENS, generator=generator).argsort(-1)
        ids, weights = order[..., :K].clone(), None
        ids[:, -1, 9:14] = -1
        if weighted:
            weights = 2 * torch.randn(case.batch, case.q_heads, K, generator=generator)
            weights[torch.rand(weights.shape, generator=generator) < 0.2] = float("-inf")
            weights[:, 0] = float("-inf")  # a head that sees only resident rows
            weights = weights.to(device)
        ids = ids.to(device)
        self.hits = Hits(ids, torch.zeros(ids.shape, device=device), weights)

    def attend(self):
        return self.store.attend(self.queries, self.hits, self.resident)

    def wanted(self):
        """Return output and log-sum-exp in float64, and the largest errors that the kernels may
        have.
        """
        g, ids = self.geometry, self.hits.ids
        some = self.keys.gather(2, ids.clamp_min(0)[..., None].expand(-1, -1, -1, g.head_dim))
        keys = torch.cat([some, self.beside], 2).double().repeat_interleave(g.group_size, 1)
        asked = self.queries.double()[:, :, None]
        logits = cap((asked * keys).sum(-1), g.scale, g.softcap)
        hidden = torch.nn.functional.pad(ids < 0, (0, NEAR))
        hidden[..., K:] = self.resident.mask[:, None, :NEAR] == 0
        if self.hits.log_weight is not None:
            logits[..., :K] += self.hits.log_weight
        logits = logits.masked_fill(hidden.repeat_interleave(g.group_size, 1), float("-inf"))
        # roundings: products, their sum in any order, scale, tanh, weight, subtraction of the
        # maximum
        spread = (asked * keys).abs().sum(-1) * g.scale * (g.head_dim + 4)
        seen = logits.masked_fill(logits == float("-inf"), 0).abs()
        off = UNIT * (spread + 8 * seen + 4 * (g.softcap or 0)).amax(-1)
        weights, values = logits.softmax(-1), keys[..., : g.value_dim]
        mean = (weights[..., None] * values.abs()).sum(2)
        rounding = torch.finfo(g.dtype).eps if g.dtype != torch.float32 else UNIT
        want, rows = (weights[..., None] * values).sum(2), keys.shape[2]
        # attention weights are rounded to the dtype, then the output
        bound = (torch.expm1(2 * off)[..., None] + UNIT * (rows + 16) + rounding) * mean
        bound = bound + rounding * want.abs() + 1e-30
        return want, bound, logits.logsumexp(-1), off + UNIT * (2 * rows + 32 + seen.amax(-1))

    def assert_near(self, got):
        want, bound, lse, off = self.wanted()
        assert ((got.output.double() - want).abs() <= bound).all()
        assert ((got.lse.double() - lse).abs() <= off).all()
        assert got.found.tolist() == (self.hits.ids >= 0).sum(-1).tolist()


@mostly_slow_on_cpu(
    "name, rows",
    mostly_slow(product(CASES, READ), *READ_FAST),
    *(one for one in READ_FAST if one[0] != "h128"),
    indirect=False,
)
@pytest.mark.parametrize("weighted", [False, True])
def test_latents_are_attended_to(name, rows, weighted, device, monkeypatch):
    one = Attending(CASES[name], rows, device, weighted)
    assert one.store.attends
    poisoned(monkeypatch)
    with on(device):
        one.assert_near(one.attend())


@on_devices
@pytest.mark.parametrize("name", mostly_slow(["h16-D128", "h20-float16", "g2"], "g2"))
def test_a_block_of_threads_takes_rows_in_turns(name, device, monkeypatch):
    monkeypatch.setattr(attend_latents, "LATENT_SPLITS", 2)
    one = Attending(CASES[name], "plain", device, True)
    with on(device, **(dict(order="random") if device == "cpu" else {})):
        one.assert_near(one.attend())


@on_devices_slowly
@pytest.mark.parametrize(
    ("name", "heads"), mostly_slow(product(["h128-D128", "g2"], [16, 64, 128]), ("h128-D128", 64))
)
def test_heads_come_in_parts(name, heads, device, monkeypatch):
    """If rows are on the host, each thread block serves all heads."""
    monkeypatch.setattr(attend_latents, "DEVICE_HEADS", heads)
    one = Attending(CASES[name], "plain", device, True)
    poisoned(monkeypatch)
    with on(device):
        one.assert_near(one.attend())


@on_devices
def test_of_no_visible_row_the_log_sum_exp_is_minus_infinity(device):
    one = Attending(CASES["h20-float16"], "plain", device, True)
    one.resident.mask.zero_()
    one.hits.ids[1] = -1
    with on(device):
        got = one.attend()
    assert (got.lse[1] == float("-inf")).all()
    assert (got.output[1] == 0).all()
    assert (got.lse[0] == float("-inf")).tolist() == [True] + 19 * [False]


@pytest.mark.parametrize("change", ["weights", "rows", "masked"])
def test_the_comparison_can_fail(change):
    one = Attending(CASES["h16-D128"], "plain", "cpu", True)
    with on("cpu"):
        got = one.attend()
    one.assert_near(got)
    if change == "weights":
        one.hits.log_weight[1, 5] += torch.linspace(0, 1e-2, K)
    elif change == "rows":
        one.keys[1, 0, one.hits.ids[1, 0, 4], 7] += 1e-2
    else:
        one.resident.mask[0, 4] = 1
    with pytest.raises(AssertionError):
        one.assert_near(got)


@on_devices
@pytest.mark.parametrize("name", ["exact", "pariskv:preset=scan", "exact+sample"])
def test_any_index_attends_to_latents_where_they_lie(name, device):
    case = CASES["h16-D128"]
    with on(device):
        index = case.index(name, backend="cuda", device=device)
        other = case.index(name, device=device)
        for one in (index, other):
            one.append(*(part.to(device) for part in case.tokens(TOKENS)))
        attends = index.capability(Attends)
        assert attends is not None
        assert other.capability(Attends) is None
        queries = case.queries().to(device)
        resident = ResidentRows(index.geometry, case.batch, NEAR)
        resident.add(*(part.to(device) for part in case.tokens(NEAR, seed=1)), None)
        hits = other.search(queries, k=K)
        got = attends.attend_hits(queries, hits, resident)
    rows = other.fetch(hits)
    beside = resident.rows.tensor_split([case.head_dim], dim=-1)
    keys, values = torch.cat([rows.keys, beside[0]], 2), torch.cat([rows.values, beside[1]], 2)
    bias = None
    if hits.log_weight is not None:
        bias = torch.nn.functional.pad(hits.log_weight, (0, NEAR))
    want = other.ops.attention.attend(queries, keys, values, scale=index.geometry.scale, bias=bias)
    torch.testing.assert_close(got.output, want, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (dict(q_heads=129), "q_heads: got 129, allowed is up to 128 a head"),
        (dict(head_dim=1032), "head_dim: got 1032, allowed is up to 1024 with value_in_key"),
        (dict(value_dim=12), "value_dim: got 12, allowed is a multiple of 8"),
    ],
)
def test_what_the_kernels_refuse(change, said):
    case = replace(CASES["h16-D128"], **change)
    geometry = case.index("exact").geometry
    assert attend_latents.unserved(geometry) == said
    assert not BlockStore(geometry, DeviceAllocator(geometry.device), max_tokens=256).attends
