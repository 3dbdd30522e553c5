"""Compare compiled operations that indexes share with `kvindex.ops`; selections must be equal."""

import re
from pathlib import Path

import pytest
import torch

from kvindex import cpu, ops
from kvindex.cpu.kernels import compile

INF = float("inf")

SHAPES = [(1, 1, 1, 1), (2, 3, 4, 40), (1, 2, 3, 1000), (1, 1, 1, 9000)]


def drawn(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def rounded(*shape, seed=0):
    """Return scores with ties, zeros of both signs, and `-inf`, which is never selected."""
    scores = (drawn(*shape, seed=seed) * 3).round() * drawn(*shape, seed=seed + 1).sign()
    return scores.masked_fill(drawn(*shape, seed=seed + 2) > 1.5, -INF)


def same(found, wanted):
    for mine, theirs in zip(found, wanted, strict=True):
        assert mine.dtype == theirs.dtype
        assert torch.equal(mine, theirs)


@pytest.mark.parametrize("name", ["fetch", "group", "select", "units"])
def test_the_names_are_those_of_the_reference(name):
    mine, theirs = getattr(cpu, name), getattr(ops, name)
    public = {
        key
        for key, value in vars(theirs).items()
        if callable(value) and key[0] != "_" and value.__module__ == theirs.__name__
    }
    assert public <= set(vars(mine))


@pytest.mark.parametrize("shape", [(0,), (3, 0), *SHAPES], ids=str)
@pytest.mark.parametrize("k", [1, 7, 100])
def test_the_best_are_those_of_the_reference(shape, k):
    for scores in (rounded(*shape), drawn(*shape), torch.full(shape, -INF), torch.zeros(shape)):
        same(cpu.select.top_k(scores, k), ops.select.top_k(scores, k))


def test_the_best_of_scores_that_do_not_lie_together():
    scores = drawn(3, 500, 2).mT[:, :, ::2]
    same(cpu.select.top_k(scores, 9), ops.select.top_k(scores, 9))
    same(cpu.select.top_k(scores.double(), 9), ops.select.top_k(scores.double(), 9))


@pytest.mark.parametrize("shape", [(2, 0), (5,), *SHAPES], ids=str)
@pytest.mark.parametrize("share", [-9.0, 0.0, 9.0])
def test_positions_of_flags(shape, share):
    chosen = drawn(*shape) < share
    same([cpu.select.compact(chosen)], [ops.select.compact(chosen)])
    same([cpu.select.compact(chosen[..., ::2])], [ops.select.compact(chosen[..., ::2])])


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("padded", [False, True])
def test_candidates_of_any_head(shape, padded):
    votes = (rounded(*shape).clamp_min(-9) * 2).int()
    valid = drawn(shape[0], shape[3]) > -0.5 if padded else None
    if padded:
        valid[:, 0] = True
    counts = torch.full(shape[:1], shape[3]) if valid is None else valid.sum(1)
    for limits in (counts, counts // 3, counts // 50 + 1):
        limits = limits.minimum(counts)
        found = cpu.select.candidates(votes, limits, valid)
        same([found], [ops.select.candidates(votes, limits, valid)])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64, torch.uint8])
@pytest.mark.parametrize("tail", [(), (1,), (5,), (3, 8), (64,)], ids=str)
def test_rows_are_gathered(dtype, tail):
    table = (drawn(2, 3, 50, *tail) * 40).to(dtype)
    ids = torch.randint(-1, 50, (2, 3, 30), generator=torch.Generator().manual_seed(0))
    for some in (table, table[:, :, :40].transpose(0, 1).contiguous().transpose(0, 1)):
        wanted = ids.clamp_max(some.shape[2] - 1)
        same([cpu.fetch.gather_rows(some, wanted)], [ops.fetch.gather_rows(some, wanted)])
    same([cpu.fetch.gather_rows(table, ids[..., :0])], [ops.fetch.gather_rows(table, ids[..., :0])])


def test_a_row_past_the_last_is_refused():
    with pytest.raises(IndexError, match="ids: got 5, allowed is below 5"):
        cpu.fetch.gather_rows(drawn(1, 1, 5, 8), torch.tensor([[[0, 5]]]))


@pytest.mark.parametrize("policy", ops.group.POLICIES)
@pytest.mark.parametrize("softcap", [None, 5.0])
@pytest.mark.parametrize("heads", [1, 3])
@pytest.mark.parametrize("sized", [False, True])
def test_heads_agree(policy, softcap, heads, sized):
    estimates = drawn(2, 3, heads, 300) * 100
    estimates[:, :, :, 7:20] = -INF
    estimates[0, 0] = -INF
    sizes = torch.arange(300).expand(2, 3, 300) % 5 if sized else None
    options = dict(scale=0.125, softcap=softcap, sizes=sizes)
    got = cpu.group.agree(estimates, policy, **options)
    want = ops.group.agree(estimates, policy, **options)
    assert torch.equal(got == -INF, want == -INF)
    torch.testing.assert_close(got, want, rtol=2e-6, atol=2e-5)


def test_equal_estimates_agree_on_equal_scores():
    estimates = drawn(1, 1, 3, 1)
    agreed = cpu.group.agree(estimates.expand(1, 1, 3, 77), "mean_share", scale=1.0, softcap=None)
    assert len(agreed.unique()) == 1


@pytest.mark.parametrize("k", [1, 9, 60])
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_rows_of_the_best_units(k, dtype):
    sizes = torch.randint(0, 6, (2, 3, 12), generator=torch.Generator().manual_seed(1))
    starts = (sizes.cumsum(-1) - sizes)[..., :9]
    members = torch.stack([torch.randperm(60) for _ in range(6)]).view(2, 3, 60).to(dtype)
    sizes[..., 9:] = sizes[..., 9:].clamp_max(1)
    singles = torch.tensor([[60, -1, 61], [62, 63, -1]])
    alone = rounded(2, 3, 12), starts, sizes, members, k, singles
    paged = alone[0][..., :9], starts, sizes[..., :9], members[:, :1].expand(2, 3, 60), k
    for arguments in (alone, paged):
        found, wanted = (kind.units.best_rows(*arguments) for kind in (cpu, ops))
        same((found.ids, found.scores), (wanted.ids, wanted.scores))


@pytest.mark.parametrize("k", [1, 9, 60])
def test_units_are_laid_end_to_end(k):
    sizes = torch.randint(0, 6, (2, 3, 12), generator=torch.Generator().manual_seed(1))
    same(cpu.units.walk(sizes, k), ops.units.walk(sizes, k))
    same(cpu.units.walk(sizes[..., :0], k), ops.units.walk(sizes[..., :0], k))


def test_kernels_are_named_after_every_file_that_they_have_a_part_of():
    folder = Path(compile.__file__).parent
    imports = re.compile(r"^from (kvindex[\w.]*) import ([\w, ]+|\()", re.MULTILINE)
    files = set()
    for path in folder.glob("*.py"):
        for module, names in imports.findall(path.read_text()):
            files |= {f"{module}.{names}"} if module == "kvindex.ops" else {module}
    outer = {name for name in files if not name.startswith("kvindex.cpu.kernels")}
    outer.discard("kvindex.core.extras")  # for the error if Numba is missing
    assert outer == {f"kvindex.ops.{name}" for name in compile.NUMBERS}
