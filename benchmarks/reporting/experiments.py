"""Tables of the experiments of the ParisKV paper on another model."""

from __future__ import annotations

from typing import Any

from benchmarks.reporting.parts import machine, named, some, stored_like, table, values

PUBLISHED_STAGES = {"learned from the prompt": ("6%", "36.5%"), "analytic": ("16.1%", "64.3%")}
"""Recall of the coarse stage, and after exact reranking, of the paper's ablation (Figure 10)."""

PUBLISHED_LENGTHS = {"5K": "61.0%", "10K": "67.7%", "30K": "80.4%", "100K": "83.8%"}
"""Recall of the paper by the number of keys, if a tenth of them are candidates (Figure 9)."""


def along(result: dict[str, Any]) -> str:
    """Make a table of recall by index and position."""
    cells = [cell for cell in result["cells"] if "index" in cell]
    ends = values(cells, "tokens")
    head = ("index", *(f"{end:,} tokens" for end in ends))
    rows = (
        (f"`{name}`", *(f"{cell['recall']:.3f}" for cell in some(cells, index=name)))
        for name in values(cells, "index")
    )
    return "\n\n".join([table(head, rows), machine(result)])


def stages(result: dict[str, Any]) -> str:
    """Make a table of recall by kind of centroids, position and stage."""
    cells = [cell for cell in result["cells"] if "centroids" in cell]
    last = max(cell["tokens"] for cell in cells)
    betas = sorted({cell["beta"] for cell in some(cells, tokens=last) if cell["beta"]})
    head = ("centroids", "keys", "coarse stage", *(f"exact rerank of {b:.0%}" for b in betas))
    head = (*head, "exact rerank, fraction not stated")
    rows = [
        (name, "published", coarse, *("" for _ in betas), reranked)
        for name, (coarse, reranked) in PUBLISHED_STAGES.items()
    ]
    for tokens in values(cells, "tokens"):
        for name in PUBLISHED_STAGES:
            here = some(cells, tokens=tokens, centroids=name)
            by = {cell["beta"]: f"{cell['recall']:.1%}" for cell in here}
            rows.append((name, f"{tokens:,}", by[None], *(by.get(beta, "") for beta in betas), ""))
    return "\n\n".join([table(head, rows), machine(result)])


def lengths(result: dict[str, Any]) -> str:
    """Make a table of recall by the number of tokens, of the index and of its candidates."""
    rows = [("published", n, "", recall, "") for n, recall in PUBLISHED_LENGTHS.items()]
    for found in stored_like("paper_length", result):
        model = named(found["model"], found["lora"])
        for tokens in values(found["cells"], "tokens"):
            here = some(found["cells"], tokens=tokens)
            (whole,) = (cell for cell in here if "index" in cell)
            by = {cell["beta"]: f"{cell['recall']:.1%}" for cell in here if "centroids" in cell}
            row = (by[None], f"{whole['recall']:.1%}", by[found["beta"]])
            rows.append((model, f"{tokens:,}", *row))
    head = ("model", "keys", "coarse stage", "whole search", "exact rerank")
    return "\n\n".join([table(head, rows), machine(result)])
