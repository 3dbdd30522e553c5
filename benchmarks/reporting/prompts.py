"""Tables about prompts: the time to read them, and what sparse attention changes."""

from __future__ import annotations

import statistics
from collections.abc import Sequence

from benchmarks.common.paired import way
from benchmarks.reporting.answers import points
from benchmarks.reporting.parts import Result, machine, some, stored_like, table, values
from benchmarks.reporting.tokens import gpu
from kvindex.selectors import SampledSelector
from kvindex.selectors.named import SELECTORS

SPARSE = "="
"""Part of the name of each plan with sparse attention: the selector, and the fraction of blocks."""

OFFERED = ("pooled", "sampled:queries=32", "oracle")
"""Selectors in the table for users: the choices of `prefill_selector`, and the best possible one.
Each text is the name, and the options that must have these values."""


def prefill(result: Result) -> str:
    """Make the table of time and device memory for reading a prompt.

    A result without a measurement of the floor has an empty cell for the ratio to the floor.
    """
    results = by_length(result)
    rows = [row for one in results for row in _prefill_rows(one, results)]
    head = ("tokens", "attention", "first run, s", "later runs, s", "ratio to the floor")
    head = (*head, "ratio to full attention", "peak on the device, GB")
    found = result["prefill"]
    about = (
        "The table shows the time and the device memory with which kvindex's decoder reads a "
        "prompt. The prompt consists of random tokens, and the model has random weights in the "
        f"shape of {_models(results)}, in {result['dtype']}. The prompt is read in chunks of "
        f"{found['chunk']:,} tokens, and logits are computed only for the last token. The *first "
        "run* is the first prompt of its kind in a process. Times of later runs are medians, with "
        "quartiles in parentheses. *The memory needed* is the memory for the weights, for the keys "
        "and values of one layer, and for the activations of a chunk."
    )
    if any("floor" in one["prefill"] for one in results):
        about += (
            " The *floor* is the time of the matrix products and of attention alone, computed from "
            "the times of one chunk."
        )
    if any(sparse_plans(one) for one in results):
        about += f" {_RANDOM}"
    head = (*head, "ratio to the memory needed")
    return f"{about}\n\n{table(head, rows)}\n\n{_machines(results)}"


def through(result: Result) -> str:
    """State how long a transformers model takes to read a prompt, compared with the decoder."""
    found = result["prefill"]
    ratio = found["ratio"]["transformers"]
    times = ", ".join(
        f"{found[plan]['seconds']:.2f} s {words}"
        for plan, words in {
            "transformers": "through transformers",
            "indexed": "in the decoder",
            "full": "in the decoder with full attention",
            "stock": "in transformers without kvindex, in one call",
        }.items()
        if plan in found
    )
    return (
        f"**Through transformers**, with the model's own forward pass and `{result['index']}`, a "
        f"prompt of {found['tokens']:,} tokens takes {ratio['seconds']:.2f} times as long as in "
        f"the decoder (quartiles {ratio['seconds_low']:.2f} to {ratio['seconds_high']:.2f}): "
        f"{times}. The model has random weights in the shape of {result['model']}, in "
        f"{result['dtype']}. {machine(result)}"
    )


DENSE = ("full", "indexed")
"""Names of the plans in which all tokens of a prompt attend to all tokens before them."""

_RANDOM = (
    "With *sparse* attention, each block of 128 queries reads random blocks of keys, in place of "
    "the blocks that the selector has chosen for it, because a model with random weights has no "
    "attention that concentrates on few blocks. The percentage is the fraction of all blocks. The "
    "time to choose blocks is included."
)


def summary(result: Result) -> str:
    """Make the short table of the time to read a prompt, by length and by kind of attention."""
    results = by_length(result)
    sparse = [plan.partition(SPARSE)[0] for one in results for plan in sparse_plans(one)]
    selectors = sorted({*sparse})
    rows = []
    for one in results:
        found, times = one["prefill"], []
        for selector in selectors:
            plans = [plan for plan in sparse_plans(one) if plan.startswith(selector + SPARSE)]
            each = (
                f"{_short(found, plan)}, {float(plan.partition(SPARSE)[2]):.0%}" for plan in plans
            )
            times.append("; ".join(each))
        dense = [_short(found, plan) for plan in DENSE]
        rows.append((_label(one, results), *dense, *times))
    head = ["tokens", *(_words(result, plan) for plan in DENSE)]
    head += [f"`{result['index']}`, sparse (`{selector}`)" for selector in selectors]
    about = (
        "Seconds to read a prompt with kvindex's decoder, and in parentheses for the first prompt "
        f"of its kind in a process. The model has random weights in the shape of "
        f"{_models(results)}, in {result['dtype']}."
    )
    if selectors:
        about += f" {_RANDOM}"
    return f"{about}\n\n{table(head, rows)}\n\n{_machines(results)}"


