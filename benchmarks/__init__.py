"""Scripts: check the answer first, then measure; results lie in `results/` as JSON."""
