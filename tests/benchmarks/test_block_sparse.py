"""The script that compares kernels for chosen blocks: each kernel computes the same attention."""

import json
import sys
from itertools import pairwise
from types import ModuleType

import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention

from benchmarks import block_sparse
from kvindex.core.geometry import Geometry
from kvindex.ops.block_sparse import attend_chosen

SMALL = Geometry.of(q_heads=4, kv_heads=2, head_dim=16, dtype=torch.bfloat16)
GIVEN = ["--tokens", "896", "--queries", "384", "--rounds", "2"]


class Wrapper:
    """Stands for both of FlashInfer's classes: attends from rows of queries to lists of keys."""

    def __init__(self, workspace, backend):
        assert workspace.dtype == torch.uint8
        assert backend in ("fa2", "fa3")

    def attend(self, queries, keys, values):
        """Attend from rows of queries `[R, t, D]` to listed keys, causally at the end."""
        outputs = []
        for query, (start, stop) in zip(queries, pairwise(self.indptr), strict=True):
            rows = self.indices[start:stop].long()
            logits = query.float() @ keys[rows].float().T * self.scale
            mask = torch.ones_like(logits).tril(len(rows) - len(query)).bool()
            weights = logits.masked_fill(~mask, -torch.inf).softmax(-1)
            outputs.append(weights @ values[rows].float())
        return torch.stack(outputs).to(queries.dtype)


class BlockSparseAttentionWrapper(Wrapper):
    def plan(self, indptr, indices, M, N, R, C, *, num_qo_heads, num_kv_heads, causal, **how):
        assert (indptr.dtype, indices.dtype) == (torch.int32, torch.int32)
        assert (num_qo_heads, num_kv_heads, causal) == (1, 1, True)
        assert how["q_data_type"] == how["kv_data_type"] == how["o_data_type"] == torch.bfloat16
        self.shape, self.rows, self.scale = (M, N), R, how["sm_scale"]
        self.indptr = (indptr * C).tolist()
        self.indices = (indices[:, None] * C + torch.arange(C)).flatten()

    def run(self, queries, keys, values):
        assert (len(queries), len(keys)) == self.shape
        assert all(part.is_contiguous() for part in (queries, keys, values))
        parts = queries.view(-1, self.rows, queries.shape[2]), keys[:, 0], values[:, 0]
        return self.attend(*parts).view(queries.shape)


class VariableBlockSparseAttentionWrapper(Wrapper):
    def plan(self, mask, row_sizes, column_sizes, *, num_qo_heads, num_kv_heads, causal, **how):
        assert num_qo_heads == num_kv_heads == len(mask) == len(row_sizes) == len(column_sizes)
        assert causal
        assert {*row_sizes.unique().tolist(), *column_sizes.unique().tolist()} == {128}
        assert mask.shape[1:] == (row_sizes.shape[1], column_sizes.shape[1])
        head, _, block = mask.nonzero(as_tuple=True)
        first = (head * mask.shape[2] + block) * 128
        self.indices = (first[:, None] + torch.arange(128)).flatten()
        self.indptr = [0, *(mask.sum(-1).flatten().cumsum(0) * 128).tolist()]
        self.scale = how["sm_scale"]

    def run(self, queries, keys, values):
        parts = queries.reshape(-1, 128, queries.shape[2]), keys.flatten(0, 1), values.flatten(0, 1)
        return self.attend(*parts).view(queries.shape)


