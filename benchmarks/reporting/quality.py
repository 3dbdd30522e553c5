"""Tables of the quality of indexes: the demo, KL divergence from full attention, and recall."""

from __future__ import annotations

from statistics import geometric_mean

from benchmarks.reporting.parts import (
    Result,
    machine,
    machines,
    mean,
    named,
    some,
    stored,
    stored_like,
    table,
    values,
)

POOL = 4
"""All presets of pariskv except `paper` have at least `POOL * k` candidates."""


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
        f"Times per token are medians of {full['steps']} decode steps with full attention and "
        f"{index['steps']} with the index. Decode steps are {result['speedup']:.2f} times as fast "
        "with the index. *Rows* are keys and values of tokens. The memory of the index consists "
        f"of {memory}. {machine(result)}"
    )


def _total(one: Result) -> float:
    """Return how many bytes of memory the document takes with one engine of the demo.

    The engines are full attention and the index. The memory of the index includes its codes.
    """
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
    note = " The wrapper `+sample` selects half of the tokens at random." if drawn else ""
    head = ("index", "mean KL, nats", "same next token", f"recall@{k}", "recall of exact search")
    return (
        f"SmolLM2-135M-Instruct reads {result['prompt_tokens']} tokens of prose, and then the next "
        f"{result['steps']} tokens of the same text, one in each decode step. Each KV head "
        f"retrieves {k} tokens for its 3 query heads. In addition, it always reads the first 64 "
        "and the last 256 tokens.\n\n"
        "*Mean KL* is the mean KL divergence between two distributions of the next token: with "
        "the index in the first column, and with full attention. *Recall* is the fraction of the "
        f"{k} best tokens of each query head that were retrieved. "
        "The last column is the recall of an exact search that retrieves the same "
        "number of tokens with the same group policy (the rule by which query heads agree on "
        f"common tokens).{note}\n\n" + table(head, rows) + f"\n\n{machine(result)}"
    )


def row_codecs(result: Result) -> str:
    """Make tables of the effect of row codecs on attention outputs and KL divergence, by model."""
    return "\n\n".join(_row_codecs(each) for each in stored_like("row_codecs", result))


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
        "The table shows how much each row codec changes attention. A *row* is the key and the "
        f"value of one token. The model {named(result['model'], result['lora'])} reads "
        f"{result['tokens']} tokens of {' and of '.join(result['texts'])}, and then "
        f"{result['steps']} more, whose queries are evaluated. The error is `‖õ − o‖ / ‖o‖`, as a "
        "mean over all layers, heads and queries. `o` is the output of full attention over float32 "
        "rows, and `õ` its output over rows that the codec has compressed, except for the first 64 "
        "rows. With the codec `plain`, rows are bfloat16."
    )
    if read:
        head += ["KL, all rows", *(f"`{index}`, k = {result['k']}" for index in read[1:])]
        about += (
            " *KL* is the KL divergence of the model's output from that with full attention over "
            "float32 rows, in nats, on the same tokens. It was measured with full attention over "
            "compressed rows, and with two indexes that retrieve compressed rows."
        )
    return f"{about}\n\n{table(head, rows)}\n\n{machine(result)}"


def row_scales(result: Result) -> str:
    """Make a table that compares ways to quantize keys by the error of the attention output.

    The ways differ in the number of bits, and in which 32 numbers have a common scale.
    """
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
        "The table shows how much quantized keys change the output of full attention. The model "
        f"{result['model']} reads {result['tokens']} tokens of each text, and then samples "
        f"{result['queries_per_head']} tokens, whose queries are evaluated. The error is "
        "`‖õ − o‖ / ‖o‖`, where `o` is the output of a head over the original keys, and `õ` its "
        "output over quantized keys. Values are the original ones in each case.\n\n"
        + table(head, rows)
        + f"\n\n{machine(result)}"
    )


def lists(result: Result) -> str:
    """Make a table that compares two ways to retrieve tokens, by KL divergence and recall.

    A layer retrieves either one list of tokens for all query heads, or one list for each KV head.
    """
    rows = []
    for one in stored_like("lists", result):
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
        "In the table, an exact search selects the rows (keys and values of tokens) that a layer "
        "attends to: one list for all query heads, or one list for each KV head. The model reads "
        f"{result['tokens']:,} tokens of a text, and then the next {result['steps']} tokens one by "
        "one. *KL* is the KL divergence of the model's output from that with full attention. "
        "*Recall* is measured for each query head on its own: it is the fraction of the head's "
        "best `n` rows that are in the list, where `n` is the length of the list."
    )
    return f"{words}\n\n{table((*head, 'recall'), rows)}\n\n{machine(result)}"


