"""Launches of a step where groups are few: how its kernels divide work that 8 groups divide alone.

A group is a KV head of a row of the batch. A GPU has 132 multiprocessors (H100, H200), and launches
that give each group its blocks fill it from `FULL` groups on. With fewer, and more heads in each
(GLM-4-9B: 2 of 16), the same heads' work falls to fewer blocks, each of which has more of it to do
one after another. What is divided otherwise is said here, launch by launch; from `FULL` groups on
every launch is what it was.
"""

from __future__ import annotations

FULL = 8
"""Groups from which on a launch's blocks fill a GPU: all launches were tuned with so many."""


def rerank_splits(groups: int, multiprocessors: int, *, resident: int) -> int:
    """Blocks of a group in `rerank`.

    resident: blocks of the kernel that a multiprocessor holds at once, by its registers: 2, or 1
    where a group has more than 8 heads, keys more than 128 coordinates or magnitudes more than 3
    bits.

    From `FULL` groups on there are two blocks for each multiprocessor. Fewer groups get no more
    than are resident at once, for a block that waits for another to end goes through the whole
    chain of reads after it: at 16 heads that was twice the kernel. Nor do they get more than one
    for every second multiprocessor: a list of some 4,000 entries (128K tokens) then gives a warp
    7, and it multiplies 16 candidates in the time of one; more warps only add to the same sums.
    """
    if groups >= FULL:
        return max(1, 2 * multiprocessors // groups)
    return max(1, min(resident * multiprocessors // groups, multiprocessors // 2))


def attend_parts(groups: int, heads: int) -> int:
    """Into how many parts `attend` divides the query heads of a group, each with blocks of its own.

    The most that divide the heads evenly while there are `FULL` parts at most, which with 16 splits
    each are 128 blocks. What a block does for a head comes after what it does for the one before:
    the logits and the values of a row, the sums of its warps, in the last block those of all
    splits. More splits would give a warp fewer rows, of which it has one of 100 already, and the
    last block more to add up. A part reads all of its group's rows: 420 of 512 bytes, from L2 for
    all parts but the first, or over PCIe again where a row is neither on the device nor in the
    cache.
    """
    parts = [n for n in range(1, heads + 1) if heads % n == 0 and n * groups <= FULL]
    return max(parts, default=1)
