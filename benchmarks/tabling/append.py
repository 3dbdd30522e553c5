"""An append on a GPU: its kernels, its copies, and what an update delays."""

from __future__ import annotations

from typing import Any

from benchmarks.appending.update import ALLOWED, PLANS
from benchmarks.tabling.parts import NOT_MEASURED, STAGE, beside_its_floor, machine, table

PARTS = {
    "learn": "`learn`",
    "encode": "`encode`",
    "in_one_go": "both, all keys at once",
    "in_pieces": "both, in pieces of 64K tokens",
}

SMALL = {
    "learn": "an update of 256 tokens",
    "encode": "the same",
    "keep": "the same",
    "grow": "the same",
    "hold": "a token",
    "gather_blocks": "k rows, fetched from the host",
    "draw": "k rows of 8 k",
}

HOST = ("host_us_per_layer", "host_worst_us_per_layer")

WORDS = {
    "at_once": "all layers at once, on the steps' stream",
    "beside": "as a layer does by itself",
    "room": "the same, memory taken before",
}


def append(result: dict[str, Any]) -> str:
    """Encode and offload: bytes, time, share of what the bus gives."""
    encode, offload = result["encode"], result["offload"]
    rows = []
    for name, said in PARTS.items():
        part = encode[name]
        share = f"{part['of_reading']:.0%} of reading"
        rows.append((said, f"{part['bytes'] / 1e6:,.0f}", f"{part['median_us']:,.0f}", share))
    copies = (
        ("rows to the host, joined before", offload["offload"]),
        ("joined and copied", offload["join_and_offload"]),
        ("copied beside a product of matrices", offload["beside_matmul"]["offload"]),
        ("copied beside reading of HBM", offload["beside_reading"]["offload"]),
    )
    for said, part in copies:
        share = f"{part['of_memcpy']:.0%} of memcpy"
        rows.append((said, f"{offload['bytes'] / 1e6:,.0f}", f"{part['median_us']:,.0f}", share))
    return (
        f"{encode['tokens']:,} keys of a layer are coded, rows of {offload['tokens']:,} tokens "
        "copied; keys count once in both.\n\n"
        + table(("what", "MB", "µs", "rate"), rows)
        + f"\n\n{machine(result)}"
    )


def kernels(result: dict[str, Any]) -> str:
    """A table for the page of codes: the launches of an append."""
    encode, read, rows = result["encode"], result["ceilings"]["read"]["GB_s"], []
    for name in ("learn", "encode"):
        part = encode[name]
        found = part["bytes"], part["bytes"] / read / 1e3, part["median_us"]
        rows.append((f"`{name}`", f"{encode['tokens']:,}", *beside_its_floor(*found)))
    return table(STAGE, rows) + f"\n\nOf [an append](../cuda.md#an-append). {machine(result)}"


def small(result: dict[str, Any]) -> str:
    """The kernels of an update and of a token, and rows by ids: each alone."""
    if "small" not in result:
        return NOT_MEASURED
    found, rows = result["small"], []
    for name, said in SMALL.items():
        part = found[name]
        moved = (f"{part[which] / 1e3:,.0f}" for which in ("bytes", "host_bytes"))
        floor, us = part["floor_us"], part["median_us"]
        rows.append((f"`{name}`", said, *moved, f"{floor:.1f}", f"{us:.1f}", f"{floor / us:.0%}"))
    head = ("launch", "of", "KB", "KB over PCIe", "floor, µs", "measured, µs", "ratio")
    about = (
        f"Medians of a graph of {found['layers']} layers that runs the launch alone, one after the "
        f"other; k = {found['k']}."
    )
    return f"{about}\n\n{table(head, rows)}\n\n{machine(result)}"


def over(some: int, of: int) -> str:
    """So many of so many, in words."""
    return f"{some:,} of {of:,}"


def updates(result: dict[str, Any]) -> str:
    """By how much a step is longer in which an update falls, than the others' median."""
    rows = []
    for part in result["update"]:
        for name in PLANS:
            if (found := part.get(name)) is None:
                continue
            plain = found["others_worst_us"] / found["others_median_us"] - 1
            shares = (found["delay_median"], found["delay_worst"])
            struck = (*(f"{share:.0%}" for share in shares), over(found["over"], found["struck"]))
            others = f"{plain:.0%}", over(found["others_over"], found["others"])
            host = (f"{found[name]:,.0f}" for name in HOST)
            words = PLANS[name]
            if pauses := found.get("pauses_us"):
                words += f": {len(pauses)} pauses, up to {max(pauses):,.0f} µs"
            rows.append((words, *struck, *others, f"{found['amortised']:.1%}", *host))
        alone = part["without"]["median_us"]
        about = (
            f"{part['layers']} layers, {part['tokens']:,} tokens; {alone:,.0f} µs a step in a run "
            f"without updates, {part['without']['worst_us']:,.0f} the worst. Shares are over the "
            "median of the other steps of the same run."
        )
    most = f"by more than {ALLOWED:.0%}"
    head = (
        *("updates", "such a step is longer by", "the worst", most, "the others' worst", most),
        *("all steps by", "host's µs a layer (beside: to begin)", "the worst"),
    )
    return f"{about}\n\n" + table(head, rows)


def layers(result: dict[str, Any]) -> str:
    """By how much steps of layers that update by themselves are longer than plain ones."""
    rows = []
    for part in result["layers"]:
        for plan in ("at_once", "beside", "room"):
            for kind in ("plain", "updated", "pinning"):
                found = part.get(plan, {}).get(kind)
                if not found or not found["steps"]:
                    continue
                plain = kind == "plain"
                delay = "" if plain else f"{found['delay_median']:.1%}"
                times = (f"{found[name] / 1e3:.1f}" for name in ("median_us", "worst_us"))
                steps = f"{found['steps']:,}"
                rows.append((WORDS[plan], found["is"], steps, *times, delay))
    about = f"{part['layers']} layers, {part['tokens']:,} tokens, steps launched one by one."
    head = ("updates", "what a step has", "steps", "ms, median", "ms, worst", "longer than plain")
    return f"{about}\n\n" + table(head, rows)
