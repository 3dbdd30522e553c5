"""Tables of the time per token and per prompt of whole models: decoder, transformers and vLLM."""

from __future__ import annotations

import statistics
from itertools import product

from benchmarks.reporting.parts import Result, machine, stored_beside, table

PLANS = {
    "weights": "no attention",
    "dense": "full attention, torch's kernel, buffers of exactly this length",
    "growing": "full attention, the decoder's own, in buffers that grow",
    "cached": "`{index}`",
    "uncached": "`{index}`, cache of rows emptied before each token",
}
"""Kind of attention in the decoder -> its description in the table."""

THROUGH = {
    "decoder": "the decoder",
    "fused": "transformers, `attach(fused=True)`",
    "token_graph": "transformers, one graph per token",
    "layer_graphs": "transformers, one graph per layer",
}
"""Way of generating tokens -> its description in the table of transformers."""

AHEAD = {
    "none": "none",
    "output+0": "output projection, when its own product begins (what the decoder does)",
    "output+0-early": "the same, and this product may begin while rows are being selected",
    "output+16-early": "the same, and 16 MiB of gate and up",
    "query": "output projection, when the product of queries, keys and values ends",
    "branch+0": "output projection, by a launch concurrent with the index's step",
    "launch+0": "output projection, by a launch before the index's step",
    "rows-8192": "8,192 bytes of each row of every matrix, when its own product begins",
}
"""Way of prefetching weights into the L2 cache before their matrix product -> description in the
table: which weights, and when."""

RANKS = {
    "one": "one GPU, {context}",
    "tokens": "{ranks} GPUs share the tokens, {all}",
    "heads": "{ranks} GPUs share the heads, {context}",
    "one_shot": "the same, sums in one kernel",
    "silent": "the same, without sums (wrong results)",
}
"""Way of dividing a model among GPUs -> its description in the table and the picture."""


def ranks_plans(found: Result) -> dict[str, str]:
    """Return the description of each measured way of dividing a model among GPUs."""
    sizes = dict(ranks=found["ranks"], context=f"{found['context']:,} tokens")
    sizes["all"] = f"{found['ranks'] * found['context']:,} tokens"
    return {plan: words.format(**sizes) for plan, words in RANKS.items() if plan in found}


def ranks(result: Result) -> str:
    """Make the table of the time per token on one GPU and on several GPUs.

    A sentence states the time to add up the activations of a token over the GPUs.
    """
    rows, found = [], result["ranks"]
    for plan, words in ranks_plans(found).items():
        ms, low, high = (found[plan][f"device_ms{part}"] for part in ("", "_low", "_high"))
        ratio, rates = found["ratio"].get(plan), found["hit_rates"].get(plan)
        cells = words, f"{ms:.2f} ({low:.2f} to {high:.2f})"
        over = "" if ratio is None else f"{ratio:.2f}"
        rows.append((*cells, over, f"{statistics.median(rates):.2f}" if rates else ""))
    head = ("", "ms per token", "ratio to one GPU", "cache hit rate")
    about = (
        f"The model has random weights in the shape of {result['model']}, in {result['dtype']}. It "
        f"uses `{result['index']}` with rows on the host, for one sequence, and each decode step "
        f"is one CUDA graph. A step retrieves k = {found['k']} rows per KV head, or as many on "
        "each GPU if the GPUs share the tokens. Times are medians, with quartiles in parentheses."
    )
    ways = {"heads": "by NCCL", "one_shot": "in one kernel"}
    sums = [f"{us:.1f} µs {ways[way]}" for way, us in found.get("sum_us", {}).items()]
    last = (
        f" One sum of a token's activations over the GPUs, in a graph of 64 sums, takes "
        f"{', '.join(sums)}."
        if sums
        else ""
    )
    where = (
        machine(result).removesuffix(".") + f", with {result['machine']['gpus']} GPUs in one host."
    )
    return f"{about}\n\n{table(head, rows)}\n\n{where}{last}"


def decoder_tokens(result: Result) -> str:
    """Make the table of the decoder's time per token, for each measured model."""
    results = stored_beside("decoder_tokens", result)
    rows = [row for one in results for row in _rows(one)]
    head = ("shape, tokens", "GPU", "attention", "ms per token", "ratio to the floor")
    head = (*head, "ratio to full attention", "cache hit rate", "slowest token over the median")
    found = result["decoder"]
    about = (
        f"The models have random weights in the shape of a real model, in {result['dtype']}, and "
        "generate one sequence unless the line says otherwise. Each decode step is one CUDA graph, "
        f"with k = {found['k']} rows, a sink of {found['sink']} and a window of {found['window']} "
        f"tokens. The index's updates, every {found['update_every']} tokens, are included. Times "
        "are medians, with quartiles in parentheses. The floor is the time to read the bytes of "
        "the weights once, at the rate at which a sum over a large tensor read memory in the same "
        "run. Ratios to full attention compare with torch's kernel."
    )
    return f"{about}\n\n{table(head, rows)}"


