"""Triton compiles each kernel for sm_90, with and without overlap. No GPU needed."""

import subprocess
import sys
from itertools import product as product_of
from types import SimpleNamespace

import pytest
import torch

from tests.support.helpers import mostly_slow

# the imports below need Triton (E402)
triton = pytest.importorskip("triton")

from triton.backends.compiler import GPUTarget  # noqa: E402
from triton.compiler import ASTSource  # noqa: E402

from kvindex_cuda.memory.block_store import MOST_PAIRS, BlockStore  # noqa: E402
from kvindex_cuda.triton import Matrix  # noqa: E402
from kvindex_cuda.triton import block_sparse as tiles_of_blocks  # noqa: E402
from kvindex_cuda.triton.kernels import (  # noqa: E402
    attention,
    block_sparse,
    chunk,
    ends,
    heads,
    product,
)
from kvindex_cuda.triton.pages import LARGEST, usual_tile, wide_bytes  # noqa: E402
from kvindex_cuda.triton.tiles import usual  # noqa: E402

pytestmark = [
    pytest.mark.skipif(triton.knobs.runtime.interpret, reason="nothing is compiled there"),
    pytest.mark.skipif(sys.platform != "linux", reason="Triton's assembler is for Linux"),
]

POINTERS = {
    "scale": "*fp32",
    "values": "*fp32",
    "ids": "*i64",
    "positions": "*i64",
    "frequencies": "*fp32",
    "scratch": "*i64",
    "tokens": "*i64",
    "slots": "*i64",
    "tickets": "*i32",
    "table": "*i64",
    "lengths": "*i64",
    "lse": "*fp32",
    "parts": "*fp32",
    "starts": "*i64",
    "ends": "*i64",
    "cos": "*fp32",
    "sin": "*fp32",
}
FLOATS = {"eps", "query_eps", "key_eps", "factor"}
PRODUCT = dict(BLOCK_N=16, BLOCK_K=256, SLICES=4, STAGES=3, AHEAD=2, bias=None, scale=None)
MULTIPLY = PRODUCT | dict(GATED=False, PAIRED=False, EARLY=False)
HEADS = PRODUCT | dict(H=32, G=8, D=128, BATCH=1)
PAGES = dict(G=8, GROUP=4, D=128, DV=128, PAGE=256, WIDE=128, WIDE_V=128, BLOCK_M=64, BLOCK_N=64)
PAGES |= dict(scale="fp32", flags=None, FLAGS=0)
SPLIT = dict(G=8, GROUP=4, D=128, DV=128, ROWS=16, BLOCK_N=64, WIDE=128, WIDE_V=128, SPLITS=64)
MERGE = dict(DV=128, WIDE_V=128, SPLITS=64, output="*bf16", merged_lse=None)
ROTATED = dict(H=32, G=8, D=128, WIDE=64, BLOCK=16, cos="*bf16", sin="*bf16", values="*bf16")
BEGIN = dict(D=128, BLOCK=1024, HALF=64, cos="*bf16", sin="*bf16")
CASES = [
    (product.multiply, "bf16", MULTIPLY | dict(BATCH=1, residual=None)),
    (product.multiply, "bf16", MULTIPLY | dict(BATCH=8, residual=None)),
    (product.multiply, "bf16", MULTIPLY | dict(BATCH=8, norm=None, GATED=True)),
    (product.multiply, "fp16", MULTIPLY | dict(BATCH=8, residual=None)),
    (product.multiply, "fp32", MULTIPLY | dict(BATCH=8, residual=None, BLOCK_K=128)),
    (product.multiply, "bf16", MULTIPLY | dict(BATCH=8, residual=None, PAIRED=True)),
    (product.multiply, "fp8e4nv", MULTIPLY | dict(BATCH=1, norm=None, scale="*fp32")),
    (product.multiply, "fp8e4nv", MULTIPLY | dict(BATCH=8, norm=None, scale="*fp32")),
    (product.multiply, "bf16", MULTIPLY | dict(BATCH=1, norm=None, EARLY=True)),
    (ends.begin_token, "bf16", BEGIN),
    (ends.most_likely, "bf16", dict(BLOCK=2048)),
    (ends.most_likely, "fp32", dict(BLOCK=2048)),
    (heads.project_heads, "bf16", HEADS),
    (heads.project_heads, "bf16", HEADS | dict(BATCH=16, query_norm=None, key_norm=None)),
    (attention.attend_pages, "bf16", PAGES | dict(CAUSAL=True, SPLITS=1, SLOTS=1, parts="*bf16")),
    (attention.attend_pages, "fp16", PAGES | dict(CAUSAL=False, SPLITS=64, SLOTS=128)),
    (
        attention.attend_pages,
        "bf16",
        PAGES | dict(CAUSAL=False, SPLITS=64, SLOTS=128, flags="*i32", FLAGS=32),
    ),
    (
        attention.attend_pages,
        "bf16",
        PAGES | dict(CAUSAL=True, SPLITS=64, SLOTS=128, flags="*u8", FLAGS=1),
    ),
    (chunk.rotate_heads, "bf16", ROTATED),
    (chunk.rotate_heads, "fp16", ROTATED | dict(query_norm=None, key_norm=None, values="*fp16")),
    (chunk.swiglu, "bf16", dict(BLOCK=2048)),
    (attention.attend_split, "bf16", SPLIT | dict(STAGES=3, scale="fp32", values="*bf16")),
    (attention.merge_splits, "bf16", MERGE),
    (attention.merge_splits, "bf16", MERGE | dict(merged_lse="*fp32")),
]
SHARED = 227 * 1024
"""Bytes of shared memory of a multiprocessor of compute capability 9.0."""

