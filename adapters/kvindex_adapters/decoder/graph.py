"""`TokenGraph`: run a whole decode step as one CUDA graph. `DraftWriter`: write drafts with it.

Each replay computes embedding, layers and logits, chooses the next token, and increases the
position by 1. The host launches a few replays before it reads the chosen tokens from pinned memory.
Between replays it counts tokens and updates the layers' local windows.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from contextlib import nullcontext

from torch import Tensor

from kvindex.core.graphs import GRAPHS, Graph
from kvindex_adapters.common.token_ring import AHEAD
from kvindex_adapters.decoder.sampling import Sampler
from kvindex_adapters.decoder.session import Session

WARM = 1
"""Number of decode steps that run before a CUDA graph is captured. They compile the kernels."""


class TokenGraph:
    """Runs the decode steps of a session, as replays of a CUDA graph where possible.

    Args:
        session: A session that has read its prompt. `session.token` is the first token of the
            answer.
        sampler: The sampler that chose this token.
        graphs: Whether decode steps may be captured in a CUDA graph.
        repeats: Whether the graph reuses the rows that the step before has selected
            (`Session.repeating`). A step without the graph searches.
    """

    def __init__(
        self, session: Session, sampler: Sampler, *, graphs: bool = True, repeats: bool = False
    ) -> None:
        self._session, self._sampler, self._repeats = session, sampler, repeats
        self._serves = graphs and session.token.device.type in GRAPHS
        self._ahead = AHEAD if self._serves and session.ranks is not None else 0
        self._graph: Graph | None = None
        self._reads: list[
            object
        ] = []  # results of the layers' `prepare_replay` when the graph was captured
        self._warm = 0

    @property
    def ahead(self) -> int:
        """Number of decode steps that the host may launch before it reads a token; 0 without a
        graph.

        With several ranks this number is constant from the first token on. Ranks that launched
        different numbers of steps would wait for each other's collective operations.
        """
        return AHEAD if self._graph is not None else self._ahead

    def step(self, *, drafts: bool = False) -> bool:
        """Run one decode step, and write the next token to `session.token`.

        Args:
            drafts: True if the input token may be rejected later. Its id is then not passed to the
                indexes.

        Returns:
            True if the step was a replay of the graph.

        Raises:
            RuntimeError: Another thread is using the session.
        """
        with self._session.exclusive():
            return self._step(self._session.draft if drafts else self._session.step)

    def _step(self, run: Callable[[Tensor], Tensor]) -> bool:
        reads = self._session.prepare_replay() if self._serves else None
        if reads is not None and self._warm < WARM:
            self._warm, reads = self._warm + 1, None
        if reads is not None and not self._same(reads):
            self._capture(reads)
        if reads is None or self._graph is None:
            self._graph, token = None, self._session.token[:, 0]
            self._session.token.copy_(self._chosen(run(token)))
            return False
        self._graph.replay()
        self._session.count_replay()
        return True

    def _same(self, reads: list[object]) -> bool:
        """Return True if there is a CUDA graph that is still valid.

        It is valid if the method `prepare_replay` of each layer has now returned the same object as
        before the capture. `reads` contains the objects that the method has now returned.
        """
        pairs = zip(reads, self._reads, strict=True)
        return self._graph is not None and all(new is old for new, old in pairs)

    def _capture(self, reads: list[object]) -> None:
        """Capture a decode step. If the capture fails, all later steps run without a graph."""
        session, self._graph = self._session, None  # frees the old graph's memory first

        def work() -> None:
            with session.repeating() if self._repeats else nullcontext():
                logits = session.captured_step()
            session.token.copy_(self._chosen(logits))

        device = session.token.device
        try:
            self._graph = GRAPHS[device.type](device, work, self._sampler.generator)
        except RuntimeError as error:
            self._serves = False
            warnings.warn(
                f"graphs: the driver refuses to capture a decode step ({error}), so each step "
                "launches its operations one by one; graphs=False does this without a warning",
                stacklevel=2,
            )
        self._reads = reads

    def _chosen(self, logits: Tensor) -> Tensor:
        return self._session.agreed(self._sampler.choose(logits))[:, None]


SEARCH_EVERY = 3
"""One of so many successive drafts searches, if drafts take a large part of the time. The others
reuse the rows that it has selected."""

CHEAP = 0.1
"""Largest time of a draft, relative to its verification (`Session.draft_cost`), with which every
draft searches. A search then costs little, and more drafts are accepted."""


def search_every(cost: float | None) -> int:
    """Return how many successive drafts have one search.

    Args:
        cost: `Session.draft_cost`, or None if the drafts are not verified by full attention.
    """
    return SEARCH_EVERY if cost is not None and cost > CHEAP else 1


class DraftWriter:
    """Runs the decode steps that write drafts, most of them without a search.

    Neighboring tokens select nearly the same rows, and a draft need not be exact, because full
    attention verifies it. The idea is that of Vegas (arXiv 2602.07223).

    Args:
        session: A session that has read its prompt.
        sampler: The sampler of the generation, which chooses the most likely tokens.
        searching: The graph of the session's usual decode steps.
        graphs: Whether decode steps may be captured in a CUDA graph.
        every: One of so many drafts searches (`search_every`).
    """

    def __init__(
        self,
        session: Session,
        sampler: Sampler,
        searching: TokenGraph,
        *,
        graphs: bool = True,
        every: int = SEARCH_EVERY,
    ) -> None:
        self._searching, self._repeating, self._every = searching, None, every
        if graphs and every > 1 and session.can_repeat:
            self._repeating = TokenGraph(session, sampler, repeats=True)
        self._selected = False  # whether rows that can be reused were selected for this draft

    def step(self, place: int) -> None:
        """Write the draft number `place` of a round to `session.token`, which is its input, too."""
        if place % self._every and self._selected and self._repeating is not None:
            self._repeating.step(drafts=True)
        else:
            self._selected = self._searching.step(drafts=True)
