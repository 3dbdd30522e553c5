"""Answers of `kvindex generate` from a loaded model: one to a prompt, or one to each question."""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from torch import Tensor
from transformers import TextStreamer

from kvindex_adapters.cli.documents import Document
from kvindex_adapters.cli.engine import Engine
from kvindex_adapters.cli.progress import Bars, bars, console
from kvindex_adapters.common.prompt import common_length, encode_prompt
from kvindex_adapters.common.prompt_chunks import Progress
from kvindex_adapters.evaluate.machine import describe
from kvindex_adapters.hf.generate import Generation


@dataclass(frozen=True)
class Request:
    """Settings of an answer.

    index: a line, or None for full attention; k, regions: as `attach` takes them; chat: whether to
    use the chat template; max_new_tokens: of an answer; options: passed to `model.generate`;
    save_cache: a new folder for what was read before the first answer; load_cache: one that was
    saved so, of which nothing is read again; token_graph: as `attach` takes it.
    """

    index: str | None
    k: int
    regions: dict[str, int]
    chat: bool
    max_new_tokens: int
    options: dict[str, Any]
    save_cache: Path | None = None
    load_cache: Path | None = None
    token_graph: bool | None = None

    @property
    def keeps_cache(self) -> bool:
        """Whether the cache is saved or loaded."""
        return self.save_cache is not None or self.load_cache is not None


BORDER = 8
"""Tokens at the end of a saved cache that a prompt may have otherwise: what follows a text can cut
its last words otherwise."""

Answers = list[tuple[str | None, Generation]]
"""Each question, or None for the prompt itself, and its answer."""


def answer(
    tokenizer: Any,
    text: str,
    questions: Sequence[str],
    request: Request,
    engine: Engine,
) -> Answers:
    """The answer to a text, or to each question about it; tokens are printed as they come."""
    with bars() as progress:
        if questions or request.keeps_cache:
            return _answer_all(tokenizer, text, questions, request, engine, progress)
        ids = _ids(tokenizer, text, request)
        _warn_of_length(len(ids), engine)
        options = _index(request)
        if request.index is not None:
            options["attach_options"] = _attach_options(engine, request)
        generation = _answer_one(engine, tokenizer, ids, request, progress, **options)
        return [(None, generation)]


def _warn_of_length(tokens: int, engine: Engine) -> None:
    """Say where a prompt is longer than the model knows: an index finds rows, not positions."""
    if engine.longest is not None and tokens > engine.longest:
        console.print(
            f"prompt: got {tokens} tokens, the model was made for up to {engine.longest}: its "
            "answers may make no sense, with an index or without"
        )


def _attach_options(engine: Engine, request: Request) -> dict[str, Any]:
    """As `attach` takes them; tokens of the decoder are graphs without being asked to be."""
    own = engine.name == "decoder"
    return dict(request.regions) if own else {**request.regions, "token_graph": request.token_graph}


def shared_length(prompts: Sequence[Tensor]) -> int:
    """As `common_length`, but leaving at least two tokens of each.

    A remainder of one token would be a searching step, which need not be exact.
    """
    return max(min(common_length(prompts), min(map(len, prompts)) - 2), 0)


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
    tokenizer: Any,
    text: str,
    questions: Sequence[str],
    request: Request,
    engine: Engine,
    progress: Bars,
) -> Answers:
    """Read the shared prefix of all prompts once; each question is a branch of it.

    Without questions the text itself is the only prompt, of which the last tokens are the rest.
    """
    asked: list[tuple[int, str] | None] = [*enumerate(questions, start=1)] or [None]
    texts = [text if one is None else f"{text}\n\n{one[1]}" for one in asked]
    prompts = [_ids(tokenizer, each, request) for each in texts]
    _warn_of_length(max(map(len, prompts)), engine)
    numbered = list(zip(asked, prompts, strict=True))
    if request.index is None:  # full attention has no way back: the text is read anew
        return [
            (
                None if question is None else question[1],
                _answer_one(engine, tokenizer, ids, request, progress, question, index=None),
            )
            for question, ids in numbered
        ]
    shared, branch = prompts, bool(questions)
    if questions and request.save_cache:  # what other questions share with these
        shared = [*prompts, _ids(tokenizer, f"{text}\n\n", request)]
    length, answers = shared_length(shared), Answers()
    options = _attach_options(engine, request)
    with engine.opened(branch, **_index(request), attach_options=options) as document:
        held = _loaded(document, request.load_cache, prompts[0][:length])
        if length - held > 1:
            progress.update("reading the prompt", 0, length - held)
            document.read(prompts[0][held:length], _callback(progress, "the prompt"))
            held = length
        if request.save_cache:
            document.save(request.save_cache)
            console.print(f"saved {held} tokens in {str(request.save_cache)!r}", markup=False)
        for question, ids in numbered:
            options = document.options(branch=branch)
            generation = _answer_one(
                engine, tokenizer, ids[held:], request, progress, question, **options
            )
            answers.append((None if question is None else question[1], generation))
    return answers


def _loaded(document: Document, folder: Path | None, prompt: Tensor) -> int:
    """Tokens of a prompt `[N]` that a document holds, loaded from a folder if there is one.

    Raises ValueError for a prompt that does not begin with them, but for the last `BORDER`.
    """
    if folder is None:
        return 0
    start = time.perf_counter()
    document.load(folder)
    ids, took = document.ids, time.perf_counter() - start
    if ids is None:
        raise ValueError(
            f"load-cache: got {str(folder)!r}, which does not know its tokens; allowed is a cache "
            "that kvhf.read or kvhf.generate filled"
        )
    held = common_length([ids, prompt])
    if held < len(ids) - BORDER or not held:
        raise ValueError(
            f"load-cache: got {str(folder)!r} of {len(ids)} tokens, of which the prompt begins "
            f"with {held}; allowed is a prompt that begins with all of them (but the last "
            f"{BORDER}): the same text, and chat template"
        )
    if held < len(ids):
        document.crop(held)
    console.print(f"loaded {held} tokens in {took:.1f} s", markup=False)
    return held


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
    progress.update(f"reading {name}", 0, len(ids))  # the first report comes after a whole piece
    generation = engine.generate(
        ids,
        max_new_tokens=request.max_new_tokens,
        streamer=TextStreamer(tokenizer, skip_prompt=True, skip_special_tokens=True),
        on_progress=_callback(progress, name, heading),
        **options,
    )
    if generation.report:  # all processes of torchrun are here, of which the first prints
        generation = replace(generation, report=generation.report.over_ranks())
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
