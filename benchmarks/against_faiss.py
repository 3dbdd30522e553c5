"""Search of one layer's keys on a CPU beside FAISS's own indexes, at the same recall.

    python -m benchmarks.against_faiss --text FILE [--tokens N] [--queries T] [--every L] [-k K]
        [--rounds R] [--index SPEC …] [--model … --gguf-file … --lora …] --json OUT

A model reads N tokens; keys and the newest T tokens' queries of every L-th layer are searched. The
truth are the k rows a KV head that `exact` finds. Of FAISS only `search` is timed, KV head by KV
head with a group's queries at once, and its candidates count as if somebody chose among them
rightly: less work than a whole search, and no less recall. A family's settings are tried from the
cheapest on; what counts is the fastest whose recall is that of the first index, else the one of the
highest recall. All take turns on each query; figures are medians over queries and layers.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any

import torch
from rich.progress import Progress
from torch import Tensor

import kvindex
from benchmarks import report
from benchmarks.common.reading import add_model, described, ids_of, loaded, reported, write
from kvindex.bases import faiss_library
from kvindex_adapters.evaluate.capture import Captured, capture

Search = Callable[[Tensor], Any]
"""Of queries `[H, D]`: a sequence of ids for each KV head."""

POOLS, PROBES, WIDTHS, FACTORS = (1, 2, 4), (4, 8, 16, 32, 64), (128, 256, 512, 1024), (2, 4, 8, 16)
"""Candidates over k; lists read; HNSW's list of candidates; refined candidates over those kept."""


@dataclass(frozen=True)
class Family:
    """FAISS indexes of one kind: a line for its factory, and settings for a search."""

    line: str
    settings: list[dict[str, Any]]


def families(tokens: int, head_dim: int) -> dict[str, Family]:
    """Those that are measured, for so many keys."""
    codes = f"PQ{head_dim // 2}x4fs,RFlat"
    lists = 4 * int(tokens**0.5)
    probes = [dict(nprobe=probes) for probes in PROBES]
    refined = [dict(pool=2, k_factor_rf=factor) for factor in FACTORS]
    both = [a | b for a, b in product(probes, refined)]
    return {
        "flat": Family("Flat", [dict(pool=pool) for pool in POOLS]),
        "IVF": Family(f"IVF{lists},Flat", [dict(pool=2, **probe) for probe in probes]),
        "HNSW": Family("HNSW32", [dict(pool=2, efSearch=width) for width in WIDTHS]),
        "PQ, fast scan": Family(codes, refined),
        "IVF, PQ, fast scan": Family(f"IVF{lists},{codes}", both),
    }


class Faiss:
    """A family's index for each KV head, of keys `[G, N, D]`."""

    def __init__(self, family: Family, keys: Tensor) -> None:
        faiss, start = faiss_library.library(), time.perf_counter()
        self._indexes = []
        for own in keys.float().contiguous().numpy():
            index = faiss.index_factory(keys.shape[-1], family.line, faiss.METRIC_INNER_PRODUCT)
            index.train(own)
            index.add(own)
            self._indexes.append(index)
        self.build_s = time.perf_counter() - start

    def search(self, setting: dict[str, Any], k: int) -> Search:
        """With a setting, which stays until another is set."""
        faiss, options = faiss_library.library(), dict(setting)
        count = k * options.pop("pool")
        space = faiss.ParameterSpace()

        def found(queries: Tensor) -> list[Any]:
            grouped = queries.unflatten(0, (len(self._indexes), -1)).numpy()
            pairs = zip(self._indexes, grouped, strict=True)
            return [index.search(own, count)[1] for index, own in pairs]

        for index in self._indexes:
            for name, value in options.items():
                space.set_index_parameter(index, name, value)
        return found


def recall(found: list[Any], truth: Tensor) -> float:
    """Share of the rows `[G, k]` that are among those found for the KV head."""
    pairs = [
        (set(ids), set(map(int, some.reshape(-1))))
        for ids, some in zip(truth.tolist(), found, strict=True)
    ]
    return sum(len(ids & some) for ids, some in pairs) / truth.numel()