def budget(result: Result) -> str:
    """Make a table of the errors of a layer's output, and of how many rows were found."""
    rows = []
    for cell in sorted(result["cells"], key=lambda one: (one["tokens"], one["text"])):
        fixed = cell["error"] is None
        within = "" if fixed else f"{cell['within']:.0%} ({min(cell['within_by_layer']):.0%})"
        least, most = min(cell["rows_by_layer"]), max(cell["rows_by_layer"])
        spread = "" if fixed else f" ({least:.0f} to {most:.0f})"
        rows.append(
            (
                *(f"{cell['tokens']:,}", cell["text"]),
                f"`k={cell['k']}`" if fixed else f"`error={cell['error']:g}`",
                f"{cell['rows']:.0f}{spread}",
                *(f"{cell['median']:.3f}", f"{cell['p95']:.3f}", within),
            )
        )
    head = ("tokens", "text", "setting", "rows (by layer)", "median error", "95th percentile")
    words = (
        f"The last {result['steps']} tokens of each text are decoded in one of every "
        f"{result['every']} layers of {named(result['model'], result['lora'])}, with the keys, "
        "values and queries of full attention. *Rows* is the mean number of rows that a search "
        "finds per KV head. "
        "*Error* is the norm of the difference between a layer's output and that of full "
        "attention, divided by the norm of the latter. *Within* is the fraction of steps whose "
        "error is at most the allowed one, and in parentheses that of the worst layer."
    )
    return f"{words}\n\n{table((*head, 'within'), rows)}\n\n{machine(result)}"


RULES = {
    "candidates": "candidates represent other keys",
    "votes": "other keys by their votes",
    "inflated": "the same, inflated",
    "larger": "the larger of the first and the third",
    "mass": "the first, plus the squared sum of the others' weights",
    "tempered": "the first, for tempered weights with their bias",
}
"""Name of a rule of `comparing.missed` -> its words in a table."""


def missed(result: Result) -> str:
    """Make a table of the rules that predict the error of sampled rows."""
    rows = []
    some = [cell for cell in result["cells"] if cell["error"] == 0.1]
    first: dict[tuple[int, str], Result] = {}
    for cell in some:
        known = first.setdefault((cell["tokens"], cell["text"]), cell)
        ways = [dict(known, factor=1.0), *known["stricter"]]
        ways.sort(key=lambda way: -way["factor"])
        equal = next((way for way in ways if way["over"] <= cell["over"]), None)
        words = (
            "none"
            if equal is None
            else f"{equal['rows']:.0f} (`error={0.1 * equal['factor']:.3g}`)"
        )
        rows.append(
            (
                *(f"{cell['tokens']:,}", cell["text"], RULES[cell["rule"]], f"{cell['rows']:.0f}"),
                *(f"{cell['ceiling']:.0%}", f"{cell['over']:.1%}"),
                f"{max(part['over'] for part in cell['deciles']):.0%}",
                "" if cell is known else words,
            )
        )
    spread = sorted(value for cell in some for value in cell["residuals"])
    head = ("tokens", "text", "rule", "rows", "at the ceiling", "above", "worst decile")
    text = (
        f"`error=0.1`, with at most 1,024 rows. {result['steps']} decode steps with "
        f"{result['seeds']} seeds of the random numbers, in one of every {result['every']} layers "
        f"of {named(result['model'], result['lora'])}. *Rows* is the mean number of rows per KV "
        "head. *Above* is the fraction of KV heads and steps whose true error is above the allowed "
        "one; *worst decile* is the same among the tenth of the predictions where it is largest. "
        "The last column shows how many rows the first rule takes with another `error` if it is "
        "at most as often above 0.1. The votes' error has a standard deviation of "
        f"{spread[0]:.2f} to {spread[-1]:.2f} nats in these layers; inflated weights assume "
        f"{result['residual']} nats."
    )
    return f"{text}\n\n{table((*head, 'rows of the first rule'), rows)}\n\n{machine(result)}"


