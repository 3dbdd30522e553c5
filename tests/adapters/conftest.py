"""The real model of the adapter's tests, loaded once."""

import numpy as np
import pytest

from kvindex_adapters.hf.load_model import load, smollm2


@pytest.fixture(scope="session")
def smollm2_model():
    """SmolLM2-135M-Instruct and its tokenizer, loaded once (about 15 seconds)."""
    try:
        folder, file = smollm2()
    except FileNotFoundError as error:
        pytest.skip(str(error))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(np, "memmap", in_memory)
        return load(folder, gguf_file=file)


def in_memory(path, mode="r", dtype=np.uint8):
    """A file as an array: of a memory map each of a million small slices costs twice as much."""
    return np.fromfile(path, dtype)
