"""Manages the memory that kernels read: blocks of rows and codes, pinned memory, and the cache of
rows."""
