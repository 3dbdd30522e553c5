"""Tables of the time per token, in kvindex's decoder, transformers and vLLM."""

from __future__ import annotations

import statistics
from itertools import product

from benchmarks.reporting.parts import (
    Result,
    machine,
    machines,
    some,
    stored,
    stored_like,
    table,
    values,
)

PLANS = {
    "weights": "no attention",
    "dense": "full attention, torch's kernel, buffers of exactly this length",
    "growing": "full attention, the decoder's own, in buffers that grow",
    "cached": "`{index}`, k = {k}",
    "uncached": "`{index}`, k = {k}, cache of rows emptied before each token",
}
"""Name of a kind of attention that the decoder was measured with -> description in the table."""

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

    The text below the table states how long it takes to add up a token's activations over all GPUs.
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
        "The table shows the time per token on one GPU, and on GPUs that share the heads or the "
        f"tokens. The model has random weights in the shape of {result['model']}, in "
        f"{result['dtype']}. It uses `{result['index']}` with keys and values in host memory, for "
        "one sequence. Each decode step is one CUDA graph, and retrieves "
        f"k = {found['k']} tokens per KV head. If the GPUs share the tokens, each GPU retrieves "
        "this number of tokens. Times are medians, with quartiles in parentheses."
    )
    ways = {"heads": "by NCCL", "one_shot": "in one kernel"}
    sums = [f"{us:.1f} µs {ways[way]}" for way, us in found.get("sum_us", {}).items()]
    last = (
        " In each layer, the GPUs add up their activations. For one token, this takes "
        f"{' and '.join(sums)}. It was measured in a CUDA graph with 64 such additions."
        if sums
        else ""
    )
    where = f"{machine(result)} The host has {result['machine']['gpus']} GPUs."
    return f"{about}\n\n{table(head, rows)}\n\n{where}{last}"


def decoder_tokens(result: Result) -> str:
    """Make the table of the time per token of kvindex's decoder, for each measured model."""
    results = stored_like("decoder_tokens", result)
    rows = [row for one in results for row in _rows(one)]
    head = ("shape, tokens", "GPU", "attention", "ms per token", "ratio to the floor")
    head = (*head, "ratio to full attention", "cache hit rate", "slowest token over the median")
    found = result["decoder"]
    about = (
        "The table shows the time per generated token of kvindex's decoder, with several kinds of "
        "attention. The models have random weights in the shape of a real model, in "
        f"{result['dtype']}, and generate one sequence unless the line says otherwise. Each decode "
        f"step is one CUDA graph. An index retrieves k tokens per KV head, in addition to "
        f"a sink of {found['sink']} and a window of {found['window']} tokens. Times "
        "are medians, with quartiles in parentheses. They include the steps, every "
        f"{found['update_every']} tokens, in which a layer moves tokens from the window into the "
        "index.\n\n"
        "The *floor* is the time to read all weights from memory once. It is computed from the "
        "rate at which a sum over a large tensor reads memory. For the *ratio to full "
        "attention*, full attention is computed with torch's kernel."
    )
    return f"{about}\n\n{table(head, rows)}"


def draft_steps(result: Result) -> str:
    """Make the table of the time of decode steps of several tokens."""
    rows, found = [], result["decoder"]
    drafts = sorted(int(plan.removeprefix("cached+")) for plan in found if "cached+" in plan)
    for count in (0, *drafts):
        plan, alone = (f"{name}+{count}" if count else name for name in ("cached", "weights"))
        ms, low, high = (found[plan][f"token_ms{part}"] for part in ("", "_low", "_high"))
        ratio = f"{found['ratio'][plan]['token_ms']:.2f}" if count else "1"
        without = f"{found[alone]['token_ms']:.2f}"
        rows.append((str(count + 1), f"{ms:.2f} ({low:.2f} to {high:.2f})", ratio, without))
    batch = found["batch"]
    sequences = "one sequence" if batch == 1 else f"{batch} sequences, each with these tokens"
    about = (
        "The table shows the time of a decode step by its number of tokens. The model has random "
        f"weights in the shape of {result['model']}, in {result['dtype']}. The index is "
        f"`{result['index']}`, with {found['context']:,} tokens in host memory and "
        f"k = {found['k']}, for {sequences}. The host reads the results of a step before it "
        "launches the next one, and half of the drafted tokens are accepted. A step of one token "
        "does not wait for the host. Times are medians, with quartiles in parentheses."
    )
    head = ("tokens of a step", "ms per step", "ratio to one token", "ms without attention")
    return f"{about}\n\n{table(head, rows)}\n\n{machine(result)}"


