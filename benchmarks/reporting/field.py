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
    """Choose the value of `k` (rows per search) whose results the tables show.

    Return it as text. It is `MIDDLE` if the benchmark run `run` measured this `k`, otherwise the
    first `k` that it measured.
    """
    return str(MIDDLE if MIDDLE in run["rows"] else run["rows"][0])


def field(result: dict[str, Any]) -> str:
    """Make the tables of the page that compares all indexes.

    A run of the benchmark measures the indexes on given texts, or on texts that the model itself
    generated. For each run with given texts, there is a table of indexes that get the whole text in
    one append. One more table, at the end, compares ways of appending the text, for all runs.
    """
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
                *(f"{line['bytes'][part]:.0f}" for part in ("stored", "scanned")),
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
    """Make a table of the error of each index at the end of a text.

    `runs` contains the results for several text lengths. For each of them, the table has a column
    for each way of appending the text: in one call, in chunks, or in chunks with `stale=true`.
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
    about = "\n".join(f"- *{_short(run)}*: {_last(run)}" for run in runs)
    return (
        "**While a text grows.** The table shows how accurate each index is at the end of a text, "
        "for several ways of appending the text. An entry is the error of the attention output "
        f"with {middle_of(runs[0])} retrieved tokens, divided by the error with exact search. The "
        "recall is in parentheses.\n\n"
        "- *At once*: the whole text is appended to the index in one call.\n"
        "- *In chunks*: the index learns its parameters from the prompt, and later tokens are "
        "appended in chunks. If an entry has two error ratios with an arrow, the first was "
        "measured at the end of the prompt, and the second at the end of the text.\n"
        "- *Frozen*: as *in chunks*, but with the option `stale=true`: the index does not change "
        "the parameters that it has learned from the prompt. Only some indexes have this option."
        "\n\n"
        f"The table has these runs:\n\n{about}\n\n" + table(("index", *head), rows)
    )


def _arrived(run: dict[str, Any], *lines: dict[str, Any] | None) -> tuple[str, ...]:
    """Return three table cells with the error and recall of an index in a run of the benchmark.

    There is one cell for each way of appending the text (`ARRIVALS`): in one call, in chunks, and
    in chunks with `stale=true`.
    """
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
    """Describe the texts of one measurement in a few sentences for the report.

    The sentences give the length of a text, the number of its tokens that follow the prompt, and
    the number of layers.
    """
    own = ", and are sampled by the model itself" if run["sampled"] else ""
    return (
        f"each text has {run['setting']['tokens']:,} tokens ({', '.join(run['texts'])}). The last "
        f"{run['setting']['generated']:,} of them follow the prompt{own}. {run['measured']} layers "
        "are measured."
    )


def _faster(run: dict[str, Any]) -> list[str]:
    """Return sentences that name the indexes that ran on kvindex's GPU kernels or FAISS's GPU
    indexes."""
    parts = {"backend": "on the kernels of `kvindex_cuda`", "where": "on FAISS's GPU indexes"}
    found = {
        ways: dict.fromkeys(line["index"].split(":")[0] for line in run["indexes"] if part in line)
        for part, ways in parts.items()
    }
    return [f"{', '.join(f'`{n}`' for n in who)} ran {ways}" for ways, who in found.items() if who]


def _about(run: dict[str, Any]) -> str:
    setting, shape = run["setting"], run["shape"]
    model = named(run["model"], run["lora"])
    return (
        f"**Texts of {setting['tokens']:,} tokens**: {', '.join(run['texts'])}. The model is "
        f"{model}. Each of its layers has {shape['q_heads']} query heads and "
        f"{shape['kv_heads']} KV heads. After each text, the model generates {run['written']} "
        "tokens, and each index searches with the queries of these tokens. Indexes are compared in "
        f"{run['measured']} combinations of text and layer. In addition to the tokens that an "
        f"index finds, attention always reads the first {setting['sink']} tokens of a text, its "
        f"last {setting['local_window']} tokens, and the generated tokens."
    )
