"""Tables of the quality of indexes: the demo, KL divergence from full attention, and recall."""

from __future__ import annotations

from statistics import geometric_mean

from benchmarks.reporting.parts import (
    Result,
    machine,
    mean,
    named,
    some,
    stored,
    stored_beside,
    table,
    values,
)

POOL = 4
"""All presets of pariskv except `paper` have at least `POOL · k` candidates."""


def demo(result: Result) -> str:
    """Make the table of `kvindex demo`, which compares full attention with an index."""
    full, index = result["full"], result["index"]
    rows = [
        (f"number for {asked['key']}: {asked['value']}", *answers)
        for asked, *answers in zip(
            result["questions"], full["answers"], index["answers"], strict=True
        )
    ]
    fraction = index["rows_read"] / index["rows_full"]
    read = f"{index['rows_read']:.0f} ({fraction:.1%})"
    filled = f"the same, and {index['fill_s']:.1f} to fill the index"
    rows += [
        ("rows read per token", f"{index['rows_full']:.0f}", read),
        ("memory of the document, MiB", *(_mib(_total(one)) for one in (full, index))),
        ("reading the document, seconds", f"{full['read_s']:.1f}", filled),
        ("time per token, ms", *(f"{1000 * one['token_s']:.0f}" for one in (full, index))),
    ]
    memory = ", ".join(f"{kind} ({_mib(size)} MiB)" for kind, size in index["nbytes"].items())
    return (
        table(("", "full attention", f"{index['name']}, k = {index['k']}"), rows)
        + f"\n\nThe model is {result['model']}; the prompt has {result['prompt_tokens']} tokens. "
        f"Times per token are medians of {full['steps']} and {index['steps']} decode steps: "
        f"{result['speedup']:.2f} times as fast with the index. The memory of the index consists "
        f"of {memory}. {machine(result)}"
    )


def _total(one: Result) -> float:
    """Return the bytes of the keys and values of an engine of the demo."""
    nbytes = one["nbytes"]
    return float(sum(nbytes.values()) if isinstance(nbytes, dict) else nbytes)


def _mib(size: float) -> str:
    return f"{size / 2**20:.0f}"


def fidelity(result: Result) -> str:
    """Make the table of each index's KL divergence from full attention on a fixed text."""
    parts = {"kl_mean": ".4f", "agreement": ".3f", "recall_at_k": ".3f", "recall_limit": ".3f"}
    rows = [
        (f"`{name}`", *(f"{found[part]:{form}}" for part, form in parts.items()))
        for name, found in result["indexes"].items()
    ]
    k = result["k"]
    drawn = any("+sample" in name for name in result["indexes"])
    note = " `+sample` samples half of the rows at random." if drawn else ""
    head = ("index", "mean KL, nats", "same next token", f"recall@{k}", "recall of exact search")
    return (
        f"SmolLM2-135M-Instruct reads {result['prompt_tokens']} tokens of prose, then "
        f"{result['steps']} given tokens, one in each step. A KV head retrieves {k} rows for its "
        "3 query heads, and always reads the first 64 and the last 256 tokens. Mean KL is the mean "
        "divergence of the next token's distribution from that of full attention. Recall is the "
        f"fraction of each query head's own top {k} that was retrieved; the last column is the "
        "recall of exact search with the same number of rows and the same group policy."
        f"{note}\n\n" + table(head, rows) + f"\n\n{machine(result)}"
    )


def row_codecs(result: Result) -> str:
    """Make tables of the effect of row codecs on attention outputs and KL divergence, by model."""
    return "\n\n".join(_row_codecs(each) for each in stored_beside("row_codecs", result))


