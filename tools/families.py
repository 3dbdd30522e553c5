"""Test the adapter with a tiny random model of every decoder family of transformers.

```
PYTHONPATH=.:adapters python tools/families.py [--only NAME ...] [--check]
```

A tiny model of each family in transformers' mapping of causal language models reads a prompt and
decodes a few tokens. It does so twice: with its own attention, and inside `attach` with an index
that returns every row (the key and the value of each token). The logits must agree.

Two further tests follow for families whose logits agree:

- A longer prompt is read in chunks. If the family's rotary frequencies can change at some sequence
  length, the prompt or the answer exceeds this length (`family_switches.py`).
- Decode steps with the option `token_graph` show whether a decode step of this model could be
  captured as one CUDA graph, with an index that supports it.

The command writes `docs/adapters/families.md` and `benchmarks/results/families.json`, unless
`--check` is given. The exit status is 1 if any family's logits differ, or if a family whose logits
agreed in the stored results no longer passes.
"""

from __future__ import annotations

import argparse
import inspect
import json
import multiprocessing
import re
import resource
import time
import warnings
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import transformers
from family_sizes import VOCABULARY, build
from family_switches import CHUNK, LONG, crossed
from torch import Tensor
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES as FAMILIES

import kvindex_adapters.hf as kvhf
from kvindex.core.graphs import GRAPHS, Graph
from kvindex.layer import AttentionLayer
from kvindex_adapters.evaluate.machine import describe
from kvindex_adapters.hf.model.cache_argument import CACHE

ROOT = Path(__file__).parents[1]
PAGE, RESULTS = ROOT / "docs/adapters/families.md", ROOT / "benchmarks/results/families.json"

PROMPT, STEPS = 40, 12  # longer than sliding windows, so that tokens move into the index
REGIONS = dict(sink=2, local_window=4, update_every=4, dense_below=0)
EVERY_ROW = 500
TOLERANCE = 1e-4  # relative to the largest logit; sums in another order give small differences
CAPTURED = "it would be captured"
LIMIT_S, LIMIT_BYTES = 120, 8 << 30

NAMED = re.compile(r"^model: got \w+, ")
EQUAL, DIFFERENT, REFUSED, ERROR, NONE = "equal", "different", "refused", "error", "no tiny model"
MEANING = {
    EQUAL: "logits equal those of the model's own attention",
    DIFFERENT: "logits differ, which is a defect",
    REFUSED: "not supported: `attach` or the first step raises an error that says why",
    ERROR: "another error, which is a defect",
    NONE: "not tested, because no model of this size could be made or run",
}


class Captured(AttentionLayer):
    """An attention layer that claims to support CUDA graphs, whether or not its index does."""

    def capture_refusal(self) -> str | None:
        """Return None: this layer claims that its decode step can be captured in a CUDA graph."""
        return None

    def prepare_replay(self) -> object | None:
        """Return the same object in each call: a captured graph can be replayed in all steps."""
        return self


def captured(device: torch.device, work: object) -> Graph:
    """Raise an error instead of capturing a graph, to show that the capture was reached."""
    raise RuntimeError(CAPTURED)


def decode(model: Any, ids: Tensor, cache: Any = None, placed: bool = False) -> list[Tensor]:
    """Return logits `[1, T, V]` of the prompt, and logits `[1, 1, V]` of each decode step.

    Args:
        model: The model.
        ids: Int64 `[1, N]`, the prompt, followed by the tokens of the decode steps.
        cache: The cache to use, or None for the model's own cache.
        placed: Whether to pass `position_ids`, as `generate` does, if the model accepts them.
    """
    logits, start = [], 0
    placed = placed and "position_ids" in inspect.signature(model.forward).parameters
    with torch.no_grad():
        for stop in range(PROMPT, ids.shape[1] + 1):
            mask = torch.ones_like(ids[:, :stop])
            given: dict[str, Any] = {"attention_mask": mask, "use_cache": True, CACHE: cache}
            if placed:
                given["position_ids"] = torch.arange(start, stop)[None]
            output = model(input_ids=ids[:, start:stop], **given)
            cache, start = getattr(output, CACHE, cache), stop
            logits.append(output.logits.float())
    return logits


