"""What `benchmarks/decode_step.py` runs, from what it measures on to what it shows."""
