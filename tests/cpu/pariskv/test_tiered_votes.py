"""Compare each kernel of a step with tiered votes with its reference in `kvindex.ops`.

Integers must be equal.
"""

import numpy as np
import pytest
import torch

from kvindex.cpu.kernels import tiered_step, tiered_votes
from kvindex.ops import coarse, codes, rerank, select, transform
from kvindex.ops.coarse import TIERS


def drawn(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def points_of(words, heads):
    """Return each head's byte of words uint64 `[..., words, X]`, as `[heads, ..., X]`."""
    every = [words[..., h // 8, :] >> np.uint64(h % 8 * 8) & np.uint64(255) for h in range(heads)]
    return torch.from_numpy(np.stack(every).astype(np.int32))


@pytest.mark.parametrize("D", [8, 24, 64, 128])
@pytest.mark.parametrize("heads", [1, 3, 11])
@pytest.mark.parametrize("kind", ["normal", "zero", "ties"])
def test_points_are_those_of_the_reference(D, heads, kind):
    rotated = drawn(1, 1, heads, D) * {"normal": 1, "zero": 0, "ties": 3}[kind]
    rotated = rotated.round() if kind == "ties" else rotated
    queries, identity = rotated[0].numpy(), np.eye(D, dtype=np.float32)
    signs = torch.randint(0, 256, (1, 1, 500, D // 8), dtype=torch.uint8)
    histogram = coarse.histogram(signs)
    limits = torch.tensor([[coarse.ceil_fraction(500, 0.3, tier) for tier in TIERS]])
    words = -(-heads // 8)
    tables = np.full((1, words, D // 8, 256), 7, np.uint64)
    out = np.empty((1, heads, D), np.float32)
    tiered_votes.prepare(queries, identity, histogram[0].numpy(), limits.numpy(), out, tables)
    directions, norms = transform.normalize(rotated)
    want = coarse.tier_table(directions, histogram, limits)[0, 0]  # [g, M, 256]
    got = points_of(tables[0].transpose(1, 0, 2), heads)
    assert torch.equal(got, want.int())
    torch.testing.assert_close(torch.from_numpy(out)[None], directions * norms[..., None])


@pytest.mark.parametrize("M", [1, 3, 8, 16])
@pytest.mark.parametrize("heads", [1, 3, 11])
@pytest.mark.parametrize("padded", [False, True])
def test_votes_and_candidates_are_those_of_the_reference(M, heads, padded):
    generator, N = torch.Generator().manual_seed(M), 2500
    signs = torch.randint(0, 256, (1, 1, N, M), generator=generator, dtype=torch.uint8)
    points = torch.randint(0, 7, (heads, M, 256), generator=generator)
    valid = (torch.rand(1, N, generator=generator) > 0.3) if padded else None
    tables = np.zeros((1, -(-heads // 8), M, 256), np.uint64)
    for h in range(heads):
        tables[0, h // 8] |= points[h].numpy().astype(np.uint64) << np.uint64(h % 8 * 8)
    votes = np.empty((1, tables.shape[1], N), np.uint64)
    counts = np.full((2, 1, heads, 256), 9, np.int64)
    at = np.array([signs.data_ptr()]), np.array([0 if valid is None else valid.data_ptr()])
    for part in range(2):
        tiered_votes.vote(part, 2, *at, heads, tables, votes, counts)
    want = coarse.votes(signs, points[None, None].byte())
    assert torch.equal(points_of(votes[0], heads), want[0, 0])
    for limit in (0, 1, 300, int(N if valid is None else valid.sum())):
        out = np.empty(N + 1, np.int32)
        room = np.empty(heads, np.int64), np.empty(heads, np.int64)
        count = tiered_votes.candidates(votes[0], counts[:, 0], limit, at[1][0], *room, out)
        ids = select.candidates(want, torch.tensor([limit]), valid)
        assert out[:count].tolist() == ids.flatten().tolist()


@pytest.mark.parametrize("bits", [0, 3, 5])
@pytest.mark.parametrize("D", [8, 64, 80])
def test_estimates_with_a_weight_for_each_subspace(bits, D):
    levels, keys, queries = codes.levels(8, bits), drawn(1, 1, 60, D), drawn(1, 1, 3, D, seed=1)
    made = codes.encode(*transform.normalize(keys), levels)
    weights = made["weights"].bfloat16()
    want = rerank.estimate(queries, made["signs"], made["magnitudes"], weights, levels)
    at = [x.data_ptr() for x in (made["signs"], made["magnitudes"], weights)]
    ids, out = np.array([59, 0, 39, 40, 7], np.int32), np.empty((3, 5), np.float32)
    table = torch.nn.functional.pad(levels, (0, max(0, 16 - len(levels)))).numpy()
    tiered_step.estimate(ids, *at, bits, queries[0, 0].numpy(), table, out)
    want = want[0, 0][:, torch.from_numpy(ids).long()]
    torch.testing.assert_close(torch.from_numpy(out), want, rtol=1e-5, atol=1e-5)
