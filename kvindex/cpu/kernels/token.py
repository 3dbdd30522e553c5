"""Check the queries and keys of a new token, and store its keys and values."""

from __future__ import annotations

import numpy as np

from kvindex.cpu.kernels.compile import int64_at, kernel, uint8_at
from kvindex.cpu.kernels.numbers import read


@kernel
def in_range(numbers: np.ndarray, limit: float) -> bool:
    """Return True if no float32 number is NaN, or larger than `limit` in magnitude."""
    outside, most = np.int32(0), np.float32(limit)
    for i in range(len(numbers)):
        outside += np.int32(not abs(numbers[i]) <= most)
    return bool(outside == 0)


@kernel
def put_bytes(source: int, count: int, to: int) -> None:
    """Copy bytes from one address to another."""
    own, out = uint8_at(source, count), uint8_at(to, count)
    for i in range(count):
        out[i] = own[i]


@kernel
def put_token(
    asked: int,
    keys: int,
    values: int,
    window_keys: int,
    window_values: int,
    steps: np.ndarray,
    place: int,
    count: int,
    limit: float,
    kind: int,
    size: int,
    resident: np.ndarray,
    resident_bytes: int,
    queries: np.ndarray,
    room: np.ndarray,
) -> bool:
    """Check a new token, and write its keys and values to two places in memory.

    The first place is the window. The second one is the buffer of resident rows, which are the rows
    of sink and window that attention reads. The queries of the token are converted to float32.

    Args:
        asked: Address of the queries, contiguous `[B·G, g, D]`.
        keys: Address of the token's keys, contiguous `[B·G, D]`.
        values: Address of the token's values, contiguous `[B·G, Dv]`.
        window_keys: Address of the token's first key in the window.
        window_values: Address of the token's first value in the window.
        steps: Distances in bytes from the first key to each key in the window, and from the first
            value to each value, int64 `[2, B·G]`.
        place: Address of the number of resident rows, int64, which is set to `count + 1`.
        count: Number of resident rows before the call. The token's rows are written after them.
        limit: Largest magnitude of a number in a query or key; negative to check nothing.
        kind: Dtype of queries, keys and values (`numbers.KINDS`).
        size: Bytes of a number.
        resident: Addresses of resident rows, int64 `[B·G]`.
        resident_bytes: Bytes of a resident row.
        queries: Result, float32 `[B·G, g, D]`.
        room: Buffer, float32 `[B·G · D]`.

    Returns:
        True if the token was written. False if a number in a query or key is out of range; then
        nothing was written to the window and the resident rows.
    """
    (groups, _, D), every = queries.shape, queries.reshape(queries.size)
    read(asked, len(every), kind, every)
    read(keys, len(room), kind, room)
    if limit >= 0 and not (in_range(every, limit) and in_range(room, limit)):
        return False
    key_bytes = D * size
    value_bytes = resident_bytes - key_bytes
    for group in range(groups):
        row = resident[group] + count * resident_bytes
        key, value = keys + group * key_bytes, values + group * value_bytes
        put_bytes(key, key_bytes, row)
        put_bytes(value, value_bytes, row + key_bytes)
        put_bytes(key, key_bytes, window_keys + steps[0, group])
        put_bytes(value, value_bytes, window_values + steps[1, group])
    int64_at(place, 1)[0] = count + 1
    return True
