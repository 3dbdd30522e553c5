"""What an index learns, against the torch reference: on a CPU by emulation, on a GPU as it is."""

import pytest
import torch

from kvindex.ops import learn as reference
from kvindex_cuda.ops import learn
from tests.cuda import emulator
from tests.cuda.devices import DEVICES, on, poisoned
from tests.support.helpers import far_apart, left_padding

DTYPES = [torch.float32, torch.float16, torch.bfloat16]


def keys_of(*shape, dtype=torch.float32, device="cpu"):
    return (torch.randn(shape) + 1).to(dtype).to(device)


def same(got, want):
    """Centers may differ where a double's last bit tips a bfloat16: not in so few."""
    assert got.keys() == want.keys()
    for name in want:
        assert got[name].dtype == want[name].dtype
        assert torch.equal(got[name], want[name]), name


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("dim", [8, 64, 80, 96, 112, 128, 192, 256])
def test_centers_are_the_references(dim, dtype, device, monkeypatch):
    keys = keys_of(2, 2, 300, dim, dtype=dtype, device=device)
    valid = left_padding([0, 77], 300).to(device)
    poisoned(monkeypatch)
    with on(device):
        got = learn.centers(keys, valid, {}, start=0, every=128)
    want = reference.centers(keys, valid, {}, start=0, every=128)
    same(got, want)
    wrong = reference.centers(keys, valid, {}, start=1, every=128)  # a comparison that can fail
    with pytest.raises(AssertionError):
        same(got, wrong)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("every", [1, 7, 20, 64, 1000])
@pytest.mark.parametrize(
    "pieces", [[50], [20, 30], [1] * 50, [0, 7, 0, 43], [19, 2, 29], [5, 40, 5]], ids=str
)
def test_appends_in_pieces_learn_the_same(every, pieces, device):
    keys = keys_of(3, 2, 50, 8, device=device)
    valid = left_padding([0, 11, 45], 50).to(device)
    got, want, start = {}, {}, 0
    for count in pieces:
        some = slice(start, start + count)
        where = dict(start=start, every=every)
        with on(device):
            got = learn.centers(keys[:, :, some], valid[:, some], got, **where)
        want = reference.centers(keys[:, :, some], valid[:, some], want, **where)
        same(got, want)
        start += count


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("start", [0, 10, 30, 41, 60])
def test_what_is_known_is_kept_and_the_rest_filled(start, device):
    """After truncations a known segment may lie anywhere; the last one leans on it."""
    keys = keys_of(2, 1, 25, 16, device=device)
    found = keys_of(2, 1, 6, 16, dtype=torch.bfloat16, device=device)
    for pattern in range(64):
        known = torch.tensor([pattern, ~pattern])[:, None] >> torch.arange(6) & 1 == 1
        before = {"centers": found, "known": known.to(device)}
        with on(device):
            got = learn.centers(keys, None, before, start=start, every=10)
        same(got, reference.centers(keys, None, before, start=start, every=10))
        assert torch.equal(before["known"], known.to(device))


@pytest.mark.parametrize("device", DEVICES)
def test_large_keys_are_bounded_and_what_invalid_ones_hold_does_not_matter(device):
    keys = keys_of(1, 1, 40, 8, device=device)
    keys[:, :, 10:] = 3e38
    keys[..., 4:] *= -1
    valid = left_padding([5], 40).to(device)
    with on(device):
        got = learn.centers(keys, valid, {}, start=0, every=20)
        same(got, reference.centers(keys, valid, {}, start=0, every=20))
        keys[:, :, :5] = float("nan")
        same(learn.centers(keys, valid, {}, start=0, every=20), got)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_strides_do_not_matter(dtype, device):
    keys = keys_of(2, 2, 60, 64, dtype=dtype, device=device)
    valid = torch.rand(60, 2, device=device).gt(0.3).T
    wide = keys.new_zeros(2, 2, 60, 99)
    wide[..., 3:67] = keys  # no key begins at a multiple of 16 bytes
    turned = keys.transpose(1, 2).contiguous().transpose(1, 2)
    with on(device):
        want = learn.centers(keys, valid.contiguous(), {}, start=0, every=32)
        for other in (turned, wide[..., 3:67]):
            same(learn.centers(other, valid, {}, start=0, every=32), want)


@pytest.mark.parametrize("device", DEVICES)
def test_keys_beyond_2_to_the_31_elements_are_found(device):
    keys = keys_of(1, 2, 40, 64, dtype=torch.float16, device=device)
    with on(device):
        want = learn.centers(keys, None, {}, start=0, every=32)
        same(learn.centers(far_apart(keys), None, {}, start=0, every=32), want)


