"""The layout of blocks of codes, re-exported from `kvindex/pariskv/block_layout.py`."""

from kvindex.pariskv.block_layout import (
    ALIGNED,
    BLOCK,
    MAX_TOKENS,
    Layout,
    SubspaceLayout,
    places,
)

__all__ = ["ALIGNED", "BLOCK", "MAX_TOKENS", "Layout", "SubspaceLayout", "places"]
