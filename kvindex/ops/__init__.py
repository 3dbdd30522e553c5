"""Reference ops in plain torch, in the order data flows through them: the kernels' specification.

keys -> `transform` -> `codes` -> `coarse` -> `select` -> `rerank` -> `group` -> (`units`,
`coverage`, `sampling`) -> `fetch` -> `attention` -> (`messages`, of ranks); `kmeans` is for indexes
that learn centroids.
A mirror (`kvindex_cuda.ops`, `kvindex.cpu`) has the same names and signatures.
"""

# ruff: noqa: I001, RUF022  # in the order of the flow
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
