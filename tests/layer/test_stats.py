"""Counters of steps that are added up later: their sums, and how they are rolled back."""

from copy import deepcopy

import pytest
import torch

from kvindex.layer.stats import AT_ONCE, Counts, Tally, Traffic
from tests.support.helpers import Operations


def step(
    rows, *, resident=10, masked=0.0, length=100, padded=0.0, row_bytes=8, coverage=None, batch=1
):
    found = torch.full((batch, 2), rows, dtype=torch.int32)
    return Counts(found, resident, masked, length, padded, row_bytes, coverage)


def floats(traffic):
    names = ("rows_read", "rows_full", "bytes_fetched", "coverage")
    return [traffic.steps, *(float(getattr(traffic, name)) for name in names)]


def test_nothing_is_counted_at_first():
    assert Tally().traffic == Traffic()


def test_sums_of_steps_of_other_batches_paddings_and_rows():
    tally, masked, padded = Tally(), torch.tensor(1.5), torch.tensor(2.0)
    tally.count(step(7))
    tally.count(step(5, masked=masked, padded=padded, length=101))
    tally.count(step(5, masked=masked, padded=padded, length=102))
    tally.count(step(3, batch=3, row_bytes=4, coverage=torch.tensor([[0.5, 0.7]])))
    read = 7 + 5 + 5 + 3 + 4 * 10 - 2 * 1.5
    full = 100 + 101 + 102 + 100 - 2 * 2
    fetched = 2 * 8 * (7 + 5 + 5) + 6 * 4 * 3
    assert floats(tally.traffic) == pytest.approx([4, read, full, fetched, 0.6])
    assert tally.traffic.bytes_fetched.dtype == torch.int64  # sums are exact


def test_a_step_costs_no_operation_until_there_are_many():
    tally, steps = Tally(), [step(1) for _ in range(AT_ONCE)]
    with Operations() as operations:
        for one in steps[:-1]:
            tally.count(one)
            tally.checkpoint()
    assert operations.count == 0
    with Operations() as operations:
        tally.count(steps[-1])
    assert 0 < operations.count < AT_ONCE
    assert floats(tally.traffic)[0] == AT_ONCE


@pytest.mark.parametrize("before", [0, 3, AT_ONCE - 1, AT_ONCE])
@pytest.mark.parametrize("after", [0, 1, 2 * AT_ONCE])
@pytest.mark.parametrize("read", [False, True])
def test_going_back_forgets_what_came_after(before, after, read):
    tally = Tally()
    for rows in range(before):
        tally.count(step(rows))
    mark = tally.checkpoint()
    for _ in range(after):
        tally.count(step(9))
    if read:
        assert tally.traffic.steps == before + after
    sums = [before, sum(range(before)) + 10 * before, 100 * before, 16 * sum(range(before)), 0]
    for _ in range(2):  # twice, because the checkpoint stays valid
        tally.rollback(mark)
        assert floats(tally.traffic) == pytest.approx(sums)
        tally.count(step(9))


def test_captured_steps_are_added_up_by_the_device():
    """Counters of two graphs, one after the other. A rollback drops the later counts."""
    tally, sums = Tally(), [torch.zeros((1, 2), dtype=torch.int64) for _ in range(2)]
    tally.count(step(7))
    captured = step(7)._replace(found=None)
    for found in (*sums, sums[1]):
        with Operations() as operations:
            tally.watch(found)
            tally.count(captured)
        assert operations.count == 0  # an operation here would be captured
        found += 7
    mark = tally.checkpoint()
    tally.count(captured)
    sums[1] += 7
    tally.rollback(mark)
    expected = Tally()
    for _ in range(4):
        expected.count(step(7))
    assert floats(tally.traffic) == floats(expected.traffic)


def test_captured_steps_cost_no_operation_however_many():
    """If layers shared their counting, all would add up their counters at the same token."""
    tally, found, masked = Tally(), torch.zeros((1, 2), dtype=torch.int64), torch.tensor(0.5)
    tally.watch(found)
    expected = Tally()
    with Operations() as operations:
        for number in range(3 * AT_ONCE):
            other = dict(masked=masked if number >= AT_ONCE else 0.0, length=100 + number)
            tally.count(step(7, **other)._replace(found=None))
        made = operations.count - 3 * AT_ONCE  # operations of the steps themselves
    assert made == 0
    for number in range(3 * AT_ONCE):
        found += 7
        other = dict(masked=masked if number >= AT_ONCE else 0.0, length=100 + number)
        expected.count(step(7, **other))
    assert floats(tally.traffic) == floats(expected.traffic)


def test_a_mark_of_captured_steps_is_one_copy_and_a_tally_s_copy_counts_apart():
    tally, found = Tally(), torch.zeros((1, 2), dtype=torch.int64)
    tally.watch(found)
    captured = step(7)._replace(found=None)
    tally.count(captured)
    found += 7
    with Operations() as operations:
        mark = tally.checkpoint()
    assert operations.names == ["aten.clone.default"]
    twin = deepcopy(tally)
    for _ in range(2):
        tally.count(captured)
        found += 7
        assert tally.traffic.steps == 2
        tally.rollback(mark)
    assert floats(tally.traffic) == floats(twin.traffic)
    assert floats(twin.traffic)[:2] == [1, 7 + 10]
