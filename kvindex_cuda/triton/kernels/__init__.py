"""Functions that Triton compiles. The modules of `kvindex_cuda/triton` launch them and check their
arguments."""
