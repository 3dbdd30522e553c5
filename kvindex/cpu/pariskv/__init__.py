"""Executors that run ParisKV with compiled kernels. Stages are named as in `kvindex.pariskv`.

`encoding` encodes keys. Three modules contain the stages of a decode step: `sign_votes` for
`coarse="sign_votes"`, `tiered_votes` for `coarse="tiered_votes"`, and `sampling` for sampled rows.
`executor` runs the stages, `constants` prepares their tables, and `supported` lists the options
that they support. `precompile` compiles the kernels before the first search.
"""
