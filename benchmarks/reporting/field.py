"""Tables of all indexes under one protocol: by a text's length, and along the text."""

from __future__ import annotations

from typing import Any

from benchmarks.reporting.parts import machine, table

WHOLE, PIECES, STALE = "whole", "pieces", "stale"
"""How the text arrives: at once, in pieces, in pieces to an index that is frozen."""

ARRIVALS = (WHOLE, PIECES, STALE)

MIDDLE = 100
"""Rows that tables and pictures are about, where they are among those asked for."""


def middle_of(run: dict[str, Any]) -> str:
    """`MIDDLE`, or the first of the rows, as the lines' keys."""
    return str(MIDDLE if MIDDLE in run["rows"] else run["rows"][0])


def field(result: dict[str, Any]) -> str:
    """A table for each text, the shortest first; one of all runs, the model's own among them."""
    texts = [_at_once(run) for run in result["runs"] if not run["sampled"]]
    return "\n\n".join([*texts, _going_on(result["runs"])])


def _at_once(run: dict[str, Any]) -> str:
    """One line per index, which holds all of the text when it is asked."""
    lines = [line for line in run["indexes"] if line["arrival"] == WHOLE]
    ks, k = [str(k) for k in run["rows"]], middle_of(run)
    on_gpu = any("cpu_search_ms" in line for line in lines)
    rows = []
    for line in lines:
        at = line["rows"][k]
        cpu = (f"{line['cpu_search_ms']:.2f}" if "cpu_search_ms" in line else "",)
        rows.append(
            (
                f"`{line['index']}`",
                *(f"{line['bytes'][part]:.0f}" for part in ("kept", "scanned")),
                *(f"{line['build_ms']:.0f}", f"{at['search_ms']:.2f}", *(cpu if on_gpu else ())),
                *(f"{at['recall']:.3f}", f"{at['coverage']:.3f}"),
                *(f"{line['rows'][each]['error']:.3f}" for each in ks),
                f"{at['of_exact']:.2f}",
            )
        )
    times = ("search, ms", "on the CPU") if on_gpu else ("search, ms",)
    head = ("index", "kept B", "scanned B", "build, ms", *times, f"recall@{k}", f"coverage@{k}")
    head = (*head, *(f"error@{each}" for each in ks), f"of `exact` @{k}")
    rows += [(f"`{index}`", why, *("",) * (len(head) - 2)) for index, why in run["failed"].items()]
    return (
        f"{_about(run)}\n\n{table(head, rows)}\n\n{machine(run)} {run['dtype']}, "
        f"{run['machine']['threads']} threads; load average {run['load_average']:.1f} at the end."
        + "".join(f" {note}." for note in [*_faster(run), *run.get("notes", [])])
    )


def _going_on(runs: list[dict[str, Any]]) -> str:
    """One line per index: after the last token, had it come at once, in pieces, to a frozen one."""
    found = [{(line["index"], line["arrival"]): line for line in run["indexes"]} for run in runs]
    names = dict.fromkeys(index for lines in found for index, _ in lines)
    rows = [
        (
            f"`{name}`",
            *(
                cell
                for run, lines in zip(runs, found, strict=True)
                for cell in _arrived(run, *(lines.get((name, way)) for way in ARRIVALS))
            ),
        )
        for name in names
    ]
    head = [
        part for run in runs for part in (f"{_short(run)}: at once", "in pieces", "frozen (stale)")
    ]
    about = "; ".join(f"*{_short(run)}* {_last(run)}" for run in runs)
    return (
        f"**As a text goes on:** {about}. At the end, with {middle_of(runs[0])} rows: the error "
        "over that of exact search, recall in parentheses; before the arrow, when the prompt "
        f"ended.\n\n{table(('index', *head), rows)}"
    )


def _arrived(run: dict[str, Any], *lines: dict[str, Any] | None) -> tuple[str, ...]:
    """The run's cells of an index: what came at once, in pieces, to a frozen one."""
    k = middle_of(run)
    rows = [line and line["rows"][k] for line in lines]
    ends = [f"{at['of_exact']:.2f} ({at['recall']:.2f})" if at else "" for at in rows]
    if lines[1] is not None:
        before = next(iter(lines[1]["along"].values()))
        ends[1] = f"{before['of_exact']:.2f} → {ends[1]}"
    return tuple(ends)


def _short(run: dict[str, Any]) -> str:
    return f"{run['setting']['tokens'] // 1000}K" + " own" * run["sampled"]


def _last(run: dict[str, Any]) -> str:
    """Which tokens of a run come after its prompt."""
    own = ", sampled by the model itself" if run["sampled"] else ""
    return (
        f"the last {run['setting']['generated']:,} of {run['setting']['tokens']:,} tokens of "
        f"{', '.join(run['texts'])}{own}, {run['measured']} layers"
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
    some = f", {run['measured']} of them measured" if run["measured"] != layers else ""
    return (
        f"**{setting['tokens']:,} tokens** of {', '.join(run['texts'])} ({model}), "
        f"{run['written']} written ones ask; {layers} layers of {shape['q_heads']} query and "
        f"{shape['kv_heads']} KV heads{some}; the first {setting['sink']} tokens, the text's last "
        f"{setting['local_window']} and the written ones are attended to besides."
    )
