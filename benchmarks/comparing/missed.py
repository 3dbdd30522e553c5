"""Compare rules that predict the error of sampled tokens, also of keys that are no candidates.

A search reads the codes of all keys, and samples candidates by their coarse scores (votes). With
`k="auto"`, it predicts the error of attention for several numbers of tokens. Each candidate then
represents the keys that are no candidates (`kvindex.pariskv.row_budget`). If the votes of a key
are far too low, and the key is no candidate, the prediction does not contain the key. The scan
also yields an estimate for the keys that are no candidates: their weights according to the votes,
inflated by the error of the votes. This script measures whether that estimate helps.

The prediction is for weights without a bias, but by default, sampled tokens get tempered weights,
which have a bias and a smaller variance. The rule `tempered` predicts their expected error.

The model reads a text with full attention. For the last tokens, and for several seeds of the random
numbers, the script samples each number of tokens that a search chooses from. It compares the
predictions of each rule with the true error of attention, for each KV head.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from rich.progress import Progress
from torch import Tensor

import kvindex
from benchmarks import report
from benchmarks.common.reading import described, ids_of, loaded, reported, write
from benchmarks.comparing.budget import MEASURED
from kvindex.layer.arguments import AUTO_ROWS
from kvindex.ops import attention, priority
from kvindex.ops.select import top_k
from kvindex.pariskv import candidates, row_budget, sampling
from kvindex.pariskv.index import ParisKV
from kvindex.pariskv.inputs import Queries, Tokens
from kvindex_adapters.evaluate.capture import Captured, capture

SINK, WINDOW = 64, 256
"""Number of first and of last tokens that each query attends to."""

RESIDUAL = 1.35
"""Standard deviation of a vote's error in nats, between the two values of decision 0026."""

RULES = {
    "candidates": 'each candidate represents keys that are none (`k="auto"`)',
    "votes": "keys that are no candidates count with the squared weights of their votes",
    "inflated": "the same, inflated by the error of the votes",
    "larger": "the larger of the first and the third",
    "mass": "the first one, plus the squared sum of the weights of their votes",
    "tempered": "as the first one, but for tempered weights, with their bias",
}
"""Name of a rule -> what it adds up."""

FACTORS = [1.2, 1.15, 1.1, 1.05, 0.95, 0.9, 0.85, 0.8, 0.75, 0.7, 0.65, 0.6, 0.55, 0.5, 0.45, 0.4]
"""Factors of the allowed error with which the first rule is measured again. So it can be compared
with the other rules at as many tokens."""


def add(parser: argparse.ArgumentParser) -> None:
    """Add the options of the command `missed` to its parser."""
    parser.add_argument("--text", nargs="+", type=Path, required=True, help="Text files to read")
    parser.add_argument(
        "--tokens", nargs="+", type=int, default=[8192], help="Lengths of the prompts in tokens"
    )
    parser.add_argument("--steps", type=int, default=48, help="Number of tokens to decode")
    parser.add_argument(
        "--layers", type=int, default=5, metavar="L", help="Measure only every L-th layer"
    )
    parser.add_argument("--seeds", type=int, default=4, help="Number of seeds of random numbers")
    parser.add_argument(
        "--error", nargs="+", type=float, default=(0.2, 0.1, 0.05), help="Allowed errors"
    )


def missed(
    squares: Tensor, sizes: Tensor, chances: Tensor, thresholds: Tensor, residual: float
) -> Tensor:
    """Predict the variance of the attention weights of keys that are no candidates, from votes.

    The error of a vote is assumed to be normal with the standard deviation `residual`, so the
    expected squared weight of a key is `exp(2 residual²)` times that of its vote.

    Args:
        squares: Logarithms of the squared attention weights by votes, added up over query heads,
            float32 `[G, N]`; `-inf` for candidates.
        sizes: Logarithms of sampling weights by votes, float32 `[G, N]`.
        chances: Logarithms of the probabilities to become a candidate, float32 `[G, N]`.
        thresholds: As in `row_budget.variances`, `[G, n]`.
        residual: Standard deviation of the error of votes, in nats.

    Returns:
        Float32 `[G, n]`.
    """
    inflated = squares + 2 * residual**2
    found = []
    for threshold in thresholds.unbind(-1):
        total = torch.minimum(sizes - threshold[..., None], chances).clamp(row_budget.FAINT, 0)
        found.append(((inflated - total).exp() * -torch.expm1(total)).sum(-1))
    return torch.stack(found, dim=-1)


