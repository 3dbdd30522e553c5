"""Tables of quality: demo, fidelity, KL, recall."""

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
"""Candidates past the paper are at least `POOL · k`."""


def demo(result: Result) -> str:
    """Full attention and the index, side by side."""
    full, index = result["full"], result["index"]
    found = ("yes" if one["found"] else "no" for one in (full, index))
    recall = f"{index['recall_at_k']:.2f} ({index['recall_limit']:.2f})"
    steps = result["steps_compared"]
    rows = [
        ("answer", full["answer"], index["answer"]),
        (f"needle {result['needle']} found", *found),
        ("rows read per token", "100%", f"{index['rows_read_fraction']:.1%}"),
        (f"recall of each head's own top {index['k']} (exact search, as many rows)", "1", recall),
        (
            f"same next token; mean KL, {steps} steps",
            "1; 0",
            f"{index['agreement']:.2f}; {index['kl_mean']:.4f} nats",
        ),
        ("prefill, seconds", f"{full['prefill_s']:.1f}", f"{index['prefill_s']:.1f}"),
        ("per token, seconds", f"{full['token_s']:.2f}", f"{index['token_s']:.2f}"),
    ]
    memory = ", ".join(f"{tier} {size / 2**20:.1f} MiB" for tier, size in index["nbytes"].items())
    return (
        table(("", "full attention", f"{index['name']}, k = {index['k']}"), rows)
        + f"\n\n{result['model']}, {result['prompt_tokens']} prompt tokens. "
        f"Memory of the index: {memory}. {machine(result)}"
    )


def fidelity(result: Result) -> str:
    """Each index against full attention, teacher-forced."""
    parts = {"kl_mean": ".4f", "agreement": ".3f", "recall_at_k": ".3f", "recall_limit": ".3f"}
    rows = [
        (f"`{name}`", *(f"{found[part]:{form}}" for part, form in parts.items()))
        for name, found in result["indexes"].items()
    ]
    k = result["k"]
    drawn = any("+sample" in name for name in result["indexes"])
    note = " `+sample` draws half of the rows at random." if drawn else ""
    head = ("index", "mean KL, nats", "same next token", f"recall@{k}", "exact search")
    return (
        f"SmolLM2-135M-Instruct, {result['prompt_tokens']} tokens of prose, then "
        f"{result['steps']} steps with given tokens; {k} rows per KV head shared by 3 query "
        "heads, sink 64, local 256. Recall is of each query head's own true top "
        f"{k}; the last column is what exact search reaches with the same policy and rows."
        f"{note}\n\n" + table(head, rows) + f"\n\n{machine(result)}"
    )


def row_codecs(result: Result) -> str:
    """What each codec does to the output and to KL, in each model."""
    return "\n\n".join(_row_codecs(each) for each in stored_beside("row_codecs", result))


def _row_codecs(result: Result) -> str:
    read = ("all", "exact", "pariskv") if result["cells"] else ()  # errors alone else
    rows = []
    for name, row_bytes in result["row_bytes_128"].items():
        off = result["errors"][name]
        parts = [off[part]["mean"] for part in ("keys", "values", "both")]
        parts += [off["both"][part] for part in ("p90", "worst_layer")]
        kls = [some(result["cells"], read=each, rows=name) for each in read]
        line = [f"`{name}`", str(row_bytes), *(f"{part:.2%}" for part in parts)]
        rows.append([*line, *(f"{mean(cells, 'kl_mean'):.5f}" for cells in kls)])
    head = ["rows", "bytes, D = 128", "error, keys coded", "values coded", "both"]
    head += ["90th percentile", "worst layer"]
    about = (
        f"{named(result['model'], result['lora'])} reads {result['tokens']} tokens of each text "
        f"({', '.join(result['texts'])}); the queries are those of the next {result['steps']} "
        "tokens. An error is `‖õ − o‖ / ‖o‖` of a head's output: full attention over rows stored "
        "with a codec, except the first 64, compared with full attention over float32 rows. The "
        "columns are means over all layers, heads and queries, then two figures for keys and "
        "values both coded. The errors of `plain` are those of bfloat16."
    )
    if read:
        head += ["KL, all rows", *(f"KL, `{index}`, k = {result['k']}" for index in read[1:])]
        about += (
            " KL divergences are from full attention, in nats, of the float32 model over the same "
            "tokens; there `plain` rows are float32."
        )
    return f"{about}\n\n{table(head, rows)}\n\n{machine(result)}"


