"""Pools: many sequences behind one index or one layer, as a serving engine has them."""

from kvindex.pool.layer_pool import LayerPool
from kvindex.pool.pool import Pool
from kvindex.pool.report import Report

__all__ = ["LayerPool", "Pool", "Report"]
