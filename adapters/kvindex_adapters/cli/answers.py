"""Generate and print the answers of the command `kvindex generate`.

The command answers either the prompt itself or each of several questions about the prompt.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
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
    """Settings of one run of `kvindex generate`.

    Args:
        index: Name and options of the index, or None for full attention.
        k: Number of tokens to retrieve per KV head in each decode step.
        regions: Sizes of the sink, the local window and so on, and how prompts attend, as keyword
            arguments of `attach`.
        chat: Whether to apply the chat template.
        max_new_tokens: Maximum length of an answer in tokens.
        options: Other options of `model.generate`, such as those for sampling.
        save_cache: A new folder to save the prompt's KV cache in, before the first answer.
        load_cache: Folder with a saved KV cache. The model does not read its tokens again.
        token_graph: Whether to run each decode step as one CUDA graph. None decides by the device
            and the model.
        speculation: The options `speculative_tokens` and `verify`, or {} for one token at a time.
        system: Text of the system message, or None. Only with `chat`.
    """

    index: str | None
    k: int | str
    regions: dict[str, Any]
    chat: bool
    max_new_tokens: int
    options: dict[str, Any]
    save_cache: Path | None = None
    load_cache: Path | None = None
    token_graph: bool | None = None
    speculation: dict[str, Any] = field(default_factory=dict)
    system: str | None = None

    @property
    def keeps_cache(self) -> bool:
        """Return True if this run saves a KV cache to a folder or loads one."""
        return self.save_cache is not None or self.load_cache is not None


BORDER = 8
"""Number of tokens at the end of a saved cache that may differ from the prompt.

The tokenizer may encode the end of a text differently when more text follows.
"""

Answers = list[tuple[str | None, Generation]]
"""Pairs of a question and its answer. Without questions there is one pair: None and the answer."""


def answer(
    tokenizer: Any,
    text: str,
    questions: Sequence[str],
    request: Request,
    engine: Engine,
) -> Answers:
    """Answer a prompt, or each question about it, and print the tokens while they are generated."""
    with bars() as progress:
        if questions or request.keeps_cache:
            return _answer_all(tokenizer, text, questions, request, engine, progress)
        ids = _ids(tokenizer, text, request)
        _warn_of_length(len(ids), engine)
        options = {**_index(request), "attach_options": _attach_options(engine, request)}
        generation = _answer_one(engine, tokenizer, ids, request, progress, **options)
        return [(None, generation)]


def _warn_of_length(tokens: int, engine: Engine) -> None:
    """Print a warning if the prompt is longer than the model's maximum length."""
    if engine.longest is not None and tokens > engine.longest:
        console.print(
            f"prompt: got {tokens} tokens, the model was made for up to {engine.longest}. The "
            "answer may make no sense, with or without an index"
        )


def _attach_options(engine: Engine, request: Request) -> dict[str, Any]:
    """Return the keyword arguments of `attach`; none for full attention.

    Only the engine "transformers" supports the argument `token_graph`.
    """
    if request.index is None:
        return {}
    if engine.name == "decoder":
        return dict(request.regions)
    return {**request.regions, "token_graph": request.token_graph}


def shared_length(prompts: Sequence[Tensor]) -> int:
    """Return how many tokens at the beginning of all prompts are equal.

    The result is at most the length of the shortest prompt minus 2.

    At least two tokens of each prompt remain, because a single token would run as a decode step,
    which searches the index and is not exact.
    """
    return max(min(common_length(prompts), min(map(len, prompts)) - 2), 0)


def to_json(
    answers: Answers, request: Request, model: str, device: str, engine: str
) -> dict[str, Any]:
    """Make the dictionary that the option `--json` writes to a file."""
    result: dict[str, Any] = {"model": model, "index": request.index or "none", "k": request.k}
    result["engine"] = engine
    result |= {"regions": request.regions, "options": request.options, **request.speculation}
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
    if generation.acceptance:
        entry["acceptance"] = vars(generation.acceptance)
    return entry


def _answer_all(
    tokenizer: Any,
    text: str,
    questions: Sequence[str],
    request: Request,
    engine: Engine,
    progress: Bars,
) -> Answers:
    """Read the common prefix of all prompts once, then answer each question in a copy of the cache.

    Without questions, `text` is the only prompt. The model then reads the last tokens of `text`
    after the prefix, in the same way as a question.
    """
    asked: list[tuple[int, str] | None] = [*enumerate(questions, start=1)] or [None]
    texts = [text if one is None else f"{text}\n\n{one[1]}" for one in asked]
    prompts = [_ids(tokenizer, each, request) for each in texts]
    _warn_of_length(max(map(len, prompts)), engine)
    numbered = list(zip(asked, prompts, strict=True))
    options = {"attach_options": _attach_options(engine, request)}
    if engine.one_call and request.keeps_cache:
        raise ValueError(
            "save-cache, load-cache: got one of them with a model that must process a prompt in "
            "one call, so nothing can follow a cache; leave them out"
        )
    if engine.one_call:  # the model reads the text for each question
        options |= _index(request)
        return [
            (
                None if question is None else question[1],
                _answer_one(engine, tokenizer, ids, request, progress, question, **options),
            )
            for question, ids in numbered
        ]
    shared, branch = prompts, bool(questions)
    if questions and request.save_cache:  # save only the prefix that later questions can share
        shared = [*prompts, _ids(tokenizer, f"{text}\n\n", request)]
    length, answers = shared_length(shared), Answers()
    with engine.opened(branch, **_index(request), **options) as document:
        stored = _loaded(document, request.load_cache, prompts[0][:length])
        if length - stored > 1:
            progress.update("reading the prompt", 0, length - stored)
            document.read(prompts[0][stored:length], _callback(progress, "the prompt"))
            stored = length
        if request.save_cache:
            document.save(request.save_cache)
            console.print(f"saved {stored} tokens in {str(request.save_cache)!r}", markup=False)
        for question, ids in numbered:
            options = document.options(branch=branch)
            generation = _answer_one(
                engine, tokenizer, ids[stored:], request, progress, question, **options
            )
            answers.append((None if question is None else question[1], generation))
    return answers


