"""Grid sizes of a decode step's launches if there are few groups.

A group is one KV head of one sequence. An H100 or H200 has 132 multiprocessors, and launches in
which each group has its own thread blocks use all of them if there are at least `FULL` groups.
Models with fewer groups have more query heads in each (GLM-4-9B has 2 groups of 16 heads), so each
thread block would do more work sequentially. In that case, the functions here divide the work into
more thread blocks.
"""

from __future__ import annotations

FULL = 8
"""Number of groups whose thread blocks fill a GPU. All launches were tuned with this number."""


def rerank_splits(groups: int, multiprocessors: int, *, resident: int) -> int:
    """Return the number of thread blocks per group for the kernel `rerank`.

    With `FULL` groups or more, there are two thread blocks for each multiprocessor. Fewer groups
    get at most as many blocks as run at once, because a block that has to wait for a free
    multiprocessor begins its whole chain of dependent reads only then, which doubled the kernel's
    time at 16 heads. They also get at most one block for every two multiprocessors: then each warp
    gets 7 entries of a list of about 4,000 (at 128K tokens). A warp multiplies 16 candidates in the
    same time as one, so more warps would not help.

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

    Each part has thread blocks of its own. The result is the largest divisor of the heads with at
    most `FULL` parts in all, which are 128 blocks with 16 splits each. Parts help because a block
    processes its heads one after another. More splits would not help: for 100 selected rows, a warp
    already has only one row, and the last block would have more partial results to add up. Each
    part reads all rows of its group (about 420 of 512 bytes). Parts after the first find these rows
    in the L2 cache; a row that is neither on the device nor in the row cache is read over PCIe
    again.
    """
    parts = [n for n in range(1, heads + 1) if heads % n == 0 and n * groups <= FULL]
    return max(parts, default=1)
