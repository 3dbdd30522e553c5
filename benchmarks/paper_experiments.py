"""How do three experiments of the ParisKV paper turn out on another model?

    python -m benchmarks.paper_experiments along --text prose.txt --json along.json
    python -m benchmarks.paper_experiments length --text prose.txt --tokens 2000 7000 --json x.json

The command `along` measures recall while the model generates a text (Figure 1), and at its end the
recall of the coarse stage and after exact reranking, with centroids that are learned from the
prompt or given (Figure 10). The command `length` measures recall if a tenth of the keys are
candidates, for several numbers of keys (Figure 9). docs/results/paper-experiments.md has the
published figures.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from rich.progress import Progress
from torch import Tensor

from benchmarks.common.reading import (
    SEED,
    add_model,
    continued,
    described,
    ids_of,
    loaded,
    read_and_write,
    reported,
    write,
)
from kvindex.ops import coarse, transform
from kvindex.ops.codes import SUBSPACE, centroids
from kvindex.ops.kmeans import assign, kmeans
from kvindex.ops.select import top_k
from kvindex.pariskv.config import LONGEST, SCHEDULE
from kvindex_adapters.evaluate.capture import Captured, capture
from kvindex_adapters.evaluate.recall import SINK, measure

ALONG = ("pariskv:preset=paper", "pqcache", "pqcache:preset=infinitebench")
"""Indexes whose recall is measured along a text; codebooks are learned from the prompt."""

QUERIES = 16
"""Number of queries at each position of a text."""


def schedule(tokens: int) -> tuple[float, float]:
    """Return β and ρ of the published schedule for a number of keys."""
    found = (entry[1:] for entry in SCHEDULE if tokens < entry[0])
    return next(found, LONGEST)


def votes(table: Tensor, labels: Tensor, rho: float) -> Tensor:
    """Compute the coarse score of every key with tiers, as the preset `paper` does.

    Args:
        table: Inner products of queries and centroids, `[T, H, M, C]`.
        labels: The centroid of each key in each subspace, int64 `[H, N, M]`.
        rho: Fraction of the keys that get points in a subspace.

    Returns:
        Scores, int64 `[T, H, N]`.
    """
    T, H, M, C = table.shape
    N = labels.shape[1]
    limits = torch.tensor([coarse.ceil_fraction(N, rho, tier) for tier in coarse.TIERS])
    total = torch.zeros((T, H, N), dtype=torch.int64)
    for m in range(M):
        counts = torch.zeros((H, C), dtype=torch.int64)
        counts.scatter_add_(1, labels[..., m], torch.ones_like(labels[..., m]))
        order = table[:, :, m].sort(dim=-1, descending=True, stable=True).indices
        ranked = counts.expand(T, H, C).gather(-1, order)
        better = ranked.cumsum(-1) - ranked
        points = (better[..., None] < limits).sum(-1)
        by_centroid = torch.empty_like(points).scatter_(-1, order, points)
        total += by_centroid.gather(-1, labels[..., m].expand(T, H, N))
    return total


def learned(keys: Tensor, queries: Tensor, prompt: int) -> tuple[Tensor, Tensor]:
    """Return table and labels with centroids that k-means finds in the first `prompt` keys.

    Keys and queries are neither normalized nor rotated. They are `[H, N, D]` and `[T, H, D]`.
    """
    parts = keys.unflatten(-1, (-1, SUBSPACE)).transpose(1, 2)  # [H, M, N, m]
    flat = parts.flatten(0, 1)
    books = kmeans(flat[:, :prompt].contiguous(), min(256, prompt), seed=SEED)
    labels = assign(flat.contiguous(), books)[0].view(parts.shape[:3]).transpose(1, 2)
    wanted = queries.unflatten(-1, (-1, SUBSPACE))  # [T, H, M, m]
    books = books.view(*parts.shape[:2], *books.shape[1:])
    return torch.einsum("thmi,hmci->thmc", wanted, books), labels


def analytic(keys: Tensor, queries: Tensor) -> tuple[Tensor, Tensor]:
    """Return table and labels with the centroids of the paper: the signs of rotated directions."""
    rotation = transform.rotation(keys.shape[-1], SEED, keys.device)
    turned = transform.rotate(transform.normalize(keys)[0], rotation)
    wanted = transform.rotate(queries, rotation).unflatten(-1, (-1, SUBSPACE))
    powers = 2 ** torch.arange(SUBSPACE)
    labels = ((turned.unflatten(-1, (-1, SUBSPACE)) >= 0) * powers).sum(-1)
    signs = centroids(keys.device).sign()
    return torch.einsum("thmi,ci->thmc", wanted, signs), labels


def found(scores: Tensor, true: Tensor, count: int) -> float:
    """Return the fraction of the true ids `[T, H, k]` among the `count` largest scores."""
    best = top_k(scores.float(), count)[1]
    hit = torch.zeros(scores.shape, dtype=torch.bool).scatter_(-1, best, True)
    return float(hit.gather(-1, true).double().mean())


def stages(
    layers: Sequence[Captured], tokens: int, prompt: int, k: int, betas: Sequence[float]
) -> list[dict[str, Any]]:
    """Measure the recall of coarse scores, and after exact reranking of the best keys.

    Each query head searches alone, and the first `SINK` tokens are left out.

    Args:
        layers: Recorded tensors. Their queries are those of the tokens from `tokens` on.
        tokens: Number of tokens whose keys are searched.
        prompt: Number of tokens from which centroids are learned.
        k: Number of true rows to find.
        betas: Fractions of the keys that are reranked.
    """
    rho = schedule(tokens)[1]
    sums: dict[tuple[str, float | None], list[float]] = {}
    for layer in layers:
        heads = len(layer.queries) // len(layer.keys)
        keys = layer.keys[:, SINK:tokens].float().repeat_interleave(heads, dim=0)
        queries = layer.queries.float().transpose(0, 1)
        true = top_k((layer.queries.float() @ keys.mT).transpose(0, 1).contiguous(), k)[1]
        made = {
            "learned from the prompt": learned(keys, queries, prompt - SINK),
            "analytic": analytic(keys, queries),
        }
        for name, (table, labels) in made.items():
            scores = votes(table, labels, rho)
            sums.setdefault((name, None), []).append(found(scores, true, k))
            for beta in betas:
                count = max(coarse.ceil_fraction(keys.shape[1], beta), k)
                sums.setdefault((name, beta), []).append(found(scores, true, count))
    return [
        {"centroids": name, "beta": beta, "tokens": tokens, "recall": sum(v) / len(v)}
        for (name, beta), v in sums.items()
    ]


def cut(layers: Sequence[Captured], start: int, first: int) -> list[Captured]:
    """Return the layers with only `QUERIES` queries, from that of token `start` on.

    `first` is the token of the first recorded query.
    """
    here = slice(start - first, start - first + QUERIES)
    return [
        Captured(la.keys, la.queries[:, here], la.scale, la.softcap, la.values) for la in layers
    ]


def every(layers: Sequence[Captured], step: int) -> list[Captured]:
    """Return every `step`-th layer, beginning with the second."""
    return list(layers[1::step])


def along(model: Any, ids: Tensor, given: argparse.Namespace, progress: Progress) -> list[Any]:
    """Measure recall at several positions of a text that the model continues."""
    prompt, written = len(ids), given.written
    everything = continued(model, ids, written).cpu()
    shown = reported(progress, "reading")
    layers = every(capture(model, everything, queries=written, on_progress=shown), given.step)
    cells: list[Any] = []
    ends = [prompt + i * (written - QUERIES) // given.parts for i in range(given.parts + 1)]
    for tokens in progress.track(ends, description="positions"):
        here = cut(layers, tokens, prompt)
        for index in ALONG:
            recall = measure(here, index, k=given.k, prompt=tokens, first=prompt - SINK).recall
            cells.append({"index": index, "tokens": tokens, "recall": float(recall.mean())})
        if tokens in (ends[0], ends[-1]):
            betas = sorted({0.05, 0.1, schedule(tokens)[0]})
            cells += stages(here, tokens, prompt, given.k, betas)
    return cells


def length(model: Any, ids: Tensor, given: argparse.Namespace, progress: Progress) -> list[Any]:
    """Measure recall if a fraction `given.beta` of the keys are candidates."""
    layers = every(read_and_write(model, ids, QUERIES, progress, f"{len(ids)}"), given.step)
    rho = schedule(len(ids))[1]
    index = f"pariskv:preset=paper:beta={given.beta}:rho={rho}"
    recall = measure(layers, index, k=given.k, prompt=len(ids)).recall
    cells = stages(layers, len(ids), len(ids), given.k, [given.beta])
    return [
        {"index": index, "tokens": len(ids), "recall": float(recall.mean())},
        *(cell for cell in cells if cell["centroids"] == "analytic"),
    ]


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("command", choices=("along", "length"), help="What to measure")
    parser.add_argument("--text", type=Path, required=True, help="Text file to read")
    parser.add_argument("--tokens", nargs="+", type=int, default=[2000], help="Tokens to read")
    parser.add_argument("--written", type=int, default=4096, help="Tokens to generate (along)")
    parser.add_argument("--parts", type=int, default=4, help="Positions after the prompt (along)")
    parser.add_argument("--beta", type=float, default=0.1, help="Fraction of candidates (length)")
    parser.add_argument("--step", type=int, default=7, help="Measure every STEP-th layer")
    parser.add_argument("-k", type=int, default=100, help="Rows that each query head retrieves")
    add_model(parser)
    given = parser.parse_args()
    model, tokenizer = loaded(given)
    settings = {name: getattr(given, name) for name in ("command", "written", "beta", "step", "k")}
    text = {"text": given.text.name, "queries": QUERIES, "seed": SEED}
    result: dict[str, Any] = {**described(given), **settings, **text, "cells": []}
    with Progress() as progress:
        for tokens in given.tokens:
            ids = ids_of(tokenizer, given.text.read_text(encoding="utf-8"), tokens)
            measured = {"along": along, "length": length}[given.command]
            result["cells"] += measured(model, ids, given, progress)
            write(result, given.json)
    for cell in result["cells"]:
        print(cell)


if __name__ == "__main__":
    main()
