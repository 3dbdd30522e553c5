"""A tokenizer without a model: byte pairs, learned from the filler text of tasks."""

import pytest
from transformers import PreTrainedTokenizerFast

from tests.adapters.tiny import byte_pairs


@pytest.fixture(scope="session")
def tokenizer():
    """A tokenizer with a chat template."""
    return byte_pairs()


@pytest.fixture(scope="session")
def plain(tokenizer):
    """Return the same tokenizer without a chat template."""
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer.backend_tokenizer)
