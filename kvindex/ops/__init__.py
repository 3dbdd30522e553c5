"""Reference implementations in plain PyTorch of all operations of search and attention.

A search uses these modules in this order:

keys -> `transform` -> `codes` -> `coarse` -> `select` -> `rerank` -> `group` -> (`units`,
`coverage`, `sampling`) -> `fetch` -> `attention` -> (`messages` between GPUs)

Two further modules are `kmeans`, for indexes that learn centroids, and `priority`, for random
sampling of candidates and rows in ParisKV.

The compiled versions in `kvindex_cuda.ops` and `kvindex.cpu` have the same names and signatures,
and must give the same results.
"""

# ruff: noqa: I001, RUF022  # the modules are in the order in which a search uses them
from kvindex.ops import (
    transform,
    codes,
    coarse,
    select,
    rerank,
    group,
    units,
    coverage,
    sampling,
    fetch,
    attention,
    messages,
    kmeans,
)

__all__ = [
    "transform",
    "codes",
    "coarse",
    "select",
    "rerank",
    "group",
    "units",
    "coverage",
    "sampling",
    "fetch",
    "attention",
    "messages",
    "kmeans",
]
