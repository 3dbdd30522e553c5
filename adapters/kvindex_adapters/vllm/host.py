"""Choose which sequences are copied from host memory to the device together, for prompts.

This module does not import vLLM. It only uses the field names of vLLM's batch metadata.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from torch import Tensor


@dataclass(frozen=True)
class Part:
    """Sequences of a batch that are copied together.

    Args:
        sequences: Numbers of the sequences in the batch.
        tokens: Numbers of their new tokens in the batch.
        width: Number of pages that each sequence gets on the device.
        longest: Length of the longest sequence in tokens, an upper bound.
        new: Largest number of new tokens of a sequence.
    """

    sequences: slice
    tokens: slice
    width: int
    longest: int
    new: int

    def of(self, common: Any, table: Tensor) -> Any:
        """Return vLLM's batch metadata for these sequences alone, with another block table."""
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
    """Return how many of a batch's first sequences are decoding, with one new token each.

    If a prompt's prefix is in a block that the same batch fills, vLLM starts the prompt in this
    batch with one new token. The codes of that block do not exist yet, so such a sequence does not
    count as decoding.

    Args:
        starts: Number of the first new token of each sequence in the batch, and the end of the last
            sequence.
        prompts: Whether each sequence's prompt is still being read, or None if unknown.
    """
    for number, (start, stop) in enumerate(pairwise(starts)):
        if stop - start != 1 or (prompts is not None and prompts[number]):
            return number
    return len(starts) - 1


def split(
    starts: Sequence[int], lengths: Sequence[int], *, first: int, page_tokens: int, room: int
) -> list[Part]:
    """Split a batch's sequences into parts whose pages fit into `room`, as few parts as possible.

    One sequence always fits, because it has at most `room` pages.

    Args:
        starts: Number of the first new token of each sequence in the batch, and the end of the last
            sequence.
        lengths: Length of each sequence in tokens, or an upper bound.
        first: First sequence to split; those before it are skipped.
        page_tokens: Tokens of a page.
        room: Pages that fit on the device.
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