TENSORS = {
    *("x", "norm", "weight", "bias", "residual", "output", "logits", "projected"),
    *("query", "key", "value", "gate", "up"),
    *("query_norm", "key_norm", "queries", "keys", "embedding", "hidden"),
}


def compiled(kernel, weights, given, aligned=False, warps=4, stages=2):
    """Return the PTX of a kernel. given: its constants, or types that replace the usual ones.

    aligned: addresses and sizes, except the batch, are multiples of 16, as those of a decoder are.
    """
    others = "bf16" if weights == "fp8e4nv" else weights
    types, constants = {}, {}
    for name in kernel.arg_names:
        value = given.get(name)
        if name in given and not isinstance(value, str):
            types[name], constants[name] = "constexpr", value
        elif value is not None:
            types[name] = value
        elif name in TENSORS or (name == "values" and kernel is heads.project_heads):
            types[name] = f"*{weights if name == 'weight' else others}"
        else:
            types[name] = POINTERS.get(name, "fp32" if name in FLOATS else "i32")
    even = [["tt.divisibility", 16]]
    attrs = {
        (at,): even
        for at, name in enumerate(kernel.arg_names)
        if aligned
        and name != "B"
        and types[name] not in ("constexpr", "fp32")
        and not kernel.params[at].do_not_specialize
    }
    source = ASTSource(kernel, types, constexprs=constants, attrs=attrs)
    options = dict(num_warps=warps, num_stages=stages)
    return triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options)


@pytest.mark.parametrize(("kernel", "weights", "given"), mostly_slow(CASES, CASES[8], CASES[12]))
@pytest.mark.parametrize(
    "overlapped", [True, pytest.param(False, marks=pytest.mark.slow)], ids=["overlap", "alone"]
)
def test_a_kernel_compiles(kernel, weights, given, overlapped, tmp_path, monkeypatch):
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    found = compiled(kernel, weights, given | dict(OVERLAP=overlapped)).asm
    assert found["cubin"]
    assert ("griddepcontrol.wait" in found["ptx"]) == overlapped
    # its first weights, before it waits for the previous kernel
    brought = overlapped and given.get("BATCH", 1) > 1
    assert ("prefetch.global.L2" in found["ptx"]) == brought
    asked = overlapped and bool(given.get("EARLY"))
    assert ("cp.async.bulk.prefetch.L2.global" in found["ptx"]) == asked


@pytest.mark.slow
def test_products_of_several_rows_run_on_the_matrix_units(tmp_path, monkeypatch):
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    for weights in ("bf16", "fp16"):
        given = MULTIPLY | dict(BATCH=8, residual=None, OVERLAP=True)
        assert "mma" in compiled(product.multiply, weights, given).asm["ptx"]


CHOOSE = dict(OVERLAP=False, mass="fp32", chosen="*i8", WIDE=1024)
CHOOSING = [
    (block_sparse.choose_by_mass, CHOOSE | dict(scores="*fp32")),
    (block_sparse.choose_by_sums, CHOOSE | dict(sums="*fp32", COUNT=32)),
    (block_sparse.list_chosen, CHOOSE | dict(listed="*i32", counts="*i32")),
]


@pytest.mark.parametrize(("kernel", "given"), CHOOSING)
def test_kernels_that_choose_blocks_compile(kernel, given, tmp_path, monkeypatch):
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    assert compiled(kernel, "bf16", given, warps=8, stages=1).asm["cubin"]


