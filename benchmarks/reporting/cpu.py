"""Tables of results on a CPU: a layer's step, a model's tokens, FAISS beside it."""

from __future__ import annotations

from benchmarks.reporting.parts import Result, machine, some, table, values


def steps(result: Result) -> str:
    """A layer's step beside SDPA, by length and threads."""
    names = [name for name, found in result["points"][0].items() if isinstance(found, dict)]
    rows = [
        (
            f"{point['tokens']:,}",
            str(point["threads"]),
            f"{point['dense']['ms']:.2f}",
            *(f"{point[name]['ms']:.2f} ({_ratio(point[name])})" for name in names[1:]),
        )
        for point in result["points"]
    ]
    shape = result["shape"]
    about = (
        f"Milliseconds of a layer's step, and over dense: medians of {result['rounds']} rounds in "
        f"which all take turns, with quartiles of the ratio; H = {shape['q_heads']}, "
        f"G = {shape['kv_heads']}, D = {shape['head_dim']}, float32, k = {shape['k']}."
    )
    head = ("tokens", "threads", "dense (SDPA)", "the same, heads folded")
    head = (*head, *(f"`{name}`" for name in names[2:]))
    return f"{about}\n\n{table(head, rows)}\n\n{machine(result)}"


def _ratio(found: Result) -> str:
    low, middle, high = (
        f"{found[name]:.2f}" for name in ("of_dense_low", "of_dense", "of_dense_high")
    )
    return middle if low == high else f"{middle}; {low} to {high}"


def summary(result: Result) -> str:
    """With all threads, from 8K tokens on."""
    most = max(values(result["points"], "threads"))
    points = [
        p for p in some(result["points"], threads=most) if p["tokens"] in (2**13, 2**15, 2**17)
    ]
    rows = [
        (f"{p['tokens']:,}", f"{p['dense']['ms']:.2f}", f"{p[result['index']]['ms']:.2f}")
        for p in points
    ]
    head = ("tokens", "dense attention, ms", f"`{result['index']}`, ms")
    return f"{table(head, rows)}\n\n{machine(result)}"
