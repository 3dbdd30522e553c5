"""Write the tables in README and docs from `benchmarks/results/*.json`.

    python benchmarks/tables.py [--check]

A table stands between `<!-- name:begin -->` and `<!-- name:end -->`. With `--check` nothing is
written, and the exit status is 1 where a table is not what the results say.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
RESULTS = ROOT / "benchmarks" / "results"
POOL = 4
"""Candidates past the paper are at least `POOL · k`."""
PAGES = (
    *("README.md", "docs/indexes/pariskv.md", "docs/pipeline/README.md"),
    "docs/decisions/0010-rows-drawn-at-random.md",
    "docs/decisions/0012-a-centre-for-every-segment.md",
    "docs/decisions/0013-the-query-is-rounded-not-the-table.md",
    "docs/pipeline/rerank.md",
    "docs/cuda.md",
    "docs/field.md",
)


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
        _table(head, rows) + f"\n\n{result['model']}, {result['prompt_tokens']} prompt tokens. "
        f"Memory of the index: {memory}. {_machine(result)}"
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
        f"{note}\n\n" + _table(head, rows) + f"\n\n{_machine(result)}"
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
        + _table(("what", "median, ms", "quartiles"), rows)
        + f"\n\n{_machine(result)}"
    )


def recall(result: dict[str, Any]) -> str:
    """Presets at several β: bytes, recall and mass, means over texts."""
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
        f"head at D = 128; mass is that of the selected rows over that of the true top {k}.\n\n"
        + _table((*head, "worst tenth of heads", "mass"), rows)
        + f"\n\n{_machine(result)}"
    )


def lengths(result: dict[str, Any]) -> str:
    """Recall at other lengths: with the results at 7,000 tokens and those of the long model."""
    cells = list(result["cells"])
    for name in ("recall", "recall_long"):
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
            row.append(f"{_mean(here, 'recall'):.3f} ({worst:.3f})" if here else "")
        rows.append(tuple(row))
    head = ("", *(f"{tokens:,}" + (" (long model)" if tokens > 8192 else "") for tokens in at))
    title = "Recall@100 by the prompt's length, means over texts (worst layer):"
    return f"{title}\n\n" + _table(head, rows)


def certified(result: dict[str, Any]) -> str:
    """Searches for a share of the attention: what was believed, and what was true."""
    rows, cells = [], result["certified"]
    for index, mass in sorted({(cell["index"], cell["mass"]) for cell in cells}):
        mine = [cell for cell in cells if (cell["index"], cell["mass"]) == (index, mass)]
        parts = ("believed", "true", "gap_absolute", "gap_90", "too_sure_by_5_points")
        figures = [_mean(mine, part) for part in parts]
        rows.append(
            (
                f"`{index}`",
                f"{mass:.0%}",
                f"{_mean(mine, 'rows'):.0f}",
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
        + _table((*head, "5 points too sure"), rows)
        + f"\n\n{_machine(result)}"
    )


def centres(result: dict[str, Any]) -> str:
    """Recall by the number of tokens that share a centre."""
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
                f"{_mean(whole, 'recall'):.3f}",
                f"{min(c['recall_worst_layer'] for c in whole):.3f}",
                f"{_mean(whole, 'mass_ratio'):.3f}",
                f"{_mean(pieces, 'recall'):.3f}",
            )
        )
    pieces = next(cell["first"] for cell in cells if cell["first"] is not None)
    head = ("tokens per centre", "bytes kept", "recall@100", "worst layer", "mass ratio")
    return _table((*head, f"recall@100, first append {pieces}"), rows) + f"\n\n{_machine(result)}"


def divergence(result: dict[str, Any]) -> str:
    """KL over that of exact search with as many rows; longer texts from files beside it."""
    parts = [("to 6K", result)]
    for name in ("16k", "32k"):
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
        + _table(head, rows)
        + f"\n\n{_machine(result)}"
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
        + _table(("index", *texts, "ratio"), rows)
        + f"\n\n{_machine(result)}"
    )


def rounding(result: dict[str, Any]) -> str:
    """Recall of a group's rows by `largest`, means over texts."""
    cells = result["cells"]
    largest = list(dict.fromkeys(cell["largest"] for cell in cells))
    rows = []
    for count, lists in dict.fromkeys((cell["candidates"], cell["lists"]) for cell in cells):
        mine = [cell for cell in cells if (cell["candidates"], cell["lists"]) == (count, lists)]
        each = [_mean([c for c in mine if c["largest"] == most], "recall") for most in largest]
        rows.append((f"{count} per {lists}", *(f"{recall:.4f}" for recall in each)))
    texts = ", ".join(dict.fromkeys(cell["text"] for cell in cells))
    heads = result["heads_per_group"]
    return (
        f"SmolLM2-135M-Instruct, {result['tokens']} tokens of {texts}; {len(result['layers'])} "
        f"layers, {result['queries_per_head']} queries, `fast`, groups of {heads} query heads. "
        f"Recall of the {result['k']} rows that exact search returns for the group, means over "
        "texts.\n\n"
        + _table(("candidates", *(f"±{most}" for most in largest)), rows)
        + f"\n\n{_machine(result)}"
    )


