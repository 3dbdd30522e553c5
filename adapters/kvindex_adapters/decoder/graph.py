"""`TokenGraph`: run a whole decode step as one CUDA graph.

Each replay computes embedding, layers and logits, chooses the next token, and increases the
position by 1. The host launches a few replays before it reads the chosen tokens from pinned memory.
Between replays it counts tokens and updates the layers' local windows.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable

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
        vocabulary: Choose among this number of tokens with the lowest ids. None means all.
    """

    def __init__(
        self,
        session: Session,
        sampler: Sampler,
        *,
        graphs: bool = True,
        vocabulary: int | None = None,
    ) -> None:
        self._session, self._sampler, self._vocabulary = session, sampler, vocabulary
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

    def step(self, *, drafts: bool = False) -> None:
        """Run one decode step, and write the next token to `session.token`.

        Args:
            drafts: True if the input token may be rejected later. Its id is then not passed to the
                indexes.

        Raises:
            RuntimeError: Another thread is using the session.
        """
        with self._session.exclusive():
            self._step(self._session.draft if drafts else self._session.step)

    def _step(self, run: Callable[[Tensor], Tensor]) -> None:
        reads = self._session.prepare_replay() if self._serves else None
        if reads is not None and self._warm < WARM:
            self._warm, reads = self._warm + 1, None
        if reads is not None and not self._same(reads):
            self._capture(reads)
        if reads is None or self._graph is None:
            self._graph, token = None, self._session.token[:, 0]
            self._session.token.copy_(self._chosen(run(token)))
            return
        self._graph.replay()
        self._session.count_replay()

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
            session.token.copy_(self._chosen(session.captured_step()))

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
        some = logits[:, : self._vocabulary]
        return self._session.agreed(self._sampler.choose(some))[:, None]
