"""Measure how long attention of a prompt's chunk to chosen blocks of keys takes on a GPU.

    python -m benchmarks.block_sparse [--tokens N] [--queries T] [--fraction F …]
        [--kernel NAME …] [--rounds R] [--seconds S] [--json OUT]

The queries of the newest T tokens attend causally to N tokens, in the shapes of one layer of
Qwen3-8B (32 query heads, 8 KV heads, D = 128) in bfloat16. Each block of 128 queries of each query
head reads its own block of 128 keys, and a random fraction F of the blocks before it. The kernels
are:

- `full`: full attention with cuDNN, as kvindex computes it without sparse attention.
- `kvindex`: kvindex's Triton kernel.
- `flex`: torch's FlexAttention, compiled.
- `flashinfer-fa2` and `flashinfer-fa3`: FlashInfer's `BlockSparseAttentionWrapper`. It has one
  choice of blocks for all heads, so all heads are passed as one long sequence with one head.
- `flashinfer-variable-fa2` and `flashinfer-variable-fa3`: `VariableBlockSparseAttentionWrapper`. It
  has one choice for each KV head, so keys and values are repeated for each query head.

Each kernel gets keys and values in the memory layout that it reads without a copy. Each output is
compared with the reference implementation in float32 before times are measured. A kernel is skipped
if its package is not installed, or if its output is wrong. For each kernel, the script reports:

- `ms`: time of the attention. For kvindex, this includes making the lists of chosen blocks.
- `prepare_ms`: time to prepare for a new choice of blocks, given as a tensor of booleans, until the
  GPU is done. A model must do this in each layer and chunk.
- `error`: largest relative error of the output of a block of queries.
"""

from __future__ import annotations

import argparse
import importlib
import statistics
import time
from collections.abc import Callable, Iterator, Mapping
from functools import cache, cached_property, partial
from importlib.metadata import PackageNotFoundError, version
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, flex_attention

from benchmarks.common import workload
from benchmarks.common.timing import Figures, drained, in_turns
from kvindex.core.geometry import Geometry
from kvindex.ops import block_sparse as reference
from kvindex.ops.attention import attend_causal
from kvindex.ops.block_sparse import BLOCK
from kvindex_adapters.evaluate.machine import describe
from kvindex_adapters.evaluate.output_files import output, write_json

LARGEST_ERROR = 0.02
"""Largest relative error of a block of queries. A block of 256 chosen ones that is left out changes
the output by 6%, and rounding to bfloat16 by less than 1%."""

CALLS = 4
"""Number of calls of a kernel in a round. The first one is not timed."""

PREPARED = 3
"""Number of timed preparations of each kernel."""

WORKSPACE_BYTES = 2**28
"""Bytes of memory for intermediate results of FlashInfer."""

Run = Callable[[], Tensor]
"""Function that computes the attention, and returns the output `[1, H, T, D]`."""


