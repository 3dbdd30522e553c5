"""Ground truth: regions of tokens, full attention for evaluated queries, quality of hits."""

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
    """Regions of a text of `tokens` tokens. The evaluated queries are of tokens after the text.

    sink: Number of first tokens, which are always attended to.
    local_window: Number of newest tokens before an evaluated query. They and later tokens are
        always attended to. All other tokens are in the index.
    generated: Number of last tokens of the text, which are appended after the prompt has ended.
    every: Number of these tokens that are appended at a time (`update_every` of
        `kvindex.AttentionLayer`).
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
        """Return the lengths at which the index is evaluated, from the prompt to the whole text."""
        prompt = self.tokens - self.generated
        return [prompt, *(prompt + self.generated * share // 4 for share in (1, 2)), self.tokens]

    def valid(self, start: int, stop: int, device: Any) -> Tensor:
        """Return which of these tokens the index may return, bool `[1, stop - start]`."""
        return torch.arange(start, stop, device=device)[None] >= self.sink


@dataclass(frozen=True)
class Truth:
    """The ground truth for each of the T queries after `point` tokens of the text.

    output: Output of full attention, `[T, H, Dv]`.
    share: Attention weights among the index's tokens, `[T, H, n]`.
    ids: k -> the ids that `exact` returns, int64 `[T, G, k]`.
    error: k -> the error of the attention output with these rows.
    """

    point: int
    output: Tensor
    share: Tensor
    ids: dict[int, Tensor]
    error: dict[int, float] = field(default_factory=dict)


def asking(layer: Layer, setting: Setting, point: int) -> range:
    """Return the positions of the evaluated queries after `point` tokens."""
    return range(point, point + layer.keys.shape[1] - setting.tokens)


def truth(layer: Layer, setting: Setting, exact: KVIndex, point: int, rows: list[int]) -> Truth:
    """Compute the ground truth with full attention, and with `exact` over the index's tokens."""
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
    """Return the quality of hits, as means over queries and heads.

    The result has these entries:

    - recall: the fraction of the rows of `exact` that were found.
    - coverage: the attention weight of the found tokens among the index's tokens. (A row that
      stands for several tokens does not count.)
    - error: the error of the attention output over sink, found rows (with their log weights) and
      window, relative to the output of full attention.
    - used: the number of slots that contain a row.
    - error_exact: the error of `exact` with the same number of rows.
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
    exact = known.error.get(k, float("nan"))  # unknown while `exact` itself is evaluated
    return dict(zip(MEASURES, [*means.tolist(), exact], strict=True))


def _share(layer: Layer, setting: Setting, query: Tensor, indexed: int) -> Tensor:
    """Return attention weights of a query `[1, H, D]` among the index's tokens, float32 `[H, n]`.

    The weights of tokens in the sink are 0.
    """
    keys = layer.keys[:, :indexed].float()
    folded = query[0].float().reshape(len(keys), -1, keys.shape[-1])
    logits = cap(folded @ keys.mT, layer.scale, layer.softcap).flatten(0, 1)
    logits[:, : setting.sink] = NEVER
    return logits.softmax(-1)
