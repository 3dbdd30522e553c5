"""A decode step of an attached model as one CUDA graph or as fused kernels."""
