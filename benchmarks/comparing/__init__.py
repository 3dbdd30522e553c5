"""Commands of `benchmarks/quality.py`, and the parts of `field`."""
