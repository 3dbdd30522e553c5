"""The forward pass of one decode step with Triton kernels: four launches per layer plus attention.

The result equals that of `decoder.layers.forward` up to rounding: the kernels accumulate in float32
and round once. The following operations are fused:

- Kernel 1: the norm, the query, key and value projections, and the rotation of queries and keys.
- Kernel 2: the output projection and the residual addition.
- Kernel 3: the norm, and the gate and up projections as one product.
- Kernel 4: the down projection and the residual addition.

Kernel 4 also computes `silu(gate) · up` if there is one sequence. For several sequences kernel 3
does, because every Triton program of kernel 4 would repeat this for all sequences.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from importlib.util import find_spec
from typing import TYPE_CHECKING, NamedTuple, Protocol

import torch
from torch import Tensor

from kvindex_adapters.llama.weights import Body, Linear, Norm, Weights, adjacent, whole

if TYPE_CHECKING:
    from kvindex_cuda.triton import Matrix
    from kvindex_cuda.triton import Norm as FusedNorm

BATCH = 16
"""Maximum number of sequences that the kernels support."""

READS_FP8, OVERLAPS = (8, 9), (9, 0)
"""Lowest compute capabilities on which the kernels can convert FP8 (`READS_FP8`), and on which a
launch may overlap the previous one (`OVERLAPS`)."""


class Attention(Protocol):
    """Protocol for the attention of one layer."""

    def step(self, queries: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        """Append one token to each sequence, and return its attention output, `[B, H, 1, D]`."""
        ...


def refusal(weights: Weights, batch: int) -> str | None:
    """Return the reason why the kernels cannot decode `batch` sequences, or None if they can."""
    device = weights.embedding.device
    if why := device_refusal(device):
        return why
    has = torch.cuda.get_device_capability(device)
    if weights.fp8 and has < READS_FP8:
        return f"weights: got FP8 on compute capability {has}, allowed is from {READS_FP8} on"
    return None if batch <= BATCH else f"batch: got {batch} sequences, allowed is up to {BATCH}"


def device_refusal(device: torch.device) -> str | None:
    """Return the reason why the kernels cannot run on a device, or None if they can."""
    if device.type != "cuda":
        return f"device: got {device}, allowed is a GPU"
    return "triton: it is not installed" if find_spec("triton") is None else None


class FusedLayer(NamedTuple):
    """The norms and matrices `[out, in]` of one layer. Matrices with the same input are joined."""

    attention_norm: FusedNorm
    query_key_value: Matrix
    query_norm: FusedNorm | None
    key_norm: FusedNorm | None
    output: Matrix
    mlp_norm: FusedNorm
    gate_up: Matrix
    down: Matrix


class FusedBody:
    """Runs one decode step through all layers of a model on a GPU.

    Matrices with the same input (query, key and value; gate and up) are used in place if they are
    adjacent in memory (`weights.join_in_memory`). Otherwise they are copied.

    Args:
        weights: The model's weights.
        overlap: Whether a kernel may be launched before the previous one has ended. None means yes
            if the device supports it.
    """

    def __init__(self, weights: Body, *, overlap: bool | None = None) -> None:
        from kvindex_cuda import triton  # imported here, because it is optional

        def normed(norm: Norm) -> FusedNorm:
            return triton.Norm(*norm)

        self._run, self._weights = triton, weights
        device = weights.embedding.device
        if overlap is None:
            overlap = device.type == "cuda" and torch.cuda.get_device_capability(device) >= OVERLAPS
        self._overlap = overlap
        # a captured CUDA graph reads these tensors, so this object keeps them allocated
        self._slots = torch.zeros(BATCH, dtype=torch.int64, device=device)
        self._no_residual: Tensor | None = None
        if weights.ranks is not None and weights.ranks.rank:
            self._no_residual = weights.embedding.new_zeros(BATCH, weights.embedding.shape[1])
        self._layers = [
            FusedLayer(
                normed(layer.attention_norm),
                self._together(layer.query, layer.key, layer.value),
                None if layer.query_norm is None else normed(layer.query_norm),
                None if layer.key_norm is None else normed(layer.key_norm),
                self._together(layer.output),
                normed(layer.mlp_norm),
                self._together(layer.gate, layer.up),
                self._together(layer.down),
            )
            for layer in weights.layers
        ]

    def read(
        self, ids: Tensor, positions: Tensor, attentions: Sequence[Attention], head_dim: int
    ) -> Tensor:
        """Run all layers on one token per sequence. Return hidden states `[B, hidden]` before the
        final norm.

        Args:
            ids: Int64 `[B, 1]`.
            positions: Int64 `[B, 1]`.
            attentions: The attention object of each layer.
            head_dim: Dimension of a head, `D`.
        """
        run, batch, D = self._run, len(ids), head_dim
        tile = partial(run.tile_of, batch=batch, overlap=self._overlap)
        after = partial(run.tile_of, batch=batch, overlap=self._after_sum)
        # each call allocates its own `tickets` (counters), because several calls may run
        # concurrently
        most = max(len(layer.query_key_value.weight) for layer in self._layers) // D
        tickets = torch.zeros(most, dtype=torch.int32, device=ids.device)
        embedding, rotary = self._weights.embedding, self._weights.rotary
        hidden, cos, sin = run.begin_token(
            ids[:, 0], positions[:, 0], embedding, *rotary, overlap=self._overlap
        )
        for layer, attention in zip(self._layers, attentions, strict=True):
            matrix = layer.query_key_value
            H = layer.output.weight.shape[1] // D
            G = (len(matrix.weight) // D - H) // 2
            queries = hidden.new_empty((batch, H, D))
            keys, values = hidden.new_empty((2, batch, G, 1, D))
            run.project_heads(
                hidden,
                layer.attention_norm,
                matrix,
                cos,
                sin,
                self._slots[:batch],
                queries,
                keys,
                values,
                tickets,
                query_norm=layer.query_norm,
                key_norm=layer.key_norm,
                tile=after("norm_linear", matrix),
            )
            output = attention.step(queries[:, :, None], keys, values).reshape(batch, H * D)
            hidden = self._summed(
                run.linear_residual(
                    output,
                    layer.output,
                    self._residual(hidden),
                    tile=tile("linear_residual", layer.output),
                    early=True,  # the attention kernel leaves memory bandwidth unused
                )
            )
            given, residual = (hidden, layer.mlp_norm, layer.gate_up), self._residual(hidden)
            if batch == 1:
                gate_up = run.norm_linear(*given, tile=after("norm_linear", layer.gate_up))
                hidden = run.swiglu_linear(
                    gate_up, layer.down, residual, tile=tile("swiglu_linear", layer.down)
                )
            else:
                activated = run.norm_swiglu(*given, tile=after("norm_swiglu", layer.gate_up))
                hidden = run.linear_residual(
                    activated, layer.down, residual, tile=tile("linear_residual", layer.down)
                )
            hidden = self._summed(hidden)
        return hidden

    @property
    def _after_sum(self) -> bool:
        """True if the next kernel may begin while the kernel of a residual addition still runs.

        With several ranks, the next kernel must wait for an all-reduce.
        """
        return self._overlap and self._weights.ranks is None

    def _residual(self, hidden: Tensor) -> Tensor:
        """Return the tensor to which this rank's product is added: the residual on rank 0, zeros on
        other ranks."""
        return hidden if self._no_residual is None else self._no_residual[: len(hidden)]

    def _summed(self, hidden: Tensor) -> Tensor:
        """Sum the ranks' partial products with an all-reduce. Rank 0's product includes the
        residual."""
        ranks = self._weights.ranks
        return hidden if ranks is None else ranks.sum(hidden)

    def _together(self, *linears: Linear) -> Matrix:
        """Join matrices into one matrix: a view if they are adjacent in memory, otherwise a
        copy."""
        run = self._run
        parts = [run.Matrix(*linear) for linear in linears]
        whole = adjacent([part.weight for part in parts])
        if whole is None:
            return run.stack(*parts)
        rest = run.stack(*(part._replace(weight=part.weight[:, :0]) for part in parts))
        biases = [part.bias for part in parts if part.bias is not None]
        scales = [part.scale for part in parts if part.scale is not None]
        bias = adjacent(biases) if len(biases) == len(parts) else None
        scale = adjacent(scales) if scales else None
        return run.Matrix(whole, rest.bias if bias is None else bias, scale)


class Fused(FusedBody):
    """Runs one decode step of a whole model, from token ids to logits."""

    def __init__(self, weights: Weights, *, overlap: bool | None = None) -> None:
        super().__init__(weights, overlap=overlap)
        self._norm, self._head = self._run.Norm(*weights.norm), self._together(weights.head)
        self._whole = weights

    def forward(
        self, ids: Tensor, positions: Tensor, attentions: Sequence[Attention], head_dim: int
    ) -> Tensor:
        """Run one decode step on ids int64 `[B, 1]` at positions int64 `[B, 1]`. Return logits `[B,
        V]`."""
        hidden = self.read(ids, positions, attentions, head_dim)
        how = dict(batch=len(ids), overlap=self._after_sum)
        tile = self._run.tile_of("norm_linear", self._head, **how)
        logits = self._run.norm_linear(hidden, self._norm, self._head, tile=tile)
        return whole(logits, self._whole)

    def chooser(self) -> Callable[[Tensor], Tensor]:
        """Return a function that maps logits `[B, V]` to the most likely tokens, int64 `[B]`.

        The function writes to a scratch buffer of its own. So do not call it on two streams at the
        same time. If a CUDA graph has captured a call, keep the function as long as the graph.
        """
        scratch = self._slots.new_zeros(BATCH, 2)
        return partial(self._run.most_likely, scratch=scratch, overlap=self._after_sum)
