"""Ground truth for search results of indexes, and the quality of search results.

Keys, values and queries are those of layers of a real model, recorded while it read a text.
"""

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
    """Division of a text into sink, tokens in the index, and local window.

    The queries that are evaluated belong to tokens after the text.

    Args:
        tokens: Number of tokens of the text.
        sink: Number of tokens at the beginning of the text that attention always reads.
        local_window: Number of tokens at the end of the text that attention always reads, together
            with the tokens after the text.
        generated: Number of tokens at the end of the text that are appended in chunks after the
            prompt, as if the model generated them.
        every: Number of tokens in each of these chunks.
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
                f"tokens: got {self.tokens}, allowed is more than sink + local_window + "
                f"generated = {least}"
            )

    @property
    def points(self) -> list[int]:
        """Numbers of tokens after which an index is evaluated, in increasing order.

        The first is the length of the prompt, and the last that of the whole text.
        """
        prompt = self.tokens - self.generated
        return [
            prompt,
            *(prompt + self.generated * quarters // 4 for quarters in (1, 2)),
            self.tokens,
        ]

    def valid(self, start: int, stop: int, device: Any) -> Tensor:
        """Return which of the tokens `start` to `stop` are not in the sink, bool `[1, n]`."""
        return torch.arange(start, stop, device=device)[None] >= self.sink


@dataclass(frozen=True)
class Truth:
    """The ground truth for the `T` queries that follow the first `point` tokens of a text.

    Args:
        point: Number of tokens before the queries.
        output: Outputs of full attention, `[T, H, Dv]`.
        weights: Attention weights of the tokens in the index, `[T, H, n]`, which add up to 1.
        ids: Number of tokens to retrieve, `k` -> positions of the tokens that the index `exact`
            retrieves, int64 `[T, G, k]`.
        error: Number of tokens to retrieve, `k` -> relative error of the attention output with the
            tokens that `exact` retrieves.
    """

    point: int
    output: Tensor
    weights: Tensor
    ids: dict[int, Tensor]
    error: dict[int, float] = field(default_factory=dict)


def asking(layer: Layer, setting: Setting, point: int) -> range:
    """Return the positions of the queries with which an index is evaluated.

    They are the queries that follow the first `point` tokens of a text.
    """
    return range(point, point + layer.keys.shape[1] - setting.tokens)


def truth(layer: Layer, setting: Setting, exact: KVIndex, point: int, rows: list[int]) -> Truth:
    """Compute the ground truth with full attention and with the index `exact`."""
    outputs, weights = [], []
    found: dict[int, list[tuple[Hits, Rows]]] = {k: [] for k in rows}
    for at in asking(layer, setting, point):
        query = layer.queries[None, :, at]
        keys, values = layer.keys[None, :, : at + 1], layer.values[None, :, : at + 1]
        outputs.append(attend(query, keys, values, scale=layer.scale, softcap=layer.softcap)[0])
        weights.append(_weights(layer, setting, query, point - setting.local_window))
        for k in rows:
            hits = exact.search(query, k=k)
            found[k].append((hits, exact.fetch(hits)))
    ids = {k: torch.cat([hits.ids for hits, _ in each]) for k, each in found.items()}
    known = Truth(point, torch.stack(outputs), torch.stack(weights), ids)
    for k, each in found.items():
        known.error[k] = worth(layer, setting, each, known, k)["error"]
    return known


def worth(
    layer: Layer, setting: Setting, found: list[tuple[Hits, Rows]], known: Truth, k: int
) -> dict[str, float]:
    """Return the quality of search results, as means over queries and heads.

    The result is a dict with these values:

    - recall: The index `exact` retrieves the best `k` tokens. Recall is the fraction of them that
      this index has found.
    - coverage: attention weight of the found tokens, where the weights of all tokens in the index
      add up to 1. A search result that stands for several tokens, such as a cluster, does not
      count.
    - error: relative error of the attention output, compared with full attention. The output is
      computed over the sink, the found tokens (with their log weights) and the local window.
    - used: number of search results, at most `k`.
    - error_exact: `error` of the index `exact` with the same `k`.
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
    held = known.weights.gather(-1, ids.clamp_min(0)).masked_fill(~seen | (ids < 0), 0)
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


def _weights(layer: Layer, setting: Setting, query: Tensor, indexed: int) -> Tensor:
    """Return the attention weights of the tokens in the index, float32 `[H, indexed]`.

    `indexed` is the number of tokens before the local window. The weights of each head of the query
    `[1, H, D]` add up to 1. Tokens of the sink have weight 0, because they are not in the index.
    """
    keys = layer.keys[:, :indexed].float()
    folded = query[0].float().reshape(len(keys), -1, keys.shape[-1])
    logits = cap(folded @ keys.mT, layer.scale, layer.softcap).flatten(0, 1)
    logits[:, : setting.sink] = NEVER
    return logits.softmax(-1)
