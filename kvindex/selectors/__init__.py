"""Selectors of blocks for sparse attention in a prompt: which keys does a block of queries read?

Reading a prompt of `N` tokens with full attention takes time proportional to `N²`. With sparse
attention, each block of 128 queries reads only some blocks of 128 keys. A selector chooses these
blocks for each query head, from a summary of each block of keys. `base` defines the interface, and
each other file has one selector. `kvindex.ops.block_sparse` computes attention to the chosen
blocks.

| selector | score of a block of keys | cost, as a fraction of all logits |
| --- | --- | --- |
| `PooledSelector` | mean query times mean key | 1 / 128² |
| `MaxThresholdSelector` | every query times mean key | 1 / 128 |
| `AntidiagonalSelector` | sums along antidiagonals of tiles | 1 / 16 |
| `SampledSelector` | exact weights of 32 of 128 queries | 1 / 4 |
| `IndexSelector` | 8 queries times sign codes of all keys | 1 / 16, with keys of one bit |
| `VerticalSlashSelector` | exact weights of 64 queries, by key and by distance | 1 / 2 |
| `SkipSelector` | exact logits, compared with the maximum so far | 1 |
| `OracleSelector` | exact weights of all queries | 1 |
"""

from kvindex.selectors.antidiagonal import AntidiagonalSelector
from kvindex.selectors.base import BLOCK, BlockSelector, kept_always
from kvindex.selectors.index import IndexSelector
from kvindex.selectors.max_threshold import MaxThresholdSelector
from kvindex.selectors.named import create
from kvindex.selectors.oracle import OracleSelector
from kvindex.selectors.pooled import PooledSelector
from kvindex.selectors.sampled import SampledSelector
from kvindex.selectors.skip import SkipSelector
from kvindex.selectors.vertical_slash import VerticalSlashSelector

__all__ = [
    "BLOCK",
    "AntidiagonalSelector",
    "BlockSelector",
    "IndexSelector",
    "MaxThresholdSelector",
    "OracleSelector",
    "PooledSelector",
    "SampledSelector",
    "SkipSelector",
    "VerticalSlashSelector",
    "create",
    "kept_always",
]
