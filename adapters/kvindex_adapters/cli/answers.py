"""Answers of `kvindex generate` from a loaded model: one to a prompt, or one to each question."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor
from transformers import TextStreamer

from kvindex_adapters.cli.engine import Engine
from kvindex_adapters.cli.progress import Bars, bars, console
from kvindex_adapters.evaluate.machine import describe
from kvindex_adapters.hf.attach import attach
from kvindex_adapters.hf.conversation import check_follows
from kvindex_adapters.hf.generate import Generation
from kvindex_adapters.hf.prefill import Progress, encode_prompt, read
from kvindex_adapters.hf.tokenizer import punctuated


@dataclass(frozen=True)
class Request:
    """Settings of an answer.

    index: a line, or None for full attention; k, regions: as `attach` takes them; chat: whether to
    use the chat template; max_new_tokens: of an answer; options: passed to `model.generate`.
    """

    index: str | None
    k: int
    regions: dict[str, int]
    chat: bool
    max_new_tokens: int
    options: dict[str, Any]


Answers = list[tuple[str | None, Generation]]
"""Each question, or None for the prompt itself, and its answer."""


def answer(
    model: Any,
    tokenizer: Any,
    text: str,
    questions: Sequence[str],
    request: Request,
    engine: Engine,
) -> Answers:
    """The answer to a text, or to each question about it; tokens are printed as they come."""
    with bars() as progress:
        if questions:
            return _answer_all(model, tokenizer, text, questions, request, engine, progress)
        ids = _ids(tokenizer, text, request)
        options = _index(request)
        if request.index is not None:
            options["attach_options"] = request.regions
        generation = _answer_one(engine, tokenizer, ids, request, progress, **options)
        return [(None, generation)]


def shared_length(prompts: Sequence[Tensor]) -> int:
    """Length of the prefix that all prompts `[N]` share, leaving at least two tokens of each.

    A remainder of one token would be a searching step, which need not be exact.
    """
    length = 0
    for column in zip(*(prompt.tolist() for prompt in prompts), strict=False):
        if len(set(column)) > 1:
            break
        length += 1
    return max(min(length, min(map(len, prompts)) - 2), 0)


def to_json(
    answers: Answers, request: Request, model: str, device: str, engine: str
) -> dict[str, Any]:
    """The result that `--json` writes."""
    result: dict[str, Any] = {"model": model, "index": request.index or "none", "k": request.k}
    result["engine"] = engine
    result |= {"regions": request.regions, "options": request.options}
    entries = [_entry(question, generation) for question, generation in answers]
    if answers[0][0] is None:
        result |= entries[0]
    else:
        result["answers"] = entries
    if answers[0][1].report:
        result["backend"] = answers[0][1].backend
    return {**result, "machine": describe(device)}


def _entry(question: str | None, generation: Generation) -> dict[str, Any]:
    entry: dict[str, Any] = {} if question is None else {"question": question}
    entry |= {"prompt_tokens": len(generation.prompt_ids), "answer": generation.text}
    entry |= {"prefill_s": generation.prefill_s, "token_s": generation.token_s}
    if generation.report:
        entry["rows_read_fraction"] = generation.report.rows_read_fraction
        entry["nbytes"] = generation.report.nbytes
    return entry


def _answer_all(
    model: Any,
    tokenizer: Any,
    text: str,
    questions: Sequence[str],
    request: Request,
    engine: Engine,
    progress: Bars,
) -> Answers:
    """Read the shared prefix of all prompts once; each question is a branch of it."""
    prompts = [_ids(tokenizer, f"{text}\n\n{question}", request) for question in questions]
    numbered = list(zip(enumerate(questions, start=1), prompts, strict=True))
    if request.index is None:  # transformers' own cache has no way back: the text is read anew
        return [
            (
                question[1],
                _answer_one(engine, tokenizer, ids, request, progress, question, index=None),
            )
            for question, ids in numbered
        ]
    options, length = punctuated(request.index, tokenizer, request.regions), shared_length(prompts)
    answers: Answers = []
    with attach(model, **_index(request), **options) as cache:
        check_follows(cache, "branch")
        if length:
            callback = _callback(progress, "the prompt")
            read(model, tokenizer, prompts[0][:length], cache=cache, on_progress=callback)
        for question, ids in numbered:
            branch: Any = dict(cache=cache, used="branch")
            generation = _answer_one(
                engine, tokenizer, ids[length:], request, progress, question, **branch
            )
            answers.append((question[1], generation))
    return answers


def _answer_one(
    engine: Engine,
    tokenizer: Any,
    ids: Tensor,
    request: Request,
    progress: Bars,
    question: tuple[int, str] | None = None,
    **options: Any,
) -> Generation:
    """Answer ids `[N]`; question: its number and its text, which is printed above."""
    name, heading = "the prompt", None
    if question is not None:
        name, heading = f"question {question[0]}", question[1]
    generation = engine.generate(
        ids,
        max_new_tokens=request.max_new_tokens,
        streamer=TextStreamer(tokenizer, skip_prompt=True, skip_special_tokens=True),
        on_progress=_callback(progress, name, heading),
        **options,
    )
    console.print(
        f"{len(generation.prompt_ids)} tokens of {name} in {generation.prefill_s:.1f} s, then "
        f"{generation.token_s * 1000:.0f} ms per token. {generation.report or 'Full attention.'}"
    )
    return generation


def _callback(progress: Bars, name: str, heading: str | None = None) -> Progress:
    """Progress of prefill as a bar, and of the answer unless a terminal shows it as it comes.

    name: of the prompt; heading: printed above the answer.
    """
    live = sys.stdout.isatty()

    def update(phase: str, done: int, total: int) -> None:
        if phase == "prefill":
            progress.update(f"reading {name}", done, total)
            if done == total and live:  # the answer follows, which must not meet the bars
                progress.stop()
            if done == total and heading is not None:
                print(f"> {heading}", flush=True)
        elif not live:
            progress.update(f"answering {name}", done, total)

    return update


def _index(request: Request) -> dict[str, Any]:
    return {"index": request.index, "k": request.k}


def _ids(tokenizer: Any, text: str, request: Request) -> Tensor:
    return encode_prompt(tokenizer, [{"role": "user", "content": text}] if request.chat else text)