def decode_step(result: dict[str, Any]) -> str:
    """Whole steps beside dense attention."""
    rows = []
    for point in result["points"]:
        if point["batch"] > 1:
            continue
        dense = point["dense"]["median_us"]
        line = [f"{point['tokens']:,}", f"{dense:.0f}", f"{point['topk']['median_us']:.0f}"]
        for place in ("host", "cached", "device"):
            ours = point.get(f"step_{place}")
            median = ours and ours["median_us"]
            line.append(f"{median:.0f} ({median / dense:.2f})" if ours else "–")
        floor = sum(stage.get("floor_us", 0) for stage in point["stages"])
        rows.append((*line, f"{floor:.0f}"))
    head = ("tokens", "dense (SDPA)", "exact scores, topk", "rows on the host")
    head = (*head, "and a cache of rows", "rows on the device", "what must move")
    return (
        "µs for a layer and step, and over dense: medians of 50 replays of a CUDA graph of 16 "
        "layers, cold caches; B = 1, H = 32, G = 8, D = 128, bfloat16, "
        f"k = {result['shape']['k']}, `{result['index']}`.\n\n"
        + _table(head, rows)
        + f"\n\n{_machine(result)}"
    )


def decode_stages(result: dict[str, Any]) -> str:
    """Each kernel of a step: bytes, floor, measured, ratio."""
    points = [point for point in result["points"] if point["batch"] == 1]
    rows = []
    for of_each in zip(*(point["stages"] for point in points), strict=True):
        line = [f"`{of_each[0]['name']}`"]
        for stage in of_each:
            moved = (stage["bytes"] + stage["host_bytes"]) / 1e6
            share = f"{stage['floor_us'] / stage['us']:.0%}" if stage["us"] > 0 else "–"
            line += [f"{moved:.1f}", f"{stage['floor_us']:.1f}", f"{stage['us']:.1f}", share]
        rows.append(tuple(line))
    head = ["launch"]
    for point in points:
        head += [f"{point['tokens']:,}: MB", "floor, µs", "measured, µs", "ratio"]
    read, pinned = (result["ceilings"][name]["GB_s"] for name in ("read", "pinned"))
    return (
        _table(tuple(head), rows)
        + f"\n\nRows on the host. Floors at {read / 1e3:.2f} TB/s of reading and {pinned:.0f} GB/s "
        f"over PCIe, measured in the same run. {_machine(result)}"
    )


