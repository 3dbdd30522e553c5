"""One index on one layer, at several numbers of rows, beside full attention and `exact`."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from statistics import median
from typing import Any, TypeVar

import torch
from torch import Tensor

import kvindex
from benchmarks.comparing.layers import Layer
from kvindex import BaseIndex, Hits
from kvindex.ops.attention import attend, cap
from kvindex.protocol import UNUSED

Made = TypeVar("Made")
NEVER = float("-inf")


@dataclass(frozen=True)
class Setting:
    """Which tokens are where; the layers' own tokens past `tokens` are those that ask.

    tokens: of the text. sink: first ones, always attended to; local: the newest of the text, which
    with all written ones are always attended to as well. All others are the index's. generated: how
    many of the text's tokens come one by one where it arrives in pieces; every: in pieces of how
    many (`kvindex.layer`).
    """

    tokens: int
    sink: int = 64
    local: int = 256
    generated: int = 512
    every: int = 256

    def __post_init__(self) -> None:
        least = self.sink + self.local + self.generated
        if self.tokens <= least:
            raise ValueError(
                f"tokens: got {self.tokens}, allowed is more than sink + local + generated, {least}"
            )

    @property
    def indexed(self) -> int:
        """Tokens that the index holds, those of the sink among them."""
        return self.tokens - self.local

    def valid(self, start: int, stop: int, device: Any) -> Tensor:
        """Which of these the index may find, bool `[1, stop - start]`."""
        return torch.arange(start, stop, device=device)[None] >= self.sink


@dataclass(frozen=True)
class Truth:
    """Of each query that asks: output `[T, H, Dv]` of full attention; share `[T, H, n]` of the
    attention among the index's tokens; ids `[T, G, k]` that `exact` returns, by k.
    """

    output: Tensor
    share: Tensor
    ids: dict[int, Tensor]


def truth(layer: Layer, setting: Setting, rows: list[int]) -> Truth:
    """By full attention, and by `exact` with its own policy of the group."""
    exact = build(layer, "exact", setting)[0]
    outputs, shares = [], []
    found: dict[int, list[Tensor]] = {k: [] for k in rows}
    for at in range(setting.tokens, layer.keys.shape[1]):
        query = layer.queries[None, :, at]
        keys, values = layer.keys[None, :, : at + 1], layer.values[None, :, : at + 1]
        outputs.append(attend(query, keys, values, scale=layer.scale, softcap=layer.softcap)[0])
        shares.append(_share(layer, setting, query))
        for k in rows:
            found[k].append(exact.search(query, k=k).ids[0])
    return Truth(
        torch.stack(outputs), torch.stack(shares), {k: torch.stack(v) for k, v in found.items()}
    )


def build(
    layer: Layer, spec: str, setting: Setting, *, pieces: bool = False, k: int = 100
) -> tuple[Any, float]:
    """An index that holds its part of the text, and seconds from its first query to `seal`.

    In the spec, {k} stands for k. As a layer tells it: the prompt's queries, its tokens in one
    append, the seal. pieces: the last `generated` tokens come later, their queries one by one; an
    index that listens to queries (`observe`) is searched at each, for what it does may depend on
    what it found.
    """
    dtype, device = layer.keys.dtype, layer.keys.device
    keys, values, queries = layer.keys[None], layer.values[None], layer.queries[None]
    prompt = setting.tokens - (setting.generated if pieces else 0)
    index: Any = kvindex.create(spec.replace("{k}", str(k)), **layer.options(dtype))

    def append(start: int, stop: int) -> None:
        part, valid = slice(start, stop), setting.valid(start, stop, device)
        index.append(keys[:, :, part], values[:, :, part], valid=valid)

    def first() -> None:
        index.observe(queries[:, :, :prompt], torch.arange(prompt, device=device))
        append(0, prompt - setting.local)
        index.seal()

    _, seconds = timed(first, device)
    listens = inmost(index) is not index or type(index).observe is not BaseIndex.observe
    held = prompt - setting.local
    for at in range(prompt, setting.tokens):
        index.observe(queries[:, :, at : at + 1], torch.tensor([at], device=device))
        if listens:
            index.search(queries[:, :, at], k=k)
        if at + 1 - held >= setting.local + setting.every:
            append(held, at + 1 - setting.local)
            held = at + 1 - setting.local
    if held < setting.indexed:
        append(held, setting.indexed)
    return index, seconds


def measure(
    layer: Layer,
    spec: str,
    setting: Setting,
    rows: list[int],
    known: Truth,
    *,
    pieces: bool = False,
) -> dict[str, Any]:
    """Build time and, by k: recall, mass, error (means over heads and queries), rows, search time.

    recall: of the rows of `exact`; mass: share of the index's attention that the tokens found
    hold (rows that stand for several tokens hold none); error: of the output over sink, rows and
    window, with log-weights, relative to full attention's.
    """
    searched, seconds = _asked(layer, spec, setting, rows, known, pieces)
    return {
        "build_s": seconds,
        "rows": {
            k: {
                name: (median if name == "search_s" else _mean)([one[name] for one in found])
                for name in found[0]
            }
            for k, found in searched.items()
        },
    }


def sizes(layer: Layer, spec: str, setting: Setting) -> dict[str, float]:
    """`BaseIndex.bytes_per_key` on these keys in bfloat16."""
    half = torch.bfloat16
    rounded = Layer(
        layer.keys.to(half),
        layer.queries.to(half),
        layer.scale,
        layer.softcap,
        layer.values.to(half),
        layer.rope,
    )
    found: dict[str, float] = inmost(build(rounded, spec, setting)[0]).bytes_per_key()
    return found


def timed(call: Callable[[], Made], device: torch.device) -> tuple[Made, float]:
    """What it returns, and the seconds that it takes."""
    wait = torch.cuda.synchronize if device.type == "cuda" else lambda: None
    wait()
    start = time.perf_counter()
    made = call()
    wait()
    return made, time.perf_counter() - start


def inmost(index: Any) -> Any:
    """The index inside all wrappers."""
    while hasattr(index, "inner"):
        index = index.inner
    return index


def _asked(
    layer: Layer, spec: str, setting: Setting, rows: list[int], known: Truth, pieces: bool
) -> tuple[dict[int, list[dict[str, float]]], float]:
    """By k, what each query found; seconds of building. A wrapper, or a budget, has one k only."""
    found: dict[int, list[dict[str, float]]] = {}
    for some in [[k] for k in rows] if "+" in spec or "{k}" in spec else [rows]:
        index, seconds = build(layer, spec, setting, pieces=pieces, k=some[0])
        index.search(layer.queries[None, :, setting.tokens - 1], k=some[0])  # what is made once
        for at in range(setting.tokens, layer.keys.shape[1]):
            query = layer.queries[None, :, at]
            index.observe(query[:, :, None], torch.tensor([at], device=query.device))
            for k in some:
                hits, took = timed(partial(index.search, query, k=k), query.device)
                one = _one(layer, setting, index, hits, known, at, k)
                found.setdefault(k, []).append({**one, "search_s": took})
    return found, seconds


def _one(
    layer: Layer, setting: Setting, index: Any, hits: Hits, known: Truth, at: int, k: int
) -> dict[str, float]:
    """What the hits of the query at position `at` are worth."""
    step, heads = at - setting.tokens, len(layer.queries) // len(layer.keys)
    seen = (hits.ids != UNUSED)[0].repeat_interleave(heads, dim=0)  # [H, K]
    if hits.log_weight is not None:
        seen = seen & (hits.log_weight[0] != NEVER)
    ids = hits.ids[0].repeat_interleave(heads, dim=0)
    held = known.share[step].gather(-1, ids.clamp_min(0)).masked_fill(~seen | (ids < 0), 0)
    wanted = known.ids[k][step]  # [G, k]
    same = (wanted[:, :, None] == hits.ids[0][:, None]).any(-1) & (wanted >= 0)

    near = [*range(setting.sink), *range(setting.indexed, at + 1)]
    rows, full = index.fetch(hits), known.output[step]
    keys = torch.cat([rows.keys, layer.keys[None, :, near]], dim=2)
    values = torch.cat([rows.values, layer.values[None, :, near]], dim=2)
    bias = torch.zeros((1, len(ids), keys.shape[2]), device=ids.device)
    bias[0, :, : ids.shape[1]].masked_fill_(~seen, NEVER)
    if hits.log_weight is not None:
        bias[..., : ids.shape[1]] += hits.log_weight
    query = layer.queries[None, :, at]
    output = attend(query, keys, values, scale=layer.scale, softcap=layer.softcap, bias=bias)[0]
    error = (output - full).float().norm(dim=-1) / full.float().norm(dim=-1)
    return {
        "recall": float(same.sum() / (wanted >= 0).sum()),
        "mass": float(held.sum(-1).mean()),
        "error": float(error.mean()),
        "used": float((hits.ids != UNUSED).sum(-1).float().mean()),
    }


def _share(layer: Layer, setting: Setting, query: Tensor) -> Tensor:
    """Of a query `[1, H, D]`, float32 `[H, n]`: softmax among the index's tokens, 0 in the sink."""
    keys = layer.keys[:, : setting.indexed].float()
    folded = query[0].float().reshape(len(keys), -1, keys.shape[-1])
    logits = cap(folded @ keys.mT, layer.scale, layer.softcap).flatten(0, 1)
    logits[:, : setting.sink] = NEVER
    return logits.softmax(-1)


def _mean(values: list[float]) -> float:
    return sum(values) / len(values)
