"""Make the tables of a comparison's report. Each cell has a text, and a number to sort by."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from kvindex_adapters.evaluate.compare.records import FULL
from kvindex_adapters.evaluate.compare.summary import FOUND

Row = dict[str, Any]


@dataclass(frozen=True)
class Cell:
    """A cell of a table.

    Args:
        text: Text to show.
        number: Number by which the column is sorted, or None to sort by `text`.
        note: Text in small letters after `text`.
        shade: Strength of the background color in [0, 1], or None for no color.
    """

    text: str
    number: float | None = None
    note: str = ""
    shade: float | None = None


EMPTY = Cell("")


@dataclass(frozen=True)
class Table:
    """A table of the report. `about` is a text that explains the figures."""

    title: str
    about: str
    columns: Sequence[str]
    rows: Sequence[Sequence[Cell]]


def tables(summary: dict[str, Any]) -> list[Table]:
    """Make all tables of the report, except those that would have no row."""
    by_task = [_by_task(summary, tokens) for tokens in summary["tokens"]]
    found = [*_field(summary), _overview(summary), _failures(summary), *by_task]
    found += [_rows_needed(summary), _differences(summary), _texts(summary)]
    return [table for table in found if table.rows]


FIELD = (
    *("index", "budget", "k", "error", "worst layer", "KL, nats", "KL over exact's"),
    *("coverage", "recall", "rows found", "code bytes per key", "bytes read"),
)
"""Columns of the tables of the suite `field`."""


def _field(summary: dict[str, Any]) -> Iterator[Table]:
    """Yield a table of the suite `field` for each prompt length."""
    about = (
        "Every index attends to the same queries at three budgets and at its published setting. "
        "The columns are: the error of a layer's output relative to full attention, for the "
        "queries, keys and values that full attention computed, as a mean over layers and in the "
        "worst layer, with a 95% interval; the KL divergence of the next-token distribution, if "
        "all layers use the index; coverage, the attention weight of the retrieved rows; recall, "
        "the fraction of the k rows with the largest logits that were retrieved, both low by "
        "design where an index samples rows; the rows that the index retrieved; the bytes of codes "
        "per token and KV head; and the bytes that a decode step reads in all layers, as a "
        "fraction of those of full attention."
    )
    rows = summary.get("field", [])
    for tokens in sorted({row["tokens"] for row in rows}):
        here = [row for row in rows if row["tokens"] == tokens and "kl" in row]
        texts = {text for row in here for text in row["texts"]}
        cells = [_cells(row, len(texts)) for row in here]
        named = f"The texts are: {', '.join(sorted(map(_title, texts)))}." if texts else ""
        yield Table(f"The field, {tokens:,} tokens", f"{about} {named}", FIELD, cells)
    reasons = [
        [
            Cell(row["index"]),
            Cell(row["budget"]),
            _number(row["k"], "{}"),
            _number(row["tokens"], "{:,}"),
            Cell(row["reason"]),
        ]
        for row in rows
        if row["reason"] is not None
    ]
    columns = ["index", "budget", "k", "tokens", "why"]
    yield Table("Cells that are not measured", "Why a cell has no figures.", columns, reasons)


def _cells(row: Row, texts: int) -> list[Cell]:
    """Return the table cells of one row of the suite `field`.

    `texts` is the number of texts in the table. A row about fewer texts says so.
    """
    read, count = row["read_fraction"], len(row["texts"])
    return [
        Cell(row["index"]),
        Cell(row["budget"], note="" if count == texts else f"{count} of {texts} texts"),
        _number(row["k"], "{}"),
        _number(row["error"], "{:.3f}", _range(row, "error_", "{:.3f}")),
        _number(row["error_worst"], "{:.3f}", f"layer {row['worst_layer']}"),
        _number(row["kl"], "{:.4f}", _range(row, "kl_", "{:.4f}")),
        _number(row["over_exact"], "{:.2f}") if "over_exact" in row else EMPTY,
        *(_found([row], name) for name in FOUND),
        _number(row["rows_found"], "{:.0f}"),
        _key_bytes([row]),
        EMPTY if read is None else _percent(read),
    ]


def _title(text: str) -> str:
    """Return the name of a text without its hash."""
    return text.partition(" (sha256")[0]


def _overview(summary: dict[str, Any]) -> Table:
    accuracy = {_who(row): row for row in summary["accuracy"] if _everything(row)}
    gaps = {(row["base"], _who(row)): row for row in summary["differences"] if _everything(row)}
    bases = list(dict.fromkeys(base for base, _ in gaps))
    texts: dict[Any, list[Row]] = {}
    for row in summary["text"]:
        texts.setdefault(_who(row), []).append(row)
    rows = [
        [
            *_name(who),
            _accuracy(accuracy.get(who)),
            *(_points(gaps.get((base, who))) for base in bases),
            *_means(texts.get(who, [])),
        ]
        for who in dict.fromkeys([*accuracy, *texts])
    ]
    about = (
        "Means over all tasks and lengths, with 95% intervals. Differences are in percentage "
        "points of accuracy, over the answers that both gave. Divergence, coverage, recall, rows, "
        "bytes and time are measured in steps along the text, as means over lengths."
    )
    columns = ["index", "k", "accuracy", *(f"minus {_short(base)}" for base in bases), *COSTS]
    return _without_empty_columns(Table("Overview", about, columns, rows))


def _without_empty_columns(table: Table) -> Table:
    """Remove the columns in which all cells are empty, for example if no task was measured."""
    kept = [i for i in range(len(table.columns)) if any(row[i] != EMPTY for row in table.rows)]
    rows = [[row[i] for i in kept] for row in table.rows]
    return Table(table.title, table.about, [table.columns[i] for i in kept], rows)


COSTS = (
    *("KL, nats", "KL over exact's", "same token", "coverage", "recall"),
    *("rows read", "ms per step", "code bytes per key", "MiB per step", "MiB cached", "peak MiB"),
)


def _means(rows: Sequence[Row]) -> list[Cell]:
    """Return the table cells of one index: its KL divergence, recall, time and memory (`COSTS`).

    Each cell is a mean over the text lengths, except the last one, which is the largest peak
    memory.
    """
    if not rows:
        return [EMPTY] * len(COSTS)

    def mean(*values: float) -> float:
        return sum(values) / len(values)

    ratios = [row["over_exact"] for row in rows if "over_exact" in row]
    return [
        _number(mean(*(row["kl"] for row in rows)), "{:.4f}"),
        _number(mean(*ratios), "{:.2f}") if ratios else EMPTY,
        _percent(mean(*(row["agreement"] for row in rows))),
        *(_found(rows, name) for name in FOUND),
        _percent(
            mean(*(row["rows_read"] / (row["rows_full"] or 1) for row in rows)), _rows_of(rows)
        ),
        _milliseconds(rows),
        _key_bytes(rows),
        _mib(mean(*(row["step_bytes"] for row in rows))),
        _mib(mean(*(sum(row["nbytes"].values()) for row in rows))),
        _peak(rows),
    ]


def _found(rows: Sequence[Row], name: str) -> Cell:
    """Return a cell with the mean coverage or recall over the text lengths."""
    known = [row[name] for row in rows if row[name] is not None]
    note = "sampled" if rows[0]["weighted"] else ""
    return _percent(sum(known) / len(known), note) if known else EMPTY


def _milliseconds(rows: Sequence[Row]) -> Cell:
    """Return a cell with the time of a step, as a mean over text lengths. A suite measures none."""
    known = [1000 * row["step_s"] for row in rows if row["step_s"] is not None]
    return _number(sum(known) / len(known), "{:.1f}") if known else EMPTY


def _peak(rows: Sequence[Row], *, note: bool = False) -> Cell:
    """Return a cell with the largest peak memory, if wanted by place. A suite measures none."""
    known = [row["peak_bytes"] for row in rows if row["peak_bytes"] is not None]
    if not known:
        return EMPTY
    largest = max(known, key=lambda sizes: sum(sizes.values()))
    return _mib(sum(largest.values()), _tiers(largest) if note else "")


def _key_bytes(rows: Sequence[Row]) -> Cell:
    """Return a cell with the bytes that an index stores per key, as a mean over text lengths."""
    known = [row["key_bytes"] for row in rows if row["key_bytes"] is not None]
    return _number(sum(known) / len(known), "{:.1f}") if known else EMPTY


def _rows_of(rows: Sequence[Row]) -> str:
    """Describe how many rows per KV head a step reads, and how many of them the index retrieves.

    `rows` has one element for each length of text that was measured. With several lengths, and for
    full attention, return an empty string.
    """
    if len(rows) > 1 or rows[0]["index"] == FULL:
        return ""
    read, full, found = (rows[0][name] for name in ("rows_read", "rows_full", "rows_found"))
    return f"{read:.0f} of {full:.0f}, {found:.0f} by index"


def _by_task(summary: dict[str, Any], tokens: int) -> Table:
    rows = [row for row in summary["accuracy"] if row["tokens"] == tokens]
    tasks = [*([None] if len(summary["tasks"]) > 1 else []), *summary["tasks"]]
    cells = {(_who(row), row["task"]): _accuracy(row) for row in rows}
    lines = [
        [*_name(who), *(cells.get((who, task), EMPTY) for task in tasks)]
        for who in dict.fromkeys(_who(row) for row in rows)
    ]
    columns = ["index", "k", *(task or "all tasks" for task in tasks)]
    about = "Accuracy with its 95% interval (Wilson). Darker is better."
    return Table(f"Accuracy by task, {tokens:,} tokens", about, columns, lines)


KEEPS = "above \N{MINUS SIGN}2 points"

FEW = 183
"""Number of pairs of answers that are enough to detect a loss of 2 points.

