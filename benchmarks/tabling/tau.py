"""What a threshold for reuse does: searches that are made, rows that are held."""

from __future__ import annotations

from typing import Any

from benchmarks.tabling.parts import machine, table

SHOWN = (0.6, 0.7, 0.8, 0.9, 0.95)


def tau(result: dict[str, Any]) -> str:
    """Some thresholds on the text of the calibration and on another one, and the one found."""
    rows = []
    for point in result["points"]:
        found = point["tau"] == result["tau"]
        if found or point["tau"] in SHOWN:
            name = f"{point['tau']:.2f}" + (" (found)" if found else "")
            shares = (point[part] for part in ("rate", "held", "other_rate", "other_held"))
            rows.append((name, *(f"{share:.2f}" for share in shares)))
    text, other, model = result["text"], result["other"], result["in_model"]
    head = ("τ", f"{text}: steps that search", "held", f"{other}: steps that search", "held")
    return (
        f"SmolLM2-135M-Instruct, the newest {result['steps']} of {result['tokens']} tokens; held: "
        f"share of a step's own best {result['k']} rows among those it used; means over layers.\n\n"
        + table(head, rows)
        + f"\n\nWriting {result['steps']} tokens after {other}, `{model['index']}` searched in "
        f"{model['rate']:.0%} of the steps of all layers. {machine(result)}"
    )