def served(model: Any, ids: Tensor, k: int, codec: str = "plain") -> tuple[list[Tensor], str]:
    """Return the logits of the model with the index `exact`, and how many layers used the index.

    Args:
        model: The model.
        ids: Int64 `[1, N]`, the prompt, followed by the tokens of the decode steps.
        k: Number of rows that each decode step retrieves per KV head.
        codec: Format in which the index stores keys and values (option `row_codec`).
    """
    with kvhf.attach(model, index=f"exact:row_codec={codec}", k=k, **REGIONS) as cache:
        logits = decode(model, ids, cache)
        searched = sum(layer.traffic.steps > 0 for layer in cache.attention_layers())
    return logits, f"{searched} of {len(cache.layers)} layers"


def one_graph(model: Any, ids: Tensor) -> str:
    """Return "yes" if a decode step could be one CUDA graph, and otherwise the reason why not."""
    how = dict(index="exact", k=EVERY_ROW, layer=Captured, token_graph=True, **REGIONS)
    try:
        with kvhf.attach(model, **how) as cache:
            decode(model, ids, cache, placed=True)
            reported = str(cache.report().graph)
    except Exception as error:
        return spoken(error)
    return "yes" if CAPTURED in reported else reported.partition("the last was not: ")[2]


def difference(some: list[Tensor], others: list[Tensor]) -> float:
    """Return the largest difference of two lists of logits, relative to the largest logit.

    The result is infinite if a logit is NaN.
    """
    pairs = list(zip(some, others, strict=True))
    worst = max(float((a - b).abs().nan_to_num(torch.inf).max()) for a, b in pairs)
    return worst / max(float(b.abs().max()) for _, b in pairs)


def outcome(family: str) -> dict[str, Any]:
    """Test one model family.

    Return the outcome, the reason for it, and how much the logits with kvindex differ from those
    without it.
    """
    ids = torch.randint(3, 100, (1, PROMPT + STEPS), generator=torch.Generator().manual_seed(0))
    assert ids.max() < VOCABULARY
    try:
        model = build(family)
    except Exception as error:
        return {"outcome": NONE, "words": spoken(error)}
    try:
        expected, failed = decode(model, ids), None
    except Exception as error:
        expected, failed = [], error
    try:
        logits, words = served(model, ids, EVERY_ROW)
    except Exception as error:
        if is_refusal(error):
            return {"outcome": REFUSED, "words": str(error)}
        return {"outcome": NONE if failed else ERROR, "words": spoken(failed or error)}
    if failed:
        return {"outcome": NONE, "words": spoken(failed)}
    return compare(family, model, ids, expected, logits, words)


def compare(
    family: str,
    model: Any,
    ids: Tensor,
    expected: list[Tensor],
    logits: list[Tensor],
    words: str,
) -> dict[str, Any]:
    """Compare the model's logits with an index to its logits with its own attention.

    The comparison counts only under two conditions: at least one layer has searched, and the logits
    change if other keys and values are read.
    """
    worst = difference(logits, expected)
    found = {"words": words, "difference": float(f"{worst:.1e}")}
    if words.startswith("0 "):
        return {"outcome": ERROR, **found, "words": "`attach` takes it, but no layer searches"}
    if worst > TOLERANCE:
        return {"outcome": DIFFERENT, **found}
    if difference(decode(model, ids), expected) > 0:
        return {"outcome": DIFFERENT, **found, "words": "the model is not as it was before"}
    # check that the logits depend on the rows (keys and values) that the index returns: return only
    # one row, or all rows rounded to int8 (for models that select rows themselves and ignore k)
    others = (1, "plain"), (EVERY_ROW, "int8")
    if all(difference(served(model, ids, *how)[0], expected) <= TOLERANCE for how in others):
        return {"outcome": NONE, "words": f"{words}, but its logits do not show what was read"}
    return across(family, model, ids, {**found, "graph": one_graph(model, ids)})


