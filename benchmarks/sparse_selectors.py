"""Measure how sparse attention in a prompt changes a model's output, for each block selector.

    python -m benchmarks.sparse_selectors --text FILE… [--tokens N …] [--selector SPEC …]
        [--last T] [--dense-last T] [--dtype D] [--seconds S] [--model …] [--device …] [--json OUT]

The model reads a text in one forward pass, first with full attention. Then it reads the same text
once for each selector: in all layers, each block of 128 queries attends only to the blocks of 128
keys that the selector chooses. The queries of the last tokens (`--dense-last`) always use full
attention. For each selector, the script reports:

- `kept`: fraction of the causal blocks that the selector chose, as a mean over layers and heads.
- `kl_mean`: KL divergence of the next-token distributions from those of full attention, in nats, as
  a mean over the last tokens (`--last`). `kl_sparse` is the mean over those of them whose own
  queries use sparse attention, and `kl_dense` over those with full attention.
- `agreement`: fraction of the last tokens for which the most likely next token is the same.
- `seconds`: time of the forward pass. It is no measure of a selector's speed, because the selectors
  are reference implementations, and because attention on a GPU uses an explicit mask.

The results are written after each selector. No selector is started after `--seconds` seconds.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from benchmarks.common.reading import add_model, described, ids_of, loaded, write
from kvindex.ops.attention import attend_causal
from kvindex.ops.block_sparse import attend_chosen_fast
from kvindex.selectors import BLOCK, BlockSelector, named
from kvindex_adapters.hf.model.load_model import DTYPES
from kvindex_adapters.hf.model.patch import IMPLEMENTATION

NAME = "kvindex_sparse_selectors"
"""Name under which the attention function is registered in transformers."""

CHUNK = 1024
"""Number of queries whose mask is in memory at a time."""

SELECTORS = (
    *("oracle:mass=0.8", "oracle:mass=0.9", "oracle:mass=0.95"),
    *("pooled:mass=0.8", "pooled:mass=0.9", "pooled:mass=0.95"),
    *("max-threshold:threshold=0.3", "max-threshold:threshold=0.1", "max-threshold:threshold=0.03"),
    *("antidiagonal:mass=0.8", "antidiagonal:mass=0.9", "antidiagonal:mass=0.95"),
    *("index:mass=0.8", "index:mass=0.9", "index:mass=0.95"),
    *("vertical-slash:vertical=0.5:slash=0.1", "vertical-slash:vertical=0.7:slash=0.3"),
    *("skip:threshold=0.1", "skip:threshold=0.01", "skip:threshold=0.001"),
)
"""Selectors that are measured by default."""


class SparseAttention:
    """An attention function of transformers that attends to the blocks that a selector chooses.

    Args:
        selector: The selector, or None for full attention.
        dense_last: Number of tokens at the end of the prompt whose queries use full attention. All
            other queries of their blocks do so, too.
    """

    def __init__(self, selector: BlockSelector | None, dense_last: int) -> None:
        self.selector, self.dense_last = selector, dense_last
        self.kept: list[Tensor] = []  # number of chosen blocks, one entry for each chunk
        self.causal = 0  # number of causal blocks, chosen or not

    @property
    def fraction(self) -> float:
        """Return the fraction of the causal blocks that the selector chose."""
        return float(torch.stack(self.kept).sum()) / self.causal if self.causal else 1.0

    def __call__(
        self,
        module: Any,
        queries: Tensor,
        keys: Tensor,
        values: Tensor,
        attention_mask: Tensor | None,
        *,
        scaling: float,
        sliding_window: int | None = None,
        softcap: float | None = None,
        s_aux: Tensor | None = None,
        **_: Any,
    ) -> tuple[Tensor, None]:
        """Compute the attention of one layer to a whole prompt.

        Args:
            module: The attention module.
            queries: `[B, H, N, D]`.
            keys: `[B, G, N, D]`.
            values: `[B, G, N, Dv]`.
            attention_mask: Must be None.
            scaling: Factor of the logits.
            sliding_window: Must be None, or not smaller than the prompt.
            softcap: Must be None.
            s_aux: Logits of learned sinks. Must be None.

        Returns:
            The output `[B, N, H, Dv]`, and None in place of the attention weights.
        """
        N = queries.shape[2]
        given = attention_mask, softcap, s_aux
        if any(part is not None for part in given) or (sliding_window or N) < N:
            raise ValueError(
                "model: got layers with a mask, a softcap, a sliding window or learned sinks, "
                "allowed are models with full causal attention"
            )
        whole = keys[:, :, : N // BLOCK * BLOCK]
        summaries = None if self.selector is None else self.selector.summarize(whole)
        outputs = []
        for first in range(0, N, CHUNK):
            some = queries[:, :, first : first + CHUNK]
            past = slice(0, first + some.shape[2])
            parts = some, keys[:, :, past], values[:, :, past]
            if self.selector is None or summaries is None:
                outputs.append(attend_causal(*parts, scale=scaling))
                continue
            chosen = self.selector.choose(some, summaries, first, scale=scaling)
            self.count(chosen, first // BLOCK)
            dense = max(0, (N - self.dense_last) // BLOCK - first // BLOCK)
            if self.dense_last:
                chosen[:, :, dense:] = True
            attend = attend_masked if queries.is_cuda else attend_chosen_fast
            outputs.append(attend(*parts, chosen, scale=scaling))
        return torch.cat(outputs, 2).transpose(1, 2), None

    def count(self, chosen: Tensor, first_block: int) -> None:
        """Count the chosen blocks and the causal blocks of a chunk."""
        B, H, QB, _ = chosen.shape
        self.kept.append(chosen.sum())
        self.causal += B * H * (QB * first_block + QB * (QB + 1) // 2)


def attend_masked(
    queries: Tensor, keys: Tensor, values: Tensor, chosen: Tensor, *, scale: float
) -> Tensor:
    """Compute what `kvindex.ops.block_sparse.attend_chosen` computes, with torch's attention.

    This is faster on a GPU. The mask of all queries is in memory.
    """
    (H, T), (G, N) = queries.shape[1:3], keys.shape[1:3]
    mask = chosen.repeat_interleave(BLOCK, -1)[..., :N].repeat_interleave(BLOCK, -2)[:, :, :T]
    rows = torch.arange(N, device=queries.device)
    mask = mask & (rows <= rows[N - T :, None])
    # torch has fast kernels for a mask only if each query head has its own KV head
    keys, values = (part.repeat_interleave(H // G, 1) for part in (keys, values))
    return scaled_dot_product_attention(queries, keys, values, attn_mask=mask, scale=scale)


@contextmanager
def attending(model: Any, function: SparseAttention) -> Iterator[None]:
    """Let all layers of a model use an attention function, within a `with` statement."""
    before = vars(model.config)[IMPLEMENTATION]
    ALL_ATTENTION_FUNCTIONS[NAME] = function
    try:
        model.set_attn_implementation(NAME)
        yield
    finally:
        model.set_attn_implementation(before)
        del ALL_ATTENTION_FUNCTIONS[NAME]


def read(model: Any, ids: Tensor, function: SparseAttention, last: int) -> tuple[Tensor, float]:
    """Let a model read a text.

    Return the log probabilities of its predictions for the last `last` tokens, float32 `[last, V]`,
    and the seconds that it took.
    """
    start = time.perf_counter()
    with attending(model, function):
        logits = model(input_ids=ids[None], use_cache=False, logits_to_keep=last).logits[0]
        found = logits.float().log_softmax(-1)
    if found.is_cuda:
        torch.cuda.synchronize()
    return found, time.perf_counter() - start


def compared(full: Tensor, other: Tensor, dense: int) -> dict[str, float]:
    """Compare log probabilities with those of full attention, both float32 `[T, V]`.

    `dense` is the number of tokens at the end whose own queries use full attention.
    """
    kl = (full.exp() * (full - other)).sum(-1).double().clamp(min=0)
    split = max(0, len(kl) - dense)
    parts = {"kl_mean": kl, "kl_sparse": kl[:split], "kl_dense": kl[split:]}
    agreement = (full.argmax(-1) == other.argmax(-1)).double().mean()
    means = {name: float(part.mean()) for name, part in parts.items() if len(part)}
    return {**means, "agreement": float(agreement)}


def arguments(given: list[str] | None = None) -> argparse.Namespace:
    """Parse the command line. Exit with an error message if an option is invalid."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    add_model(parser)
    parser.add_argument("--text", nargs="+", type=Path, required=True, help="Text files to read")
    parser.add_argument(
        "--tokens", nargs="+", type=int, default=[4096], help="Lengths of the prompts in tokens"
    )
    parser.add_argument(
        "--selector",
        nargs="+",
        default=SELECTORS,
        help=f"Selectors with their options, such as {SELECTORS[0]}; the names are "
        f"{', '.join(named.SELECTORS)}",
    )
    parser.add_argument(
        "--last", type=int, default=512, help="Compare the predictions for this number of tokens"
    )
    parser.add_argument(
        "--dense-last",
        type=int,
        default=128,
        help="Number of tokens at the end of the prompt whose queries use full attention",
    )
    parser.add_argument(
        "--dtype",
        choices=sorted(set(DTYPES) - {"int8"}),
        help="Dtype of the model (default: bfloat16 on a GPU, float32 on a CPU)",
    )
    parser.add_argument(
        "--seconds", type=float, help="Start no further selector after this number of seconds"
    )
    found = parser.parse_args(given)
    for spec in found.selector:
        try:
            named.create(spec)
        except ValueError as error:
            parser.error(str(error))
    if not 1 <= found.last <= min(found.tokens):
        parser.error(f"last: got {found.last}, allowed is 1 to {min(found.tokens)}")
    if found.dense_last < 0:
        parser.error(f"dense-last: got {found.dense_last}, allowed is at least 0")
    found.dtype = found.dtype or ("float32" if found.device == "cpu" else "bfloat16")
    return found


