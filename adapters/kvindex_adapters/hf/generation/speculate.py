"""`Speculated`: a decoding loop for `model.generate` whose steps verify several drafted tokens.

transformers has assisted decoding of its own, which reads a prompt in one forward pass and needs an
empty cache. This loop works with prompts in chunks and with caches that contain tokens, and its
drafts can be written with the index and verified by full attention.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.cache_utils import DynamicSlidingWindowLayer, LinearAttentionCacheLayerMixin
from transformers.generation.stopping_criteria import StopStringCriteria
from transformers.generation.streamers import BaseStreamer

from kvindex.layer import AttentionLayer
from kvindex_adapters.common.speculation import (
    Acceptance,
    DraftLength,
    PromptLookup,
    Speculation,
    check_verifiable,
    draft_cost,
    model_cost,
    rejection_sample,
    resized,
)
from kvindex_adapters.common.unsupported import UnsupportedError
from kvindex_adapters.hf.cache.cache import IndexCache
from kvindex_adapters.hf.generation.prefill import prefill, vocabulary_of
from kvindex_adapters.hf.graph.run_ahead import OTHER_LOOPS, option_of
from kvindex_adapters.hf.model.cache_argument import CACHE, takes_cache
from kvindex_adapters.hf.model.info import text_positions
from kvindex_adapters.hf.model.rotary import length_dependent

FUNCTIONS = {"logits_processor", "stopping_criteria", "prefix_allowed_tokens_fn"}
"""Options of `model.generate` that this loop supports, although `RunAhead` does not. It calls the
functions with drafted tokens, some of which are rejected later."""

MISSING = -1e30
"""Logit of tokens that only the larger model has, in drafts of the smaller one. Such a token is
chosen only if no other one is possible.

