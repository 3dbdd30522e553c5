"""Memory that kernels read: blocks of rows and codes, slabs, pinned memory, the row cache."""
