"""Each check of the contract fails on an index that is broken in the corresponding way."""

import re

import pytest
import torch

from kvindex import Hits, Rows
from kvindex.core.protocol import Attended, Attends
from kvindex.indexes.exact import Exact
from kvindex.ops.attention import attend
from kvindex.testing import ContractError, outcomes
from kvindex.testing.cases import Case
from kvindex.testing.contract import CHECKS

CASE = Case(q_heads=2, kv_heads=2, head_dim=16, value_dim=8, batch=2)


def swapped(hits):
    return Hits(hits.ids.flip(0), hits.scores.flip(0))


class WrongSign(Exact):
    def _search(self, queries, k):
        return super()._search(-queries, k)


class TooWide(Exact):
    def _search(self, queries, k):
        return super()._search(queries, k + 1)


class HigherIdFirst(Exact):
    def _search(self, queries, k):
        hits = super()._search(queries, k)
        n = int(self.counts.max())
        flipped = torch.where(hits.scores == hits.scores[..., :1], n - 1 - hits.ids, hits.ids)
        return Hits(flipped, hits.scores)


class Noisy(Exact):
    def _search(self, queries, k):
        self.calls = getattr(self, "calls", 0) + 1
        return super()._search(queries * self.calls, k)


class DividesByNorm(Exact):
    def _search(self, queries, k):
        return super()._search(queries / queries.norm(dim=-1, keepdim=True), k)


class ZeroIsUnused(Exact):
    def search(self, queries, *, k):
        hits = super().search(queries, k=k)
        return Hits(hits.ids.clamp_min(0), hits.scores)


class DropsTheNewest(Exact):
    def _search(self, queries, k):
        hits = super()._search(queries, k)
        newest = hits.ids == len(self) - 1
        return Hits(hits.ids.masked_fill(newest, -1), hits.scores.masked_fill(newest, -torch.inf))


class FetchesTheNext(Exact):
    def fetch(self, hits):
        rows = super().fetch(hits)
        return Rows(rows.keys.roll(1, dims=2), rows.values)


class EncodeCounts(Exact):
    def _encode(self, keys, learned):
        self.calls = getattr(self, "calls", 0) + 1
        return {"calls": torch.full(keys.shape[:3], self.calls)}


class ForgetsTheLastChunk(Exact):
    def _search(self, queries, k):
        hits = super()._search(queries, k)
        old = hits.ids < self.last
        return Hits(
            hits.ids.masked_fill(~old, -1).sort(-1, descending=True).values,
            hits.scores.masked_fill(~old, -torch.inf).sort(-1, descending=True).values,
        )

    def append(self, keys, values, *, valid=None):
        self.last = max(len(self), 1)
        super().append(keys, values, valid=valid)


class IgnoresPadding(Exact):
    @property
    def valid(self):
        return None

    def append(self, keys, values, *, valid=None):
        super().append(keys.nan_to_num(), values, valid=valid)


class ReturnsPadding(IgnoresPadding):
    def search(self, queries, *, k):
        return self._search(queries, k) if len(self) else super().search(queries, k=k)


class NeverTruncates(Exact):
    def truncate(self, length):
        self.longest = len(self)
        super().truncate(length)

    def _search(self, queries, k):
        hits = super()._search(queries, k)
        ids = torch.where(hits.ids == 0, getattr(self, "longest", 1) - 1, hits.ids)
        return Hits(ids, hits.scores)


class KeepsTheOldKeys(Exact):
    def truncate(self, length):
        self.kept = self._store.gather(torch.arange(len(self)).expand(2, 2, -1)).keys
        super().truncate(length)

    def scores(self, queries):
        scores = super().scores(queries)
        if hasattr(self, "kept"):
            shared = min(self.kept.shape[2], scores.shape[-1])
            scores[..., :shared] = (queries @ self.kept.mT)[..., :shared]
        return scores


