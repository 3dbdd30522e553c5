"""The KV cache of a language model as a vector database: encode, append, search, fetch."""

from kvindex.bases.index import BaseIndex
from kvindex.core.geometry import Geometry
from kvindex.core.protocol import Codes, Hits, KVIndex, Rows
from kvindex.layer.attention_layer import AttentionLayer
from kvindex.pool.layer_pool import LayerPool
from kvindex.pool.pool import Pool
from kvindex.registry import create, get, names
from kvindex.saving.load import load

__version__ = "0.1.0"

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
