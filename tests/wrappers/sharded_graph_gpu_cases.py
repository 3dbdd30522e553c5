"""`sharded_graph_cases` on two GPUs of one host, with NCCL."""

from tests.wrappers.sharded_graph_cases import cases

BACKEND = "nccl"

__all__ = ["BACKEND", "cases"]
