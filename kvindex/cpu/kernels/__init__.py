"""Kernels compiled by Numba: functions of numbers, numpy arrays and addresses of tensors."""
