"""Tiles are chosen by a product's case; the tuner prints lines that the table takes."""

import importlib
from pathlib import Path

import pytest
import torch

# what is imported below needs Triton (E402)
pytest.importorskip("triton")

from kvindex_cuda.triton import Matrix, Tile, tile_of
from kvindex_cuda.triton import tiles as table
from kvindex_cuda.triton.tiles import Case, case_of


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


def test_the_tuner_times_each_case_once_and_prints_it_for_the_table(monkeypatch):
    monkeypatch.syspath_prepend(str(Path(__file__).parents[3] / "tools"))
    tool = importlib.import_module("tune_triton")
    found = tool.cases(list(tool.SHAPES.values()), [1, 2, 4], tool.WEIGHTS)
    assert {case.product for case in found} == {
        *("norm_linear", "norm_swiglu", "linear_residual", "swiglu_linear")
    }
    for case, (N, K, batches) in found.items():
        assert case_of(case.product, matrix(N, K), batches[0])[:3] == case[:3]
        assert batches == ([1] if case.one else [2, 4])
        assert case.width in (1, 2)
        tried = tool.ONE if case.one else tool.SEVERAL
        assert table.usual(matrix(N, K), batches[0]) in tried
        assert len(tried) * len(batches) <= 24
        us = dict.fromkeys(batches, 3.0)
        rows = [dict(case=case, tile=tile, N=N, K=K, us=us, share=0.8) for tile in tried[1:]]
        printed = eval("{" + tool.line(rows) + "\n}", {"Case": Case, "Tile": Tile})
        assert printed == {case: tried[1]}
