"""Prompts whose rows lie on the host: which sequences are copied to the device side by side.

Nothing here knows of vLLM but the names of what it tells of a batch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from torch import Tensor


@dataclass(frozen=True)
class Part:
    """Sequences that are copied together, `width` pages of room for each.

    sequences, tokens: which ones of a batch; longest: the most tokens that one has; new: the most
    that one brings.
    """

    sequences: slice
    tokens: slice
    width: int
    longest: int
    new: int

    def of(self, common: Any, table: Tensor) -> Any:
        """What vLLM tells of a batch, of this part of it, whose pages are those of a table."""
        some, first = self.sequences, self.tokens.start
        rows = slice(some.start, some.stop + 1)
        lengths = common.seq_lens_cpu_upper_bound
        return type(common)(
            query_start_loc=common.query_start_loc[rows] - first,
            query_start_loc_cpu=common.query_start_loc_cpu[rows] - first,
            seq_lens=common.seq_lens[some],
            num_reqs=some.stop - some.start,
            num_actual_tokens=self.tokens.stop - first,
            max_query_len=self.new,
            max_seq_len=self.longest,
            block_table_tensor=table,
            slot_mapping=common.slot_mapping[self.tokens],
            causal=common.causal,
            seq_lens_cpu_upper_bound=None if lengths is None else lengths[some],
        )


def single(starts: Sequence[int], prompts: Sequence[bool] | None = None) -> int:
    """How many of a batch's first sequences decode: bring one token each, which is no prompt's.

    starts: of each, and the end; prompts: of each whether its prompt is still being read, None
    where nobody says. One that finds its prefix in a block which the same batch fills, vLLM starts
    in that batch: no codes are there yet to search.
    """
    for number, (start, stop) in enumerate(pairwise(starts)):
        if stop - start != 1 or (prompts is not None and prompts[number]):
            return number
    return len(starts) - 1


def split(
    starts: Sequence[int], lengths: Sequence[int], *, first: int, page_tokens: int, room: int
) -> list[Part]:
    """Parts of a batch's sequences from `first` on, as few as fit into `room` pages each.

    starts: where each sequence's new tokens begin among all, and the end; lengths: of each, or
    more. One sequence always fits: it has at most `room` pages.
    """
    parts: list[Part] = []
    begin = width = longest = new = 0
    for number in range(first, len(lengths)):
        pages = min(-(-lengths[number] // page_tokens), room)
        count = starts[number + 1] - starts[number]
        if number == first or max(width, pages) * (number - begin + 1) > room:
            begin = number
            width, longest, new = pages, lengths[number], count
            parts.append(Part(slice(begin, begin), slice(0, 0), 0, 0, 0))
        width, longest = max(width, pages), max(longest, lengths[number])
        new = max(new, count)
        tokens = slice(starts[begin], starts[number + 1])
        parts[-1] = Part(slice(begin, number + 1), tokens, width, longest, new)
    return [part for part in parts if part.tokens.start < part.tokens.stop]
