"""Kernels that append tokens to a ParisKV index: encode keys, copy rows, and update counts."""