It is not -inf. If logits processors forbid all other tokens, there would be nothing to choose, and
a processor that adds to a multiple of a logit would make NaN of it.
"""

Draft = tuple[Tensor, list[Tensor]]
"""Drafted tokens, int64 `[1, n]`, and the probabilities `[1, V]` from which each was sampled, or []
if they are no samples."""

OFFSET = 2
"""Largest number of embeddings before that of the first position, in a table of positions."""

NEUTRAL: dict[str, tuple[Any, ...]] = {
    "use_cache": (None, True),
    "guidance_scale": (None, 1),
    "watermarking_config": (None,),
}
"""Further options of `model.generate` that this loop does not support, and the values with which
they have no effect. The logits processor of `guidance_scale` has a cache of its own, from which it
cannot remove rejected tokens, and a watermark may depend on the tokens that its processor has
seen."""

WAITING = 2
"""Largest number of tokens that a round appends before the draft of a smaller model: the last token
of a draft that was accepted as a whole, and the token after it."""


def speculating_options(
    model: PreTrainedModel,
    tokenizer: Any,
    cache: Any,
    streamer: BaseStreamer,
    options: Mapping[str, Any],
    speculation: Speculation,
    drafter: Drafter | None = None,
) -> tuple[dict[str, Any], Speculated]:
    """Extend options of `model.generate` so that it speculates.

    Args:
        model: The model.
        tokenizer: The model's tokenizer, for stop strings.
        cache: The cache to be passed to `model.generate`.
        streamer: The streamer, which must also be passed to `model.generate`.
        options: The caller's options of `model.generate`.
        speculation: How to speculate.
        drafter: Writes drafts with a smaller model, or None.

    Returns:
        The caller's options and the added options, and the loop, which counts accepted tokens.

    Raises:
        ValueError: An option needs another decoding loop.
        UnsupportedError: Tokens cannot be removed from the cache of this model.
    """
    for name in (*OTHER_LOOPS, *NEUTRAL):
        value = option_of(model, options, name)
        if name not in FUNCTIONS and value not in NEUTRAL.get(name, (None, False)):
            raise ValueError(
                f"speculative_tokens: got a value together with {name}={value!r}; allowed is only "
                "one of them"
            )
    check_removable(model, cache)
    loop = Speculated(cache, streamer, speculation, drafter)
    made: dict[str, Any] = {**options, "custom_generate": loop.decode}
    strings = option_of(model, options, "stop_strings")
    if strings is not None:  # transformers does not pass the tokenizer to a custom decoding loop
        made["stop_strings"] = None
        criteria = list(options.get("stopping_criteria") or [])
        made["stopping_criteria"] = [*criteria, StopStringCriteria(tokenizer, strings)]
    return made, loop


def check_removable(model: PreTrainedModel, cache: Any, name: str = "speculative_tokens") -> None:
    """Raise UnsupportedError if rejected tokens cannot be removed from a cache.

    `name` is the argument that the message names.
    """
    why = None
    modules = model.get_decoder(), model.base_model, model
    decoder = next((one for one in modules if takes_cache(one)), None)
    if decoder is None:
        why = "a state outside of the KV cache"
    elif any(vars(part).get("is_causal") is False for part in decoder.modules()):
        why = "attention to later tokens"
    elif any(isinstance(layer, LinearAttentionCacheLayerMixin) for layer in cache.layers):
        why = "layers with linear attention, which overwrite their state"
    elif any(isinstance(layer, DynamicSlidingWindowLayer) for layer in cache.layers):
        why = "sliding-window layers, which discard older tokens"
    elif length_dependent(model):
        why = "rotary frequencies that depend on the length of the sequence"
    if why is not None:
        raise UnsupportedError(f"{name}: got a {type(model).__name__} with {why}; allowed is None")


class Speculated:
    """A custom decoding loop for one answer. Pass its method `decode` as `custom_generate`.

    Args:
        cache: The cache.
        streamer: A transformers streamer, which gets each token of the answer once.
        speculation: How to speculate.
        drafter: Writes drafts with a smaller model, or None.
    """

    def __init__(
        self,
        cache: Any,
        streamer: BaseStreamer,
        speculation: Speculation,
        drafter: Drafter | None = None,
    ) -> None:
        self._cache, self._streamer, self._full = cache, streamer, speculation.full
        self._drafter = drafter
        self._speculation, self._length = speculation, DraftLength(speculation)
        self.unread = 0
        """Number of tokens at the end of the prompt that are not in the cache yet."""
        self.acceptance = Acceptance()
        """How many drafted tokens were accepted so far."""

    def decode(
        self,
        model: Any,
        input_ids: Tensor,
        logits_processor: Any,
        stopping_criteria: Any,
        generation_config: Any,
        **given: Any,
    ) -> Tensor:
        """Generate an answer. `model.generate` calls this with the arguments of its own loop.

        Args:
            model: The model.
            input_ids: Int64 `[1, N]`, the ids of the prompt.
            logits_processor: Transformers' logits processors, which are applied along the drafts.
            stopping_criteria: Transformers' stopping criteria, which must include the maximum
                length. They get no scores.
            generation_config: Transformers' generation configuration.
            **given: Keyword arguments for the model's forward pass, which are not used.

        Returns:
            Int64 `[1, M]`, the ids of prompt and answer.

        Raises:
            ValueError: Full attention cannot verify drafts of this cache.
        """
        rest = input_ids[:, input_ids.shape[1] - self.unread :]
        with self.fully(self._full):
            logits = forward(model, self._cache, rest, logits_to_keep=1)
        if self._full:
            check_verifiable(layers_of(self._cache))
            cost = draft_cost(layers_of(self._cache), bytes_of(model))
            self._length = DraftLength(self._speculation, cost)
        elif self._drafter is not None:
            cost = model_cost(self._drafter.nbytes, bytes_of(model))
            self._length = DraftLength(self._speculation, cost)
        how: Any = dict(sampled=generation_config.do_sample, vocabulary=logits.shape[-1])
        judge = _Judge(logits_processor, stopping_criteria, **how)
        token = judge.choose(input_ids, logits[:, -1])
        ids, made = torch.cat([input_ids, token], dim=1), [token]
        lookup = PromptLookup(ids[0].tolist())
        while True:
            for token in made:
                self._streamer.put(token[0].cpu())
            if judge.ends(ids):
                break
            count = min(self._length.next(), stopping_criteria.max_length - ids.shape[1] - 1)
            if self._drafter is not None:
                count = min(count, self._drafter.most(ids.shape[1]))
            made = self._round(model, ids, judge, lookup, count)
            ids = torch.cat([ids, *made], dim=1)
            for token in made:
                lookup.append(int(token))
        self._streamer.end()
        return ids

    def _round(
        self, model: Any, ids: Tensor, judge: _Judge, lookup: PromptLookup, count: int
    ) -> list[Tensor]:
        """Draft up to `count` tokens and verify them. Return the next tokens, int64 `[1, 1]` each.

        If this raises an exception, the cache has the tokens that it had before.
        """
        if self._drafter is not None and count > 0:
            with self._drafter.drafting(ids, judge, count) as draft:
                made = self._verified(model, ids, judge, draft)
                self._drafter.keep(ids.shape[1] + len(made) - 1)
            return made
        if self._full:
            return self._verified(model, ids, judge, None, max(count, 0))
        drafts = [] if self._drafter is not None or count < 1 else lookup.draft(count)
        drafted = torch.tensor([drafts], dtype=ids.dtype, device=ids.device)
        return self._verified(model, ids, judge, (drafted, []))

    def _verified(
        self, model: Any, ids: Tensor, judge: _Judge, draft: Draft | None, count: int = 0
    ) -> list[Tensor]:
        """Verify a draft. None means that the model itself writes one of `count` tokens with the
        index."""
        cache, start = self._cache, self._cache.get_seq_length()
        tokens = count if draft is None else draft[0].shape[1]
        with speculating(cache, tokens + 1):
            try:
                if draft is None:
                    draft = write(model, cache, ids, judge, count)
                    keep(cache, start)
                with self.fully(self._full):
                    logits = forward(model, cache, torch.cat([ids[:, -1:], draft[0]], dim=1))
                made, accepted = judge.accept(ids, logits, *draft)
                keep(cache, start + len(made))
            except BaseException:
                keep(cache, start)
                raise
        self.acceptance = self.acceptance.counted(tokens, accepted)
        self._length.saw(tokens, accepted)
        return made

    @contextmanager
    def fully(self, full: bool = True) -> Iterator[None]:
        """Context manager in which decoded tokens attend to all tokens, if `full` is True."""
        with ExitStack() as stack:
            for layer in layers_of(self._cache) if full else ():
                stack.enter_context(layer.attending_fully())
            yield


class Drafter:
    """Writes drafts with a smaller model, in a cache of its own.

    Args:
        model: The smaller model.
        cache: An empty cache of this model.
        chunk: Number of tokens of a prompt that are read at a time.
    """

    def __init__(self, model: PreTrainedModel, cache: Any, chunk: int) -> None:
        check_removable(model, cache, "draft_model")
        self._model, self._cache, self._chunk = model, cache, chunk
        self._positions = learned_positions(model)
        self._last = (vocabulary_of(model) or sys.maxsize) - 1  # the highest id that the model has

    def most(self, length: int) -> int:
        """Return the largest number of tokens to draft after `length` tokens, or 0 for none.

        It is limited if the model has an embedding for each position.
        """
        # the last drafted token is not read
        return sys.maxsize if self._positions is None else max(self._positions - length + 1, 0)

    @property
    def nbytes(self) -> int:
        """Bytes of the model's weights."""
        return bytes_of(self._model)

    @contextmanager
    def drafting(self, ids: Tensor, judge: _Judge, count: int) -> Iterator[Draft]:
        """Context manager that yields a draft of `count` tokens, at least 1.

        Call `keep` in the `with` block. An error leaves the cache in an unknown state.

        Args:
            ids: Int64 `[1, N]`, all tokens that are verified.
            judge: Chooses the tokens, with the logits processors of the larger model.
            count: Number of tokens of the draft.
        """
        model, cache = self._model, self._cache
        # In place of a token that this model does not have, it reads the last one that it has. This
        # changes only the draft: the larger model verifies it, and reads the true tokens.
        missing = ids[0, cache.get_seq_length() :].clamp(max=self._last).to(model.device)
        if len(missing) > WAITING:  # the prompt; otherwise the tokens that the last round gave
            given: Any = dict(stop=len(missing) - 1, chunk=self._chunk)
            prefill(model, missing, cache, **given)
            missing = missing[-1:]
        with speculating(cache, WAITING):
            own: Any = dict(unread=len(missing), last=self._last)
            yield write(model, cache, ids, judge, count, **own)

    def keep(self, length: int) -> None:
        """Remove the tokens of the cache from position `length` on."""
        keep(self._cache, length)


