"""Deep copies of columns share their contents, and never see another copy's appends."""

import copy
import gc
import random
import threading

import pytest
import torch

from kvindex.storage.columns import BlockColumns, Columns, Valid
from kvindex.storage.sharing import Sharing


def entries(first, count):
    """Return two columns of tokens with their numbers."""
    numbers = torch.arange(first, first + count)
    return {"a": numbers.view(1, 1, -1), "b": numbers.float().view(1, 1, -1, 1).expand(1, 1, -1, 3)}


def place(columns):
    return columns["a"].data_ptr()


def held(columns):
    assert torch.equal(columns["b"][0, 0, :, 2].long(), columns["a"][0, 0])
    return columns["a"].flatten().tolist()


@pytest.mark.parametrize("seed", range(30))
def test_any_interleaving_is_that_of_separate_columns(seed):
    rng, first = random.Random(seed), 0
    users = [(Columns(), [])]
    users[0][0].append(entries(first := 1, 5))
    users[0][1].extend(range(1, 6))
    first = 6
    for _ in range(120):
        number = rng.randrange(len(users))
        columns, tokens = users[number]
        deed = rng.choice(["append", "append", "fork", "truncate", "back", "drop", "reset"])
        if deed == "append":
            count = rng.choice([1, 1, 3, 20])
            columns.append(entries(first, count))
            tokens += range(first, first + count)
            first += count
        elif deed == "fork" and len(users) < 6 and tokens:
            users.append((copy.deepcopy(columns), list(tokens)))
            assert place(users[-1][0]) == place(columns)
        elif deed == "truncate":
            del tokens[rng.randrange(len(tokens) + 1) :]
            columns.truncate(len(tokens))
        elif deed == "back":
            before = columns.checkpoint()
            if rng.random() < 0.5 and len(users) < 6 and tokens:
                users.append((copy.deepcopy(columns), list(tokens)))
            columns.append(entries(10**6, rng.choice([1, 9])))
            columns.rollback(before)
        elif deed == "drop" and len(users) > 1:
            del users[number]
        elif deed == "reset" and rng.random() < 0.2:
            users[number] = columns.emptied(), []
        for columns, tokens in users:
            assert (held(columns) if tokens else []) == tokens


def test_the_first_that_appends_stays_and_the_second_copies():
    first = Columns()
    first.append(entries(0, 50))
    second, third = copy.deepcopy(first), copy.deepcopy(first)
    at = place(first)
    second.append(entries(50, 5))
    first.append(entries(60, 5))
    assert place(second) == place(third) == at != place(first)
    del second
    gc.collect()
    third.append(entries(70, 5))  # no other copy reads this memory
    assert place(third) == at
    assert held(third) == [*range(50), *range(70, 75)]
    assert held(first) == [*range(50), *range(60, 65)]


def test_what_a_copy_holds_outlives_a_cut_and_a_way_back():
    first = Columns()
    first.append(entries(0, 50))
    before = first.checkpoint()
    second = copy.deepcopy(first)
    first.truncate(10)
    first.append(entries(90, 5))
    assert held(second) == [*range(50)]
    first.rollback(before)  # to memory that is shared
    first.truncate(20)
    first.append(entries(80, 3))
    assert held(first) == [*range(20), *range(80, 83)]
    assert held(second) == [*range(50)]


def test_a_checkpoint_beyond_the_length_is_not_written_to_by_a_copy():
    first = Columns()
    first.append(entries(0, 50))
    before = first.checkpoint()
    first.truncate(10)
    second = copy.deepcopy(first)
    second.append(entries(90, 5))
    first.rollback(before)
    assert held(first) == [*range(50)]


def test_columns_that_a_call_leaves_out_move_too():
    first = Columns()
    first.append(entries(0, 8))
    second = copy.deepcopy(first)
    first.append(entries(8, 1))
    second.reserve({"a": entries(9, 1)["a"]})
    assert second["b"].data_ptr() != first["b"].data_ptr()
    assert held(second) == [*range(8)]


def test_blocks_are_shared_with_their_centers():
    first = BlockColumns(4)
    keys, centers = torch.arange(8).view(1, 1, 8), torch.arange(2).view(1, 1, 2)
    first.append({"keys": keys, "centers": centers})
    second = copy.deepcopy(first)
    for columns, add in ((second, 10), (first, 20)):
        columns.append({"keys": keys[:, :, :4] + add, "centers": centers[:, :, :1] + add})
    assert second["centers"].flatten().tolist() == [0, 1, 10]
    assert first["centers"].flatten().tolist() == [0, 1, 20]
    assert first["keys"].flatten().tolist() == [*range(8), *range(20, 24)]


def test_flags_of_a_copy_that_is_gone_are_no_other_ones():
    """After a padded token was written, shared memory does not contain only ones any more."""
    like = torch.zeros(1, 1, 4, 8)

    def append(valid, flags, length):
        reserved = valid.reserve(length, like, flags)
        valid.append(reserved, all_real=flags is None)

    valid, padded = Valid(), torch.tensor([[False, False, True, True]])
    append(valid, padded, 0)
    copies = [copy.deepcopy(valid) for _ in range(2)]
    append(copies[0], padded, 4)
    append(copies[1], None, 4)
    append(copies[1], None, 8)
    assert copies[0].flags.flatten().tolist() == 2 * padded.flatten().tolist()
    del copies[0]
    append(valid, None, 4)
    for one, more in ((valid, 4), (copies[0], 8)):
        assert one.flags.flatten().tolist() == [False, False, True, True, *[True] * more]


def test_only_one_of_two_threads_gets_a_place():
    class User:
        """An owner of tokens."""

    for _ in range(200):
        sharing, users, got = Sharing(), [User(), User()], []
        for user in users:
            sharing.join(user, 5)
        ready = threading.Barrier(2)

        def claim(user, sharing=sharing, got=got, ready=ready):
            ready.wait()
            got.append(sharing.claim(user, 5, 6))

        threads = [threading.Thread(target=claim, args=(user,)) for user in users]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert sorted(got) == [False, True]