@pytest.mark.parametrize("device", DEVICES)
def test_a_batch_equals_its_rows(device):
    keys, valid = keys_of(3, 2, 70, 96, device=device), left_padding([0, 9, 33], 70).to(device)
    norms = keys.norm(dim=-1)
    with on(device):
        whole = learn.centers(keys, valid, {}, start=0, every=32)
        whole |= learn.weight_scale(norms, valid, {})
        for b in range(3):
            row = slice(b, b + 1)
            part = learn.centers(keys[row], valid[row], {}, start=0, every=32)
            part |= learn.weight_scale(norms[row], valid[row], {})
            same(part, {name: found[row] for name, found in whole.items()})


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("count", [0, 1, 300, 20_000])
def test_a_reference_is_the_references(count, device):
    norms = torch.rand(2, 3, count).mul(20).exp2().to(device)
    valid = torch.rand(2, count, device=device) > 0.5
    for flags in (None, valid, torch.zeros_like(valid)):
        with on(device):
            got = learn.weight_scale(norms, flags, {})
            same(got, reference.weight_scale(norms, flags, {}))
            later = learn.weight_scale(norms * 9, flags, got)
        same(later, reference.weight_scale(norms * 9, flags, got))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("begin", [0, 1, 255, 4095, 4096, 9000])
def test_a_reference_is_of_the_first_norms(begin, device):
    """From the first valid one on that is not 0; the longest is the last seen, or just not."""
    norms = torch.zeros(2, 3, begin + learn.SEEN + 2)
    norms[:, :, begin:] = 1
    norms[:, 0, begin + learn.SEEN - 1] = 100
    norms[:, 1, begin + learn.SEEN] = 100
    norms[1, :, : begin + 300] = 50
    valid = left_padding([0, begin], norms.shape[2])
    norms, valid = norms.to(device), valid.to(device)
    with on(device):
        got = learn.weight_scale(norms, valid, {})
    same(got, reference.weight_scale(norms, valid, {}))
    assert got["weight_scale"].tolist() == [[2048.0, 32.0, 32.0], [2048.0, 1024.0, 1024.0]]


@pytest.mark.parametrize("device", DEVICES)
def test_a_references_edges(device):
    """Powers of two and their neighbors; zero, tiny and the longest norms; what is learned."""
    powers = torch.arange(-120, 61).double().exp2().float()  # the GPU's exp2 gives no subnormals
    close = [powers, powers.nextafter(torch.tensor(0.0)), powers.nextafter(torch.tensor(1e30))]
    norms = torch.stack(close).clamp_max(reference.LONGEST)[..., None].to(device)
    norms = torch.cat([norms, torch.zeros_like(norms)], dim=-1)
    with on(device):
        got = learn.weight_scale(norms, None, {})
        want = reference.weight_scale(norms, None, {})
        # the logarithm just below a power may round up, in the reference as here
        same(got, want)
        old = {
            "weight_scale": torch.where(
                torch.arange(181).to(device) % 2 == 0, got["weight_scale"], 0
            )
        }
        kept = learn.weight_scale(norms * 0.125, None, old)
    same(kept, reference.weight_scale(norms * 0.125, None, old))


@pytest.mark.skipif(not emulator.available(), reason="no g++ to emulate with")
@pytest.mark.parametrize("order", ["backward", "random"])
def test_no_order_of_threads_changes_a_bit(order):
    keys, valid = keys_of(2, 1, 130, 64), left_padding([0, 9], 130)
    norms = torch.rand(2, 1, 20_000)
    with emulator.emulated():
        want = learn.centers(keys, valid, {}, start=0, every=64) | learn.weight_scale(
            norms, None, {}
        )
    with emulator.emulated(order=order):
        got = learn.centers(keys, valid, {}, start=0, every=64) | learn.weight_scale(
            norms, None, {}
        )
    same(got, want)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (dict(keys=torch.zeros(1, 2, 9, 16).double()), "keys: got torch.float64"),
        (dict(keys=torch.zeros(1, 2, 9, 12)), "keys: got D = 12, allowed are multiples of 8"),
        (dict(valid=torch.ones(1, 8, dtype=torch.bool)), "valid: got shape"),
        (dict(learned={"centers": torch.zeros(1, 2, 1, 16)}), "centers: got torch.float32"),
        (dict(learned={"known": torch.zeros(1, 3, dtype=torch.bool)}), "known: got shape"),
        (dict(every=0), "start, every: got 0, 0"),
        ({}, "learn: got tensors on cpu, allowed is a CUDA device"),
    ],
    ids=lambda part: ",".join(part) if isinstance(part, dict) else "",
)
def test_wrong_tensors_are_refused(change, message):
    given = dict(keys=torch.zeros(1, 2, 9, 16), valid=None, learned={}, start=0, every=4) | change
    with pytest.raises(ValueError, match=message):
        learn.centers(**given)


def test_names_and_constants_are_the_references():
    assert (learn.LEAN, learn.HEADROOM, learn.SEEN) == (
        reference.LEAN,
        reference.HEADROOM,
        reference.SEEN,
    )
