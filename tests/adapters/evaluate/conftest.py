"""A tokenizer without a model: byte pairs, learned from the filler text of tasks."""

import pytest
from tokenizers import ByteLevelBPETokenizer
from transformers import PreTrainedTokenizerFast

from kvindex_adapters.evaluate.tasks.haystack import paragraphs

TEMPLATE = (
    "{% for message in messages %}<{{ message['role'] }}>\n{{ message['content'] }}<end>\n"
    "{% endfor %}{% if add_generation_prompt %}<assistant>\n{% endif %}"
)


@pytest.fixture(scope="session")
def tokenizer():
    """A tokenizer with a chat template."""
    made = ByteLevelBPETokenizer()
    made.train_from_iterator(paragraphs()[:300], vocab_size=2000, show_progress=False)
    return PreTrainedTokenizerFast(tokenizer_object=made._tokenizer, chat_template=TEMPLATE)


@pytest.fixture(scope="session")
def plain(tokenizer):
    """Return the same tokenizer without a chat template."""
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer.backend_tokenizer)
