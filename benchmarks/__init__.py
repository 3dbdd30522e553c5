"""Benchmarks of indexes, kernels and adapters. Most scripts check results before they measure."""