def sentence(result: Result) -> str:
    """Make the README's sentence about the time to read a prompt."""
    found = result["prefill"]
    dense = [f"{found[plan]['seconds']:.1f} s with {_words(result, plan)}" for plan in DENSE]
    fastest = min(sparse_plans(result), key=lambda plan: float(found[plan]["seconds"]))
    fraction = float(fastest.partition(SPARSE)[2])
    return (
        f"Reading a prompt of {found['tokens']:,} tokens takes {', '.join(dense)}, and "
        f"{found[fastest]['seconds']:.1f} s with `{result['index']}` if attention reads "
        f"{fraction:.0%} of the blocks of the prompt ({gpu(result)}, shape of {result['model']}; "
        "[more](docs/prompts.md))."
    )


def block_sparse(result: Result) -> str:
    """Make the table of kernels that compute attention to chosen blocks of keys."""
    cells = result["cells"]
    release = result["versions"]["flashinfer-python"]
    release = f" {release}" if release[0].isdigit() else ""
    names = [name for name in KERNELS if any(name in cell["kernels"] for cell in cells)]
    rows = []
    for name in names:
        each = [_kernel(cell["kernels"].get(name)) for cell in cells]
        preparing = f"{cells[0]['kernels'][name]['prepare_ms']:.2f}" if name in OTHERS else ""
        rows.append((KERNELS[name].format(release), *each, preparing))
    head = [f"{cell['fraction']:.0%} of the blocks: ms, TFLOP/s" for cell in cells]
    about = (
        f"The table shows how long attention of {result['queries']:,} queries to "
        f"{result['tokens']:,} keys takes in {result['dtype']}, with {result['heads']} query "
        f"heads, {result['kv_heads']} KV heads and head dimension {result['head_dim']}. Each block "
        "of 128 queries of each query head reads its own random blocks of 128 keys, and its own "
        "block. Full attention reads all blocks. All outputs were first compared with the "
        "reference implementation in float32. Kernels took turns. Times are medians, with "
        "quartiles in parentheses. *Preparing* is the time to convert a tensor of booleans into "
        "what the kernel needs, which a model must do in each layer and chunk. In kvindex's times, "
        "this is included."
    )
    page = f"{about}\n\n{table(('kernel', *head, 'preparing, ms'), rows)}"
    compared = [_rate(cell) for cell in cells if {"full", "kvindex"} <= cell["kernels"].keys()]
    if compared:
        page += (
            f"\n\nCompared with full attention, kvindex's kernel takes {', and '.join(compared)}."
        )
    skipped = {name: why for cell in cells for name, why in cell["skipped"].items()}
    for name, why in skipped.items():
        page += f"\n\nNot measured: {KERNELS[name].format(release)} ({why})."
    return f"{page}\n\n{_machines([result])}"


KERNELS = {
    "full": "full attention with cuDNN",
    "kvindex": "kvindex, in Triton",
    "flex": "FlexAttention of torch, compiled",
    "flashinfer-fa2": "FlashInfer{}, `BlockSparseAttentionWrapper`, FA2",
    "flashinfer-fa3": "FlashInfer{}, `BlockSparseAttentionWrapper`, FA3",
    "flashinfer-variable-fa2": "FlashInfer{}, `VariableBlockSparseAttentionWrapper`, FA2",
    "flashinfer-variable-fa3": "FlashInfer{}, `VariableBlockSparseAttentionWrapper`, FA3",
}
"""Name of a kernel of `benchmarks/block_sparse.py` -> its name in the table."""

OTHERS = [*KERNELS][2:]
"""Kernels that are prepared for a choice of blocks before they are called."""


def _kernel(found: Result | None) -> str:
    """Format the time and the rate of a kernel; empty if not measured."""
    if found is None or "ms" not in found:
        return ""
    times = f"{found['ms']:.2f} ({found['ms_low']:.2f} to {found['ms_high']:.2f})"
    return f"{times}, {found['tflops']:.0f}"


