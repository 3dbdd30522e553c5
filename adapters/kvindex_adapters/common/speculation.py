"""Speculation: drafts of the next tokens, their length, and how many of them were accepted."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary, ref

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import pad

from kvindex.core import check
from kvindex.core.capability import capability
from kvindex.core.protocol import PlacesRows, ReportsRowBytes
from kvindex.layer import AttentionLayer
from kvindex_adapters.common.unsupported import UnsupportedError

AUTO = "auto"
"""Value of `speculative_tokens` that chooses the length of each draft by the acceptance seen."""

VERIFIERS = ("index", "full")
"""Values of `verify`: drafts are verified by attention with the index, or by full attention."""

MOST = {"index": 15, "full": 31}
"""Longest draft with `speculative_tokens="auto"`, by `verify`. The decoder captures graphs for
steps of up to one token more."""

LONGEST, SHORTEST = 4, 2
"""Length of the n-grams that prompt lookup compares: the longest that matches is used."""

COST = 0.1
"""Assumed time by which one more draft makes the verification longer, relative to a step without
drafts. Drafts of prompt lookup take no other time."""

BUS = 64
"""Assumed time to read a byte of host memory from a GPU, relative to a byte of its own memory.

It is 90 on an H200, and about 40 to 80 on other GPUs with a PCIe bus.
"""

SEARCHED = 1 / 16
"""Assumed bytes that a decode step with an index reads for each byte of its rows."""

PAUSE = 15
"""Number of rounds without a draft after which "auto" tries a draft model again, with one token."""

MEMORY = 0.9
"""Weight of the earlier drafts after each new one, when "auto" averages the acceptance."""


@dataclass(frozen=True)
class Speculation:
    """How a generation speculates.

    Args:
        tokens: Number of drafted tokens per round, or "auto".
        verify: "index" for drafts by prompt lookup, which attention with the index verifies, or
            "full" for drafts that the model writes with the index and full attention verifies.
        draft_model: Whether a smaller model writes the drafts, in place of prompt lookup.
    """

    tokens: int | str
    verify: str
    draft_model: bool = False

    @property
    def full(self) -> bool:
        """True if full attention verifies the drafts."""
        return self.verify == "full"

    def __str__(self) -> str:
        count = "a number by the acceptance seen" if self.tokens == AUTO else f"up to {self.tokens}"
        if self.full:
            return f"{count} tokens drafted with the index, verified by full attention"
        who = "the draft model" if self.draft_model else "prompt lookup"
        return f"{count} tokens drafted by {who}, verified with the index"


def speculation_of(
    speculative_tokens: int | str | None, verify: str, *, draft_model: bool = False
) -> Speculation | None:
    """Check the options of speculation.

    Args:
        speculative_tokens: Number of tokens to draft per round, at least 1, "auto", or None for
            one token at a time.
        verify: "index" or "full".
        draft_model: Whether the caller passed a model that writes the drafts.

    Returns:
        The options, or None for one token at a time.

    Raises:
        ValueError: A value is not allowed, `verify` is "full" or there is a draft model without
            `speculative_tokens`, or there is a draft model and `verify` is "full".
    """
    check.one_of("verify", verify, VERIFIERS)
    if draft_model and verify == "full":
        raise ValueError(
            "draft_model: got a model together with verify='full', where the model itself writes "
            "the drafts with the index; leave out one of them"
        )
    if speculative_tokens is None:
        if draft_model:
            raise ValueError(
                "draft_model: got a model without speculative_tokens; pass speculative_tokens, a "
                "number of tokens to draft or 'auto', or leave out draft_model"
            )
        if verify == "full":
            raise ValueError(
                "verify: got 'full' without speculative_tokens; pass speculative_tokens, a number "
                "of tokens to draft or 'auto', or pass index=None for full attention alone"
            )
        return None
    if isinstance(speculative_tokens, str):
        if speculative_tokens != AUTO:
            raise ValueError(
                f"speculative_tokens: got {speculative_tokens!r}, allowed is an integer from 1 on, "
                "'auto', or None"
            )
    else:
        check.at_least("speculative_tokens", speculative_tokens, 1)
    return Speculation(speculative_tokens, verify, draft_model)


_EQUAL: WeakKeyDictionary[Any, ref[Any]] = WeakKeyDictionary()
"""Maps a model's tokenizer to the last draft model's tokenizer that had the same vocabulary. A
comparison of 150,000 tokens takes about half a second, too long for each turn of a chat."""


OTHER_DRAFTS = (
    "pass a draft model with the same vocabulary, such as a smaller model of the same family, "
    "or leave out draft_model, so that drafts are copied from the text so far"
)
"""End of the errors about vocabularies: what to do."""


def check_vocabularies(sizes: Sequence[int], tokenizers: Sequence[Any]) -> None:
    """Check that a draft model has the vocabulary of the model.

    Many families pad the embeddings and logits of their models to different sizes. So models whose
    tokenizers have the same vocabulary may have different sizes (`resized`). In a GGUF file, the
    tokenizer contains this padding, as tokens such as "[PAD151936]", which are not compared.

    Args:
        sizes: Numbers of tokens of the model and of the draft model, padding included.
        tokenizers: The tokenizers of the model and of the draft model. If one of them is None, only
            the sizes are compared.

    Raises:
        ValueError: The vocabularies differ.
    """
    model, draft = tokenizers
    if model is None or draft is None:
        if sizes[0] != sizes[1]:
            raise different_sizes(sizes, "both models have tokenizers with the same vocabulary")
        return
    if model is draft:
        return
    known = _EQUAL.get(model)
    if known is not None and known() is draft:
        return
    mine, theirs = model.get_vocab(), draft.get_vocab()
    differing = sorted(named(mine).items() ^ named(theirs).items())
    if differing:
        token = differing[0][0]
        raise ValueError(
            f"draft_model: got the tokenizer {draft.name_or_path!r}, in which the token {token!r} "
            f"has the id {theirs.get(token)}, for a model with the tokenizer "
            f"{model.name_or_path!r}, in which it has the id {mine.get(token)}; {OTHER_DRAFTS}"
        )
    _EQUAL[model] = ref(draft)


def named(vocabulary: Mapping[str, int]) -> dict[str, int]:
    """Return a vocabulary without the tokens by which llama.cpp pads it in a GGUF file, which have
    names such as "[PAD151936]" for the id 151936."""
    return {token: id for token, id in vocabulary.items() if token != f"[PAD{id}]"}


def different_sizes(sizes: Sequence[int], allowed: str) -> ValueError:
    """Return the error for a draft model with another number of tokens.

    `sizes` are those of the model and of the draft model. `allowed` says in which case they may be
    different.
    """
    large, small = sizes
    return ValueError(
        f"draft_model: got a model with a vocabulary of {small:,} tokens for a model with "
        f"{large:,}; different sizes are allowed if {allowed}; {OTHER_DRAFTS}"
    )


def resized(logits: Tensor, size: int, *, missing: float = float("-inf")) -> Tensor:
    """Convert logits of a draft model to the number of tokens of the model.

    The draft model then never chooses a token that the model does not have. And both give
    probabilities of one shape, for rejection sampling.

    Args:
        logits: `[..., V]`.
        size: Number of tokens of the model. Logits of further tokens are left out.
        missing: Logit of the tokens that the draft model does not have.

    Returns:
        Logits `[..., size]`.
    """
    more = size - logits.shape[-1]
    return pad(logits, (0, more), value=missing) if more > 0 else logits[..., :size]


@contextmanager
def about_draft_model() -> Iterator[None]:
    """Context manager in which a ValueError is about the draft model. Its message then says so."""
    try:
        yield
    except ValueError as error:
        kind = UnsupportedError if isinstance(error, UnsupportedError) else ValueError
        raise kind(
            f"draft_model: got a model that cannot write drafts with these options ({error}); pass "
            "another draft model, or leave out draft_model"
        ) from error


@dataclass(frozen=True)
class Acceptance:
    """How many drafted tokens were accepted.

    In a batch, the drafted tokens are those of one sequence, and the accepted ones the mean over
    the sequences that had not ended. If all sequences advance together, a drafted token counts as
    accepted if it was accepted in each of these.

    Args:
        steps: Decode steps, each of one token without a draft or of a verified draft.
        rounds: Steps that verified a draft.
        drafted: Drafted tokens of all rounds.
        accepted: Drafted tokens that became part of the answer.
    """

    steps: int = 0
    rounds: int = 0
    drafted: int = 0
    accepted: int = 0

    def counted(self, drafted: int, accepted: int) -> Acceptance:
        """Return these counts after one more step, with `drafted` tokens, 0 for no draft."""
        return Acceptance(
            self.steps + 1,
            self.rounds + (drafted > 0),
            self.drafted + drafted,
            self.accepted + accepted,
        )

    def since(self, before: Acceptance) -> Acceptance:
        """Return the counts of the steps after `before`, an earlier state of these counts."""
        return Acceptance(
            self.steps - before.steps,
            self.rounds - before.rounds,
            self.drafted - before.drafted,
            self.accepted - before.accepted,
        )

    @property
    def rate(self) -> float:
        """Accepted tokens, divided by the drafted tokens. 0 before the first draft."""
        return self.accepted / self.drafted if self.drafted else 0.0

    @property
    def tokens_per_step(self) -> float:
        """Mean number of new tokens of a decode step, 1 without accepted drafts."""
        return 1 + self.accepted / self.steps if self.steps else 1.0

    def __str__(self) -> str:
        return (
            f"{self.rounds} of {self.steps} steps verified drafts: {self.accepted} of "
            f"{self.drafted} drafted tokens accepted ({self.rate:.0%}), "
            f"{self.tokens_per_step:.2f} tokens per step"
        )


class DraftLength:
    """Chooses how many tokens to draft.

    "auto" estimates the probability `a` that a drafted token is accepted after the ones before it,
    and chooses the `n` that gives the most tokens per time: `(1 + a + … + a^n) / (1 + cost · n)`.
    With `verify="full"`, `n` may be 0: the next token is then computed by full attention alone.
    With a draft model, too: the next token is then computed without it, and one token is drafted
    after every `PAUSE` such rounds, because later text may be easier.

    Args:
        speculation: The options.
        cost: Time of one more draft, relative to a round without drafts (`draft_cost`,
            `model_cost`). None means `COST`.

    Source: Leviathan et al., Fast Inference from Transformers via Speculative Decoding (ICML 2023),
    theorem 3.8.
    """

    def __init__(self, speculation: Speculation, cost: float | None = None) -> None:
        self._tokens, self._cost = speculation.tokens, COST if cost is None else cost
        self._may_pause, self._idle = speculation.draft_model, 0
        free = not (speculation.full or speculation.draft_model)  # prompt lookup takes no time
        self._fewest, self._most = int(free), MOST[speculation.verify]
        # "auto" begins with a few tokens; full attention accepts most drafts of an index
        self._accepted, self._tried = (9.0, 10.0) if speculation.full else (2.0, 3.0)

    def next(self) -> int:
        """Return the number of tokens of the next draft."""
        if isinstance(self._tokens, int):
            return self._tokens
        rate, counts = self._accepted / self._tried, np.arange(self._most + 1)
        gains = np.cumsum(rate**counts) / (1 + self._cost * counts)
        best = self._fewest + int(gains[self._fewest :].argmax())
        return max(best, 1) if self._may_pause and self._idle >= PAUSE else best

    def saw(self, drafted: int, accepted: int) -> None:
        """Count a draft of `drafted` tokens, of which the first `accepted` were accepted."""
        self.saw_all([(drafted, accepted)])

    def saw_all(self, drafts: Iterable[tuple[int, int]]) -> None:
        """Count the drafts of a batch's sequences in one round, by their mean.

        Args:
            drafts: For each draft its length, and how many of its first tokens were accepted. A
                length of 0 stands for a round without a draft.
        """
        some = [(drafted, accepted) for drafted, accepted in drafts if drafted]
        self._idle = 0 if some else self._idle + 1
        if some:
            kept = sum(accepted for _, accepted in some) / len(some)
            wrong = sum(accepted < drafted for drafted, accepted in some) / len(some)
            self._accepted = MEMORY * self._accepted + kept
            self._tried = MEMORY * self._tried + kept + wrong


class PromptLookup:
    """Drafts tokens of one sequence by copying what followed its last tokens earlier.

    The longest n-gram (of `SHORTEST` to `LONGEST` tokens) at the end of the sequence that also
    occurs earlier is looked up. If it occurs several times, the newest occurrence is used.

    Args:
        ids: The token ids of the sequence so far.

    Source: Saxena, Prompt Lookup Decoding (2023), https://github.com/apoorvumang/prompt-lookup-decoding.
    """

    def __init__(self, ids: Sequence[int]) -> None:
        self._ids = np.array(ids, dtype=np.int64)
        self._length = len(self._ids)

    def __len__(self) -> int:
        """Return the number of tokens of the sequence."""
        return self._length

    def append(self, token: int) -> None:
        """Append one token to the sequence."""
        if self._length == len(self._ids):
            grown = np.empty(2 * self._length + 256, dtype=np.int64)
            grown[: self._length] = self._ids
            self._ids = grown
        self._ids[self._length] = token
        self._length += 1

    def draft(self, count: int) -> list[int]:
        """Return the next `count` tokens as they followed earlier, or [] if nothing matches.

        A copy that reaches the end of the sequence continues in the draft itself, so a repeated
        phrase is drafted at any length.
        """
        ids, last = self._ids[: self._length], self._length - 1
        if last < SHORTEST:
            return []
        ends = np.flatnonzero(ids[:last] == ids[last])  # positions of the n-grams' last token
        matched = 1
        while len(ends) and matched < LONGEST and matched <= last:
            earlier = ends[ends >= matched]
            earlier = earlier[ids[earlier - matched] == ids[last - matched]]
            if not len(earlier):
                break
            ends, matched = earlier, matched + 1
        if not len(ends) or matched < SHORTEST:
            return []
        first = int(ends[-1]) + 1
        copied = [int(token) for token in ids[first : first + count]]
        while len(copied) < count:
            copied.append(copied[len(copied) - (self._length - first)])
        return copied


def rejection_sample(
    wanted: Tensor,
    drafted: Tensor,
    tokens: Tensor,
    chance: Tensor,
    *,
    draw: Callable[[Tensor], Tensor],
) -> tuple[Tensor, Tensor]:
    """Sample from one distribution, given samples of another one.

    Args:
        wanted: Probabilities of the tokens to sample, float32 `[B, V]`.
        drafted: Probabilities from which `tokens` were sampled, float32 `[B, V]`.
        tokens: Int64 `[B]`.
        chance: Random numbers in [0, 1), float32 `[B]`.
        draw: Function that samples tokens int64 `[B]` with probabilities proportional to weights
            `[B, V]`.

    Returns:
        Samples of `wanted`, int64 `[B]`, and bool `[B]`, whether each is that of `tokens`.

    Source: Leviathan et al., Fast Inference from Transformers via Speculative Decoding (ICML 2023),
    section 2.3.
    """
    mine = wanted.gather(-1, tokens[:, None])[:, 0]
    theirs = drafted.gather(-1, tokens[:, None])[:, 0]
    accepted = chance * theirs < mine
    rest = (wanted - drafted).clamp_min(0)
    # equal distributions leave no rest, and then a rejection is only a rounding error
    rest = torch.where(rest.sum(-1, keepdim=True) > 0, rest, wanted)
    return torch.where(accepted, tokens, draw(rest)), accepted


def draft_cost(layers: Iterable[AttentionLayer], weights: int) -> float:
    """Estimate the time of a decode step with an index, relative to one with full attention.

    The estimate counts the bytes that each of them reads, and measures no time. So it is the same
    in every run with the same memory.

    Args:
        layers: The layers with an index.
        weights: Bytes of the model's weights that a decode step reads.

    Returns:
        A number above 0 and up to 1.
    """
    rows, full = 0.0, 0.0
    for layer in layers:
        index = layer.index
        placed = capability(index, PlacesRows)
        if placed is None:
            width = index.geometry.head_dim + index.geometry.value_dim
            count = len(index) * layer.batch_size * index.geometry.kv_heads
            rows, full = rows + (own := count * width * index.geometry.dtype.itemsize), full + own
            continue
        found = placed.placement()
        bus = BUS if index.geometry.device.type == "cuda" else 1
        rows += (found.device + found.host) * found.row_bytes
        full += (found.device + bus * found.host) * found.row_bytes
    return (weights + SEARCHED * rows) / max(weights + full, 1)


def model_cost(small: int, large: int) -> float:
    """Estimate the time of one more token that a draft model writes and that is then verified.

    Args:
        small: Bytes of weights that a decode step of the draft model reads.
        large: Bytes of weights that a decode step of the model reads.

    Returns:
        The time, relative to a decode step of the model.
    """
    return COST + small / max(large, 1)


def check_verifiable(layers: Iterable[AttentionLayer]) -> None:
    """Check that full attention can verify drafts that are written with an index.

    Args:
        layers: The layers with an index.

    Raises:
        ValueError: There is no such layer, or an index stores rows in a codec that loses precision,
            so that full attention cannot read the original keys and values.
    """
    indexed = list(layers)
    if not indexed:
        raise ValueError(
            "verify: got 'full' without an index, which writes the drafts; allowed with "
            "index=None is 'index', whose drafts full attention then verifies"
        )
    for layer in indexed:
        g, stored = layer.index.geometry, capability(layer.index, ReportsRowBytes)
        width = g.head_dim if g.value_in_key else g.head_dim + g.value_dim
        plain = width * g.dtype.itemsize
        if stored is not None and stored.row_bytes < plain:
            raise ValueError(
                f"verify: got 'full' with rows of {stored.row_bytes} bytes instead of {plain}, so "
                "full attention cannot read the original keys and values; pass the index without "
                "row_codec, or verify='index'"
            )
