"""Tables of times on a CPU: decode steps of a layer, and generated tokens of a model."""

from __future__ import annotations

from benchmarks.common.timing import spread
from benchmarks.reporting.parts import Result, machine, some, stored, table, values

SHOWN = 2**15
"""Number of tokens of the measurement that the README mentions."""


def steps(result: Result) -> str:
    """Make the table of decode steps of a layer and of SDPA, by number of tokens and of threads."""
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
        "The table shows the time of one layer's decode step in milliseconds, and in parentheses "
        "this time divided by that of dense attention. Times are medians of "
        f"{result['rounds']} rounds in which all variants take turns; quartiles are given for the "
        f"ratio. The layer has {shape['q_heads']} query heads, {shape['kv_heads']} KV heads, "
        f"D = {shape['head_dim']} and float32 rows, and retrieves k = {shape['k']} of them."
    )
    appends = [
        f"{one['of_products']:.3f} ({one['of_products_low']:.3f} to {one['of_products_high']:.3f}) "
        f"with {one['threads']} thread{'s' * (one['threads'] > 1)}"
        for one in result["appends"]
    ]
    about += (
        f" The time of an append of {result['appends'][0]['tokens']:,} keys, divided by the time "
        f"of the layer's matrix products for the same tokens, is {' and '.join(appends)}."
    )
    head = ("tokens", "threads", "dense (SDPA)", "dense, heads folded")
    head = (*head, *(f"`{name}`" for name in names[2:]))
    return f"{about}\n\n{table(head, rows)}\n\n{machine(result)}"


def _ratio(found: Result, over: str = "of_dense") -> str:
    low, middle, high = (f"{found[name]:.2f}" for name in (f"{over}_low", over, f"{over}_high"))
    return middle if low == high else f"{middle}; {low} to {high}"


def indexes(result: Result) -> str:
    """Make the table of each index's decode step with compiled operations and in plain torch."""
    (point,), plain = result["points"], ":backend=torch"
    pairs = [(name.removesuffix(plain), name) for name in point if name.endswith(plain)]
    rows = [
        (f"`{name}`", f"{point[torch]['ms']:.2f}", f"{point[name]['ms']:.2f}", ratio)
        for name, torch in pairs
        for ratio in [f"{point[name]['ms'] / point[torch]['ms']:.2f}"]
    ]
    head = ("index", "plain torch, ms", "compiled, ms", "ratio")
    about = (
        f"The table shows the time of one layer's decode step over {point['tokens']:,} tokens with "
        f"{point['threads']} thread, measured as in the first table of this page."
    )
    return f"{about}\n\n{table(head, rows)}\n\n{machine(result)}"


def row_codecs(result: Result) -> str:
    """Make the table of each index's decode step by row codec, with ratios to the codec `plain`."""
    (point,), mark = result["points"], ":row_codec="
    pairs = [name.split(mark) for name in point if mark in name]
    names, codecs = (list(dict.fromkeys(part)) for part in zip(*pairs, strict=True))
    rows = [["`plain`", *(cell for name in names for cell in (f"{point[name]['ms']:.2f}", "1"))]]
    for codec in codecs:
        steps = [point[name + mark + codec] for name in names]
        cells = [cell for of in steps for cell in (f"{of['ms']:.2f}", _ratio(of, "of_plain"))]
        rows.append([f"`{codec}`", *cells])
    head = ["row codec", *(t for name in names for t in (f"`{name}`, ms", "ratio to `plain`"))]
    shape = result["shape"]
    about = (
        "The table shows the time of one layer's decode step on a CPU in milliseconds, over "
        f"{point['tokens']:,} tokens with {point['threads']} thread, and this time divided by that "
        f"with `plain` rows. Times are medians of {result['rounds']} rounds in which all variants "
        "take turns; quartiles are given for the ratio. The layer has "
        f"{shape['q_heads']} query heads, {shape['kv_heads']} KV heads, D = {shape['head_dim']} "
        f"and float32 numbers, and retrieves k = {shape['k']} rows."
    )
    return f"{about}\n\n{table(head, rows)}\n\n{machine(result)}"


def summary(result: Result) -> str:
    """Write a sentence that compares a decode step with dense attention, on all CPU threads."""
    most = max(values(result["points"], "threads"))
    (point,) = some(result["points"], threads=most, tokens=SHOWN)
    name = result["index"]
    return (
        f"On a CPU with {SHOWN:,} tokens, one layer's decode step with `{name}` takes "
        f"{point[name]['of_dense']:.2f} times the time of dense attention ([more](docs/cpu.md))."
    )


LENGTHS = ("4k", "8k", "32k")


def tokens(_: Result) -> str:
    """Make the table of the time per generated token of a model, by prompt length.

    The results of each length are in a file of their own.
    """
    runs = [found for name in LENGTHS if (found := stored(f"generation_cpu_{name}"))]
    rows = []
    for run in runs:
        part = run["model_run"]
        dense, ours = part["dense"], part["graphs"]
        pairs = zip(ours["token_ms_rounds"], dense["token_ms_rounds"], strict=True)
        ratio = spread("of_dense", [mine / full for mine, full in pairs])
        prefill = part["prefill_s"]
        rows.append(
            (
                *(_model(run), f"{part['tokens']:,}"),
                *(f"{one['token_ms']:.0f}" for one in (dense, ours)),
                _ratio(ratio),
                *(f"{prefill[name]:.1f}" for name in ("dense", "graphs")),
                f"{prefill['graphs'] / prefill['dense']:.2f}",
            )
        )
    head = ("model", "tokens of the prompt", "full attention, ms per token")
    head = (*head, f"`{runs[0]['index']}`, ms per token", "ratio")
    head = (*head, "prompt with full attention, s", f"prompt with `{runs[0]['index']}`, s", "ratio")
    about = (
        f"The model computes in {runs[0]['dtype']} and decodes greedily. Times are medians of "
        f"rounds in which both kinds of attention generate {runs[0]['model_run']['turn']} tokens "
        "in turns; quartiles are given for the ratio. The prompt is read once, in chunks of 1,024 "
        "tokens."
    )
    threads = runs[0]["machine"]["threads"]
    return f"{about}\n\n{table(head, rows)}\n\n{machine(runs[0])} All runs use {threads} threads."


def _model(result: Result) -> str:
    return "the long model" if result["lora"] else "SmolLM2-135M"
