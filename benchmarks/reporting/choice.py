"""Make the table of `docs/choose-an-index.md`, which compares three indexes."""

from __future__ import annotations

from benchmarks.reporting.answers import points
from benchmarks.reporting.parts import Result, machines, some, stored, table
from kvindex_adapters.evaluate.compare.records import FULL

SOURCES = {
    "pariskv": ("answers_lengths", "cpu_steps"),
    "pariskv:preset=fast": ("answers_rows", "cpu_indexes"),
    "exact": ("answers_lengths", "cpu_indexes"),
}
"""Index -> names of the results with its answers, and with its time on a CPU."""

TOKENS, THREADS, ROWS = 8192, 1, 100


def choice(drawn: Result) -> str:
    """Make a table that compares three indexes: `pariskv`, its preset `fast`, and `exact`.

    It shows the loss of correct answers, the KL divergence, and the time of a decode step on a CPU.

    Args:
        drawn: Content of the results file with the KL divergence from full attention. The other
            files are read by the function.
    """
    kl = {name.replace(":store=device", ""): one for name, one in drawn["indexes"].items()}
    rows, measured = [], [drawn]
    for index, names in SOURCES.items():
        answers, steps = (stored(name) or {} for name in names)
        where = dict(index=index, base=FULL, k=ROWS, tokens=None, task=None)
        (lost,) = some(answers["differences"], **where)
        (point,) = some(steps["points"], tokens=TOKENS, threads=THREADS)
        rows.append(
            (
                f"`{index}`",
                points(lost),
                str(lost["count"]),
                f"{kl[index]['ratio']:.2f}",
                f"{point[index]['of_dense']:.2f}",
            )
        )
        measured += [answers, steps]
    head = ("index", "correct answers, minus full attention's", "prompts", "KL over `exact`'s")
    head = (*head, "time of a layer's step on a CPU, over dense attention's")
    about = (
        f"All indexes retrieve {ROWS} tokens per KV head. The difference of correct answers from "
        "full attention is in percentage points, with a 95% interval. KL is the KL divergence of "
        "the model's output from that with full attention; the table shows it divided by the KL "
        f"divergence with `exact`. The time is that of a decode step over {TOKENS:,} tokens with "
        f"{THREADS} thread, divided by the time of dense attention in the same run."
    )
    return f"{about}\n\n{table(head, rows)}\n\n{machines(measured)}"
