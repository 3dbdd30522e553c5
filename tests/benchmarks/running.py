"""Run a script on a small scale: its shape, its texts, and a clock that runs once."""

import json
from pathlib import Path

import pytest
import torch

from kvindex.core.geometry import Geometry
from tests.cuda import emulator

ROOT = Path(__file__).parents[2]
MACHINE = dict(cores=1, processor="p", torch="2", transformers="5", threads=1)
SMALL = Geometry.of(q_heads=4, kv_heads=2, head_dim=64, dtype=torch.bfloat16)
SIZES = dict(k=20, window=24)

emulated = pytest.mark.skipif(not emulator.available(), reason="no g++ to emulate kernels with")


def timed(run, layers, before=None):
    """Run the function once instead of timing it."""
    if before is not None:
        before(0)
    run()
    return {"median_us": 10.0, "low_us": 9.0, "high_us": 11.0, "replays": 1}


def ran(main, given, monkeypatch):
    """Run a script, and return the result that it wrote."""
    monkeypatch.setattr("sys.argv", ["script", *map(str, given)])
    main()
    return json.loads(Path(given[-1]).read_text())