class ForgetsItWasTruncated(Exact):
    def truncate(self, length):
        kept = self._valid
        self._valid = type(kept)()
        super().truncate(length)


class IgnoresOrder(Exact):
    def reorder(self, batch_indices):
        super().reorder(torch.zeros_like(batch_indices))


class MixesRows(Exact):
    def _search(self, queries, k):
        return swapped(super()._search(queries, k))


class KeepsRows(Exact):
    def reset(self):
        self._length = 0


class CountsTwice(Exact):
    def nbytes(self):
        return {tier: 2 * size for tier, size in super().nbytes().items()}


class ForgetsAtSeal(Exact):
    def end_prompt(self):
        self.truncate(3)


class NotUndone(Exact):
    def _undone(self, name):
        return False


class AppendsTheRestOfIt(NotUndone):
    def append(self, keys, values, *, valid=None):
        if keys.isnan().any():
            super().append(keys[:, :, :3], values[:, :, :3])
        super().append(keys, values, valid=valid)


class GrowsBeforeItFails(NotUndone):
    def append(self, keys, values, *, valid=None):
        half = keys.shape[2] // 2
        super().append(keys[:, :, :half], values[:, :, :half])
        super().append(keys[:, :, half:], values[:, :, half:])


class ReordersRowsFirst(NotUndone):
    def reorder(self, batch_indices):
        self._store = self._store.reordered(batch_indices)
        super().reorder(batch_indices)


class ReadsTheDefaultDtype(Exact, transactional=False):
    def search(self, queries, *, k, coverage=None):
        hits = super().search(queries, k=k, coverage=coverage)
        return Hits(hits.ids, hits.scores * float(torch.tensor(1 / 3)))


class ForgetsTheDevice(Exact):
    def _search(self, queries, k):
        return super()._search(queries + torch.zeros(queries.shape[-1]), k)


class Overflows(Exact):
    def scores(self, queries):
        return super().scores(queries) * 2.0**100


class TakesAnyNumber(Exact):
    def _check_finite(self, name, value):
        pass


class TakesAnyK(Exact):
    def search(self, queries, *, k, coverage=None):
        return super().search(queries, k=max(1, int(k)), coverage=coverage)


class ClampsRows(Exact):
    def reorder(self, batch_indices):
        super().reorder(batch_indices.clamp(0, 1))


class LeavesOutResidentRows(Exact):
    def _offers(self, wanted):
        return wanted is Attends or super()._offers(wanted)

    def attend(self, queries, resident, *, k):
        hits = self.search(queries, k=k)
        bias = torch.zeros(hits.ids.shape).masked_fill(hits.ids < 0, -torch.inf)
        bias = bias.repeat_interleave(self.geometry.group_size, dim=1)
        rows, options = self.fetch(hits), dict(scale=self.geometry.scale, return_lse=True)
        output, lse = attend(queries, rows.keys, rows.values, bias=bias, **options)
        return Attended(output, lse, (hits.ids >= 0).sum(-1))


class FixesTheBatchFirst(NotUndone):
    def append(self, keys, values, *, valid=None):
        self._batch = self._batch or len(keys)
        super().append(keys, values, valid=valid)


