"""Compile and launch kernels."""
