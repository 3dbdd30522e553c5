"""ParisKV op by op, in the order of the paper: what an index on plain torch runs.

`config` (options and presets), `encoding` (keys become codes), `inputs` (tokens and queries as a
search reads them), `candidates` (the coarse stage: votes), `estimates` (the codes' inner products),
`ranked` (the best rows) and `drawn` (rows drawn by their shares). Functions over tensors, which
keep nothing; `kvindex.pariskv.index` holds the tokens.
"""
