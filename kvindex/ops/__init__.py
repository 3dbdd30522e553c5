"""Reference operations in plain PyTorch, listed in the order in which data flows through them.

keys -> `transform` -> `codes` -> `coarse` -> `select` -> `rerank` -> `group` -> (`units`,
`coverage`, `sampling`) -> `fetch` -> `attention` -> (`messages` between GPUs). Two modules are
outside this order: `kmeans` serves indexes that learn centroids, and `priority` samples ParisKV's
candidates and rows.

These functions are the specification of the compiled versions in `kvindex_cuda.ops` and
`kvindex.cpu`, which have the same names and signatures.
"""

# ruff: noqa: I001, RUF022  # imports are in the order of the data flow
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
