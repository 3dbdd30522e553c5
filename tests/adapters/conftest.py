"""The real model of the adapter's tests, loaded once."""

import pytest

from kvindex_adapters.hf.load_model import load, smollm2


@pytest.fixture(scope="session")
def smollm2_model():
    """SmolLM2-135M-Instruct and its tokenizer, loaded once (about 15 seconds)."""
    try:
        folder, file = smollm2()
    except FileNotFoundError as error:
        pytest.skip(str(error))
    return load(folder, gguf_file=file)
