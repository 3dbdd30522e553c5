"""Kernels compiled by Numba. Their arguments are numbers, numpy arrays and addresses of tensors."""
