"""`TokenGraph`: a whole token of a model as one CUDA graph.

A replay does all of a token: embedding, layers, logits, the choice of the next token and its
position. The host launches a few of them ahead, counts, and updates windows in between; it reads a
token from pinned memory when the device has written it.
"""

from __future__ import annotations

import warnings

from torch import Tensor

from kvindex.core.graphs import GRAPHS, Graph
from kvindex_adapters.common.token_ring import AHEAD
from kvindex_adapters.decoder.sampling import Sampler
from kvindex_adapters.decoder.session import Session

WARM = 1
"""Tokens like it that are launched op by op before one is captured: they compile and allocate."""


class TokenGraph:
    """The tokens of a session, one after the other: replays where they can be, else op by op.

    session: has read its prompt; sampler: has chosen its first token, which `session.token` holds.
    graphs: whether any are captured.
    """

    def __init__(self, session: Session, sampler: Sampler, *, graphs: bool = True) -> None:
        self._session, self._sampler = session, sampler
        self._serves = graphs and session.token.device.type in GRAPHS
        self._ahead = AHEAD if self._serves and session.ranks is not None else 0
        self._graph: Graph | None = None
        self._reads: list[object] = []  # what it was captured for
        self._warm = 0

    @property
    def ahead(self) -> int:
        """Tokens that may be launched before one is read: more than 0 once a graph is replayed.

        Of several ranks from the first token on, whatever one of them captures: those that launched
        more would wait for the others.
        """
        return AHEAD if self._graph is not None else self._ahead

    def step(self) -> None:
        """Run one decode step: replace `session.token` by the next token.

        Raises:
            RuntimeError: Another thread is in a call of the session.
        """
        with self._session.exclusive():
            self._step()

    def _step(self) -> None:
        reads = self._session.prepare_replay() if self._serves else None
        if reads is not None and self._warm < WARM:
            self._warm, reads = self._warm + 1, None
        if reads is not None and not self._same(reads):
            self._capture(reads)
        if reads is None or self._graph is None:
            self._graph, token = None, self._session.token[:, 0]
            self._session.token.copy_(self._chosen(self._session.step(token)))
            return
        self._graph.replay()
        self._session.count_replay()

    def _same(self, reads: list[object]) -> bool:
        """Whether the graph reads just this."""
        pairs = zip(reads, self._reads, strict=True)
        return self._graph is not None and all(new is old for new, old in pairs)

    def _capture(self, reads: list[object]) -> None:
        """The graph of a token that reads this; a driver that refuses is not asked again."""
        session, self._graph = self._session, None  # its memory goes before there is another's

        def work() -> None:
            session.token.copy_(self._chosen(session.captured_step()))

        device = session.token.device
        try:
            self._graph = GRAPHS[device.type](device, work, self._sampler.generator)
        except RuntimeError as error:
            self._serves = False
            warnings.warn(
                f"graphs: the driver refuses to capture a token ({error}), so that each is "
                "launched op by op; graphs=False does so without a warning",
                stacklevel=2,
            )
        self._reads = reads

    def _chosen(self, logits: Tensor) -> Tensor:
        return self._session.agreed(self._sampler.choose(logits))[:, None]