class Chunk:
    """Random queries, keys and values of the newest tokens of a prompt.

    Args:
        g: Shapes of the layer.
        queries: Number of queries `T`.
        tokens: Number of keys `N`.

    Attributes:
        queries: `[1, H, T, D]`.
        keys: `[1, G, N, D]`. The heads of a token are stored one after the other, as in kvindex.
        values: `[1, G, N, D]`, stored like the keys.
    """

    def __init__(self, g: Geometry, queries: int, tokens: int) -> None:
        draw = torch.Generator(g.device).manual_seed(0)

        def normal(heads: int, count: int) -> Tensor:
            shape = 1, count, heads, g.head_dim
            part = torch.randn(shape, generator=draw, device=g.device, dtype=g.dtype)
            return part.transpose(1, 2)

        self.group, self.scale = g.group_size, g.head_dim**-0.5
        self.queries = normal(g.q_heads, queries)
        self.keys, self.values = normal(g.kv_heads, tokens), normal(g.kv_heads, tokens)

    @property
    def first_block(self) -> int:
        """Number of blocks of keys before the first query."""
        return (self.keys.shape[2] - self.queries.shape[2]) // BLOCK

    @cached_property
    def by_head(self) -> tuple[Tensor, Tensor, Tensor]:
        """Queries, keys and values, with the tokens of a head stored one after the other."""
        return self.queries.contiguous(), self.keys.contiguous(), self.values.contiguous()

    @cached_property
    def repeated(self) -> tuple[Tensor, Tensor, Tensor]:
        """Queries `[H, T, D]`, and keys and values `[H, N, D]`: repeated for each query head."""
        queries, *rows = self.by_head
        keys, values = (part[0].repeat_interleave(self.group, 0) for part in rows)
        return queries[0], keys, values

    def choose(self, fraction: float, seed: int = 0) -> Tensor:
        """Choose the own block and random earlier blocks: bool `[1, H, T / 128, N / 128]`."""
        (_, H, T, _), N = self.queries.shape, self.keys.shape[2]
        device = self.queries.device
        draw = torch.Generator(device).manual_seed(seed)
        size = 1, H, T // BLOCK, N // BLOCK
        chosen = torch.rand(size, generator=draw, device=device) < fraction
        own = self.first_block + torch.arange(T // BLOCK, device=device)[:, None]
        block = torch.arange(N // BLOCK, device=device)
        return chosen & (block < own) | (block == own)


def full(chunk: Chunk, chosen: Tensor) -> Run:
    """Full attention, which ignores the choice."""
    parts = chunk.queries, chunk.keys, chunk.values
    return partial(attend_causal, *parts, scale=chunk.scale)


def kvindex(chunk: Chunk, chosen: Tensor) -> Run:
    """kvindex's Triton kernel. It makes lists of the chosen blocks in each call."""
    from kvindex_cuda.triton.block_sparse import attend_chosen  # imports Triton

    parts = chunk.queries, chunk.keys, chunk.values

    def run() -> Tensor:
        found = attend_chosen(*parts, chosen, scale=chunk.scale)
        assert isinstance(found, Tensor)
        return found

    return run


def flex(chunk: Chunk, chosen: Tensor) -> Run:
    """torch's FlexAttention. Only the own block of the queries has a mask."""
    QB, KB = chosen.shape[2:]
    own = chunk.first_block + torch.arange(QB, device=chosen.device, dtype=torch.int32)
    before = chosen & (torch.arange(KB, device=chosen.device) != own[:, None])
    masked = own[:, None].expand(*chosen.shape[:3], 1)
    mask = BlockMask.from_kv_blocks(
        torch.ones_like(masked[..., 0]),
        torch.nn.functional.pad(masked, (0, KB - 1)).contiguous(),
        before.sum(-1, dtype=torch.int32),
        before.int().argsort(dim=-1, descending=True, stable=True).int(),
        BLOCK_SIZE=BLOCK,
        mask_mod=_causal(chunk.first_block * BLOCK),
        seq_lengths=(QB * BLOCK, KB * BLOCK),
    )
    attend = _compiled()
    return partial(
        attend, *chunk.by_head, block_mask=mask, scale=chunk.scale, enable_gqa=chunk.group > 1
    )


@cache
def _causal(first: int) -> Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]:
    """Return the causal mask of FlexAttention for queries from position `first` on."""

    def mask(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return query + first >= key

    return mask


@cache
def _compiled() -> Callable[..., Tensor]:
    compiled: Callable[..., Tensor] = torch.compile(flex_attention, dynamic=False)
    return compiled


def flashinfer(chunk: Chunk, chosen: Tensor, backend: str) -> Run:
    """FlashInfer with one choice for all heads: the heads are parts of one long sequence.

    A row of blocks is one block of queries of one head. Its mask is causal at the end, where its
    own block is.
    """
    wrapper = _wrapper("BlockSparseAttentionWrapper", str(chosen.device), backend)
    queries, keys, values = (part.flatten(0, 2)[:, None] for part in chunk.by_head)
    KB, D = chosen.shape[3], queries.shape[2]
    head, _, block = chosen[0].nonzero(as_tuple=True)
    counts = chosen.sum(-1).flatten()
    wrapper.plan(
        torch.nn.functional.pad(counts.cumsum(0), (1, 0)).int(),
        (head // chunk.group * KB + block).int(),
        len(queries),
        len(keys),
        BLOCK,
        BLOCK,
        num_qo_heads=1,
        num_kv_heads=1,
        head_dim=D,
        causal=True,
        sm_scale=chunk.scale,
        q_data_type=queries.dtype,
        kv_data_type=keys.dtype,
        o_data_type=queries.dtype,
    )
    return lambda: wrapper.run(queries, keys, values).view(chunk.queries.shape)


def flashinfer_variable(chunk: Chunk, chosen: Tensor, backend: str) -> Run:
    """FlashInfer with one choice for each KV head: each query head gets its own KV head."""
    wrapper = _wrapper("VariableBlockSparseAttentionWrapper", str(chosen.device), backend)
    queries, keys, values = chunk.repeated
    H, QB, KB = chosen.shape[1:]
    sizes = torch.full((H, QB + KB), BLOCK, dtype=torch.int32, device=chosen.device)
    wrapper.plan(
        chosen[0],
        sizes[:, :QB],
        sizes[:, QB:],
        num_qo_heads=H,
        num_kv_heads=H,
        head_dim=queries.shape[2],
        causal=True,
        sm_scale=chunk.scale,
        q_data_type=queries.dtype,
        kv_data_type=keys.dtype,
    )
    return lambda: wrapper.run(queries, keys, values)[None]


@cache
def _wrapper(name: str, device: str, backend: str) -> Any:
    """Create an object of one of FlashInfer's classes, with memory for intermediate results."""
    sparse = importlib.import_module("flashinfer.sparse")
    workspace = torch.empty(WORKSPACE_BYTES, dtype=torch.uint8, device=device)
    return getattr(sparse, name)(workspace, backend=backend)


KERNELS: dict[str, Callable[[Chunk, Tensor], Run]] = {
    "full": full,
    "kvindex": kvindex,
    "flex": flex,
    "flashinfer-fa2": partial(flashinfer, backend="fa2"),
    "flashinfer-fa3": partial(flashinfer, backend="fa3"),
    "flashinfer-variable-fa2": partial(flashinfer_variable, backend="fa2"),
    "flashinfer-variable-fa3": partial(flashinfer_variable, backend="fa3"),
}
"""Name of a kernel -> function that prepares it for a choice of blocks, bool `[1, H, QB, KB]`."""


def error_of(got: Tensor, want: Tensor) -> float:
    """Return the largest relative error of a block of queries of one head, both `[1, H, T, D]`."""
    off, size = (
        part.unflatten(2, (-1, BLOCK)).square().mean((3, 4)) for part in (got.float() - want, want)
    )
    return float((off / size).sqrt().max().nan_to_num(torch.inf))


def expected(chunk: Chunk, chosen: Tensor) -> Tensor:
    """Compute attention to the chosen blocks with the reference implementation, in float32."""
    parts = (part.float() for part in (chunk.queries, chunk.keys, chunk.values))
    return reference.attend_chosen(*parts, chosen, scale=chunk.scale)


def prepared(
    chunk: Chunk, choices: Mapping[str, Tensor]
) -> tuple[dict[str, Run], dict[str, dict[str, float]], dict[str, str]]:
    """Prepare kernels for a choice of blocks, compare their outputs, and time the preparation.

    Args:
        chunk: Queries, keys and values.
        choices: Name of each kernel -> the blocks that it must read, bool `[1, H, QB, KB]`.

    Returns:
        The kernels whose outputs are right, their errors and times of preparation, and for each
        kernel that is skipped, the reason.
    """
    want: dict[int, Tensor] = {}
    runs: dict[str, Run] = {}
    about: dict[str, dict[str, float]] = {}
    skipped: dict[str, str] = {}
    for name, chosen in choices.items():
        if id(chosen) not in want:
            want[id(chosen)] = expected(chunk, chosen)
            drained()
        start = time.perf_counter()
        try:
            got = KERNELS[name](chunk, chosen)()
            drained()
        except Exception as problem:  # a kernel of another package must not end the measurement
            skipped[name] = " ".join(f"{type(problem).__name__}: {problem}".split())[:500]
            continue
        first_s = time.perf_counter() - start
        error = error_of(got, want[id(chosen)])
        if error > LARGEST_ERROR:
            skipped[name] = f"got a relative error of {error:.3g}, allowed is {LARGEST_ERROR}"
            continue
        times = []
        for _ in range(PREPARED):
            start = time.perf_counter()
            runs[name] = KERNELS[name](chunk, chosen)
            drained()
            times.append(1e3 * (time.perf_counter() - start))
        about[name] = dict(error=error, first_s=first_s, prepare_ms=statistics.median(times))
    return runs, about, skipped


def timed(run: Run) -> Figures:
    """Return the milliseconds that calls take on the GPU."""
    marks = [torch.cuda.Event(enable_timing=True) for _ in range(CALLS)]
    for mark in marks:
        run()  # the GPU computes while the CPU launches the next call
        mark.record()
    torch.cuda.synchronize()
    return {"ms": [start.elapsed_time(stop) for start, stop in pairwise(marks)]}


def measured(
    chunk: Chunk, fraction: float, kernels: list[str], rounds: int, seconds: float
) -> Iterator[dict[str, Any]]:
    """Measure kernels in turns, and yield the results so far after each round."""
    chosen, causal = chunk.choose(fraction), chunk.choose(1.0)
    choices = {name: causal if name == "full" else chosen for name in kernels}
    runs, about, skipped = prepared(chunk, choices)
    read = int(chosen.sum()) / int(causal.sum())
    result = {"fraction": fraction, "read": read, "rounds": 0, "skipped": skipped, "kernels": about}
    yield result
    if not runs:
        return
    # operations for a block of queries and a block of keys, the masked half of own blocks included
    pair = 4 * BLOCK**2 * chunk.queries.shape[3]
    turns = {name: partial(timed, run) for name, run in runs.items()}
    over = "full" if "full" in turns else next(iter(turns))
    for found in in_turns(turns, rounds, time.monotonic() + seconds, over=over):
        for name in runs if found["rounds"] else ():
            teraflop = 1e-12 * pair * float(choices[name].sum())
            about[name] |= found[name] | {"tflops": 1e3 * teraflop / found[name]["ms"]}
        yield result | {"rounds": found["rounds"]}


def arguments(given: list[str] | None = None) -> argparse.Namespace:
    """Parse the command line. Exit with an error message if an option is invalid."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--tokens", type=int, default=2**17, help="Number of keys")
    parser.add_argument("--queries", type=int, default=4096, help="Number of queries")
    parser.add_argument(
        "--fraction",
        nargs="+",
        type=float,
        default=[0.25, 0.1],
        help="Fractions of the blocks before a block of queries that it reads",
    )
    parser.add_argument(
        "--kernel", nargs="+", choices=KERNELS, default=[*KERNELS], help="Kernels to measure"
    )
    parser.add_argument("--rounds", type=int, default=15, help="Number of rounds of all kernels")
    parser.add_argument(
        "--seconds", type=float, default=10, help="Start no round after this time, per fraction"
    )
    parser.add_argument("--json", type=output(), help="JSON file to which the results are written")
    found = parser.parse_args(given)
    for name in ("tokens", "queries"):
        if (count := getattr(found, name)) < 1 or count % BLOCK:
            parser.error(f"{name}: got {count}, allowed is a positive multiple of {BLOCK}")
    if found.queries > found.tokens:
        parser.error(f"queries: got {found.queries}, allowed is at most {found.tokens}")
    for fraction in found.fraction:
        if not 0 <= fraction <= 1:
            parser.error(f"fraction: got {fraction}, allowed is 0 to 1")
    if found.rounds < 1:
        parser.error(f"rounds: got {found.rounds}, allowed is at least 1")
    return found


def versions() -> dict[str, str]:
    """Return the versions of the packages that contain the kernels."""
    found = {}
    for name in ("triton", "flashinfer-python"):
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            found[name] = "not installed"
    return found


def main(given_arguments: list[str] | None = None, device: str = "cuda") -> None:
    """Run the command line: compare the outputs, then time the kernels in turns."""
    given, g = arguments(given_arguments), workload.geometry(device)
    result: dict[str, Any] = {
        "machine": describe(device),
        "versions": versions(),
        "heads": g.q_heads,
        "kv_heads": g.kv_heads,
        "head_dim": g.head_dim,
        "dtype": str(g.dtype).removeprefix("torch."),
        "tokens": given.tokens,
        "queries": given.queries,
        "cells": [],
    }
    with torch.no_grad():
        chunk = Chunk(g, given.queries, given.tokens)
        for fraction in given.fraction:
            cell: dict[str, Any] = {}
            for cell in measured(chunk, fraction, given.kernel, given.rounds, given.seconds):
                if given.json:
                    write_json(given.json, {**result, "cells": [*result["cells"], cell]})
            result["cells"].append(cell)
            show(cell)


def show(cell: dict[str, Any]) -> None:
    """Print the results for one fraction of the blocks."""
    print(f"{cell['read']:.1%} of the blocks, {cell['rounds']} rounds")
    for name, found in cell["kernels"].items():
        times = " to ".join(f"{found.get(f'ms_{end}', 0):.3f}" for end in ("low", "high"))
        print(
            f"  {name:24} {found.get('ms', 0):7.3f} ms ({times}), {found.get('tflops', 0):4.0f} "
            f"TFLOP/s, prepared in {found['prepare_ms']:.2f} ms, error {found['error']:.4f}, "
            f"first call {found['first_s']:.1f} s"
        )
    for name, reason in cell["skipped"].items():
        print(f"  {name:24} skipped: {reason}", flush=True)


if __name__ == "__main__":
    main()
