"""A layer in the form that a fused step reads, made from an index whose operations run
separately."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from kvindex import Hits
from kvindex.ops import codes as encoding
from kvindex.ops.attention import NEVER, cap
from kvindex.pariskv.block_layout import BLOCK, Layout, SubspaceLayout, words_of
from kvindex.pariskv.step_state import State, StepConfig
from kvindex.storage.centers import center_of, is_centered, of_rows
from kvindex.storage.codecs import codec
from tests.support.helpers import Case


def codes_of(index: object) -> tuple[dict[str, Tensor], Tensor | None, Tensor]:
    """Return codes `[B, G, N, ...]` of an index without an executor, centers and log scale.

    Centers are `[B, G, S, D]` or None. The scale of log weights is `[B, G]`, and 0 for other
    weights.
    """
    parts = index._parts()
    codes = {name: torch.cat([part[name] for part in parts], dim=2) for name in parts[0]}
    centers, weights = codes.pop("centers", None), codes["weights"]
    if index.config.weights != "log":
        return codes, centers, torch.zeros(weights.shape[:2], device=weights.device)
    return codes, centers, encoding.weight_scale(weights.amax((2, 3)))


@dataclass(frozen=True)
class Layer:
    """A ParisKV index, the same tokens as the state of a step, and queries."""

    index: object
    state: State
    config: StepConfig
    queries: Tensor
    k: int

    @staticmethod
    def of(
        case: Case,
        count: int,
        *,
        k: int = 20,
        resident: int = 40,
        valid: Tensor | None = None,
        tokens: tuple[Tensor, Tensor] | None = None,
        queries: Tensor | None = None,
        row_codec: str = "plain",
        **options: object,
    ) -> Layer:
        """Make a layer of `count` tokens and a number of resident rows, every seventh of them
        masked."""
        keys, values = tokens or case.tokens(count + resident)
        index = case.index("pariskv", backend="torch", row_codec=row_codec, **options)
        index.append(keys[:, :, :count], values[:, :, :count], valid=valid)
        g, c = index.geometry, index.config
        layout = (SubspaceLayout if c.block == "subspace" else Layout)(g.head_dim, c.magnitude_bits)
        codes, centers, weight_scale = codes_of(index)
        blocks = layout.pack(codes, centers)
        S = blocks.shape[1]
        flags = torch.ones(case.batch, count, dtype=torch.bool) if valid is None else valid
        center = center_of(keys) if is_centered(row_codec, g) else None
        held = keys[:, :, :count], values[:, :, :count]
        encoded = codec(row_codec, g).encode(*held, of_rows(center))
        padded = encoded.new_zeros((*keys.shape[:2], S * BLOCK, encoded.shape[-1]))
        padded[:, :, :count] = encoded
        tiers, wanted = index.config.limits(index.counts, k)
        mask = torch.arange(resident).expand(case.batch, -1) % 7 != 3
        state = State(
            codes=blocks,
            rows=padded.unflatten(2, (S, BLOCK)).transpose(1, 2).contiguous(),
            valid=words_of(flags, S),
            length=torch.tensor([count]),
            wanted=wanted.int(),
            counted=flags.sum(1).int(),
            weight_scale=weight_scale,
            resident=torch.cat([keys, values], -1)[:, :, count:].contiguous(),
            resident_mask=mask.to(torch.uint8),
            resident_count=torch.tensor([resident - 1]),
            codec=row_codec,
            row_center=center,
            regression=index._regressed(),
            histogram=index._histogram if c.coarse == "tiered_votes" else None,
            tiers=tiers if c.coarse == "tiered_votes" else None,
        )
        config = StepConfig(
            geometry=g,
            layout=layout,
            seed=c.seed,
            query_max=c.query_max,
            centered=bool(c.center),
            policy=c.group,
            sampled=c.sampling != "none",
            tempered=c.sampling == "tempered",
        )
        queries = case.queries() if queries is None else queries
        return Layer(index, state, config, queries, k)

    def searched(self) -> tuple[Hits, Tensor, Tensor]:
        """Return the index's hits, and output and lse of attention over them and the resident
        rows."""
        g, s = self.index.geometry, self.state
        hits = self.index.search(self.queries, k=self.k)
        rows, count = self.index.fetch(hits), int(s.resident_count)
        beside = s.resident[:, :, :count].tensor_split([g.head_dim], dim=-1)
        keys, values = torch.cat([rows.keys, beside[0]], 2), torch.cat([rows.values, beside[1]], 2)
        visible = torch.cat(
            [hits.ids >= 0, s.resident_mask[:, None, :count].expand(-1, g.kv_heads, -1) > 0], -1
        )
        folded = self.queries.double().view(len(keys), g.kv_heads, g.group_size, -1)
        logits = cap(folded @ keys.double().mT, g.scale, g.softcap)
        if hits.log_weight is not None:
            logits[..., : hits.ids.shape[-1]] += hits.log_weight.view(*folded.shape[:3], -1)
        logits = logits.masked_fill(~visible[:, :, None], NEVER)
        output = logits.softmax(-1) @ values.double()
        return hits, output.flatten(1, 2), logits.logsumexp(-1).flatten(1)
