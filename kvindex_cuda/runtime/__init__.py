"""Compile kernels, resolve their arguments by name, and launch them."""
