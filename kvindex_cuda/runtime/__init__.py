"""Compile CUDA kernels and launch them, with arguments that are found by name."""
