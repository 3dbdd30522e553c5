"""Kernels that Triton compiles. The modules of `kvindex_cuda/triton` check their arguments and
launch them."""
