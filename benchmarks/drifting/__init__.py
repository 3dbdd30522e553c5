"""What benchmarks/drift.py compares, how keys are shifted, and what it shows."""
