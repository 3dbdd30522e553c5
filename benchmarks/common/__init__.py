"""Shared parts of the benchmarks: correctness, decoding, timing, workload."""
