"""Benchmarks, one script a question: each checks the answer, then measures (`results/`)."""
