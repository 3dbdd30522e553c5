"""Run ParisKV with kernels for CPUs, which Numba compiles.

- `executor`: runs appends, searches and attention.
- `encoding`: encodes keys.
- `sign_votes`, `tiered_votes`, `sampling`: the stages of a search with `coarse="sign_votes"`, with
  `coarse="tiered_votes"`, and with sampled rows. The stages are those of `kvindex.pariskv`.
- `constants`: tables that the kernels read.
- `supported`: options of ParisKV that the kernels support.
- `precompile`: compiles the kernels before the first search.
"""
