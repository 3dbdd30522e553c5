"""The kernels for sparse attention of prompts, compared with their references.

On a CPU, Triton's interpreter runs them (`test_interpreter.py`).
"""

import pytest
import torch

from kvindex.ops import block_sparse as reference
from kvindex.selectors.pooled import PooledSelector
from kvindex.selectors.sampled import SampledSelector
from tests.support.helpers import mostly_slow

# the imports below need Triton (E402)
triton = pytest.importorskip("triton")

from kvindex_cuda.triton import block_sparse  # noqa: E402
from kvindex_cuda.triton.operands import Tile  # noqa: E402
from tests.cuda.triton.test_kernels import close, drawn, weightless  # noqa: E402

BLOCK = reference.BLOCK
SHAPES = [
    # B, H, G, T, N, D, Dv
    (1, 2, 1, 300, 684, 16, 16),
    (2, 6, 3, 128, 128, 12, 20),
    (1, 4, 2, 5, 1029, 64, 64),
    (1, 3, 1, 257, 513, 96, 96),
    (1, 2, 2, 140, 524, 128, 128),
    (1, 2, 1, 130, 258, 256, 256),
]


@pytest.fixture
def run(request):
    """Device, dtype, and False, because no weights are read."""
    torch.manual_seed(0)
    return request.param


shapes = pytest.mark.parametrize(
    ("B", "H", "G", "T", "N", "D", "Dv"), mostly_slow(SHAPES, *SHAPES[:3])
)


def prompt(run, B, H, G, T, N, D, Dv):
    """Draw queries, keys and values whose memory has gaps, as in a larger buffer."""
    queries = drawn(run, B, T, H, D).transpose(1, 2)
    keys, values = (drawn(run, B, N + 9, G, width).transpose(1, 2) for width in (D, Dv))
    return queries, keys[:, :, 8 : 8 + N], values[:, :, 8 : 8 + N]


