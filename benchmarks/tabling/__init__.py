"""The tables that benchmarks/tables.py writes, by what they are about."""
