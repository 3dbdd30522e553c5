"""Reports of pools: blocks of memory, how many of them sequences share, and bytes."""

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
        blocks: Number of distinct blocks of memory for codes and rows: blocks of the CUDA kernels,
            or whole columns elsewhere.
        shared: Number of blocks that several sequences use.
        stored_bytes: Bytes of all blocks, each counted once.
        separate_bytes: Bytes that the sequences would need without sharing.
    """

    sequences: int
    tokens: int
    blocks: int
    shared: int
    stored_bytes: int
    separate_bytes: int

    @staticmethod
    def of(indexes: Collection[KVIndex], tokens: int) -> Report:
        """Make a report on the indexes of sequences that have `tokens` tokens together."""
        told = [capability(index, ReportsMemory) for index in indexes]
        pieces = [each.memory() for each in told if each is not None]
        held: dict[int, int] = {}
        users: dict[int, int] = {}
        for piece in pieces:
            for address, size in piece.items():
                # sequences may use different parts of a column
                held[address] = max(size, held.get(address, 0))
                users[address] = users.get(address, 0) + 1
        return Report(
            sequences=len(indexes),
            tokens=tokens,
            blocks=len(held),
            shared=sum(count > 1 for count in users.values()),
            stored_bytes=sum(held.values()),
            separate_bytes=sum(sum(piece.values()) for piece in pieces),
        )


@dataclass(frozen=True)
class LayersReport(Report):
    """Memory of the sequences of a pool of layers, and how they were stepped.

    Args:
        together: Number of steps, summed over the sequences, that ran together with other
            sequences.
        alone: Number of all other steps, summed over the sequences.
    """

    together: int = 0
    alone: int = 0