def field(result: dict[str, Any]) -> str:
    """All indexes under one protocol; what arrives in pieces, and frozen, in columns of its own."""
    rows, lines = [], {(line["index"], line["arrival"]): line for line in result["indexes"]}
    ks = [str(k) for k in result["rows"]]
    k = ks[min(1, len(ks) - 1)]
    for index in dict.fromkeys(line["index"] for line in result["indexes"]):
        whole = lines[index, "whole"]
        later = [lines.get((index, arrival)) for arrival in ("pieces", "stale")]
        at = whole["rows"][k]
        rows.append(
            (
                f"`{index}`",
                *(f"{whole['bytes'][part]:.0f}" for part in ("kept", "scanned")),
                *(f"{whole['build_ms']:.0f}", f"{at['search_ms']:.2f}"),
                *(f"{at['recall']:.3f}", f"{at['mass']:.3f}"),
                *(f"{whole['rows'][each]['error']:.3f}" for each in ks),
                *(f"{line['rows'][k]['error']:.3f}" if line else "" for line in later),
            )
        )
    rows += [(f"`{index}`", why, *("",) * (len(ks) + 7)) for index, why in result["failed"].items()]
    setting, shape = result["setting"], result["shape"]
    head = ("index", "kept B", "scanned B", "build, ms", "search, ms", f"recall@{k}", f"mass@{k}")
    head = (*head, *(f"error@{each}" for each in ks), f"in pieces, @{k}", f"stale, @{k}")
    return (
        f"{setting['tokens']:,} tokens of {', '.join(result['texts'])}, {result['written']} "
        f"written ones ask; {result['layers']} layers of {shape['q_heads']} query and "
        f"{shape['kv_heads']} KV heads; the first {setting['sink']} tokens, the text's last "
        f"{setting['local']} and the written ones are attended to besides. In pieces: the text's "
        f"last {setting['generated']} tokens come as while decoding.\n\n"
        + _table(head, rows)
        + f"\n\n{_machine(result)} {result['dtype']}, {result['machine']['threads']} threads; load "
        f"average {result['load_average']:.1f} at the end."
    )


SOURCES = {"decode_stages": "decode_step"}
"""Of a table, the result that it is made of, where that has another name."""

TABLES: dict[str, Callable[[dict[str, Any]], str]] = {
    "demo": demo,
    "fidelity": fidelity,
    "reference": reference,
    "recall": recall,
    "recall_lengths": lengths,
    "recall_mass": certified,
    "recall_centre": centres,
    "divergence": divergence,
    "divergence_sampled": sampled,
    "rounding": rounding,
    "decode_step": decode_step,
    "decode_stages": decode_stages,
    "field": field,
}


def rewritten(page: str) -> str:
    """The page with its tables made anew."""
    for name, render in TABLES.items():
        path = RESULTS / f"{SOURCES.get(name, name)}.json"
        if path.exists():
            body = render(json.loads(path.read_text()))
            block = f"<!-- {name}:begin -->\n{body}\n<!-- {name}:end -->"
            pattern = f"<!-- {name}:begin -->.*?<!-- {name}:end -->"
            page = re.sub(pattern, lambda _, b=block: b, page, flags=re.DOTALL)
    return page


def main() -> int:
    """Write the pages, or check them."""
    stale = []
    for name in PAGES:
        path = ROOT / name
        old = path.read_text()
        new = rewritten(old)
        if new != old:
            stale.append(name)
            if "--check" not in sys.argv:
                path.write_text(new)
    print("changed:" if "--check" not in sys.argv else "stale:", ", ".join(stale) or "nothing")
    return int(bool(stale) and "--check" in sys.argv)


def _table(head: tuple[str, ...], rows: list[tuple[str, ...]]) -> str:
    lines = [head, ("---",) * len(head), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def _mean(cells: list[dict[str, Any]], name: str) -> float:
    return sum(float(cell[name]) for cell in cells) / max(len(cells), 1)


def _machine(result: dict[str, Any]) -> str:
    m = result["machine"]
    place = m.get("gpu") or f"{m['cores']} cores of {m['processor']}"
    return f"Measured on {place}, torch {m['torch']}, transformers {m['transformers']}."


def _yes(found: bool) -> str:
    return "yes" if found else "no"


if __name__ == "__main__":
    sys.exit(main())
