"""The table of the comparison of indexes with the code that their authors published."""

from __future__ import annotations

from typing import Any

from benchmarks.reporting.parts import machine, named, table

HEAD = (
    *("index", "authors' code", "what of it ran", "compared with the same", "equal lists"),
    *("common rows", "as each is used", "authors'", "kvindex"),
)


def published_code(result: dict[str, Any]) -> str:
    """Make a table with a row for each index, below a sentence about the tensors."""
    s = result["settings"]
    layers = ", ".join(map(str, s["layers"]))
    about = (
        f"Keys of the first {s['tokens']:,} tokens of {s['text'].partition(' (')[0]}, and the "
        f"queries of the next {s['queries']} tokens; {named(s['model'], None)} in {s['dtype']}; "
        f"layers {layers}, with {s['q_heads']} query heads and {s['kv_heads']} KV heads each. "
        "The last two columns show the coverage, or, where they say so, the error of the output."
    )
    rows = map(_row, result["comparisons"])
    return "\n\n".join([about, table(HEAD, rows), machine(result)])


def arkvale_pages(result: dict[str, Any]) -> str:
    """Make a table of how many of the best pages each summary of ArkVale finds."""
    found = result["arkvale_figure_7"]
    names = {
        "cuboid-mean": "cuboid, mean radius",
        "cuboid-max": "cuboid, maximum radius",
        "ball-mean": "ball, mean radius",
        "ball-max": "ball, maximum radius",
        "center": "center only",
    }
    counts = list(found["center"])
    head = ("summary", *(f"{n} page" + "s" * (n != "1") for n in counts))
    rows = ((text, *(f"{found[name][n]:.2f}" for n in counts)) for name, text in names.items())
    return table(head, rows)


def _row(found: dict[str, Any]) -> tuple[str, ...]:
    same, used = found["same"], found["used"]
    equal = f"{same['equal']:.1%}"
    if "equal_up_to_ties" in same:
        equal += f" ({same['equal_up_to_ties']:.0%} up to ties)"
    page = f"[`{found['index']}`](../indexes/{found['index']}.md#compared-with-the-authors-code)"
    return (
        page,
        _source(found),
        found["ran"],
        same["what"] + _rows(same["rows"]),
        f"{equal} of {same['lists']:,}",
        f"{same['overlap']:.1%}",
        *(("", "", "") if used is None else (used["what"] + _rows(used["rows"]), *_pair(used))),
    )


def _source(found: dict[str, Any]) -> str:
    """Return repository and commit as a link, or the name and the version of a package."""
    kind, _, name = found["repository"].rpartition(":")
    if kind == "pypi":
        return f"package {name} {found['commit']}"
    commit = found["commit"]
    return f"[{name}](https://github.com/{name}/tree/{commit}) `{commit[:7]}`"


def _rows(count: int | None) -> str:
    return "" if count is None else f"; {count:,} rows"


def _pair(used: dict[str, Any]) -> tuple[str, str]:
    error = " (error)" if used["measure"] == "error" else ""
    return f"{used['authors']:.3f}{error}", f"{used['kvindex']:.3f}{error}"