def _rate(cell: Result) -> str:
    """Compare the time and the rate of kvindex's kernel with full attention."""
    mine, full = cell["kernels"]["kvindex"], cell["kernels"]["full"]
    return (
        f"{mine['ms'] / full['ms']:.2f} of the time with {cell['fraction']:.0%} of the blocks "
        f"({mine['tflops'] / full['tflops']:.2f} of the rate)"
    )


def selectors(result: Result) -> str:
    """Make the table for users of what sparse attention changes: the longest texts, and the
    selectors that `prefill_selector` offers."""
    cells = [cell for cell in _cells(result) if _offered(cell["selector"])]
    longest = max(int(cell["tokens"]) for cell in cells)
    return _selectors(result, [cell for cell in cells if cell["tokens"] == longest])


def all_selectors(result: Result) -> str:
    """Make the table of what sparse attention changes, for all selectors and lengths."""
    return _selectors(result, _cells(result))


def answers(result: Result) -> str:
    """Make the table of answers after a sparse prompt, compared with a dense prompt."""
    dense, sparse = result["ways"]
    lines = some(result["summary"], task=None)
    means = {(one["tokens"], one["way"]): f"{one['score']:.1%}" for one in lines}
    rows = [
        (
            "all" if found["tokens"] is None else f"{found['tokens']:,}",
            str(found["prompts"]),
            *(means[found["tokens"], name] for name in (dense, sparse)),
            points(found),
        )
        for found in some(lines, way=sparse)
    ]
    tasks = ", ".join(sorted({cell["task"] for cell in result["cells"]}))
    about = (
        f"{result['model']} with {result['lora']}, in {result['dtype']}, read each prompt twice, "
        "once with full attention and once with sparse attention with the default options, and "
        f"answered greedily. In both cases, decode steps used the index `{result['index']}` with "
        f"k = {way(dense).k}. The tasks are {tasks}. The table shows the mean score, and the "
        "difference in points with its 95% interval (a bootstrap over prompts)."
    )
    head = ("tokens", "prompts", "full attention", "sparse attention", "difference, points")
    return f"{about}\n\n{table(head, rows)}\n\n{machine(result)}"


def _selectors(result: Result, cells: list[Result]) -> str:
    texts, lengths = values(cells, "text"), sorted(values(cells, "tokens"))
    rows: list[tuple[str, ...]] = []
    for tokens in lengths:
        some = [cell for cell in cells if cell["tokens"] == tokens]
        names = sorted(values(some, "selector"), key=lambda name: _order(name, some))
        for name in names:
            found = {cell["text"]: cell for cell in some if cell["selector"] == name}
            kept = sorted(cell["kept"] for cell in found.values())
            read = " to ".join(dict.fromkeys(f"{one:.0%}" for one in (kept[0], kept[-1])))
            each = [_divergence(found.get(text)) for text in texts]
            rows.append((f"{tokens:,}", f"`{name}`", read, *each))
    head: Sequence[str] = ("tokens", "selector", "blocks read", *texts)
    if len(lengths) == 1:  # the text before the table has the length
        head, rows = head[1:], [row[1:] for row in rows]
    about = (
        "The table shows how sparse attention in a prompt changes the predictions of "
        f"SmolLM2-135M with the LoRA weights `{result['lora']}`, in {result['dtype']}. The number "
        "for each text is the KL divergence of the next-token distributions from those with full "
        "attention, in nats. In parentheses is the fraction of tokens for which the most likely "
        f"next token is the same. Both are means over the last {result['last']} tokens of a text"
    )
    about += "." if len(lengths) > 1 else f" of {lengths[0]:,} tokens."
    about += (
        f" Of these, the last {result['dense_last']} attend to all tokens. *Blocks read* is the "
        "fraction of the blocks that full attention reads."
    )
    if any("" in row for row in rows):
        about += " An empty cell was not measured."
    return f"{about}\n\n{table(head, rows)}\n\n{_machines([result])}"


def _cells(result: Result) -> list[Result]:
    """Return the measurements of all selectors that kvindex has, from all files of results."""
    found = {}
    for one in stored_like("sparse_selectors", result):
        for cell in one["cells"]:
            name = _full_name(cell["selector"])
            if name.partition(":")[0] in SELECTORS:
                found[name, cell["text"], cell["tokens"]] = cell | {"selector": name}
    return list(found.values())


