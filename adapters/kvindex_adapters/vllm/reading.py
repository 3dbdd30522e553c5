"""How the tokens of a prompt attend: to all tokens before them, or to chosen blocks.

Sparse attention chooses blocks of keys for whole blocks of 128 queries (`kvindex.layer.sparse`).
This module has the settings of an engine and of a request, the salt that separates cached prefixes
that were read with different settings, and the rule by which a prompt is divided into chunks, so
that the size of the chunks does not change which blocks are chosen.

This module does not import vLLM.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

from torch import Tensor

from kvindex.core import check
from kvindex.core.config import unknown
from kvindex.core.geometry import Geometry
from kvindex.core.protocol import Rows
from kvindex.layer.sparse import SELECTORS, SparsePrompt, attend_to_blocks
from kvindex.ops.attention import attend_causal
from kvindex.ops.block_sparse import BLOCK

PREFIX = "kvindex_"
"""First letters of the keys of `SamplingParams.extra_args` that change a request's settings. Each
key is followed by the name of an option, such as `kvindex_prefill`."""

SALT = "kvindex:"
"""First letters of the salts of prompts that are read with sparse attention."""

ROOM = 2 * BLOCK
"""Smallest number of tokens of a prompt for which a step must have room. With fewer, a prompt could
wait forever for a step that has room for a whole block."""


@dataclass(frozen=True)
class Reading:
    """How the tokens of a prompt attend.

    The fields have the names, values and defaults of the options of
    `kvindex.layer.AttentionLayer`.

    Args:
        prefill: "dense" for full attention, or "sparse" for attention to chosen blocks.
        prefill_selector: Name of the rule that chooses blocks.
        prefill_mass: Fraction of the estimated attention weight that the chosen blocks have.
        prefill_last: Number of tokens at the end of a prompt that attend to all tokens.

    Raises:
        ValueError: A value is not supported.
    """

    prefill: str = "dense"
    prefill_selector: str = "sampled"
    prefill_mass: float = 0.95
    prefill_last: int = 128

    def __post_init__(self) -> None:
        check.one_of("prefill", self.prefill, ("dense", "sparse"))
        check.one_of("prefill_selector", self.prefill_selector, SELECTORS)
        check.within("prefill_mass", self.prefill_mass, 0, 1)
        check.at_least("prefill_last", self.prefill_last, 0)

    @property
    def sparse(self) -> bool:
        """True if tokens of a prompt attend to chosen blocks of keys instead of all keys."""
        return self.prefill == "sparse"

    def of_request(self, extra_args: Mapping[str, Any] | None) -> Reading:
        """Return the settings of a request to an engine with these settings.

        Args:
            extra_args: The field `extra_args` of the request's `SamplingParams`.

        Raises:
            ValueError: An option or a value is not supported. The message reports all of them.
        """
        if not extra_args:
            return self
        given = {name: value for name, value in extra_args.items() if name.startswith(PREFIX)}
        if not given:
            return self
        known = [PREFIX + field.name for field in fields(Reading)]
        reasons = [unknown("extra_args", name, known) for name in given if name not in known]
        found = self
        for name in known:
            if name in given:
                try:
                    found = replace(found, **{name.removeprefix(PREFIX): given[name]})
                except ValueError as error:
                    reasons.append(PREFIX + str(error))
        if found.sparse and not self.sparse:
            reasons.append(
                f"{PREFIX}prefill: got 'sparse' for an engine with prefill='dense', allowed is "
                "'dense'; start the engine with the option prefill='sparse'"
            )
        for name in known:
            if name in given and name != f"{PREFIX}prefill" and not found.sparse:
                reasons.append(
                    f"{name}: got {given[name]!r} for a prompt with prefill='dense', which does "
                    "not use it"
                )
        if reasons:
            raise ValueError("; ".join(reasons))
        return found

    def salted(self, salt: str | None) -> str | None:
        """Return the salt of the request's blocks in the prefix cache.

        Two requests have the same salt only if their own salts are equal, and their prompts are
        both read densely, or both sparsely with the same settings.

        Args:
            salt: The request's own `cache_salt`, or None.
        """
        if not self.sparse:
            own = salt or ""
            return f"{SALT}dense:{own}" if own.startswith(SALT) else salt
        settings = self.prefill_selector, float(self.prefill_mass), self.prefill_last
        return SALT + ":".join(["sparse", *map(str, settings), salt or ""])

    def explain(self) -> str:
        """Describe how prompts attend."""
        if not self.sparse:
            return "prefill is exact"
        return (
            f"prefill attends to blocks of {BLOCK} tokens that {self.prefill_selector!r} chooses "
            f"(prefill_mass={self.prefill_mass}), and the last {self.prefill_last} tokens of a "
            "prompt to all tokens"
        )


@dataclass(frozen=True)
class Prompt:
    """The prompt of a request that is read with sparse attention.

    Args:
        length: Number of its tokens.
        reading: How its tokens attend.
    """

    length: int
    reading: Reading

    @property
    def dense_from(self) -> int:
        """Position of the first token at the end of the prompt that attends to all tokens."""
        return max(self.length - self.reading.prefill_last, 0) // BLOCK * BLOCK

    def has_blocks(self, start: int, stop: int) -> bool:
        """Return True if a chunk of tokens has a whole block whose tokens attend to chosen blocks.

        Args:
            start: Position of the first token of the chunk.
            stop: Position after the last token.
        """
        return -(-start // BLOCK) < min(stop, self.dense_from) // BLOCK

    def chunk_end(self, start: int, end: int) -> int:
        """Return the position at which a chunk ends, at most `end`.

        A chunk that does not reach the dense end of the prompt has whole blocks. Otherwise the
        tokens of a divided block could not choose blocks together.

        Args:
            start: Position of the first token of the chunk.
            end: Position at which the chunk would end.

        Returns:
            The position. It is `start` if the chunk must wait for a step with more room.
        """
        if start < self.length and end < self.dense_from:
            return max(end // BLOCK * BLOCK, start)
        return end


class GatheredRows:
    """The keys and values of a sequence, copied from vLLM's pages.

    Args:
        rows: Keys `[1, G, N, D]` and values `[1, G, N, D]`.
        scale: Factor of the logits.
    """

    def __init__(self, rows: Rows, scale: float) -> None:
        self.scale, self._rows = scale, rows

    def keys(self, start: int, stop: int) -> Tensor:
        """Return the keys of the tokens from one position to another, `[1, G, n, D]`."""
        return self._rows.keys[:, :, start:stop]

    def attend_densely(self, queries: Tensor, stop: int) -> Tensor:
        """Attend causally with queries `[1, H, T, D]` of the last tokens before a position."""
        rows = self._until(stop)
        return attend_causal(queries, rows.keys, rows.values, scale=self.scale)

    def attend_chosen(self, queries: Tensor, chosen: Tensor) -> Tensor:
        """Attend causally to the chosen blocks, bool `[1, H, QB, KB]`."""
        return attend_to_blocks(queries, self._until(chosen.shape[3] * BLOCK), chosen, self.scale)

    def _until(self, stop: int) -> Rows:
        return Rows(self._rows.keys[:, :, :stop], self._rows.values[:, :, :stop])


def attend_prompt(queries: Tensor, rows: Rows, prompt: Prompt, geometry: Geometry) -> Tensor:
    """Compute the sparse attention of a chunk of a prompt.

    Args:
        queries: The queries of the chunk, `[T, H, D]`.
        rows: Keys `[1, G, N, D]` and values `[1, G, N, Dv]` of all tokens, those of the chunk
            included.
        prompt: The prompt.
        geometry: Sizes of the layer.

    Returns:
        Attention outputs `[T, H, Dv]`.
    """
    reading, first = prompt.reading, rows.keys.shape[2] - len(queries)
    sparse = SparsePrompt(reading.prefill_selector, reading.prefill_mass, reading.prefill_last)
    sparse.end = prompt.length
    heads = queries.transpose(0, 1)[None]  # [1, H, T, D]
    found = sparse.attend(heads, first, GatheredRows(rows, geometry.scale))
    return found[0].transpose(0, 1)


class Prompts:
    """The prompts of the requests of one model runner, if they are read with sparse attention.

    Args:
        reading: The settings of the engine.
        batch: Returns the ids of the requests of the current batch, in the order of the batch.
    """

    def __init__(self, reading: Reading, batch: Callable[[], Sequence[str]]) -> None:
        self._reading, self.batch = reading, batch
        self._known: dict[str, Prompt] = {}

    def update(self, scheduled: Any) -> None:
        """Add new requests, and remove finished ones.

        Args:
            scheduled: vLLM's `SchedulerOutput` of the step.
        """
        for name in scheduled.finished_req_ids:
            self._known.pop(name, None)
        for new in scheduled.scheduled_new_reqs:
            self._known.pop(new.req_id, None)
            params, ids = new.sampling_params, new.prompt_token_ids
            reading = self._reading.of_request(None if params is None else params.extra_args)
            if reading.sparse:
                length = len(new.prompt_embeds if ids is None else ids)
                self._known[new.req_id] = Prompt(length, reading)

    def of_batch(self) -> list[Prompt | None]:
        """Return the prompt of each request of the batch, or None for a request whose prompt is
        read with full attention."""
        return [self._known.get(name) for name in self.batch()]
