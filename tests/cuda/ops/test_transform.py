"""Normalize and rotate by kernels, compared with the torch reference.

On a CPU, kernels are emulated.
"""

import pytest
import torch

from kvindex.ops import transform as reference
from kvindex_cuda.ops import transform
from tests.cuda import emulator
from tests.cuda.devices import DEVICES, on, sampled_on_cpu

DTYPES = [torch.float32, torch.float16, torch.bfloat16]
DIMS = [8, 64, 80, 96, 112, 128, 192, 256]
SHAPES = [(), (5,), (3, 70), (2, 3, 33), (2, 2, 3, 7), (0,), (2, 0, 4)]


def vectors_of(*shape, dtype=torch.float32, device="cpu"):
    return torch.randn(shape).mul(3).to(dtype).to(device)


def poisoned(monkeypatch):
    """Fill new tensors with NaN, so that a test notices what a kernel does not write."""
    empty = torch.empty
    monkeypatch.setattr(torch, "empty", lambda *size, **how: empty(*size, **how).fill_(torch.nan))


def bound(vectors, matrix):
    """Largest error of float32 sums of D products in any order, in both implementations."""
    D = vectors.shape[-1]
    return 2 * D * 2.0**-24 * (vectors.float().abs() @ matrix.abs().T)


@sampled_on_cpu("shape, dtype", SHAPES, DTYPES, indirect=False, ids=str)
def test_directions_and_norms_are_the_references(shape, dtype, device, monkeypatch):
    vectors = vectors_of(*shape, 96, dtype=dtype, device=device)
    poisoned(monkeypatch)
    with on(device):
        directions, norms = transform.normalize(vectors)
    want = reference.normalize(vectors)
    assert (directions.dtype, norms.dtype) == (torch.float32, torch.float32)
    # sums in double differ by their order; once in 10^8 cases the rounding to float32 shows it
    torch.testing.assert_close(directions, want[0], rtol=2.0**-23, atol=0)
    torch.testing.assert_close(norms, want[1], rtol=2.0**-23, atol=0)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dim", DIMS)
def test_any_head_dimension(dim, device):
    vectors = vectors_of(2, 3, 40, dim, device=device)
    matrix = reference.rotation(dim, 3, device)
    with on(device):
        directions, norms = transform.normalize(vectors)
        rotated = transform.rotate(vectors, matrix)
    torch.testing.assert_close(directions * norms[..., None], vectors, rtol=1e-6, atol=0)
    assert ((rotated - reference.rotate(vectors, matrix)).abs() <= bound(vectors, matrix)).all()
    torch.testing.assert_close(rotated.norm(dim=-1), norms, rtol=1e-5, atol=0)


@pytest.mark.parametrize("device", DEVICES)
def test_zero_tiny_and_huge_vectors(device):
    vectors = vectors_of(6, 64, device=device)
    vectors[0] = 0
    vectors[1] = 1e-44
    vectors[2] = 3e38
    vectors[3] *= 2.0**-120
    vectors[4] *= 2.0**100
    with on(device):
        directions, norms = transform.normalize(vectors)
    want = reference.normalize(vectors)
    torch.testing.assert_close(directions, want[0], rtol=2.0**-23, atol=0)
    torch.testing.assert_close(norms, want[1], rtol=2.0**-23, atol=0)
    assert not directions[0].any()
    assert norms[2] == norms[4] == transform.LONGEST


@sampled_on_cpu("shape, dtype", SHAPES, DTYPES, indirect=False, ids=str)
def test_rotated_vectors_are_the_references(shape, dtype, device, monkeypatch):
    vectors = vectors_of(*shape, 80, dtype=dtype, device=device)
    matrix = reference.rotation(80, 0, device)
    poisoned(monkeypatch)
    with on(device):
        rotated = transform.rotate(vectors, matrix)
    assert rotated.dtype == torch.float32
    assert rotated.shape == vectors.shape
    want = reference.rotate(vectors, matrix)
    assert ((rotated - want).abs() <= bound(vectors, matrix)).all()
    if vectors.numel():  # this comparison could fail
        wrong = reference.rotate(vectors, matrix.T)
        assert ((rotated - wrong).abs() > bound(vectors, matrix)).any()


