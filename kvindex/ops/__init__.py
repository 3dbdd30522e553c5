"""Reference implementations in plain torch, in the order data flows through them.

keys -> (`learn`) -> `transform` -> `codes` -> `coarse` -> `select` -> `rerank` -> (`draw`) ->
`fetch` -> `attention`

These are the specification of every kernel: the same names and signatures, on any device.
"""

from kvindex.ops import attention, coarse, codes, draw, fetch, learn, rerank, select, transform

__all__ = [
    "attention",
    "coarse",
    "codes",
    "draw",
    "fetch",
    "learn",
    "rerank",
    "select",
    "transform",
]
