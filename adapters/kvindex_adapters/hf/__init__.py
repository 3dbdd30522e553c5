"""The transformers adapter: let a decoder model of transformers attend through an index.

import kvindex_adapters.hf as kvhf
with kvhf.attach(model, index="pariskv") as cache:
    out = model.generate(**inputs, past_key_values=cache, max_new_tokens=512)
print(cache.report())
"""

from importlib.util import find_spec

if find_spec("transformers") is None:
    from kvindex.core.extras import how_to_install

    raise ImportError(
        "kvindex_adapters.hf needs transformers, which is not installed; "
        f"install it with {how_to_install('hf')}"
    )

from kvindex_adapters.common.unsupported import UnsupportedError
from kvindex_adapters.hf.attach import attach
from kvindex_adapters.hf.batching.attach_batch import attach_batch
from kvindex_adapters.hf.batching.state import Batching
from kvindex_adapters.hf.cache.cache import IndexCache
from kvindex_adapters.hf.cache.report import Report
from kvindex_adapters.hf.chat import Chat
from kvindex_adapters.hf.generate import Generation, generate
from kvindex_adapters.hf.generation.prefill import read
from kvindex_adapters.hf.generation.tokenizer import sentence_ends
from kvindex_adapters.hf.model.load_model import load as load_model

__all__ = [
    "Batching",
    "Chat",
    "Generation",
    "IndexCache",
    "Report",
    "UnsupportedError",
    "attach",
    "attach_batch",
    "generate",
    "load_model",
    "read",
    "sentence_ends",
]


def __dir__() -> list[str]:
    return __all__