PARTS = ("half accepted", "accepted as measured", "all accepted")
"""Which of the drafts are accepted in each column of `verified`."""


def _accepted() -> dict[int, float]:
    """Return the number of accepted drafts of a round by the number of drafts, each at the largest
    length at which it was measured."""
    results = stored_like("speculation_long", stored("speculation_long") or {"cells": []})
    cells = [cell for result in results for cell in result["cells"]]
    cells = [cell for cell in cells if cell["way"].startswith("verified")]
    found = {}
    for way in values(cells, "way"):
        length = max(cell["tokens"] for cell in some(cells, way=way))
        each = some(cells, tokens=length, way=way)
        sums = [sum(cell[name] for cell in each) for name in ("accepted", "rounds")]
        found[int(way.split()[1])] = sums[0] / sums[1]
    return found


def verified(result: Result) -> str:
    """Make the table of the time of rounds in which full attention verifies drafts."""
    rows, found = [], result["decoder"]
    real = _accepted()
    place = "device" if "store=device" in result["index"] else "host"
    contiguous = place == "device" and "dense" in found
    alone = found["dense" if contiguous else "verified+0"]["token_ms"]
    for count, kept in sorted((int(count), kept) for count, kept in found["kept"].items()):
        ms, low, high = (
            kept * found[f"verified+{count}"][f"token_ms{part}"] for part in ("", "_low", "_high")
        )
        tokens = (1 + count // 2, *([1 + real[count]] if count in real else []), 1 + count)
        ratios = [f"{ms / one / alone:.2f}" for one in tokens]
        if len(ratios) == 2:
            ratios.insert(1, "" if count else ratios[0])
        rows.append((str(count), f"{ms:.1f} ({low:.1f} to {high:.1f})", *ratios))
    base = "Ratios are those of the time per token to full attention's."
    if contiguous:
        base = (
            f"Ratios are those of the time per token to a decode step with full attention, "
            f"{alone:.2f} ms, which reads one contiguous tensor and not the rows of the index."
        )
    about = (
        "The table shows the time of rounds in which the index writes drafts and full attention "
        f"verifies them. The model has random weights in the shape of {result['model']}, in "
        f"{result['dtype']}. The index is `{result['index']}`, with {found['context']:,} tokens in "
        f"{place} memory and k = {found['k']}, and the batch size is {found['batch']}. Without "
        "drafts, a round is one token with full attention, which reads the rows of the index. "
        f"{base} Random weights have no "
        "acceptance, so the ratios are computed: half of the drafts are accepted, or as many as "
        "SmolLM2 accepts (for each number of drafts, with the longest text in the table of "
        "acceptance), or all of them. Times are medians, with quartiles in parentheses."
    )
    head = ("drafts", "ms per round", *(f"ratio, {part}" for part in PARTS))
    return f"{about}\n\n{table(head, rows)}\n\n{machine(result)}"


COUNTS = {1: "one question", 2: "two questions", 3: "three questions"}
"""Numbers of questions in words."""


def acceptance(result: Result) -> str:
    """Make the table of how many drafts of the index full attention accepts."""
    rows, answers, results = [], 0, stored_like("speculation_long", result)
    cells = [
        {**cell, "dtype": one["dtype"]}
        for one in results
        for cell in one["cells"]
        if cell["way"].startswith("verified")
    ]
    dtypes, longest = values(cells, "dtype"), max(cell["new"] for cell in cells)
    lines = {(cell["dtype"], cell["tokens"], int(cell["way"].split()[1])) for cell in cells}
    for dtype, tokens, way in sorted(lines, key=lambda line: (dtypes.index(line[0]), *line[1:])):
        each = some(cells, dtype=dtype, tokens=tokens, way=f"verified {way}")
        sums = {
            name: sum(one[name] for one in each)
            for name in ("drafted", "accepted", "rounds", "same", "compared")
        }
        answers = max(answers, len(each))
        per_round = f"{sums['accepted'] / sums['rounds']:.1f}"
        drafts = f"{sums['accepted']:,} of {sums['drafted']:,}"
        equal = f"{sums['same']:,} of {sums['compared']:,}"
        kind = (dtype,) if len(dtypes) > 1 else ()
        rows.append((*kind, f"{tokens:,}", str(way), drafts, per_round, equal))
    asked = {(cell["topic"], cell["question"]) for cell in cells}
    most = max(sum(topic == one for one, _ in asked) for topic, _ in asked)
    about = (
        f"The model is {result['model']} with {result['lora']}, in {' and '.join(dtypes)}. It read "
        "the beginning of several topics of the Python language reference, and answered up to "
        f"{COUNTS.get(most, most)} about each (up to {answers} answers of up to {longest} tokens "
        "per line), greedily, with "
        f"the index `{result['index']}` and k = {result['k']}. The last column compares with full "
        "attention, one token at a time."
    )
    head = (
        *(("dtype",) if len(dtypes) > 1 else ()),
        *("tokens read", "drafts of a round", "accepted of all drafts"),
        *("accepted per round", "equal tokens at the beginning"),
    )
    return f"{about}\n\n{table(head, rows)}\n\n{machines(results)}"


def lookups(result: Result) -> str:
    """Make the table of how many drafts of prompt lookup are accepted, and of the time that this
    gives on a GPU."""
    results = [one for one in stored_like("speculation_long", result) if _looked_up(one)]
    steps, rows = stored("draft_steps") or result, []
    for one in results:
        cells = _looked_up(one)
        for tokens in values(cells, "tokens"):
            for way in values(cells, "way"):
                each = some(cells, tokens=tokens, way=way)
                names = ("new", "drafted", "accepted", "rounds", "steps")
                sums = {name: sum(cell[name] for cell in each) for name in names}
                drafts, written = int(way.split()[1]), sums["new"] - len(each)
                ratio = steps["decoder"]["ratio"][f"cached+{drafts}"]["token_ms"]
                alone = sums["steps"] - sums["rounds"]
                rows.append(
                    (
                        *(one["dtype"], f"{tokens:,}", str(len(each)), str(drafts)),
                        f"{sums['accepted']:,} of {sums['drafted']:,}",
                        f"{sums['rounds']:,} of {sums['steps']:,}",
                        f"{written / sums['steps']:.2f}",
                        f"{(sums['rounds'] * ratio + alone) / written:.2f}",
                    )
                )
    longest = max(cell["new"] for one in results for cell in _looked_up(one))
    about = (
        f"The model is {result['model']} with {result['lora']}. It answered questions about topics "
        f"of the Python language reference, greedily, with up to {longest} tokens, the index "
        f"`{result['index']}` and k = {result['k']}. Drafts are by prompt lookup. The last column "
        "is the time per token relative to steps of one token. It is computed: the times of steps "
        "are those of the table above."
    )
    head = ("dtype", "tokens read", "answers", "drafts of a step", "accepted drafts")
    head = (*head, "steps with drafts", "tokens per step", "time per token")
    return f"{about}\n\n{table(head, rows)}\n\n{machines(results)}"


def _looked_up(result: Result) -> list[Result]:
    """Return the answers whose drafts are by prompt lookup, with a fixed number of drafts."""
    cells = (cell for cell in result["cells"] if cell["way"].startswith("lookup "))
    return [cell for cell in cells if cell["way"] != "lookup auto"]


def row_budget(result: Result) -> str:
    """Make the table of the time per token with a fixed number of rows, and with one that follows
    from the expected error."""
    rows = []
    for one in stored_like("row_budget_tokens", result):
        found = one["decoder"]
        times = [
            "{device_ms:.2f} ({device_ms_low:.2f} to {device_ms_high:.2f})".format(**found[plan])
            for plan in ("cached", "auto")
        ]
        automatic = "{mean:.0f} (99th percentile {p99})".format(**found["rows"][-1])
        ratio = f"{found['ratio']['auto']['device_ms']:.2f}"
        rows.append((found["k"], times[0], automatic, times[1], ratio))
    about = (
        f"The model has random weights in the shape of {result['model']}, in {result['dtype']}, "
        f"and a context of {result['decoder']['context']:,} tokens. Each line is one run. The "
        "allowed error is chosen so that searches find about the given mean number of rows. Each "
        "decode step is one CUDA graph. Times are medians, with quartiles in parentheses."
    )
    head = ("`k`", "ms per token", 'rows with `k="auto"`', "ms per token", "ratio")
    lines = [(str(first), *rest) for first, *rest in sorted(rows)]
    of = machines(stored_like("row_budget_tokens", result))
    return f"{about}\n\n{table(head, lines)}\n\n{of}"


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
        "The table shows the time per token for several ways to prefetch weights into the L2 "
        f"cache. The model has random weights in the shape of {result['model']}, in "
        f"{result['dtype']}. It uses `{result['index']}` over {found['context']:,} tokens, for one "
        "sequence, and each decode step is one CUDA graph. Times are medians, with quartiles in "
        f"parentheses. Ratios are medians of {found['rounds']} rounds, with the smallest and the "
        "largest ratio in parentheses."
    )
    head = ("weights requested into L2", "ms per token", "ratio to none")
    return f"{about}\n\n{table(head, rows)}\n\n{machine(result)}"


