"""The ops of `kvindex.ops` as CUDA kernels: same names, same signatures."""
