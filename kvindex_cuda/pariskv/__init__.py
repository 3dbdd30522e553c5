"""ParisKV on a GPU with fused kernels: decode steps, appends, and the executor that runs both."""
