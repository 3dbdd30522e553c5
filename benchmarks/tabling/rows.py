"""Rows as codes: what they cost the output, and what they save a step."""

from __future__ import annotations

from typing import Any

from benchmarks.tabling.parts import machine, mean, table


def row_codecs(result: dict[str, Any]) -> str:
    """Bytes, the error of attention's output, the KL of the next token."""
    rows = []
    for name, bytes_of in result["row_bytes_128"].items():
        off = result["errors"]["bfloat16" if name == "plain" else name]
        line = [f"`{name}`", f"{bytes_of}"]
        line += [f"{off[part]['mean']:.2%}" for part in ("keys", "values", "both")]
        line += [f"{off['both'][part]:.2%}" for part in ("p90", "worst_layer")]
        for read in ("all", "exact", "pariskv"):
            cells = [c for c in result["cells"] if (c["read"], c["rows"]) == (read, name)]
            line.append(f"{mean(cells, 'kl_mean'):.5f}")
        rows.append(tuple(line))
    head = ["rows", "bytes, D = 128", "keys alone", "values alone", "both", "90% below"]
    head += ["worst layer", "KL, all rows"]
    head += [f"`{index}`, k = {result['k']}" for index in ("exact", "pariskv")]
    return (
        f"SmolLM2-135M-Instruct, {result['tokens']} tokens of {' and of '.join(result['texts'])}, "
        f"then {result['steps']} steps with given tokens. Errors are `‖õ − o‖ / ‖o‖` of a head's "
        "output, full attention over coded rows beside the same over float32 ones, all layers, "
        "heads and steps; those of `plain` are bfloat16's. KL from full attention, nats, of the "
        "model in float32, whose `plain` rows are float32.\n\n"
        + table(tuple(head), rows)
        + f"\n\n{machine(result)}"
    )


def row_times(result: dict[str, Any]) -> str:
    """Of `benchmarks/row_times.py`: attention alone, and whole steps."""
    rows = []
    for name, places in result["attend"].items():
        index = "pariskv" if name == "plain" else f"pariskv:rows={name}"
        times = (*(places[place] for place in ("host", "device")), result["step"][index])
        rows.append((f"`{name}`", *(f"{time['median_us']:.1f}" for time in times)))
    head = ("rows", "`attend`, rows on the host", "on the device", "a step, rows in the cache")
    return (
        f"µs, medians of {result['replays']} replays of a CUDA graph with nothing flushed in "
        f"between; H = 32, G = 8, D = 128, bfloat16, k = {result['shape']['k']}, "
        f"{result['shape']['near']} near rows, {result['tokens']:,} tokens (a step: half as many). "
        f"A step of `pariskv+sample`: {result['step']['pariskv+sample']['median_us']:.1f}.\n\n"
        + table(head, rows)
        + f"\n\n{machine(result)}"
    )
