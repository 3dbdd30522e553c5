"""Counters of decode steps, which vLLM reports at `/metrics` and in `LLM.get_metrics()`.

vLLM's worker processes count the steps, and another process answers `/metrics`. So a worker writes
its counters to a file in the format of prometheus_client's multiprocess mode. vLLM's process reads
these files whenever it reports its metrics:

- If vLLM uses the multiprocess mode itself (with several API servers), the file is in the same
  folder as vLLM's own.
- Otherwise it is in the folder of `reports`, and a collector in vLLM's process reads this folder.
"""

from __future__ import annotations

import os
import weakref
from dataclasses import astuple, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from kvindex.pariskv.block_layout import BLOCK
from kvindex_adapters.vllm import reports
from kvindex_adapters.vllm.costs import Limit
from kvindex_adapters.vllm.options import Options

FOLDER = "PROMETHEUS_MULTIPROC_DIR"
"""Environment variable with the folder of prometheus_client's multiprocess mode."""

COUNTERS = {
    "vllm:kvindex_searched_steps": "Decode steps of a sequence that searched an index.",
    "vllm:kvindex_dense_steps": "Decode steps of a sequence that used full attention.",
    "vllm:kvindex_rows_read": (
        "Rows (the key and value of a token) that decode steps read, for each KV head and layer "
        "with an index."
    ),
    "vllm:kvindex_rows_stored": "Rows that decode steps would have read with full attention.",
}
"""Names and descriptions of the counters, in the order of the fields of `Steps`."""


LOOKUPS = {
    "vllm:kvindex_rows_looked_up": (
        "Rows in host memory that decode steps looked up in the row cache of the device, in all KV "
        "heads and layers of the first worker process."
    ),
    "vllm:kvindex_rows_cached": "Looked-up rows that the row cache contained.",
}
"""Names and descriptions of the counters of an engine with rows in host memory."""


@dataclass(frozen=True)
class Steps:
    """What the decode steps of one batch read.

    Args:
        searched: Number of sequences that searched.
        dense: Number of other sequences.
        read: Number of rows that each KV head of a layer read, in all sequences together.
        stored: Number of tokens of all sequences together.
    """

    searched: int
    dense: int
    read: int
    stored: int

    @staticmethod
    def of(
        lengths: Any,
        options: Options,
        limit: Limit,
        *,
        search: bool = True,
        found: int | None = None,
    ) -> Steps:
        """Count the steps of sequences.

        Args:
            lengths: Number of tokens of each sequence, integers `[B]`.
            options: Options of the plug-in.
            limit: The sequences that search.
            search: Whether decode steps of long sequences search in this batch.
            found: Number of rows that searches have found for each KV head, in all sequences
                together. None: each search finds `k` rows, or all if there are fewer.
        """
        lengths = np.asarray(lengths, dtype=np.int64)
        stored = int(lengths.sum())
        if not search:
            return Steps(0, len(lengths), stored + (found or 0), stored)
        indexed = np.maximum(lengths - options.local_window, 0) // BLOCK * BLOCK
        searched = (lengths >= limit.dense_below) & (indexed > options.sink)
        each = np.minimum(options.most_rows, indexed - options.sink) if found is None else 0
        read = np.where(searched, each + options.sink + lengths - indexed, lengths)
        count = int(searched.sum())
        return Steps(count, len(lengths) - count, int(read.sum()) + (found or 0), stored)


class Counters:
    """The counters of one process.

    Args:
        folder: Folder of the file.
        engine: Number of the engine among those of data parallelism.
        lookups: Whether to count lookups in a row cache too.
    """

    def __init__(self, folder: Path, engine: int, *, lookups: bool = False) -> None:
        from prometheus_client.mmap_dict import MmapedDict, mmap_key

        # the collector reads the type of the metrics from the first part of the name
        self._file = MmapedDict(str(folder / f"counter_kvindex-{os.getpid()}.db"))
        weakref.finalize(self, self._file.close)
        labels = ["engine"], [str(engine)]
        self._keys, self._lookups = (
            [mmap_key(name, f"{name}_total", *labels, text) for name, text in names.items()]
            for names in (COUNTERS, LOOKUPS if lookups else {})
        )
        for key in self._keys + self._lookups:
            self._file.read_value(key)  # writes 0 for a new key

    @staticmethod
    def open(engine: int, *, lookups: bool = False) -> Counters | None:
        """Return the counters of this process, or None if no process would read them.

        Args:
            engine: Number of the engine among those of data parallelism.
            lookups: Whether to count lookups in a row cache too.
        """
        path = os.environ.get(FOLDER)
        folder = Path(path) if path else reports.folder()
        if folder is None or not folder.is_dir():
            return None
        return Counters(folder, engine, lookups=lookups)

    def add(self, steps: Steps) -> None:
        """Add the steps of one batch."""
        self._add(self._keys, astuple(steps))

    def add_lookups(self, looked_up: int, cached: int) -> None:
        """Add rows that were looked up, and the number of these that the row cache contained."""
        if looked_up:
            self._add(self._lookups, (looked_up, cached))

    def _add(self, keys: list[str], values: tuple[int, ...]) -> None:
        for key, value in zip(keys, values, strict=True):
            self._file.write_value(key, self._file.read_value(key)[0] + value, 0.0)


def report() -> None:
    """Report the counters of worker processes with vLLM's metrics.

    Repeated calls have no effect.
    """
    if FOLDER in os.environ:  # vLLM reads the files itself
        return
    from prometheus_client import REGISTRY
    from prometheus_client.multiprocess import MultiProcessCollector

    folder = str(reports.open_folder())
    if folder not in _reported:
        MultiProcessCollector(REGISTRY, path=folder)
        _reported.add(folder)


_reported: set[str] = set()
"""Folders that this process reports."""
