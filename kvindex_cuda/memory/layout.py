"""The layout of blocks of codes, which is that of `kvindex/ops/block_layout.py`."""

from kvindex.ops.block_layout import (
    ALIGNED,
    BLOCK,
    MAX_TOKENS,
    Layout,
    SubspaceLayout,
    places,
)

__all__ = ["ALIGNED", "BLOCK", "MAX_TOKENS", "Layout", "SubspaceLayout", "places"]