def serving(result: Result) -> str:
    """Make the table of the time per token in vLLM, with an index and with FlashAttention."""
    rows, found = [], result["serving"]["settings"]
    for one in stored_like("serving", result):
        about = one["serving"]["settings"]
        names = {
            "stock": "FlashAttention",
            "stock-fp8": "FlashAttention, keys and values in FP8",
            "kvindex": f"`{about['index']}`",
            "kvindex-fp8": f"`{about['index']}`, keys and values in FP8",
            "kvindex-sparse": f"`{about['index']}`, sparse prompts",
        }
        for batch, (plan, words) in product(one["serving"]["batches"], names.items()):
            if plan not in batch["plans"]:
                continue
            plans = batch["plans"][plan]
            ms, low, high = (plans[f"token_ms{part}"] for part in ("", "_low", "_high"))
            where = about.get("rows", "device") if "kvindex" in plan else "device"
            times = f"{ms:.2f} ({low:.2f} to {high:.2f})"
            ratio = f"{plans['ratio']:.3f}" if "ratio" in plans else ""
            lengths = f"{batch.get('context', about['context']):,}" + (
                ", shared" if about["shared"] else ""
            )
            compiled = "no" if about["plain"] else "yes"
            gpus = gpu(one) if about.get("gpus", 1) == 1 else f"{about['gpus']} × {gpu(one)}"
            k = str(about["k"]) if "kvindex" in plan else ""
            line = (str(batch["batch"]), lengths, gpus, compiled, words, k, where, times, ratio)
            rows.append(line)
    words = (
        "The table shows the time per token in vLLM, with FlashAttention and with an index. It is "
        "the time between two tokens of the batch, as the host receives them: the median, with "
        "quartiles in parentheses. The model has random weights in the shape of "
        f"{found['shape']}, in bfloat16. An index retrieves `k` tokens per KV head.\n\n"
        "*Compiled* says whether both engines used `torch.compile`. "
        "The column *rows* says where keys and values are stored: in device memory or in host "
        "memory. Each of these two places was measured in a separate run of the benchmark. "
        "*Shared* means that the prompts of all sequences are equal except for the tokens at "
        "their end, so the sequences share the pages of the common tokens."
    )
    head = ("sequences", "tokens of each", "GPU", "compiled", "attention", "`k`", "rows")
    head = (*head, "ms per token", "ratio to FlashAttention")
    return f"{words}\n\n{table(head, rows)}\n\n{machines(stored_like('serving', result))}"


