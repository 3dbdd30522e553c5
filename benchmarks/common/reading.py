"""Load a real model for benchmarks, and let it read and generate text.

The keys, values and queries of its layers can be recorded.
"""

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
"""Number of tokens of the prompt that the model reads in one forward pass.

In float32, attention with grouped heads stores all logits, which take 39 GB for 32K tokens.
"""


def add_model(parser: argparse.ArgumentParser) -> None:
    """Add command-line options for the model, the device and the output file."""
    parser.add_argument(
        "--model", help="Folder or Hugging Face id of the model (default: SmolLM2-135M-Instruct)"
    )
    parser.add_argument("--gguf-file", help="Name of the .gguf file inside the model's folder")
    parser.add_argument(
        "--lora", type=Path, help="File with a LoRA adapter to merge into the model"
    )
    parser.add_argument(
        "--device",
        default="cuda" if torch.cuda.is_available() else "cpu",
        help="Device on which the model runs: cpu or cuda (default: cuda, if there is a GPU)",
    )
    parser.add_argument("--json", type=output(), help="JSON file to which the results are written")


def loaded(given: argparse.Namespace, **options: Any) -> tuple[Any, Any]:
    """Load the model that the command line names, and its tokenizer.

    `options` are passed to `load_model.load`.
    """
    folder, file = _named(given)
    return load(folder, gguf_file=file, lora=given.lora, device=given.device, **options)


def described(given: argparse.Namespace) -> dict[str, Any]:
    """Describe the model, its LoRA adapter and the machine, to be stored with the results."""
    folder, file = _named(given)
    return {
        "model": Path(file or folder).name,
        "lora": given.lora.name if given.lora else None,
        "machine": describe(given.device),
    }


def write(result: dict[str, Any], out: Path | None) -> None:
    """Write the results to the JSON file `out`, unless `out` is None."""
    if out is not None:
        write_json(out, result)


def reported(progress: Progress, title: str) -> Callable[[str, int, int], None]:
    """Add a line to a progress display. Return a function that shows how many tokens were read."""
    task = progress.add_task(title, total=1.0)
    return lambda _, done, total: progress.update(task, completed=done, total=total)


def ids_of(tokenizer: Any, text: str, count: int) -> Tensor:
    """Return the first `count` token ids of a text, int64 `[count]`.

    Raise ValueError if the text has fewer tokens.
    """
    ids = tokenizer(text, add_special_tokens=False)["input_ids"][:count]
    if len(ids) < count:
        raise ValueError(f"text: got {len(ids)} tokens, allowed is at least {count}")
    return torch.tensor(ids)


def continued(model: Any, ids: Tensor, written: int) -> Tensor:
    """Let the model continue a text with `written` sampled tokens.

    Return the token ids of the text and its continuation, int64 `[N + written]`.
    """
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
    """Let a model continue a text with `written` sampled tokens, and record data of its layers.

    Return keys and values of all tokens, and the queries of the sampled tokens, for each layer.
    """
    everything = continued(model, ids, written).cpu()
    return capture(model, everything, queries=written, on_progress=reported(progress, title))


def _named(given: argparse.Namespace) -> tuple[Any, str | None]:
    if given.gguf_file is not None and not given.model:
        raise ValueError(
            f"gguf_file: got {given.gguf_file!r} without --model; pass the folder of the file as "
            "--model"
        )
    return (given.model, given.gguf_file) if given.model else smollm2()
