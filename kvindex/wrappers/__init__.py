"""Wrappers: indexes around any other index, so that not every index needs the same option."""

from kvindex.wrappers.base import Wrapper
from kvindex.wrappers.recall import MeasureRecall
from kvindex.wrappers.reuse import Reuse
from kvindex.wrappers.sample import Sample
from kvindex.wrappers.sharded import Sharded
from kvindex.wrappers.vattention import VAttention

__all__ = ["MeasureRecall", "Reuse", "Sample", "Sharded", "VAttention", "Wrapper"]
