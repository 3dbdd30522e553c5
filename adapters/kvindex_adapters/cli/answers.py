"""What `kvindex generate` does once a model is loaded: one answer, or one to each question."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor
from transformers import TextStreamer

from kvindex_adapters.cli.progress import Bars, bars, console
from kvindex_adapters.hf.attach import attach
from kvindex_adapters.hf.conversation import check_follows
from kvindex_adapters.hf.generate import Generation, generate
from kvindex_adapters.hf.reading import Progress, encode_prompt, read
from kvindex_adapters.hf.tokenizer import punctuated
from kvindex_adapters.machine import describe


@dataclass(frozen=True)
class Request:
    """How to answer.

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
    model: Any, tokenizer: Any, text: str, questions: Sequence[str], request: Request
) -> Answers:
    """The answer to a text, or to each question about it; tokens are printed as they come."""
    with bars() as progress:
        if questions:
            return _several(model, tokenizer, text, questions, request, progress)
        ids = _ids(tokenizer, text, request)
        options = _index(request)
        if request.index is not None:
            options["attach_options"] = request.regions
        found = _one(model, tokenizer, ids, request, progress, **options)
        return [(None, found)]


def shared_length(prompts: Sequence[Tensor]) -> int:
    """How many ids `[N]` all prompts begin with, but for two that each keeps to itself.

    A rest of one token would be a searching step, which need not be exact.
    """
    same = 0
    for column in zip(*(prompt.tolist() for prompt in prompts), strict=False):
        if len(set(column)) > 1:
            break
        same += 1
    return max(min(same, min(map(len, prompts)) - 2), 0)


def described(answers: Answers, request: Request, model: str, device: str) -> dict[str, Any]:
    """What `--json` writes."""
    written: dict[str, Any] = {"model": model, "index": request.index or "none", "k": request.k}
    written |= {"regions": request.regions, "options": request.options}
    told = [_told(question, found) for question, found in answers]
    if answers[0][0] is None:
        written |= told[0]
    else:
        written["answers"] = told
    if answers[0][1].report:
        written["backend"] = answers[0][1].backend
    return {**written, "machine": describe(device)}


def _told(question: str | None, found: Generation) -> dict[str, Any]:
    told: dict[str, Any] = {} if question is None else {"question": question}
    told |= {"prompt_tokens": len(found.prompt_ids), "answer": found.text}
    told |= {"prefill_s": found.prefill_s, "token_s": found.token_s}
    if found.report:
        told["rows_read_fraction"] = found.report.rows_read_fraction
        told["nbytes"] = found.report.nbytes
    return told


def _several(
    model: Any,
    tokenizer: Any,
    text: str,
    questions: Sequence[str],
    request: Request,
    progress: Bars,
) -> Answers:
    """Read once what all prompts begin with; each question is a branch of that."""
    prompts = [_ids(tokenizer, f"{text}\n\n{question}", request) for question in questions]
    named = list(zip(enumerate(questions, start=1), prompts, strict=True))
    if request.index is None:  # transformers' own cache has no way back: the text is read anew
        return [
            (asked[1], _one(model, tokenizer, ids, request, progress, asked, index=None))
            for asked, ids in named
        ]
    options, length = punctuated(request.index, tokenizer, request.regions), shared_length(prompts)
    answers: Answers = []
    with attach(model, **_index(request), **options) as cache:
        check_follows(cache, "branch")
        if length:
            shown = _shown(progress, "the prompt")
            read(model, tokenizer, prompts[0][:length], cache=cache, on_progress=shown)
        for asked, ids in named:
            branch: Any = dict(cache=cache, used="branch")
            found = _one(model, tokenizer, ids[length:], request, progress, asked, **branch)
            answers.append((asked[1], found))
    return answers


def _one(
    model: Any,
    tokenizer: Any,
    ids: Tensor,
    request: Request,
    progress: Bars,
    asked: tuple[int, str] | None = None,
    **options: Any,
) -> Generation:
    """Answer ids `[N]`; asked: number and text of the question, which is printed above."""
    what, heading = ("the prompt", None) if asked is None else (f"question {asked[0]}", asked[1])
    found = generate(
        model,
        tokenizer,
        ids,
        max_new_tokens=request.max_new_tokens,
        streamer=TextStreamer(tokenizer, skip_prompt=True, skip_special_tokens=True),
        on_progress=_shown(progress, what, heading),
        **options,
        **request.options,
    )
    console.print(
        f"{len(found.prompt_ids)} tokens of {what} in {found.prefill_s:.1f} s, then "
        f"{found.token_s * 1000:.0f} ms per token. {found.report or 'Full attention.'}"
    )
    return found


def _shown(progress: Bars, what: str, heading: str | None = None) -> Progress:
    """Bars of reading and, where the answer does not itself show on a terminal, of answering.

    heading: printed above the answer.
    """
    live = sys.stdout.isatty()

    def shown(phase: str, done: int, total: int) -> None:
        if phase == "prefill":
            progress.update(f"reading {what}", done, total)
            if done == total and live:  # the answer follows, which must not meet the bars
                progress.stop()
            if done == total and heading is not None:
                print(f"> {heading}", flush=True)
        elif not live:
            progress.update(f"answering {what}", done, total)

    return shown


def _index(request: Request) -> dict[str, Any]:
    return {"index": request.index, "k": request.k}


def _ids(tokenizer: Any, text: str, request: Request) -> Tensor:
    return encode_prompt(tokenizer, [{"role": "user", "content": text}] if request.chat else text)
