"""Load a real model for benchmarks: options, text, layers, and text that the model generates."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from rich.progress import Progress
from torch import Tensor

from kvindex_adapters.evaluate.capture import Captured, capture
from kvindex_adapters.evaluate.machine import describe
from kvindex_adapters.evaluate.output_files import output, write_json
from kvindex_adapters.hf.model.load_model import load, smollm2

SEED = 0

CHUNK = 32_768
"""Number of tokens in a chunk of the prompt. In float32, grouped attention stores all its logits,
which would take 39 GB for 32K tokens at once."""


def add_model(parser: argparse.ArgumentParser) -> None:
    """Add options for the model (SmolLM2-135M-Instruct by default), device and output file."""
    parser.add_argument("--model")
    parser.add_argument("--gguf-file")
    parser.add_argument("--lora", type=Path)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--json", type=output())


def loaded(given: argparse.Namespace, **options: Any) -> tuple[Any, Any]:
    """Load the model and its tokenizer. Options and errors are those of `load_model.load`."""
    folder, file = _named(given)
    return load(folder, gguf_file=file, lora=given.lora, device=given.device, **options)


def described(given: argparse.Namespace) -> dict[str, Any]:
    """Return the model's name, its LoRA adapter and the machine, for a result."""
    folder, file = _named(given)
    return {
        "model": Path(file or folder).name,
        "lora": given.lora.name if given.lora else None,
        "machine": describe(given.device),
    }


def write(result: dict[str, Any], out: Path | None) -> None:
    """Write the result as JSON if the command line asks for it."""
    if out is not None:
        write_json(out, result)


def reported(progress: Progress, title: str) -> Callable[[str, int, int], None]:
    """Return a callback that shows in a line of `progress` how many tokens were read."""
    task = progress.add_task(title, total=1.0)
    return lambda _, done, total: progress.update(task, completed=done, total=total)


def ids_of(tokenizer: Any, text: str, count: int) -> Tensor:
    """Return the first `count` ids of a text, int64 `[count]`. ValueError: it has fewer."""
    ids = tokenizer(text, add_special_tokens=False)["input_ids"][:count]
    if len(ids) < count:
        raise ValueError(f"text: got {len(ids)} tokens, allowed is at least {count}")
    return torch.tensor(ids)


def continued(model: Any, ids: Tensor, written: int) -> Tensor:
    """Return ids int64 `[N + written]`: the given ids, then ids that the model samples."""
    prompt = ids[None].to(model.device)
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
            top_p=1.0,
            prefill_chunk_size=CHUNK if len(ids) > CHUNK else None,
        )[0]
    return found


def read_and_write(
    model: Any, ids: Tensor, written: int, progress: Progress, title: str
) -> list[Captured]:
    """Read `ids`, sample `written` tokens, and capture the layers with their newest queries."""
    everything = continued(model, ids, written).cpu()
    return capture(model, everything, queries=written, on_progress=reported(progress, title))


def _named(given: argparse.Namespace) -> tuple[Any, str | None]:
    return (given.model, given.gguf_file) if given.model else smollm2()
