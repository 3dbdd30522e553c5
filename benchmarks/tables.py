"""Write the tables in README and docs from `benchmarks/results/*.json`.

    python -m benchmarks.tables [--check]

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

from benchmarks.drifting import show as drifting
from benchmarks.tabling import (
    append,
    decode,
    field,
    hits,
    limits,
    reading,
    recall,
    rows,
    speed,
    tau,
)
from benchmarks.tabling.parts import RESULTS
from kvindex_adapters.files import write_text

ROOT = Path(__file__).parent.parent
PAGES = (
    *("README.md", "docs/indexes/pariskv.md", "docs/pipeline/README.md"),
    "docs/decisions/0010-rows-drawn-at-random.md",
    "docs/decisions/0012-a-center-for-every-segment.md",
    "docs/decisions/0013-the-query-is-rounded-not-the-table.md",
    *("docs/pipeline/codes.md", "docs/pipeline/coarse.md", "docs/pipeline/rerank.md"),
    *("docs/pipeline/select.md", "docs/pipeline/fetch.md", "docs/pipeline/attention.md"),
    "docs/cuda.md",
    *("docs/field.md", "docs/drift.md"),
    "docs/indexes/louiskv.md",
)

SOURCES = {
    **dict.fromkeys(("decode_stages", "decode_faiss", "decode_rows"), "decode_step"),
    **dict.fromkeys(("decode_presets", "preset_stages"), "decode_step_scan"),
    **dict.fromkeys(("append_updates", "append_layers", "append_small", "stage_codes"), "append"),
    **dict.fromkeys(
        ("stage_coarse", "stage_rerank", "stage_select", "stage_attention"), "decode_step"
    ),
}
"""Of a table, the result that it is made of, where that has another name."""

TABLES: dict[str, Callable[[dict[str, Any]], str]] = {
    "demo": reading.demo,
    "fidelity": reading.fidelity,
    "weight_scale": reading.reference,
    "recall": recall.recall,
    "recall_lengths": recall.lengths,
    "recall_mass": recall.certified,
    "recall_center": recall.centers,
    "divergence": reading.divergence,
    "divergence_sampled": reading.sampled,
    "rounding": reading.rounding,
    "append": append.append,
    "append_updates": append.updates,
    "append_layers": append.layers,
    "append_h100": append.append,
    "decode_step": decode.decode_step,
    "decode_step_h100": decode.steps,
    "decode_faiss": decode.decode_faiss,
    "decode_rows": decode.decode_rows,
    "decode_stages": decode.decode_stages,
    "decode_presets": decode.decode_presets,
    "preset_stages": decode.preset_stages,
    "stage_codes": append.kernels,
    "append_small": append.small,
    "stage_coarse": decode.stage("ask", "scan"),
    "stage_rerank": decode.stage("rerank"),
    "stage_select": decode.stage("agree"),
    "stage_attention": decode.stage("attend"),
    "field": field.field,
    "drift": drifting.markdown,
    "generate_speed": speed.generate_speed,
    "hit_rate": hits.hit_rate,
    "limits": limits.limits,
    "tau": tau.tau,
    "row_codecs": rows.row_codecs,
    "row_times": rows.row_times,
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
                write_text(path, new, name)
    print("changed:" if "--check" not in sys.argv else "stale:", ", ".join(stale) or "nothing")
    return int(bool(stale) and "--check" in sys.argv)


if __name__ == "__main__":
    sys.exit(main())