def row_scales(result: Result) -> str:
    """The output's error by what the groups of a key's codes are of."""
    parts = ("error", "error_90", "error_worst_layer")
    rows = [
        (
            *(str(cell[name]) for name in ("text", "bits", "groups", "key_bytes")),
            *(f"{cell[part]:.1%}" for part in parts),
        )
        for cell in result["cells"]
    ]
    head = ("text", "bits", "32 numbers of one", "bytes per key", "mean", "90th percentile")
    return (
        f"{result['model']}, {result['tokens']} tokens of each text, then "
        f"{result['queries_per_head']} generated tokens, whose queries are used. Errors are "
        "‖õ − o‖ / ‖o‖ of a head's output: full attention over quantized keys, compared with "
        "unquantized keys. Values are not quantized.\n\n"
        + table((*head, "worst layer"), rows)
        + f"\n\n{machine(result)}"
    )


def lists(result: Result) -> str:
    """KL and recall of one list for all heads of a layer, and of several."""
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
    head = ("model", "lists", "rows that latents would read", "KL, nats", "texts")
    words = (
        f"Exact search, {result['tokens']:,} tokens of a text, then {result['steps']} steps with "
        "given tokens. Recall is of each query head's own best rows, as many as its list has."
    )
    return f"{words}\n\n{table((*head, 'recall'), rows)}\n\n{machine(result)}"


def divergence(result: Result) -> str:
    """KL over that of exact search with as many rows; longer texts from files beside it."""
    parts = [("to 6K", result)]
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
    head = ("index", "prompt", "cells", "mean KL, nats", "of `exact`", "ratio (95%)")
    return (
        f"Each cell: a text (prose, code, dialogue) and a length, {result['steps']} steps with "
        f"given tokens, k = {result['k']} rows per KV head shared by 3 query heads. The ratio is "
        "the geometric mean over cells; its interval a paired bootstrap over tokens.\n\n"
        + table(head, rows)
        + "\n\n"
        + " ".join([*(part["note"] for _, part in parts if "note" in part), machine(result)])
    )


WAYS = {
    "one": "one process, {k}",
    "own": "{ranks} ranks, the {k} of each (`own`, k = {k})",
    "own_part": "{ranks} ranks, the {part} of each (`own`, k = {part})",
    "best": "{ranks} ranks, the {k} of all (`best`, k = {k})",
}


def ranks(result: Result) -> str:
    """KL of each way to share tokens, beside the same index in one process."""
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
    head = ("index", "rows of a step", "mean KL, nats", *result["texts"], "of one process's (95%)")
    about = (
        f"{named(result['model'], result['lora'])}, {result['steps']} given tokens after a prompt "
        f"of {result['tokens']:,}. The ratio is the geometric mean over texts; its interval a "
        "paired bootstrap over tokens."
    )
    return f"{about}\n\n{table(head, rows)}\n\n{machine(result)}"


def drawn(result: Result) -> str:
    """KL over that of exact search by length: of other models, and of other numbers of rows."""
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
    about = f"{texts} texts, {result['steps']} steps with given tokens after each prompt."
    machines = dict.fromkeys(machine(part) for part in parts)
    return f"{table(head, rows)}\n\n{about} {' '.join(machines)}"


# Recall


def recall(result: Result) -> str:
    """Presets at several β: bytes, recall and coverage, means over texts."""
    rows, cells, k = [], result["cells"], result["k"]
    for index in values(cells, "index"):
        mine = some(cells, index=index)
        first, least = mine[0], POOL * k
        share = f"{first['beta']:.0%}"
        if first["beta"] * first["tokens"] < least and first["preset"] != "paper":
            if first["beta"] > 0.02:
                continue  # the pool is larger: the same row twice
            share += f" ({least} keys)"
        size = (f"{first['bytes_128'][part]:.0f}" for part in ("kept", "scanned"))
        worst = f"{min(cell['recall_worst_layer'] for cell in mine):.3f}"
        tenth, coverage = (f"{mean(mine, of):.3f}" for of in ("recall_worst_decile", "mass_ratio"))
        found = f"{mean(mine, 'recall'):.3f}"
        rows.append((f"`{first['preset']}`", share, *size, found, worst, tenth, coverage))
    head = ("preset", "β", "bytes kept", "scanned", f"recall@{k}", "worst layer")
    return (
        f"SmolLM2-135M-Instruct, {cells[0]['tokens']} tokens of "
        f"{', '.join(values(cells, 'text'))}; all 30 layers, each of 9 "
        f"query heads on its own, {result['queries_per_head']} queries each; bytes per key and KV "
        f"head at D = 128; coverage is that of the selected rows over that of the true top {k}.\n\n"
        + table((*head, "worst tenth of heads", "coverage"), rows)
        + f"\n\n{machine(result)}"
    )


def lengths(result: Result) -> str:
    """Recall at other lengths: with the results at 7,000 tokens and those of the long model."""
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
    title = "Recall@100 by the prompt's length, means over texts (worst layer):"
    return f"{title}\n\n" + table(head, rows)
