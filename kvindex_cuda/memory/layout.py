"""How codes lie in memory on a GPU: as `kvindex/ops/block_layout.py` says."""

from kvindex.ops.block_layout import (
    ALIGNED,
    BLOCK,
    MAX_TOKENS,
    Layout,
    SubspaceLayout,
    places,
)

__all__ = ["ALIGNED", "BLOCK", "MAX_TOKENS", "Layout", "SubspaceLayout", "places"]