@weightless
@shapes
@pytest.mark.parametrize("fraction", [0.4, 0.0, 1.0])
def test_attend_chosen(run, B, H, G, T, N, D, Dv, fraction):
    given = prompt(run, B, H, G, T, N, D, Dv)
    size = B, H, -(-T // BLOCK), -(-N // BLOCK)
    chosen = torch.rand(size, device=run[0]) < fraction
    if fraction == 0:
        chosen[:, 0, :, 0] = True  # other heads attend to nothing
    how = dict(scale=D**-0.5, return_lse=True)
    output, sums = block_sparse.attend_chosen(*given, chosen, **how)
    want, want_sums = reference.attend_chosen(*given, chosen, **how)
    close(output, want, run[1])
    torch.testing.assert_close(sums, want_sums, rtol=1e-3, atol=1e-3)


@weightless
def test_keys_that_are_not_chosen_and_later_keys_are_not_read(run):
    queries, keys, values = prompt(run, 1, 2, 1, 256, 640, 16, 16)
    chosen = torch.zeros(1, 2, 2, 5, dtype=torch.bool, device=run[0])
    chosen[:, :, :, 1] = chosen[:, :, 1, 4] = True
    chosen[:, :, 0, 4] = True  # after the block of queries, so it is not read
    clean = reference.attend_chosen(queries, keys, values, chosen, scale=0.3)
    for part in (keys, values):
        part[:, :, :128] = part[:, :, 256:512] = float("nan")
    close(block_sparse.attend_chosen(queries, keys, values, chosen, scale=0.3), clean, run[1])


@weightless
@pytest.mark.parametrize("mass", [0.3, 0.9, 0.999, 1.0])
@pytest.mark.parametrize(
    ("B", "H", "G", "T", "first"), [(1, 4, 2, 300, 384), (2, 3, 1, 512, 0), (1, 2, 2, 7, 2048)]
)
def test_choose_pooled(run, mass, B, H, G, T, first):
    queries = 3 * drawn(run, B, T, H, 16).transpose(1, 2)
    keys = 3 * drawn(run, B, G, first + T + BLOCK, 16)
    keys = keys[:, :, : (first + T) // BLOCK * BLOCK]
    selector = PooledSelector(mass)
    means = selector.summarize(keys)
    torch.testing.assert_close(block_sparse.mean_keys(keys), means)
    found = block_sparse.choose_pooled(queries, means, first, scale=0.3, mass=mass)
    want = selector.choose(queries, means, first, scale=0.3)
    assert found.dtype == torch.bool
    different = int((found != want).sum())  # rounding may move a weight over the threshold
    assert different <= 0.01 * want.numel() * (run[0] == "cuda")


@weightless
@pytest.mark.parametrize("count", [8, 32])
@pytest.mark.parametrize(
    ("B", "H", "G", "T", "first", "D"),
    [(1, 4, 2, 300, 384, 16), (2, 3, 1, 256, 0, 12), (1, 8, 1, 7, 640, 64), (1, 2, 2, 128, 0, 16)],
)
def test_choose_sampled(run, count, B, H, G, T, first, D, monkeypatch):
    monkeypatch.setattr(block_sparse, "SUM_BYTES", 4 * B * H * count * 8)  # a few blocks at a time
    queries = 3 * drawn(run, B, T, H, D).transpose(1, 2)
    keys = 2 * drawn(run, B, first + T + BLOCK, G, D).transpose(1, 2)
    keys = keys[:, :, : (first + T - 1) // BLOCK * BLOCK]
    for mass in (0.5, 0.95, 1.0):
        selector = SampledSelector(mass, count)
        how = dict(scale=0.3, mass=mass, count=count)
        found = block_sparse.choose_sampled(queries, keys, first, **how)
        want = selector.choose(queries, selector.summarize(keys), first, scale=0.3)
        assert found.dtype == torch.bool
        different = int((found != want).sum())
        assert different <= 0.02 * want.numel() * (run[0] == "cuda")


@weightless
def test_a_score_that_is_not_a_number_chooses_everything(run):
    queries, keys = drawn(run, 1, 2, BLOCK, 16), drawn(run, 1, 1, 5 * BLOCK, 16)
    queries[0, 1, 3, 2] = float("nan")
    how = dict(scale=0.3, mass=0.1)
    means = block_sparse.mean_keys(keys)
    pooled = block_sparse.choose_pooled(queries, means, 5 * BLOCK, **how)
    sampled = block_sparse.choose_sampled(queries, keys, 5 * BLOCK, **how, count=32)
    for chosen in (pooled, sampled):
        assert chosen[0, 1].all()
        assert not chosen[0, 0].all()


def test_wide_heads_are_refused():
    queries, keys = torch.zeros(1, 1, 128, 512), torch.zeros(1, 1, 256, 512)
    chosen = torch.ones(1, 1, 1, 2, dtype=torch.bool)
    with pytest.raises(ValueError, match=r"D: got a head dimension of 512.*prefill='dense'"):
        block_sparse.attend_chosen(queries, keys, keys, chosen, scale=1.0)
    with pytest.raises(ValueError, match=r"D: got a head dimension of 512.*prefill='dense'"):
        block_sparse.choose_sampled(queries, keys, 128, scale=1.0, mass=0.5, count=32)


def test_bad_arguments_are_refused():
    queries, keys = torch.zeros(1, 2, 128, 16), torch.zeros(1, 1, 256, 16)
    chosen = torch.ones(1, 2, 1, 2, dtype=torch.bool)
    attend = block_sparse.attend_chosen
    with pytest.raises(ValueError, match="chosen"):
        attend(queries, keys, keys, chosen[..., :1], scale=1.0)
    with pytest.raises(ValueError, match=r"keys: got torch\.float64"):
        attend(queries, keys.double(), keys, chosen, scale=1.0)
    with pytest.raises(ValueError, match="values: got a stride of 256"):
        attend(queries, keys, keys.mT.contiguous().mT, chosen, scale=1.0)
    with pytest.raises(ValueError, match="columns: got 256"):
        attend(queries, keys, keys, chosen, scale=1.0, tile=Tile(columns=256))
