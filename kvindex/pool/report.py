"""Reports on the memory of a pool, and on how much memory its sequences share."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

from kvindex.core.capability import capability
from kvindex.core.protocol import KVIndex, ReportsMemory


@dataclass(frozen=True)
class Report:
    """Memory of the sequences of a pool.

    Args:
        sequences: Number of sequences.
        tokens: Number of tokens, summed over the sequences.
        blocks: Number of separate memory allocations for codes and rows. With CUDA kernels, these
            are blocks of a fixed size; otherwise, whole tensors.
        shared: Number of these blocks that more than one sequence uses.
        stored_bytes: Bytes of all blocks; a shared block is counted once.
        separate_bytes: Bytes that the sequences would need if they shared no blocks.
    """

    sequences: int
    tokens: int
    blocks: int
    shared: int
    stored_bytes: int
    separate_bytes: int

    @staticmethod
    def of(indexes: Collection[KVIndex], tokens: int) -> Report:
        """Make a report on the memory of `indexes`, which contain `tokens` tokens in total."""
        reporting = [capability(index, ReportsMemory) for index in indexes]
        reports = [each.memory() for each in reporting if each is not None]
        held: dict[int, int] = {}
        users: dict[int, int] = {}
        for piece in reports:
            for address, size in piece.items():
                # Sequences that share a tensor may use different numbers of its bytes. Count the
                # largest number.
                held[address] = max(size, held.get(address, 0))
                users[address] = users.get(address, 0) + 1
        return Report(
            sequences=len(indexes),
            tokens=tokens,
            blocks=len(held),
            shared=sum(count > 1 for count in users.values()),
            stored_bytes=sum(held.values()),
            separate_bytes=sum(sum(piece.values()) for piece in reports),
        )


@dataclass(frozen=True)
class LayersReport(Report):
    """Memory of the sequences of a `LayerPool`, and how many decode steps ran together.

    Args:
        together: Number of calls of `step` that computed a sequence together with others, counted
            once per sequence.
        alone: Number of calls of `step` that computed a sequence separately, counted once per
            sequence.
    """

    together: int = 0
    alone: int = 0
