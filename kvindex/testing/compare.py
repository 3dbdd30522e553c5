"""Comparisons of the results of indexes. An AssertionError says what differs."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from kvindex.core.protocol import Hits, KVIndex, Rows

ROUNDED = 1e-2
"""Tolerance for scores that differ only by rounding, as a fraction of the largest score.

The last bit of a matrix product in torch depends on the shape of the batch. A different bit can
change a stored code: a bfloat16 weight by a factor of 1 ± 2^-8, or a quantized magnitude by one
level. A wrong row or sign changes a score by far more (`tests/contract/test_contract_can_fail.py`).
"""


@contextmanager
def raises(*kinds: type[Exception], says: tuple[str, ...]) -> Iterator[None]:
    """Check that the context raises an error of one of these types.

    Its message must contain all strings of `says`, in this order.
    """
    names, said = " or ".join(kind.__name__ for kind in kinds), None
    try:
        yield
    except kinds as error:
        said = left = str(error)
    assert said is not None, f"nothing was raised, expected is {names} about {says[0]!r}"
    for word in says:
        assert word in left, f"an error about {says[0]!r} says {word!r}, got {said!r}"
        left = left.partition(word)[2]


def hits_of(ids: Tensor) -> Hits:
    """Make a search result with these token ids and scores of 0, as an argument for `fetch`."""
    return Hits(ids, torch.zeros(ids.shape, device=ids.device))


def all_rows(index: KVIndex, batch: int) -> Rows:
    """Return the keys and values of all tokens in an index, in order of position."""
    g = index.geometry
    ids = torch.arange(len(index), device=g.device).expand(batch, g.kv_heads, -1)
    return index.fetch(hits_of(ids))


def assert_well_formed(hits: Hits, index: KVIndex, batch: int, k: int) -> None:
    """Check the properties that the result of every search must have.

    For example: shapes and dtypes, descending scores, distinct ids, -1 for unused slots.
    """
    g, shape = index.geometry, (batch, index.geometry.kv_heads, k)
    for name, tensor, dtype in (
        ("ids", hits.ids, torch.int64),
        ("scores", hits.scores, torch.float32),
    ):
        assert tensor.shape == shape, f"{name} have shape {list(shape)}, got {list(tensor.shape)}"
        assert tensor.dtype == dtype, f"{name} are {dtype}, got {tensor.dtype}"
        assert tensor.device == g.device, f"{name} are on {g.device}, got {tensor.device}"
    assert not hits.scores.isnan().any(), "no score is NaN"
    unused = hits.ids == -1
    assert (hits.scores[unused] == float("-inf")).all(), "unused slots (-1) have the score -inf"
    assert (hits.scores[~unused] > float("-inf")).all(), "a slot with the score -inf is unused"
    assert (hits.ids < len(index)).all(), "ids are below len(index)"
    if hits.log_weight is not None:
        want = (batch, g.q_heads, k)
        assert hits.log_weight.shape == want, f"log_weight has shape {list(want)}"
        wide = unused.repeat_interleave(g.group_size, dim=1)
        assert (hits.log_weight[wide] == float("-inf")).all(), "unused slots have no weight"
    above, below = hits.scores[..., :-1], hits.scores[..., 1:]
    assert (above >= below).all(), "scores descend"
    tied = (above == below) & ~unused[..., 1:]
    first, second = hits.ids[..., :-1][tied], hits.ids[..., 1:][tied]
    assert (first < second).all(), "equal scores: the lower id first"
    ordered = hits.ids.sort(dim=-1).values
    repeated = (ordered[..., 1:] == ordered[..., :-1]) & (ordered[..., 1:] != -1)
    assert not repeated.any(), "ids are distinct"


def assert_same_hits(got: Hits, want: Hits, *, close: float = 0.0, shift: Tensor | int = 0) -> None:
    """Check that two searches have found the same rows with the same scores.

    With a tolerance, rows may be in another order if their scores are close. A row may be missing
    if its score is close to the lowest score.

    Args:
        got: Hits to check.
        want: Expected hits.
        close: Tolerance as a fraction of the largest score, such as `ROUNDED`. With 0, hits must be
            equal bit by bit.
        shift: Number to add to the expected ids before the comparison, an int or int64 `[B]`.
    """
    shift = torch.as_tensor(shift, device=want.ids.device).reshape(-1, 1, 1)
    ids = torch.where(want.ids < 0, want.ids, want.ids + shift)  # a negative id is not a position
    if not close:
        assert torch.equal(got.ids, ids), "ids are equal"
        assert torch.equal(got.scores, want.scores), "scores are equal to the bit"
        return
    assert got.ids.shape == ids.shape, "as many slots are there"
    assert torch.equal(got.ids == -1, ids == -1), "as many slots are used"
    used = ids != -1
    if not used.any():
        return
    slack = close * (1 + float(want.scores[used].abs().max()))
    assert ((got.scores - want.scores)[used].abs() <= slack).all(), "scores differ"
    flat = [tensor.flatten(0, 1).tolist() for tensor in (got.ids, got.scores, ids, want.scores)]
    for got_ids, got_scores, want_ids, want_scores in zip(*flat, strict=True):
        ours = dict(zip(got_ids, got_scores, strict=True))
        theirs = dict(zip(want_ids, want_scores, strict=True))
        last = min(want_scores)
        for row in (ours.keys() | theirs.keys()) - {-1}:
            assert abs(ours.get(row, last) - theirs.get(row, last)) <= slack, f"row {row} differs"


def snapshot(index: KVIndex, queries: Tensor, k: int = 7) -> tuple[object, ...]:
    """Return what public calls report about an index: length, bytes, a search, all rows."""
    hits = index.search(queries, k=k)
    rows = all_rows(index, len(queries))
    return len(index), index.nbytes(), hits.ids, hits.scores, rows.keys, rows.values


def assert_same_snapshot(got: tuple[object, ...], want: tuple[object, ...]) -> None:
    """Check that two results of `snapshot` are equal bit by bit."""
    for ours, theirs in zip(got, want, strict=True):
        if isinstance(theirs, Tensor):
            torch.testing.assert_close(ours, theirs, rtol=0, atol=0, equal_nan=True)
        else:
            assert ours == theirs, f"{theirs} stays, got {ours}"
