"""What `benchmarks/side_by_side.py` runs: a process of each tree, and the table of their times."""