def bound(result: Result) -> str:
    """Make a table of how often true errors are above 0.1 if the allowed error is at most 0.1."""
    rows = []
    for number, one in enumerate(stored_like("missed", result)):
        for cell in some(one["cells"], error=0.1, rule="candidates"):
            whole = dict(cell, factor=1.0, worst=max(part["over"] for part in cell["deciles"]))
            found = {way["factor"]: way for way in (whole, *cell["stricter"])}
            ways = [found[factor] for factor in (1.0, 0.8, 0.7)]
            name = cell["text"] + (" (not used to choose 0.7)" if number else "")
            rows.append(
                (
                    *(
                        f"{cell['tokens']:,}",
                        name,
                        f"{ways[0]['rows']:.0f} to {ways[-1]['rows']:.0f}",
                    ),
                    *(f"{way['over']:.1%}, {way['worst']:.0%}" for way in ways),
                )
            )
    about = (
        f"The errors of single KV heads and steps, compared with 0.1, with {result['seeds']} seeds "
        f"of the random numbers, in one of every {result['every']} layers of "
        f"{named(result['model'], result['lora'])}. *Rows* is the mean number of rows per KV head "
        "with the largest and with the smallest `error`. The other columns show the fraction of "
        "errors above 0.1, first of all errors, and then in the tenth of the predictions where it "
        "is largest."
    )
    head = ("tokens", "text", "rows", "`error=0.1`", "`error=0.08`", "`error=0.07`")
    return f"{about}\n\n{table(head, rows)}\n\n{machine(result)}"


def divergence(result: Result) -> str:
    """Make the table of each index's KL divergence, with the ratio to that of exact search.

    `result` contains the results for prompts of up to 6K tokens. The results for longer prompts are
    read from other results files.
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
        "The table shows the KL divergence of the next token's distribution from that with full "
        "attention. After the prompt, the model reads the next "
        f"{result['steps']} tokens of the text, and each KV head retrieves k = {result['k']} "
        "tokens for its 3 query heads. A *cell* is one combination of a text (prose, code or "
        "dialogue) and a length of the prompt. The *ratio* is the KL divergence divided by that of "
        "exact search, as a geometric mean over cells, with a 95% interval (paired bootstrap over "
        "tokens).\n\n"
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
    """Make the table that shows how accurate the output is if ranks share the tokens of a sequence.

    A rank is a process. The table compares the KL divergence of the model's output from that with
    full attention between several ranks and a single process.
    """
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
        "The table shows the KL divergence of a model's output from that with full attention, if "
        f"several ranks share the tokens. The model {named(result['model'], result['lora'])} reads "
        f"a prompt of {result['tokens']:,} tokens, and then the next {result['steps']} tokens of "
        "the text. *Rows of a step* are the tokens that a decode step retrieves per KV head. The "
        "*ratio* is the KL divergence divided by that in one process, as a geometric mean over "
        "texts, with a 95% interval (paired bootstrap over tokens)."
    )
    return f"{about}\n\n{table(head, rows)}\n\n{machine(result)}"


def drawn(result: Result) -> str:
    """Make the table of each index's KL divergence, divided by that of exact search.

    The columns are prompt lengths. The lines are for several models and values of `k`, each from a
    results file of its own.
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
        "An entry of the table is the KL divergence of the model's output from that with full "
        "attention, divided by the KL divergence with exact search for the same number of rows "
        f"(retrieved tokens per KV head). It is a geometric mean over {texts} texts. After each "
        f"prompt, the model reads the next {result['steps']} tokens of the text."
    )
    return f"{table(head, rows)}\n\n{about} {machines(parts)}"


# Recall


def recall(result: Result) -> str:
    """Make the table of bytes per key, recall and coverage of pariskv's presets.

    Each preset is shown with several values of β, the fraction of keys that become candidates.
    Recall and coverage are means over texts.
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
        size = (f"{first['bytes_128'][part]:.0f}" for part in ("stored", "scanned"))
        worst = f"{min(cell['recall_worst_layer'] for cell in mine):.3f}"
        tenth, coverage = (f"{mean(mine, of):.3f}" for of in ("recall_worst_decile", "mass_ratio"))
        found = f"{mean(mine, 'recall'):.3f}"
        rows.append((f"`{first['preset']}`", fraction, *size, found, worst, tenth, coverage))
    head = ("preset", "β", "bytes stored", "bytes scanned", f"recall@{k}", "worst layer")
    return (
        "The model SmolLM2-135M-Instruct reads "
        f"{cells[0]['tokens']:,} tokens of each text ({', '.join(values(cells, 'text'))}). In each "
        f"of its 30 layers, {result['queries_per_head']} queries of each of 9 query heads are "
        "used, with a separate search for each head.\n\n"
        "- β is the fraction of the keys that become candidates.\n"
        f"- *Recall@{k}* is the fraction of the true top {k} keys that are found.\n"
        "- *Coverage* is the attention weight of the selected keys, divided by the attention "
        f"weight of the true top {k}.\n"
        "- *Bytes* are per key and KV head at D = 128.\n\n"
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
        "The table shows recall for each length of the prompt in tokens: the fraction of the true "
        "top 100 keys that are found. Recall is a mean over texts and layers, and the recall of "
        "the worst layer is in parentheses."
    )
    return f"{title}\n\n" + table(head, rows)
