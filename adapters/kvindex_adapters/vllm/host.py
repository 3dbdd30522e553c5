"""Divide the sequences of a vLLM batch into groups.

The keys and values of a group are copied together, from host memory to the device.

This module does not import vLLM. It uses only the field names of vLLM's batch metadata.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from torch import Tensor


@dataclass(frozen=True)
class Part:
    """A group of sequences of a batch. Their keys and values are copied to the device together.

    Args:
        sequences: Range of the sequences in the batch.
        tokens: Range of their new tokens among the new tokens of the batch.
        width: Number of pages for each sequence on the device.
        longest: Upper bound for the length of the longest sequence, in tokens.
        new: Largest number of new tokens in a sequence.
    """

    sequences: slice
    tokens: slice
    width: int
    longest: int
    new: int

    def of(self, common: Any, table: Tensor) -> Any:
        """Return vLLM's batch metadata for this part of the batch.

        Args:
            common: The metadata of the whole batch.
            table: Block table of the pages on the device to which the keys and values of these
                sequences are copied.
        """
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
    """Return how many sequences at the beginning of a batch have a decode step (one new token).

    A prompt can also have one new token: vLLM may take the rest of the prompt from a block that the
    same batch fills. The codes of this block do not exist yet, so such a prompt does not count.

    Args:
        starts: Index in the batch of each sequence's first new token, followed by the total number
            of new tokens.
        prompts: Whether each sequence is still in prefill, or None if unknown.
    """
    for number, (start, stop) in enumerate(pairwise(starts)):
        if stop - start != 1 or (prompts is not None and prompts[number]):
            return number
    return len(starts) - 1


def split(
    starts: Sequence[int], lengths: Sequence[int], *, first: int, page_tokens: int, room: int
) -> list[Part]:
    """Split a batch into as few groups of sequences as possible, such that each group fits into
    `room` pages.

    A single sequence always fits, because it has at most `room` pages.

    Args:
        starts: Index in the batch of each sequence's first new token, followed by the total number
            of new tokens.
        lengths: Length of each sequence in tokens, or an upper bound.
        first: Number of the first sequence to include. Earlier sequences are skipped.
        page_tokens: Number of tokens in a page.
        room: Number of pages that fit on the device.
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