def ahead(result: Result) -> str:
    """Make the table of the time per token if weights are prefetched into the L2 cache."""
    rows, found = [], result["ahead"]
    for plan, words in AHEAD.items():
        ms, low, high = (found[plan][f"device_ms{part}"] for part in ("", "_low", "_high"))
        rounds = zip(*(found[one]["device_ms_rounds"] for one in (plan, "none")), strict=True)
        ratio = [mine / theirs for mine, theirs in rounds]
        over = f"{statistics.median(ratio):.3f} ({min(ratio):.3f} to {max(ratio):.3f})"
        rows.append((words, f"{ms:.3f} ({low:.3f} to {high:.3f})", over if plan != "none" else ""))
    about = (
        f"The model has random weights in the shape of {result['model']}, in {result['dtype']}. It "
        f"uses `{result['index']}` over {found['context']:,} tokens, for one sequence, and each "
        "decode step is one CUDA graph. Times are medians, with quartiles in parentheses. Ratios "
        f"are medians of {found['rounds']} rounds, with the smallest and largest in parentheses."
    )
    head = ("weights requested into L2", "ms per token", "ratio to none")
    return f"{about}\n\n{table(head, rows)}\n\n{machine(result)}"


def serving(result: Result) -> str:
    """Make the table of the time per token in vLLM, with an index and with FlashAttention."""
    rows, found = [], result["serving"]["settings"]
    for one in stored_beside("serving", result):
        about = one["serving"]["settings"]
        names = {"stock": "FlashAttention", "kvindex": f"`{about['index']}`"}
        for batch, (plan, words) in product(one["serving"]["batches"], names.items()):
            plans = batch["plans"][plan]
            ms, low, high = (plans[f"token_ms{part}"] for part in ("", "_low", "_high"))
            where = about.get("rows", "device") if plan == "kvindex" else "device"
            times = f"{ms:.2f} ({low:.2f} to {high:.2f})"
            ratio = f"{plans['ratio']:.3f}" if "ratio" in plans else ""
            lengths = f"{about['context']:,}" + (", shared" if about["shared"] else "")
            rows.append((str(batch["batch"]), lengths, gpu(one), words, where, times, ratio))
    words = (
        f"The model has random weights in the shape of {found['shape']}, in bfloat16; a step "
        f"retrieves k = {found['k']} rows per KV head. A time is that between two tokens of the "
        "batch, as the host receives them: the median, with quartiles in parentheses. Rows on the "
        "host and on the device were measured in separate runs. *Shared* means that the sequences "
        "have all tokens in common except those of their last pages."
    )
    head = ("sequences", "tokens of each", "GPU", "attention", "rows", "ms per token")
    head = (*head, "ratio to FlashAttention")
    return f"{words}\n\n{table(head, rows)}\n\n{machine(result)}"


def arrivals(result: Result) -> str:
    """Make the table of latencies in vLLM if requests arrive at random times."""
    found = result["serving"]
    about, rows = found["settings"], []
    for plan, words in {"stock": "FlashAttention", "kvindex": f"`{about['index']}`"}.items():
        waits = found["arrivals"][plan]
        first = f"{waits['first_ms']:,.0f} ({waits['first_ms_99']:,.0f})"
        rows.append((words, first, f"{waits['between_ms']:.2f} ({waits['between_ms_99']:.0f})"))
    shared = "a shared prompt" if about["shared"] else "different prompts"
    words = (
        f"{about['requests']} requests of {about['context']:,} tokens with {shared} arrive at "
        f"random times, {about['arrivals']} per second on average; {about['written']} tokens are "
        "generated for each. Times are medians, with 99th percentiles in parentheses."
    )
    head = ("attention", "ms to the first token", "ms between tokens")
    return f"{words}\n\n{table(head, rows)}\n\n{machine(result)}"


def served(result: Result) -> str:
    """Write a sentence that compares decode steps in vLLM with an index and with FlashAttention.

    It is about one sequence with keys and values on the device.
    """
    ratio = result["serving"]["batches"][0]["plans"]["kvindex"]["ratio"]
    return (
        f"In vLLM, a decode step over the shorter of these contexts takes {ratio:.2f} times the "
        "time of FlashAttention ([more](docs/adapters/vllm.md#how-fast))."
    )


def summary(result: Result) -> str:
    """Make the README's table of the decoder's time per token.

    It shows single sequences and weights that are not quantized.
    """
    rows = []
    for one in plain(result):
        found = one["decoder"]
        full = f"{found['dense']['device_ms']:.1f}" if "dense" in found else "does not fit"
        other = one["index"].removeprefix(result["index"] + ":")  # for example a row codec
        note = "" if other == result["index"] else f" (`{other}`)"
        times = full, f"{found['cached']['device_ms']:.1f}{note}"
        rows.append((f"{found['context']:,}", one["model"], gpu(one), *times))
    head = ("tokens", "model shape", "GPU", "full attention, ms", f"`{result['index']}`, ms")
    return table(head, rows)


