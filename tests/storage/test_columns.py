"""Growable tensors per token: capacity, truncation, reordering, and flags of valid tokens."""

from copy import deepcopy
from weakref import ref

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kvindex.storage.columns import Columns, Valid
from tests.support.helpers import Operations


def rows(count, start=0, batch=2):
    """Return two columns with a different value in each place."""
    wide = torch.arange(start, start + count).float()[None, None, :, None]
    offset = 1000 * torch.arange(batch)[:, None, None, None]
    return {
        "wide": (wide + offset).expand(batch, 3, count, 4).contiguous(),
        "flat": (wide[..., 0] + offset[..., 0]).expand(batch, 3, count).to(torch.int64),
    }


def assert_holds(columns, want):
    assert len(columns) == want["wide"].shape[2]
    for name, tensor in want.items():
        assert torch.equal(columns[name], tensor)
    assert columns.nbytes() == sum(t.numel() * t.element_size() for t in want.values())


@given(st.lists(st.integers(0, 9), min_size=1, max_size=8))
def test_growth_keeps_what_was_appended(counts):
    columns, start = Columns(), 0
    for count in counts:
        columns.append(rows(count, start))
        start += count
    assert_holds(columns, rows(start))


def test_single_entries_are_written_to_the_present_memory():
    columns = Columns()
    for i in range(40):
        columns.append(rows(1, i))
        if i in (5, 20):  # write other entries to the same places, and to new memory
            before = columns.checkpoint()
            for extra in range(1, 100):
                columns.append(rows(1, i + 7 + extra))
            columns.rollback(before)
        if i == 30:
            columns.truncate(25)
            columns.append(rows(6, 25))
    assert_holds(columns, rows(40))


@pytest.mark.parametrize("replace", [lambda c: c.append(rows(99)), lambda c: c.let_go()])
def test_replaced_memory_is_freed_after_an_append_of_one_entry(replace):
    columns = Columns()
    columns.append(rows(1))
    columns.append(rows(1, 1))
    memory = ref(columns._data["wide"])
    replace(columns)
    assert memory() is None


def test_appending_one_by_one_copies_amortised_rows(monkeypatch):
    allocated, empty = [], torch.empty

    def counting(shape, **options):
        allocated.append(shape[2])
        return empty(shape, **options)

    columns = Columns()
    monkeypatch.setattr(torch, "empty", counting)
    for token in range(1000):
        columns.append({"wide": rows(1, token)["wide"]})
    assert len(allocated) <= 11, "capacity doubles"
    assert sum(allocated) <= 4 * 1000
    assert_holds(columns, {"wide": rows(1000)["wide"]})


@pytest.mark.parametrize("count", [1, 300])
def test_a_cpu_has_room_for_as_many_tokens_again(count):
    columns = Columns()
    columns.append(rows(count))
    room = columns["wide"].data_ptr()
    columns.append(rows(count, count))
    assert columns["wide"].data_ptr() == room
    assert_holds(columns, rows(2 * count))


def test_reserved_room_is_used_and_counted_only_when_filled():
    columns = Columns()
    columns.append(rows(3))
    columns.reserve(rows(50, 3))
    assert_holds(columns, rows(3))
    room = columns._data["wide"].data_ptr()
    columns.append(rows(50, 3))
    assert columns._data["wide"].data_ptr() == room
    assert_holds(columns, rows(53))


@pytest.mark.parametrize("allowed", [0, 1])
def test_running_out_of_memory_in_reserve_leaves_the_content(monkeypatch, allowed):
    columns, empty = Columns(), torch.empty
    columns.append(rows(3))
    calls = []

    def failing(*args, **options):
        calls.append(1)
        if len(calls) > allowed:
            raise torch.OutOfMemoryError("no memory left")
        return empty(*args, **options)

    with monkeypatch.context() as patch:
        patch.setattr(torch, "empty", failing)
        with pytest.raises(torch.OutOfMemoryError):
            columns.reserve(rows(9, 3))
    assert_holds(columns, rows(3))
    columns.append(rows(2, 3))
    assert_holds(columns, rows(5))


def test_room_left_by_a_failed_first_append_does_not_fix_the_batch():
    columns = Columns()
    columns.reserve(rows(5, batch=2))
    columns.append(rows(4, batch=1))
    assert_holds(columns, rows(4, batch=1))


@given(st.integers(0, 12), st.integers(0, 5))
def test_truncate_keeps_the_first_and_append_goes_on_from_there(length, more):
    columns = Columns()
    columns.append(rows(10))
    columns.truncate(length)
    kept = min(length, 10)
    columns.append(rows(more, kept))
    assert_holds(columns, rows(kept + more))


