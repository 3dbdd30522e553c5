"""`Speculator`: decode steps of several tokens, whose drafts are verified in one forward pass.

A round appends the last token of the answer and `n` drafted tokens to the session, and computes the
logits after each of them. Drafts are accepted up to the first that the verifier rejects. The round
yields the accepted tokens and one more, which the verifier's logits give. Rejected tokens are
removed from the session.

Drafts come from prompt lookup, from a smaller model (`drafter`), or from the model itself with the
index, if full attention verifies them.

A batch advances together, by the drafts that all of its sequences accept. There is an exception:
where the verification is a CUDA graph, no token is sampled and no smaller model drafts, each
sequence keeps the drafts that it accepts. The rejected tokens of the other sequences become
padding.

Verification runs as a CUDA graph where possible (`draft_graphs`).
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from kvindex_adapters.common.speculation import (
    DraftLength,
    PromptLookup,
    Speculation,
    rejection_sample,
)
from kvindex_adapters.decoder.draft_graphs import DraftGraphs, Scores
from kvindex_adapters.decoder.drafter import Drafter
from kvindex_adapters.decoder.sampling import Sampler
from kvindex_adapters.decoder.session import Session

Read = Callable[[Tensor], Tensor]
"""Function that copies tokens int64 `[B]` from the device to the CPU."""

Judge = Callable[[int, Tensor], tuple[Tensor, Tensor]]
"""Function that gets a position and its logits `[B, V]`, and returns the token int64 `[B]` of each
sequence there, and bool `[B]`, whether it is the drafted token."""


class Round(NamedTuple):
    """The result of a round.

    Attributes:
        tokens: The new tokens of each sequence. Those of sequences that had ended have no meaning.
        accepted: For each sequence that had not ended and had a draft, the length of this draft,
            and number of its tokens that were accepted.
    """

    tokens: list[list[int]]
    accepted: list[tuple[int, int]]

    @staticmethod
    def together(made: Sequence[Tensor], drafted: int, accepted: int) -> Round:
        """Return the result of a round in which all sequences got the tokens `made`, int64 `[B]`
        each. Each had `drafted` tokens, of which it accepted `accepted`."""
        return Round(torch.stack([*made], dim=1).tolist(), [(drafted, accepted)])


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
        draft: Function like `step` for a token that may be rejected, or None to run such steps op
            by op.
        cost: Time of a draft, relative to a round without drafts (`DraftLength`).
        drafter: Writes drafts with a smaller model. None for prompt lookup, or if full attention
            verifies drafts. Its `follow` has got the tokens `known`.
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
        draft: Callable[[], object] | None = None,
        cost: float | None = None,
        drafter: Drafter | None = None,
    ) -> None:
        self._session, self._sampler, self._full = session, sampler, speculation.full
        self._graphs, self._draft, self._drafter = graphs, draft, drafter
        self._length, self._step, self._read = DraftLength(speculation, cost), step, read
        self._known = [PromptLookup(ids) for ids in known]
        # tokens of each sequence that no call of `next` has returned, because another one is behind
        self._waiting: list[list[int]] = [[] for _ in known]
        self._accepted, self._counted = 0.0, 0  # accepted drafts, and those that were reported
        self._own: dict[int, int] = {}  # length of each sequence's own draft, without fillers

    def next(self, left: int, running: Collection[int], stops: Collection[int]) -> list[Tensor]:
        """Run one round, or one decode step if there is no draft.

        Args:
            left: Number of tokens that may still be generated, at least 1.
            running: Numbers of the sequences that have not ended. The others may get any tokens.
            stops: Stop tokens. The round ends where all running sequences have got one.

        Returns:
            The next tokens, int64 `[B]` each, on the CPU. If the call raises an exception, each
            sequence ends with a verified token: the last one before the call, or, if tokens could
            not move into an index, the last one of the round.

        Raises:
            RuntimeError: Another thread is using the session.
        """
        behind = self._behind(left, running, stops)
        if behind:
            self._run_round(left, behind, stops)
        return self._returned(left, running, stops)

    def _behind(self, left: int, running: Collection[int], stops: Collection[int]) -> set[int]:
        """Return the sequences that have not got their last token, whether it was returned or
        not."""
        waiting = self._waiting
        some = {row for row in running if len(waiting[row]) < left}
        return {row for row in some if not any(token in stops for token in waiting[row])}

    def _run_round(self, left: int, behind: Collection[int], stops: Collection[int]) -> None:
        """Run one round, or one decode step. Its tokens are appended to `_waiting`."""
        most = left - min(len(self._waiting[row]) for row in behind)
        count = min(self._length.next(), most - 1)
        with self._session.exclusive():
            if self._full:
                found = self._verify_fully(count, behind, stops)
            elif self._drafter is not None and count > 0:
                found = self._verify_written(self._drafter, count, behind, stops)
            else:
                drafts = None if self._drafter is not None else self._look_up(count, behind)
                if drafts is None:
                    self._step_alone()
                    made = [self._read(self._session.token[:, 0])]
                    count, found = 0, Round.together(made, 0, 0)
                    if self._drafter is not None:
                        self._drafter.append(torch.tensor(found.tokens))
                else:
                    count = drafts.shape[1]
                    found = self._verify(drafts, [], behind, stops)
            # in the mean over the sequences, as a whole number of all rounds so far
            accepted = [kept for _, kept in found.accepted]
            self._accepted += sum(accepted) / max(len(accepted), 1)
            more = int(self._accepted + 1e-6) - self._counted
            self._session.count_drafts(count, more)
            self._counted += more
        self._length.saw_all(found.accepted)
        for row in behind:
            self._waiting[row] += found.tokens[row]
            for token in found.tokens[row]:
                self._known[row].append(token)

    def _returned(
        self, left: int, running: Collection[int], stops: Collection[int]
    ) -> list[Tensor]:
        """Take the tokens that all running sequences have got."""
        waiting, made = self._waiting, list[Tensor]()
        behind = self._behind(left, running, stops)
        if behind:
            count = min(len(waiting[row]) for row in behind)
        else:  # the answers end with the last stop token, or with the limit
            ends = [_end(waiting[row], stops) for row in running]
            count = min(max(ends), left)
        for place in range(count):
            # a sequence that has ended gets any token
            tokens = [row[place] if place < len(row) else 0 for row in waiting]
            made.append(torch.tensor(tokens))
        self._waiting = [row[count:] for row in waiting]
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

        All sequences of the batch get drafts of the same length. A batch that advances together
        gets none unless each sequence has one.
        """
        if count < 1:
            return None
        drafts = {row: self._known[row].draft(count) for row in running}
        found = [bool(draft) for draft in drafts.values()]
        if not any(found) or not (all(found) or self._apart(count + 1)):
            return None
        self._own = {row: len(draft) for row, draft in drafts.items()}
        longest = max(map(len, drafts.values()))
        some = [drafts.get(row, []) for row in range(len(self._known))]
        # fillers are for sequences that have ended, or have no draft or a shorter one
        rows = [[*draft, *[0] * (longest - len(draft))] for draft in some]
        return torch.tensor(rows, device=self._session.token.device)

    def _apart(self, tokens: int) -> bool:
        """Return True if the next step of `tokens` tokens keeps the tokens that each sequence of a
        batch accepts, because a CUDA graph runs it and no token is sampled."""
        graphs = self._graphs
        served = graphs is not None and graphs.serves(tokens) and not self._sampler.samples
        return served and self._session.capture_refusal(tokens) is None

    # Drafts of a smaller model, verified by the attention of the session

    def _verify_written(
        self, drafter: Drafter, count: int, running: Collection[int], stops: Collection[int]
    ) -> Round:
        """Let the smaller model draft `count` tokens, and verify them."""
        self._own = {row: count for row in running}
        with drafter.drafting(count, self._sampler, self._session.token.device) as draft:
            found = self._verify(*draft, running, stops)
            drafter.append(torch.tensor(found.tokens))
        return found

    # What these have in common

    def _judge(self, drafts: Tensor, distributions: Sequence[Tensor]) -> Judge:
        """Return a function that chooses tokens, and decides whether they are those drafted.

        Args:
            drafts: Int64 `[B, n]`.
            distributions: The probabilities from which each draft was sampled, `[B, V]` each. With
                [], each token is chosen or sampled as without a draft, and the draft is accepted if
                it is that token. This is rejection sampling with a draft distribution that is a
                point mass. It uses the random numbers of decode steps of one token.
        """
        session, sampler = self._session, self._sampler

        def judge(place: int, logits: Tensor) -> tuple[Tensor, Tensor]:
            if place == drafts.shape[1] or not distributions:
                token = session.agreed(sampler.choose(logits))
                return token, _same(token, drafts, place)
            wanted, drafted = sampler.probabilities(logits), distributions[place]
            chance = sampler.uniform(len(drafts), drafts.device)
            given = wanted, drafted, drafts[:, place], chance
            token, accepted = rejection_sample(*given, draw=sampler.draw)
            return session.agreed(token), session.agreed(accepted.long()).bool()

        return judge

    def _verify(
        self,
        drafts: Tensor,
        distributions: Sequence[Tensor],
        running: Collection[int],
        stops: Collection[int],
    ) -> Round:
        """Verify drafts by the attention of the session. The arguments are those of `_judge`."""
        judge = self._judge(drafts, distributions)
        if self._graphs is not None:
            replayed = self._verify_replayed(self._graphs, drafts, judge, running, stops)
            if replayed is not None:
                found, last = replayed
                self._session.token.copy_(last[:, None])
                return found
        with self._session.speculating(drafts.shape[1] + 1):
            return self._accept(drafts, judge, running, stops, full=False)

    def _verify_replayed(
        self,
        graphs: DraftGraphs,
        drafts: Tensor,
        judge: Judge,
        running: Collection[int],
        stops: Collection[int],
    ) -> tuple[Round, Tensor] | None:
        """Do what `_verify` does in a CUDA graph, or return None if there can be none.

        Returns the result, and the last token of each sequence, int64 `[B]`, which the caller must
        write to `session.token`.
        """
        session, before = self._session, self._session.length
        first = session.token.clone()
        try:
            scores = graphs.score(torch.cat([session.token, drafts], dim=1))
            if scores is None:
                return None
            apart = self._drafter is None or len(first) == 1
            if scores.chosen is None or not apart:
                made, kept = self._judged(scores.logits, drafts.shape[1], judge, running, stops)
                graphs.count(len(made), scores)
                found, last = Round.together(made, drafts.shape[1], kept), made[-1]
            else:
                found = self._kept_apart(graphs, scores, drafts, running, stops)
                last = torch.tensor([row[-1] for row in found.tokens])
        except BaseException:
            session.undo_replay(before)
            session.token.copy_(first)
            raise
        return found, last

    def _kept_apart(
        self,
        graphs: DraftGraphs,
        scores: Scores,
        drafts: Tensor,
        running: Collection[int],
        stops: Collection[int],
    ) -> Round:
        """Keep the drafts that each sequence accepts, after a replay that chose the most likely
        tokens."""
        chosen, tokens = scores.chosen, list[list[int]]()
        accepted = list[tuple[int, int]]()
        assert chosen is not None
        for row, draft in enumerate(drafts.tolist()):
            count, own = 0, chosen[row]
            while count < len(draft) and own[count] == draft[count] and own[count] not in stops:
                count += 1
            tokens.append([*own[: count + 1]])
            if row in running and (drafted := self._own.get(row, 0)):
                # a stop token may end an accepted draft
                kept = count + (count < len(draft) and own[count] == draft[count])
                accepted.append((drafted, min(kept, drafted)))
        most = max(len(tokens[row]) for row in running)
        for row in {*range(len(tokens))} - {*running}:
            tokens[row] = [*chosen[row][:most]]  # any tokens, as many as the longest
        counts = [len(row) for row in tokens]
        graphs.count(most if len({*counts}) == 1 else counts, scores)
        return Round(tokens, accepted)

    # Drafts that the model writes with the index, verified by full attention

    def _verify_fully(self, count: int, running: Collection[int], stops: Collection[int]) -> Round:
        """Draft `count` tokens with the index, and verify them by full attention.

        Source: Leviathan et al., Fast Inference from Transformers via Speculative Decoding (ICML
        2023), algorithm 1.
        """
        session, sampler = self._session, self._sampler
        start, first = session.length, session.token.clone()
        with session.speculating(count + 1):
            tokens, distributions = [first[:, 0]], list[Tensor]()
            try:
                for _ in range(count):
                    if self._draft is not None and not sampler.samples:
                        self._draft()  # reads `session.token`, which is the last of `tokens`
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
            self._own = {row: count for row in running}
            judge = self._judge(drafts, distributions)
            return self._accept(drafts, judge, running, stops, full=True)

    # What all have in common

    def _accept(
        self,
        drafts: Tensor,
        judge: Judge,
        running: Collection[int],
        stops: Collection[int],
        *,
        full: bool,
    ) -> Round:
        """Run the forward pass of a draft, and keep the tokens up to the first rejected one.

        A batch advances by the number of tokens that all running sequences accept. Where another
        sequence has rejected a draft, a sequence that accepted it has that draft as its next token.
        So every token has the verifier's distribution.
        """
        session, start, count = self._session, self._session.length, drafts.shape[1]
        inputs = torch.cat([session.token, drafts], dim=1)
        if full and self._graphs is not None:
            replayed = self._verify_replayed(self._graphs, drafts, judge, running, stops)
            if replayed is not None:
                found, last = replayed
                session.observe(inputs[:, : session.length - start])
                session.token.copy_(last[:, None])
                return found
        logits = session.score(inputs, full=full)
        made, kept = self._judged(logits, count, judge, running, stops)
        session.keep(start + len(made))
        session.observe(inputs[:, : len(made)])
        session.token.copy_(made[-1][:, None])
        return Round.together(made, count, kept)

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


def _end(tokens: Sequence[int], stops: Collection[int]) -> int:
    """Return the number of tokens up to the first stop token, or of all if there is none."""
    places = (place for place, token in enumerate(tokens, 1) if token in stops)
    return next(places, len(tokens))


def _same(token: Tensor, drafts: Tensor, place: int) -> Tensor:
    """Return bool `[B]`: whether the tokens are those drafted for a position.

    Behind the last drafted position, there is nothing to accept.
    """
    if place == drafts.shape[1]:
        return torch.zeros_like(token, dtype=torch.bool)
    return token == drafts[:, place]