def plain(result: Result) -> list[Result]:
    """Return the decoder's results on the same kind of GPU as `result`, the shortest context first.

    Only results for one sequence, 8 KV heads, and weights that are not quantized are returned.
    """
    found = [one for one in stored_beside("decoder_tokens", result) if gpu(one) == gpu(result)]
    found = [one for one in found if one["decoder"].get("batch", 1) == 1]
    found = [one for one in found if one["decoder"].get("shape", {}).get("kv_heads", 8) == 8]
    found = [one for one in found if one["decoder"]["kind"] == "plain"]
    return sorted(found, key=lambda one: int(one["decoder"]["context"]))


def through(result: Result) -> str:
    """Make the table of the time per token in transformers and in the decoder, by model."""
    rows = []
    for one in stored_beside("transformers_tokens", result):
        found = one["transformers"]
        for plan, words in THROUGH.items():
            if plan not in found:
                continue
            ms, low, high = (found[plan][f"token_ms{part}"] for part in ("", "_low", "_high"))
            ratio = found["ratio"].get(plan, {}).get("token_ms")
            shape = f"{one['model']}, {found['context']:,}"
            over = "" if ratio is None else f"{ratio:.2f}"
            rows.append((shape, words, f"{ms:.2f} ({low:.2f} to {high:.2f})", over))
    head = ("shape, tokens", "generated by", "ms per token", "ratio to the decoder")
    about = (
        f"The models have random weights in the shape of a real model, in {result['dtype']}. They "
        f"use `{result['index']}`, and sample one sequence of tokens. A time is that between two "
        "tokens that the host reads: the median, with quartiles in parentheses."
    )
    return f"{about}\n\n{table(head, rows)}\n\n{machine(result)}"


def prefill(result: Result) -> str:
    """Make the table of time and device memory for reading a prompt, with an index and without."""
    rows, plans = [], {"indexed": f"`{result['index']}`", "full": "full attention"}
    results = sorted(stored_beside("prefill_decoder", result), key=lambda one: _tokens(one))
    for found, (plan, words) in product((one["prefill"] for one in results), plans.items()):
        warm, low, high = (found[plan][f"seconds{part}"] for part in ("", "_low", "_high"))
        ratio = found["ratio"].get(plan, {}).get("seconds")
        rows.append(
            (
                f"{found['tokens']:,}",
                words,
                f"{found['first'][plan]['seconds'][0]:.2f}",
                f"{warm:.2f} ({low:.2f} to {high:.2f})",
                "" if ratio is None else f"{ratio:.3f}",
                f"{found[plan]['peak_bytes'] / 1e9:.2f}",
                f"{found['memory'][plan]:.3f}",
            )
        )
    head = ("tokens", "attention", "first run, s", "later runs, s", "ratio to full attention")
    found = result["prefill"]
    about = (
        f"The prompt consists of random tokens, and the model has random weights in the shape of "
        f"{result['model']}, in {result['dtype']}. The prompt is read in chunks of "
        f"{found['chunk']:,} tokens, and logits are computed only for the last token. Times are "
        "medians, with quartiles in parentheses. The memory needed is that of the weights, of one "
        "layer's keys and values, and of a chunk's activations."
    )
    head = (*head, "peak on the device, GB", "ratio to the memory needed")
    return f"{about}\n\n{table(head, rows)}\n\n{machine(result)}"


def gpu(result: Result) -> str:
    """Return the short name of the GPU, such as "H100", or "none" if a CPU was measured."""
    return str(result["machine"].get("gpu", "none")).removeprefix("NVIDIA ").split()[0]


def _tokens(result: Result) -> int:
    return int(result["prefill"]["tokens"])


def _rows(result: Result) -> list[tuple[str, ...]]:
    found, rows = result["decoder"], []
    batch = f", {found['batch']} sequences" if found.get("batch", 1) > 1 else ""
    kind = ", weights in FP8" if found.get("kind") == "fp8" else ""
    for plan, words in PLANS.items():
        if plan not in found:
            continue
        ms, low, high = (found[plan][f"device_ms{part}"] for part in ("", "_low", "_high"))
        ratio = found["ratio"].get(plan, {}).get("device_ms") if found["over"] == "dense" else None
        hits, worst = found["hit_rates"].get(plan), found["worst_over_median"].get(plan)
        rows.append(
            (
                f"{result['model']}{kind}, {found['context']:,}{batch}",
                gpu(result),
                words.format(index=result["index"]),
                f"{ms:.2f} ({low:.2f} to {high:.2f})",
                f"{ms / found['floor_ms']:.2f}",
                "" if ratio is None else f"{ratio:.3f}",
                f"{sum(hits) / len(hits):.0%}" if hits else "",
                "" if worst is None else f"{worst:.2f}",
            )
        )
    return rows
