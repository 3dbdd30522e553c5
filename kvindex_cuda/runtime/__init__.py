"""Compile kernels, find their arguments by name, and launch them."""
