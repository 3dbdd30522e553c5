"""`RunAhead`: a decoding loop for `model.generate` in which the GPU does not wait for the host.

In transformers' own loop the host checks after each step whether the answer has ended, and the GPU
waits. In this loop the host launches further steps first, and reads tokens from pinned memory up to
`AHEAD` steps later. Steps that ran past the end of the answer are undone.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
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
"""Device types that run concurrently with the host. Tests add `cpu`."""

CHECKPOINT = 16
"""Number of tokens between two checkpoints of the cache. If an answer ends early, the cache returns
to a checkpoint, and at most this number of tokens is computed again. Making a checkpoint takes the
host about as long as a decode step."""

OTHER_LOOPS = (
    *ASSISTED,
    *("penalty_alpha", "dola_layers", "constraints", "force_words_ids", "custom_generate"),
    # The following three options are functions that the caller passes. kvindex's decoding loop may
    # generate tokens that it later removes again, and would pass these tokens to the functions.
    *("logits_processor", "stopping_criteria", "prefix_allowed_tokens_fn"),
    "synced_gpus",
)
"""Options of `model.generate` that require transformers' own decoding loops."""


def decoding_options(
    model: PreTrainedModel,
    tokenizer: Any,
    cache: Any,
    streamer: BaseStreamer,
    options: dict[str, Any],
) -> dict[str, Any]:
    """Extend options of `model.generate` so that it decodes with `RunAhead`, if possible.

    Args:
        model: The model.
        tokenizer: The model's tokenizer, for stop strings.
        cache: The cache to be passed to `model.generate`.
        streamer: The streamer, which must also be passed to `model.generate`.
        options: The caller's options of `model.generate`.

    Returns:
        The caller's options and the added options.
    """
    strings = option_of(model, options, "stop_strings")
    if not _runs_ahead(model, cache, options):
        return options if strings is None else {**options, "tokenizer": tokenizer}
    more: dict[str, Any] = {"custom_generate": RunAhead(cache, streamer).decode}
    if strings is not None:  # transformers does not pass the tokenizer to a custom decoding loop
        more["stop_strings"] = None
        more["stopping_criteria"] = [StopStringCriteria(tokenizer, strings)]
    return {**options, **more}


def _runs_ahead(model: PreTrainedModel, cache: Any, options: dict[str, Any]) -> bool:
    if not isinstance(cache, IndexCache) or model.device.type not in RUNS_AHEAD:
        return False
    if keeps_longest(model):  # rotary frequencies would depend on tokens that are removed later
        return False
    others = any(option_of(model, options, name) not in (None, False) for name in OTHER_LOOPS)
    return not others and option_of(model, options, "use_cache") is not False


def option_of(model: PreTrainedModel, options: Mapping[str, Any], name: str) -> Any:
    """Look up an option as `model.generate` does: in the options, then in the generation
    configurations."""
    configs = options.get("generation_config"), model.generation_config
    values = [getattr(config, name, None) for config in configs]
    return options[name] if name in options else next((v for v in values if v is not None), None)


class RunAhead:
    """A custom decoding loop for one answer. Pass its method `decode` as `custom_generate`.

    Args:
        cache: The cache.
        streamer: A transformers streamer, which gets each token of the answer once.
    """

    def __init__(self, cache: IndexCache, streamer: BaseStreamer) -> None:
        self._cache, self._streamer = cache, streamer
        # the last two checkpoints, each (number of ids, arguments of the next step, state of the
        # cache)
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
        """Generate an answer. `model.generate` calls this with the arguments of its own loop.

        The tokens and the cache are the same as with transformers' loop and the same seed.

        Args:
            model: The model.
            input_ids: Int64 `[1, N]`, the ids of the prompt.
            logits_processor: Transformers' logits processors.
            stopping_criteria: Transformers' stopping criteria, which must include the maximum
                length. Each criterion receives the ids as a CPU tensor, and no scores.
            generation_config: Transformers' generation configuration.
            **given: Keyword arguments for the model's forward pass.

        Returns:
            Int64 `[1, M]`, the ids of prompt and answer.

        Raises:
            RuntimeError: The probabilities of a sampled token are NaN.
            RankError: Another rank does not respond in time.
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
                        raise RuntimeError(
                            "logits: got NaN or infinity, allowed are finite numbers"
                        )
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
        """Return True if every layer of the cache can be restored to a checkpoint."""
        indexes = self._cache.indexes()
        return not self._cache.overwrites and all(isinstance(one, Restorable) for one in indexes)

    def _add_checkpoint(self, made: int, given: dict[str, Any]) -> None:
        """Make a checkpoint if the last one is at least `CHECKPOINT` tokens old."""
        if not self._checkpoints or made - self._checkpoints[-1][0] >= CHECKPOINT:
            self._checkpoints.append((made, dict(given), self._cache.checkpoint()))

    def _cut(self, model: Any, ids: Tensor, read: int) -> None:
        """Undo the decode steps that ran past the end of the answer.

        Prompt and answer together have `read` ids.
        """
        made, given, before = next(one for one in reversed(self._checkpoints) if one[0] <= read)
        self._cache.rollback(before)
        for length in range(made, read):
            outputs = _forward(model, ids[:, :length], given)
            given = model._update_model_kwargs_for_generation(outputs, given)
        for made, state in self._generator_states:
            if made == read:
                _generator(ids.device).set_state(state)


def _with_room(ids: Tensor, length: int) -> Tensor:
    """Extend ids int64 `[1, N]` to `[1, length]`, with zeros at the end."""
    return torch.cat([ids, ids.new_zeros(1, length - ids.shape[1])], dim=1)


def _without_mask(given: dict[str, Any]) -> dict[str, Any]:
    """Remove an attention mask of ones if positions are given.

    Otherwise the host would have to read the mask from the GPU in each step. Versions of
    transformers after 5.17 remove such a mask themselves.
    """
    mask, positions = given.get("attention_mask"), given.get("position_ids")
    if mask is None or positions is None or not bool((mask == 1).all()):
        return given
    return {**given, "attention_mask": None}


def _forward(model: Any, ids: Tensor, given: dict[str, Any]) -> Any:
    """Run the model on the last token of `ids` `[1, N]`, as transformers' loop does."""
    inputs = model.prepare_inputs_for_generation(ids, next_sequence_length=1, **given)
    return model(**inputs, return_dict=True)


def _next_token(scores: Tensor, sampled: bool) -> Tensor:
    """Choose the next token from scores `[1, V]`, without waiting for the device.

    To sample, each token's probability is divided by an exponential random number, and the token
    with the largest quotient is chosen. `torch.multinomial` does the same, but makes the host wait
    for a check of the probabilities.

    Args:
        scores: `[1, V]`, on the device.
        sampled: Whether to sample. If False, the token with the largest score is chosen.

    Returns:
        Without sampling, the token, int64 `[1]`. With sampling, int64 `[2]`: the token, and 1 if
        the probabilities are NaN, otherwise 0.
    """
    if not sampled:
        return scores.argmax(-1)
    probabilities = scores.softmax(-1)
    times = torch.empty_like(probabilities).exponential_()
    token = torch.div(probabilities, times, out=times).argmax(-1)
    return torch.cat(
        [token, probabilities[:, 0].isnan().long()]
    )  # softmax makes all probabilities NaN if one score is NaN


def _generator(device: torch.device) -> torch.Generator:
    """Return torch's default random number generator for a device."""
    if device.type != "cuda":
        return torch.default_generator
    number = torch.cuda.current_device() if device.index is None else device.index
    return torch.cuda.default_generators[number]
