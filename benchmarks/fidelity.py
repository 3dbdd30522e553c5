"""How near the real model stays to full attention: KL, agreement and recall, teacher-forced.

    python benchmarks/fidelity.py [--index SPEC …] [--json OUT]

SmolLM2-135M-Instruct reads 4,000 tokens of the Python language reference, then the next 200
tokens of it one at a time through each index. Full attention reads the same in one pass.
"""

from __future__ import annotations

import argparse
import dataclasses
import random
from typing import Any

import torch
from rich.progress import Progress
from torch import Tensor

from kvindex_adapters.evaluate.fidelity import Fidelity, teacher_forced
from kvindex_adapters.evaluate.texts import python_reference
from kvindex_adapters.files import output, write_json
from kvindex_adapters.machine import describe
from kvindex_adapters.models import load, smollm2

PROMPT, CONTINUATION, K, SEED = 4000, 200, 100, 0
INDEXES = (
    *("exact", "pariskv", "pariskv+sample", "pariskv:preset=accurate", "pariskv:preset=paper"),
    "pariskv:group=mean_query",  # as published
)


def text_ids(tokenizer: Any, count: int, seed: int) -> Tensor:
    """The first `count` tokens of the reference's paragraphs in random order, int64 `[count]`."""
    text = python_reference()
    random.Random(seed).shuffle(text)
    ids = tokenizer("\n\n".join(text), add_special_tokens=False)["input_ids"]
    return torch.tensor(ids[:count], dtype=torch.int64)


def measure(model: Any, tokenizer: Any, index: str, on_progress: Any = None) -> Fidelity:
    """The fidelity of one index on the fixed text."""
    ids = text_ids(tokenizer, PROMPT + CONTINUATION, SEED)
    return teacher_forced(
        model, ids[:PROMPT], ids[PROMPT:], index=index, k=K, on_progress=on_progress
    )


def main() -> None:
    """Measure, print and write."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--index", nargs="+", default=INDEXES)
    parser.add_argument("--json", type=output())
    arguments = parser.parse_args()
    folder, file = smollm2()
    model, tokenizer = load(folder, gguf_file=file)
    found: dict[str, Any] = {}
    for index in arguments.index:
        with Progress() as progress:
            task = progress.add_task(index, total=CONTINUATION)
            result = measure(
                model, tokenizer, index, lambda done, _, t=task: progress.update(t, completed=done)
            )
        found[index] = dataclasses.asdict(result)
        print(index, found[index])
    if arguments.json:
        written = {
            "model": file,
            "text": "pydoc_data.topics, paragraphs in random order",
            "prompt_tokens": PROMPT,
            "steps": CONTINUATION,
            "k": K,
            "seed": SEED,
            "machine": describe(),
            "indexes": found,
        }
        write_json(arguments.json, written, indent=2)


if __name__ == "__main__":
    main()
