"""Selectors of blocks for sparse attention in a prompt: which keys does a block of queries read?

Reading a prompt of `N` tokens with full attention takes time proportional to `N²`. With sparse
attention, each block of 128 queries reads only some blocks of 128 keys. A selector chooses these
blocks for each query head, from a summary of each block of keys. `base` defines the interface, and
each other file has one selector. `kvindex.ops.block_sparse` computes attention to the chosen
blocks.

| selector | score of a block of keys | keeps |
| --- | --- | --- |
| `PooledSelector` | mean query times mean key | highest scores, up to a fraction of the weight |
"""

from kvindex.selectors.base import BLOCK, BlockSelector, kept_always
from kvindex.selectors.pooled import PooledSelector

__all__ = ["BLOCK", "BlockSelector", "PooledSelector", "kept_always"]
