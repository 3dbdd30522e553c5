"""`kvindex demo`: answer questions about a long text, with full attention and with an index."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import median, quantiles
from typing import TYPE_CHECKING, Annotated, Any

import typer

from kvindex_adapters.cli.early import DTYPES, check_lora, check_model, check_name, read_text
from kvindex_adapters.cli.options import (
    INDEX,
    DenseBelow,
    Device,
    Error,
    GgufFile,
    JsonFile,
    K,
    Local,
    Lora,
    Prefill,
    PrefillMass,
    PrefillSelector,
    Sink,
    UpdateEvery,
    announce_imports,
    check_stdout,
    number_of_tokens,
)

if TYPE_CHECKING:
    from torch import Tensor
    from transformers import DynamicCache

    from kvindex_adapters.cli.progress import Bars, Times
    from kvindex_adapters.evaluate.tasks import Hidden
    from kvindex_adapters.hf.cache.cache import IndexCache
    from kvindex_adapters.hf.generate import Generation

ANSWER_TOKENS = 32
"""Maximum number of tokens of an answer."""

WARM_UP = 2
"""Number of first tokens of each answer that the times leave out."""

SHORT = 8
"""Number of tokens that are timed on a quarter of the document, to find where the gain starts."""

ENGINES = ("full", "index")
"""Names of the two halves of the result."""

VARYING = 1.5
"""Upper quartile of the token times over the lower one from which the command warns that they
vary. On an idle machine it is about 1.1."""

SHORTEST, LONGEST = 500, 32_000
"""Prompt lengths in tokens."""


def demo(
    tokens: Annotated[
        Any,
        typer.Option(
            parser=number_of_tokens,
            metavar="TOKENS",
            help=f"Approximate length of the document in tokens, from {SHORTEST} to {LONGEST}, for "
            "example 8000 or 8K.",
        ),
    ] = 12_000,
    questions: Annotated[int, typer.Option(help="Number of questions, from 1 to 8.")] = 3,
    model: Annotated[
        str | None,
        typer.Option(
            help="Model, as in kvindex generate (default: smollm2-long, or smollm2 where the "
            "adapter of smollm2-long is missing)."
        ),
    ] = None,
    gguf_file: GgufFile = None,
    lora: Lora = None,
    index: Annotated[str, typer.Option(help=f"{INDEX}.")] = "pariskv",
    k: K = 256,
    error: Error = None,
    sink: Sink = 64,
    local_window: Local = 256,
    update_every: UpdateEvery = 256,
    dense_below: DenseBelow = 2048,
    prefill: Prefill = "dense",
    prefill_mass: PrefillMass = 0.95,
    prefill_selector: PrefillSelector = "sampled",
    seed: Annotated[
        int,
        typer.Option(help="Seed for the hidden facts, their places and the order of the text."),
    ] = 2,
    prompt_file: Annotated[
        Path | None,
        typer.Option(
            help="Text file to hide the facts in; - reads standard input (default: the Python "
            "language reference)."
        ),
    ] = None,
    dtype: Annotated[
        str | None,
        typer.Option(
            help="Data type of the model, as in kvindex generate (default: int8 on a CPU, where "
            "reading the weights takes much of a decode step; float32 on a GPU)."
        ),
    ] = None,
    device: Device = "cpu",
    json_file: JsonFile = None,
) -> None:
    """Let a small model answer questions about a long document.

    The model reads the document once. Then it answers each question with full attention and with an
    index, and the command compares answers, rows read, memory and time. With --prefill sparse, -k
    auto or --error, the model reads the document a second time, for the index.
    """
    check_stdout()
    if model is not None:
        check_model(model)
    check_lora(lora)
    check_name("dtype", dtype, DTYPES)
    given = read_text(prompt_file) if prompt_file else None
    announce_imports()
    from kvindex.core import check
    from kvindex_adapters.cli import common
    from kvindex_adapters.cli.progress import bars, console
    from kvindex_adapters.evaluate.machine import describe
    from kvindex_adapters.evaluate.output_files import check_output, write_json
    from kvindex_adapters.evaluate.tasks import hide
    from kvindex_adapters.evaluate.texts import paragraphs, python_reference
    from kvindex_adapters.hf.model import int8, load_model

    load_model.check_device(device)
    on_cpu = device.startswith("cpu") and int8.supported()
    dtype = dtype or ("int8" if on_cpu else "float32")
    number = common.check_dtype(dtype)
    common.check_size("tokens", tokens, SHORTEST, LONGEST)
    common.check_size("questions", questions, 1, 8)
    regions = dict(
        sink=sink,
        local_window=local_window,
        update_every=update_every,
        dense_below=dense_below,
        prefill=prefill,
        prefill_mass=prefill_mass,
        prefill_selector=prefill_selector,
        **({} if error is None else {"error": error}),
    )
    common.check_search(index, k, device, regions)
    check.seed(seed)
    check_output("json", json_file)
    text = python_reference() if given is None else paragraphs(given)
    short, long = load_model.NAMES
    name = model or (long if load_model.LONG_FILE.is_file() else short)
    console.print("loading the model")  # transformers shows its own progress bars
    source = dict[str, Any](gguf_file=gguf_file, lora=lora)
    loaded, tokenizer = load_model.load(name, **source, dtype=number, device=device)
    common.wait_for_compiler(index, device)  # `check_search` has started it
    hidden = hide(tokenizer, text, tokens=tokens, seed=seed, count=questions)
    with bars() as progress:
        result = _compared(progress, loaded, tokenizer, hidden, index, k, regions)
    name = (gguf_file or name) + (f" with {lora.name}" if lora else "")
    result |= {"model": f"{name} ({dtype})", "machine": describe(device)}
    _show(result)
    if json_file:
        write_json(json_file, result, indent=2)


@dataclass
class Asked:
    """The answers of one engine, and the times of their tokens.

    Args:
        answers: Text of each answer.
        token_s: Seconds of each decode step, first steps of answers left out.
    """

    answers: list[str] = dataclasses.field(default_factory=list)
    token_s: list[float] = dataclasses.field(default_factory=list)

    def add(self, text: str, streamer: Times) -> None:
        """Add an answer and its times."""
        self.answers.append(" ".join(text.split()))
        steps = [b - a for a, b in zip(streamer.times, streamer.times[1:], strict=False)]
        self.token_s += steps[WARM_UP:] or steps


def _compared(
    progress: Bars,
    model: Any,
    tokenizer: Any,
    hidden: Hidden,
    index: str,
    k: int | str,
    regions: dict[str, Any],
) -> dict[str, Any]:
    """Read the document once, answer all questions with both engines, and return the result.

    The engines take turns, so that another program on the machine slows down both. Only if the
    index cannot take over the keys and values of the document, it answers all questions at once.
    """
    import time

    from transformers import DynamicCache

    from kvindex.core.config import split_spec
    from kvindex_adapters.cli.progress import Answer, Times
    from kvindex_adapters.hf.attach import attach
    from kvindex_adapters.hf.generation.prefill import default_chunk, prefill
    from kvindex_adapters.hf.generation.tokenizer import punctuated

    document = hidden.prompts[0][: hidden.shared].to(model.device)
    past = DynamicCache(config=model.config)
    report = _phase(progress, "reading the document")
    report("prefill", 0, len(document))  # the first report follows the first chunk
    start = time.perf_counter()
    with _no_grad():
        stop, chunk = len(document), default_chunk(model)
        prefill(model, document, past, stop=stop, chunk=chunk, report=report)
    read_s = time.perf_counter() - start
    full, attached, plain_bytes = Asked(), Asked(), _nbytes(past)
    name = split_spec(index.partition("+")[0])[0]
    # a limit of the error follows from the outputs of the document, which `past` does not contain
    again = regions["prefill"] == "sparse" or k == "auto" or "error" in regions
    attaching = partial(attach, model, index=index, k=k, **punctuated(index, tokenizer, regions))
    prompts, asked = list(enumerate(hidden.prompts, start=1)), 0
    fills = []
    for number, ids in prompts:
        streamer = Answer(progress, f"full attention {number}", tokenizer)
        _ask(model, tokenizer, past, ids, full, streamer)
        if asked == len(prompts):
            continue
        with attaching() as cache:
            start = time.perf_counter()
            taken = _fill(progress, model, tokenizer, cache, past, document, again=again)
            fills.append(time.perf_counter() - start)
            nbytes = cache.report().nbytes
            for other, question in prompts[asked : number if taken else None]:
                asked = other
                how = progress, f"{name} {other}", model, tokenizer, cache, question, attached
                generation = _search(*how)
    fill_s = fills[0]
    past.crop(hidden.shared // 4 - hidden.shared)  # minus the number of tokens to remove
    short = Asked()
    few = hidden.prompts[0][: hidden.shared // 4 + 2]
    _ask(model, tokenizer, past, few, short, Times(), tokens=SHORT)
    assert generation.report is not None
    token_s, full_s = median(attached.token_s), median(full.token_s)
    values = [needle.value for needle in hidden.needles]
    return {
        "prompt_tokens": len(hidden.prompts[0]),
        "questions": [dataclasses.asdict(needle) for needle in hidden.needles],
        "full": {
            "answers": full.answers,
            "found": [v in a for v, a in zip(values, full.answers, strict=True)],
            "read_s": read_s,
            "token_s": full_s,
            "quartiles_s": _quartiles(full.token_s),
            "steps": len(full.token_s),
            "nbytes": plain_bytes,
        },
        "index": {
            "name": index,
            "backend": generation.backend,
            "config": dataclasses.asdict(generation.config),
            "k": k,
            "answers": attached.answers,
            "found": [v in a for v, a in zip(values, attached.answers, strict=True)],
            "read_s": read_s + fill_s if taken else fill_s,
            "fill_s": fill_s if taken else None,
            "token_s": token_s,
            "quartiles_s": _quartiles(attached.token_s),
            "steps": len(attached.token_s),
            "read": generation.report.read,
            "rows_read": generation.report.rows_read,
            "rows_full": generation.report.rows_full,
            "nbytes": nbytes,
        },
        "speedup": full_s / token_s if token_s else None,
        "gain_from": _gain_from(
            hidden.shared, full_s, median(short.token_s), token_s, regions["dense_below"]
        ),
    }


def _no_grad() -> Any:
    import torch

    return torch.no_grad()


def _phase(progress: Bars, name: str) -> Callable[[str, int, int], None]:
    """Make a function that shows the reading of a text as a bar."""

    def report(phase: str, done: int, total: int) -> None:
        if phase == "prefill":
            progress.update(name, done, total)

    return report


def _nbytes(past: DynamicCache) -> int:
    """Bytes of all keys and values of a cache."""
    return sum(layer.keys.nbytes + layer.values.nbytes for layer in past.layers)


def _fill(
    progress: Bars,
    model: Any,
    tokenizer: Any,
    cache: IndexCache,
    past: DynamicCache,
    ids: Tensor,
    *,
    again: bool,
) -> bool:
    """Fill the indexes with the document, from its keys and values in `past` if possible.

    If `again` is True, the model reads the document again instead, with the attention of `cache`.
    It also does so if the index needs queries.

    Returns:
        True if the keys and values come from `past`.
    """
    from kvindex_adapters.hf.generation.prefill import read

    if not again:
        with suppress(ValueError):
            cache.from_cache(past, ids=ids[None])
            return True
    report = _phase(progress, "reading it for the index")
    report("prefill", 0, len(ids))  # the first report follows the first chunk
    read(model, tokenizer, ids, cache=cache, on_progress=report)
    return False


def _ask(
    model: Any,
    tokenizer: Any,
    past: DynamicCache,
    ids: Tensor,
    asked: Asked,
    streamer: Times,
    tokens: int = ANSWER_TOKENS,
) -> None:
    """Answer a prompt `[N]` with full attention. `past` stores its beginning, and is restored."""
    import torch

    from kvindex_adapters.hf.model.cache_argument import CACHE

    stored = past.get_seq_length()
    inputs = ids.to(model.device)[None]
    out = model.generate(
        input_ids=inputs,
        attention_mask=torch.ones_like(inputs),
        max_new_tokens=tokens,
        do_sample=False,
        streamer=streamer,
        **{CACHE: past},
    )
    past.crop(stored - past.get_seq_length())  # minus the number of tokens to remove
    asked.add(tokenizer.decode(out[0, len(ids) :], skip_special_tokens=True), streamer)


def _search(
    progress: Bars,
    name: str,
    model: Any,
    tokenizer: Any,
    cache: IndexCache,
    ids: Tensor,
    asked: Asked,
) -> Generation:
    """Answer a prompt `[N]` with the index. `cache` stores its beginning, and is restored."""
    from kvindex_adapters.cli.progress import Answer
    from kvindex_adapters.hf.generate import generate

    streamer = Answer(progress, name, tokenizer)
    generation = generate(
        model,
        tokenizer,
        ids[cache.get_seq_length() :],
        cache=cache,
        used="branch",
        max_new_tokens=ANSWER_TOKENS,
        streamer=streamer,
    )
    asked.add(generation.text, streamer)
    return generation


def _gain_from(
    tokens: int, full_s: float, quarter_s: float, index_s: float, dense_below: int
) -> int | None:
    """Estimate the length from which a decode step of the index is faster.

    Full attention's time is taken as a line through its times at `tokens` and at a quarter of them,
    and the index's time as constant. None if the index is not faster.
    """
    if index_s >= full_s:
        return None
    slope = (full_s - quarter_s) / (tokens - tokens // 4)
    if slope <= 0:
        return dense_below
    return max(dense_below, round(tokens - (full_s - index_s) / slope))


def _show(result: dict[str, Any]) -> None:
    from rich.console import Console
    from rich.table import Table

    out = Console()
    full, index = result["full"], result["index"]
    table = Table("", "full attention", f"{index['name']}, k = {index['k']}", title=result["model"])
    answers = zip(result["questions"], full["answers"], index["answers"], strict=True)
    for needle, ours, theirs in answers:
        table.add_row(f"number for {needle['key']}: {needle['value']}", ours, theirs)
    table.add_row("rows read per token", *_rows(index))
    memory = ", ".join(f"{kind} {_mib(size)}" for kind, size in index["nbytes"].items())
    table.add_row(
        "memory of the document",
        _mib(full["nbytes"]),
        f"{_mib(sum(index['nbytes'].values()))} ({memory})",
    )
    table.add_row("reading the document", f"{full['read_s']:.1f} s", _reading(index))
    table.add_row("time per token", *(f"{one['token_s'] * 1000:.0f} ms" for one in (full, index)))
    out.print(table)
    out.print(_conclusion(result), markup=False)
    out.print(
        f"{result['prompt_tokens']} prompt tokens, medians of {full['steps']} and {index['steps']} "
        f"decode steps; {_where(result['machine'], index['backend'])}.",
        markup=False,
    )


def _rows(found: dict[str, Any]) -> tuple[str, str]:
    """Describe how many rows (keys and values of tokens) a decode step reads, for both engines."""
    if not found["rows_full"]:
        return "all", f"all ({found['read']})"
    fraction = found["rows_read"] / found["rows_full"]
    return f"{found['rows_full']:.0f}", f"{found['rows_read']:.0f} ({fraction:.1%})"


def _reading(found: dict[str, Any]) -> str:
    if found["fill_s"] is None:
        return f"{found['read_s']:.1f} s"
    return f"the same, and {found['fill_s']:.1f} s to fill the index"


def _mib(size: float) -> str:
    return f"{size / 2**20:.0f} MiB"


def _quartiles(times: list[float]) -> tuple[float, float]:
    """Return the lower and the upper quartile of some times."""
    lower, _, upper = quantiles(times, n=4) if len(times) > 1 else times * 3
    return lower, upper


def _varied(result: dict[str, Any]) -> float:
    """Return the largest ratio of the upper to the lower quartile of the times per token."""
    return max(upper / lower for lower, upper in (result[name]["quartiles_s"] for name in ENGINES))


def _busy(result: dict[str, Any]) -> str:
    """Return a sentence that warns of varying times, or "" if they hardly vary."""
    if (ratio := _varied(result)) < VARYING:
        return ""
    return (
        f" But the times varied: the upper quartile is {ratio:.1f} times the lower one, so other "
        "programs were probably busy. Run the demo again on an idle machine, or with as many "
        "threads as there are free cores (OMP_NUM_THREADS=1 kvindex demo)."
    )


def _conclusion(result: dict[str, Any]) -> str:
    """Say in one sentence what the table shows, and add a warning if the times varied."""
    return _finding(result) + _busy(result)


def _finding(result: dict[str, Any]) -> str:
    full, index, speedup = result["full"], result["index"], result["speedup"]
    count, (ours, theirs) = len(full["found"]), (sum(one["found"]) for one in (full, index))
    found = (
        f"Both find {ours} of {count} numbers"
        if ours == theirs
        else f"Full attention finds {ours} of {count} numbers and the index {theirs}"
    )
    if not index["rows_full"]:
        return f"{found}. The index was not searched ({index['read']})."
    if result["gain_from"] is None and _varied(result) >= VARYING:
        return f"{found}."
    if result["gain_from"] is None:
        return (
            f"{found}, but the index is not faster here: {1 / speedup:.2f} times the time per "
            "token. It pays for longer texts."
        )
    return (
        f"{found}, and a token takes {full['token_s'] / index['token_s']:.2f} times as long with "
        f"full attention. On this machine the gain starts at about {result['gain_from']} tokens, "
        "and grows with the length of the text."
    )


def _where(machine: dict[str, Any], backend: str) -> str:
    """Describe the backend that was used, and the processor on which it ran."""
    cores = f"{machine['threads']} of {machine['cores']} cores of {machine['processor']}"
    return f"backend {backend!r} on {machine.get('gpu', cores)}"
