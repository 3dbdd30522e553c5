"""Tables of answers to the same prompts in several ways, such as full attention and an index."""

from __future__ import annotations

from benchmarks.common.paired import summary, way
from benchmarks.reporting.answers import points
from benchmarks.reporting.parts import (
    Result,
    machine,
    named,
    some,
    stored_like,
    table,
    values,
)
from kvindex.layer.arguments import AUTO_ROWS, DEFAULT_K


def paired_answers(result: Result) -> str:
    """Make a table of correct answers in several ways, for each file of results."""
    return "\n\n".join(one(each) for each in stored_like("paired_answers", result))


def by_default(result: Result) -> str:
    """Write the differences between the default number of rows and full attention."""
    lines = some(result["summary"], task=None, way=f"k={DEFAULT_K}")
    (every,) = some(lines, tokens=None)
    said = [
        f"{points(line)} at {line['tokens']:,} tokens"
        for line in lines
        if line["tokens"] is not None
    ]
    score = every["score"]
    return (
        f"With the default, {DEFAULT_K} rows (keys and values of tokens) per KV head and step, "
        f"{named(result['model'], result['lora'])} answered {100 * score:.1f}% of "
        f"{every['pairs']} questions correctly, and with full attention "
        f"{100 * (score - every['difference']):.1f}%. The difference in percentage points, with "
        f"its 95% interval, is {points(every)}. By the length of the prompt, it is "
        f"{', '.join(said)}."
    )


def one(result: Result) -> str:
    """Make the table of one file of results."""
    base = way(result["ways"][0]).described
    lines = some(result["summary"], task=None)
    lengths = {line["tokens"] for line in lines} - {None}
    several = any("low_all" in line for line in lines)
    automatic = any(line["ceiling"] is not None for line in lines)
    if len(lengths) > 1:
        lines += _of_every_way(result)
    rows = [
        (
            line.get("scope") or ("all" if line["tokens"] is None else f"{line['tokens']:,}"),
            way(line["way"]).described,
            f"{line['prompts']:,}",
            "" if line["rows"] is None else f"{line['rows']:.0f}",
            *(["" if line["ceiling"] is None else f"{line['ceiling']:.1%}"] if automatic else []),
            f"{100 * line['score']:.1f}",
            points(line) if "difference" in line else "",
            *([_corrected(line)] if several else []),
        )
        for line in lines
        if line["tokens"] is not None or len(lengths) > 1
    ]
    tasks = sorted({cell["task"] for cell in result["cells"]})
    ceiling = ""
    if automatic:
        ceiling = (
            f"*Ceiling* is the fraction of KV heads and steps that retrieve {AUTO_ROWS:,} rows, "
            'the largest number with `k="auto"`. '
        )
    last = "The column before the last" if several else "The last column"
    about = (
        f"{named(result['model'], result['lora'])}, in {result['dtype']}, answered the same "
        f"questions in several ways, with the index `{result['index']}` if no other is named. The "
        f"tasks are {', '.join(f'`{task}`' for task in tasks)}. *Rows* is the mean number of rows "
        "that a decode step retrieves per KV head, over layers, steps and prompts. "
        f"{ceiling}*Correct* is the mean score in percent. {last} is the difference from "
        f"{base} in percentage points, over prompts that were answered in both ways, with its 95% "
        "interval (a bootstrap over prompts)."
    )
    if several:
        about += (
            f" The last column is that interval corrected for {len(result['ways']) - 1} "
            "comparisons (Bonferroni): at each length, all of these intervals are right with a "
            "probability of at least 95%."
        )
    head = ["tokens", "decode steps with", "prompts", "rows", "correct", f"minus {base}"]
    if automatic:
        head.insert(4, "ceiling")
    head += ["corrected interval"] if several else []
    machines = result.get("machines", [result["machine"]])
    where = dict.fromkeys(machine({"machine": each}) for each in machines)
    return "\n\n".join([about, table(head, rows), *_by_task(result, base), " ".join(where)])


def _of_every_way(result: Result) -> list[Result]:
    """Return a line for each way, over the prompts that were answered in every way. Return [] if
    these are all prompts, or none."""
    cells, ways = result["cells"], result["ways"]
    complete = [cell for cell in cells if all(name in cell["scores"] for name in ways)]
    if len(complete) in (0, len(cells)):
        return []
    found = [line for line in summary(complete, ways) if line["tokens"] is line["task"] is None]
    return [{**line, "scope": "all, answered in every way"} for line in found]


def _corrected(line: Result) -> str:
    """Return the corrected interval of a difference in percentage points."""
    if "low_all" not in line:
        return ""
    ends = (round(100 * line[name], 1) + 0.0 for name in ("low_all", "high_all"))  # no -0.0
    return "{:+.1f} to {:+.1f}".format(*ends)


def _by_task(result: Result, base: str) -> list[str]:
    """Return a table of the differences for each task, with its text, or [] for one task."""
    tasks = [task for task in values(result["summary"], "task") if task is not None]
    if not tasks:
        return []
    rows = []
    for name in result["ways"][1:]:
        own = {line["task"]: line for line in some(result["summary"], way=name)}
        cells = [points(line) if "difference" in (line := own.get(t, {})) else "" for t in tasks]
        rows.append((way(name).described, *cells))
    head = ("decode steps with", *(f"`{task}`" for task in tasks))
    lengths = {line["tokens"] for line in result["summary"]} - {None}
    scope = ", over all lengths" if len(lengths) > 1 else ""
    return [f"The same differences from {base} by task{scope}:", table(head, rows)]