class _Judge:
    """Chooses tokens from logits, and decides which drafted tokens are accepted.

    Args:
        processors: Transformers' logits processors.
        criteria: Transformers' stopping criteria.
        sampled: Whether tokens are sampled.
        vocabulary: Number of tokens for which the model computes logits, `V`. The processors get
            as many logits also for a smaller model that has fewer or more tokens.
    """

    def __init__(self, processors: Any, criteria: Any, *, sampled: bool, vocabulary: int) -> None:
        self._processors, self._criteria, self.sampled = processors, criteria, bool(sampled)
        self._vocabulary = vocabulary

    def probabilities(self, ids: Tensor, logits: Tensor) -> Tensor:
        """Return the probabilities `[1, V]` of the token after `ids`, with all processors."""
        scores: Tensor = self._scores(ids, logits).softmax(-1)
        return scores

    def choose(self, ids: Tensor, logits: Tensor) -> Tensor:
        """Return the token after `ids`, int64 `[1, 1]`, from logits `[1, V]`."""
        if self.sampled:
            return _draw(self.probabilities(ids, logits))[:, None]
        return self._scores(ids, logits).argmax(-1, keepdim=True)

    def ends(self, ids: Tensor) -> bool:
        """Return True if the answer ends with the last token of `ids`, int64 `[1, N]`."""
        return bool(self._criteria(ids, None))

    def accept(
        self, ids: Tensor, logits: Tensor, drafts: Tensor, distributions: list[Tensor]
    ) -> tuple[list[Tensor], int]:
        """Decide which drafts are accepted.

        Args:
            ids: Int64 `[1, N]`, the tokens before the drafts.
            logits: `[1, n + 1, V]`, after the last token of `ids` and after each draft.
            drafts: Int64 `[1, n]`.
            distributions: Probabilities `[1, V]` from which each draft was sampled. [] if drafts
                are no samples, and are accepted where the chosen token equals them.

        Returns:
            The next tokens, int64 `[1, 1]` each: the accepted drafts up to the first rejected one,
            and the token in its place. And the number of accepted drafts.
        """
        made, accepted, count = list[Tensor](), 0, drafts.shape[1]
        for place in range(count + 1):
            if place == count or not distributions:
                token = self.choose(ids, logits[:, place])
                agrees = place < count and bool(token == drafts[:, place])
            else:
                wanted = self.probabilities(ids, logits[:, place])
                chance = torch.rand(1, device=wanted.device)
                given = wanted, distributions[place], drafts[:, place], chance
                found, same = rejection_sample(*given, draw=_draw)
                token, agrees = found[:, None], bool(same)
            made.append(token)
            accepted += agrees
            ids = torch.cat([ids, token], dim=1)
            if not agrees or self.ends(ids):
                break
        return made, accepted

    def _scores(self, ids: Tensor, logits: Tensor) -> Tensor:
        own = logits.to(ids.device, torch.float32, copy=True)
        scores: Tensor = self._processors(ids, resized(own, self._vocabulary, missing=MISSING))
        return scores