def across(family: str, model: Any, ids: Tensor, found: dict[str, Any]) -> dict[str, Any]:
    """Test a model family with a longer prompt, which is read in chunks.

    This is the second test of a family, and runs only after the first test has passed.

    Args:
        family: Name of the model family.
        model: A tiny model of the family.
        ids: Token ids of the prompt and later tokens, int64 `[1, N]`.
        found: What is known from the first test.

    Returns:
        The outcome of the two tests: `found`, with results of the second test added.
    """
    try:
        name, worst = crossed(family, model, ids[0])
    except Exception as error:
        outcome = EQUAL if is_refusal(error) else ERROR
        return {"outcome": outcome, **found, "crossed": spoken(error)}
    if worst > TOLERANCE:
        return {"outcome": DIFFERENT, **found, "words": f"across {name}: {worst:.1e}"}
    return {"outcome": EQUAL, **found, "crossed": name}


def is_refusal(error: Exception) -> bool:
    """Return True if the adapter raised the error because it does not support the model.

    Its messages have the form `name: got X, allowed is Y`.
    """
    ours = isinstance(error, kvhf.UnsupportedError)
    return ours or (isinstance(error, ValueError) and ": got " in str(error))


def spoken(error: Exception) -> str:
    """Return the type and the message of an error in one line of at most 200 characters."""
    return f"{type(error).__name__}: {' '.join(str(error).split())}"[:200]


def _child(family: str, answer: Any) -> None:
    resource.setrlimit(resource.RLIMIT_AS, (LIMIT_BYTES, LIMIT_BYTES))
    warnings.simplefilter("ignore")
    transformers.logging.set_verbosity_error()
    torch.set_num_threads(1)
    GRAPHS["cpu"] = captured
    answer.send(outcome(family))


def ask(family: str) -> dict[str, Any]:
    """Test one model family in a separate process, with limits of time and memory."""
    context = multiprocessing.get_context("fork")  # the libraries are loaded already
    ours, theirs = context.Pipe(duplex=False)
    process = context.Process(target=_child, args=(family, theirs))
    process.start()
    theirs.close()
    try:
        if ours.poll(LIMIT_S):
            return ours.recv()
        return {"outcome": ERROR, "words": f"no answer in {LIMIT_S} s"}
    except EOFError:
        process.join()
        return {"outcome": ERROR, "words": f"the process ended with status {process.exitcode}"}
    finally:
        process.kill()
        process.join()


def faults(found: dict[str, Any], stored: dict[str, Any]) -> Iterator[str]:
    """Yield a line for each family whose logits differ, or that passed before and now does not."""
    for family, now in found.items():
        before = stored.get(family, {}).get("outcome")
        if now["outcome"] == DIFFERENT or (before == EQUAL and now["outcome"] != EQUAL):
            yield f"{family}: was {before}, is {now['outcome']}: {now['words']}"


