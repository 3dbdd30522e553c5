"""Kernels that Triton compiles. Their launchers in the folder above check the arguments."""
