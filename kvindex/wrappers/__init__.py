"""Wrappers: each adds an option to any index that it wraps, so that the option exists only once."""

from kvindex.wrappers.base import Wrapper
from kvindex.wrappers.recall import MeasureRecall
from kvindex.wrappers.reuse import Reuse
from kvindex.wrappers.sample import Sample
from kvindex.wrappers.sharded import Sharded
from kvindex.wrappers.vattention import VAttention

__all__ = ["MeasureRecall", "Reuse", "Sample", "Sharded", "VAttention", "Wrapper"]
