"""Comparisons of the results of indexes. If they differ, an AssertionError says where."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial

import torch
from torch import Tensor
from torch.nn.functional import pad

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
    unused, lowest = hits.ids == -1, hits.scores == float("-inf")
    assert_none("unused slots (-1) have the score -inf", unused & ~lowest, hits)
    assert_none("a slot with the score -inf is unused", lowest & ~unused, hits)
    assert_none(f"ids are below len(index), {len(index)}", hits.ids >= len(index), hits)
    if hits.log_weight is not None:
        want = (batch, g.q_heads, k)
        assert hits.log_weight.shape == want, f"log_weight has shape {list(want)}"
        wide = unused.repeat_interleave(g.group_size, dim=1)
        assert (hits.log_weight[wide] == float("-inf")).all(), "unused slots have no weight"
    above, below = hits.scores[..., :-1], hits.scores[..., 1:]
    rises = pad(above < below, (1, 0))
    assert not rises.any(), (
        f"scores descend, got {first_of(rises, hits)} after {first_of(rises.roll(-1, -1), hits)}"
    )
    tied = (above == below) & ~unused[..., 1:]
    wrong = pad(tied & (hits.ids[..., :-1] > hits.ids[..., 1:]), (1, 0))
    assert not wrong.any(), (
        "equal scores: the lower id first, "
        f"got {first_of(wrong, hits)} after {first_of(wrong.roll(-1, -1), hits)}"
    )
    ordered = hits.ids.sort(dim=-1).values
    repeated = (ordered[..., 1:] == ordered[..., :-1]) & (ordered[..., 1:] != -1)
    assert not repeated.any(), (
        f"ids are distinct, got row {int(ordered[..., 1:][repeated][0])} twice (k = {k})"
    )


def assert_none(promise: str, wrong: Tensor, hits: Hits) -> None:
    """Raise AssertionError if `wrong`, bool `[B, G, k]`, is True for any slot of the hits.

    The message contains `promise` (the requirement), and the first wrong slot with its row and its
    score.
    """
    assert not wrong.any(), f"{promise}, got {first_of(wrong, hits)}"


def first_of(wrong: Tensor, hits: Hits) -> str:
    """Describe the first slot where `wrong`, bool `[B, G, k]`, is True: its row and its score."""
    b, g, slot = wrong.nonzero()[0].tolist()
    row, score = int(hits.ids[b, g, slot]), float(hits.scores[b, g, slot])
    return f"row {row} with the score {score:.6g} in {_place(b, g, slot, hits)}"


def _place(b: int, g: int, slot: int, hits: Hits) -> str:
    return f"slot {slot} (k = {hits.ids.shape[-1]}, sequence {b}, KV head {g})"


def assert_same_rows(what: str, got: Tensor, want: Tensor) -> None:
    """Check that keys or values `[B, G, N, D]` are equal bit by bit.

    If not, the AssertionError names the first row that differs, and both numbers.
    """
    assert got.shape == want.shape, f"{what} have shape {list(want.shape)}, got {list(got.shape)}"
    differs = (got != want).nonzero()
    if len(differs):
        b, g, row, number = differs[0].tolist()
        ours, theirs = float(got[b, g, row, number]), float(want[b, g, row, number])
        raise AssertionError(
            f"{what} of row {row} (sequence {b}, KV head {g}): expected {theirs:.6g} in "
            f"coordinate {number}, got {ours:.6g}"
        )


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
    assert got.ids.shape == ids.shape, (
        f"hits have shape {list(ids.shape)}, got {list(got.ids.shape)}"
    )
    want = Hits(ids, want.scores)
    if not close:
        _assert_none("ids are equal", got.ids != ids, got, want)
        _assert_none("scores are equal bit by bit", got.scores != want.scores, got, want)
        return
    _assert_none("equal slots are used", (got.ids == -1) != (ids == -1), got, want)
    used = ids != -1
    if not used.any():
        return
    slack = close * (1 + float(want.scores[used].abs().max()))
    apart = ~((got.scores - want.scores).abs() <= slack) & used
    _assert_none(f"scores differ by at most {slack:.3g}", apart, got, want)
    flat = [tensor.flatten(0, 1).tolist() for tensor in (got.ids, got.scores, ids, want.scores)]
    for place, (got_ids, got_scores, want_ids, want_scores) in enumerate(zip(*flat, strict=True)):
        ours = dict(zip(got_ids, got_scores, strict=True))
        theirs = dict(zip(want_ids, want_scores, strict=True))
        last = min(want_scores)
        for row in (ours.keys() | theirs.keys()) - {-1}:
            difference = abs(ours.get(row, last) - theirs.get(row, last))
            b, g = divmod(place, ids.shape[1])
            assert difference <= slack, (
                f"row {row} is found with a score that differs by at most {slack:.3g}: expected "
                f"{_score(theirs, row)}, got {_score(ours, row)} "
                f"(k = {ids.shape[-1]}, sequence {b}, KV head {g})"
            )


def _assert_none(promise: str, wrong: Tensor, got: Hits, want: Hits) -> None:
    """Raise AssertionError if an element of `wrong`, bool `[B, G, k]`, is True.

    The error names the first such element and the rows of `got` and `want` in its place.
    """
    if wrong.any():
        b, g, slot = wrong.nonzero()[0].tolist()
        ours, theirs = (
            f"row {int(hits.ids[b, g, slot])} with the score {float(hits.scores[b, g, slot]):.6g}"
            for hits in (got, want)
        )
        raise AssertionError(
            f"{promise}: expected {theirs}, got {ours} in {_place(b, g, slot, got)}"
        )


def _score(scores: dict[int, float], row: int) -> str:
    return f"{scores[row]:.6g}" if row in scores else "no such row"


def snapshot(index: KVIndex, queries: Tensor, k: int = 7) -> tuple[object, ...]:
    """Return what public calls report about an index: length, bytes, a search, all rows."""
    hits = index.search(queries, k=k)
    rows = all_rows(index, len(queries))
    return len(index), index.nbytes(), hits.ids, hits.scores, rows.keys, rows.values


def assert_same_snapshot(got: tuple[object, ...], want: tuple[object, ...]) -> None:
    """Check that two results of `snapshot` are equal bit by bit."""
    names = "the length", "nbytes()", "ids of hits", "scores of hits", "keys", "values"
    for name, ours, theirs in zip(names, got, want, strict=True):
        if isinstance(theirs, Tensor):
            says = partial("{}: {}".format, name)
            torch.testing.assert_close(ours, theirs, rtol=0, atol=0, equal_nan=True, msg=says)
        else:
            assert ours == theirs, f"{name}: expected {theirs}, got {ours}"
