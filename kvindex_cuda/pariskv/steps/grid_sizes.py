"""Number of thread blocks of a decode step's launches if there are few groups. A group is one KV
head of one sequence.

With at least `FULL` groups, a few thread blocks per group fill an H100 or H200 (132
multiprocessors). Models with fewer groups have more query heads in each (GLM-4-9B has 2 groups of
16 heads), so each thread block would do more work. For these, the functions here divide the work of
a group among more thread blocks.
"""

from __future__ import annotations

FULL = 8
"""Number of groups whose thread blocks fill a GPU. All launches were tuned with this number."""


def rerank_splits(groups: int, multiprocessors: int, *, resident: int) -> int:
    """Return the number of thread blocks per group for the kernel `rerank`.

    With `FULL` groups or more, there are two thread blocks for each multiprocessor. With fewer
    groups, there are two limits. First, no more thread blocks than run at the same time: a thread
    block that waits for a multiprocessor starts its chain of dependent reads late, which doubled
    the kernel's time at 16 heads. Second, one thread block for every two multiprocessors: then each
    warp has 7 entries of a list of about 4,000 (at 128K tokens), and more warps would not help,
    because a warp multiplies 16 candidates as fast as one.

    Args:
        groups: KV heads of all sequences.
        multiprocessors: Number of multiprocessors of the device.
        resident: Blocks of the kernel that a multiprocessor runs at once, by its registers: 2, or 1
            if a group has more than 8 heads, keys have more than 128 coordinates, or magnitudes
            have more than 3 bits.
    """
    if groups >= FULL:
        return max(1, 2 * multiprocessors // groups)
    return max(1, min(resident * multiprocessors // groups, multiprocessors // 2))


def attend_parts(groups: int, heads: int) -> int:
    """Return the number of parts into which the kernel `attend` divides the query heads of a group.
    Each part has thread blocks of its own.

    Parts help because a thread block processes its heads one after another. The result is the
    largest divisor of the number of heads with at most `FULL` parts over all groups, that is 128
    thread blocks with 16 splits each. More splits would not help: for 100 selected rows, a warp
    already has only one row.

    Each part reads all rows of its group (about 420 of 512 bytes). Parts after the first usually
    find these rows in L2. A row that is neither on the device nor in the row cache is read over
    PCIe again.
    """
    parts = [n for n in range(1, heads + 1) if heads % n == 0 and n * groups <= FULL]
    return max(parts, default=1)
