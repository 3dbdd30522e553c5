"""`kvindex demo`: find a sentence in a long prompt, with full attention and with an index."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from kvindex_adapters.cli.options import (
    INDEX,
    DenseBelow,
    Device,
    Dtype,
    JsonFile,
    K,
    Local,
    Sink,
    UpdateEvery,
    announce_imports,
    check_stdout,
)

if TYPE_CHECKING:
    from torch import Tensor

    from kvindex_adapters.cli.progress import Bars
    from kvindex_adapters.evaluate.fidelity import Fidelity
    from kvindex_adapters.evaluate.tasks import Needle
    from kvindex_adapters.hf.cache.cache import IndexCache
    from kvindex_adapters.hf.generate import Generation

MODEL = "SmolLM2-135M-Instruct (Q4_1, computed in {dtype})"
ANSWER_TOKENS = 48
SHORTEST, LONGEST = 500, 8000
"""Prompt lengths in tokens. A prompt and its answer fit into the 8,192 tokens of the model's
context."""


def demo(
    tokens: Annotated[
        int,
        typer.Option(
            help=f"Approximate length of the prompt in tokens, from {SHORTEST} to {LONGEST}."
        ),
    ] = 7000,
    index: Annotated[str, typer.Option(help=f"{INDEX}.")] = "pariskv",
    k: K = 100,
    sink: Sink = 64,
    local_window: Local = 256,
    update_every: UpdateEvery = 256,
    dense_below: DenseBelow = 2048,
    seed: Annotated[
        int,
        typer.Option(
            help="Random seed that chooses the hidden sentence, its position and the order of the "
            "text's paragraphs."
        ),
    ] = 0,
    prompt_file: Annotated[
        Path | None,
        typer.Option(
            help="Text file in which the sentence is hidden; - reads standard input (default: the "
            "Python language reference)."
        ),
    ] = None,
    dtype: Dtype = "float32",
    device: Device = "cpu",
    json_file: JsonFile = None,
) -> None:
    """Let a small model find a sentence hidden in a long prompt.

    The command runs the model with full attention and with an index. It compares the answers, the
    fraction of keys and values that attention reads, memory and time.
    """
    check_stdout()
    announce_imports()
    from kvindex.core import check
    from kvindex_adapters.cli import common
    from kvindex_adapters.cli.progress import bars, console
    from kvindex_adapters.evaluate.machine import describe
    from kvindex_adapters.evaluate.output_files import check_output, write_json
    from kvindex_adapters.evaluate.tasks import hide
    from kvindex_adapters.evaluate.texts import paragraphs, python_reference
    from kvindex_adapters.hf.attach import attach
    from kvindex_adapters.hf.generation.tokenizer import punctuated
    from kvindex_adapters.hf.model import load_model

    number = common.check_dtype(dtype)
    common.check_size("tokens", tokens, SHORTEST, LONGEST)
    load_model.check_device(device)
    regions = dict(
        sink=sink, local_window=local_window, update_every=update_every, dense_below=dense_below
    )
    common.check_search(index, k, device, regions)
    check.seed(seed)
    check_output("json", json_file)
    text = paragraphs(common.read_text(prompt_file)) if prompt_file else python_reference()
    folder, file = load_model.smollm2()
    console.print("loading the model")  # transformers shows its own progress bars
    model, tokenizer = load_model.load(folder, gguf_file=file, dtype=number, device=device)
    common.wait_for_compiler(index, device)  # `check_search` has started it
    with bars() as progress:
        needle = hide(tokenizer, text, tokens=tokens, seed=seed)
        logits: list[Tensor] = []
        dense: dict[str, Any] = dict(index=None, logits_processor=[_Recorder(logits)])
        full = _answer(progress, "full attention", model, tokenizer, needle.ids, **dense)
        options = punctuated(index, tokenizer, regions)
        with attach(model, index=index, k=k, **options) as cache:
            name = index.partition(":")[0]
            indexed = _answer(progress, name, model, tokenizer, needle.ids, cache=cache)
            fidelity = _compared(progress, model, cache, indexed, full, logits)
    result = _result(needle, index, k, full, indexed, fidelity)
    result |= {"model": MODEL.format(dtype=dtype), "machine": describe(device)}
    _show(result)
    if json_file:
        write_json(json_file, result, indent=2)


def _answer(
    progress: Bars, name: str, model: Any, tokenizer: Any, ids: Tensor, **options: Any
) -> Generation:
    from kvindex_adapters.cli.progress import Answer
    from kvindex_adapters.hf.generate import generate

    def report(phase: str, done: int, total: int) -> None:
        if phase == "prefill":
            progress.update(f"{name}: reading", done, total)

    report("prefill", 0, len(ids))  # the first report follows the first chunk
    return generate(
        model,
        tokenizer,
        ids,
        max_new_tokens=ANSWER_TOKENS,
        streamer=Answer(progress, name, tokenizer),
        on_progress=report,
        **options,
    )


class _Recorder:
    """A logits processor of transformers that records the logits of every decode step."""

    def __init__(self, logits: list[Tensor]) -> None:
        self._logits = logits

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        self._logits.append(scores[0].clone())
        return scores


def _compared(
    progress: Bars,
    model: Any,
    cache: IndexCache,
    indexed: Generation,
    full: Generation,
    logits: list[Tensor],
) -> Fidelity:
    """Compare the model with the index and with full attention at each token of the same answer.

    The model with the index reads the answer that full attention generated. Its cache still
    contains its own answer, which is removed first.

    Args:
        progress: The progress bars.
        model: The model with the index.
        cache: The cache of the model with the index.
        indexed: The answer with the index.
        full: The answer with full attention.
        logits: Logits that full attention computed for each token of its answer, `[V]` each.
    """
    import torch

    from kvindex_adapters.evaluate.fidelity import followed
    from kvindex_adapters.hf.generation.prefill import prefill

    last = indexed.prompt_ids[-2:]  # reading more than one token finishes a pending append
    cache.crop(-len(indexed.answer_ids) - len(last))
    with torch.no_grad():
        prefill(model, last, cache, stop=len(last), chunk=len(last))
        return followed(
            model,
            cache,
            full.answer_ids[:-1],
            torch.stack(logits)[1:],
            on_progress=lambda done, total: progress.update("comparing step by step", done, total),
        )


def _result(
    needle: Needle, index: str, k: int, full: Generation, indexed: Generation, fidelity: Fidelity
) -> dict[str, Any]:
    """Make the dictionary that the option `--json` writes to a file."""
    assert indexed.report is not None
    return {
        "prompt_tokens": len(needle.ids),
        "needle": needle.value,
        "full": {
            "answer": full.text,
            "found": needle.found(full.text),
            "prefill_s": full.prefill_s,
            "token_s": full.token_s,
        },
        "index": {
            "name": index.partition(":")[0],
            "backend": indexed.backend,
            "config": dataclasses.asdict(indexed.config),
            "k": k,
            "answer": indexed.text,
            "found": needle.found(indexed.text),
            "prefill_s": indexed.prefill_s,
            "token_s": indexed.token_s,
            "read": indexed.report.read,
            "rows_read_fraction": indexed.report.rows_read_fraction,
            "recall_at_k": fidelity.recall_at_k,
            "recall_limit": fidelity.recall_limit,
            "kl_mean": fidelity.kl_mean,
            "agreement": fidelity.agreement,
            "nbytes": indexed.report.nbytes,
        },
        "steps_compared": fidelity.steps,
    }


def _show(result: dict[str, Any]) -> None:
    from rich.console import Console
    from rich.table import Table

    full, index = result["full"], result["index"]
    tiers = ", ".join(f"{tier} {size / 2**20:.1f} MiB" for tier, size in index["nbytes"].items())
    k, steps = index["k"], result["steps_compared"]
    table = Table("", "full attention", f"{index['name']}, k = {k}", title=result["model"])
    table.add_row("answer", full["answer"], index["answer"])
    table.add_row(
        f"needle {result['needle']} found", *("yes" if r["found"] else "no" for r in (full, index))
    )
    read = f"{index['rows_read_fraction']:.1%}"
    if index["recall_at_k"] is None:
        read += f" ({index['read']})"
    table.add_row("rows read per token", "100%", read)
    recall = "the index was not searched"
    if index["recall_at_k"] is not None:
        limit = f"exact search with the same number of rows: {index['recall_limit']:.2f}"
        recall = f"{index['recall_at_k']:.2f} ({limit})"
    table.add_row(f"recall@{k} of each head's own top {k}", "1", recall)
    table.add_row(
        f"same next token, mean KL ({steps} steps)",
        "1, 0",
        f"{index['agreement']:.2f}, {index['kl_mean']:.4f} nats",
    )
    table.add_row("memory", "", tiers)
    table.add_row("prefill", f"{full['prefill_s']:.1f} s", f"{index['prefill_s']:.1f} s")
    table.add_row("per token", f"{full['token_s']:.3f} s", f"{index['token_s']:.3f} s")
    if index["token_s"]:  # it is 0 for an answer of one token
        table.add_row("speedup per token", "1", f"{full['token_s'] / index['token_s']:.2f}")
    out = Console()
    out.print(table)
    out.print(
        f"{result['prompt_tokens']} prompt tokens; {_where(result['machine'], index['backend'])}."
    )


def _where(machine: dict[str, Any], backend: str) -> str:
    """Return a phrase that names the index's backend, and the GPU or CPU on which it ran."""
    cores = f"{machine['threads']} of {machine['cores']} cores of {machine['processor']}"
    return f"backend {backend!r} on {machine.get('gpu', cores)}"
