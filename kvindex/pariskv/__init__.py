"""ParisKV: choose candidate tokens by the signs of their keys, then rank them by their full codes.

Qi et al., ParisKV: Fast and Drift-Robust KV-Cache Retrieval for Long-Context LLMs (ICML 2026).
Numbers such as A.1 below are sections of the paper. `index.py` has the class `ParisKV`, and
`config.py` has its options and presets.

A search has these stages, in this order. Each stage is a module of functions over tensors:

1. `encoding`: keys are centered, normalized and rotated, then stored as signs, magnitudes and
   weights (A.1 to A.3).
2. `inputs`: one search gathers the codes of all tokens and the rotated queries.
   `sign_regression` optionally fits a linear map that predicts a key's coordinates from its signs.
3. `candidates`: each key gets a coarse score (vote) that is computed from its signs, and the keys
   with the largest votes become candidates (B.2.1). With `coarse="sign_votes"`, the vote is an
   inner product with the query. With `coarse="tiered_votes"`, it is the score of the paper.
4. `rerank`: inner products of queries and candidates are estimated from all bits of the codes
   (B.2.2, equation 10).
5. `select_rows`: the rows with the best estimates are returned. With `sampling`, rows are instead
   sampled in proportion to their estimated attention weights.

A fused decode step runs the same stages, and then attention (B.3):

6. `decode_step`: the reference implementation of the fused decode step. `step_state` defines its
   inputs, `sign_votes` and `tiered_votes` compute votes, and `block_layout` defines how codes are
   stored in memory.

Compiled versions of these stages are in `kvindex/cpu/pariskv` and `kvindex_cuda/pariskv`.
"""
