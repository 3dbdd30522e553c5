"""Appends: kernels that encode and copy new tokens."""
