"""Decode steps: the kernels that a layer launches for one decoded token."""
