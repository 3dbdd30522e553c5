"""How launches divide their work when groups are few.

Launches for 8 groups and more stay as they were.
"""

import pytest
import torch

from kvindex.core.resident import ResidentRows
from kvindex_cuda.pariskv.steps import grid_sizes
from tests.cuda.pariskv.test_backend import assert_found
from tests.support.helpers import Case

MANY = [
    (groups, multiprocessors) for groups in (8, 9, 64, 1000) for multiprocessors in (1, 108, 132)
]


@pytest.mark.parametrize(("groups", "multiprocessors"), MANY)
@pytest.mark.parametrize("resident", [1, 2])
def test_many_groups_are_reranked_by_two_blocks_a_multiprocessor(groups, multiprocessors, resident):
    splits = grid_sizes.rerank_splits(groups, multiprocessors, resident=resident)
    assert splits == max(1, 2 * multiprocessors // groups)


@pytest.mark.parametrize("groups", range(1, 8))
@pytest.mark.parametrize("resident", [1, 2])
def test_few_groups_are_reranked_in_one_wave(groups, resident):
    splits = grid_sizes.rerank_splits(groups, 132, resident=resident)
    assert splits * groups <= 132 * resident
    assert splits <= 66
    assert grid_sizes.rerank_splits(groups, 1, resident=resident) == 1


@pytest.mark.parametrize("groups", [1, 2, 3, 7, 8, 32])
@pytest.mark.parametrize("heads", [1, 4, 7, 8, 12, 16])
def test_heads_are_divided_evenly_until_their_parts_are_as_many_as_full_groups(groups, heads):
    parts = grid_sizes.attend_parts(groups, heads)
    assert heads % parts == 0
    assert parts == 1 or parts * groups <= grid_sizes.FULL
    assert groups < grid_sizes.FULL or parts == 1


def test_parts_of_shapes_that_models_have():
    shapes = {(1, 8): 8, (1, 16): 8, (2, 16): 4, (4, 8): 2, (8, 4): 1, (8, 16): 1}
    assert {shape: grid_sizes.attend_parts(*shape) for shape in shapes} == shapes


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("batch", "kv_heads", "heads"),
    [(1, 2, 16), (1, 1, 8), (1, 4, 8), (3, 2, 16), (4, 2, 16)],  # the last one has 8 groups
)
@pytest.mark.parametrize("tokens", [20_000, 130_000, 300_000])
def test_few_groups_find_and_read_what_torch_does(batch, kv_heads, heads, tokens):
    """Heads are divided into parts, with rows on the device, on the host and in the cache."""
    sizes = dict(head_dim=128, value_dim=128, dtype=torch.bfloat16, device="cuda")
    case = Case(q_heads=kv_heads * heads, kv_heads=kv_heads, batch=batch, **sizes)
    on_host, on_device, plain = (
        case.index("pariskv", **options)
        for options in (
            dict(backend="cuda", store="host"),
            dict(backend="cuda", store="device"),
            dict(backend="torch"),
        )
    )
    keys, values = case.tokens(tokens)
    for index in (on_host, on_device, plain):
        index.append(keys, values)
    queries = case.queries()
    assert_found(on_device, plain, queries, 100)
    resident = ResidentRows(on_device.geometry, batch, 320)
    resident.add(keys[:, :, :300], values[:, :, :300], None)
    found = [index.attend(queries, resident, k=100) for index in (on_device, on_host, on_host)]
    for other in found[1:]:  # first from the host, then from the cache
        torch.testing.assert_close(other.output, found[0].output, rtol=2e-2, atol=2e-3)
        assert torch.equal(other.found, found[0].found)
    for tags in on_host._executor.cache.tags.tolist():  # only one part puts a row into the cache
        ids = [tag for tag in tags if tag >= 0]
        assert len(ids) == len({*ids}) > 0


def test_resident_rows_are_divided_among_thread_blocks_that_fit():
    """With up to 132 groups, they are at most as many as multiprocessors."""
    found = {groups: grid_sizes.resident_splits(groups, 132) for groups in (1, 8, 32, 256)}
    assert found == {1: 8, 8: 8, 32: 4, 256: 1}