def _full_name(selector: str) -> str:
    """Add the number of queries to the name of a `sampled` selector."""
    if selector.partition(":")[0] == "sampled" and "queries=" not in selector:
        return f"{selector}:queries={SampledSelector().queries}"
    return selector


def _offered(selector: str) -> bool:
    parts = selector.split(":")
    return any(set(one.split(":")) <= set(parts) for one in OFFERED)


def _order(selector: str, cells: Sequence[Result]) -> tuple[int, float]:
    """Sort selectors by kind, and then by the number of blocks that they read."""
    kept = statistics.mean(cell["kept"] for cell in cells if cell["selector"] == selector)
    return list(SELECTORS).index(selector.partition(":")[0]), kept


def _divergence(cell: Result | None) -> str:
    return "" if cell is None else f"{cell['kl_mean']:.3f} ({cell['agreement']:.0%})"


def by_length(result: Result) -> list[Result]:
    """Return all stored results about prompts, by the length of the prompt."""
    results = stored_like("prefill_decoder", result)
    return sorted(results, key=lambda one: int(one["prefill"]["tokens"]))


def sparse_plans(result: Result) -> list[str]:
    """Return the names of the measured plans with sparse attention."""
    return [plan for plan in result["prefill"]["first"] if SPARSE in plan]


def short_label(result: Result, plan: str) -> str:
    """Describe a kind of attention in a few words, for a picture."""
    selector, sparse, fraction = plan.partition(SPARSE)
    if sparse:
        return f"sparse ({selector}, {float(fraction):.0%})"
    return _words(result, plan)


def _words(result: Result, plan: str) -> str:
    """Describe a kind of attention."""
    selector, sparse, fraction = plan.partition(SPARSE)
    if sparse:
        return f"`{result['index']}`, sparse (`{selector}`), {float(fraction):.0%} of the blocks"
    return {"indexed": f"`{result['index']}`", "full": "full attention"}[plan]


def _prefill_rows(result: Result, results: Sequence[Result]) -> list[tuple[str, ...]]:
    found, rows = result["prefill"], []
    label = _label(result, results)
    for plan in ("indexed", "full", *sparse_plans(result)):
        if plan not in found["first"]:
            continue
        peak = found.get(plan, {}).get("peak_bytes")
        memory = found.get("memory", {}).get(plan)
        rows.append(
            (
                label,
                _words(result, plan),
                f"{found['first'][plan]['seconds'][0]:.2f}",
                _quartiles(found.get(plan)),
                _ratio(found, plan, "floor"),
                "" if plan == "full" else _ratio(found, plan, "full"),
                "" if peak is None else f"{peak / 1e9:.2f}",
                "" if memory is None else f"{memory:.3f}",
            )
        )
    if "floor" in found:
        rows.append((label, "floor", "", _quartiles(found["floor"]), "", "", "", ""))
    return rows


def _quartiles(figures: Result | None) -> str:
    """Format a median time with its quartiles; empty if there was no later run."""
    if figures is None:
        return ""
    warm, low, high = (figures[f"seconds{part}"] for part in ("", "_low", "_high"))
    return f"{warm:.2f} ({low:.2f} to {high:.2f})"


def _short(found: Result, plan: str) -> str:
    """Format the times of later runs and of the first run; empty if not measured."""
    if plan not in found["first"]:
        return ""
    first = f"({found['first'][plan]['seconds'][0]:.2f})"
    return f"{found[plan]['seconds']:.2f} {first}" if plan in found else first


def _ratio(found: Result, plan: str, over: str) -> str:
    """Return the median ratio of the times of two plans in the same rounds; empty if one of them
    was not measured."""
    if plan not in found or over not in found:
        return ""
    rounds = zip(*(found[one]["seconds_rounds"] for one in (plan, over)), strict=True)
    return f"{statistics.median(mine / theirs for mine, theirs in rounds):.3f}"


def _label(result: Result, results: Sequence[Result]) -> str:
    """Return the number of tokens, with the model and the GPU if these differ among results."""
    parts = [f"{result['prefill']['tokens']:,}"]
    for part in (lambda one: one["model"], gpu):
        if len({part(one) for one in results}) > 1:
            parts.append(part(result))
    return ", ".join(parts)


def _models(results: Sequence[Result]) -> str:
    return " or ".join(dict.fromkeys(one["model"] for one in results))


def _machines(results: Sequence[Result]) -> str:
    """Name all machines of the results, one sentence each."""
    return " ".join(dict.fromkeys(map(machine, results)))