BROKEN = {
    "check_slots_are_exactly_k": TooWide,
    "check_a_needle_is_found": WrongSign,
    "check_ties_go_to_the_lower_id": HigherIdFirst,
    "check_searches_are_deterministic": Noisy,
    "check_zero_keys_and_queries_give_no_nan": DividesByNorm,
    "check_empty_index": ZeroIsUnused,
    "check_one_token": DropsTheNewest,
    "check_fetch_returns_the_appended_rows": FetchesTheNext,
    "check_encode_is_deterministic_and_changes_nothing": EncodeCounts,
    "check_append_in_chunks_equals_one_call": ForgetsTheLastChunk,
    "check_padding_changes_nothing_but_ids": IgnoresPadding,
    "check_nothing_but_padding_is_as_good_as_empty": ReturnsPadding,
    "check_attention_where_few_tokens_are_valid": LeavesOutResidentRows,
    "check_truncated_ids_never_return": NeverTruncates,
    "check_truncate_then_append_equals_fresh": KeepsTheOldKeys,
    "check_truncate_into_padding": ForgetsItWasTruncated,
    "check_reorder_moves_rows": IgnoresOrder,
    "check_a_batch_equals_its_rows": MixesRows,
    "check_reset_forgets_everything": KeepsRows,
    "check_nbytes_counts_rows_and_grows": CountsTwice,
    "check_signals_disturb_nothing": ForgetsAtSeal,
    "check_a_refused_append_changes_nothing": AppendsTheRestOfIt,
    "check_an_append_that_runs_out_of_memory_changes_nothing": GrowsBeforeItFails,
    "check_a_reorder_that_runs_out_of_memory_changes_nothing": ReordersRowsFirst,
    "check_memory_that_runs_out_anywhere_changes_nothing": NotUndone,
    "check_no_context_changes_results": ReadsTheDefaultDtype,
    "check_tensors_stay_on_their_device": ForgetsTheDevice,
    "check_the_largest_numbers_give_scores": Overflows,
    "check_numbers_beyond_are_refused_by_name": TakesAnyNumber,
    "check_a_k_out_of_range_is_refused": TakesAnyK,
    "check_wrong_calls_are_refused_and_change_nothing": ClampsRows,
    "check_wrong_appends_leave_an_empty_index_empty": FixesTheBatchFirst,
}


def error_of(check, kind):
    (outcome,) = outcomes(kind, checks=[check], cases=[CASE])
    return outcome.error


def test_every_check_has_a_broken_index():
    assert sorted(BROKEN) == sorted(check.__name__ for check in CHECKS)


def test_every_check_says_what_it_holds_an_index_to():
    assert all(check.__doc__.partition("\n")[0].endswith(".") for check in CHECKS)


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
def test_check_fails_on_its_broken_index(check):
    error = error_of(check, BROKEN[check.__name__])
    assert isinstance(error, ContractError)
    first, expected, found = str(error).split("\n")[:3]
    assert first == f"{check.__name__} fails in the case {CASE}"
    assert expected == f"  expected: {check.__doc__.partition(chr(10))[0]}"
    assert found.startswith("  found: ")
    assert error.__cause__ is not None


NUMBERS = {
    "check_a_needle_is_found": r"row 17, .* is among k = 9 of 40 rows, got rows \[\d",
    "check_searches_are_deterministic": r"scores .* bit by bit: expected R, got R in slot 0 "
    r"\(k = 9, sequence 0, KV head 0\)",
    "check_fetch_returns_the_appended_rows": r"keys of row 0 \(sequence 0, KV head 0\): expected N "
    r"in coordinate 0, got N",
    "check_append_in_chunks_equals_one_call": r"expected row -1 with .* -inf, got R in slot 1",
    "check_truncated_ids_never_return": r"below len\(index\), 13, got R in slot \d+ \(k = 40",
    "check_truncate_then_append_equals_fresh": r"at most N: expected R, got R in slot \d+ \(k = 9",
    "check_ties_go_to_the_lower_id": r"lower id first, got R in slot \d+ .* after R in slot",
}
"""Name of a check -> regular expression. `R` is a row with its score, and `N` a number."""


@pytest.mark.parametrize("name", NUMBERS)
def test_the_error_names_k_the_row_and_both_numbers(name):
    (check,) = (check for check in CHECKS if check.__name__ == name)
    number = r"-?\d[\d.e-]*"
    says = NUMBERS[name].replace("R", "row N with the score N").replace("N", number)
    assert re.search(says, str(error_of(check, BROKEN[name])))


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
def test_check_passes_on_the_index_it_was_broken_from(check):
    assert error_of(check, Exact) is None