@given(st.integers(0, 10), st.sampled_from([0, 5, 13]))
def test_after_keeps_the_rest(count, room):
    before = Columns()
    before.append(rows(10))
    columns = before.after(count, room)
    assert_holds(before, rows(10))
    assert_holds(columns, rows(10 - count, count))
    place = columns["wide"].untyped_storage().data_ptr()
    columns.append(rows(3, 10))
    assert_holds(columns, rows(13 - count, count))
    stays = columns["wide"].untyped_storage().data_ptr() == place
    assert stays or room < 13


@pytest.mark.parametrize("order", [[1, 0], [1], [0, 0, 1]])
def test_reorder_moves_rows_of_the_batch(order):
    columns = Columns()
    columns.append(rows(6))
    before = columns
    columns = columns.reordered(torch.tensor(order))
    assert_holds(before, rows(6))
    assert_holds(columns, {name: tensor[order] for name, tensor in rows(6).items()})


def test_an_emptied_one_forgets_names_and_sizes():
    columns = Columns()
    columns.append(rows(6))
    columns = columns.emptied()
    assert (len(columns), columns.nbytes(), "wide" in columns) == (0, 0, False)
    columns.append({"wide": torch.ones(5, 1, 2)})
    assert columns["wide"].shape == (5, 1, 2)


def add(valid, length, count, flags=None):
    given = None if flags is None else torch.tensor(flags)
    like = torch.zeros(2 if valid.flags is None else len(valid.flags), 1, count, 4)
    valid.append(valid.reserve(length, like, given), all_real=flags is None)


def test_flags_of_real_tokens_cost_no_operation():
    valid = Valid()
    add(valid, 0, 9, [[False] * 9] * 2)
    reserved = valid.reserve(9, torch.zeros(2, 1, 9, 4), None)  # reserves twice as many places
    with Operations() as operations:
        valid.append(reserved, all_real=True)
        valid.reserve(18, torch.zeros(2, 1, 0, 4), None)
    assert operations.names == ["aten.zeros.default"]  # from the second `reserve`
    assert valid.flags[:, 9:].all()


def test_valid_takes_no_memory_before_the_first_padded_token():
    valid = Valid()
    add(valid, 0, 5)
    assert valid.flags is None
    assert valid.nbytes() == 0


def test_valid_remembers_tokens_from_before_the_first_flags():
    valid = Valid()
    add(valid, 0, 2)
    add(valid, 2, 2, [[False, True], [True, True]])
    add(valid, 4, 1)
    assert valid.flags.tolist() == [[True, True, False, True, True], [True] * 5]
    assert valid.all_from == 4
    valid = valid.reordered(torch.tensor([1, 0, 0]))
    valid.truncate(3)
    assert valid.flags.tolist() == [[True] * 3, [True, True, False], [True, True, False]]
    assert valid.all_from == 3
    add(valid, 3, 6)
    assert valid.flags[1:].tolist() == [[True, True, False, *[True] * 6]] * 2
    valid.truncate(2)
    add(valid, 2, 3)
    assert valid.flags.tolist() == [[True] * 5] * 3
    assert valid.all_from == 2
    valid = valid.emptied()
    assert valid.flags is None
    assert valid.all_from == 0


def test_a_view_of_several_rows_is_read_alone_and_its_copy_is_its_own():
    columns = Columns()
    columns.append(rows(5, batch=1))
    view, want = columns.expand_batch(2), {n: t[[0, 0]] for n, t in rows(5, batch=1).items()}
    for refused in (view, columns.expand_batch(1)):
        with pytest.raises(RuntimeError, match=r"got a view of expand_batch\(\), which is"):
            refused.append(rows(1, 5, batch=2))
    assert_holds(view, want)
    clone = deepcopy(view)
    columns.truncate(2)
    columns.append(rows(3, 50, batch=1))
    assert_holds(clone, want)
    clone.append(rows(4, 5, batch=2))
    assert len(clone) == 9


def test_bytes_may_be_asked_for_while_another_thread_puts_back_what_was_held():
    """Length and tensors are set one after the other.

    A length beyond the tensors is reduced to theirs.
    """
    columns, rows = Columns(), torch.zeros(1, 2, 5, 8)
    columns.append({"rows": rows})
    held = columns.checkpoint()
    columns.let_go()
    columns._length = 500
    assert (columns.nbytes(), columns.memory()) == (0, {})
    columns.rollback(held)
    columns._length = 500
    assert columns.nbytes() == columns._data["rows"].nbytes
    columns.rollback(held)
    assert columns.nbytes() == sum(columns.memory().values()) == rows.nbytes
