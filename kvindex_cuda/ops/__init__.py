"""Operations of `kvindex.ops` as CUDA kernels, with the same names and signatures."""