def tempered(
    weights: Tensor, chances: Tensor, totals: Tensor, counts: list[int], resident: Tensor
) -> Tensor:
    """Predict the expected squared error of tempered weights: their variance and squared bias.

    A token that was sampled with probability `π` gets the weight `p w / Z`, with `w = π^-t` for the
    power `t` of `priority.temper`, and `Z` the expected sum of all weights. Its squared error is
    `p² (π w² / Z² - 2 π w / Z + 1)` on average. Tokens of sink and window get the weight `p / Z`.
    The variation of the sum is left out, as in `row_budget.variances`. The values' differences from
    the output are taken as independent, so errors of different tokens do not cancel or add up.

    Args:
        weights: Logarithms of the candidates' estimated attention weights, `[G, g, C]`.
        chances: Logarithms of the probabilities with which they were sampled from all keys,
            `[G, C]`. A candidate represents `1 / c` keys like it.
        totals: Logarithms of the probabilities to be sampled, `[G, n, C]`.
        counts: The `n` numbers of tokens to choose from.
        resident: Logarithms of the attention weights of sink and window, `[G, g, R]`.

    Returns:
        Float32 `[G, n]`, added up over query heads.
    """
    power = torch.tensor([priority.temper(count) for count in counts])[:, None]
    every = weights - chances[:, None]
    once, twice = ((1 - part * power) * totals for part in (1, 2))  # log π w, log π w²
    seen = torch.einsum("gqc,gnc->gqn", every.exp(), once.exp())
    scale = 1 / (seen + resident.exp().sum(-1, keepdim=True))  # 1 / Z
    squares = (weights + every).exp()
    grown = torch.einsum("gqc,gnc->gqn", squares, twice.exp()) * scale**2
    mixed = torch.einsum("gqc,gnc->gqn", squares, once.exp()) * scale
    beside = (2 * resident).exp().sum(-1, keepdim=True) * (scale - 1) ** 2
    return (grown - 2 * mixed + squares.sum(-1, keepdim=True) + beside).sum(1).clamp_min(0)


@dataclass(frozen=True)
class Step:
    """One decode step with one seed, for each number of tokens `n` to choose from.

    Attributes:
        predicted: Name of a rule -> predicted variance of attention weights, `[G, n]`.
        squared: True squared error of the output, added up over the query heads, `[G, n]`.
    """

    predicted: dict[str, Tensor]
    squared: Tensor


def sampled(tokens: Tokens, queries: Queries, layer: Captured, query: Tensor) -> Step:
    """Sample each number of tokens for one query, and return predictions and true errors.

    Args:
        tokens: Tokens in the index, the first ones of the layer.
        queries: The rotated query.
        layer: Keys and values up to the token of the query.
        query: `[H, D]`.
    """
    G, N = len(layer.keys), tokens.length
    folded = query.float().view(G, -1, query.shape[-1])
    exact = folded @ layer.keys.float().mT * layer.scale  # [G, g, N + window]
    weights, values = exact.softmax(-1), layer.values.float()
    full = weights @ values
    resident = torch.ones(exact.shape[-1], dtype=torch.bool)
    resident[SINK:N] = False
    # the search (`sampling.search_within`)
    noises = sampling.key_noises(tokens)
    most = row_budget.candidates(tokens.config, tokens.counts, AUTO_ROWS)
    votes = sampling.valid_votes(tokens, queries)
    gains, totals = sampling.vote_scales(tokens, queries)
    coarse = priority.sizes(votes, gains, totals)
    priorities = (coarse + noises).masked_fill(votes[:, :, 0] == priority.LEAST, priority.LEAST)
    bounds = priority.thresholds(priorities, most)
    is_candidate = (priorities >= bounds[..., 1:])[0]
    every = priority.log_chances(coarse, bounds[..., :1])[0]
    ids = tokens.ops.select.compact(is_candidate[None])
    chances = every[None].gather(-1, ids.clamp_min(0))
    logits, weighted = sampling.candidate_logits(tokens, queries, ids, chances)
    lse = exact[..., resident].logsumexp(-1)
    total = torch.logaddexp(weighted.logsumexp(-1)[0], lse)  # [G, g]
    sizes = sampling.sampling_weights(logits, total[None, ..., None], ids)
    counts = row_budget.counts_of(AUTO_ROWS)
    scores, at = top_k(sizes + sampling.candidate_noises(noises, ids), AUTO_ROWS + 1)
    thresholds = scores[..., counts]
    first = row_budget.variances(logits - total[None, ..., None], sizes, chances, thresholds)[0]
    # the same with votes for keys that are no candidates
    own = sizes[..., None, :] - thresholds[..., None]
    own = torch.minimum(own, chances[..., None, :]).clamp(row_budget.FAINT, 0)
    squares = (2 * (logits - total[None, ..., None])).logsumexp(2)[..., None, :]
    alone = ((squares - own).exp() * -torch.expm1(own)).sum(-1)[0]
    logs = votes[0].float() * gains[0, ..., None] * priority.NATS - total[..., None]
    logs = logs.masked_fill(is_candidate[:, None], -math.inf)
    logs[..., :SINK] = -math.inf
    by_votes = (2 * logs).logsumexp(1), priority.root_mean_square(logs[None])[0]
    others, inflated = (missed(*by_votes, every, thresholds[0], r) for r in (0.0, RESIDUAL))
    mass = (logs.logsumexp(-1) + RESIDUAL**2 / 2).exp().clamp_max(1).square().sum(-1)
    predicted = {
        "candidates": first,
        "votes": alone + others,
        "inflated": alone + inflated,
        "larger": torch.maximum(first, alone + inflated),
        "mass": first + mass[:, None],
        "tempered": tempered(
            (logits - total[None, ..., None])[0],
            chances[0].clamp(row_budget.FAINT, 0),
            own[0],
            counts,
            exact[..., resident] - total[..., None],
        ),
    }
    # the true errors
    places = ids[0].gather(-1, at[0].clamp_min(0))  # [G, 1025], best first
    seen = exact.gather(-1, places[:, None].expand(-1, exact.shape[1], -1))
    found = values.gather(1, places[..., None].expand(-1, -1, values.shape[-1]))
    beside, kept = exact[..., resident], values[:, resident]
    squared = []
    for number, count in enumerate(counts):
        row = at[..., :count].clamp_min(0)
        chance = torch.minimum(
            (sizes.gather(-1, row) - thresholds[..., number, None]).clamp_max(0),
            chances.gather(-1, row),
        )
        bias = -chance[0] * priority.temper(count)
        bias = bias.masked_fill(at[0, :, :count] < 0, -math.inf)
        parts = torch.cat([seen[..., :count] + bias[:, None], beside], -1).softmax(-1)
        output = parts[..., :count] @ found[:, :count] + parts[..., count:] @ kept
        squared.append((output - full).square().sum((1, 2)))
    return Step(predicted, torch.stack(squared, -1))


