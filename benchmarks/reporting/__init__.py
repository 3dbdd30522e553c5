"""The tables and pictures of `benchmarks/report.py`, by what they are about."""
