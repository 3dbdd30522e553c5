"""One call from a prompt to an answer, with or without an index."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import nullcontext, suppress
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel
from transformers.generation.streamers import BaseStreamer

from kvindex import check
from kvindex_adapters.hf.attach import attach
from kvindex_adapters.hf.punctuation import punctuated
from kvindex_adapters.hf.report import Report

Progress = Callable[[str, int, int], None]
"""Called with a phase ("prefill" or "decode"), tokens done, tokens in all."""


ONE_ANSWER = dict(num_beams=1, num_return_sequences=1, return_dict_in_generate=False)
"""What `generate` insists on, whatever the model's own generation configuration says."""

OURS = {"inputs", "input_ids", "attention_mask", "past_key_values"}
"""Options of `model.generate` that `generate` sets itself."""


@dataclass(frozen=True)
class Generation:
    """An answer and what it took.

    text: the answer; prompt_ids, answer_ids: int64 `[N]`; prefill_s: seconds until the first
    token of the answer; token_s: seconds per token after it; report: what was read and held,
    config: the index's configuration, backend: whose ops it ran; all None for full attention.
    """

    text: str
    prompt_ids: Tensor
    answer_ids: Tensor
    prefill_s: float
    token_s: float
    report: Report | None
    config: Any
    backend: str | None = None


def generate(
    model: PreTrainedModel,
    tokenizer: Any,
    prompt: str | list[dict[str, str]] | Tensor,
    *,
    index: Any = "pariskv",
    k: int = 100,
    max_new_tokens: int = 256,
    chunk: int = 1024,
    streamer: BaseStreamer | None = None,
    on_progress: Progress | None = None,
    attach_options: dict[str, Any] | None = None,
    **generate_options: Any,
) -> Generation:
    """Generate an answer to one prompt.

    prompt: text as it is, messages for the tokenizer's chat template, or ids int64 `[N]`;
    index, k, attach_options: as `attach` takes them, `index=None` for full attention with
    transformers' own cache; an index that reads punctuation gets the tokenizer's; chunk: tokens of
    the prompt read at a time; generate_options: passed to `model.generate` (greedy unless they say
    `do_sample=True`). One prompt gives one answer: for beams, batches or several answers call
    `attach` and `model.generate`.

    Raises ValueError for an empty prompt, sizes out of range or options that do not fit, and
    what `attach` raises.
    """
    _check_options(attach_options, generate_options)
    check.at_least("chunk", chunk, 2)
    check.at_least("max_new_tokens", max_new_tokens, 1)
    ids = encode_prompt(tokenizer, prompt).to(model.device)
    if len(ids) == 0:
        raise ValueError("prompt: got no tokens, allowed is at least one")
    clock = _Clock(streamer, on_progress, len(ids), max_new_tokens)
    options = {**ONE_ANSWER, "do_sample": False, **generate_options}
    if index is None:
        context: Any = nullcontext(DynamicCache(config=model.config))
    else:
        context = attach(model, index=index, k=k, **punctuated(index, tokenizer, attach_options))
    with context as cache, torch.no_grad():
        # generate() reads the last chunk: several queries, so the first answer token is exact
        prefill(model, ids, cache, stop=max(len(ids) - chunk, 0), chunk=chunk, report=on_progress)
        if index is not None:
            _make_room(cache, len(ids) + max_new_tokens)
        sequence = model.generate(
            input_ids=ids[None],
            attention_mask=torch.ones_like(ids[None]),
            past_key_values=cache,
            max_new_tokens=max_new_tokens,
            streamer=clock,
            **options,
        )
        report = None if index is None else cache.report()
        made = None if index is None else cache.indexes()[0]
    answer = sequence[0, len(ids) :]
    return Generation(
        text=tokenizer.decode(answer, skip_special_tokens=True),
        prompt_ids=ids,
        answer_ids=answer,
        prefill_s=clock.first - clock.start,
        token_s=(clock.last - clock.first) / max(len(answer) - 1, 1),
        report=report,
        config=None if made is None else made.config,
        backend=None if made is None else getattr(made, "backend", "torch"),
    )


def _make_room(cache: Any, tokens: int) -> None:
    """Memory for the whole answer, before its first token, where there is as much."""
    for made in cache.indexes():
        while hasattr(made, "inner"):  # what wrappers are around has the memory
            made = made.inner
        if hasattr(made, "make_room"):
            with suppress(MemoryError):  # the answer may be shorter
                made.make_room(tokens)


def _check_options(attach_options: Any, generate_options: dict[str, Any]) -> None:
    for name in sorted({"index", "k"} & set(attach_options or {})):
        raise ValueError(f"attach_options: got {name}, allowed is {name} as an argument of its own")
    for name in sorted(OURS & set(generate_options)):
        raise ValueError(f"{name}: got a value, allowed is none: the prompt decides it")
    for name, only in ONE_ANSWER.items():
        if generate_options.get(name, only) != only:
            raise ValueError(
                f"{name}: got {generate_options[name]}, allowed is {only}; for more call "
                "attach() and model.generate"
            )


def encode_prompt(tokenizer: Any, prompt: str | list[dict[str, str]] | Tensor) -> Tensor:
    """Ids int64 `[N]` of a text, of chat messages (with the cue to answer), or as given."""
    if isinstance(prompt, Tensor):
        return check.tensor("prompt", prompt, {"N": None}, torch.int64)
    if isinstance(prompt, str):
        return torch.tensor(tokenizer(prompt)["input_ids"], dtype=torch.int64)
    text = tokenizer.apply_chat_template(prompt, tokenize=False, add_generation_prompt=True)
    ids = tokenizer(text, add_special_tokens=False)["input_ids"]
    return torch.tensor(ids, dtype=torch.int64)


def prefill(
    model: PreTrainedModel,
    ids: Tensor,
    cache: Any,
    *,
    stop: int,
    chunk: int,
    report: Progress | None = None,
) -> None:
    """Read the first `stop` of ids int64 `[N]` into an empty cache, about `chunk` at a time.

    A chunk of one token would be a searching step, so the last chunk takes what would be left.
    """
    start = 0
    while start < stop:
        end = start + chunk if stop - start - chunk > 1 else stop
        model(
            input_ids=ids[None, start:end],
            past_key_values=cache,
            use_cache=True,
            logits_to_keep=1,
        )
        start = end
        if report:
            report("prefill", start, len(ids))


class _Clock(BaseStreamer):
    """Notes when tokens come, and passes them on."""

    def __init__(
        self, inner: BaseStreamer | None, progress: Progress | None, prompt: int, total: int
    ) -> None:
        self._inner, self._progress = inner, progress
        self._prompt, self._total, self._tokens = prompt, total, 0
        self._prompt_seen = False
        self.start = self.first = self.last = time.perf_counter()

    def put(self, value: Tensor) -> None:
        """A batch of tokens: the prompt first, then one at a time."""
        now, answer, self._prompt_seen = time.perf_counter(), self._prompt_seen, True
        if answer:
            self.last = now
            if self._tokens == 0:
                self.first = now
                self._report("prefill", self._prompt, self._prompt)  # before any answer appears
            self._tokens += 1
        if self._inner:
            self._inner.put(value)
        if answer:
            self._report("decode", self._tokens, self._total)

    def _report(self, *progress: Any) -> None:
        if self._progress:
            self._progress(*progress)

    def end(self) -> None:
        """No more tokens come."""
        if self._inner:
            self._inner.end()
