"""`RunAhead`: a decoding loop that launches the next steps before the host has read the last
tokens.

In transformers' own loop the host checks after each step whether the answer has ended, so that the
device waits for the host. In this loop the host reads tokens from pinned memory, up to `AHEAD`
steps later. Steps that were launched after the end of the answer are undone.
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
"""Types of devices that work concurrently with the host. Tests add `cpu`."""

CHECKPOINT = 16
"""Number of tokens between two checkpoints of the cache. If an answer ends before its maximum
length, at most this number of tokens is computed again. A checkpoint takes the host about as long
as a decode step."""

OTHER_LOOPS = (
    *ASSISTED,
    *("penalty_alpha", "dola_layers", "constraints", "force_words_ids", "custom_generate"),
    # these are the caller's code, which would see tokens that are later removed
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
    """Add the options to `model.generate` that make it decode with `RunAhead`, if possible.

    Args:
        model: The model.
        tokenizer: Its tokenizer, for stop strings.
        cache: The `past_key_values`.
        streamer: The streamer, which must also be passed to `model.generate`.
        options: Options of the caller.

    Returns:
        All options.
    """
    strings = _option(model, options, "stop_strings")
    if not _runs_ahead(model, cache, options):
        return options if strings is None else {**options, "tokenizer": tokenizer}
    more: dict[str, Any] = {"custom_generate": RunAhead(cache, streamer).decode}
    if strings is not None:  # transformers does not pass the tokenizer to a custom loop
        more["stop_strings"] = None
        more["stopping_criteria"] = [StopStringCriteria(tokenizer, strings)]
    return {**options, **more}


def _runs_ahead(model: PreTrainedModel, cache: Any, options: dict[str, Any]) -> bool:
    if not isinstance(cache, IndexCache) or model.device.type not in RUNS_AHEAD:
        return False
    if keeps_longest(model):  # rotary frequencies would depend on removed tokens
        return False
    others = any(_option(model, options, name) not in (None, False) for name in OTHER_LOOPS)
    return not others and _option(model, options, "use_cache") is not False


def _option(model: PreTrainedModel, options: dict[str, Any], name: str) -> Any:
    """Find the value of an option as `model.generate` does, in options and configurations."""
    configs = options.get("generation_config"), model.generation_config
    values = [getattr(config, name, None) for config in configs]
    return options[name] if name in options else next((v for v in values if v is not None), None)


class RunAhead:
    """Decodes one answer. Pass `decode` to `model.generate` as `custom_generate`.

    Args:
        cache: The cache.
        streamer: A streamer, which gets each token of the answer once, as in transformers' loop.
    """

    def __init__(self, cache: IndexCache, streamer: BaseStreamer) -> None:
        self._cache, self._streamer = cache, streamer
        # the last two checkpoints: number of ids, arguments of the next step, state of the cache
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
        """Decode an answer, with the arguments of transformers' loop.

        Tokens and cache are the same as with transformers' loop and the same seed.

        Args:
            model: The model.
            input_ids: Int64 `[1, N]`, the ids of the prompt.
            logits_processor: Transformers' logits processors.
            stopping_criteria: Transformers' criteria. They may only read the ids, which are on the
                CPU, and must include the maximum length.
            generation_config: Transformers' generation configuration.
            **given: Arguments of the model.

        Returns:
            Int64 `[1, M]`, the ids of prompt and answer.

        Raises:
            RuntimeError: Logits contain NaN or infinity.
            RankError: Another process does not respond.
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
        """Return True if all layers can be restored from a checkpoint."""
        indexes = self._cache.indexes()
        return not self._cache.overwrites and all(isinstance(one, Restorable) for one in indexes)

    def _add_checkpoint(self, made: int, given: dict[str, Any]) -> None:
        """Make a checkpoint before the next step, if the last one is old enough."""
        if not self._checkpoints or made - self._checkpoints[-1][0] >= CHECKPOINT:
            self._checkpoints.append((made, dict(given), self._cache.checkpoint()))

    def _cut(self, model: Any, ids: Tensor, read: int) -> None:
        """Undo all steps after the one that produced id number `read`."""
        made, given, before = next(one for one in reversed(self._checkpoints) if one[0] <= read)
        self._cache.rollback(before)
        for length in range(made, read):
            outputs = _forward(model, ids[:, :length], given)
            given = model._update_model_kwargs_for_generation(outputs, given)
        for made, state in self._generator_states:
            if made == read:
                _generator(ids.device).set_state(state)


def _with_room(ids: Tensor, length: int) -> Tensor:
    """Extend ids int64 `[1, N]` with zeros to `[1, length]`."""
    return torch.cat([ids, ids.new_zeros(1, length - ids.shape[1])], dim=1)


def _without_mask(given: dict[str, Any]) -> dict[str, Any]:
    """Remove a mask of ones if there are positions, so that the host need not read it in each step.

    Versions of transformers after 5.17 remove such a mask themselves.
    """
    mask, positions = given.get("attention_mask"), given.get("position_ids")
    if mask is None or positions is None or not bool((mask == 1).all()):
        return given
    return {**given, "attention_mask": None}


def _forward(model: Any, ids: Tensor, given: dict[str, Any]) -> Any:
    """Run the model on the last of ids `[1, N]`, as transformers' loop does."""
    inputs = model.prepare_inputs_for_generation(ids, next_sequence_length=1, **given)
    return model(**inputs, return_dict=True)


def _next_token(scores: Tensor, sampled: bool) -> Tensor:
    """Choose the next token by scores `[1, V]`.

    To sample, each token's probability is divided by a random number of an exponential
    distribution, and the largest quotient wins. `torch.multinomial` does the same, but the host
    would wait for its check of the probabilities.

    Args:
        scores: `[1, V]`, on the device.
        sampled: Whether to sample. If not, the largest score wins.

    Returns:
        Int64 `[1]`, the token; if sampled, `[2]`, the token and 1 if probabilities are NaN, else 0.
    """
    if not sampled:
        return scores.argmax(-1)
    probabilities = scores.softmax(-1)
    times = torch.empty_like(probabilities).exponential_()
    token = torch.div(probabilities, times, out=times).argmax(-1)
    return torch.cat([token, probabilities[:, 0].isnan().long()])  # one NaN makes all of them NaN


def _generator(device: torch.device) -> torch.Generator:
    """Return torch's default random generator of a device."""
    if device.type != "cuda":
        return torch.default_generator
    number = torch.cuda.current_device() if device.index is None else device.index
    return torch.cuda.default_generators[number]
