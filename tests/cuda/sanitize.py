"""Run the kernels of a step, of an append and of the row cache on small shapes, under sanitizers.

    python tests/cuda/sanitize.py [memcheck] [racecheck] [synccheck] [initcheck]

This runs itself under NVIDIA's `compute-sanitizer` with each tool that is named, and fails if one
reports anything. Without a tool it runs directly, which compiles the kernels (CuPy caches them).
Only this project's kernels are watched. It needs a GPU; on a CPU, tests run it on the emulator.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import torch

ROOT = Path(__file__).parents[2]
if __name__ == "__main__":
    sys.path.insert(0, str(ROOT))

# a script finds the project only after the line above, hence imports that are not at the top (E402)
from kvindex.core.protocol import Rows  # noqa: E402
from kvindex.core.resident import ResidentRows  # noqa: E402
from kvindex_cuda.pariskv.append.stage_token import stage_token  # noqa: E402
from tests.cuda.runtime.test_compile import KERNEL, launching  # noqa: E402
from tests.support.helpers import Case, left_padding, part  # noqa: E402

SHAPES = (
    (Case(q_heads=4, kv_heads=2, head_dim=64, batch=2), "pariskv"),
    (Case(8, 2, 128, 128, torch.bfloat16), "pariskv:preset=fast:row_codec=int8+sample"),
    (Case(6, 2, 64, 64, torch.bfloat16), "pariskv:preset=paper"),
    (Case(20, 1, 64, 48, torch.bfloat16, batch=2, value_in_key=True), "pariskv"),
)
K = 20


def run(device: str) -> Iterator[str]:
    """Append a first block, a token and two more blocks, padding; then truncate.

    After each: a concurrent append of a token, a search, and attention three times, to rows of
    which none, all, and half are in the cache.
    """
    for case, name in SHAPES:
        index = case.index(name, device=device, backend="cuda", store="host")
        tokens = tuple(piece.to(device) for piece in case.tokens(700))
        resident = ResidentRows(index.geometry, case.batch, 40)
        pads = left_padding([0, 30][: case.batch], 200, device)
        for start, stop in ((0, 200), (200, 201), (201, 700)):
            valid = pads if start == 0 else None
            index.append(*part(tokens, start, stop), valid=valid)
            token = Rows(*part(tokens, start, start + 1))
            window = Rows(torch.empty_like(token.keys), torch.empty_like(token.values))
            stage_token(resident, token, window, case.queries().to(device))
            assert torch.equal(window.keys, token.keys)
            for seed in (0, 0, 1):
                queries = case.queries(seed=seed).to(device)
                attended = index.attend(queries, resident, k=K)
                assert attended.output.isfinite().all()
                assert attended.lse.isfinite().all()
                assert (attended.found == K).all()
            yield f"{case} {name}: {stop} tokens"
        index.truncate(300)
        hits = index.search(case.queries().to(device), k=K)
        assert ((hits.ids >= 0) & (hits.ids < 300)).all()
        assert index.fetch(hits).keys.isfinite().all()
        yield f"{case} {name}: cut to 300"


def sanitized(tool: str) -> int:
    """Run this file under a tool. Return its exit status, 0 if it reports nothing."""
    names = {
        name
        for path in launching.SOURCES.glob("*/*.cu")
        for name in KERNEL.findall(path.read_text())
    }
    watched = [part for name in sorted(names) for part in ("--kernel-name", f"kne={name}")]
    options = ["--tool", tool, "--error-exitcode", "1", "--report-api-errors", "no", *watched]
    command = ["compute-sanitizer", *options, sys.executable, __file__]
    print(f"== {tool}", flush=True)
    return subprocess.run(command, cwd=ROOT, check=False).returncode


if __name__ == "__main__":
    if sys.argv[1:]:
        sys.exit(any([sanitized(tool) for tool in sys.argv[1:]]))
    for done in run("cuda"):
        torch.cuda.synchronize()
        print(done, flush=True)
