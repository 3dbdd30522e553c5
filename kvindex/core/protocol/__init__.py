"""The protocol every index speaks (encode, append, search, fetch), and its capabilities.

Letters used in every signature, docstring and page:
`B` batch, `H` query heads, `G` KV heads (`H % G == 0`), `N` tokens in the index, `D` head
dimension, `M` subspaces of `m = D / M` dimensions, `C` candidates after the coarse stage,
`K` rows selected per KV head. `Dv` is the value dimension, `T` a number of new tokens.

Invariants (`kvindex.testing.check_index` holds an index to them):
  - ids are dense and in append order, the first token is 0; an invalid token keeps its id;
  - `search` returns exactly `k` slots: ids distinct within a row, scores descending, equal
    scores by the lower id, unused slots `-1` with score `-inf`;
  - an id below -1 names a row that is not a token; `fetch` resolves it;
  - a call that raises leaves the index as it was.

Indexes, results, capabilities, steps and executors have a file each; names are imported from here.
"""

# ruff: noqa: I001, RUF022  # in the order of the reference page
from kvindex.core.protocol.index import KVIndex
from kvindex.core.protocol.results import Hits, Rows, Attended, Placement, Codes, UNUSED
from kvindex.core.protocol.capabilities import (
    ObservesQueries,
    ReportsCoverage,
    ReportsRowBytes,
    PlacesRows,
    CountsTokens,
    Explains,
    WeighsRows,
    RunsOps,
    ExpandsBatch,
    SearchesShare,
    KeepsState,
    ChecksState,
    ReportsRecipe,
    ReportsMemory,
    EncodesBlocks,
    AppendsAsync,
    Reserves,
    ReservesAhead,
    WarmsUp,
)
from kvindex.core.protocol.steps import Attends, DecodesStep, CapturesStep, IndexBatch, JoinsBatch
from kvindex.core.protocol.executor import Contents, Executor

__all__ = [
    "KVIndex",
    "Hits",
    "Rows",
    "Attended",
    "Placement",
    "Codes",
    "UNUSED",
    "ObservesQueries",
    "ReportsCoverage",
    "ReportsRowBytes",
    "PlacesRows",
    "CountsTokens",
    "Explains",
    "WeighsRows",
    "RunsOps",
    "ExpandsBatch",
    "SearchesShare",
    "KeepsState",
    "ChecksState",
    "ReportsRecipe",
    "ReportsMemory",
    "EncodesBlocks",
    "AppendsAsync",
    "Reserves",
    "ReservesAhead",
    "WarmsUp",
    "Attends",
    "DecodesStep",
    "CapturesStep",
    "IndexBatch",
    "JoinsBatch",
    "Contents",
    "Executor",
]
