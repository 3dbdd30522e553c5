"""`RunAhead`: decoding that launches the next tokens before the host has read the last ones.

Transformers' own loop asks after each token whether it was the last one, so that the device waits
for the host between any two. Here the host reads tokens from pinned memory up to `AHEAD` late. What
was launched after the last token of an answer is undone.
"""

from __future__ import annotations

from collections import deque
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers.generation.stopping_criteria import StopStringCriteria
from transformers.generation.streamers import BaseStreamer

from kvindex.core.restore import Restorable
from kvindex_adapters.common.parallel import waiting
from kvindex_adapters.common.token_ring import AHEAD, TokenRing
from kvindex_adapters.hf.cache.cache import IndexCache
from kvindex_adapters.hf.model.rotary import keeps_longest
from kvindex_adapters.hf.unsupported import ASSISTED

RUNS_AHEAD = {"cuda"}
"""Types of devices that work while the host does. Tests add `cpu`."""

CHECKPOINT = 16
"""Tokens between two checkpoints of the cache: as many are computed once more, at most, where an
answer ends before its greatest length. A checkpoint takes the host about as long as a token."""

OTHER_LOOPS = (
    *ASSISTED,
    *("penalty_alpha", "dola_layers", "constraints", "force_words_ids", "custom_generate"),
    # code of the caller's, which would see tokens that are cut
    *("logits_processor", "stopping_criteria", "prefix_allowed_tokens_fn"),
    "synced_gpus",
)
"""Options of `model.generate` that need transformers' own loops."""


def decoding_options(
    model: PreTrainedModel,
    tokenizer: Any,
    cache: Any,
    streamer: BaseStreamer,
    options: dict[str, Any],
) -> dict[str, Any]:
    """`options` of `model.generate`, and what else it takes to run ahead where that can be.

    cache: its `past_key_values`; the streamer is passed as such, too.
    """
    strings = _option(model, options, "stop_strings")
    if not _runs_ahead(model, cache, options):
        return options if strings is None else {**options, "tokenizer": tokenizer}
    more: dict[str, Any] = {"custom_generate": RunAhead(cache, streamer).decode}
    if strings is not None:  # transformers passes no tokenizer on to a loop of others
        more["stop_strings"] = None
        more["stopping_criteria"] = [StopStringCriteria(tokenizer, strings)]
    return {**options, **more}


def _runs_ahead(model: PreTrainedModel, cache: Any, options: dict[str, Any]) -> bool:
    if not isinstance(cache, IndexCache) or model.device.type not in RUNS_AHEAD:
        return False
    if keeps_longest(model):  # tokens that are cut would count
        return False
    others = any(_option(model, options, name) not in (None, False) for name in OTHER_LOOPS)
    return not others and _option(model, options, "use_cache") is not False


def _option(model: PreTrainedModel, options: dict[str, Any], name: str) -> Any:
    """Of an option of `model.generate`, as it would find it."""
    configs = options.get("generation_config"), model.generation_config
    values = [getattr(config, name, None) for config in configs]
    return options[name] if name in options else next((v for v in values if v is not None), None)


