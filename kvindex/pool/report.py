"""Report of a pool: blocks of codes and rows, how many of them several sequences share, bytes."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

from kvindex.core.capability import capability
from kvindex.core.protocol import KVIndex, ReportsMemory


@dataclass(frozen=True)
class Report:
    """What the sequences of a pool hold together.

    sequences, tokens: how many, those of each sequence counted. blocks: distinct pieces of memory
    that codes and rows are in (blocks of kernels, else columns); shared: those that several
    sequences hold; held_bytes: of all blocks, each once; separate_bytes: what the sequences would
    take without sharing.
    """

    sequences: int
    tokens: int
    blocks: int
    shared: int
    held_bytes: int
    separate_bytes: int

    @staticmethod
    def of(indexes: Collection[KVIndex], tokens: int) -> Report:
        """Of these sequences, which hold so many tokens."""
        told = [capability(index, ReportsMemory) for index in indexes]
        pieces = [each.memory() for each in told if each is not None]
        held: dict[int, int] = {}
        users: dict[int, int] = {}
        for piece in pieces:
            for address, size in piece.items():
                held[address] = max(size, held.get(address, 0))  # of a column each uses some
                users[address] = users.get(address, 0) + 1
        return Report(
            sequences=len(indexes),
            tokens=tokens,
            blocks=len(held),
            shared=sum(count > 1 for count in users.values()),
            held_bytes=sum(held.values()),
            separate_bytes=sum(sum(piece.values()) for piece in pieces),
        )


@dataclass(frozen=True)
class LayersReport(Report):
    """What the sequences of a pool of layers hold, and how they were stepped.

    together: steps of a sequence that were a row of a step with others, so far; alone: all others.
    """

    together: int = 0
    alone: int = 0