If an index loses one answer in 50, it loses at least one of 183 answers with a probability of more
than 97.5%: 1 - 0.98^183 > 0.975.
"""


def _rows_needed(summary: dict[str, Any]) -> Table:
    """Make the table of the `k` that each index needs to be as accurate as full attention.

    Only indexes and prompt lengths that were measured with several values of `k` have a row.
    """
    tasks = [*([None] if len(summary["tasks"]) > 1 else []), *summary["tasks"]]
    some = [row for row in summary["rows_needed"] if len(row["ks"]) > 1]
    cells = {(row["index"], row["tokens"], row["task"]): _need(row) for row in some}
    one_length = len(summary["tokens"]) < 2
    rows = [
        [Cell(index), _length(tokens), *(cells.get((index, tokens, task), EMPTY) for task in tasks)]
        for index, tokens in dict.fromkeys((row["index"], row["tokens"]) for row in some)
        if tokens is None or not one_length
    ]
    about = (
        "The smallest measured k from which accuracy stays within 2 percentage points of full "
        "attention's, and its ratio to the k that exact search needs."
    )
    columns = ["index", "tokens", *(task or "all tasks" for task in tasks)]
    return Table("Rows needed", about, columns, rows)


def _need(row: Row) -> Cell:
    if row["rows"] is None:
        most = max(row["ks"])
        return Cell(f"> {most:,}", most + 1)
    note = "" if row["over_exact"] is None else f"{row['over_exact']:.2g} \N{MULTIPLICATION SIGN}"
    return _number(row["rows"], "{:,}", note)


def _differences(summary: dict[str, Any]) -> Table:
    rows = [
        [
            *_name(_who(row)),
            Cell(_short(row["base"])),
            Cell(row["task"] or "all tasks"),
            _length(row["tokens"]),
            _number(row["count"], "{}"),
            _points(row),
            _verdict(row),
            _number(row["p"], "{:.2g}"),
            _number(row["p_corrected"], "{:.2g}"),
        ]
        for row in summary["differences"]
        if not _repeats(summary, row)
    ]
    about = (
        "Differences in percentage points of accuracy, with 95% intervals of a paired bootstrap "
        f"over instances. The column “{KEEPS}” says whether the lower end of the interval is. "
        "“Few” marks rows with too few pairs to detect a loss of 2 points reliably. p is the "
        "probability of the exact sign test. The last column corrects it for the number of "
        "comparisons with the same base (Holm)."
    )
    columns = ["index", "k", "minus", "task", "tokens", "pairs", "difference", KEEPS]
    return Table("Differences", about, [*columns, "p", "p corrected"], rows)


def _texts(summary: dict[str, Any]) -> Table:
    rows = [
        [
            *_name(_who(row)),
            _number(row["tokens"], "{:,}"),
            _number(row["kl"], "{:.4f}", _range(row, "kl_", "{:.4f}")),
            _number(row["over_exact"], "{:.2f}", _range(row, "over_exact_", "{:.2f}"))
            if "over_exact" in row
            else EMPTY,
            _percent(row["agreement"], _range(row, "agreement_", "{:.1%}")),
            *(_found([row], name) for name in FOUND),
            _number(row["rows_read"], "{:.0f}", _rows_of([row]).partition(" ")[2]),
            _milliseconds([row]),
            _key_bytes([row]),
            _mib(row["step_bytes"]),
            _mib(sum(row["nbytes"].values()), _tiers(row["nbytes"])),
            _peak([row], note=True),
        ]
        for row in summary["text"]
    ]
    about = (
        "Full attention and the index read the same text, step by step. The columns are: KL "
        "divergence of the index's next-token distribution from full attention's, with 95% "
        "intervals of a bootstrap over blocks of neighboring steps; the same relative to exact "
        "search for as many rows; how often the most likely token is the same; coverage, the "
        "fraction of the attention weight of all rows in the index that the retrieved rows have; "
        "recall, the fraction of the k rows with the largest logits of a query head that its KV "
        "head retrieved, both low by design where an index samples rows and weighs them, for "
        "which KL divergence is the measure; rows that a step attends to per KV head, and how "
        "many of them the index retrieved (the others are the first and newest tokens); the "
        "median time of a step that runs alone; the bytes of codes and learned parameters that "
        "the index stores per token and KV head; the bytes that a step copies out of the stores; "
        "the size of the cache; and the peak memory of the process."
    )
    return Table("Text", about, ["index", "k", "tokens", *COSTS], rows)


def _failures(summary: dict[str, Any]) -> Table:
    rows = [
        [
            Cell(f"{row['index'] or 'all'}" + (f", k={row['k']}" if row.get("k") else "")),
            Cell(row["task"] or "text"),
            _number(row["tokens"], "{:,}"),
            Cell(row["words"]),
        ]
        for row in summary["failures"]
    ]
    about = "Measurements that failed on this model. The other tables do not contain them."
    return Table("Not measured", about, ["index", "at", "tokens", "why"], rows)


def _repeats(summary: dict[str, Any], row: Row) -> bool:
    """Return True if another row of the table has the same content as `row`.

    If the comparison has only one task, the row for this task repeats the row for all tasks. If it
    has only one prompt length, the row for this length repeats the row for all lengths.
    """
    one_task, one_length = len(summary["tasks"]) < 2, len(summary["tokens"]) < 2
    return (one_task and row["task"] is not None) or (one_length and row["tokens"] is not None)


def _everything(row: Row) -> bool:
    return row["task"] is None and row["tokens"] is None


def _who(row: Row) -> tuple[str, int | None]:
    return row["index"], row["k"]


def _name(who: tuple[str, int | None]) -> Iterator[Cell]:
    yield Cell(who[0])
    yield EMPTY if who[1] is None else _number(who[1], "{}")


def _short(base: str) -> str:
    return "full" if base == FULL else base


def _accuracy(row: Row | None) -> Cell:
    if row is None:
        return EMPTY
    note = f"{_range(row, '', '{:.0%}')}, n = {row['count']}"
    if "rows_found" in row:
        note += f", {row['rows_found']:.0f} rows"
    return Cell(f"{row['accuracy']:.1%}", row["accuracy"], note, shade=row["accuracy"])


def _points(row: Row | None) -> Cell:
    if row is None:
        return EMPTY
    ends = [f"{100 * row[end]:+.1f}" for end in ("low", "high")]
    return Cell(f"{100 * row['difference']:+.1f}", row["difference"], " to ".join(ends))


def _verdict(row: Row) -> Cell:
    note = "few" if row["count"] < FEW else ""
    return Cell("yes" if row["not_inferior"] else "no", float(row["not_inferior"]), note)


def _length(tokens: int | None) -> Cell:
    return Cell("all lengths") if tokens is None else _number(tokens, "{:,}")


def _range(row: Row, name: str, form: str) -> str:
    return " to ".join(form.format(row[name + end]) for end in ("low", "high"))


def _number(value: float, form: str, note: str = "") -> Cell:
    return Cell(form.format(value), value, note)


def _percent(value: float, note: str = "") -> Cell:
    return _number(value, "{:.1%}", note)


def _mib(value: float, note: str = "") -> Cell:
    return _number(value / 2**20, "{:.1f}", note)


def _tiers(sizes: dict[str, int]) -> str:
    parts = sorted(sizes.items())
    return ", ".join(f"{name} {size / 2**20:.1f}" for name, size in parts) if parts[1:] else ""
