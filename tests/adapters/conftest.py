"""Fixtures of the adapter's tests: the real model, loaded once; kernels, and graphs."""

import numpy as np
import pytest

from kvindex.pariskv.index import ParisKV
from kvindex_adapters.hf.model.load_model import load, smollm2
from tests.cuda.devices import DEVICES, on
from tests.cuda.graphs import WholeGraph, counted


@pytest.fixture(scope="session")
def smollm2_model():
    """SmolLM2-135M-Instruct and its tokenizer, loaded once (about 5 seconds)."""
    try:
        folder, file = smollm2()
    except FileNotFoundError as error:
        pytest.skip(str(error))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(np, "memmap", in_memory)
        return load(folder, gguf_file=file)


def in_memory(path, mode="r", dtype=np.uint8):
    """Read a file into an array. Many small slices of a memory map cost twice as much."""
    return np.fromfile(path, dtype)


@pytest.fixture(params=DEVICES)
def device(request, monkeypatch):
    """Device of the model. On a CPU the kernels are emulated, and must be requested."""
    if request.param == "cpu":  # as on a GPU, where the host must not read
        monkeypatch.setattr(ParisKV, "_defers", True)
        monkeypatch.setattr("kvindex.core.check.finite", lambda *_: None)
    with on(request.param):
        yield request.param


@pytest.fixture
def graphs(device):
    """Count graphs and replays."""
    with counted(device, WholeGraph) as counting:
        yield counting
