"""kvindex treats the KV cache of a language model as a vector database.

An index encodes and appends keys and values, searches for the rows that a query should attend to,
and fetches them.
"""

from kvindex.bases.index import BaseIndex
from kvindex.core.geometry import Geometry
from kvindex.core.protocol import Codes, Hits, KVIndex, Rows
from kvindex.core.version import __version__ as __version__
from kvindex.layer.attention_layer import AttentionLayer
from kvindex.pool.layer_pool import LayerPool
from kvindex.pool.pool import Pool
from kvindex.registry import create, get, names
from kvindex.saving.load import load

__all__ = [
    "AttentionLayer",
    "BaseIndex",
    "Codes",
    "Geometry",
    "Hits",
    "KVIndex",
    "LayerPool",
    "Pool",
    "Rows",
    "create",
    "get",
    "load",
    "names",
]


def __dir__() -> list[str]:
    return __all__
