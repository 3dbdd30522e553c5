"""The protocol of every index (encode, append, search, fetch), and optional protocols
(capabilities).

These letters are used in all signatures, docstrings and pages: `B` sequences in the batch, `H`
query heads, `G` KV heads (`H % G == 0`), `N` tokens in the index, `D` head dimension, `M` subspaces
of `m = D / M` dimensions, `C` candidates after the coarse stage, `K` rows selected per KV head,
`Dv` value dimension, `T` new tokens.

Every index has these invariants, which `kvindex.testing.check_index` tests:

- Token ids are 0, 1, 2, … in the order in which tokens were appended. Padded tokens have ids, too.
- `search` returns exactly `k` slots for each KV head. The ids of one head are distinct, scores are
  descending, and equal scores are ordered by id. Unused slots have id -1 and score `-inf`.
- An id below -1 belongs to a row that is not a token, such as a summary of several tokens. `fetch`
  can return this row.
- A call that raises an error leaves the index unchanged.

Import all names from this package, and not from its modules.
"""

# Imports and names are in the order of the reference page, so they are not sorted.
# ruff: noqa: I001, RUF022
from kvindex.core.protocol.index import KVIndex
from kvindex.core.protocol.results import Hits, ErrorLimit, Rows, Attended, Placement, Codes, UNUSED
from kvindex.core.protocol.capabilities import (
    ObservesQueries,
    ReportsCoverage,
    LimitsError,
    ReportsRowBytes,
    PlacesRows,
    CountsTokens,
    Explains,
    WeighsRows,
    RunsOps,
    ExpandsBatch,
    SearchesShard,
    KeepsState,
    ChecksState,
    ReportsRecipe,
    ReportsMemory,
    EncodesBlocks,
    LearnsOnce,
    AppendsAsync,
    Reserves,
    ReservesAhead,
    WarmsUp,
)
from kvindex.core.protocol.steps import (
    Attends,
    AttendsToAll,
    CapturesAll,
    CapturesStep,
    CapturesTokens,
    ChecksTokens,
    DecodesStep,
    IndexBatch,
    JoinsBatch,
    LimitsSteps,
)
from kvindex.core.protocol.executor import Contents, Executor

__all__ = [
    "KVIndex",
    "Hits",
    "ErrorLimit",
    "Rows",
    "Attended",
    "Placement",
    "Codes",
    "UNUSED",
    "ObservesQueries",
    "ReportsCoverage",
    "LimitsError",
    "ReportsRowBytes",
    "PlacesRows",
    "CountsTokens",
    "Explains",
    "WeighsRows",
    "RunsOps",
    "ExpandsBatch",
    "SearchesShard",
    "KeepsState",
    "ChecksState",
    "ReportsRecipe",
    "ReportsMemory",
    "EncodesBlocks",
    "LearnsOnce",
    "AppendsAsync",
    "Reserves",
    "ReservesAhead",
    "WarmsUp",
    "Attends",
    "AttendsToAll",
    "DecodesStep",
    "CapturesStep",
    "CapturesTokens",
    "CapturesAll",
    "ChecksTokens",
    "IndexBatch",
    "JoinsBatch",
    "LimitsSteps",
    "Contents",
    "Executor",
]