def measured(search: Search, queries: Tensor, truth: Tensor, rounds: int) -> dict[str, float]:
    """Milliseconds and recall over queries `[T, H, D]`; the least of some rounds of each."""
    times, recalls = [], []
    for own, ids in zip(queries, truth, strict=True):
        each = []
        for _ in range(rounds):
            start = time.perf_counter()
            found = search(own)
            each.append(1e3 * (time.perf_counter() - start))
        times.append(min(each))
        recalls.append(recall(found, ids))
    return {"ms": statistics.median(times), "recall": statistics.mean(recalls)}


def layer(one: Captured, given: argparse.Namespace) -> dict[str, Any]:
    """What all find in one layer: by index or family, the settings that were tried."""
    keys, queries = one.keys.float(), one.queries.float().transpose(0, 1).contiguous()
    g = dict(q_heads=queries.shape[1], kv_heads=len(keys), head_dim=keys.shape[-1], scale=one.scale)
    found: dict[str, Any] = {}
    truth = torch.empty(0)
    for spec in ["exact", *given.index]:
        index, start = kvindex.create(spec, **g), time.perf_counter()
        index.append(keys[None], keys[None])
        build, search = (
            time.perf_counter() - start,
            lambda q, i=index: list(i.search(q[None], k=given.k).ids[0]),
        )
        if spec == "exact":
            truth = torch.stack([index.search(own[None], k=given.k).ids[0] for own in queries])
        search(queries[0])
        found[spec] = [measured(search, queries, truth, given.rounds) | {"build_s": build}]
    for name, family in families(*keys.shape[1:]).items():
        made = Faiss(family, keys)
        found[name] = [
            {"setting": setting, "build_s": made.build_s}
            | measured(made.search(setting, given.k), queries, truth, given.rounds)
            for setting in family.settings
        ]
    return found


def chosen(layers: list[dict[str, Any]], first: str) -> dict[str, dict[str, Any]]:
    """By index or family, medians over layers of the setting that counts."""
    least = statistics.mean(one[first][0]["recall"] for one in layers)
    result = {}
    for name, tried in layers[0].items():
        means = []
        for number, setting in enumerate(tried):
            some = [one[name][number] for one in layers]
            figures = {
                part: statistics.median(each[part] for each in some) for part in ("ms", "build_s")
            }
            figures["recall"] = statistics.mean(each["recall"] for each in some)
            means.append(figures | {"setting": setting.get("setting", {})})
        enough = [one for one in means if one["recall"] >= least]
        best = max(means, key=lambda one: one["recall"])
        result[name] = min(enough, key=lambda one: one["ms"]) if enough else best
    return result


def arguments() -> argparse.Namespace:
    """What the command was told."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--text", type=Path, required=True)
    parser.add_argument("--tokens", type=int, default=32_768)
    parser.add_argument("--queries", type=int, default=16)
    parser.add_argument("--every", type=int, default=10)
    parser.add_argument("-k", type=int, default=100)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument(
        "--index", nargs="+", default=["pariskv", "pariskv:preset=precise", "quest"]
    )
    add_model(parser)
    return parser.parse_args()


def main() -> None:
    """Read, measure, write and print."""
    given = arguments()
    model, tokenizer = loaded(given)
    ids = ids_of(tokenizer, given.text.read_text(), given.tokens)
    with Progress() as progress:
        shown = reported(progress, "reading")
        layers = capture(model, ids, queries=given.queries, on_progress=shown)[:: given.every]
    result: dict[str, Any] = {"tokens": given.tokens, "k": given.k, **described(given)}
    with faiss_library.threads(torch.get_num_threads()):
        result["layers"] = [layer(one, given) for one in layers]
    result["chosen"] = chosen(result["layers"], given.index[0])
    write(result, given.json)
    print(report.TABLES["against_faiss"](result))


if __name__ == "__main__":
    main()
