"""Choose the next token of each sequence from its logits, on the device."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from kvindex.core import check
from kvindex_adapters.llama.fused import BATCH, Fused

TOP_K = 50
"""Default of transformers for `top_k` when tokens are sampled."""

NEUTRAL: dict[str, Any] = dict(
    repetition_penalty=1.0,
    encoder_repetition_penalty=1.0,
    no_repeat_ngram_size=0,
    encoder_no_repeat_ngram_size=0,
    min_length=0,
    min_new_tokens=0,
    bad_words_ids=None,
    suppress_tokens=None,
    begin_suppress_tokens=None,
    forced_bos_token_id=None,
    forced_eos_token_id=None,
    sequence_bias=None,
    exponential_decay_length_penalty=None,
    guidance_scale=1.0,
    watermarking_config=None,
    stop_strings=None,
    max_time=None,
    remove_invalid_values=False,
    num_beams=1,
)
"""Maps each generation option that the decoder lacks to the value with which the option has no
effect."""

NEUTRAL_SAMPLED: dict[str, Any] = dict(
    min_p=None, typical_p=1.0, epsilon_cutoff=0.0, eta_cutoff=0.0, top_h=None
)
"""Maps further options that the decoder lacks to values without effect. They matter only when
tokens are sampled."""


@dataclass(frozen=True)
class Sampling:
    """Sampling parameters.

    Args:
        temperature: Divisor of the logits, or 0 to always choose the most likely token.
        top_k: Sample from this number of most likely tokens. None means no limit.
        top_p: Nucleus sampling: after `top_k`, sample from the fewest tokens whose probabilities
            add up to this fraction. None means no limit.
        seed: Seed of the random numbers. The sequences of a batch get different numbers.

    Raises:
        ValueError: A value is out of range.

    Source: Holtzman et al., The Curious Case of Neural Text Degeneration (ICLR 2020), for `top_p`.
    """

    temperature: float = 0.0
    top_k: int | None = None
    top_p: float | None = None
    seed: int = 0

    def __post_init__(self) -> None:
        if self.temperature != 0:
            check.positive("temperature", self.temperature)
        if self.top_k is not None:
            check.at_least("top_k", self.top_k, 1)
        if self.top_p is not None:
            check.within("top_p", self.top_p, 0, 1)
        check.seed(self.seed)
        filtered = {"top_k": self.top_k, "top_p": self.top_p}
        for name, value in filtered.items():
            if value is not None and not self.temperature:
                raise ValueError(
                    f"{name}: got {value} at temperature 0, which always takes the most likely "
                    f"token; set a temperature above 0, or {name} to None"
                )


def sampling_like(config: Mapping[str, Any], seed: int = 0) -> Sampling:
    """Convert the sampling options of a transformers generation configuration.

    Args:
        config: The generation configuration, as a mapping.
        seed: Seed of the random numbers.

    Returns:
        The parameters with which the decoder samples from the same distribution as
        `model.generate`.

        Raises:
            ValueError: The configuration uses an option that the decoder does not implement.
    """
    sampled = bool(config.get("do_sample"))
    for name, neutral in (NEUTRAL | NEUTRAL_SAMPLED if sampled else NEUTRAL).items():
        value = config.get(name)
        if value is not None and value != neutral:
            raise ValueError(
                f"{name}: got {value!r}, but the decoder does not implement {name}; "
                f"allowed is {neutral!r}"
            )
    if not sampled:
        return Sampling(seed=seed)
    top_k, top_p = (config.get(name) for name in ("top_k", "top_p"))
    return Sampling(
        temperature=config.get("temperature") or 1.0,
        top_k=(TOP_K if top_k is None else top_k) or None,
        top_p=None if top_p == 1 else top_p,
        seed=seed,
    )


class Sampler:
    """Chooses tokens on the device. All calls share one random number generator.

    Args:
        sampling: Sampling parameters.
        device: Device of the logits.
        fused: Kernels to find the most likely token, or None to use torch.
    """

    def __init__(
        self, sampling: Sampling, device: torch.device, fused: Fused | None = None
    ) -> None:
        self._sampling = sampling
        self._most_likely: Callable[[Tensor], Tensor] = partial(torch.argmax, dim=-1)
        if fused is not None:
            self._most_likely = fused.chooser()
        self.generator: torch.Generator | None = None
        if sampling.temperature:
            self.generator = torch.Generator(device).manual_seed(sampling.seed)

    def choose(self, logits: Tensor) -> Tensor:
        """Choose the next token, int64 `[B]`, from logits `[B, V]`."""
        if not self.samples:
            few = len(logits) <= BATCH  # as many as the kernel supports
            return self._most_likely(logits) if few else logits.argmax(-1)
        return self.draw(self.probabilities(logits))

    @property
    def samples(self) -> bool:
        """True if tokens are sampled, False if the most likely token is always chosen."""
        return self._sampling.temperature > 0

    def probabilities(self, logits: Tensor) -> Tensor:
        """Return the probabilities from which tokens are sampled, float32 `[B, V]`.

        They include temperature, `top_k` and `top_p`. Tokens must be sampled (`samples`).
        """
        scores = logits.float() / self._sampling.temperature
        scores = keep_top_k(scores, self._sampling.top_k)
        return keep_top_p(scores, self._sampling.top_p).softmax(-1)

    def draw(self, weights: Tensor) -> Tensor:
        """Sample tokens int64 `[B]` with probabilities proportional to `weights` `[B, V]`."""
        # Choose token `i` with probability `p[i]`, without waiting for the device. `times[i]` is a
        # random number from the exponential distribution with rate 1, so `times[i] / p[i]` has the
        # exponential distribution with rate `p[i]`. Therefore token `i` has the smallest quotient
        # `times[i] / p[i]` of all tokens with probability `p[i]`. The code below finds it as the
        # token with the largest `p[i] / times[i]`.
        times = torch.empty_like(weights).exponential_(generator=self.generator)
        return (weights / times.clamp_min(torch.finfo(torch.float32).tiny)).argmax(-1)

    def uniform(self, count: int, device: torch.device) -> Tensor:
        """Return `count` random numbers in [0, 1), float32."""
        return torch.rand(count, generator=self.generator, device=device)


def keep_top_k(scores: Tensor, top_k: int | None) -> Tensor:
    """Set scores `[B, V]` below the `top_k`-th highest score of their sequence to `-inf`."""
    if top_k is None or top_k >= scores.shape[-1]:
        return scores
    least = scores.topk(top_k, dim=-1).values[:, -1:]
    return scores.masked_fill(scores < least, float("-inf"))


def keep_top_p(scores: Tensor, top_p: float | None) -> Tensor:
    """Nucleus filter: keep the fewest most likely tokens whose probabilities add up to `top_p`. Set
    the other scores `[B, V]` to `-inf`."""
    if top_p is None or top_p == 1:
        return scores
    ordered, order = scores.sort(dim=-1, descending=True, stable=True)
    probabilities = ordered.softmax(-1)
    # a token is dropped if the probabilities of more likely tokens already add up to top_p
    dropped = probabilities.cumsum(-1) - probabilities >= top_p
    return scores.masked_fill(torch.zeros_like(dropped).scatter(-1, order, dropped), float("-inf"))
