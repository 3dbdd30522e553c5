"""Options of the scripts that measure a step, and what is allowed."""

from __future__ import annotations

import argparse

from benchmarks.decode.setting import Setting, geometry
from kvindex.indexes.pariskv import ParisKV
from kvindex_cuda.pariskv.executor import serves


def add(parser: argparse.ArgumentParser) -> None:
    """Options that all of them have."""
    parser.add_argument(
        "--index", default=Setting.spec, help="a ParisKV, as kvindex.create takes it"
    )
    parser.add_argument(
        "--hit-rate", type=float, default=Setting.hit_rate, help="of the caches of rows"
    )
    parser.add_argument("--replays", type=int, default=50, help="of a graph")


def check(parser: argparse.ArgumentParser, found: argparse.Namespace, **least: int) -> None:
    """Exits with words where one of them is not allowed, or a number is below its `least`."""
    for name, low in least.items():
        values = getattr(found, name)
        for value in values if isinstance(values, (list, tuple)) else [values]:
            if value < low:
                parser.error(f"{name}: got {value}, allowed is at least {low}")
    try:
        measurable(found.index)
    except ValueError as error:
        parser.error(str(error))
    if not 0 <= found.hit_rate <= 1:
        parser.error(f"hit-rate: got {found.hit_rate}, allowed is 0 to 1")


def measurable(spec: str) -> None:
    """Raises ValueError, in words for the option `index`, unless fused kernels serve it."""
    try:
        index = Setting(geometry("cpu"), spec).index
    except (KeyError, TypeError, ValueError) as error:
        raise ValueError(f"index: {error}") from error
    if type(index) is not ParisKV or not serves(index):
        raise ValueError(f"index: got {spec!r}, allowed is one that the fused kernels serve")
    if index.config.single_stage_below:
        raise ValueError(f"index: got {spec!r}, allowed is preset=scan for one stage")
