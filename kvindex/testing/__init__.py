"""What authors of indexes can test theirs with, inside this tree and outside."""

from kvindex.testing.faults import fail_at, interrupt_at, lines_of, operations_of

__all__ = ["fail_at", "interrupt_at", "lines_of", "operations_of"]
