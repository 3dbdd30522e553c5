"""All indexes under one protocol: a table for each length."""

from __future__ import annotations

from typing import Any

from benchmarks.comparing.show import middle_of, name_of
from benchmarks.tabling.parts import machine, table


def field(result: dict[str, Any]) -> str:
    """A table for each run, the shortest text first."""
    return "\n\n".join(_run(run) for run in result["runs"])


def _run(run: dict[str, Any]) -> str:
    """One line per index; what arrives in pieces, and frozen, in columns of its own."""
    lines = {(line["index"], line["arrival"]): line for line in run["indexes"]}
    ks, k = [str(k) for k in run["rows"]], middle_of(run)
    on_gpu = any("cpu_search_ms" in line for line in lines.values())
    by_layer = all("by_layer" in line for line in lines.values())
    rows = []
    for index in dict.fromkeys(line["index"] for line in run["indexes"]):
        whole = lines[index, "whole"]
        pieces, stale = (lines.get((index, arrival)) for arrival in ("pieces", "stale"))
        at = whole["rows"][k]
        cpu = (f"{whole['cpu_search_ms']:.2f}" if "cpu_search_ms" in whole else "",)
        name, _, more = name_of(whole, run["measured"]).partition(" ")
        rows.append(
            (
                f"`{name}`" + (f" {more}" if more else ""),
                *(f"{whole['bytes'][part]:.0f}" for part in ("kept", "scanned")),
                *(f"{whole['build_ms']:.0f}", f"{at['search_ms']:.2f}", *(cpu if on_gpu else ())),
                *(f"{at['recall']:.3f}", f"{at['mass']:.3f}"),
                *(f"{whole['rows'][each]['error']:.3f}" for each in ks),
                *((f"{at['of_exact']:.2f}",) if by_layer else ()),
                *(_along(line) for line in (pieces, stale)),
            )
        )
    times = ("search, ms", "on the CPU") if on_gpu else ("search, ms",)
    head = ("index", "kept B", "scanned B", "build, ms", *times, f"recall@{k}", f"mass@{k}")
    head = (*head, *(f"error@{each}" for each in ks))
    head = (*head, *((f"by layer, of `exact` @{k}",) if by_layer else ()))
    head = (*head, *(f"{arrival}, of `exact` @{k}" for arrival in ("in pieces", "stale")))
    rows += [(f"`{index}`", why, *("",) * (len(head) - 2)) for index, why in run["failed"].items()]
    return (
        f"{_about(run)}\n\n{table(head, rows)}\n\n{machine(run)} {run['dtype']}, "
        f"{run['machine']['threads']} threads; load average {run['load_average']:.1f} at the end."
        + "".join(f" {note}." for note in [*_faster(run), *run.get("notes", [])])
    )


def _faster(run: dict[str, Any]) -> list[str]:
    """What ran on a GPU's own ways."""
    parts = {"backend": "on the kernels of `kvindex_cuda`", "where": "on FAISS's GPU indexes"}
    found = {
        ways: dict.fromkeys(line["index"].split(":")[0] for line in run["indexes"] if part in line)
        for part, ways in parts.items()
    }
    return [f"{', '.join(f'`{n}`' for n in who)} ran {ways}" for ways, who in found.items() if who]


def _about(run: dict[str, Any]) -> str:
    setting, shape = run["setting"], run["shape"]
    model = f"{run['model']} with {run['lora']}" if run["lora"] else run["model"]
    layers = len(run["texts"]) * run["layers"]
    own = f", the last {setting['generated']:,} of them its own" if run["sampled"] else ""
    some = f", {run['measured']} of them measured" if run["measured"] != layers else ""
    return (
        f"**{setting['tokens']:,} tokens** of {', '.join(run['texts'])} ({model}){own}, "
        f"{run['written']} written ones ask; {layers} layers of {shape['q_heads']} query and "
        f"{shape['kv_heads']} KV heads{some}; the first {setting['sink']} tokens, the text's last "
        f"{setting['local']} and the written ones are attended to besides. In pieces: the text's "
        f"last {setting['generated']:,} tokens come after the prompt was sealed; the error over "
        "that of exact search with as many rows, before and after them."
    )


def _along(line: dict[str, Any] | None) -> str:
    """Error over that of `exact`, when the prompt was sealed (if asked then) and at the end."""
    found = list(line["along"].values()) if line else []
    ends = found if len(found) < 2 else [found[0], found[-1]]
    return " → ".join(f"{at['error'] / at['error_exact']:.2f}" for at in ends)
