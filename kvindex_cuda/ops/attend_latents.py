"""Attention over stored latents (multi-head latent attention). The stored row of a token is its
key; the first coordinates of the key are also its value."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from kvindex.core.geometry import Geometry
from kvindex.storage.codecs import CodecNumber
from kvindex_cuda.runtime.arguments import CODES
from kvindex_cuda.runtime.constants import LATENT_ROWS, LATENT_SPLITS
from kvindex_cuda.runtime.constants import TOKENS as BLOCK
from kvindex_cuda.runtime.launch import launch

MOST_HEADS = 128
"""Most query heads per KV head: 16 for each of eight warps."""

DEVICE_HEADS = 32
"""Query heads per thread block if rows are on the device. For 128 heads and 420 rows there are then
108 thread blocks."""

WIDEST = 1024
"""Largest head dimension for which float32 rows fit into shared memory."""


WAVES = 4
"""Most thread blocks per multiprocessor for rows in an engine's pages. A thread block takes rows in
turns, so with many sequences, fewer thread blocks per sequence still keep the device busy."""


class LatentAttention:
    """Runs the kernels `attend_latents` and `merge_latents`, with buffers for partial results."""

    def __init__(self, geometry: Geometry) -> None:
        self._geometry = geometry
        self._partial = self._sums = torch.zeros(0, device=geometry.device)
        self._splits: int | None = None
        self._outgrown: list[Tensor] = []  # captured graphs may still write to these

    def reserve(self, empty: Callable[..., Tensor], groups: int, multiprocessors: int) -> None:
        """Allocate the buffers for partial results with `empty`, for calls with rows in an engine's
        pages.

        The host does not know how many resident rows such calls have, so the number of thread
        blocks does not depend on it.

        Args:
            empty: Returns a float32 tensor of the shape that it gets.
            groups: Number of KV heads of all sequences, `B G`.
            multiprocessors: Number of multiprocessors of the device.
        """
        g = self._geometry
        parts = -(-g.group_size // min(_padded(g), DEVICE_HEADS))
        fewest = WAVES * multiprocessors // parts
        self._splits = max(1, min(LATENT_SPLITS, fewest // groups))
        # steps of fewer sequences have more splits, so the size does not shrink with the batch
        rows = max(groups, fewest) * g.group_size
        self._partial, self._sums = empty(rows, g.value_dim), empty(rows, 2)

    def __call__(
        self,
        queries: Tensor,
        ids: Tensor,
        *,
        found: Tensor | None,
        weights: Tensor | None,
        rows: Tensor,
        row_bytes: int,
        codec: str,
        resident: Tensor,
        resident_mask: Tensor,
        resident_count: Tensor,
        output: Tensor,
        lse: Tensor,
        length: Tensor | None = None,
        sink: int | None = None,
        head_bytes: int | None = None,
        on_host: bool = False,
        overlap: bool = False,
        ragged: bool = False,
    ) -> None:
        """Attend to the rows of `ids` and to the resident rows (those in the sink and the window).
        All tensors must be contiguous.

        Args:
            queries: `[B, H, D]`.
            ids: Token ids of rows to attend to, int64 `[B, G, k]` or `[B G, k]`; below 0 for an
                unused slot.
            found: Number of ids of each group, int32 `[B G]`, or None to use all.
            weights: Log weights of these rows, float32 `[B, H, k]`, `[B G, k]` for all heads of a
                group, or None.
            rows: See `device_state.State`, also for the next five arguments.
            row_bytes: See `device_state.State`.
            codec: See `device_state.State`.
            resident: See `device_state.State`.
            resident_mask: See `device_state.State`.
            resident_count: See `device_state.State`.
            output: Tensor for the result, `[B, H, Dv]`.
            lse: Tensor for the logarithms of sums of exponentials, float32 `[B, H]`.
            length: See `device_state.State`. Only if rows are in an engine's pages, as are the next
                two arguments. Call `reserve` before.
            sink: See `device_state.State`.
            head_bytes: See `device_state.State.rows_head_bytes`.
            on_host: True if rows are on the host. Then each row is read only once; otherwise, each
                part of the heads reads it.
            overlap: Allow the launch to begin before the previous one ends.
            ragged: See `BaseStep`.
        """
        g = self._geometry
        groups, k, room = len(queries) * g.kv_heads, ids.shape[-1], resident.shape[2]
        queries = queries if queries.data_ptr() % 16 == 0 else queries.clone()
        tiles = -(-k // LATENT_ROWS) + -(-room // LATENT_ROWS)
        splits = self._splits or max(1, min(tiles, LATENT_SPLITS))
        if self._sums.numel() < groups * splits * g.group_size * 2:
            self._outgrown += [self._partial, self._sums]
            self._partial, self._sums = (
                torch.empty((groups, splits, g.group_size, n), dtype=torch.float32, device=g.device)
                for n in (g.value_dim, 2)
            )
        part = min(_padded(g), MOST_HEADS if on_host else DEVICE_HEADS)
        each = weights is not None and weights.ndim == 3  # each head has its own weights
        defines = dict(
            D=g.head_dim,
            DV=g.value_dim,
            GROUP=g.group_size,
            PART=part,
            DTYPE=CODES[g.dtype],
            SOFTCAP=int(g.softcap is not None),
            CODEC=int(CodecNumber[codec.upper()]),
            RAGGED=int(ragged),
            PAGED=int(sink is not None),
        )
        launch(
            "step/attend_latents.cu",
            "attend_latents",
            (splits, -(-g.group_size // part), groups),
            (256,),
            arguments=dict(
                queries=queries,
                ids=ids,
                found=found,
                rows=rows,
                resident=resident,
                resident_mask=resident_mask,
                resident_count=resident_count,
                length=length,
                weights=weights,
                partial=self._partial,
                sums=self._sums,
                row=rows.shape[1],
                head_bytes=head_bytes or BLOCK * row_bytes,
                row_bytes=row_bytes,
                room=room,
                sink=sink or 0,
                k=k,
                kv_heads=g.kv_heads,
                weights_group=g.group_size * k if each else k,
                weights_head=k if each else 0,
                scale=float(g.scale),
                softcap=float(g.softcap or 0),
            ),
            shared_bytes=_shared_bytes(g, part),
            overlap=overlap,
            **defines,
        )
        launch(
            "step/attend_latents.cu",
            "merge_latents",
            (g.group_size, -(-g.value_dim // 128), groups),
            (128,),
            arguments=dict(
                partial=self._partial, sums=self._sums, output=output, lse=lse, splits=splits
            ),
            overlap=True,
            **defines,
        )


def unserved(geometry: Geometry) -> str | None:
    """Return the reason why the kernels do not support latents of this geometry.

    Return None if the kernels support them.
    """
    g = geometry
    limits = [
        ("q_heads", g.group_size, g.group_size <= MOST_HEADS, f"up to {MOST_HEADS} a head"),
        ("head_dim", g.head_dim, g.head_dim <= WIDEST, f"up to {WIDEST} with value_in_key"),
        ("value_dim", g.value_dim, g.value_dim % 8 == 0, "a multiple of 8"),
    ]
    found = [(name, got, allowed) for name, got, fits, allowed in limits if not fits]
    return f"{found[0][0]}: got {found[0][1]}, allowed is {found[0][2]}" if found else None


def _padded(geometry: Geometry) -> int:
    """Return the number of query heads per KV head, rounded up to 16 times a power of two."""
    return 16 << (-(-geometry.group_size // 16) - 1).bit_length()


def _shared_bytes(geometry: Geometry, part: int) -> int:
    pitch = -(-geometry.head_dim * geometry.dtype.itemsize // 128) * 128 + 32
    logits = part if geometry.dtype == torch.float32 else MOST_HEADS
    return LATENT_ROWS * pitch + logits * 4 * (LATENT_ROWS + 4) + part * 2 * LATENT_ROWS
