"""`DraftGraphs`: run decode steps of several tokens, which may be rejected, as CUDA graphs."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from kvindex.core.graphs import GRAPHS, Graph
from kvindex_adapters.decoder.sampling import Sampler
from kvindex_adapters.decoder.session import Session

SIZES = {False: (2, 4, 8, 16), True: (1, 2, 4, 8, 16, 32)}
"""Numbers of tokens of the graphs for drafts of varying length, by whether full attention verifies
them. A shorter step is filled up."""


def refusal(session: Session) -> str | None:
    """Return why no CUDA graph runs steps of several tokens in this session, or None.

    The reasons of its layers are those of `Session.capture_refusal`.
    """
    device = session.token.device.type
    if device not in GRAPHS:
        return f"device: got {device}"
    if session.ranks is not None:
        return "ranks: got several processes, allowed is one"
    return None


@dataclass(frozen=True)
class Scores:
    """Results of a decode step of several tokens. The next step overwrites the tensors.

    Args:
        logits: Logits for the token after each token of the step, `[B, T, V]`.
        chosen: The most likely token at each position of each sequence, or None if tokens are
            sampled.
        count: Number of tokens that the step has appended to each sequence, `T`. Those after the
            tokens of the caller are fillers.
    """

    logits: Tensor
    chosen: Sequence[Sequence[int]] | None
    count: int


@dataclass
class _Step:
    """The tensors of decode steps with the same number of tokens, and their graph.

    Args:
        ids: Input tokens `[B, T]`.
        reads: Results of the layers' `prepare_replay` when the step ran last.
        graph: The graph, or None if it was not captured yet.
        logits: Logits `[B, T, V]` of the last step.
        chosen: The most likely tokens, int64 `[B, T]`, or None.
    """

    ids: Tensor
    reads: Sequence[object] = ()
    graph: Graph | None = None
    logits: Tensor | None = None
    chosen: Tensor | None = None


class DraftGraphs:
    """Runs decode steps of several tokens of each sequence, as replays of CUDA graphs.

    Args:
        session: A session that has read its prompt.
        sampler: The sampler of the generation.
        size: Number of tokens of each sequence in every step, at most; None if it varies. Steps
            that `refusal` refuses run without a graph.
        graphs: Whether decode steps may be captured in CUDA graphs.
        full: Whether the tokens of a step attend to all tokens instead of searching.
    """

    def __init__(
        self,
        session: Session,
        sampler: Sampler,
        size: int | None,
        *,
        graphs: bool = True,
        full: bool = False,
    ) -> None:
        self._session, self._sampler, self._full = session, sampler, full
        self._serves = graphs and refusal(session) is None
        self._sizes = SIZES[full] if size is None else (size,)
        self._steps: dict[int, _Step] = {}

    def serves(self, tokens: int) -> bool:
        """Return True if a graph can run steps of `tokens` tokens, as far as is known."""
        return self._serves and any(size >= tokens for size in self._sizes)

    def score(self, inputs: Tensor) -> Scores | None:
        """Append tokens to the session, and compute the logits after each of them.

        Call `count` next, with the number of tokens that stay. If an exception is raised in
        between, call `session.undo_replay`.

        Args:
            inputs: Int64 `[B, n]`.

        Returns:
            The logits, or None if no graph can run this step. The session is then unchanged.
        """
        with self._session.fully(self._full):
            step = self._launched(inputs)
        if step is None or step.logits is None:
            return None
        size = step.ids.shape[1]
        # while the device computes; after full attention, the index writes the next draft
        self._session.prepare_ahead(1 if self._full else size, size)
        chosen = None if step.chosen is None else step.chosen.tolist()
        return Scores(step.logits, chosen, size)

    def count(self, kept: int | Sequence[int], scores: Scores) -> None:
        """Keep the first `kept` tokens of the last step, whose results are `scores`.

        `kept` may have a number for each sequence (`Session.count_replay`).
        """
        self._session.count_replay(kept, scores.count, full=True if self._full else None)

    def _launched(self, inputs: Tensor) -> _Step | None:
        """Launch a step without waiting for it. Return None if no graph can run it."""
        n = inputs.shape[1]
        size = next((size for size in self._sizes if size >= n), None)
        if not self._serves or size is None:
            return None
        reads = self._session.prepare_replay(size)
        if reads is None:
            return None
        step = self._steps.get(size)
        if step is None:
            step = self._steps[size] = _Step(inputs.new_zeros(len(inputs), size))
        same = len(step.reads) == len(reads)
        same = same and all(new is old for new, old in zip(reads, step.reads, strict=True))
        step.ids[:, :n].copy_(inputs)
        if not same:
            # the first step with these tensors compiles the kernels
            step.graph, step.reads = None, reads
            self._run(step)
        elif step.graph is not None or self._capture(step):
            assert step.graph is not None
            step.graph.replay()
        else:
            return None
        return step

    def _run(self, step: _Step) -> None:
        step.logits = logits = self._session.captured_score(step.ids)
        step.chosen = None
        if not self._sampler.samples:
            step.chosen = self._sampler.choose(logits.flatten(0, 1)).view(step.ids.shape)

    def _capture(self, step: _Step) -> bool:
        """Capture a step. If this fails, return False, and run all later steps without a graph."""
        device = step.ids.device
        try:
            step.graph = GRAPHS[device.type](device, lambda: self._run(step))
        except RuntimeError as error:
            self._serves = False
            warnings.warn(
                f"graphs: the driver refuses to capture a step of several tokens ({error}), so "
                "such steps launch their operations one by one; graphs=False does this without a "
                "warning",
                stacklevel=2,
            )
            return False
        return True
