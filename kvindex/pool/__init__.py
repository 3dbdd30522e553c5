"""Pools: many sequences behind one index or one layer, as a serving engine has them."""
