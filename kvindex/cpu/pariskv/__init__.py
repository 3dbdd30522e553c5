"""Executors that run ParisKV with compiled kernels. Stages are named as in `kvindex.pariskv`.

`encoding` encodes keys. `sign_votes` has the stages of a step with `coarse="sign_votes"`,
`tiered_votes` those with `coarse="tiered_votes"`, and `sampling` those that sample rows. `executor`
runs them, `constants` prepares their tables, `supported` lists the options that they support, and
`precompile` compiles the kernels ahead.
"""