def served_by_default(result: Result) -> str:
    """Make the short table of the time per token in vLLM with the default index on one GPU.

    It shows runs with the index and `k` of `result`, with `torch.compile`, different prompts, and
    keys and values on the device.
    """
    about, rows = result["serving"]["settings"], []
    same = dict(index=about["index"], k=about["k"], rows="device", shared=False, plain=False)
    for one in stored_like("serving", result):
        found = one["serving"]["settings"]
        if found.get("gpus", 1) != 1 or any(found[name] != same[name] for name in same):
            continue
        graphs = "1" if found.get("dense_graphs", False) is False else "2"
        for batch in one["serving"]["batches"]:
            plans, context = batch["plans"], batch.get("context", found["context"])
            if not {"stock", "kvindex"} <= plans.keys():
                continue
            ms = {name: plan["token_ms"] for name, plan in plans.items()}
            mine, eighth = ms["kvindex"], ms.get("stock-fp8")
            times = f"{ms['stock']:.2f}", f"{eighth:.2f}" if eighth else "", f"{mine:.2f}"
            ratios = f"{plans['kvindex']['ratio']:.2f}", f"{mine / eighth:.2f}" if eighth else ""
            cells = (f"{context:,}", str(batch["batch"]), graphs, *times, *ratios)
            rows.append(((context, batch["batch"], graphs), cells))
    words = (
        "The table shows the median time per token in vLLM, in ms: with FlashAttention, with "
        "FlashAttention over keys and values in FP8, and with the plug-in "
        f"(`{about['index']}`, k = {about['k']}, 16 bits per number). The model has random weights "
        f"in the shape of {about['shape']}, in bfloat16. All engines use `torch.compile` and CUDA "
        "graphs. *Graphs* is how many the plug-in has for each batch size. With 1, all of its "
        "steps search. With 2, which is the default, it replays the one with FlashAttention if "
        "this is estimated to be faster."
    )
    head = ("tokens of each", "sequences", "graphs", "FlashAttention", "FlashAttention, FP8")
    head = (*head, "plug-in", "ratio to FlashAttention", "ratio to FP8")
    lines = [cells for _, cells in sorted(rows)]
    return f"{words}\n\n{table(head, lines)}\n\n{machine(result)}"


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
        f"The table is for {about['requests']} requests with {shared} of {about['context']:,} "
        f"tokens. They arrive at random times, {about['arrivals']} per second on average, and "
        f"{about['written']} tokens are generated for each request. An index retrieves k = "
        f"{about['k']} tokens per KV head. Times are medians, with 99th percentiles in parentheses."
    )
    head = ("attention", "ms to the first token", "ms between tokens")
    return f"{words}\n\n{table(head, rows)}\n\n{machine(result)}"