def write(
    model: Any,
    cache: Any,
    ids: Tensor,
    judge: _Judge,
    count: int,
    *,
    unread: int = 1,
    last: int = sys.maxsize,
) -> Draft:
    """Write tokens with a model and its cache.

    Args:
        model: The model.
        cache: Its cache, which contains all tokens of `ids` but the last ones.
        ids: Int64 `[1, N]`, the tokens before the draft.
        judge: Chooses the tokens.
        count: Number of tokens to write.
        unread: Number of tokens at the end of `ids` that are not in the cache.
        last: The highest id that the model reads. It reads this id in place of higher ones.

    Returns:
        The tokens, int64 `[1, count]`, and the probabilities `[1, V]` from which each was sampled,
        or [] without sampling.
    """
    written, distributions = ids, list[Tensor]()
    for _ in range(count):
        some = written[:, -unread:].clamp(max=last).to(model.device)
        logits = forward(model, cache, some)[:, -1]
        if judge.sampled:
            distributions.append(judge.probabilities(written, logits))
            token = _draw(distributions[-1])[:, None]
        else:
            token = judge.choose(written, logits)
        written, unread = torch.cat([written, token], dim=1), 1
    return written[:, ids.shape[1] :], distributions


def learned_positions(model: PreTrainedModel) -> int | None:
    """Return the number of positions for which a model has learned embeddings, or None if it has
    no such embeddings, for example because it rotates keys."""
    config = model.config.get_text_config(decoder=True).to_dict()
    most, tokens = config.get("max_position_embeddings"), model.get_input_embeddings()
    most = config.get("n_positions") if most is None else most
    if most is None:
        return None
    tables = [part for part in model.modules() if isinstance(part, nn.Embedding)]
    sizes = [part.num_embeddings for part in tables if part is not tokens]
    return int(most) if any(most <= size <= most + OFFSET for size in sizes) else None


def bytes_of(model: PreTrainedModel) -> int:
    """Return the bytes of a model's weights."""
    return sum(one.nbytes for one in model.parameters())


def layers_of(cache: Any) -> list[AttentionLayer]:
    """List the layers with an index of a cache."""
    return cache.attention_layers() if isinstance(cache, IndexCache) else []


def keep(cache: Any, length: int) -> None:
    """Remove the tokens of a cache from position `length` on."""
    if (removed := cache.get_seq_length() - length) > 0:
        cache.crop(-removed)


@contextmanager
def speculating(cache: Any, tokens: int) -> Iterator[None]:
    """Context manager in which steps of up to `tokens` tokens search and can be removed."""
    with ExitStack() as stack:
        for layer in layers_of(cache):
            stack.enter_context(layer.speculating(tokens))
        yield


def forward(model: Any, cache: Any, ids: Tensor, **more: Any) -> Tensor:
    """Append tokens int64 `[1, T]` to a cache. Return their logits `[1, T, V]`.

    `more` are further keyword arguments for the model.
    """
    start = cache.get_seq_length()
    positions = text_positions(model, start, start + ids.shape[1])
    if positions is not None:
        more["position_ids"] = positions
    more[CACHE] = cache
    output = model(input_ids=ids, use_cache=True, return_dict=True, **more)
    logits: Tensor = output.logits
    return logits


def _draw(weights: Tensor) -> Tensor:
    """Sample a token int64 `[1]` with probabilities proportional to weights `[1, V]`, with the
    random numbers of transformers' own loop."""
    return torch.multinomial(weights, num_samples=1)[:, 0]