def page(families: dict[str, Any], machine: dict[str, Any]) -> str:
    """Return the text of `docs/adapters/families.md`."""
    counts = Counter(one["outcome"] for one in families.values())
    lines = [
        "# Families of transformers",
        "",
        f"This page lists all {len(families)} families that transformers "
        f"{machine['transformers']} maps to causal language models, and says whether `attach` "
        "supports them.",
        "",
        "`tools/families.py` tests each family with a tiny random model in float32 (torch "
        f"{machine['torch']}; sizes in `tools/family_sizes.py`) and writes this page. The model "
        f"reads a prompt of {PROMPT} tokens and runs {STEPS} decode steps. It does so twice: with "
        "its own attention, and inside `attach` with the index `exact`, which retrieves every row "
        "(a *row* is the key and the value of one token). The test compares the logits.",
        "",
        *("| outcome | families | meaning |", "|---|---|---|"),
        *(f"| {name} | {counts[name]} | {MEANING[name]} |" for name in MEANING),
        "",
        f"**Equal** means that the logits differ by at most {TOLERANCE:g} times the largest logit. "
        "Two more conditions must be met. First, the logits must change if the index returns only "
        "one row, or (for models that select rows themselves) if it returns rows rounded to int8. "
        "So the logits show which rows were read. Second, the model must be unchanged after "
        "`attach`. For families with this outcome, the column *details* says how many layers "
        "searched the index, or attended to rows that the model selected. For families with "
        "another outcome, it contains the error message.",
        "",
        "**Long prompt.** In a second test, `kvhf.generate` reads a prompt of "
        f"{LONG} tokens in chunks of {CHUNK}, and generates an answer with the index `exact`. The "
        "logits of the answer must equal those of the same model without an index "
        "(`tools/family_switches.py`). The prompt is longer than the sliding windows of all "
        "tested models. The column *long prompt* says what was tested:",
        "",
        "- `longrope`: the test also checks rotary frequencies that change when the sequence "
        "exceeds a certain length. The prompt of the test exceeds this length. In a further test "
        "of the Phi-3 family, the sequence exceeds it only during the answer.",
        "- `chunks`: the test only checks that the prompt can be read in chunks, because the "
        "rotary frequencies of this family do not depend on the length.",
        "",
        "**One graph.** The column *one graph* says whether a decode step of the model can be "
        "captured as one CUDA graph ([how to use it](transformers.md#a-token-as-one-graph)), with "
        "an index that supports CUDA graphs. This is possible for "
        f"{sum(one.get('graph') == 'yes' for one in families.values())} of the "
        f"{sum('graph' in one for one in families.values())} families that were tested.",
        "",
        *("| family | outcome | details | long prompt | one graph |", "|---|---|---|---|---|"),
    ]
    for family, one in sorted(families.items()):
        words = NAMED.sub("", " ".join(one["words"].split())).replace("|", "\\|")
        more = f"{one.get('crossed', '')} | {one.get('graph', '')}"
        lines.append(f"| {family} | {one['outcome']} | {words} | {more} |")
    return "\n".join(lines) + "\n"


def main() -> int:
    """Test the families, print what is wrong, and write the page unless `--check` is given."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--only",
        nargs="+",
        choices=list(FAMILIES),
        metavar="NAME",
        help="names of the families to test (default: all families)",
    )
    parser.add_argument(
        "--check",
        action="store_true",
        help="only test; do not write docs/adapters/families.md or its JSON file",
    )
    options = parser.parse_args()
    stored = json.loads(RESULTS.read_text(encoding="utf-8"))["families"] if RESULTS.exists() else {}
    start, found = time.perf_counter(), {}
    for family in options.only or FAMILIES:
        found[family] = ask(family)
        one = found[family]
        more = f"{one.get('crossed')}; {one.get('graph')}"
        print(f"{family}: {one['outcome']}: {one['words']}; {more}", flush=True)
    wrong = list(faults(found, stored))
    print(dict(Counter(one["outcome"] for one in found.values())), end=" ")
    print(f"in {time.perf_counter() - start:.0f} s")
    print(*(f"FAULT {line}" for line in wrong), sep="\n")
    if not options.check and not wrong:
        earlier = {name: stored[name] for name in stored if options.only and name in FAMILIES}
        families, machine = dict(sorted({**earlier, **found}.items())), describe()
        RESULTS.write_text(
            json.dumps({"machine": machine, "families": families}, indent=1) + "\n",
            encoding="utf-8",
        )
        PAGE.write_text(page(families, machine), encoding="utf-8")
    return bool(wrong)


if __name__ == "__main__":
    raise SystemExit(main())
