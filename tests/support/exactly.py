"""Check an index with settings for which it must find what exact search finds."""

from collections.abc import Callable, Iterable

import torch

from kvindex import KVIndex
from kvindex.layer import AttentionLayer
from tests.support.helpers import Case, assert_same_hits


def unchanged(index: KVIndex) -> None:
    """Change nothing. It stands for a search before the first change."""


def assert_stays_exact(
    case: Case,
    index: KVIndex,
    exact: KVIndex,
    changes: Iterable[Callable[[KVIndex], object]],
    ks: tuple[int, ...] = (5, 200),
) -> None:
    """Check that both indexes find the same `k` rows after each change of both."""
    for seed, change in enumerate(changes):
        change(index), change(exact)
        queries = case.queries(seed, exact._batch)
        for k in ks:
            assert_same_hits(index.search(queries, k=k), exact.search(queries, k=k), close=1e-5)


def assert_follows_exact_in_a_layer(
    case: Case, name: str, k: int = 9, policy: str = "mean_share", **options: object
) -> None:
    """Check that outputs of a prompt, steps and window updates are those of `exact`."""
    outputs = []
    queries = 2 * case.tensor(500, case.batch, case.q_heads, 60, case.head_dim)
    tokens = case.tokens(60)
    for index in (case.index("exact", group=policy), case.index(name, group=policy, **options)):
        layer = AttentionLayer(index, k=k, sink=3, local_window=4, update_every=5, dense_below=0)
        cuts = [slice(0, 30), *(slice(i, i + 1) for i in range(30, 60))]
        steps = [layer.step(*(t[:, :, cut] for t in (queries, *tokens))) for cut in cuts]
        outputs.append(torch.cat(steps, dim=2))
    torch.testing.assert_close(outputs[1], outputs[0])
