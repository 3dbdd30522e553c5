"""Codes with a weight per subspace that the kernel writes, against the reference ops."""

import pytest
import torch

from kvindex.ops import codes, transform
from kvindex.ops.codes import SUBSPACE
from kvindex_cuda.memory.layout import BLOCK, SubspaceLayout
from kvindex_cuda.pariskv.append.encode import Encoder
from tests.cuda.devices import DEVICES
from tests.cuda.pariskv.append.test_encode import GARBAGE, ROUNDED, keys_of, written
from tests.support.helpers import Case

STEP = 2.0**-7
"""From a bfloat16 to the next one, at most, of the number itself."""


def encoder(dim, bits=3, device="cpu"):
    rotation, levels = transform.rotation(dim, 0, device), codes.levels(SUBSPACE, bits, device)
    return Encoder(SubspaceLayout(dim, bits), rotation, levels, centered=False)


def compared(encode, blocks, keys):
    """How many coordinates and weights differ from the reference's: those at an edge alone."""
    layout, (_, _, N, D) = encode.layout, keys.shape
    rotation = transform.rotation(D, 0, keys.device)
    levels = codes.levels(SUBSPACE, layout.magnitude_bits, keys.device)
    directions, norms = transform.normalize(keys.float())
    want = codes.encode(transform.rotate(directions, rotation), norms, levels)
    got = layout.unpack(blocks, N)

    exact = keys.double() / keys.double().norm(dim=-1, keepdim=True).clamp_min(1e-300)
    exact = (exact @ rotation.double().T).unflatten(-1, (-1, SUBSPACE))  # [B, G, N, M, 8]
    radii = exact.norm(dim=-1)
    slack = ROUNDED / radii.clamp_min(1e-300)  # of a coordinate of a subspace's direction
    signs = codes.unpack(got["signs"] ^ want["signs"]).bool()
    assert (exact.abs() <= ROUNDED)[signs].all()
    differ = codes.unpack(got["magnitudes"] ^ want["magnitudes"]).bool().any(-3)
    edges = ((levels[1:] + levels[:-1]) / 2).double()
    sizes = exact.abs() / radii.clamp_min(1e-300)[..., None]
    apart = (sizes[..., None] - edges).abs().amin(-1) if len(edges) else sizes + 1
    assert (apart <= slack[..., None])[differ].all()

    flips = (signs | differ).any(-1)
    error = (got["weights"].double() - want["weights"].double()).abs()
    allowed = (STEP + 8 * slack) * want["weights"].double()
    assert (error <= allowed)[~flips].all()
    # a level that flipped changes α, at least .8, by a gap between levels at most
    gaps = levels.diff().max() if len(levels) > 1 else 0
    assert (error <= allowed + (8 * gaps) * want["weights"].double())[flips].all()
    rounded = want["weights"].bfloat16() != got["weights"]
    return int((signs | differ).sum()), int((rounded & ~flips).sum())


CASES = [
    (64, 3, torch.bfloat16),
    (128, 3, torch.float16),
    (128, 0, torch.float32),
    (72, 5, torch.bfloat16),  # an odd number of subspaces
    (8, 3, torch.float32),
    (96, 7, torch.float16),
    (256, 3, torch.float32),
]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(("dim", "bits", "dtype"), CASES, ids=str)
def test_codes_are_the_references(dim, bits, dtype, device):
    keys = keys_of(Case(q_heads=2, kv_heads=2, head_dim=dim, dtype=dtype), 300).to(device)
    encode = encoder(dim, bits, device)
    blocks = written(encode, keys)
    flips, rounded = compared(encode, blocks, keys)
    total = keys[..., 0].numel() * (dim // SUBSPACE)
    assert flips <= 1e-4 * total * SUBSPACE + 4
    assert rounded <= 1e-2 * total + 2  # to the other side of a tie of bfloat16
    with pytest.raises(AssertionError):  # a comparison that can fail
        compared(encode, blocks, keys.flip(2))
    behind = encode.layout.views(blocks[:, 1])
    for name, part in behind.items():
        assert (part[:, :, 300 - BLOCK :] == GARBAGE).all(), name


@pytest.mark.parametrize("device", DEVICES)
def test_zero_keys_and_subspaces_have_no_weight(device):
    """R of a key that is a row of it is one coordinate: seven subspaces in eight have nothing."""
    rows = transform.rotation(64, 0)[:3]
    keys = torch.cat([torch.zeros(1, 64), rows * torch.tensor([[1.0], [2.0**20], [2.0**-40]])])
    encode = encoder(64, device=device)
    keys = keys[None, None].to(device)
    got = encode.layout.unpack(written(encode, keys), 4)
    weights = got["weights"].float()[0, 0].cpu()
    assert not weights[0].any()
    norms = torch.tensor([1.0, 2.0**20, 2.0**-40])
    best = codes.levels(SUBSPACE, 3)[-1]  # of |u| = 1
    torch.testing.assert_close(weights[1:, 0], norms / best, rtol=2**-8, atol=0)
    assert (weights[1:, 1:] <= 1e-5 * norms[:, None]).all()


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dim", [64, 72])
def test_what_fills_words_is_zero(dim, device):
    encode = encoder(dim, device=device)
    blocks = written(encode, keys_of(Case(head_dim=dim), BLOCK).to(device))
    layout = encode.layout
    filled = layout.pack(layout.unpack(blocks, BLOCK), None)
    assert torch.equal(blocks[..., : layout.weights], filled[..., : layout.weights])
    end = layout.weights + BLOCK * layout.span
    weights = slice(layout.weights, end)
    assert torch.equal(blocks[..., weights], filled[..., weights])


def test_centers_have_no_room():
    with pytest.raises(ValueError, match="centered: got True with weights per subspace"):
        Encoder(SubspaceLayout(64, 3), transform.rotation(64, 0), codes.levels(SUBSPACE, 3))
