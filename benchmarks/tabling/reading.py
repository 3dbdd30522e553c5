"""What a model's answers say: the demo, fidelity, divergence, rounding; the reference's time."""

from __future__ import annotations

import json
from typing import Any

from benchmarks.tabling.parts import RESULTS, machine, mean, table


def demo(result: dict[str, Any]) -> str:
    """Full attention and the index, side by side."""
    full, index = result["full"], result["index"]
    rows = [
        ("answer", full["answer"], index["answer"]),
        (f"needle {result['needle']} found", _yes(full["found"]), _yes(index["found"])),
        ("rows read per token", "100%", f"{index['rows_read_fraction']:.1%}"),
        (
            f"recall of each head's own top {index['k']} (exact search, as many rows)",
            "1",
            f"{index['recall_at_k']:.2f} ({index['recall_limit']:.2f})",
        ),
        (
            f"same next token; mean KL, {result['steps_compared']} steps",
            "1; 0",
            f"{index['agreement']:.2f}; {index['kl_mean']:.4f} nats",
        ),
        ("prefill, seconds", f"{full['prefill_s']:.1f}", f"{index['prefill_s']:.1f}"),
        ("per token, seconds", f"{full['token_s']:.2f}", f"{index['token_s']:.2f}"),
    ]
    memory = ", ".join(f"{tier} {size / 2**20:.1f} MiB" for tier, size in index["nbytes"].items())
    head = ("", "full attention", f"{index['name']}, k = {index['k']}")
    return (
        table(head, rows) + f"\n\n{result['model']}, {result['prompt_tokens']} prompt tokens. "
        f"Memory of the index: {memory}. {machine(result)}"
    )


def fidelity(result: dict[str, Any]) -> str:
    """Each index against full attention, teacher-forced."""
    rows = [
        (
            f"`{name}`",
            f"{r['kl_mean']:.4f}",
            f"{r['agreement']:.3f}",
            f"{r['recall_at_k']:.3f}",
            f"{r['recall_limit']:.3f}",
        )
        for name, r in result["indexes"].items()
    ]
    k = result["k"]
    drawn = any("+sample" in name for name in result["indexes"])
    note = " `+sample` draws half of the rows at random." if drawn else ""
    head = ("index", "mean KL, nats", "same next token", f"recall@{k}", "exact search")
    return (
        f"SmolLM2-135M-Instruct, {result['prompt_tokens']} tokens of prose, then "
        f"{result['steps']} steps with given tokens; {k} rows per KV head shared by 3 query "
        "heads, sink 64, local 256. Recall is of each query head's own true top "
        f"{k}; the last column is what exact search reaches with the same policy and rows."
        f"{note}\n\n" + table(head, rows) + f"\n\n{machine(result)}"
    )


def reference(result: dict[str, Any]) -> str:
    """What the plain torch reference costs."""
    rows = [
        (name, f"{t['median_ms']:.1f}", f"{t['low_ms']:.1f} to {t['high_ms']:.1f}")
        for part in ("search_and_fetch", "exact_attention")
        for name, t in result[part].items()
    ]
    shape = result["shape"]
    return (
        f"One layer, H = {shape['q_heads']}, G = {shape['kv_heads']}, D = {shape['head_dim']}, "
        f"{shape['tokens']} tokens, k = {shape['k']}, {shape['dtype']}.\n\n"
        + table(("what", "median, ms", "quartiles"), rows)
        + f"\n\n{machine(result)}"
    )


def divergence(result: dict[str, Any]) -> str:
    """KL over that of exact search with as many rows; longer texts from files beside it."""
    parts = [("to 6K", result)]
    for name in ("16k", "32k", "62k"):
        path = RESULTS / f"divergence_{name}.json"
        if path.exists():
            parts.append((f"{name.upper()}, long model", json.loads(path.read_text())))
    rows = []
    for length, part in parts:
        for index, found in part["indexes"].items():
            if index == "exact":
                continue
            low, high = found["ratio_95"]
            exact = part["indexes"]["exact"]["kl_mean"]
            rows.append(
                (
                    f"`{index}`",
                    length,
                    str(len(found["cells"])),
                    f"{found['kl_mean']:.4f}",
                    f"{exact:.4f}",
                    f"{found['ratio']:.3f} ({low:.3f} to {high:.3f})",
                )
            )
    head = ("index", "prompt", "cells", "mean KL, nats", "of `exact`", "ratio (95%)")
    return (
        f"Each cell: a text (prose, code, dialogue) and a length, {result['steps']} steps with "
        f"given tokens, k = {result['k']} rows per KV head shared by 3 query heads. The ratio is "
        "the geometric mean over cells; its interval a paired bootstrap over tokens.\n\n"
        + table(head, rows)
        + "\n\n"
        + " ".join([*(part["note"] for _, part in parts if "note" in part), machine(result)])
    )


def sampled(result: dict[str, Any]) -> str:
    """Rows drawn at random: KL in each text, and over that of exact search."""
    texts = [cell["text"] for cell in result["indexes"]["exact"]["cells"]]
    rows = []
    for index, found in result["indexes"].items():
        low, high = found["ratio_95"]
        cells = [f"{cell['kl_mean']:.4f}" for cell in found["cells"]]
        rows.append((f"`{index}`", *cells, f"{found['ratio']:.2f} ({low:.2f} to {high:.2f})"))
    tokens = result["indexes"]["exact"]["cells"][0]["tokens"]
    return (
        f"SmolLM2-135M-Instruct, {tokens} tokens, then {result['steps']} steps with given tokens; "
        f"{result['k']} rows per KV head in every line. Mean KL from full attention, nats, and "
        "its ratio to that of exact search (geometric mean, paired 95% interval).\n\n"
        + table(("index", *texts, "ratio"), rows)
        + f"\n\n{machine(result)}"
    )


def rounding(result: dict[str, Any]) -> str:
    """Recall of a group's rows by `largest`, means over texts."""
    cells = result["cells"]
    largest = list(dict.fromkeys(cell["query_max"] for cell in cells))
    rows = []
    for count, lists in dict.fromkeys((cell["candidates"], cell["lists"]) for cell in cells):
        mine = [cell for cell in cells if (cell["candidates"], cell["lists"]) == (count, lists)]
        each = [mean([c for c in mine if c["query_max"] == most], "recall") for most in largest]
        rows.append((f"{count} per {lists}", *(f"{recall:.4f}" for recall in each)))
    texts = ", ".join(dict.fromkeys(cell["text"] for cell in cells))
    heads = result["heads_per_group"]
    return (
        f"SmolLM2-135M-Instruct, {result['tokens']} tokens of {texts}; {len(result['layers'])} "
        f"layers, {result['queries_per_head']} queries, `fast`, groups of {heads} query heads. "
        f"Recall of the {result['k']} rows that exact search returns for the group, means over "
        "texts.\n\n"
        + table(("candidates", *(f"±{most}" for most in largest)), rows)
        + f"\n\n{machine(result)}"
    )


def _yes(found: bool) -> str:
    return "yes" if found else "no"