def _row_codecs(result: Result) -> str:
    read = ("all", "exact", "pariskv") if result["cells"] else ()  # else only errors
    rows = []
    for name, row_bytes in result["row_bytes_128"].items():
        off = result["errors"][name]
        parts = [off[part]["mean"] for part in ("keys", "values", "both")]
        parts += [off["both"][part] for part in ("p90", "worst_layer")]
        kls = [some(result["cells"], read=each, rows=name) for each in read]
        line = [f"`{name}`", str(row_bytes), *(f"{part:.2%}" for part in parts)]
        rows.append([*line, *(f"{mean(cells, 'kl_mean'):.5f}" for cells in kls)])
    head = ["row codec", "bytes per row, D = 128", "error: keys coded", "values coded"]
    head += ["both coded", "90th percentile", "worst layer"]
    about = (
        f"{named(result['model'], result['lora'])} reads {result['tokens']} tokens of "
        f"{' and of '.join(result['texts'])}, then {result['steps']} more, whose queries are "
        "evaluated. An error is `‖õ − o‖ / ‖o‖`, where `õ` is a head's output of full attention "
        "over coded rows (the first 64 rows are not coded), and `o` that over float32 rows. It is "
        "the mean over all layers, heads and queries. With the codec `plain`, rows are bfloat16."
    )
    if read:
        head += ["KL, all rows", *(f"`{index}`, k = {result['k']}" for index in read[1:])]
        about += (
            " KL is the divergence of the model's output from that of full attention over float32 "
            "rows, in nats, on the same tokens: once for full attention over coded rows, and for "
            "two indexes."
        )
    return f"{about}\n\n{table(head, rows)}\n\n{machine(result)}"


def row_scales(result: Result) -> str:
    """Make the table of the attention output's error for each way of quantizing keys in groups."""
    parts = ("error", "error_90", "error_worst_layer")
    rows = [
        (
            *(str(cell[name]) for name in ("text", "bits", "groups", "key_bytes")),
            *(f"{cell[part]:.1%}" for part in parts),
        )
        for cell in result["cells"]
    ]
    head = ("text", "bits", "a scale for 32 numbers of a", "bytes per key", "mean error")
    head = (*head, "90th percentile", "worst layer")
    return (
        f"{result['model']} reads {result['tokens']} tokens of each text, then samples "
        f"{result['queries_per_head']} tokens, whose queries are evaluated. An error is "
        "`‖õ − o‖ / ‖o‖`, where `õ` is a head's output of full attention over coded keys, and `o` "
        "that over the original keys; both use the original values.\n\n"
        + table(head, rows)
        + f"\n\n{machine(result)}"
    )


def lists(result: Result) -> str:
    """Make the table of KL divergence and recall with one list of retrieved tokens per layer.

    It is compared with one list per KV head.
    """
    rows = []
    for one in stored_beside("lists", result):
        texts = list(dict.fromkeys(cell["text"] for cell in one["cells"]))
        shape = f"{one['model']}, {one['q_heads']} heads over {one['kv_heads']} KV heads"
        for way in dict.fromkeys(cell["lists"] for cell in one["cells"]):
            cells = [cell for cell in one["cells"] if cell["lists"] == way]
            count = 1 if way == "one" else one["kv_heads"]
            rows.append(
                (
                    *(shape, f"{count} of {cells[0]['k']}", str(count * cells[0]["k"])),
                    *(", ".join(f"{cell['kl_mean']:.4f}" for cell in cells), ", ".join(texts)),
                    f"{mean(cells, 'recall_at_k'):.2f}",
                )
            )
    head = ("model", "lists and rows", "rows that a step over latents would read", "KL, nats")
    head = (*head, "texts")
    words = (
        f"The table is for exact search after {result['tokens']:,} tokens of a text, in "
        f"{result['steps']} steps with given tokens. KL is the divergence of the model's output "
        "from that of full attention. Recall is the fraction of a query head's own best rows that "
        "are in the list of its group, where the number of best rows is the length of the list."
    )
    return f"{words}\n\n{table((*head, 'recall'), rows)}\n\n{machine(result)}"


