"""`Speculator`: decode steps of several tokens, whose drafts are verified in one forward pass.

A round appends the last token of the answer and `n` drafted tokens to the session, and computes the
logits after each of them. Drafts are accepted up to the first that the verifier rejects. The round
yields the accepted tokens and one more, which the verifier's logits give. Rejected tokens are
removed from the session.

Verification runs as a CUDA graph where possible (`draft_graphs`).
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence

import torch
from torch import Tensor

from kvindex_adapters.common.speculation import (
    DraftLength,
    PromptLookup,
    Speculation,
    rejection_sample,
)
from kvindex_adapters.decoder.draft_graphs import DraftGraphs, Scores
from kvindex_adapters.decoder.sampling import Sampler
from kvindex_adapters.decoder.session import Session

Read = Callable[[Tensor], Tensor]
"""Function that copies tokens int64 `[B]` from the device to the CPU."""

Judge = Callable[[int, Tensor], tuple[Tensor, Tensor]]
"""Function that gets a position and its logits `[B, V]`, and returns the token int64 `[B]` of each
sequence there, and bool `[B]`, whether it is the drafted token."""


class Speculator:
    """Runs the decode steps of a session in rounds of drafts and their verification.

    Args:
        session: A session that has read its prompt. `session.token` is the first token of the
            answer.
        sampler: The sampler that chose this token.
        speculation: The options.
        known: The token ids of each sequence, the first token of the answer included.
        step: Function that runs one decode step without a draft, and writes the next token to
            `session.token`.
        read: Function that copies tokens to the host.
        graphs: CUDA graphs for steps of several tokens, or None.
        draft: Function like `step` for a token that may be rejected. It gets the number of the
            draft in its round. None runs such steps op by op.
        cost: Time of a draft, relative to a round without drafts (`DraftLength`).
    """

    def __init__(
        self,
        session: Session,
        sampler: Sampler,
        speculation: Speculation,
        known: Sequence[Sequence[int]],
        *,
        step: Callable[[], object],
        read: Read,
        graphs: DraftGraphs | None = None,
        draft: Callable[[int], None] | None = None,
        cost: float | None = None,
    ) -> None:
        self._session, self._sampler, self._full = session, sampler, speculation.full
        self._graphs, self._draft = graphs, draft
        self._length, self._step, self._read = DraftLength(speculation, cost), step, read
        self._known = [PromptLookup(ids) for ids in known]

    def next(self, left: int, running: Collection[int], stops: Collection[int]) -> list[Tensor]:
        """Run one round, or one decode step if there is no draft.

        Args:
            left: Number of tokens that may still be generated, at least 1.
            running: Numbers of the sequences that have not ended. The others may get any tokens.
            stops: Stop tokens. The round ends where all running sequences have got one.

        Returns:
            The next tokens, int64 `[B]` each, on the CPU. If the call raises an exception, the
            session ends with a verified token: the last one before the call, or, if tokens could
            not move into an index, the last one of the round.

        Raises:
            RuntimeError: Another thread is using the session.
        """
        count = min(self._length.next(), left - 1)
        with self._session.exclusive():
            if self._full:
                made, accepted = self._verify_fully(count, running, stops)
            else:
                drafts = self._look_up(count, running)
                if drafts is None:
                    self._step_alone()
                    made, count, accepted = [self._read(self._session.token[:, 0])], 0, 0
                else:
                    count = drafts.shape[1]
                    made, accepted = self._verify(drafts, running, stops)
            self._session.count_drafts(count, accepted)
        self._length.saw(count, accepted)
        for token in made:
            for known, one in zip(self._known, token.tolist(), strict=True):
                known.append(one)
        return made

    def _step_alone(self) -> None:
        """Run a decode step. If it fails, the session is as before."""
        session = self._session
        before, token = session.length, session.token.clone()
        try:
            self._step()
        except BaseException:
            session.keep(before)
            session.token.copy_(token)
            raise

    # Drafts by prompt lookup, verified by the attention of the session

    def _look_up(self, count: int, running: Collection[int]) -> Tensor | None:
        """Draft up to `count` tokens, int64 `[B, n]`, or return None where a sequence has none.

        All sequences of the batch get drafts of the same length, because they advance together.
        """
        if count < 1:
            return None
        drafts = {row: self._known[row].draft(count) for row in running}
        if not all(drafts.values()):
            return None
        filler = [0] * count  # for sequences that have ended
        rows = [drafts.get(row, filler) for row in range(len(self._known))]
        return torch.tensor(rows, device=self._session.token.device)

    def _verify(
        self, drafts: Tensor, running: Collection[int], stops: Collection[int]
    ) -> tuple[list[Tensor], int]:
        """Verify drafts that are no sample of a distribution, such as those of prompt lookup.

        Each token is chosen or sampled as without a draft, and the draft is accepted if it is that
        token. This is rejection sampling with a draft distribution that is a point mass. It uses
        the random numbers of decode steps of one token.
        """

        replayed = None if self._graphs is None else self._verify_replayed(drafts, stops)
        if replayed is not None:
            return replayed

        def judge(place: int, logits: Tensor) -> tuple[Tensor, Tensor]:
            token = self._session.agreed(self._sampler.choose(logits))
            return token, _same(token, drafts, place)

        with self._session.speculating(drafts.shape[1] + 1):
            return self._accept(drafts, judge, running, stops, full=False)

    def _verify_replayed(
        self, drafts: Tensor, stops: Collection[int]
    ) -> tuple[list[Tensor], int] | None:
        """Do what `_verify` does for one sequence in a CUDA graph, or return None if none can."""
        session, graphs, before = self._session, self._graphs, self._session.length
        assert graphs is not None
        first = session.token.clone()
        try:
            scores = graphs.score(torch.cat([session.token, drafts], dim=1))
            if scores is None:
                return None
            made, kept = self._matched(scores, drafts, stops)
            graphs.count(len(made), scores)
        except BaseException:
            session.undo_replay(before)
            session.token.copy_(first)
            raise
        session.token.copy_(made[-1][:, None])
        return made, kept

    def _matched(
        self, scores: Scores, drafts: Tensor, stops: Collection[int]
    ) -> tuple[list[Tensor], int]:
        """Choose the tokens of one sequence up to the first that differs from its draft.

        Args:
            scores: The results of a replay.
            drafts: Int64 `[1, n]`.
            stops: Stop tokens, which also end the round.

        Returns:
            The tokens, and how many of them were drafted.
        """
        made, kept = list[Tensor](), 0
        for draft in (*drafts[0].tolist(), None):  # there is no draft for the last position
            place = len(made)
            if scores.chosen is None:
                some = scores.logits[place : place + 1]
                token = int(self._read(self._sampler.choose(some)))
            else:
                token = scores.chosen[place]
            made.append(torch.tensor([token]))
            kept += token == draft
            if token != draft or token in stops:
                break
        return made, kept

    # Drafts that the model writes with the index, verified by full attention

    def _verify_fully(
        self, count: int, running: Collection[int], stops: Collection[int]
    ) -> tuple[list[Tensor], int]:
        """Draft `count` tokens with the index, and verify them by full attention.

        Source: Leviathan et al., Fast Inference from Transformers via Speculative Decoding (ICML
        2023), algorithm 1.
        """
        session, sampler = self._session, self._sampler
        start, first = session.length, session.token.clone()
        with session.speculating(count + 1):
            tokens, distributions = [first[:, 0]], list[Tensor]()
            try:
                for place in range(count):
                    if self._draft is not None and not sampler.samples:
                        self._draft(place)  # reads `session.token`, which is the last of `tokens`
                        tokens.append(session.token[:, 0].clone())
                        continue
                    logits = session.draft(tokens[-1])
                    if sampler.samples:
                        distributions.append(sampler.probabilities(logits))
                        token = sampler.draw(distributions[-1])
                    else:
                        token = sampler.choose(logits)
                    tokens.append(session.agreed(token))
            finally:
                session.token.copy_(first)
            session.keep(start)
            drafts = torch.stack(tokens[1:], dim=1) if count else first[:, :0]

            def judge(place: int, logits: Tensor) -> tuple[Tensor, Tensor]:
                if place == count or not sampler.samples:
                    token = session.agreed(sampler.choose(logits))
                    return token, _same(token, drafts, place)
                wanted, drafted = sampler.probabilities(logits), distributions[place]
                chance = sampler.uniform(len(first), first.device)
                given = wanted, drafted, drafts[:, place], chance
                token, accepted = rejection_sample(*given, draw=sampler.draw)
                return session.agreed(token), session.agreed(accepted.long()).bool()

            return self._accept(drafts, judge, running, stops, full=True)

    # What both have in common

    def _accept(
        self,
        drafts: Tensor,
        judge: Judge,
        running: Collection[int],
        stops: Collection[int],
        *,
        full: bool,
    ) -> tuple[list[Tensor], int]:
        """Run the forward pass of a draft, and keep the tokens up to the first rejected one.

        A batch advances by the number of tokens that all running sequences accept. Where another
        sequence has rejected a draft, a sequence that accepted it has that draft as its next token.
        So every token has the verifier's distribution.

        Returns the tokens, and how many of them all running sequences had drafted.
        """
        session, start, count = self._session, self._session.length, drafts.shape[1]
        inputs = torch.cat([session.token, drafts], dim=1)
        graphs = self._graphs if full else None
        try:
            scores = None if graphs is None else graphs.score(inputs)
            if graphs is None or scores is None:
                logits = session.score(inputs, full=full)
                made, kept = self._judged(logits, count, judge, running, stops)
                session.keep(start + len(made))
            else:
                if self._sampler.samples:
                    made, kept = self._judged(scores.logits[None], count, judge, running, stops)
                else:
                    made, kept = self._matched(scores, drafts, stops)
                graphs.count(len(made), scores)
        except BaseException:
            if graphs is not None:
                session.undo_replay(start)
            raise
        session.observe(inputs[:, : len(made)])
        session.token.copy_(made[-1][:, None])
        return made, kept

    def _judged(
        self,
        logits: Tensor,
        count: int,
        judge: Judge,
        running: Collection[int],
        stops: Collection[int],
    ) -> tuple[list[Tensor], int]:
        """Choose tokens from logits `[B, T, V]` up to the first rejected draft, of `count` drafts.

        Returns the tokens, and how many of them all running sequences had drafted.
        """
        made, kept, open_rows = list[Tensor](), 0, set(running)
        for place in range(count + 1):
            token, accepted = judge(place, logits[:, place])
            made.append(self._read(token))
            seen, flags = made[-1].tolist(), self._read(accepted.long()).tolist()
            agrees = all(flags[row] for row in open_rows)
            kept += agrees
            open_rows -= {row for row in open_rows if seen[row] in stops}
            if not open_rows or not agrees:
                break
        return made, kept


def _same(token: Tensor, drafts: Tensor, place: int) -> Tensor:
    """Return bool `[B]`: whether the tokens are those drafted for a position.

    Behind the last drafted position, there is nothing to accept.
    """
    if place == drafts.shape[1]:
        return torch.zeros_like(token, dtype=torch.bool)
    return token == drafts[:, place]
