"""Recall of presets: by β, length, share of the attention, tokens per center."""

from __future__ import annotations

import json
from typing import Any

from benchmarks.tabling.parts import RESULTS, machine, mean, table

POOL = 4
"""Candidates past the paper are at least `POOL · k`."""


def recall(result: dict[str, Any]) -> str:
    """Presets at several β: bytes, recall and coverage, means over texts."""
    rows, cells = [], result["cells"]
    for index in dict.fromkeys(cell["index"] for cell in cells):
        mine = [cell for cell in cells if cell["index"] == index]
        size, tokens = mine[0]["bytes_128"], mine[0]["tokens"]
        least = POOL * result["k"]
        if mine[0]["beta"] * tokens < least and mine[0]["preset"] != "paper":
            if mine[0]["beta"] > 0.02:
                continue  # the pool is larger: the same row twice
            share = f"{mine[0]['beta']:.0%} ({least} keys)"
        else:
            share = f"{mine[0]['beta']:.0%}"
        mean = {name: sum(c[name] for c in mine) / len(mine) for name in mine[0]["means"]}
        rows.append(
            (
                f"`{mine[0]['preset']}`",
                share,
                f"{size['kept']:.0f}",
                f"{size['scanned']:.0f}",
                f"{mean['recall']:.3f}",
                f"{min(c['recall_worst_layer'] for c in mine):.3f}",
                f"{mean['recall_worst_decile']:.3f}",
                f"{mean['mass_ratio']:.3f}",
            )
        )
    k, texts = result["k"], ", ".join(dict.fromkeys(cell["text"] for cell in cells))
    head = ("preset", "β", "bytes kept", "scanned", f"recall@{k}", "worst layer")
    return (
        f"SmolLM2-135M-Instruct, {cells[0]['tokens']} tokens of {texts}; all 30 layers, each of 9 "
        f"query heads on its own, {result['queries_per_head']} queries each; bytes per key and KV "
        f"head at D = 128; coverage is that of the selected rows over that of the true top {k}.\n\n"
        + table((*head, "worst tenth of heads", "coverage"), rows)
        + f"\n\n{machine(result)}"
    )


def lengths(result: dict[str, Any]) -> str:
    """Recall at other lengths: with the results at 7,000 tokens and those of the long model."""
    cells = list(result["cells"])
    for name in ("recall", "recall_long", "recall_62k"):
        path = RESULTS / f"{name}.json"
        cells += json.loads(path.read_text())["cells"] if path.exists() else []
    at = sorted({cell["tokens"] for cell in cells})
    rows = []
    past = [(preset, beta) for preset in ("fast", "accurate") for beta in (0.02, 0.05)]
    for preset, beta in (("paper", 0.05), *past, ("scan", 1.0)):
        mine = [cell for cell in cells if cell["preset"] == preset]
        row = [f"`{preset}`" if beta == 1 else f"`{preset}`, β = {beta:.0%}"]
        for tokens in at:
            few = preset != "paper" and beta * tokens < POOL * result["k"]
            asked = {0.02, 0.05} if few and 0.05 * tokens < POOL * result["k"] else {beta}
            here = [cell for cell in mine if cell["tokens"] == tokens and cell["beta"] in asked]
            worst = min((c["recall_worst_layer"] for c in here), default=0)
            row.append(f"{mean(here, 'recall'):.3f} ({worst:.3f})" if here else "")
        rows.append(tuple(row))
    head = ("", *(f"{tokens:,}" + (" (long model)" if tokens > 8192 else "") for tokens in at))
    title = "Recall@100 by the prompt's length, means over texts (worst layer):"
    return f"{title}\n\n" + table(head, rows)


def certified(result: dict[str, Any]) -> str:
    """Searches for a share of the attention: what was believed, and what was true."""
    rows, cells = [], result["certified"]
    for index, coverage in sorted({(cell["index"], cell["coverage"]) for cell in cells}):
        mine = [cell for cell in cells if (cell["index"], cell["coverage"]) == (index, coverage)]
        parts = ("believed", "true", "gap_absolute", "gap_90", "too_sure_by_5_points")
        figures = [mean(mine, part) for part in parts]
        rows.append(
            (
                f"`{index}`",
                f"{coverage:.0%}",
                f"{mean(mine, 'rows'):.0f}",
                *(f"{figure:.3f}" for figure in figures[:4]),
                f"{figures[4]:.1%}",
            )
        )
    head = ("index", "asked for", "rows", "believed", "true", "mean gap", "90% of gaps below")
    first = result["cells"][0]
    texts = ", ".join(dict.fromkeys(cell["text"] for cell in cells))
    return (
        f"SmolLM2-135M-Instruct, {first['tokens']} tokens of {texts}; all layers and query heads, "
        f"each on its own, {result['queries_per_head']} queries each, at most "
        f"{result['certified_k']} rows (where these are not enough, less is believed). Gaps are "
        "between what is believed and what is true, of single searches; the last column says how "
        "often a search believed 5 points too much.\n\n"
        + table((*head, "5 points too sure"), rows)
        + f"\n\n{machine(result)}"
    )


def centers(result: dict[str, Any]) -> str:
    """Recall by the number of tokens that share a center."""
    rows, cells = [], result["cells"]
    for index in dict.fromkeys(cell["index"] for cell in cells):
        mine = [cell for cell in cells if cell["index"] == index]
        size, every = mine[0]["bytes_128"], int(index.rsplit("=", 1)[1])
        whole = [cell for cell in mine if cell["first"] is None]
        pieces = [cell for cell in mine if cell["first"] is not None]
        rows.append(
            (
                {0: "none", 65536: "one for all"}.get(every, f"{every}"),
                f"{size['kept']:.1f}",
                f"{mean(whole, 'recall'):.3f}",
                f"{min(c['recall_worst_layer'] for c in whole):.3f}",
                f"{mean(whole, 'mass_ratio'):.3f}",
                f"{mean(pieces, 'recall'):.3f}",
            )
        )
    pieces = next(cell["first"] for cell in cells if cell["first"] is not None)
    head = ("tokens per center", "bytes kept", "recall@100", "worst layer", "coverage ratio")
    return table((*head, f"recall@100, first append {pieces}"), rows) + f"\n\n{machine(result)}"