def steps_of(layer: Captured, steps: int, seeds: int) -> Iterator[tuple[Tensor, list[Step]]]:
    """Yield, for each decode step, the limit for an allowed error of 1, `[G]`, and the results of
    all seeds. True errors and predictions are divided by the limit's factors, see `OutputScale`.
    """
    keys, values, queries = layer.keys[None], layer.values[None], layer.queries[None]
    sizes = dict(q_heads=queries.shape[1], kv_heads=keys.shape[1], head_dim=keys.shape[-1])
    own = dict(value_dim=values.shape[-1], scale=layer.scale, backend="torch")
    index = kvindex.create("pariskv", **sizes, **own)
    assert isinstance(index, ParisKV)
    start = keys.shape[2] - steps
    length = start - WINDOW
    valid = torch.arange(length)[None] >= SINK
    index.append(keys[:, :, :length], values[:, :, :length], valid=valid)
    outputs = [
        attention.attend(
            queries[:, :, i], keys[:, :, : at + 1], values[:, :, : at + 1], scale=layer.scale
        )
        for i, at in enumerate(range(start - MEASURED, start))
    ]
    # as in `OutputScale`
    size = values[0, :, start - MEASURED : start].square().sum(-1).mean(-1)
    limit = torch.stack(outputs, 2)[0].square().sum(-1).mean(-1).sum() / len(size) / size
    for step in range(steps):
        query, end = queries[:, :, MEASURED + step], start + step + 1
        known = replace(layer, keys=keys[0, :, :end], values=values[0, :, :end])
        tokens, rotated = index.inputs(query)
        found = []
        for seed in range(seeds):
            other = replace(tokens, config=replace(tokens.config, seed=seed))
            found.append(sampled(other, rotated, known, query[0]))
        for one in found:  # squared errors as variances of weights
            one.squared.div_(size[:, None])
        yield limit, found


def residuals(layer: Captured, steps: int) -> float:
    """Return the standard deviation of the error of votes, in nats, of a layer's last queries."""
    keys, values = layer.keys[None, :, :-steps], layer.values[None, :, :-steps]
    queries = layer.queries[None]
    sizes = dict(q_heads=queries.shape[1], kv_heads=keys.shape[1], head_dim=keys.shape[-1])
    own = dict(value_dim=values.shape[-1], scale=layer.scale, backend="torch")
    index = kvindex.create("pariskv", **sizes, **own)
    assert isinstance(index, ParisKV)
    index.append(keys, values)
    spreads = []
    for step in range(0, steps, 8):
        query = queries[:, :, MEASURED + step]
        tokens, rotated = index.inputs(query)
        gains, _ = sampling.vote_scales(tokens, rotated)
        logs = candidates.votes(tokens, rotated) * gains[..., None] * priority.NATS
        folded = query.view(1, keys.shape[1], -1, keys.shape[-1])
        exact = folded @ keys.mT * layer.scale
        spreads.append((exact - logs).std(-1).mean())
    return float(torch.stack(spreads).mean())


