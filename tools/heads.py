"""Query and KV heads of the step that a tool times, from its command line."""

from __future__ import annotations

import argparse

from benchmarks.common import workload


def add_heads(parser: argparse.ArgumentParser) -> None:
    """Options for the heads of a layer, 32 and 8 by default."""
    parser.add_argument("--q-heads", type=int, default=workload.H, help="of the layer")
    parser.add_argument("--kv-heads", type=int, default=workload.G, help="of the layer")


def refuse_heads(parser: argparse.ArgumentParser, told: argparse.Namespace) -> None:
    """Exits with words where there is no such layer."""
    q_heads, kv_heads = told.q_heads, told.kv_heads
    if kv_heads < 1 or q_heads < kv_heads or q_heads % kv_heads:
        allowed = f"a multiple of kv-heads = {kv_heads}, both at least 1"
        parser.error(f"q-heads: got {q_heads}, allowed is {allowed}")