def measured(given: argparse.Namespace, model: Any, tokenizer: Any) -> Iterator[dict[str, Any]]:
    """Measure each selector with each text and length, and yield the results one by one."""
    start = time.perf_counter()
    for tokens in given.tokens:
        for text in given.text:
            ids = ids_of(tokenizer, text.read_text(encoding="utf-8"), tokens).to(given.device)
            full, seconds = read(model, ids, SparseAttention(None, 0), given.last)
            about = {"text": text.stem, "tokens": tokens}
            yield {**about, "selector": "dense", "kept": 1.0, "seconds": seconds}
            for spec in given.selector:
                if given.seconds is not None and time.perf_counter() - start > given.seconds:
                    return
                function = SparseAttention(named.create(spec), given.dense_last)
                other, seconds = read(model, ids, function, given.last)
                result = compared(full, other, given.dense_last)
                about = {"text": text.stem, "tokens": tokens, "selector": spec}
                yield {**about, "kept": function.fraction, **result, "seconds": seconds}


def main(arguments_given: list[str] | None = None) -> None:
    """Run the script: measure the selectors, then print and write the results."""
    given = arguments(arguments_given)
    model, tokenizer = loaded(given, dtype=given.dtype)
    settings = {"last": given.last, "dense_last": given.dense_last, "dtype": given.dtype}
    cells: list[dict[str, Any]] = []
    print(f"{'text':12} {'tokens':>7} {'selector':38} {'kept':>6} {'KL':>9} {'agree':>6} {'s':>7}")
    with torch.no_grad():
        for cell in measured(given, model, tokenizer):
            cells.append(cell)
            write({**described(given), **settings, "cells": cells}, given.json)
            print(
                f"{cell['text']:12} {cell['tokens']:7} {cell['selector']:38} {cell['kept']:6.3f} "
                f"{cell.get('kl_mean', 0.0):9.5f} {cell.get('agreement', 1.0):6.3f} "
                f"{cell['seconds']:7.1f}",
                flush=True,
            )


if __name__ == "__main__":
    main()
