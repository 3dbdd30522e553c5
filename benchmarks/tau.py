"""The threshold at which hits are reused (`reuse`): found on one text, tried on another.

    python -m benchmarks.tau --text FILE --other FILE [--tokens N] [--steps T] [--held SHARE]
        [--index SPEC] [--model … --gguf-file … --lora …] [--device …] --json OUT

Steps are the newest T of N tokens of a text; what a step's own search would find is that of exact
search. The index then writes T tokens more after the other text, with the threshold found.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.progress import Progress
from rich.table import Table
from torch import Tensor

import kvindex_adapters.hf as kvhf
from benchmarks.reading import add_model, described, loaded, reported, write
from kvindex_adapters.evaluate.capture import capture
from kvindex_adapters.evaluate.tau import calibrate_tau, calibrated


def tried(
    model: Any, ids: Tensor, other: Tensor, *, steps: int, k: int, held: float, report: Any = None
) -> dict[str, Any]:
    """The threshold for ids int64 `[N]`, and what each threshold does on both texts."""
    found = calibrate_tau(model, ids, steps=steps, k=k, held=held, on_progress=report)
    layers = capture(model, other, queries=steps + 1, on_progress=report)
    taus = [point.tau for point in found.points]
    elsewhere = calibrated(layers, k=k, held=held, taus=taus)
    points = [
        {"tau": here.tau, "rate": here.rate, "held": here.held}
        | {"other_rate": there.rate, "other_held": there.held}
        for here, there in zip(found.points, elsewhere.points, strict=True)
    ]
    return {"tau": found.tau, "points": points}


def rate(model: Any, ids: Tensor, index: str, steps: int, **options: Any) -> float:
    """Share of the steps of all layers that search while `steps` tokens are written after ids.

    options: of `attach`.
    """
    with kvhf.attach(model, index=index, dense_below=0, **options) as cache, torch.no_grad():
        inputs = {"input_ids": ids[None], "attention_mask": torch.ones_like(ids[None])}
        lengths = dict(min_new_tokens=steps, max_new_tokens=steps)
        model.generate(**inputs, past_key_values=cache, do_sample=False, **lengths)
        rates = [made.rate() for made in cache.indexes()]
    return sum(rates) / len(rates)


def main() -> None:
    """Calibrate, try, write, report."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--text", type=Path, required=True)
    parser.add_argument("--other", type=Path, required=True)
    parser.add_argument("--tokens", type=int, default=4000)
    parser.add_argument("--steps", type=int, default=256)
    parser.add_argument("--held", type=float, default=0.8)
    parser.add_argument("--k", type=int, default=100)
    parser.add_argument("--index", default="louiskv")
    add_model(parser)
    given = parser.parse_args()
    model, tokenizer = loaded(given)
    texts = []
    for path in (given.text, given.other):
        ids = tokenizer(path.read_text(), add_special_tokens=False)["input_ids"][: given.tokens]
        texts.append(torch.tensor(ids, device=model.device))
    about = dict(steps=given.steps, k=given.k, held=given.held)
    with Progress() as progress:
        report = reported(progress, "reading")
        found = tried(model, *(ids.cpu() for ids in texts), report=report, **about)
    index = f"{given.index}+reuse:tau={found['tau']}"
    in_model = {"index": index, "rate": rate(model, texts[1], index, given.steps, k=given.k)}
    table = Table("τ", "searches", "held", f"{given.other.stem}: searches", "held")
    for point in found["points"]:
        table.add_row(*(f"{value:.3f}" for value in point.values()))
    Console().print(table)
    Console().print(f"{index}: {in_model['rate']:.3f} of the steps search")
    names = {"text": given.text.stem, "other": given.other.stem, "tokens": given.tokens}
    write({**described(given), **names, **about, **found, "in_model": in_model}, given.json)


if __name__ == "__main__":
    main()
