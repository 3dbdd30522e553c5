"""ParisKV on compiled kernels: the executor and its stages, named as in `kvindex.pariskv`."""
