"""Tiles are chosen by the kind of product, and the tuner prints lines that fit the table."""

import importlib
from pathlib import Path

import pytest
import torch

# the imports below need Triton (E402)
pytest.importorskip("triton")

from benchmarks.common.shapes import Shape
from kvindex_cuda.triton import Matrix, Tile, tile_of
from kvindex_cuda.triton import tiles as table
from kvindex_cuda.triton.tiles import Case, case_of
from tests.support.fused import on_a_cpu

PRODUCTS = "norm_linear", "norm_swiglu", "linear_residual", "swiglu_linear"


def matrix(N, K, dtype=torch.bfloat16):
    return Matrix(torch.empty(N, K, dtype=dtype, device="meta"))


def test_shapes_of_one_class_have_one_case():
    wanted = Case("norm_linear", 8192, 4096, 2, True)
    for found in (matrix(6144, 4096), matrix(8192, 2049), matrix(4097, 4096, torch.float16)):
        assert case_of("norm_linear", found, 1) == wanted
    assert case_of("norm_linear", matrix(151_936, 4096, torch.float8_e4m3fn), 3) == (
        Case("norm_linear", table.MOST_ROWS, 4096, 1, False)
    )


def test_a_case_takes_its_tile_and_others_the_usual_one(monkeypatch):
    other = Tile(8, 512, 8, 4)
    monkeypatch.setattr(table, "TILES", {Case("swiglu_linear", 64, 32, 2, True): other})
    assert tile_of("swiglu_linear", matrix(60, 32), 1) == other
    assert tile_of("swiglu_linear", matrix(60, 32), 1, overlap=True) == other._replace(overlap=True)
    assert tile_of("norm_linear", matrix(60, 32), 1, overlap=True) == Tile(overlap=True)
    assert tile_of("swiglu_linear", matrix(60, 32), 2) == table.usual(matrix(60, 32), 2)


def test_a_usual_tile_of_several_sequences_gives_each_multiprocessor_a_program():
    for N, K in ((6144, 4096), (24576, 4096), (4096, 4096), (4096, 12288), (151_936, 4096)):
        tile = table.usual(matrix(N, K), 4)
        assert N / tile.rows >= table.PROGRAMS
        assert tile.rows * tile.columns * 2 * (tile.stages - 1) >= 40_000
    assert table.usual(matrix(4096, 4096), 1) == Tile()


@pytest.mark.slow
def test_the_tuner_times_tokens_with_each_tile_and_prints_the_best(monkeypatch):
    monkeypatch.syspath_prepend(str(Path(__file__).parents[3] / "tools"))
    tool = importlib.import_module("tune_triton")
    on_a_cpu(monkeypatch)
    monkeypatch.setattr(tool.token, "refusal", lambda *_: None)
    for name, few in dict(ONE=tool.ONE[:2], SEVERAL=tool.SEVERAL[:3]).items():
        monkeypatch.setattr(tool, name, few)
    shape, before = Shape(1, 64, 96, 2, 1, 64, 101, normed=True), dict(table.TILES)
    g = shape.geometry(torch.float32, "cpu")
    for batch, products in ((1, {"norm_linear", "linear_residual", "swiglu_linear"}), (2, None)):
        found = tool.ratios(shape, g, tool.PLAIN, batch, 0, 2)
        tried = tool.ONE if batch == 1 else tool.SEVERAL
        assert {case.product for case in found} == (products or {*PRODUCTS} - {"swiglu_linear"})
        for case, ratios in found.items():
            assert (case.width, case.one, [*ratios]) == (4, batch == 1, tried)
            ratios[tried[1]] = 0.1
            printed = eval(
                "{" + tool.line(case, [ratios, ratios]) + "\n}", {"Case": Case, "Tile": Tile}
            )
            assert printed == {case: tried[1]}
    assert before == table.TILES


def test_the_tuner_tries_the_usual_tiles(monkeypatch):
    monkeypatch.syspath_prepend(str(Path(__file__).parents[3] / "tools"))
    tool = importlib.import_module("tune_triton")
    for N, K in ((6144, 4096), (576, 576), (4096, 12288)):
        assert table.usual(matrix(N, K), 1) in tool.ONE
        assert table.usual(matrix(N, K), 4) in tool.SEVERAL