def divergence(result: Result) -> str:
    """Make the table of each index's KL divergence, with the ratio to that of exact search.

    The results of longer texts are in files of their own.
    """
    parts = [("up to 6K", result)]
    for name in ("16k", "32k", "62k"):
        if found := stored(f"divergence_{name}"):
            parts.append((f"{name.upper()}, long model", found))
    rows = [
        (
            *(f"`{index}`", length, str(len(found["cells"])), f"{found['kl_mean']:.4f}"),
            f"{part['indexes']['exact']['kl_mean']:.4f}",
            "{:.3f} ({:.3f} to {:.3f})".format(found["ratio"], *found["ratio_95"]),
        )
        for length, part in parts
        for index, found in part["indexes"].items()
        if index != "exact"
    ]
    head = ("index", "prompt", "cells", "mean KL, nats", "KL of `exact`", "ratio (95%)")
    return (
        "In the table, a cell is one combination of a text (prose, code or dialogue) and a length. "
        "After the prompt, the model "
        f"reads {result['steps']} given tokens, and a KV head retrieves k = {result['k']} rows for "
        "its 3 query heads. KL is the divergence of the next token's distribution from that of "
        "full attention. The ratio is this KL divided by that of exact search, as a geometric mean "
        "over cells, with a 95% interval by a paired bootstrap over tokens.\n\n"
        + table(head, rows)
        + "\n\n"
        + " ".join([*(part["note"] for _, part in parts if "note" in part), machine(result)])
    )


WAYS = {
    "one": "one process, {k}",
    "own": "{ranks} ranks, {k} of each rank (`own`, k = {k})",
    "own_part": "{ranks} ranks, {part} of each rank (`own`, k = {part})",
    "best": "{ranks} ranks, the best {k} of all ranks (`best`, k = {k})",
}
"""Way of retrieving tokens if they are divided among ranks -> its description in the table."""