def throughput(result: Result) -> str:
    """Make the table of vLLM's throughput if all requests arrive at the beginning."""
    found = result["serving"]
    about, rows = found["settings"], []
    index, blocks = f"`{about['index']}`", f"about {about['prefill_mass']:.0%} of the blocks"
    names = {
        "stock": ("FlashAttention", "full attention"),
        "kvindex": (index, "full attention"),
        "kvindex-sparse": (index, f"sparse (`{about['prefill_selector']}`), {blocks}"),
    }
    for plan, words in names.items():
        if plan not in found["arrivals"]:
            continue
        one = found["arrivals"][plan]
        rates = f"{one['requests_per_s']:.3f}", f"{one['tokens_per_s']:.0f}"
        ratio = f"{one['throughput_ratio']:.2f}" if "throughput_ratio" in one else ""
        rows.append((*words, f"{one['seconds']:.1f}", *rates, ratio))
    shared = "a shared prompt" if about["shared"] else "different prompts"
    size = f" with {about['layers']} layers" if about["layers"] else ""
    words = (
        f"The table is for {about['requests']} requests with {shared} of "
        f"{about['context']:,} tokens. All of them arrive at the beginning, vLLM runs at most "
        f"{max(about['batch'])} at a time, and {about['written']:,} tokens are generated for each "
        f"request. The model has random weights in the shape of {about['shape']}{size}, in "
        f"bfloat16. The index retrieves k = {about['k']} tokens per KV head."
    )
    head = ("attention in decode steps", "in prompts", "seconds", "requests per second")
    head = (*head, "generated tokens per second", "throughput, ratio to FlashAttention")
    return f"{words}\n\n{table(head, rows)}\n\n{machine(result)}"