class RunAhead:
    """One answer of a model through a cache; `decode` is `model.generate`'s `custom_generate`.

    streamer: gets each token of the answer once, as in transformers' loop.
    """

    def __init__(self, cache: IndexCache, streamer: BaseStreamer) -> None:
        self._cache, self._streamer = cache, streamer
        # the last two: how many ids there were, arguments of the next token, and the cache
        self._checkpoints: deque[tuple[int, dict[str, Any], Any]] = deque(maxlen=2)
        self._generator_states: deque[tuple[int, Tensor]] = deque(maxlen=AHEAD + 2)

    def decode(
        self,
        model: Any,
        input_ids: Tensor,
        logits_processor: Any,
        stopping_criteria: Any,
        generation_config: Any,
        **given: Any,
    ) -> Tensor:
        """Ids int64 `[1, N]` of prompt and answer, by the arguments of transformers' loop.

        The same tokens for the same seed, which leave the same cache. stopping_criteria: look at
        ids alone, on the CPU; one is of the greatest length. Raises RuntimeError for probabilities
        that are no numbers, RankError where another process is gone, and what model and streamer
        raise.
        """
        sampled, device = bool(generation_config.do_sample), input_ids.device
        start, limit = input_ids.shape[1], stopping_criteria.max_length
        ids, seen = (_with_room(input_ids.to(at), limit) for at in (device, "cpu"))
        outputs = model._prefill(input_ids, generation_config, given)
        ring = TokenRing(2 if sampled else 1, device, **waiting(self._cache.indexes()))
        ahead = AHEAD if self._goes_back() else 0
        given, made, read, ended = _without_mask(given), start, start, False
        try:
            with model._optimize_model_for_decode():
                while not ended:
                    while made < limit and made - read <= min(read - start, ahead):
                        if made > start:
                            if ahead:
                                self._add_checkpoint(made, given)
                            outputs = _forward(model, ids[:, :made], given)
                        given = model._update_model_kwargs_for_generation(outputs, given)
                        logits = outputs.logits[:, -1].to(device, torch.float32, copy=True)
                        chosen = _next_token(logits_processor(ids[:, :made], logits), sampled)
                        ids[:, made], made = chosen[0], made + 1
                        ring.put(chosen)
                        if sampled:
                            self._generator_states.append((made, _generator(device).get_state()))
                        del outputs
                    token, *wrong = ring.take().tolist()
                    if any(wrong):
                        raise RuntimeError("logits: got NaN or infinity, allowed are numbers")
                    seen[0, read], read = token, read + 1
                    ended = bool(stopping_criteria(seen[:, :read], None))
                    self._streamer.put(seen[0, read - 1 : read].clone())
                if made > read:
                    self._cut(model, ids, read)
        finally:
            ring.wait()
        self._streamer.end()
        return ids[:, :read]

    def _goes_back(self) -> bool:
        """Whether all layers can be again what they were at a checkpoint."""
        indexes = self._cache.indexes()
        return not self._cache.overwrites and all(isinstance(one, Restorable) for one in indexes)

    def _add_checkpoint(self, made: int, given: dict[str, Any]) -> None:
        """A checkpoint before the next token, if the last one is old."""
        if not self._checkpoints or made - self._checkpoints[-1][0] >= CHECKPOINT:
            self._checkpoints.append((made, dict(given), self._cache.checkpoint()))

    def _cut(self, model: Any, ids: Tensor, read: int) -> None:
        """Undo what came after the first `read` ids, as if the last of them had not been read."""
        made, given, before = next(one for one in reversed(self._checkpoints) if one[0] <= read)
        self._cache.rollback(before)
        for length in range(made, read):
            outputs = _forward(model, ids[:, :length], given)
            given = model._update_model_kwargs_for_generation(outputs, given)
        for made, state in self._generator_states:
            if made == read:
                _generator(ids.device).set_state(state)


def _with_room(ids: Tensor, length: int) -> Tensor:
    """Ids int64 `[1, N]` and room for more, `[1, length]`."""
    return torch.cat([ids, ids.new_zeros(1, length - ids.shape[1])], dim=1)


def _without_mask(given: dict[str, Any]) -> dict[str, Any]:
    """Arguments of tokens; a mask of ones, beside positions, says nothing, but is read each time.

    Later versions of transformers than 5.17 leave it out themselves.
    """
    mask, positions = given.get("attention_mask"), given.get("position_ids")
    if mask is None or positions is None or not bool((mask == 1).all()):
        return given
    return {**given, "attention_mask": None}


def _forward(model: Any, ids: Tensor, given: dict[str, Any]) -> Any:
    """The model's output for the last of ids `[1, N]`, as transformers' loop calls it."""
    inputs = model.prepare_inputs_for_generation(ids, next_sequence_length=1, **given)
    return model(**inputs, return_dict=True)


def _next_token(scores: Tensor, sampled: bool) -> Tensor:
    """The next token int64 `[1]` by scores `[1, V]`; `[2]` of one that is drawn: and whether it was
    drawn from what are no probabilities.

    As `torch.multinomial` draws one, which would wait for the device to say so: the least of
    exponential times at these rates.
    """
    if not sampled:
        return scores.argmax(-1)
    probabilities = scores.softmax(-1)
    times = torch.empty_like(probabilities).exponential_()
    token = torch.div(probabilities, times, out=times).argmax(-1)
    return torch.cat([token, probabilities[:, 0].isnan().long()])  # one that is none makes all so


def _generator(device: torch.device) -> torch.Generator:
    """What torch draws from on a device."""
    if device.type != "cuda":
        return torch.default_generator
    number = torch.cuda.current_device() if device.index is None else device.index
    return torch.cuda.default_generators[number]
