"""Command-line options for the query and KV heads of a step to time."""

from __future__ import annotations

import argparse

from benchmarks.common import workload


def add_heads(parser: argparse.ArgumentParser) -> None:
    """Add options for the heads of a layer (defaults: 32 and 8)."""
    parser.add_argument("--q-heads", type=int, default=workload.H, help="query heads of the layer")
    parser.add_argument("--kv-heads", type=int, default=workload.G, help="KV heads of the layer")


def refuse_heads(parser: argparse.ArgumentParser, options: argparse.Namespace) -> None:
    """Exit with a message if no layer can have these heads."""
    q_heads, kv_heads = options.q_heads, options.kv_heads
    if kv_heads < 1 or q_heads < kv_heads or q_heads % kv_heads:
        allowed = f"a multiple of kv-heads = {kv_heads}, both at least 1"
        parser.error(f"q-heads: got {q_heads}, allowed is {allowed}")
