"""Appends: what kernels write as tokens come."""
