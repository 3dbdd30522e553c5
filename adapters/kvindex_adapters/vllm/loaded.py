"""Blocks of keys and values that a KV connector of vLLM may have loaded. They are encoded again.

A KV connector saves pages, and loads them later or in another engine. What it has saved may have no
codes (compressed keys) yet, or those of an engine with other options. Codes of a block depend only
on its 256 keys. So the plug-in ignores loaded codes, and encodes loaded blocks from their keys:

- vLLM does not tell its workers which blocks a connector has loaded. But all of them are among the
  tokens that were computed before the request is admitted to the batch, that is, before the first
  step in which it has new tokens. Later blocks are filled by the engine itself.
- In the step that admits a request, a layer may still wait for its rows. So the request does not
  search in this step: its new tokens use full attention, like those of a prompt. Nor do sequences
  that share blocks with it, because some connectors load also blocks that vLLM's prefix cache has.
- Before the next step, all rows are there, and the whole blocks of the request are encoded.

This module does not import vLLM.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from kvindex.pariskv.block_layout import BLOCK


class Admitted:
    """The requests that one step of a model runner admits, and their tokens that were computed
    before.

    Args:
        batch: Returns the ids of the requests of the current batch, in the order of the batch.
    """

    def __init__(self, batch: Callable[[], Sequence[str]]) -> None:
        self.batch = batch
        self._counts: dict[str, int] = {}

    def update(self, scheduled: Any) -> None:
        """Read which requests a step admits.

        Args:
            scheduled: vLLM's `SchedulerOutput` of the step.
        """
        running = scheduled.scheduled_cached_reqs
        counts = zip(running.req_ids, running.num_computed_tokens, strict=True)
        resumed = [(name, count) for name, count in counts if name in running.resumed_req_ids]
        new = [(one.req_id, one.num_computed_tokens) for one in scheduled.scheduled_new_reqs]
        self._counts = {name: count for name, count in resumed + new if count}

    def of_batch(self) -> list[int]:
        """Return for each request of the batch the number of its tokens that were computed before
        this step admits it. It is 0 for other requests. The list is empty if all are 0."""
        if not self._counts:
            return []
        return [self._counts.get(name, 0) for name in self.batch()]


def as_prompts(reading: Tensor | None, counts: list[int], requests: int) -> Tensor:
    """Return which sequences of a batch read their prompts or are admitted, bool `[R]`.

    Args:
        reading: Which sequences read their prompts, bool, possibly without entries for padding;
            None if vLLM does not say so.
        counts: The result of `Admitted.of_batch`.
        requests: Number of sequences `R`, including padding.
    """
    found = torch.zeros(requests, dtype=torch.bool)
    if reading is not None:
        known = reading[:requests]
        found[: len(known)] = known
    found[: len(counts)] |= torch.tensor(counts) > 0
    return found


def sharing(tables: Tensor, slots: Tensor, pages: int, page_tokens: int) -> Tensor:
    """Return which sequences have a page with one of the slots, bool `[R]` on the device of the
    tables.

    It may also be true for a sequence whose table has such a page after its last one.

    Args:
        tables: Block tables of a batch, int `[R, pages]`.
        slots: The result of `last_slots`.
        pages: Number of pages that exist.
        page_tokens: Number of tokens of a page.
    """
    found = torch.zeros(pages, dtype=torch.bool, device=tables.device)
    found.index_fill_(0, torch.div(slots, page_tokens, rounding_mode="floor"), True)
    return found[tables.long()].any(1)


def last_slots(tables: Tensor, counts: list[int], page_tokens: int) -> Tensor:
    """Return the slots of the last tokens of whole blocks of 256 tokens, int64 `[E]`.

    Whoever encodes the blocks that a step fills finds them by these slots. The host does not wait
    for the device.

    Args:
        tables: Block tables of a batch, int `[R, pages]`.
        counts: For each sequence, the number of its first tokens whose blocks are listed.
        page_tokens: Number of tokens of a page.
    """
    parts = page_tokens // BLOCK
    owners = [
        (row, segment) for row, count in enumerate(counts) for segment in range(count // BLOCK)
    ]
    places = torch.tensor(owners, dtype=torch.int64).view(-1, 2)
    places = places.to(tables.device, non_blocking=True)
    rows, segments = places.unbind(1)
    pages = tables[rows, torch.div(segments, parts, rounding_mode="floor")].long()
    return pages * page_tokens + segments % parts * BLOCK + BLOCK - 1
