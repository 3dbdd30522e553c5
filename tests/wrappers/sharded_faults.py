"""The last rank ends or hangs, and the other ranks report it (`test_sharded.py`)."""

from __future__ import annotations

import os
import sys
import time

import torch.distributed as dist

from kvindex.core.ranks import RankError
from tests.support.helpers import Case
from tests.support.ranks import joined

TIMEOUT_S = 3


def main() -> None:
    (fault,) = joined(sys.argv[1:])
    case = Case()
    index = case.index(f"exact+sharded:block=8:timeout_s={TIMEOUT_S}")
    index.append(*case.tokens(40))
    index.search(case.queries(), k=5)
    if dist.get_rank() == dist.get_world_size() - 1:
        if fault == "dies":
            os._exit(1)
        time.sleep(4 * TIMEOUT_S)  # hangs
        os._exit(0)
    start, said = time.monotonic(), []
    for _ in range(2):
        try:
            index.search(case.queries(), k=5)
        except RankError as error:
            said.append(str(error))
    took = time.monotonic() - start
    print(len(set(said)), len(said), took <= 2.5 * TIMEOUT_S, said[0], flush=True)
    os._exit(0)


if __name__ == "__main__":
    main()
