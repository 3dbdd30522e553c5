"""Any index in any decoder of transformers.

import kvindex_adapters.hf as kvhf
with kvhf.attach(model, index="pariskv", k=100) as cache:
    out = model.generate(**inputs, past_key_values=cache, max_new_tokens=512)
print(cache.report())
"""

from kvindex_adapters.hf.attach import attach
from kvindex_adapters.hf.cache import IndexCache
from kvindex_adapters.hf.generation import Generation, generate
from kvindex_adapters.hf.punctuation import sentence_ends
from kvindex_adapters.hf.reading import read
from kvindex_adapters.hf.refuse import UnsupportedError
from kvindex_adapters.hf.report import Report

__all__ = [
    "Generation",
    "IndexCache",
    "Report",
    "UnsupportedError",
    "attach",
    "generate",
    "read",
    "sentence_ends",
]
