"""Memory that kernels read: blocks of rows (keys and values) and of codes, pinned host memory, and
a cache of rows."""
