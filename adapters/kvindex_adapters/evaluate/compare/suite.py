"""The suite `field`: every index at three budgets and at its published setting.

`LINES` says how each index is set up for a budget, and `PUBLISHED` lists the settings that the
authors of a method published.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import kvindex
from kvindex_adapters.evaluate.compare.records import SKIPPED, Key, Record
from kvindex_adapters.evaluate.compare.settings import Plan

SUITES = ("field",)
"""Names of suites."""

BUDGETS = (128, 512, 2048)
"""Numbers of rows (keys and values of tokens) that a KV head retrieves in a decode step."""

PUBLISHED_BUDGET = "published"
"""Name of the budget that the authors of a method published, next to those of `BUDGETS`."""

LINES = {
    **{name: f"{name}:budget={{k}}" for name in ("h2o", "snapkv", "streaming", "triattention")},
    "ctkvr": "ctkvr:rho={5k/2}",
}
"""Name of an index -> how it is set up for a budget, if this depends on the budget.

`{k}` stands for the budget, and `{5k/2}` for 2.5 times the budget, rounded up: the published length
of the lists of `ctkvr`.
"""


@dataclass(frozen=True)
class Published:
    """A published setting of a method.

    Args:
        index: Name and options of the index.
        k: Number of rows, or None if `fraction` is given.
        fraction: Number of rows as a fraction of the tokens of the prompt, or None.
        source: Where the setting is published.
    """

    index: str
    k: int | None = None
    fraction: float | None = None
    source: str = ""

    def rows(self, tokens: int) -> int:
        """Return the number of rows for a prompt with `tokens` tokens."""
        return self.k if self.k is not None else max(math.ceil((self.fraction or 0) * tokens), 1)


PUBLISHED = {
    "arkvale": Published(
        "arkvale",
        1024,
        None,
        "authors' script: 32 pages of 32 tokens, from a cache of 4,096 tokens",
    ),
    "clusterkv": Published("clusterkv", 1024, None, "paper: 1K to 2K tokens"),
    "ctkvr": Published("ctkvr", 512, None, "paper: 512 rows, lists of 1,280 keys"),
    "doublesparsity": Published("doublesparsity", None, 1 / 16, "paper: 1/16 of the tokens"),
    "dsa": Published("dsa", 2048, None, "DeepSeek-V3.2: 2,048 rows, by a trained indexer"),
    "h2o": Published("h2o", 2048, None, "authors' script: 1,024 heavy hitters, 1,024 recent rows"),
    "icecache": Published("icecache", 256, None, "paper: 256 tokens"),
    "infllm": Published("infllm", 2048, None, "authors' code: 16 blocks of 128, and a window"),
    "locks": Published("locks", 2016, None, "package: 126 pages of 16 tokens"),
    "louiskv": Published("louiskv+reuse:tau=0.7", 512, None, "paper: 512 to 2,048 rows, τ = 0.7"),
    "magicpig": Published(
        "magicpig", 1024, None, "authors' code: 10 bits, 150 tables; k limits the sampled rows"
    ),
    "pariskv": Published("pariskv:preset=paper", 100, None, "paper: 100 rows"),
    "pqcache": Published("pqcache", None, 0.05, "authors' script: half of 1/10 of the tokens"),
    "quest": Published("quest", 1024, None, "authors' scripts: 512 to 4,096 tokens in pages of 16"),
    "retroinfer": Published("retroinfer", None, 0.0325, "paper: 1.8% and 23.2% of the clusters"),
    "sentencekv": Published("sentencekv", 1024, None, "authors' scripts: 1,024 tokens"),
    "shadowkv": Published(
        "shadowkv", 2432, None, "authors' code: 2,048 rows and 48 outlier chunks of 8; rank 160"
    ),
    "snapkv": Published("snapkv", 2048, None, "authors' code: 2,048 rows"),
    "socket": Published(
        "socket", None, 0.1, "authors' code: 1/10 of the tokens, with 60 tables of 8 bits"
    ),
    "squeezed": Published("squeezed", None, 0.1, "authors' script: threshold at 90%"),
    "streaming": Published("streaming", 2004, None, "authors' script: 4 first, 2,000 latest rows"),
    "triattention": Published("triattention", 2048, None, "paper: 2,048 rows"),
}
"""Name of an index -> its published setting. Indexes without one are missing."""


@dataclass(frozen=True)
class FieldPlan(Plan):
    """The cells of the suite `field`: each method at each budget, on each text and length.

    Args:
        methods: Names of indexes, or names with options. `{k}` in the options stands for the
            budget.
        names: Names of the texts.
        explicit: Whether the user has named the methods. Then measurements that have failed before
            are repeated.
    """

    indexes: tuple[str, ...] = ()
    ks: tuple[int | str, ...] = BUDGETS
    tasks: tuple[str, ...] = ()
    tokens: tuple[int, ...] = ()
    tries: int = 1
    methods: tuple[str, ...] = ()
    names: tuple[str, ...] = ()
    explicit: bool = False
    _cells: dict[int, dict[tuple[str, int], Record]] = field(
        default_factory=dict, repr=False, compare=False
    )

    def __post_init__(self) -> None:
        specs = (index for method in self.methods for index, _, _ in settings_of(method, 2**20))
        object.__setattr__(self, "indexes", tuple(dict.fromkeys(specs)))
        if len(set(self.methods)) < len(self.methods):
            raise ValueError(
                f"index: got {list(self.methods)}, allowed is a list without repeated values"
            )
        if len(set(self.names)) < len(self.names):
            raise ValueError("text: got the same text twice, allowed is a list of different texts")
        super().__post_init__()

    @property
    def texts(self) -> tuple[str | None, ...]:
        """Names of the texts to measure."""
        return self.names

    def pairs(self, tokens: int) -> list[tuple[str, int | str]]:
        """Return the indexes to measure at a prompt length, each with `k`."""
        return list(self._at(tokens))

    def about(self, key: Key) -> Record:
        """Return the method and the budgets to which the result `key` belongs."""
        return dict(self._at(key.tokens).get((str(key.index), int(key.k)), {}))

    def failed(self, keys: Sequence[Key], words: str) -> Iterator[tuple[Key, Record]]:
        """Yield the reason for each cell that is not measured, because the index has failed."""
        for key in keys:
            about = {**self.about(key), "words": words, "failed": True}
            yield replace(key, kind=SKIPPED), about

    def retries(self, key: Key) -> bool:
        """Return True if the user has named the index of the cell."""
        return self.explicit and key.index in self.indexes

    def _at(self, tokens: int) -> dict[tuple[str, int], Record]:
        """Return the cells at a prompt length, those of the same index next to each other."""
        if tokens not in self._cells:
            found: dict[str, dict[int, Record]] = {}
            for method in self.methods:
                for index, k, budget in settings_of(method, tokens):
                    cells = found.setdefault(index, {})
                    cell = cells.setdefault(k, {"method": method, "budgets": []})
                    cell["budgets"] = [*cell["budgets"], budget]
            self._cells[tokens] = {
                (index, k): cells[k] for index, cells in found.items() for k in sorted(cells)
            }
        return self._cells[tokens]


def names() -> list[str]:
    """Return the names of all indexes. `exact` comes first, and FAISS last, as it may abort.

    Of FAISS, `faiss-ivfpq` comes first. It takes longest, so another process can measure the others
    meanwhile.
    """
    own = sorted((name for name in kvindex.names() if name.startswith("faiss-")), reverse=True)
    others = sorted({*kvindex.names()} - {"exact", *own})
    return [*(name for name in kvindex.names() if name == "exact"), *others, *own]


def settings_of(method: str, tokens: int) -> Iterator[tuple[str, int, str]]:
    """Yield name and options of an index, `k`, and the name of the budget, for each budget."""
    for k in BUDGETS:
        yield filled(LINES.get(method, method), k), k, str(k)
    known = PUBLISHED.get(method)
    if known is not None:
        k = known.rows(tokens)
        same = LINES.get(method) if known.index == method else None
        yield filled(same, k) if same else known.index, k, PUBLISHED_BUDGET


def filled(line: str, k: int) -> str:
    """Replace `{k}` and `{5k/2}` in the options of an index by numbers for a budget of `k` rows."""
    return line.replace("{k}", str(k)).replace("{5k/2}", str(math.ceil(5 * k / 2)))


def described(method: str) -> dict[str, Any]:
    """Return the published setting of a method for the table of the suite."""
    known = PUBLISHED.get(method)
    if known is None:
        return {"method": method, "published": None, "source": None}
    rows = {"k": known.k, "fraction": known.fraction}
    return {"method": method, "published": {"index": known.index, **rows}, "source": known.source}