def summed(
    limits: Tensor, predicted: Tensor, squared: Tensor, error: float, factor: float = 1.0
) -> dict[str, Any]:
    """Choose numbers of tokens by predictions, and compare the predictions with the true errors.

    Args:
        limits: `[M]`, the limit of the variance for an allowed error of 1.
        predicted: `[M, n]`, for `M` steps, seeds and KV heads.
        squared: `[M, n]`, true squared errors, divided by the size of values.
        error: Allowed error.
        factor: Numbers are chosen for an error of `factor * error`.

    Returns:
        The mean number of tokens; the fraction of the choices at the ceiling; the fraction of the
        steps whose error is above the allowed one, and above twice the allowed one; and for each
        decile of the predictions, its mean, the fraction above the allowed error, and the root
        mean square of the true errors.
    """
    counts = torch.tensor(row_budget.counts_of(AUTO_ROWS))
    asked = (limits * (factor * error) ** 2)[None]
    chosen = row_budget.choose(predicted[None], asked)[0, :, None]
    estimate = (predicted.gather(-1, chosen)[:, 0] / limits).sqrt()
    true = (squared.gather(-1, chosen)[:, 0] / limits).sqrt()
    over = (true > error).double()
    deciles = [
        dict(
            estimate=float(estimate[part].mean()),
            over=float(over[part].mean()),
            true=float(true[part].square().mean().sqrt()),
        )
        for part in estimate.argsort().tensor_split(10)
    ]
    return dict(
        rows=float(counts[chosen[:, 0]].double().mean()),
        ceiling=float((chosen[:, 0] == len(counts) - 1).double().mean()),
        over=float(over.mean()),
        far=float((true > 2 * error).double().mean()),
        deciles=deciles,
    )


def run(given: argparse.Namespace) -> None:
    """Run the command `missed`: measure, then print and write the results."""
    model, tokenizer = loaded(given)
    about = dict(steps=given.steps, every=given.layers, seeds=given.seeds, residual=RESIDUAL)
    result: dict[str, Any] = {**described(given), **about, "cells": []}
    with Progress() as progress:
        for tokens in given.tokens:
            for text in given.text:
                words = text.read_text(encoding="utf-8")
                ids = ids_of(tokenizer, words, tokens + given.steps)
                reading = reported(progress, f"{text.stem}, {tokens}")
                queries = MEASURED + given.steps
                layers = capture(model, ids, queries=queries, on_progress=reading)[:: given.layers]
                cells = measured(layers, given, progress)
                spread = [residuals(layer, given.steps) for layer in layers]
                names = dict(text=text.stem, tokens=tokens)
                result["cells"] += [names | dict(residuals=spread) | cell for cell in cells]
                write(result, given.json)
    print(report.TABLES["missed"](result))


def measured(
    layers: list[Captured], given: argparse.Namespace, progress: Progress
) -> list[dict[str, Any]]:
    """Return the results of all rules and allowed errors for the layers of one text."""
    limits, squared = list[Tensor](), list[Tensor]()
    predicted: dict[str, list[Tensor]] = {rule: [] for rule in RULES}
    for layer in progress.track(layers, description="sampling"):
        for limit, found in steps_of(layer, given.steps, given.seeds):
            for one in found:
                limits.append(limit)
                squared.append(one.squared)
                for rule, parts in predicted.items():
                    parts.append(one.predicted[rule])
    every = {rule: torch.cat(parts) for rule, parts in predicted.items()}
    true = torch.cat(limits), torch.cat(squared)
    cells = []
    for error in given.error:
        for rule, some in every.items():
            cells.append(dict(error=error, rule=rule, **summed(true[0], some, true[1], error)))
        cells[-len(every)]["stricter"] = [
            dict(factor=factor, rows=one["rows"], over=one["over"], worst=worst(one))
            for factor in FACTORS
            for one in [summed(true[0], every["candidates"], true[1], error, factor)]
        ]
    return cells


def worst(cell: dict[str, Any]) -> float:
    """Return the largest fraction of steps above the allowed error in a decile."""
    return max(float(part["over"]) for part in cell["deciles"])
