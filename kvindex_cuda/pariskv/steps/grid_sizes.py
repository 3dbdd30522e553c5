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
    groups, the result is the smaller of two limits:

    - All thread blocks must run at the same time. If some thread blocks have to wait for a free
      multiprocessor, the kernel takes up to twice as long (measured with 16 heads), because the
      reads of a thread block depend on each other.
    - There is at most one thread block of a group for every two multiprocessors. Each warp then has
      7 entries of a list of about 4,000 (at 128K tokens). More warps would not help, because a warp
      multiplies 16 candidates as fast as one.

    Args:
        groups: KV heads of all sequences.
        multiprocessors: Number of multiprocessors of the device.
        resident: Number of thread blocks of the kernel that a multiprocessor runs at the same time.
            Its registers allow 2, or 1 if a group has more than 8 heads, keys have more than 128
            coordinates, or magnitudes have more than 3 bits.
    """
    if groups >= FULL:
        return max(1, 2 * multiprocessors // groups)
    return max(1, min(resident * multiprocessors // groups, multiprocessors // 2))


def resident_splits(groups: int, multiprocessors: int) -> int:
    """Return the number of thread blocks per group that add up the weights of resident rows.

    They run concurrently with the other thread blocks of the kernel `prepare_query`, which are at
    most two for each multiprocessor. With eight groups, there are eight: each then reads 72 of 576
    rows. More would not shorten the kernel, whose other thread blocks take longer.

    Args:
        groups: KV heads of all sequences.
        multiprocessors: Number of multiprocessors of the device.
    """
    return max(1, min(8, multiprocessors // groups))


def attend_parts(groups: int, heads: int) -> int:
    """Return the number of parts into which the kernel `attend` divides the query heads of a group.

    A thread block processes its query heads one after another. So with few groups, it is faster to
    divide the heads of a group into parts, and to give each part thread blocks of its own (16, for
    example). The result is the largest divisor of the number of heads for which all groups together
    have at most `FULL` parts. More than 16 thread blocks per part would not help: for 100 selected
    rows, each warp of a part already processes only one row.

    Each part reads all rows of its group, for example 420 rows of 512 bytes. The first part loads
    them into the L2 cache, where the other parts usually find them. But each part reads a row over
    PCIe again if the row is neither in device memory nor in the row cache.
    """
    parts = [n for n in range(1, heads + 1) if heads % n == 0 and n * groups <= FULL]
    return max(parts, default=1)
