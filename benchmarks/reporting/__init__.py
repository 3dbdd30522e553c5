"""Renderers of tables and pictures for `benchmarks/report.py`, by subject."""
