"""Command-line options for the numbers of query heads and KV heads of the layer that is timed."""

from __future__ import annotations

import argparse

from benchmarks.common import workload


def add_heads(parser: argparse.ArgumentParser) -> None:
    """Add the options `--q-heads` (default 32) and `--kv-heads` (default 8)."""
    parser.add_argument(
        "--q-heads", type=int, default=workload.H, help="number of query heads of the layer"
    )
    parser.add_argument(
        "--kv-heads", type=int, default=workload.G, help="number of KV heads of the layer"
    )


def refuse_heads(parser: argparse.ArgumentParser, options: argparse.Namespace) -> None:
    """Exit with a message unless the number of query heads is a multiple of that of KV heads."""
    q_heads, kv_heads = options.q_heads, options.kv_heads
    if kv_heads < 1 or q_heads < kv_heads or q_heads % kv_heads:
        allowed = f"a multiple of kv-heads = {kv_heads}, both at least 1"
        parser.error(f"q-heads: got {q_heads}, allowed is {allowed}")
