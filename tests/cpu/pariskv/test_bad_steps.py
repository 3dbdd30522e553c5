"""A decode step on compiled kernels that raises leaves the layer unchanged and names the error."""

import pytest
import torch

from kvindex.core import check
from kvindex.core.resident import ResidentRows
from kvindex.layer import AttentionLayer
from tests.support.helpers import Case, part

CASE = Case(q_heads=6, kv_heads=2, head_dim=64, batch=2)
SIZES = dict(k=20, sink=4, local_window=16, update_every=8, dense_below=64)
NUMBERS = [float("nan"), float("inf"), -float("inf"), 2 * check.LARGEST]


def spoiled(tensor, number):
    tensor = tensor.clone()
    tensor[1, 1, -1, 3] = number
    return tensor


@pytest.mark.parametrize("number", NUMBERS)
@pytest.mark.parametrize("name", ["queries", "keys"])
def test_a_number_out_of_range_is_refused_and_changes_nothing(name, number):
    tokens, queries = CASE.tokens(330), CASE.tensor(5, 2, 6, 330, 64)
    layers = [AttentionLayer(CASE.index("pariskv", backend="cpu"), **SIZES) for _ in range(2)]
    for layer in layers:
        layer.step(queries[:, :, :300], *part(tokens, 0, 300))
    for t in range(300, 330):
        keys, values = part(tokens, t, t + 1)
        step = dict(queries=queries[:, :, t : t + 1], keys=keys, values=values)
        with pytest.raises(ValueError, match=rf"{name}: got .*, allowed is a finite number"):
            layers[0].step(**step | {name: spoiled(step[name], number)})
        outputs = [layer.step(**step) for layer in layers]
        torch.testing.assert_close(*outputs, rtol=0, atol=0)
    assert len(layers[0]) == len(layers[1]) == 330
    assert layers[0].traffic == layers[1].traffic


@pytest.mark.parametrize(
    "change",
    [
        lambda queries: queries[:1],
        lambda queries: queries[:, :3],
        lambda queries: queries.half(),
        lambda queries: queries.to("meta"),
        lambda queries: queries.to_sparse(),
        lambda queries: queries[None],
        lambda queries: queries.tolist(),
    ],
)
def test_queries_of_another_kind_are_refused_after_usual_ones(change):
    index, queries = CASE.index("pariskv", backend="cpu"), CASE.queries()
    index.append(*CASE.tokens(300))
    resident = ResidentRows(index.geometry, 2, 1)
    for _ in range(2):
        index.attend(queries, resident, k=9)
        with pytest.raises((ValueError, TypeError), match="queries: got"):
            index.attend(change(queries), resident, k=9)


def test_a_batch_that_has_changed_changes_what_is_usual():
    index, queries = CASE.index("pariskv", backend="cpu"), CASE.queries()
    index.append(*CASE.tokens(300))
    index.attend(queries, ResidentRows(index.geometry, 2, 1), k=9)
    index.reorder(torch.tensor([0, 1, 1]))
    with pytest.raises(ValueError, match=r"queries: got shape \[2, 6, 64\], allowed is \[B=3"):
        index.attend(queries, ResidentRows(index.geometry, 3, 1), k=9)
