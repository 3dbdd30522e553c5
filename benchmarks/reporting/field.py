"""Tables that compare all indexes, on whole texts and while a text grows."""

from __future__ import annotations

from typing import Any

from benchmarks.reporting.parts import machine, named, table

WHOLE, PIECES, STALE = "whole", "pieces", "stale"
"""How a text is appended to an index: in one append, in chunks, or in chunks with `stale=true`."""

ARRIVALS = (WHOLE, PIECES, STALE)

MIDDLE = 100
"""The value of `k` that tables and pictures show, if it was measured."""


def middle_of(run: dict[str, Any]) -> str:
    """Return the `k` that tables show for a run, as text: `MIDDLE`, or the first measured `k`."""
    return str(MIDDLE if MIDDLE in run["rows"] else run["rows"][0])


def field(result: dict[str, Any]) -> str:
    """Make a table for each run over given texts, and one table of all runs while texts grow."""
    texts = [_at_once(run) for run in result["runs"] if not run["sampled"]]
    return "\n\n".join([*texts, _going_on(result["runs"])])


def _at_once(run: dict[str, Any]) -> str:
    """Make the table of a run in which each index gets the whole text in one append."""
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
    times = ("search, ms", "search on the CPU, ms") if on_gpu else ("search, ms",)
    head = ("index", "bytes stored", "bytes scanned", "build, ms", *times)
    head = (*head, f"recall@{k}", f"coverage@{k}", *(f"error@{each}" for each in ks))
    head = (*head, f"error@{k} over `exact`'s")
    rows += [(f"`{index}`", why, *("",) * (len(head) - 2)) for index, why in run["failed"].items()]
    threads = run["machine"]["threads"]
    return (
        f"{_about(run)}\n\n{table(head, rows)}\n\n{machine(run)} The indexes computed in "
        f"{run['dtype']} with {threads} CPU thread{'s' * (threads > 1)}; the machine's load "
        f"average was {run['load_average']:.1f} at the end."
        + "".join(f" {note}." for note in [*_faster(run), *run.get("notes", [])])
    )


def _going_on(runs: list[dict[str, Any]]) -> str:
    """Make the table of each index's error at the end of a text, for all runs.

    There is an error for each way of appending the text.
    """
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
        part for run in runs for part in (f"{_short(run)}: at once", "in chunks", "frozen (stale)")
    ]
    about = "; ".join(f"in *{_short(run)}*, {_last(run)}" for run in runs)
    return (
        "**While a text grows.** In each run, the text consists of a prompt and later tokens. The "
        f"later tokens are: {about}. An entry of the table is the error of the attention output at "
        f"the end of the text with {middle_of(runs[0])} rows, divided by that of exact search, and "
        "the recall in parentheses. *At once*: one append contained the whole text. *In chunks*: "
        "the index learned from the prompt, and later tokens were appended in chunks; the number "
        "before the arrow was measured at the end of the prompt. *Frozen*: in chunks with "
        "`stale=true` (no updates after the prompt), where an index has this option.\n\n"
        + table(("index", *head), rows)
    )


def _arrived(run: dict[str, Any], *lines: dict[str, Any] | None) -> tuple[str, ...]:
    """Return the cells of one index and run: in one append, in chunks, and with `stale=true`."""
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
    """Return a phrase that says which tokens of a run's text come after the prompt."""
    own = ", which the model sampled itself" if run["sampled"] else ""
    return (
        f"the last {run['setting']['generated']:,} of {run['setting']['tokens']:,} tokens of "
        f"{', '.join(run['texts'])}{own} ({run['measured']} layers)"
    )


def _faster(run: dict[str, Any]) -> list[str]:
    """Return sentences that name the indexes that ran on GPU kernels or on FAISS's GPU indexes."""
    parts = {"backend": "on the kernels of `kvindex_cuda`", "where": "on FAISS's GPU indexes"}
    found = {
        ways: dict.fromkeys(line["index"].split(":")[0] for line in run["indexes"] if part in line)
        for part, ways in parts.items()
    }
    return [f"{', '.join(f'`{n}`' for n in who)} ran {ways}" for ways, who in found.items() if who]


def _about(run: dict[str, Any]) -> str:
    setting, shape = run["setting"], run["shape"]
    model = named(run["model"], run["lora"])
    layers = len(run["texts"]) * run["layers"]
    some = f", {run['measured']} of them measured" if run["measured"] != layers else ""
    return (
        f"**Texts of {setting['tokens']:,} tokens**: {', '.join(run['texts'])} ({model}). The "
        f"queries are those of {run['written']} tokens that the model generates after each text, "
        f"in {layers} layers of {shape['q_heads']} query heads and {shape['kv_heads']} KV "
        f"heads{some}. The first {setting['sink']} tokens of a text, its last "
        f"{setting['local_window']} tokens and the generated tokens are always attended to."
    )