def ranks(result: Result) -> str:
    """Make the table of KL divergence with tokens divided among ranks, and with one process."""
    sizes = {"part": result["k"] // result["ranks"], **result}
    rows = [
        (
            *(f"`{index}`", WAYS[way].format(**sizes), f"{found['kl_mean']:.4f}"),
            *(f"{mean:.4f}" for mean in found["kl_texts"]),
            ""
            if way == "one"
            else "{:.2f} ({:.2f} to {:.2f})".format(found["ratio"], *found["ratio_95"]),
        )
        for index, ways in result["indexes"].items()
        for way, found in ways.items()
    ]
    head = ("index", "rows of a step", "mean KL, nats", *result["texts"])
    head = (*head, "ratio to one process (95%)")
    about = (
        f"{named(result['model'], result['lora'])} reads {result['steps']} given tokens after a "
        f"prompt of {result['tokens']:,} tokens. KL is the divergence of its output from that of "
        "full attention. The ratio is this KL divided by that of one process, as a geometric mean "
        "over texts, with a 95% interval by a paired bootstrap over tokens."
    )
    return f"{about}\n\n{table(head, rows)}\n\n{machine(result)}"


def drawn(result: Result) -> str:
    """Make the table of KL divergence divided by that of exact search, by prompt length.

    It has rows for several models and values of `k`. Their results are in files of their own.
    """
    names = ("256", "qwen", "qwen_256")
    parts = [result, *(found for name in names if (found := stored(f"divergence_drawn_{name}")))]
    lengths = values([c for part in parts for c in part["indexes"]["exact"]["cells"]], "tokens")
    rows = []
    for part in parts:
        for index, found in part["indexes"].items():
            if index == "exact":
                continue
            means = []
            for tokens in lengths:
                cells = some(found["cells"], tokens=tokens)
                ratios = [cell["kl_mean"] / cell["kl_exact"] for cell in cells]
                means.append(f"{geometric_mean(ratios):.3f}" if ratios else "–")
            whole = "{:.3f} ({:.3f} to {:.3f})".format(found["ratio"], *found["ratio_95"])
            rows.append(
                (named(part["model"], part["lora"]), f"`{index}`", str(part["k"]), *means, whole)
            )
    head = ("model", "index", "rows", *(f"{tokens:,} tokens" for tokens in lengths), "all (95%)")
    texts = len(values(result["indexes"]["exact"]["cells"], "text"))
    about = (
        "An entry of the table is the KL divergence of the model's output from that of full "
        "attention, divided by the KL divergence of exact search for the same number of rows. It "
        f"is a geometric mean over {texts} texts, with {result['steps']} steps with given tokens "
        "after each prompt."
    )
    machines = dict.fromkeys(machine(part) for part in parts)
    if len(machines) > 1:
        machines = dict.fromkeys(each.replace("These", "Some of these") for each in machines)
    return f"{table(head, rows)}\n\n{about} {' '.join(machines)}"


# Recall


def recall(result: Result) -> str:
    """Make the table of bytes per key, recall and coverage of pariskv's presets.

    The values are means over texts. Each preset is shown with several values of β, the fraction of
    keys that become candidates.
    """
    rows, cells, k = [], result["cells"], result["k"]
    for index in values(cells, "index"):
        mine = some(cells, index=index)
        first, least = mine[0], POOL * k
        fraction = f"{first['beta']:.0%}"
        if first["beta"] * first["tokens"] < least and first["preset"] != "paper":
            if first["beta"] > 0.02:
                continue  # the number of candidates is `least` again, so the line is the same
            fraction += f" ({least} keys)"
        size = (f"{first['bytes_128'][part]:.0f}" for part in ("kept", "scanned"))
        worst = f"{min(cell['recall_worst_layer'] for cell in mine):.3f}"
        tenth, coverage = (f"{mean(mine, of):.3f}" for of in ("recall_worst_decile", "mass_ratio"))
        found = f"{mean(mine, 'recall'):.3f}"
        rows.append((f"`{first['preset']}`", fraction, *size, found, worst, tenth, coverage))
    head = ("preset", "β", "bytes stored", "bytes scanned", f"recall@{k}", "worst layer")
    return (
        f"The model is SmolLM2-135M-Instruct, which reads {cells[0]['tokens']:,} tokens of "
        f"{', '.join(values(cells, 'text'))}. In all 30 layers, {result['queries_per_head']} "
        "queries of each of 9 query heads are used, with a separate search for each head. β is the "
        f"fraction of the keys that become candidates. Recall@{k} is the fraction of the true top "
        f"{k} keys that are found. Coverage is the attention weight of the selected rows, divided "
        "by that of the true top "
        f"{k}. Bytes are per key and KV head at D = 128.\n\n"
        + table((*head, "worst tenth of heads", "coverage"), rows)
        + f"\n\n{machine(result)}"
    )


def lengths(result: Result) -> str:
    """Make the table of recall by prompt length, from several files of results."""
    more = (stored(name) or {"cells": []} for name in ("recall", "recall_long", "recall_62k"))
    cells = [*result["cells"], *(cell for part in more for cell in part["cells"])]
    at, k = sorted(set(values(cells, "tokens"))), result["k"]
    past = [(preset, beta) for preset in ("fast", "accurate") for beta in (0.02, 0.05)]
    rows = []
    for preset, beta in (("paper", 0.05), *past, ("scan", 1.0)):
        row = [f"`{preset}`" if beta == 1 else f"`{preset}`, β = {beta:.0%}"]
        for tokens in at:
            pooled = preset != "paper" and 0.05 * tokens < POOL * k and beta < 1
            betas = (0.02, 0.05) if pooled else (beta,)
            mine = some(cells, preset=preset, tokens=tokens)
            here = [cell for cell in mine if cell["beta"] in betas]
            worst = min((c["recall_worst_layer"] for c in here), default=0)
            row.append(f"{mean(here, 'recall'):.3f} ({worst:.3f})" if here else "")
        rows.append(row)
    head = ("", *(f"{tokens:,}" + (" (long model)" if tokens > 8192 else "") for tokens in at))
    title = (
        "The table shows the recall of the true top 100 keys, for each length of the prompt in "
        "tokens: means over texts, with the worst layer in parentheses."
    )
    return f"{title}\n\n" + table(head, rows)
