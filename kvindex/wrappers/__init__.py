"""Wrappers: each adds one feature, such as sampling or sharding, to any index that it wraps."""

from kvindex.wrappers.base import Wrapper
from kvindex.wrappers.recall import MeasureRecall
from kvindex.wrappers.reuse import Reuse
from kvindex.wrappers.sample import Sample
from kvindex.wrappers.sharded import Sharded
from kvindex.wrappers.vattention import VAttention

__all__ = ["MeasureRecall", "Reuse", "Sample", "Sharded", "VAttention", "Wrapper"]
