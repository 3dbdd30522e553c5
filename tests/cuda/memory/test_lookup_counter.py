"""Lookups in row caches are counted without waiting for the device."""

import torch

from kvindex_cuda.memory.row_cache import LookupCounter, RowCache
from tests.cuda.devices import on_devices


@on_devices
def test_lookups_of_all_caches_since_the_last_reading(device):
    caches = [RowCache(2, 16, torch.device(device), 8) for _ in range(3)]
    caches[0].counts[0] = torch.tensor([50, 20], device=device)  # before the counter exists
    counter = LookupCounter(caches, interval=2)

    def read():
        if device != "cpu":
            torch.cuda.synchronize()
        return counter.read()

    def after(calls):
        """Return the sum of some calls. On a GPU, a call reads what an earlier one has copied."""
        return tuple(map(sum, zip(*(read() for _ in range(calls)), strict=True)))

    assert after(6) == (0, 0)
    caches[0].counts[1] += torch.tensor([7, 3], device=device)
    caches[2].counts[0] += torch.tensor([5, 5], device=device)
    assert after(6) == (12, 8)
    assert after(6) == (0, 0)
    caches[1].counts[0, 0] = 2**31 - 1
    assert after(6) == (2**31 - 1, 0)
    caches[1].counts[0, 0] = -(2**31) + 9  # wrapped around
    assert after(6) == (10, 0)


def test_most_calls_only_count():
    cache = RowCache(1, 16, torch.device("cpu"), 8)
    counter = LookupCounter([cache], interval=3)
    cache.counts += 4
    assert [counter.read() for _ in range(6)] == [(0, 0), (0, 0), (4, 4), (0, 0), (0, 0), (0, 0)]
