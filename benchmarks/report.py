"""Write tables into the README and the docs from `benchmarks/results/*.json`, and draw pictures.

    python -m benchmarks.report [--check] [--draw NAME …]

In a page, the script replaces the text between `<!-- name:begin -->` and `<!-- name:end -->` by the
table with this name. `--check` writes nothing, and exits with status 1 if a table differs from the
results. `--draw NAME` draws the picture docs/pictures/NAME.png. Allowed names are decode_step,
decoder_tokens, prefill_decoder, ranks, recall, cpu_steps, answers_lengths, answers_rows,
answers_depth and answers_along.
"""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Callable
from pathlib import Path

from benchmarks.reporting import (
    along,
    answers,
    choice,
    cpu,
    experiments,
    field,
    gpu,
    paired,
    prompts,
    published,
    quality,
    suite,
    tokens,
)
from benchmarks.reporting.parts import Result, stored
from kvindex_adapters.evaluate.output_files import write_text

ROOT = Path(__file__).parents[1]

SOURCES = {
    "tokens_summary": "decoder_tokens",
    "speculation_lookup": "speculation_long",
    "latents": "latents_128",
    "answers_summary": "answers_lengths",
    "default_answers": "paired_answers",
    "choice": "divergence_drawn",
    "decode_presets": "decode_step_fast",
    "append_layers": "append",
    "arrivals": "arrivals_32k",
    "throughput": "throughput_128k",
    "serving_default": "serving",
    "serving_summary": "serving",
    "cpu_summary": "cpu_steps",
    "cpu_tokens": "generation_cpu_4k",
    "prefill_summary": "prefill_decoder",
    "prompt_summary": "prefill_decoder_128k",
    "selectors": "sparse_selectors",
    "selectors_all": "sparse_selectors",
    "arkvale_pages": "published_code",
    "paper_stages": "paper_along",
    "bound": "missed",
}
"""Name of a table -> name of the file of results (without .json), if the names differ."""

TABLES: dict[str, Callable[[Result], str]] = {
    "demo": quality.demo,
    "fidelity": quality.fidelity,
    "divergence": quality.divergence,
    "divergence_drawn": quality.drawn,
    "recall": quality.recall,
    "row_codecs": quality.row_codecs,
    "row_scales": quality.row_scales,
    "lists": quality.lists,
    "budget": quality.budget,
    "missed": quality.missed,
    "bound": quality.bound,
    "recall_lengths": quality.lengths,
    "field": field.field,
    "field_suite": suite.field_suite,
    "field_suite_16k": suite.field_suite,
    "field_suite_57k": suite.field_suite,
    "published_code": published.published_code,
    "arkvale_pages": published.arkvale_pages,
    "paper_along": experiments.along,
    "paper_stages": experiments.stages,
    "paper_length": experiments.lengths,
    "answers_field": answers.field,
    "answers_lengths": answers.lengths,
    "answers_rows": answers.rows,
    "answers_depth": answers.depth,
    "answers_summary": answers.summary,
    "paired_answers": paired.paired_answers,
    "ten_answers": paired.one,
    "default_answers": paired.by_default,
    "choice": choice.choice,
    "answers_along": along.along,
    "tokens_summary": tokens.summary,
    "decode_step": gpu.decode_step,
    "decode_step_h100": gpu.steps,
    "step_drawn": gpu.others,
    "decode_presets": gpu.presets,
    "append_layers": gpu.append_layers,
    "generate_speed": gpu.generate_speed,
    "decoder_tokens": tokens.decoder_tokens,
    "prefill_decoder": prompts.prefill,
    "prefill_summary": prompts.summary,
    "prefill_through": prompts.through,
    "prompt_summary": prompts.sentence,
    "block_sparse": prompts.block_sparse,
    "selectors": prompts.selectors,
    "selectors_all": prompts.all_selectors,
    "sparse_answers": prompts.answers,
    "transformers_tokens": tokens.through,
    "serving": tokens.serving,
    "serving_default": tokens.served_by_default,
    "serving_summary": tokens.served,
    "arrivals": tokens.arrivals,
    "throughput": tokens.throughput,
    "ranks": tokens.ranks,
    "token_ahead": tokens.ahead,
    "draft_steps": tokens.draft_steps,
    "verified_host": tokens.verified,
    "verified_device": tokens.verified,
    "verified_batch": tokens.verified,
    "speculation_long": tokens.acceptance,
    "speculation_lookup": tokens.lookups,
    "row_budget_tokens": tokens.row_budget,
    "ranks_quality": quality.ranks,
    "latents": gpu.latents,
    "hit_rate": gpu.hit_rate,
    "limits": gpu.limits,
    "cpu_steps": cpu.steps,
    "cpu_indexes": cpu.indexes,
    "cpu_row_codecs": cpu.row_codecs,
    "cpu_summary": cpu.summary,
    "cpu_tokens": cpu.tokens,
}


def pages() -> list[Path]:
    """Return the README and the pages of the docs that contain tables of results."""
    found = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
    return [path for path in found if "<!-- " in path.read_text(encoding="utf-8")]


def rewritten(page: str) -> str:
    """Return the text of a page with new tables. Raise KeyError if a table is unknown."""
    for name in re.findall(r"<!-- (\w+):begin -->", page):
        render, result = TABLES[name], stored(SOURCES.get(name, name))
        if result is not None:
            block = f"<!-- {name}:begin -->\n{render(result)}\n<!-- {name}:end -->"
            pattern = f"<!-- {name}:begin -->.*?<!-- {name}:end -->"
            page = re.sub(pattern, lambda _, b=block: b, page, flags=re.DOTALL)
    return page


def stale() -> dict[Path, str]:
    """Find the pages whose tables differ from the results. Return their paths and new texts."""
    found = {path: rewritten(path.read_text(encoding="utf-8")) for path in pages()}
    return {path: new for path, new in found.items() if new != path.read_text(encoding="utf-8")}


def main(arguments: list[str] | None = None) -> int:
    """Run the command line: write or check the tables of all pages, and draw pictures."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument(
        "--check",
        action="store_true",
        help="Write nothing, and exit with status 1 if a table of the docs differs from the result "
        "files",
    )
    parser.add_argument(
        "--draw",
        nargs="+",
        default=[],
        metavar="NAME",
        help="Names of figures in docs/pictures to draw again",
    )
    given = parser.parse_args(arguments)
    changed = stale()
    for path, new in changed.items():
        if not given.check:
            write_text(path, new, path.name)
    names = ", ".join(str(path.relative_to(ROOT)) for path in changed) or "nothing"
    print("stale:" if given.check else "changed:", names)
    if given.draw:
        from benchmarks.reporting.pictures import draw  # this import needs matplotlib

        draw(ROOT / "docs/pictures", given.draw)
    return int(bool(changed) and given.check)


if __name__ == "__main__":
    sys.exit(main())
