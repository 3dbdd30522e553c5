"""What a decoded token costs in layers and in a model, with graphs and without."""

from __future__ import annotations

from typing import Any

from benchmarks.tabling.parts import machine, table

WORDS = {
    "dense": "transformers, dense attention",
    "eager": "`pariskv`, `graphs=False`",
    "graphs": "`pariskv`",
}

RATIOS = {"dense": "dense attention", "eager": "`graphs=False`"}


def generate_speed(result: dict[str, Any]) -> str:
    """Host time of a layer and token, and tokens per second of a model, medians and quartiles."""
    layers, model = result["layers"], result.get("model_run", {})
    rows = []
    for plan, words in WORDS.items():
        run = model.get(plan, {})
        speed = f"{1e3 / run['token_ms']:.0f}" if run else ""
        rows.append((words, *_figures(layers.get(plan, {}), run, ",.0f"), speed))
    for plan, words in RATIOS.items():
        step, run = (part.get("ratio", {}).get(plan, {}) for part in (layers, model))
        if step or run:
            figures = _figures(step, run, ".2f")
            rows.append((f"{words} over `pariskv`, round by round", *figures, ""))
    head = ("", "host, µs a layer", "until done, µs", "model, ms a token", "tokens/s")
    spread = "medians (quartiles)" if "rounds" in layers else "medians"
    ran = "not measured"
    if model.get("written"):
        ran = f"{result['model']} after {model['tokens']:,} tokens, {model['written']} written"
    notes = [*result.get("notes", []), *_turns({"layers": layers, "model": model})]
    said = "".join(f" ({note[0].upper()}{note[1:]}.)" for note in notes)
    return (
        f"Layers: {layers['layers']} of {layers['context']:,} tokens, H = 32, G = 8, D = 128, the "
        f"device idle at the start of each step; {spread}. Model: {ran}. {result['dtype']}.{said}"
        f"\n\n{table(head, rows)}\n\n{machine(result)}"
    )


def _figures(layers: dict[str, Any], model: dict[str, Any], form: str) -> tuple[str, ...]:
    """Host, until done (by `form`), a model's token: medians, quartiles where there are some."""
    forms, cells = {"host_us": form, "done_us": form, "token_ms": ".2f"}, []
    for name, each in forms.items():
        found = model if name == "token_ms" else layers
        some = [name, f"{name}_low", f"{name}_high"]
        said = [f"{found[one]:{each}}" for one in some if one in found]
        cells.append(f"{said[0]} ({said[1]} to {said[2]})" if said[1:] else "".join(said))
    return tuple(cells)


def _turns(parts: dict[str, dict[str, Any]]) -> list[str]:
    """Of parts that were measured in turns: how many steps a graph replayed, what was left out."""
    notes = []
    for name, part in parts.items():
        if part.get("rounds"):
            replayed, of = part["graphs"]["replayed"], part["layer_steps"]
            notes.append(f"of {of:,} steps of the {name} with graphs {replayed:,} were replays")
        if part.get("left_out"):
            asked = part["left_out"] + part["rounds"]
            notes.append(f"time ended before {part['left_out']} of {asked} rounds of the {name}")
    return notes
