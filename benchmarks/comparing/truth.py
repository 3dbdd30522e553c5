"""Ground truth: regions of tokens, full attention at evaluated queries, quality of hits."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from benchmarks.comparing.layers import Layer
from kvindex import Hits, KVIndex, Rows
from kvindex.core.protocol import UNUSED
from kvindex.ops.attention import attend, cap

NEVER = float("-inf")
MEASURES = ("recall", "coverage", "error", "used", "error_exact")


@dataclass(frozen=True)
class Setting:
    """Of a text of `tokens`, and some that were written after it, whose queries ask.

    sink: first ones, always attended to; local_window: the newest ones before a query that asks,
    which with all after them are attended to as well. All others are the index's. generated: how
    many of the text's last tokens come after the prompt has ended, where the text comes in pieces;
    every: in pieces of how many (`update_every` of `kvindex.AttentionLayer`).
    """

    tokens: int
    sink: int = 64
    local_window: int = 256
    generated: int = 2048
    every: int = 256

    def __post_init__(self) -> None:
        least = self.sink + self.local_window + self.generated
        if self.tokens <= least:
            raise ValueError(
                f"tokens: got {self.tokens}, allowed is more than sink + local + generated, {least}"
            )

    @property
    def points(self) -> list[int]:
        """Tokens of the text that have come where is asked: the prompt's, then by quarters."""
        prompt = self.tokens - self.generated
        return [prompt, *(prompt + self.generated * share // 4 for share in (1, 2)), self.tokens]

    def valid(self, start: int, stop: int, device: Any) -> Tensor:
        """Which of these the index may find, bool `[1, stop - start]`."""
        return torch.arange(start, stop, device=device)[None] >= self.sink


@dataclass(frozen=True)
class Truth:
    """Of each of the T queries after `point` tokens of the text.

    output `[T, H, Dv]` of full attention; share `[T, H, n]` of the attention among the index's
    tokens; ids int64 `[T, G, k]` that `exact` returns, and the error of these, by k.
    """

    point: int
    output: Tensor
    share: Tensor
    ids: dict[int, Tensor]
    error: dict[int, float] = field(default_factory=dict)


def asking(layer: Layer, setting: Setting, point: int) -> range:
    """Positions of the queries that ask after `point` tokens: as many as were written."""
    return range(point, point + layer.keys.shape[1] - setting.tokens)


def truth(layer: Layer, setting: Setting, exact: KVIndex, point: int, rows: list[int]) -> Truth:
    """By full attention, and by `exact`, which holds what an index is to be asked about."""
    outputs, shares = [], []
    found: dict[int, list[tuple[Hits, Rows]]] = {k: [] for k in rows}
    for at in asking(layer, setting, point):
        query = layer.queries[None, :, at]
        keys, values = layer.keys[None, :, : at + 1], layer.values[None, :, : at + 1]
        outputs.append(attend(query, keys, values, scale=layer.scale, softcap=layer.softcap)[0])
        shares.append(_share(layer, setting, query, point - setting.local_window))
        for k in rows:
            hits = exact.search(query, k=k)
            found[k].append((hits, exact.fetch(hits)))
    ids = {k: torch.cat([hits.ids for hits, _ in each]) for k, each in found.items()}
    known = Truth(point, torch.stack(outputs), torch.stack(shares), ids)
    for k, each in found.items():
        known.error[k] = worth(layer, setting, each, known, k)["error"]
    return known


def worth(
    layer: Layer, setting: Setting, found: list[tuple[Hits, Rows]], known: Truth, k: int
) -> dict[str, float]:
    """What the hits of the queries that ask are worth, means over queries and heads.

    recall: share of the rows of `exact`; coverage: share of the index's attention that the tokens
    found hold (rows that stand for several tokens hold none); error: of the output over sink,
    rows and window, with log-weights, relative to full attention's; used: slots that hold a row;
    error_exact: that of `exact` with as many rows.
    """
    heads = len(layer.queries) // len(layer.keys)
    slots = torch.cat([hits.ids for hits, _ in found])  # [T, G, K]
    ids = slots.repeat_interleave(heads, dim=1)  # [T, H, K]
    seen = ids != UNUSED
    weight = torch.zeros_like(ids, dtype=torch.float32)
    for row, (hits, _) in zip(weight, found, strict=True):
        if hits.log_weight is not None:
            row.copy_(hits.log_weight[0])
    seen = seen & (weight != NEVER)
    held = known.share.gather(-1, ids.clamp_min(0)).masked_fill(~seen | (ids < 0), 0)
    wanted = known.ids[k]
    same = (wanted[..., None] == slots[..., None, :]).any(-1) & (wanted >= 0)

    asked, device = asking(layer, setting, known.point), ids.device
    indexed = known.point - setting.local_window
    near = torch.tensor([*range(setting.sink), *range(indexed, asked.stop)], device=device)
    places = torch.tensor([*asked], device=device)
    after = torch.where(near > places[:, None], NEVER, 0.0)[:, None]  # [T, 1, window]
    bias = torch.cat([weight.masked_fill(~seen, NEVER), after.expand(-1, ids.shape[1], -1)], -1)
    parts = [(rows.keys, rows.values) for _, rows in found]
    keys, values = (
        torch.cat([torch.cat(own), tokens[None, :, near].expand(len(asked), -1, -1, -1)], dim=2)
        for own, tokens in zip(zip(*parts, strict=True), (layer.keys, layer.values), strict=True)
    )
    queries = layer.queries[:, asked.start : asked.stop].transpose(0, 1)
    scale = dict(scale=layer.scale, softcap=layer.softcap)
    output = attend(queries, keys, values, **scale, bias=bias)
    wrong = (output - known.output).float().norm(dim=-1) / known.output.float().norm(dim=-1)
    recall, used = same.sum() / (wanted >= 0).sum(), (slots != UNUSED).sum(-1).float()
    means = torch.stack([recall, held.sum(-1).mean(), wrong.mean(), used.mean()])
    exact = known.error.get(k, float("nan"))  # not known while it is being found out
    return dict(zip(MEASURES, [*means.tolist(), exact], strict=True))


def _share(layer: Layer, setting: Setting, query: Tensor, indexed: int) -> Tensor:
    """Of a query `[1, H, D]`, float32 `[H, n]`: softmax among the index's tokens, 0 in the sink."""
    keys = layer.keys[:, :indexed].float()
    folded = query[0].float().reshape(len(keys), -1, keys.shape[-1])
    logits = cap(folded @ keys.mT, layer.scale, layer.softcap).flatten(0, 1)
    logits[:, : setting.sink] = NEVER
    return logits.softmax(-1)