def served(result: Result) -> str:
    """Write a sentence that compares decode steps in vLLM with an index and with FlashAttention.

    It is about keys and values on the device, in batches of the longest sequences.
    """
    about, batches = result["serving"]["settings"], result["serving"]["batches"]
    context = about["context"]
    ratios = {
        one["batch"]: f"{one['plans']['kvindex']['ratio']:.2f}"
        for one in batches
        if one.get("context", context) == context
    }
    how = "without" if about["plain"] else "with"
    return (
        f"In vLLM, a decode step over {context:,} tokens with the plug-in takes "
        f"{' or '.join(ratios.values())} times the time of a decode step with FlashAttention "
        f"(k = {about['k']}, batches of {' or '.join(map(str, ratios))}, {gpu(result)}, both {how} "
        "`torch.compile`; [more](docs/adapters/vllm.md#how-fast))."
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
        notes = [] if other == result["index"] else [f"`{other}`"]
        if found["k"] != result["decoder"]["k"]:
            notes.append(f"k = {found['k']}")
        note = f" ({', '.join(notes)})" if notes else ""
        times = full, f"{found['cached']['device_ms']:.1f}{note}"
        rows.append((f"{found['context']:,}", one["model"], gpu(one), *times))
    head = ("tokens", "model shape", "GPU", "full attention, ms", f"`{result['index']}`, ms")
    return table(head, rows)


def plain(result: Result) -> list[Result]:
    """Return results of kvindex's minimal decoder for the README's table, sorted by length of the
    context.

    These are results on the same kind of GPU as `result`, for one sequence, 8 KV heads, and weights
    that are not quantized. Of results that differ in `k` alone, only the first one is returned.
    """
    found = [one for one in stored_like("decoder_tokens", result) if gpu(one) == gpu(result)]
    found = [one for one in found if one["decoder"].get("batch", 1) == 1]
    found = [one for one in found if one["decoder"].get("shape", {}).get("kv_heads", 8) == 8]
    found = [one for one in found if one["decoder"]["kind"] == "plain"]
    of = {(one["model"], one["decoder"]["context"], one["index"]): one for one in reversed(found)}
    return sorted(of.values(), key=lambda one: int(one["decoder"]["context"]))


def through(result: Result) -> str:
    """Make the table of the time per token in transformers and in kvindex's decoder, by model."""
    rows = []
    for one in stored_like("transformers_tokens", result):
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
        "The table compares the time per generated token in transformers and in kvindex's decoder. "
        "It is the time between two tokens that the host reads: the median, with quartiles in "
        "parentheses. The models have random weights in the shape of a real model, in "
        f"{result['dtype']}. They use `{result['index']}` with k = {result['transformers']['k']}, "
        "and sample one sequence of tokens."
    )
    return f"{about}\n\n{table(head, rows)}\n\n{machine(result)}"


def gpu(result: Result) -> str:
    """Return the short name of the GPU, such as "H100", or "none" if a CPU was measured."""
    return str(result["machine"].get("gpu", "none")).removeprefix("NVIDIA ").split()[0]


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
                words.format(index=result["index"], k=found["k"]),
                f"{ms:.2f} ({low:.2f} to {high:.2f})",
                f"{ms / found['floor_ms']:.2f}",
                "" if ratio is None else f"{ratio:.3f}",
                f"{sum(hits) / len(hits):.0%}" if hits else "",
                "" if worst is None else f"{worst:.2f}",
            )
        )
    return rows
