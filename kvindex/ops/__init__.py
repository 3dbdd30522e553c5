"""Reference implementations in plain torch, in the order data flows through them.

keys -> (`learn`) -> `transform` -> `codes` -> `coarse` -> `select` -> `rerank` -> (`sampling`) ->
`fetch` -> `attention`

These are the specification of every kernel: the same names and signatures, on any device.
"""

from kvindex.ops import attention, coarse, codes, fetch, learn, rerank, sampling, select, transform

__all__ = [
    "attention",
    "coarse",
    "codes",
    "fetch",
    "learn",
    "rerank",
    "sampling",
    "select",
    "transform",
]
