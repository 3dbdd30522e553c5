"""What benchmarks/field.py is made of.

layers: of a real model, all that an index is told; setting: which tokens are where; truth: full
attention and what hits are worth beside it; measure: one index on one layer; runs: what that comes
to; show: tables, plots.
"""
