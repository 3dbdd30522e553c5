"""Grid sizes of a step's launches where there are few groups.

A group is one KV head of one sequence. An H100 or H200 has 132 multiprocessors, and launches that
give each group its own thread blocks fill them from `FULL` groups on. With fewer groups, which have
more query heads each (GLM-4-9B has 2 groups of 16 heads), each thread block would do more work one
after another. The functions here divide the work further in that case.
"""

from __future__ import annotations

FULL = 8
"""Groups whose thread blocks fill a GPU. All launches were tuned with this number."""


def rerank_splits(groups: int, multiprocessors: int, *, resident: int) -> int:
    """Return the thread blocks of each group in `rerank`.

    From `FULL` groups on there are two blocks for each multiprocessor. Fewer groups get at most as
    many blocks as run at once, because a block that waits for another one repeats the whole chain
    of reads after it, which doubled the kernel's time at 16 heads. They also get at most one block
    for every two multiprocessors: a list of some 4,000 entries (128K tokens) then has 7 for each
    warp, and a warp multiplies 16 candidates in the time of one, so more warps would not help.

    Args:
        groups: KV heads of all sequences.
        multiprocessors: Of the device.
        resident: Blocks of the kernel that a multiprocessor runs at once, by its registers: 2, or 1
            if a group has more than 8 heads, keys have more than 128 coordinates, or magnitudes
            have more than 3 bits.
    """
    if groups >= FULL:
        return max(1, 2 * multiprocessors // groups)
    return max(1, min(resident * multiprocessors // groups, multiprocessors // 2))


def attend_parts(groups: int, heads: int) -> int:
    """Return the parts into which `attend` divides the query heads of a group.

    Each part has thread blocks of its own. The result is the largest divisor of the heads with at
    most `FULL` parts in all, which are 128 blocks with 16 splits each. Parts help because a block
    processes its heads one after another. More splits would not: a warp has one row of 100 already,
    and the last block would have more to add up. Each part reads all rows of its group (about 420
    of 512 bytes). Parts after the first find them in L2, or read them over PCIe again if a row is
    neither on the device nor in the cache.
    """
    parts = [n for n in range(1, heads + 1) if heads % n == 0 and n * groups <= FULL]
    return max(parts, default=1)
