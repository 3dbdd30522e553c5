"""Blocks of codes and rows at addresses that kernels follow."""
