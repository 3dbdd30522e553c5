"""The commands of `benchmarks/quality.py`, and what `field` is made of."""
