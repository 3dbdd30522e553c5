"""Tables of times on a CPU: decode steps of a layer, and generated tokens of a model."""

from __future__ import annotations

from benchmarks.common.timing import spread
from benchmarks.reporting.parts import Result, machine, some, stored, table, values

SHOWN = 2**15
"""Number of tokens of the measurement that the README mentions."""


def steps(result: Result) -> str:
    """Make the table of the times of a layer's decode step and of SDPA."""
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
        "The table shows the time of one layer's decode step on a CPU in milliseconds. The number "
        "in parentheses is this time divided by the time of dense attention, with its quartiles. "
        f"Times are medians of {result['rounds']} rounds; in each round, every variant is measured "
        f"once. The layer has {shape['q_heads']} query heads, {shape['kv_heads']} KV heads, "
        f"D = {shape['head_dim']}, and keys and values in float32. Indexes retrieve "
        f"k = {shape['k']} tokens per KV head."
    )
    appends = [
        f"{one['of_products']:.3f} ({one['of_products_low']:.3f} to {one['of_products_high']:.3f}) "
        f"with {one['threads']} thread{'s' * (one['threads'] > 1)}"
        for one in result["appends"]
    ]
    about += (
        f" The time to append {result['appends'][0]['tokens']:,} tokens to the index, divided by "
        "the time of the matrix products that a model's layer computes for the same tokens, is "
        f"{' and '.join(appends)}."
    )
    head = ("tokens", "threads", "dense (SDPA)", "dense, heads folded")
    head = (*head, *(f"`{name}`" for name in names[2:]))
    return f"{about}\n\n{table(head, rows)}\n\n{machine(result)}"


def _ratio(found: Result, over: str = "of_dense") -> str:
    low, middle, high = (f"{found[name]:.2f}" for name in (f"{over}_low", over, f"{over}_high"))
    return middle if low == high else f"{middle}; {low} to {high}"


def indexes(result: Result) -> str:
    """Make a table of decode step times: each index in plain torch and with compiled operations."""
    (point,), plain = some(result["points"], threads=1), ":backend=torch"
    pairs = [(name.removesuffix(plain), name) for name in point if name.endswith(plain)]
    rows = [
        (f"`{name}`", f"{point[torch]['ms']:.2f}", f"{point[name]['ms']:.2f}", ratio)
        for name, torch in pairs
        for ratio in [f"{point[name]['ms'] / point[torch]['ms']:.2f}"]
    ]
    head = ("index", "plain torch, ms", "compiled, ms", "ratio")
    about = (
        "The table shows the time of one layer's decode step on a CPU, with the index in plain "
        f"torch and with compiled operations. The layer contains {point['tokens']:,} tokens, and "
        f"{point['threads']} thread is used. Steps are measured as in the first table of this page."
    )
    return f"{about}\n\n{table(head, rows)}\n\n{machine(result)}"


def row_codecs(result: Result) -> str:
    """Make the table of decode step times for each index and row codec.

    Each time is also given as a ratio to the time with the codec `plain`.
    """
    (point,), mark = some(result["points"], threads=1), ":row_codec="
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
        "The table shows the time of one layer's decode step on a CPU in milliseconds, for each "
        "codec of the stored keys and values (option `row_codec`). The ratio is this time divided "
        "by the time with the codec `plain`, with its quartiles. Times are medians of "
        f"{result['rounds']} rounds; in each round, every variant is measured once. The layer "
        f"contains {point['tokens']:,} tokens, and {point['threads']} thread is used. It has "
        f"{shape['q_heads']} query heads, {shape['kv_heads']} KV heads and D = "
        f"{shape['head_dim']}, computes in float32, and retrieves k = {shape['k']} tokens per KV "
        "head."
    )
    return f"{about}\n\n{table(head, rows)}\n\n{machine(result)}"


def summary(result: Result) -> str:
    """Write a sentence that compares a decode step with dense attention, on all CPU threads."""
    most = max(values(result["points"], "threads"))
    (point,) = some(result["points"], threads=most, tokens=SHOWN)
    name = result["index"]
    return (
        f"On a CPU, one layer's decode step over {SHOWN:,} tokens with `{name}` takes "
        f"{point[name]['of_dense']:.2f} times the time of dense attention (k = "
        f"{result['shape']['k']}; [more](docs/cpu.md))."
    )


LENGTHS = ("4k", "8k", "32k")


def tokens(_: Result) -> str:
    """Make the table of the time per generated token of a model on a CPU, by prompt length.

    There is one results file for each prompt length.
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
        "The table shows the time per generated token on a CPU, with full attention and with an "
        "index, and the time to read the prompt. The model computes in "
        f"{runs[0]['dtype']} and decodes greedily. Times per token are medians over rounds; in "
        "each round, the model generates "
        f"{runs[0]['model_run']['turn']} tokens with full attention and "
        f"{runs[0]['model_run']['turn']} with the index. Their ratio is given with its quartiles. "
        "The prompt is read once, in chunks of 1,024 tokens."
    )
    threads = runs[0]["machine"]["threads"]
    source = f"{machine(runs[0])} Every measurement used {threads} threads."
    return f"{about}\n\n{table(head, rows)}\n\n{source}"


def _model(result: Result) -> str:
    return "the long model" if result["lora"] else "SmolLM2-135M"