@pytest.mark.parametrize("device", DEVICES)
def test_strides_do_not_matter(device):
    vectors, matrix = vectors_of(2, 3, 40, 64, device=device), reference.rotation(64, 0, device)
    turned = vectors.transpose(1, 2).contiguous().transpose(1, 2)
    deep = vectors[:, None].expand(2, 5, 3, 40, 64)
    apart = vectors.mT.contiguous().mT  # not even the last dimension is contiguous
    with on(device):
        want = [*transform.normalize(vectors), transform.rotate(vectors, matrix)]
        for same in (turned, apart):
            got = [*transform.normalize(same), transform.rotate(same, matrix)]
            assert all(map(torch.equal, got, want))
        got = [*transform.normalize(deep), transform.rotate(deep, matrix)]
        assert all(torch.equal(part[:, 4], one) for part, one in zip(got, want, strict=True))


@pytest.mark.parametrize("device", DEVICES)
def test_vectors_beyond_2_to_the_31_elements_are_found(device):
    far, matrix = 2**31 + 2**20, reference.rotation(64, 0, device)
    # few pages are accessed
    spread = torch.empty(far + 40 * 64, dtype=torch.float16, device=device)
    apart = spread.as_strided((2, 40, 64), (far, 64, 1))
    vectors = apart.copy_(vectors_of(2, 40, 64)).contiguous()
    with on(device):
        want = [*transform.normalize(vectors), transform.rotate(vectors, matrix)]
        got = [*transform.normalize(apart), transform.rotate(apart, matrix)]
    assert all(map(torch.equal, got, want))


@pytest.mark.parametrize("device", DEVICES)
def test_a_batch_equals_its_rows(device):
    vectors, matrix = vectors_of(3, 50, 112, device=device), reference.rotation(112, 0, device)
    with on(device):
        whole = [*transform.normalize(vectors), transform.rotate(vectors, matrix)]
        for b in range(3):
            for i in (0, 31, 49):
                row = vectors[b, i]
                parts = [*transform.normalize(row), transform.rotate(row, matrix)]
                assert all(
                    torch.equal(part, one[b, i]) for part, one in zip(parts, whole, strict=True)
                )


@pytest.mark.skipif(not emulator.available(), reason="no g++ to emulate with")
@pytest.mark.parametrize("order", ["backward", "random"])
def test_no_order_of_threads_changes_a_bit(order):
    vectors, matrix = vectors_of(70, 96), reference.rotation(96, 0)
    with emulator.emulated():
        want = [*transform.normalize(vectors), transform.rotate(vectors, matrix)]
    with emulator.emulated(order=order):
        got = [*transform.normalize(vectors), transform.rotate(vectors, matrix)]
    assert all(map(torch.equal, got, want))


def test_wrong_tensors_are_refused():
    with pytest.raises(ValueError, match=r"vectors: got torch.float64, allowed is torch.float32"):
        transform.normalize(torch.zeros(3, 8).double())
    with pytest.raises(ValueError, match=r"matrix: got shape \(8, 16\), allowed is \(8, 8\)"):
        transform.rotate(torch.zeros(3, 8), torch.zeros(8, 16))
    with pytest.raises(ValueError, match=r"matrix: got torch.float16"):
        transform.rotate(torch.zeros(3, 8), torch.zeros(8, 8).half())
    with pytest.raises(ValueError, match="normalize: got tensors on cpu, allowed is a CUDA device"):
        transform.normalize(torch.zeros(3, 8))


def test_names_and_constants_are_the_references():
    assert transform.rotation is reference.rotation
    assert transform.LONGEST == reference.LONGEST
