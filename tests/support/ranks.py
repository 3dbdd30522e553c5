"""Cases that several processes run together, all cases of a module in one start of each process.

A start costs seconds, so a module of tests starts each number of ranks once (`results`).
"""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
import tempfile
import time
import traceback
from functools import cache
from pathlib import Path

import torch
import torch.distributed as dist

ROOT = Path(__file__).parents[2]
LIMIT_S = 300


@cache
def results(module: str, ranks: int, every: bool) -> list[dict[str, str | None]]:
    """Return each rank's result for each case of `module.cases(ranks, every)`: an error, or
    None."""
    arguments = [module, *["every"] * every]
    with tempfile.TemporaryDirectory() as folder:
        return [json.loads(said) for said in started(__name__, arguments, ranks, Path(folder))]


def started(module: str, arguments: list[str], ranks: int, folder: Path) -> list[str]:
    """Run `module` as the main module on each rank, and return the last line that each prints.

    Its arguments are the rank, the number of ranks, a file for their store, and further ones.
    """
    paths = [str(ROOT), str(ROOT / "adapters")]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(paths), "OMP_NUM_THREADS": "1"}
    logs = [(folder / f"out{rank}", folder / f"errors{rank}") for rank in range(ranks)]
    processes = [
        subprocess.Popen(
            [
                sys.executable,
                "-m",
                module,
                str(rank),
                str(ranks),
                str(folder / "store"),
                *arguments,
            ],
            cwd=ROOT,
            env=environment,
            stdout=out.open("w"),
            stderr=errors.open("w"),
        )
        for rank, (out, errors) in enumerate(logs)
    ]
    end = time.monotonic() + LIMIT_S
    try:
        for process in processes:
            process.wait(max(end - time.monotonic(), 0))
    except subprocess.TimeoutExpired:
        pass  # their last line names the running case
    finally:
        for process in processes:
            process.kill()
    told = [[log.read_text(encoding="utf-8") for log in pair] for pair in logs]
    return [out.strip().rpartition("\n")[2] or errors[-2000:] for out, errors in told]


def joined(arguments: list[str], backend: str = "gloo") -> list[str]:
    """Join the process group that the first three arguments describe, and return the others."""
    rank, ranks, path, *rest = arguments
    os.environ.update(RANK=rank, LOCAL_RANK=rank, WORLD_SIZE=ranks)  # transformers reads them
    torch.set_num_threads(1)
    store = dist.FileStore(path, int(ranks))
    dist.init_process_group(backend, store=store, rank=int(rank), world_size=int(ranks))
    return rest


def main() -> None:
    found = importlib.import_module(sys.argv[4])
    _, *every = joined(sys.argv[1:], vars(found).get("BACKEND", "gloo"))
    said: dict[str, str | None] = {}
    cases = found.cases(dist.get_world_size(), bool(every))
    for name, case in cases.items():
        print(name, file=sys.stderr, flush=True)  # names the running case if a run hangs
        try:
            case()
            said[name] = None
        except Exception:
            said[name] = traceback.format_exc()
            break  # other ranks may be in another case now
    print(json.dumps(said), flush=True)


if __name__ == "__main__":
    main()
