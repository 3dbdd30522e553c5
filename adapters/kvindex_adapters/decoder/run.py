"""`Run`: one generation, from prefill to the last token."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from kvindex_adapters.common.prompt_chunks import Progress
from kvindex_adapters.common.speculation import Speculation, model_cost
from kvindex_adapters.common.token_ring import TokenRing
from kvindex_adapters.decoder.batch import left_padded
from kvindex_adapters.decoder.draft_graphs import DraftGraphs, refusal
from kvindex_adapters.decoder.drafter import Drafter
from kvindex_adapters.decoder.graph import TokenGraph
from kvindex_adapters.decoder.reading import Reading
from kvindex_adapters.decoder.sampling import Sampler, Sampling
from kvindex_adapters.decoder.session import Session
from kvindex_adapters.decoder.speculation import Speculator


@dataclass(frozen=True)
class Run:
    """One generation in a session: its prompts, sampling parameters and limits.

    Args:
        session: A session. If it already contains tokens, the prompt continues them.
        reading: The object that read the model's weights for this session.
        ids: The prompts, int64 `[B, N]`.
        sampling: Sampling parameters.
        max_new_tokens: Maximum number of tokens in an answer.
        chunk: Number of tokens of each prompt that a layer computes at a time.
        stops: Stop tokens.
        graphs: Whether a decode step may run as one CUDA graph.
        speculation: Options of speculation, or None for one token at a time.
        known: The ids of the tokens in the session, int64 `[N]`, where prompt lookup also searches.
            None if they are unknown.
        drafter: Writes drafts with a smaller model, or None.
    """

    session: Session
    reading: Reading
    ids: Tensor
    sampling: Sampling
    max_new_tokens: int
    chunk: int
    stops: Collection[int]
    graphs: bool = True
    speculation: Speculation | None = None
    known: Tensor | None = None
    drafter: Drafter | None = None

    @property
    def verifies_fully(self) -> bool:
        """True if full attention verifies drafted tokens."""
        return self.speculation is not None and self.speculation.full

    def read(self, on_progress: Progress | None = None) -> Tensor:
        """Append the prompts to the session, without generating tokens.

        Args:
            on_progress: Called with "prefill", the number of tokens read, and the total number.

        Returns:
            Logits `[B, V]` for the first token of every answer.
        """
        self.reading.check_unchanged()  # the model may have changed after `Decoder.start`
        room = self.session.length + self.ids.shape[1] + self.max_new_tokens
        full = self.verifies_fully
        return self.session.read_prompt(self.ids, self.chunk, room, on_progress, full=full)

    def tokens(
        self, on_progress: Progress | None = None, *, logits: Tensor | None = None
    ) -> Iterator[Tensor]:
        """Yield tokens until every sequence has produced a stop token, or `max_new_tokens` is
        reached.

        With a CUDA graph, the host launches decode steps before it has read the previous tokens.
        The session may therefore contain a few tokens after the last stop token.

        Args:
            on_progress: Called with "prefill", the number of tokens read, and the total number.
            logits: The result of `read`, if the session, or the one of which it is a copy, has
                already read the prompts. None: this method reads them.

        Returns:
            An iterator of tensors int64 `[B]` on the CPU, each with the next token of every
            sequence.
        """
        self.reading.check_unchanged()
        sampler = Sampler(self.sampling, self.ids.device, self.session.fused)
        running = set(range(len(self.ids)))
        logits = self.read(on_progress) if logits is None else logits
        token, ranks = self.session.token, self.session.ranks
        waits = {} if ranks is None else {"wait": ranks.wait_for}
        ring = TokenRing(len(self.ids), self.ids.device, **waits)
        token.copy_(self.session.agreed(sampler.choose(logits))[:, None])
        ring.put(token[:, 0])
        graph, left = TokenGraph(self.session, sampler, graphs=self.graphs), self.max_new_tokens - 1
        if self.speculation is not None:
            yield from self._speculated(self.speculation, sampler, graph, ring, running)
            return
        try:
            while running and len(ring):
                made = ring.take()
                yield made
                seen = made.tolist()
                running -= {row for row in running if seen[row] in self.stops}
                while running and left and len(ring) <= graph.ahead:
                    graph.step()
                    ring.put(token[:, 0])
                    left -= 1
        finally:
            ring.wait()

    def _speculated(
        self,
        speculation: Speculation,
        sampler: Sampler,
        graph: TokenGraph,
        ring: TokenRing,
        running: set[int],
    ) -> Iterator[Tensor]:
        """Yield the tokens of `tokens`, several of which one step may compute.

        `ring` contains the first token of the answer.
        """

        def read(tokens: Tensor) -> Tensor:
            ring.put(tokens)
            return ring.take()

        first = ring.take()
        rows = zip(self.ids, self.session.padding, strict=True)
        known = [row[padding:].tolist() for row, padding in rows]
        if self.known is not None:
            known[0] = [*self.known.tolist(), *known[0]]
        ids = [[*row, one] for row, one in zip(known, first.tolist(), strict=True)]
        kind: Any = dict(graphs=self.graphs, full=speculation.full)
        drafts = DraftGraphs(self.session, sampler, self._draft_size, **kind)
        cost = self._followed(ids) or (self.session.draft_cost() if speculation.full else None)
        how: Any = dict(step=graph.step, draft=partial(graph.step, drafts=True))
        how |= dict(read=read, graphs=drafts, cost=cost, drafter=self.drafter)
        speculator = Speculator(self.session, sampler, speculation, ids, **how)
        made, left = [first], self.max_new_tokens - 1
        while True:
            for token in made:
                yield token
                seen = token.tolist()
                running -= {row for row in running if seen[row] in self.stops}
            if not running or not left:
                return
            made = speculator.next(left, running, self.stops)
            left -= len(made)

    def _followed(self, known: Sequence[Sequence[int]]) -> float | None:
        """Let the smaller model follow the tokens `known` of each sequence, if there is one.

        Returns the cost of a draft (`model_cost`), or None without such a model.
        """
        if self.drafter is None:
            return None
        ids, _ = left_padded([torch.tensor(row) for row in known], torch.device("cpu"))
        room = ids.shape[1] + self.max_new_tokens
        self.drafter.follow(ids, room, graphs=self.graphs)
        return model_cost(self.drafter.weight_bytes, self.session.weight_bytes)

    def explain(self) -> str:
        """Describe how the next decode step will run: dtype, kernels, CUDA graph and index.

        Returns:
            Text of several lines.
        """
        text = self.session.explain(graphs=self.graphs)
        if self.speculation is None:
            return text
        text = f"{text}\nspeculation: {self.speculation}; {self._explained_drafts()}"
        return f"{text}; {self._explained_pass()}" if self.verifies_fully else text

    @property
    def _draft_size(self) -> int | None:
        """Number of tokens of a step that verifies drafts, or None if it varies."""
        tokens = None if self.speculation is None else self.speculation.tokens
        return tokens + 1 if isinstance(tokens, int) else None

    def _explained_pass(self) -> str:
        """Say how many bytes one verification by full attention reads."""
        batch, prompt = self.ids.shape
        each, tokens = self.session.token_bytes, self.session.length + prompt
        return (
            f"each verification reads the keys and values of all tokens: {each / 2**10:,.1f} KiB "
            f"for a token, {batch * tokens * each / 2**30:,.2f} GiB for {batch} × {tokens:,}"
        )

    def _explained_drafts(self) -> str:
        """Say how steps of several tokens run."""
        if not self.graphs:
            return "steps of several tokens run op by op (graphs: got False)"
        tokens = 2 if (size := self._draft_size) is None else size
        full = self.verifies_fully  # `Session.fully` would change steps of other threads
        why = refusal(self.session) or self.session.capture_refusal(tokens, full=full)
        if why is not None:
            return f"steps of several tokens run op by op ({why})"
        return "a step of several tokens is one graph"

    def cut(self, tokens: list[Tensor]) -> list[Tensor]:
        """Truncate each answer after its first stop token.

        Args:
            tokens: The tensors that `tokens()` yielded, int64 `[B]` each.

        Returns:
            The answer of each sequence, int64 `[N]`, on the prompts' device.
        """
        answers = []
        for row in torch.stack(tokens, dim=1):
            ended = [place for place, token in enumerate(row.tolist()) if token in self.stops]
            answers.append((row[: ended[0] + 1] if ended else row).to(self.ids.device))
        return answers
