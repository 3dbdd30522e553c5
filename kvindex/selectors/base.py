"""The interface of block selectors, and the functions that several of them use.

Block `j` contains the tokens from `128 j` to `128 j + 127`. A block of keys is *before* a block of
queries if all its tokens are older. The *own* block of a query is the block that contains it.

All selectors follow these rules:

- Block 0, the own block and the block before it are always kept (`kept_always`).
- Only whole blocks before the own block get a score. The own block is always kept, so it needs
  none, and its keys may still be incomplete.
- The choice for a block of queries depends only on these queries and on keys before them.
  Therefore a prompt may be read in chunks of any multiple of 128 tokens, without any effect on the
  choice.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Protocol

import torch
from torch import Tensor
from torch.nn.functional import pad

from kvindex.core import check
from kvindex.ops import block_sparse

BLOCK = block_sparse.BLOCK
"""Number of tokens in a block of queries and in a block of keys: 128."""

NEVER = float("-inf")


class BlockSelector(Protocol):
    """Chooses the blocks of keys that each block of queries reads."""

    def summarize(self, keys: Tensor) -> Tensor:
        """Compute a summary of each block of keys, from the keys of this block alone.

        Args:
            keys: Whole blocks, floating point `[B, G, n * 128, D]`.

        Returns:
            Summaries `[B, G, n, ...]`.

        Raises:
            ValueError: The keys are not whole blocks, or contain NaN or infinite numbers.
        """
        ...

    def choose(self, queries: Tensor, summaries: Tensor, first: int, *, scale: float) -> Tensor:
        """Choose the blocks of keys that each block of queries reads.

        Args:
            queries: Floating point `[B, H, T, D]`, after the rotary embedding, for the positions
                `first` to `first + T - 1`. The last block may have fewer than 128 queries.
            summaries: `[B, G, m, ...]`, the summaries of the first `m` blocks of keys: at least
                all blocks before the last query's own block. Further summaries have no effect.
            first: Position of the first query, a multiple of 128.
            scale: Factor of the inner products of queries and keys, such as `D^-1/2`.

        Returns:
            Bool `[B, H, QB, KB]`, True for the blocks to read. `QB = ceil(T / 128)` is the number
            of blocks of queries, and `KB = first / 128 + QB` the number of blocks of keys up to
            the last query. Blocks after a query's own block are False.

        Raises:
            ValueError: A shape or number does not fit, or scores are NaN or infinite.
        """
        ...


def kept_always(
    QB: int, KB: int, first_block: int, device: torch.device | str | None = None
) -> Tensor:
    """Return the blocks that every selector keeps: block 0, the own block, and the one before.

    Args:
        QB: Number of blocks of queries.
        KB: Number of blocks of keys.
        first_block: Block of the first query.
        device: Device of the result.

    Returns:
        Bool `[QB, KB]`.
    """
    own = torch.arange(first_block, first_block + QB, device=device)[:, None]
    blocks = torch.arange(KB, device=device)
    return (blocks == 0) | (blocks == own) | (blocks == own - 1)


def candidates(QB: int, KB: int, first_block: int, device: torch.device | str | None) -> Tensor:
    """Return the blocks that get a score: those before the own block. Bool `[QB, KB - 1]`."""
    own = torch.arange(first_block, first_block + QB, device=device)[:, None]
    return torch.arange(KB - 1, device=device) < own


def with_kept(chosen: Tensor, first_block: int) -> Tensor:
    """Add the blocks that are always kept, and leave out blocks that are not before the own block.

    Args:
        chosen: Bool `[B, H, QB, KB - 1]`, the choice among the blocks that have a score.
        first_block: Block of the first query.

    Returns:
        Bool `[B, H, QB, KB]`, the result of `BlockSelector.choose`.
    """
    QB, KB = chosen.shape[2], chosen.shape[3] + 1
    allowed = candidates(QB, KB, first_block, chosen.device)
    return pad(chosen & allowed, (0, 1)) | kept_always(QB, KB, first_block, chosen.device)


def check_keys(keys: Tensor) -> Tensor:
    """Return the keys as float32 blocks `[B, G, n, 128, D]`, or raise ValueError."""
    check.tensor("keys", keys, {"B": None, "G": None, "N": None, "D": None})
    B, G, N, D = keys.shape
    if N % BLOCK:
        raise ValueError(f"keys: got {N} tokens, allowed is a multiple of {BLOCK}")
    check.finite("keys", keys)
    return keys.float().reshape(B, G, N // BLOCK, BLOCK, D)


def vector(D: int) -> Mapping[str, int]:
    """Return the shape of a summary that is a vector, such as a mean key."""
    return {"D": D}


def all_keys(D: int) -> Mapping[str, int]:
    """Return the shape of a summary that is all keys of a block."""
    return {"128": BLOCK, "D": D}


def check_choose(
    queries: Tensor,
    summaries: Tensor,
    first: int,
    scale: float,
    *,
    one: Callable[[int], Mapping[str, int]] = vector,
) -> tuple[Tensor, int]:
    """Check the arguments of `choose`.

    Args:
        queries: As in `BlockSelector.choose`.
        summaries: As in `BlockSelector.choose`.
        first: As in `BlockSelector.choose`.
        scale: As in `BlockSelector.choose`.
        one: Function that returns the shape of the summary of one block for a head dimension: name
            of each axis -> size.

    Returns:
        The summaries of the blocks before the last query's own block, `[B, G, KB - 1, ...]`, and
        the number of the first query's block.

    Raises:
        TypeError: An argument is not a tensor.
        ValueError: A shape, device or number does not fit, or a query is not finite.
    """
    check.tensor("queries", queries, {"B": None, "H": None, "T": None, "D": None})
    B, H, T, D = queries.shape
    if T == 0:
        raise ValueError("queries: got no tokens, allowed is at least one")
    if check.at_least("first", first, 0) % BLOCK:
        raise ValueError(f"first: got {first}, allowed is a multiple of {BLOCK}")
    check.factor("scale", scale, check.SCALES)
    shape: dict[str, int | None] = {"B": B, "G": None, "m": None}
    shape.update(one(D))
    check.tensor("summaries", summaries, shape, device=queries.device)
    G, m = summaries.shape[1:3]
    if G == 0 or H % G:
        raise ValueError(f"summaries: got {G} KV heads, allowed is a divisor of {H} query heads")
    needed = (first + T - 1) // BLOCK
    if m < needed:
        raise ValueError(f"summaries: got {m} blocks, allowed is at least {needed}")
    check.finite("queries", queries)  # all of them, because some selectors use only a part
    return summaries[:, :, :needed], first // BLOCK


def check_finite(queries: Tensor, summaries: Tensor, scores: Tensor) -> None:
    """Raise ValueError if a score is NaN or infinite, with the name of the argument at fault.

    On a GPU, this waits for the device.
    """
    if scores.isfinite().all():
        return
    check.finite("queries", queries)
    check.finite("summaries", summaries)
    raise ValueError("queries: got scores that overflow float32, allowed are finite scores")


def grouped(queries: Tensor, G: int) -> Tensor:
    """Return the queries by KV head, float32 `[B, G, H / G, T, D]`.

    Args:
        queries: `[B, H, T, D]`.
        G: Number of KV heads.
    """
    B, H, T, D = queries.shape
    return queries.float().reshape(B, G, H // G, T, D)


def split(rows: Tensor, length: int = BLOCK, *, value: float = 0.0) -> Tensor:
    """Split the second to last axis into parts of a length: `[..., T, D]` to `[..., n, length, D]`.

    The last part is filled with `value`.
    """
    padded = pad(rows, (0, 0, 0, -rows.shape[-2] % length), value=value)
    parts = padded.shape[-2] // length
    return padded.reshape(*rows.shape[:-2], parts, length, rows.shape[-1])


def part_sizes(T: int, length: int, device: torch.device) -> Tensor:
    """Return how many of `T` rows are in each part of `split`, float32 `[n]`."""
    starts = torch.arange(0, T, length, device=device)
    return (T - starts).clamp(max=length).float()


def mean_queries(queries: Tensor, G: int) -> Tensor:
    """Return the mean query of each block, float32 `[B, G, H / G, QB, D]`.

    The mean of a partial last block is over the queries that it has.

    Args:
        queries: `[B, H, T, D]`.
        G: Number of KV heads.
    """
    sizes = part_sizes(queries.shape[2], BLOCK, queries.device)
    return split(grouped(queries, G)).sum(-2) / sizes[:, None]


def softmax_before(scores: Tensor, first_block: int) -> Tensor:
    """Return the softmax over the blocks before the own block, and 0 for all other blocks.

    The weights of a block of queries are all 0 if no block is before it.

    Args:
        scores: Finite, float32 `[..., QB, KB - 1]`.
        first_block: Block of the first query.
    """
    QB, before = scores.shape[-2:]
    hidden = ~candidates(QB, before + 1, first_block, scores.device)
    return scores.masked_fill(hidden, NEVER).softmax(-1).masked_fill(hidden, 0.0)


def blocks_with_keys(
    queries: Tensor, blocks: Tensor, first_block: int
) -> Iterator[tuple[int, Tensor, Tensor]]:
    """Return each block of queries together with all keys before it, for exact logits.

    Args:
        queries: `[B, H, T, D]`.
        blocks: Blocks of keys, `[B, G, KB - 1, 128, D]`.
        first_block: Block of the first query.

    Yields:
        The number of the block of queries, counted from `first_block`; its queries by KV head,
        float32 `[B, G, H / G, t, D]`; and the keys before it, float32 `[B, G, 1, n * 128, D]`. A
        block of queries without keys before it is left out.
    """
    every = grouped(queries, blocks.shape[1])
    for i in range(-(-queries.shape[2] // BLOCK)):
        if first_block + i:
            some = every[:, :, :, i * BLOCK : (i + 1) * BLOCK]
            before = blocks[:, :, : first_block + i].flatten(2, 3)
            yield i, some, before.float()[:, :, None]


def nothing_chosen(queries: Tensor, blocks: Tensor) -> Tensor:
    """Return False for all blocks that have a score, bool `[B, G, H / G, QB, KB - 1]`."""
    (B, H, T, _), (G, before) = queries.shape, blocks.shape[1:3]
    shape = B, G, H // G, -(-T // BLOCK), before
    return torch.zeros(shape, dtype=torch.bool, device=queries.device)


def smallest_set(weights: Tensor, mass: float) -> Tensor:
    """Choose the smallest set of the largest weights that has at least a fraction of their sum.

    All weights that are equal to the smallest chosen one are chosen, too. So the set is always the
    weights that reach some threshold, and a search for the threshold finds the same set as sorting.

    Args:
        weights: Float32 `[..., K]`, not negative.
        mass: Fraction of the sum, in (0, 1]. With 1, all weights are chosen, zeros included.

    Returns:
        Bool `[..., K]`.
    """
    if mass == 1 or weights.shape[-1] == 0:
        return torch.ones_like(weights, dtype=torch.bool)
    largest_first = weights.sort(-1, descending=True).values
    sums = largest_first.cumsum(-1)
    # the sum before a weight is still too small: the weight is needed
    before = pad(sums[..., :-1], (1, 0))
    needed = (before < mass * sums[..., -1:]).sum(-1, keepdim=True).clamp(min=1)
    return weights >= largest_first.gather(-1, needed - 1)
