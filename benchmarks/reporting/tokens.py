"""Tables of a decoder: tokens beside full attention's, the floor and transformers', and prompts."""

from __future__ import annotations

import statistics
from itertools import product

from benchmarks.reporting.parts import Result, machine, stored_beside, table

PLANS = {
    "weights": "no attention",
    "dense": "full attention, torch's kernel over exactly those tokens",
    "growing": "full attention, the decoder's own",
    "cached": "`{index}`",
    "uncached": "`{index}`, the cache of rows emptied before each token",
}

THROUGH = {
    "decoder": "the decoder",
    "fused": "transformers, `attach(fused=True)`",
    "token_graph": "transformers, a token as one graph",
    "layer_graphs": "transformers, a graph for each layer's step",
}

AHEAD = {
    "none": "none",
    "output+0": "the output matrix, by its product as that begins: what the decoder does",
    "output+0-early": "the same, and attention lets that begin while rows are being selected",
    "output+16-early": "the same, and 16 MiB of gate's and up's",
    "query": "the output matrix, by the product of queries, keys and values as that ends",
    "branch+0": "the output matrix, by a launch beside the index's step",
    "launch+0": "the output matrix, by a launch before the index's step",
    "rows-8192": "8,192 bytes of each row of every matrix, by its product as that begins",
}

RANKS = {
    "one": "one GPU, {context}",
    "tokens": "{ranks} GPUs by tokens, {all}",
    "heads": "{ranks} GPUs by heads, {context}",
    "one_shot": "the same, sums in one kernel",
    "silent": "the same, without sums (nonsense)",
}


def ranks_plans(found: Result) -> dict[str, str]:
    """What was measured, in words: GPUs, how they share and tokens."""
    sizes = dict(ranks=found["ranks"], context=f"{found['context']:,} tokens")
    sizes["all"] = f"{found['ranks'] * found['context']:,} tokens"
    return {plan: words.format(**sizes) for plan, words in RANKS.items() if plan in found}


def ranks(result: Result) -> str:
    """Milliseconds a token of several GPUs beside one's, and what sums take."""
    rows, found = [], result["ranks"]
    for plan, words in ranks_plans(found).items():
        ms, low, high = (found[plan][f"device_ms{part}"] for part in ("", "_low", "_high"))
        ratio, rates = found["ratio"].get(plan), found["hit_rates"].get(plan)
        cells = words, f"{ms:.2f} ({low:.2f} to {high:.2f})"
        over = "" if ratio is None else f"{ratio:.2f}"
        rows.append((*cells, over, f"{statistics.median(rates):.2f}" if rates else ""))
    head = ("", "ms a token", "of one GPU's", "rows in the cache")
    about = (
        f"Shape of {result['model']}, random weights, {result['dtype']}, `{result['index']}`, rows "
        f"on the host, one sequence, every token one CUDA graph; k = {found['k']}, of each rank by "
        "tokens. Medians (quartiles)."
    )
    ways = {"heads": "by NCCL", "one_shot": "in one kernel"}
    sums = [f"{us:.1f} µs {ways[way]}" for way, us in found.get("sum_us", {}).items()]
    last = (
        f" A sum of one token's activations, of 64 in a graph: {', '.join(sums)}." if sums else ""
    )
    where = machine(result).removesuffix(".") + f", {result['machine']['gpus']} of one host."
    return f"{about}\n\n{table(head, rows)}\n\n{where}{last}"


def decoder_tokens(result: Result) -> str:
    """Milliseconds a token of each shape: medians and quartiles."""
    results = stored_beside("decoder_tokens", result)
    rows = [row for one in results for row in _rows(one)]
    head = ("shape, tokens", "GPU", "attention", "ms a token", "of the floor", "of full attention")
    head = (*head, "rows in the cache", "worst token over the median")
    found = result["decoder"]
    about = (
        f"Random weights, {result['dtype']}, one sequence unless said, every token one CUDA graph; "
        f"k = {found['k']}, sink {found['sink']}, window {found['window']}, updates every "
        f"{found['update_every']} tokens among them. Medians (quartiles). The floor: the bytes of "
        "weights at the rate at which a sum reads memory in the same run."
    )
    return f"{about}\n\n{table(head, rows)}"


def ahead(result: Result) -> str:
    """Milliseconds a token with weights brought into L2 before the product that reads them."""
    rows, found = [], result["ahead"]
    for plan, words in AHEAD.items():
        ms, low, high = (found[plan][f"device_ms{part}"] for part in ("", "_low", "_high"))
        rounds = zip(*(found[one]["device_ms_rounds"] for one in (plan, "none")), strict=True)
        ratio = [mine / theirs for mine, theirs in rounds]
        over = f"{statistics.median(ratio):.3f} ({min(ratio):.3f} to {max(ratio):.3f})"
        rows.append((words, f"{ms:.3f} ({low:.3f} to {high:.3f})", over if plan != "none" else ""))
    about = (
        f"Shape of {result['model']}, random weights, {result['dtype']}, `{result['index']}` over "
        f"{found['context']:,} tokens, one sequence, every token one CUDA graph. Milliseconds: "
        f"medians (quartiles); {found['rounds']} rounds over none's: median (least to most)."
    )
    head = ("weights brought into L2", "ms a token", "of none's")
    return f"{about}\n\n{table(head, rows)}\n\n{machine(result)}"


