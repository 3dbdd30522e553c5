"""Fused decode steps: a few kernels that search and attend for one new token of a layer."""
