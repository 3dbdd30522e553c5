"""The commands of `benchmarks/quality.py`, and code that its command `field` uses."""