def flex_attention(queries, keys, values, *, block_mask, scale, enable_gqa):
    """Stands for the compiled FlexAttention. Without compilation, it would ignore the lists of
    blocks."""
    T, N = block_mask.seq_lengths
    partial, full = (
        torch.zeros(*numbers.shape, N // 128, dtype=torch.bool)
        for numbers in (block_mask.kv_num_blocks, block_mask.full_kv_num_blocks)
    )
    for blocks, numbers, indices in (
        (partial, block_mask.kv_num_blocks, block_mask.kv_indices),
        (full, block_mask.full_kv_num_blocks, block_mask.full_kv_indices),
    ):
        for at in torch.cartesian_prod(*map(torch.arange, numbers.shape)).tolist():
            at = tuple(at)
            blocks[at][indices[at][: numbers[at]].long()] = True
    partial, full = (
        part.repeat_interleave(128, 2).repeat_interleave(128, 3) for part in (partial, full)
    )
    seen = block_mask.mask_mod(0, 0, torch.arange(T)[:, None], torch.arange(N))
    parts = queries, keys, values, full | partial & seen
    return scaled_dot_product_attention(*parts, scale=scale, enable_gqa=enable_gqa)


@pytest.fixture
def small(monkeypatch):
    """Sizes for a CPU, where Triton and FlexAttention are not compiled, without FlashInfer."""
    monkeypatch.setattr(block_sparse.workload, "geometry", lambda device: SMALL)
    monkeypatch.setattr(block_sparse, "timed", lambda run: {"ms": [run().shape[2] / 100]})
    monkeypatch.setattr(block_sparse, "_compiled", lambda: flex_attention)
    monkeypatch.setattr(block_sparse, "WORKSPACE_BYTES", 8)
    monkeypatch.setitem(block_sparse.KERNELS, "kvindex", triton_kernel)
    monkeypatch.setitem(sys.modules, "flashinfer.sparse", None)
    block_sparse._wrapper.cache_clear()


def triton_kernel(chunk, chosen):
    """The reference in place of the Triton kernel."""
    parts = chunk.queries, chunk.keys, chunk.values
    return lambda: attend_chosen(*parts, chosen, scale=chunk.scale)


@pytest.fixture
def flashinfer(monkeypatch, small):
    """A replacement of FlashInfer."""
    module = ModuleType("flashinfer.sparse")
    for kind in (BlockSparseAttentionWrapper, VariableBlockSparseAttentionWrapper):
        setattr(module, kind.__name__, kind)
    monkeypatch.setitem(sys.modules, "flashinfer", ModuleType("flashinfer"))
    monkeypatch.setitem(sys.modules, "flashinfer.sparse", module)


def ran(tmp_path, *given):
    path = tmp_path / "out.json"
    block_sparse.main([*GIVEN, *given, "--json", str(path)], device="cpu")
    return json.loads(path.read_text())


@pytest.mark.usefixtures("flashinfer")
def test_each_kernel_attends_to_the_chosen_blocks(tmp_path):
    result = ran(tmp_path, "--fraction", "0.5", "0")
    half, own = result["cells"]
    for cell in half, own:
        assert cell["skipped"] == {}
        assert list(cell["kernels"]) == list(block_sparse.KERNELS)
        assert cell["rounds"] == 2
    assert 0.4 < half["read"] < 0.75
    assert own["read"] == 3 / 18  # blocks 4 to 6 are the queries' own
    found = half["kernels"]["flex"]
    assert found["ms"] == found["ms_high"] == 3.84
    assert found["tflops"] == pytest.approx(4 * 4 * 18 * half["read"] * 128**2 * 16e-9 / 3.84)
    assert half["kernels"]["full"]["tflops"] == pytest.approx(4 * 4 * 18 * 128**2 * 16e-9 / 3.84)


@pytest.mark.usefixtures("small")
def test_missing_and_wrong_kernels_are_skipped(tmp_path, monkeypatch):
    def wrong(chunk, chosen):
        fewer = chosen.clone()
        fewer[0, 1, 2, 0] = ~fewer[0, 1, 2, 0]
        return triton_kernel(chunk, fewer)

    monkeypatch.setitem(block_sparse.KERNELS, "flex", wrong)
    (cell,) = ran(tmp_path, "--fraction", "0.5")["cells"]
    assert list(cell["kernels"]) == ["full", "kvindex"]
    assert "ImportError" in cell["skipped"]["flashinfer-fa2"].replace("ModuleNotFound", "Import")
    assert "got a relative error of" in cell["skipped"]["flex"]
    (cell,) = ran(tmp_path, "--fraction", "0.5", "--kernel", "flashinfer-fa3")["cells"]
    assert (cell["rounds"], cell["kernels"]) == (0, {})


@pytest.mark.parametrize(
    "given",
    [
        ["--tokens", "1000"],
        ["--queries", "1024"],
        ["--queries", "0"],
        ["--fraction", "1.5"],
        ["--rounds", "0"],
        ["--kernel", "flash"],
    ],
)
def test_wrong_options_exit(given):
    with pytest.raises(SystemExit):
        block_sparse.arguments([*GIVEN, *given])
