"""ParisKV on a GPU: its executor, decode steps and appends, with fused kernels."""
