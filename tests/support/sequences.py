"""A sequence to feed to an attention layer step by step, and its dense attention."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from kvindex.layer import AttentionLayer
from tests.support.helpers import Case, left_padding

SIZES = dict(sink=3, local_window=4, update_every=5, dense_below=0)


@dataclass
class Sequence:
    """Queries `[B, H, N, D]`, keys, values `[B, G, N, …]`, and padded tokens on the left.

    `holes`, bool `[B, N]` or None, is padding elsewhere.
    """

    case: Case
    queries: Tensor
    keys: Tensor
    values: Tensor
    pads: list[int]
    holes: Tensor | None = None

    @staticmethod
    def of(
        case: Case,
        count: int,
        pads: list[int] | None = None,
        seed: int = 0,
        holes: Tensor | None = None,
    ) -> Sequence:
        queries = case.tensor(77 + seed, case.batch, case.q_heads, count, case.head_dim)
        return Sequence(case, queries, *case.tokens(count, seed), pads or [0] * case.batch, holes)

    @property
    def valid(self) -> Tensor:
        real = left_padding(self.pads, self.keys.shape[2])
        return real if self.holes is None else real & ~self.holes

    def parts(self, start: int, stop: int | None) -> tuple[Tensor, Tensor, Tensor]:
        """Return queries, keys and values of the tokens from `start` to `stop`."""
        some = slice(start, stop)
        return self.queries[:, :, some], self.keys[:, :, some], self.values[:, :, some]

    def rows(self, rows: list[int]) -> Sequence:
        """Return these sequences of the batch."""
        parts = (part[rows] for part in (self.queries, self.keys, self.values))
        holes = None if self.holes is None else self.holes[rows]
        return Sequence(self.case, *parts, [self.pads[row] for row in rows], holes)

    def then(self, length: int, other: Sequence) -> Sequence:
        """Return the first `length` tokens, then the other sequence's tokens from that position
        on."""
        pairs = zip(self.parts(0, length), other.parts(length, None), strict=True)
        parts = (torch.cat(pair, dim=2) for pair in pairs)
        return Sequence(self.case, *parts, self.pads, self.holes)

    def feed(self, layer: AttentionLayer, start: int, stop: int) -> Tensor:
        """Run one step with the tokens from `start` to `stop`: `[B, H, T, Dv]`."""
        padded = any(self.pads) and start <= max(self.pads)
        padded = padded or (self.holes is not None and bool(self.holes[:, start:stop].any()))
        valid = self.valid[:, start:stop] if padded else None
        return layer.step(*self.parts(start, stop), valid=valid)

    def dense(self, shown: Tensor | None = None, sinks: Tensor | None = None) -> Tensor:
        """Compute causal attention in float64: `[B, H, N, Dv]`.

        Args:
            shown: Bool `[B, G, N, N]`, the rows that each token may see; all by default.
            sinks: Logits of learned sinks, which broadcast to `[B, H, N]`.
        """
        g, N = self.case.index("exact").geometry, self.keys.shape[2]
        rows = (self.keys, self.values)
        keys, values = (part.double().repeat_interleave(g.group_size, dim=1) for part in rows)
        logits = g.scale * (self.queries.double() @ keys.mT)
        if g.softcap is not None:
            logits = g.softcap * (logits / g.softcap).tanh()
        seen = torch.ones(N, N, dtype=torch.bool).tril() & self.valid[:, None, None]
        if shown is not None:
            seen = seen & shown.repeat_interleave(g.group_size, dim=1)
        logits = logits.masked_fill(~seen, float("-inf"))
        if sinks is not None:
            column = sinks.double().expand(logits.shape[:-1])[..., None]
            logits = torch.cat([logits, column], dim=-1)
        return logits.softmax(-1)[..., :N].nan_to_num(0) @ values

    def assert_equals(self, got: Tensor, want: Tensor, start: int) -> None:
        """Compare `got` with the output for the tokens from `start` on, without padded tokens."""
        stop = start + got.shape[2]
        real = self.valid[:, None, start:stop, None].expand_as(got)
        assert got.dtype == self.case.dtype
        slack = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 2e-2}[got.dtype]
        torch.testing.assert_close(
            got[real].double(), want[:, :, start:stop][real], rtol=slack, atol=slack
        )


def steps_of(*lengths: int) -> list[tuple[int, int]]:
    """Return (start, stop) of steps of these lengths."""
    stops = torch.tensor(lengths).cumsum(0).tolist()
    return list(zip([0, *stops[:-1]], stops, strict=True))


def layer_of(case: Case, name: str = "exact", k: int = 1000, **options: object) -> AttentionLayer:
    """Make a layer with small regions, and options for the index or other sizes."""
    sizes = {key: options.pop(key) for key in SIZES if key in options}
    return AttentionLayer(case.index(name, **options), k=k, **{**SIZES, **sizes})


def assert_dense_without_valid_rows(case: Case, name: str, **options: object) -> None:
    """Decode two sequences while the index contains sink tokens and padding: outputs are dense.

    In the last steps the first sequence has a valid row, and the second one still has none.
    `options` are those of the index.
    """
    pads, sink, stop = [4, 6], 3, 11
    sequence = Sequence.of(case, stop, pads)
    second, want = sequence.rows([1]), sequence.dense()
    for first in (1, 7):  # token by token, or after a prompt
        layer = layer_of(case, name, sink=sink, local_window=1, update_every=1, **options)
        for start, end in steps_of(first, *[1] * (stop - first)):
            valid = layer.index.counts.tolist() if len(layer.index) else [0, 0]
            got = sequence.feed(layer, start, end)
            if valid[0] == 0:
                sequence.assert_equals(got, want, start)
            assert valid[1] == 0
            second.assert_equals(got[1:], want[1:], start)
        assert valid[0] > 0
