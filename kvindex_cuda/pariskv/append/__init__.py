"""Kernels that append tokens to a ParisKV index: they encode keys and copy rows."""
