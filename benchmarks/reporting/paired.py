"""Tables of answers to the same prompts in several ways, such as full attention and an index."""

from __future__ import annotations

from benchmarks.common.paired import converted, way
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
from kvindex.layer.arguments import AUTO_ROWS


def paired_answers(result: Result) -> str:
    """Make a table of correct answers in several ways, for each file of results."""
    return "\n\n".join(one(each) for each in stored_like("paired_answers", result))


def one(result: Result) -> str:
    """Make the table of one file of results, in the present or in the earlier format."""
    result = converted(result)
    base = way(result["ways"][0]).described
    lines = some(result["summary"], task=None)
    lengths = {line["tokens"] for line in lines} - {None}
    rows = [
        (
            "all" if line["tokens"] is None else f"{line['tokens']:,}",
            way(line["way"]).described,
            f"{line['prompts']:,}",
            "" if line["rows"] is None else f"{line['rows']:.0f}",
            "" if line["ceiling"] is None else f"{line['ceiling']:.1%}",
            f"{100 * line['score']:.1f}",
            points(line) if "difference" in line else "",
        )
        for line in lines
        if line["tokens"] is not None or len(lengths) > 1
    ]
    tasks = sorted({cell["task"] for cell in result["cells"]})
    about = (
        f"{named(result['model'], result['lora'])}, in {result['dtype']}, answered the same "
        f"questions in several ways, with the index `{result['index']}`. The tasks are "
        f"{', '.join(f'`{task}`' for task in tasks)}. *Rows* is the mean number of rows that a "
        "decode step retrieves per KV head, over layers, steps and prompts. *Ceiling* is the "
        f"fraction of KV heads and steps that retrieve {AUTO_ROWS:,} rows, the largest number with "
        '`k="auto"`. *Correct* is the mean '
        f"score in percent. The last column is the difference from {base} in percentage points, "
        "over prompts that were answered in both ways, with its 95% interval (a bootstrap over "
        "prompts)."
    )
    head = ("tokens", "decode steps with", "prompts", "rows", "ceiling", "correct", f"minus {base}")
    machines = result.get("machines", [result["machine"]])
    where = dict.fromkeys(machine({"machine": each}) for each in machines)
    return "\n\n".join([about, table(head, rows), *_by_task(result, base), " ".join(where)])


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
    return [f"The same differences from {base} by task, over all lengths:", table(head, rows)]
