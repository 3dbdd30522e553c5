"""What a decoded token costs in layers and in a model, with graphs and without."""

from __future__ import annotations

from typing import Any

from benchmarks.tabling.parts import machine, table

WORDS = {
    "dense": "transformers, dense attention",
    "eager": "`pariskv`, `graphs=False`",
    "graphs": "`pariskv`",
}


def generate_speed(result: dict[str, Any]) -> str:
    """Host time of a layer and token, and tokens per second of a model."""
    layers, model = result["layers"], result["model_run"]
    rows = []
    for plan, words in WORDS.items():
        step = layers.get(plan)
        each = (f"{step['host_us']:,.0f}", f"{step['done_us']:,.0f}") if step else ("", "")
        token_ms = model.get(plan, {}).get("token_ms")
        run = (f"{token_ms:.2f}", f"{1e3 / token_ms:.0f}") if token_ms else ("", "")
        rows.append((words, *each, *run))
    said = "".join(f" ({note[0].upper()}{note[1:]}.)" for note in result.get("notes", []))
    head = ("", "host, µs a layer", "until done, µs", "model, ms a token", "tokens/s")
    return (
        f"Layers: {layers['layers']} of {layers['context']:,} tokens, H = 32, G = 8, D = 128, the "
        "device idle at the start of each step; medians. Model: "
        f"{result['model']} after {model['tokens']:,} tokens, {model['written']} written. "
        f"{result['dtype']}.{said}\n\n{table(head, rows)}\n\n{machine(result)}"
    )