def serving(result: Result) -> str:
    """Milliseconds a token of a served model, beside vLLM's own attention."""
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
        f"{found['shape']}, random weights, bfloat16; k = {found['k']}; between two tokens of the "
        "batch that the host gets. Medians (quartiles); for each place of rows a run of its own. "
        "Shared: all of the tokens but those of a sequence's last pages."
    )
    head = ("sequences", "tokens of each", "GPU", "attention", "rows", "ms a token")
    head = (*head, "over FlashAttention's")
    return f"{words}\n\n{table(head, rows)}\n\n{machine(result)}"


def arrivals(result: Result) -> str:
    """What requests waited for that came one by one."""
    found = result["serving"]
    about, rows = found["settings"], []
    for plan, words in {"stock": "FlashAttention", "kvindex": f"`{about['index']}`"}.items():
        waits = found["arrivals"][plan]
        first = f"{waits['first_ms']:,.0f} ({waits['first_ms_99']:,.0f})"
        rows.append((words, first, f"{waits['between_ms']:.2f} ({waits['between_ms_99']:.0f})"))
    shared = "a shared prompt" if about["shared"] else "prompts of their own"
    words = (
        f"{about['requests']} requests of {about['context']:,} tokens, {shared}, "
        f"{about['arrivals']} a second at random moments, {about['written']} tokens written for "
        "each. Medians (99th percentiles)."
    )
    head = ("attention", "ms to the first token", "ms between tokens")
    return f"{words}\n\n{table(head, rows)}\n\n{machine(result)}"


def served(result: Result) -> str:
    """A sentence: one sequence, rows on the device."""
    ratio = result["serving"]["batches"][0]["plans"]["kvindex"]["ratio"]
    return (
        f"In vLLM, at the shorter of these lengths, a token takes {ratio:.2f} of FlashAttention's "
        "time ([more](docs/adapters/vllm.md#how-fast))."
    )


def summary(result: Result) -> str:
    """The same for a reader in a hurry: weights as they are, one sequence."""
    rows = []
    for one in plain(result):
        found = one["decoder"]
        full = f"{found['dense']['device_ms']:.1f}" if "dense" in found else "does not fit"
        other = one["index"].removeprefix(result["index"] + ":")  # rows by a codec
        note = "" if other == result["index"] else f" (`{other}`)"
        times = full, f"{found['cached']['device_ms']:.1f}{note}"
        rows.append((f"{found['context']:,}", one["model"], gpu(one), *times))
    head = ("tokens", "shape of", "GPU", "full attention, ms", f"`{result['index']}`, ms")
    return table(head, rows)


def plain(result: Result) -> list[Result]:
    """On one kind of GPU, of one sequence, 8 KV heads, weights as they are, shortest first."""
    found = [one for one in stored_beside("decoder_tokens", result) if gpu(one) == gpu(result)]
    found = [one for one in found if one["decoder"].get("batch", 1) == 1]
    found = [one for one in found if one["decoder"].get("shape", {}).get("kv_heads", 8) == 8]
    found = [one for one in found if one["decoder"]["kind"] == "plain"]
    return sorted(found, key=lambda one: int(one["decoder"]["context"]))


def through(result: Result) -> str:
    """Milliseconds a token of a transformers model, beside the decoder's with the same weights."""
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
    head = ("shape, tokens", "written by", "ms a token", "over the decoder's")
    about = (
        f"Random weights, {result['dtype']}, `{result['index']}`, one sequence, tokens drawn at "
        "random; between two tokens that the host reads. Medians (quartiles)."
    )
    return f"{about}\n\n{table(head, rows)}\n\n{machine(result)}"


def prefill(result: Result) -> str:
    """Seconds and device memory of prompts, through the index and without one."""
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
    head = ("tokens", "attention", "first time, s", "then, s", "over full attention's")
    found = result["prefill"]
    about = (
        f"{result['model']}, random tokens, random weights, {result['dtype']}, "
        f"{found['chunk']:,} computed at a time, the last one's logits alone. Medians (quartiles). "
        "Needed: weights, one layer's keys and values, a chunk's activations."
    )
    head = (*head, "device at most, GB", "of what is needed")
    return f"{about}\n\n{table(head, rows)}\n\n{machine(result)}"


def gpu(result: Result) -> str:
    """Its short name, `none` of a CPU."""
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