def _loaded(document: Document, folder: Path | None, prompt: Tensor) -> int:
    """Load a saved cache into a document, and return how many tokens of `prompt` it contains.

    Args:
        document: An empty document.
        folder: Folder of the saved cache. With None nothing is loaded.
        prompt: Token ids of the prompt, int64 `[N]`.

    Raises:
        ValueError: The prompt does not begin with the saved tokens. The last `BORDER` saved tokens
            may differ.
    """
    if folder is None:
        return 0
    start = time.perf_counter()
    document.load(folder)
    ids, took = document.ids, time.perf_counter() - start
    if ids is None:
        raise ValueError(
            f"load-cache: got {str(folder)!r}, which contains no token ids; pass a folder that "
            "--save-cache wrote, or a cache that kvhf.read or kvhf.generate filled"
        )
    stored = common_length([ids, prompt])
    if stored < len(ids) - BORDER or not stored:
        raise ValueError(
            f"load-cache: got {str(folder)!r} with {len(ids)} tokens, but only the first {stored} "
            f"equal those of the prompt, and at most the last {BORDER} may differ; pass the prompt "
            "that was saved, with the same --chat"
        )
    if stored < len(ids):
        try:
            document.crop(stored)
        except RuntimeError as error:
            raise ValueError(
                f"load-cache: got {str(folder)!r} with {len(ids)} tokens, of which the last "
                f"{len(ids) - stored} differ from those of the prompt and cannot be removed (a "
                "full sliding window has discarded older tokens, or linear attention has "
                "overwritten its state); pass exactly the prompt that was saved, or leave out "
                "--load-cache"
            ) from error
    console.print(f"loaded {stored} tokens in {took:.1f} s", markup=False)
    return stored


def _answer_one(
    engine: Engine,
    tokenizer: Any,
    ids: Tensor,
    request: Request,
    progress: Bars,
    question: tuple[int, str] | None = None,
    **options: Any,
) -> Generation:
    """Answer the prompt with token ids `ids`, int64 `[N]`.

    If there is a `question` (its number and its text), the text is printed above the answer.
    """
    name, heading = "the prompt", None
    if question is not None:
        name, heading = f"question {question[0]}", question[1]
    progress.update(f"reading {name}", 0, len(ids))  # the first report follows the first chunk
    generation = engine.generate(
        ids,
        max_new_tokens=request.max_new_tokens,
        streamer=TextStreamer(tokenizer, skip_prompt=True, skip_special_tokens=True),
        on_progress=_callback(progress, name, heading),
        **request.speculation,
        **options,
    )
    if generation.report:  # sum over all processes of torchrun; only the first process prints it
        generation = replace(generation, report=generation.report.over_ranks())
    console.print(
        f"{len(generation.prompt_ids)} tokens of {name} in {generation.prefill_s:.1f} s, then "
        f"{generation.token_s * 1000:.0f} ms per token. {generation.summary}"
    )
    return generation


def _callback(progress: Bars, name: str, heading: str | None = None) -> Progress:
    """Make a function that shows the progress of one prompt.

    A bar shows how many tokens of the prompt are read. While the answer is generated, a terminal
    shows the answer itself, and any other output shows a second bar.

    Args:
        progress: The progress bars.
        name: Name of the prompt, as the bars show it.
        heading: Text to print above the answer, or None.
    """
    live = sys.stdout.isatty()

    def update(phase: str, done: int, total: int) -> None:
        if phase == "prefill":
            progress.update(f"reading {name}", done, total)
            if done == total and live:  # stop the bars before the answer is printed
                progress.stop()
            if done == total and heading is not None:
                print(f"> {heading}", flush=True)
        elif not live:
            progress.update(f"answering {name}", done, total)

    return update


def _index(request: Request) -> dict[str, Any]:
    return {"index": request.index, "k": request.k}


def _ids(tokenizer: Any, text: str, request: Request) -> Tensor:
    if not request.chat:
        return encode_prompt(tokenizer, text)
    messages = [{"role": "user", "content": text}]
    if request.system is not None:
        messages.insert(0, {"role": "system", "content": request.system})
    return encode_prompt(tokenizer, messages)
