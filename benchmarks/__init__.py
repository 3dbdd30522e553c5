"""Benchmarks. Each script answers one question: it checks the results first, then measures."""
