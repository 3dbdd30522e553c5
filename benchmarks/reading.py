"""What the benchmarks that read with a real model share: its options, its text, its layers."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from rich.progress import Progress
from torch import Tensor

from kvindex_adapters.evaluate.capture import Captured, capture
from kvindex_adapters.files import output, write_json
from kvindex_adapters.machine import describe
from kvindex_adapters.models import load, smollm2

SEED = 0

CHUNK = 32_768
"""Tokens read at once: in float32 attention with groups holds all its logits, 39 GB at 32K."""


def add_model(parser: argparse.ArgumentParser) -> None:
    """Options: which model (SmolLM2-135M-Instruct without any), where it runs, where to write."""
    parser.add_argument("--model")
    parser.add_argument("--gguf-file")
    parser.add_argument("--lora", type=Path)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--json", type=output())


def loaded(given: argparse.Namespace) -> tuple[Any, Any]:
    """The model and its tokenizer. Raises as `kvindex_adapters.models.load`."""
    folder, file = _named(given)
    return load(folder, gguf_file=file, lora=given.lora, device=given.device)


def described(given: argparse.Namespace) -> dict[str, Any]:
    """For a result: the model's name, what was added to it, the machine."""
    folder, file = _named(given)
    return {
        "model": Path(file or folder).name,
        "lora": given.lora.name if given.lora else None,
        "machine": describe(given.device),
    }


def write(result: dict[str, Any], out: Path | None) -> None:
    """The result as JSON, if it is asked for (`files.write_json`)."""
    if out is not None:
        write_json(out, result)


def reported(progress: Progress, title: str) -> Callable[[str, int, int], None]:
    """What shows in a line of `progress` how far reading is."""
    task = progress.add_task(title, total=1.0)
    return lambda _, done, total: progress.update(task, completed=done, total=total)


def clustering(progress: Progress) -> Callable[[int, int], None]:
    """A line of `progress` while keys are clustered, for `kvindex.ops.kmeans.watched`."""
    task = progress.add_task("k-means", total=1.0, visible=False)
    return lambda done, total: progress.update(
        task, completed=done, total=total, visible=done < total
    )


def continued(
    model: Any, tokenizer: Any, text: str, tokens: int, written: int, *, top_p: float = 1.0
) -> Tensor:
    """Ids int64 `[tokens + written]`: the first of the text, then sampled ones.

    Raises ValueError for a text that is too short.
    """
    ids = tokenizer(text, add_special_tokens=False)["input_ids"][:tokens]
    if len(ids) < tokens:
        raise ValueError(f"text: got {len(ids)} tokens, allowed is at least {tokens}")
    prompt = torch.tensor(ids, device=model.device)[None]
    torch.manual_seed(SEED)
    with torch.no_grad():
        found: Tensor = model.generate(
            input_ids=prompt,
            attention_mask=torch.ones_like(prompt),
            min_new_tokens=written,
            max_new_tokens=written,
            do_sample=True,
            temperature=1.0,
            top_k=0,
            top_p=top_p,
            prefill_chunk_size=CHUNK if tokens > CHUNK else None,
        )[0]
    return found


def read_and_write(
    model: Any,
    tokenizer: Any,
    text: str,
    tokens: int,
    written: int,
    progress: Any = None,
    *,
    top_p: float = 1.0,
) -> list[Captured]:
    """Captured layers after `tokens` of the text and `written` sampled ones, the newest queries.

    Raises as `continued`, and what `capture` raises.
    """
    ids = continued(model, tokenizer, text, tokens, written, top_p=top_p)
    return capture(model, ids.cpu(), queries=written, on_progress=progress)


def _named(given: argparse.Namespace) -> tuple[Any, str | None]:
    return (given.model, given.gguf_file) if given.model else smollm2()