def test_a_new_length_of_the_prompt_compiles_no_kernel_again():
    """Each compilation takes as long as many chunks. A length that happens to be a multiple of 16
    is not special, and few lengths have a width of their own."""
    changing = {"first_block", "T", "N", "QB", "KB"}
    for kernel, _ in [*CHOOSING, (block_sparse.sum_blocks, {}), (block_sparse.attend_chosen, {})]:
        special = {one.name for one in kernel.params if not one.do_not_specialize}
        assert not special & changing, kernel
    widths = [tiles_of_blocks.row_width(KB) for KB in range(1, tiles_of_blocks.WIDEST + 1)]
    assert sorted(set(widths)) == [256, 1024, 4096, 16384, 32768]
    assert all(width >= KB for KB, width in enumerate(widths, 1))
    for tokens in (64, 300, 32_768, 32_896, 131_072, 131_200, 10**6, 10**9):
        lengths = tiles_of_blocks.compiled_lengths(tokens)
        most = min(tokens // 128, tiles_of_blocks.WIDEST)
        assert all(length % 128 == 0 and length <= tokens for length in lengths)
        assert [tiles_of_blocks.row_width(length // 128) for length in lengths] == sorted(
            set(widths[:most])
        )


@pytest.mark.parametrize(
    ("width", "dtype"), mostly_slow(product_of((64, 96, 128, 256), ("bf16", "fp32")), (256, "bf16"))
)
def test_sparse_attention_fits_into_shared_memory(width, dtype, tmp_path, monkeypatch):
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    size, wide = (2 if dtype == "bf16" else 4), triton.next_power_of_2(width)
    same = dict(OVERLAP=False, scale="fp32", H=32, GROUP=4, D=width, WIDE=wide, BLOCK=128)

    def blocks(rows):
        return f"tensordesc<{dtype}[1, 1, {rows}, {wide}]>"

    tile = tiles_of_blocks.tile_of(width, size)
    given = same | dict(key_blocks=blocks(tile.columns), value_blocks=blocks(tile.columns))
    given |= dict(DV=width, WIDE_V=wide, BLOCK_N=tile.columns, PIECES=128 // tile.columns)
    given |= dict(values=f"*{dtype}", output=f"*{dtype}", listed="*i32", counts="*i32")
    attend = compiled(block_sparse.attend_chosen, dtype, given, True, tile.warps, tile.stages)
    tile = tiles_of_blocks.sampled_tile(128, wide * size)
    given = same | dict(key_blocks=blocks(128), sums="*fp32", G=8, COUNT=32, STEP=4)
    given |= dict(ROWS=tile.rows, TILES=128 // tile.rows)
    sums = compiled(block_sparse.sum_blocks, dtype, given, True, tile.warps, tile.stages)
    for found in (attend, sums):
        assert found.metadata.shared <= SHARED
        assert dtype != "bf16" or "wgmma" in found.asm["ptx"]


WIDTHS = list(product_of((128, 256, 512), (2, 4)))


@pytest.mark.parametrize(("dim", "size"), mostly_slow(WIDTHS, (512, 2)))
def test_attention_to_pages_fits_into_shared_memory(dim, size, tmp_path, monkeypatch):
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    width, dtype = wide_bytes(dim, dim, size), {2: "bf16", 4: "fp32"}[size]
    same = PAGES | dict(D=dim, DV=dim, WIDE=dim, WIDE_V=dim, CAUSAL=False, OVERLAP=False)
    for tile in (usual_tile(64, width), usual_tile(65, width)):
        given = same | dict(BLOCK_M=tile.rows, BLOCK_N=tile.columns, SPLITS=64, SLOTS=128)
        found = compiled(attention.attend_pages, dtype, given, True, tile.warps, tile.stages)
        assert found.metadata.shared <= SHARED


def test_a_store_reads_rows_for_as_many_tokens_as_a_program_has():
    assert {width: tile.rows for width, tile in LARGEST.items()} == MOST_PAIRS
    assert wide_bytes(72, 8, 2) == 256
    with pytest.raises(ValueError, match="queries: got keys or values of 4096 bytes"):
        usual_tile(16, 4096)
    for dim, dtype, tokens in (
        (128, torch.bfloat16, 32),
        (72, torch.float32, 32),
        (512, torch.bfloat16, 16),
        (512, torch.float32, 8),
        (1032, torch.float32, 0),
    ):
        sizes = dict(head_dim=dim, value_dim=dim, group_size=4, value_in_key=False, softcap=None)
        geometry = SimpleNamespace(**sizes, dtype=dtype, device=torch.device("cuda"))
        store = SimpleNamespace(_geometry=geometry, row_codec="plain")
        assert BlockStore.most_tokens.fget(store) == tokens


KINDS = {
    "norm_linear": dict(residual=None),
    "linear_residual": dict(norm=None),
    "norm_swiglu": dict(residual=None, PAIRED=True),
}
SIZES = [(6144, 4096), (4096, 12288), (576, 576)]
"""Matrices with different tiles: with many matrix rows, with few, and with short ones."""


@pytest.mark.parametrize(
    ("kind", "weights", "size"),
    mostly_slow(
        product_of(KINDS, ("bf16", "fp8e4nv"), SIZES), ("linear_residual", "fp8e4nv", SIZES[1])
    ),
)
def test_products_of_several_rows_copy_ahead_and_spill_nothing(
    kind, weights, size, tmp_path, monkeypatch
):
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    dtype = torch.bfloat16 if weights == "bf16" else torch.float8_e4m3fn
    tile = usual(Matrix(torch.empty(size, dtype=dtype, device="meta")), 4)
    sizes = dict(BLOCK_N=tile.rows, BLOCK_K=tile.columns, SLICES=tile.warps, STAGES=tile.stages)
    given = MULTIPLY | KINDS[kind] | sizes | dict(BATCH=8, OVERLAP=True)
    if weights == "fp8e4nv":
        given |= dict(scale="*fp32")
    found = compiled(product.multiply, weights, given, True, tile.warps, tile.stages)
    loop = found.asm["ttgir"].partition("scf.for")[2].partition("scf.yield")[0]
    copied = loop.count("ttg.async_copy_global_to_local")
    assert copied == 2 + ("norm" in kind)  # weights, activations, factors of the norm
    assert "tt.load" not in loop
    # no warp repeats another warp's work
    assert f"warpsPerCTA = [{tile.warps}, 1, 1]" in found.asm["ttgir"]
    assert found.metadata.shared <= SHARED // 2  # two programs fit on a multiprocessor
    (tmp_path / "cubin").write_bytes(found.asm["cubin"])
    usage = subprocess.run(
        [triton.knobs.nvidia.cuobjdump.path, "-res-usage", tmp_path / "cubin"],
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    assert "STACK:0 " in usage, usage


@pytest.mark.slow
def test_the_first_weights_are_read_before_the_wait(tmp_path, monkeypatch):
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    for weights in ("bf16", "fp8e4nv"):
        given = MULTIPLY | dict(BATCH=1, norm=None, OVERLAP=True, EARLY=True)
        if weights == "fp8e4nv":
            given |= dict(scale="*fp32")
        ptx = compiled(product.multiply, weights, given).asm["ptx"]
        before, _, after = ptx.partition("griddepcontrol.wait")
        assert "ld.global" in before
        assert "ld.global" in after
        first, _, others = before.partition("cp.async.bulk.prefetch")  # and then all are prefetched
        assert "ld.global" in first
        assert others
        assert "ld.global" not in others
        assert "cp.async.bulk.prefetch" not in others + after  # with one instruction per thread


@pytest.mark.slow
def test_a_head_is_rotated_once_all_of_it_is_written(tmp_path, monkeypatch):
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    ptx = compiled(heads.project_heads, "bf16", HEADS | dict(OVERLAP=True)).asm["ptx"]
    before, ticket, after = ptx.partition("atom.global.gpu.acq_rel.add.u32")
    assert ticket
    assert "st.global" in before
    assert "bar.sync" in before.rpartition("st.global")[2]  # all threads have written
    assert "ld.global.cg" not in before
    assert "ld.global.cg" in after


def test_angles_of_far_positions_are_exact(tmp_path, monkeypatch):
    """The cosine of large angles needs more digits of pi; the device's fast cosine is for small
    angles.
    """
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    ptx = compiled(ends.begin_token, "bf16", BEGIN | dict(OVERLAP=True)).asm["ptx"]
    assert "__cudart_i2opi_f" in ptx
    assert "cos.approx" not in ptx
    assert "sin.approx" not in ptx


@pytest.mark.slow
def test_copies_of_the_next_weights_begin_before_anything_is_multiplied(tmp_path, monkeypatch):
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    loads = []
    for ahead in (1, 3):
        given = MULTIPLY | dict(BATCH=1, residual=None, OVERLAP=True, AHEAD=ahead)
        ptx = compiled(product.multiply, "bf16", given, aligned=True).asm["ptx"]
        before, _, after = ptx.partition("griddepcontrol.wait")
        loads.append(before.count("ld.global"))
        assert "cp.async" in after.partition("fma.rn")[0]
    assert loads[1] == 3 * loads[0]
