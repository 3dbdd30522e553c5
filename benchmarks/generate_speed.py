"""What a decoded token costs beside dense attention, with graphs and without.

    PYTHONPATH=.:adapters python benchmarks/generate_speed.py --text FILE [--tokens N]
        [--written T] [--runs R] [--layers L] [--context N] [--steps S] [--seconds S]
        [--model … --gguf-file … --lora …] [--dtype …] [--device …] --json OUT

`layers`: L attention layers (H = 32, G = 8, D = 128, `pariskv`) over N made-up tokens each. First
what they give with graphs is compared with what they give without, which must be the same to the
bit; else nothing is timed. Then the microseconds that the host spends on a layer and token, the
device being idle at the start of each step, and those until the device is done: medians over S
steps, updates of the windows among them. `model`: the text's first N tokens are a prompt, after
which T tokens are written greedily, by transformers with its own cache (`dense`) and through
`pariskv`; seconds per token, median of R runs after one that warms up.
"""

from __future__ import annotations

import argparse
import statistics
import time
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from torch import Tensor

import kvindex
from benchmarks.reading import add_model, described, write
from kvindex.layer import AttentionLayer
from kvindex_adapters.hf.generation import generate
from kvindex_adapters.hf.place import placed
from kvindex_adapters.models import load, smollm2

H, G, D = 32, 8, 128
INDEX, LOCAL = "pariskv", 256
PLANS = {"dense": "transformers, dense attention", "eager": "graphs off", "graphs": "graphs on"}

CHECKED = 20
"""Steps whose results are compared."""


def arguments(given: list[str] | None = None) -> argparse.Namespace:
    """What the command was told; exits with words where it cannot be done."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--text", type=Path, required=True)
    parser.add_argument("--tokens", type=int, default=7000, help="of the prompt")
    parser.add_argument("--written", type=int, default=256, help="tokens that are timed")
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--layers", type=int, default=16)
    parser.add_argument("--context", type=int, default=32_768, help="tokens of each layer")
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--seconds", type=float, default=600, help="after which no run is begun")
    parser.add_argument("--dtype", choices=("float32", "float16", "bfloat16"), default="bfloat16")
    add_model(parser)
    found = parser.parse_args(given)
    least = dict(tokens=1, written=2, runs=1, layers=1, context=LOCAL + 256, steps=1)
    for name, low in least.items():
        if getattr(found, name) < low:
            parser.error(f"{name}: got {getattr(found, name)}, allowed is at least {low}")
    if not found.text.is_file():
        parser.error(f"text: got {found.text}, allowed is a file that exists")
    return found


class Layers:
    """Attention layers that hold `context` tokens, and attend from one token after the other."""

    def __init__(self, given: argparse.Namespace, *, graphs: bool) -> None:
        self._device, self._token = torch.device(given.device), 0
        dtype = getattr(torch, given.dtype)
        geometry = dict(q_heads=H, kv_heads=G, head_dim=D, dtype=dtype, device=self._device)
        draw = torch.Generator(self._device).manual_seed(0)

        def new(*shape: int) -> Tensor:
            return torch.randn(shape, generator=draw, device=self._device).to(dtype)

        self._layers = []
        for number in range(given.layers):
            made = kvindex.create(INDEX, **geometry, **placed(self._device, INDEX))  # type: ignore[arg-type]  # of strings and more
            turn = number / given.layers
            layer = AttentionLayer(made, turn=turn, full_threshold=0, graphs=graphs)
            keys, values = new(1, G, given.context, D), new(1, G, given.context, D)
            first = given.context - LOCAL
            made.append(keys[:, :, :first], values[:, :, :first])  # nobody attends from these
            layer.step(new(1, H, LOCAL, D), keys[:, :, first:], values[:, :, first:])
            self._layers.append(layer)
        self._queries = new(64, given.layers, 1, H, 1, D)
        self._rows = new(2, 64, given.layers, 1, G, 1, D)

    def step(self) -> list[Tensor]:
        """A token of every layer; what each gives."""
        queries, (keys, values) = self._queries[self._token % 64], self._rows[:, self._token % 64]
        self._token += 1
        return [
            layer.step(*token)
            for layer, *token in zip(self._layers, queries, keys, values, strict=True)
        ]

    def timed(self, steps: int) -> dict[str, float]:
        """Microseconds per layer and token: of the host, and until the device is done."""
        host, done = [], []
        for _ in range(steps):
            self._wait()
            start = time.perf_counter()
            self.step()
            host.append(time.perf_counter() - start)
            self._wait()
            done.append(time.perf_counter() - start)
        each = 1e6 / len(self._layers)
        return {
            "host_us": each * statistics.median(host),
            "host_worst_us": each * max(host),
            "done_us": each * statistics.median(done),
        }

    def _wait(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)


def measured_layers(given: argparse.Namespace) -> dict[str, Any]:
    """Both plans. Raises SystemExit where they do not give the same."""
    plans = {"eager": Layers(given, graphs=False), "graphs": Layers(given, graphs=True)}
    for step in range(CHECKED):
        mine, theirs = (plan.step() for plan in plans.values())
        if not all(torch.equal(*pair) for pair in zip(mine, theirs, strict=True)):
            raise SystemExit(f"layers: step {step} is not the same with graphs; nothing is timed")
    found: dict[str, Any] = {"layers": given.layers, "context": given.context, "checked": CHECKED}
    return found | {name: plan.timed(given.steps) for name, plan in plans.items()}


def measured_model(given: argparse.Namespace, clock: float, console: Console) -> dict[str, Any]:
    """Seconds per token of each plan. Raises ValueError for a text that is too short."""
    folder, file = smollm2() if given.model is None else (given.model, given.gguf_file)
    dtype = getattr(torch, given.dtype)
    model, tokenizer = load(
        folder, gguf_file=file, lora=given.lora, dtype=dtype, device=given.device
    )
    ids = torch.tensor(tokenizer(given.text.read_text())["input_ids"])[: given.tokens]
    if len(ids) < given.tokens:
        raise ValueError(f"text: got {len(ids)} tokens, allowed are at least {given.tokens}")
    found: dict[str, Any] = {"tokens": given.tokens, "written": given.written}
    answers = {}
    for plan in PLANS:
        options: dict[str, Any] = dict(index=None if plan == "dense" else INDEX)
        if plan != "dense":
            options["attach_options"] = dict(graphs=plan == "graphs")
        times = []
        for run in range(1 + given.runs):
            if run > 1 and time.monotonic() > clock:
                break
            count = given.written if run else min(given.written, 16)
            options |= dict(max_new_tokens=count, min_new_tokens=count)
            done = generate(model, tokenizer, ids, **options)
            if run:
                times.append(done.token_s)
                answers[plan] = done.answer_ids.tolist()
        found[plan] = {"token_ms": 1e3 * statistics.median(times), "runs": len(times)}
        console.print(f"{PLANS[plan]}: {found[plan]['token_ms']:.2f} ms a token")
    return found | {"same_text": answers.get("eager") == answers.get("graphs")}


def main() -> None:
    """Check, measure, print and write."""
    given, console = arguments(), Console(width=120)
    clock = time.monotonic() + given.seconds
    result: dict[str, Any] = {"index": INDEX, "dtype": given.dtype, **described(given)}
    with torch.no_grad():
        result["layers"] = measured_layers(given)
        write(result, given.json)
        console.print(result["layers"])
        result["model_run"] = measured_model(given, clock, console)
    write(result, given.json)


if __name__ == "__main__":
    main()
