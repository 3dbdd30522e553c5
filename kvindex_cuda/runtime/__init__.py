"""Compile CUDA kernels and launch them. The arguments of a launch are passed by name."""
