"""The table of the suite `field`: every index at three budgets and at its published setting."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from benchmarks.reporting.parts import machine, named, table

HEAD = (
    *("index", "budget", "error", "worst layer", "KL divergence", "over `exact`'s", "coverage"),
    *("recall", "rows found", "code bytes per key", "bytes read"),
)


def field_suite(result: dict[str, Any]) -> str:
    """Make a table for each length of text, and a list of the cells without figures."""
    parts = []
    for tokens in sorted({cell["tokens"] for cell in result["cells"]}):
        cells = [cell for cell in result["cells"] if cell["tokens"] == tokens and "kl" in cell]
        texts = {text for cell in cells for text in cell["texts"]}
        lines = [_row(cell, len(texts)) for cell in cells]
        parts += [_about(result, tokens, texts), table(HEAD, lines)]
    reasons = [cell for cell in result["cells"] if cell["reason"] is not None]
    count = len(result["cells"])
    if reasons:
        rows = [(f"`{c['index']}`", c["budget"], f"{c['tokens']:,}", c["reason"]) for c in reasons]
        parts += [
            f"{len(reasons)} of {count} cells were not measured:",
            table(("index", "budget", "tokens", "why"), rows),
        ]
    else:
        parts.append(f"All {count} cells have figures.")
    return "\n\n".join([*parts, machine(result)])


def _about(result: dict[str, Any], tokens: int, texts: Collection[str]) -> str:
    """Describe in a sentence what was measured at one length."""
    settings = result["settings"]
    names = sorted(text.partition(" (sha256")[0] for text in texts)
    return (
        f"**{tokens:,} tokens** of {', '.join(names)}, {settings['steps']} decode steps, "
        f"{named(settings['model'], settings['lora'])} in {settings['dtype']}. *Error* is relative "
        "to full attention, with its 95% interval. *Bytes read* is a fraction of those of full "
        "attention. Indexes marked with an asterisk weigh rows, each of which stands for several. "
        "This lowers coverage and recall by design."
    )


def _row(cell: dict[str, Any], texts: int) -> tuple[str, ...]:
    """Return a row of the table. If it is about fewer than `texts` texts, it says so."""
    count = len(cell["texts"])
    fewer = "" if count == texts else f", {count} of {texts} texts"
    mark = "\\*" if cell["weighted"] else ""
    read, size = cell["read_fraction"], cell["key_bytes"]
    return (
        f"`{cell['index']}`{mark}",
        (cell["budget"] if cell["budget"].isdigit() else f"{cell['budget']} ({cell['k']:,})")
        + fewer,
        f"{cell['error']:.3f} ({cell['error_low']:.3f} to {cell['error_high']:.3f})",
        f"{cell['error_worst']:.2f} (layer {cell['worst_layer']})",
        f"{cell['kl']:.4f}",
        f"{cell['over_exact']:.2f}" if "over_exact" in cell else "",
        *("" if cell[name] is None else f"{cell[name]:.3f}" for name in ("coverage", "recall")),
        f"{cell['rows_found']:.0f}",
        "" if size is None else f"{size:.0f}",
        "" if read is None else f"{read:.0%}",
    )
