"""What the tests of policies share."""

import torch

from kvindex.layer import AttentionLayer
from tests.helpers import Case


def kept(index, case, b, h):
    """The ids that a search finds with all the slots it may want, ascending."""
    ids = index.search(case.queries(batch=index._batch), k=99).ids[b, h]
    return sorted(i for i in ids.tolist() if i >= 0)


def assert_follows_exact_in_a_layer(case: Case, name, **options):
    """Prompt, steps, updates of the window: with these options the outputs are those of `exact`."""
    outputs = []
    queries = 2 * case.tensor(500, case.batch, case.q_heads, 60, case.head_dim)
    tokens = case.tokens(60)
    for index in (case.index("exact"), case.index(name, **options)):
        layer = AttentionLayer(index, k=60, sink=3, local=4, update_every=5, full_threshold=0)
        cuts = [slice(0, 30), *(slice(i, i + 1) for i in range(30, 60))]
        steps = [layer.step(*(t[:, :, cut] for t in (queries, *tokens))) for cut in cuts]
        outputs.append(torch.cat(steps, dim=2))
    torch.testing.assert_close(outputs[1], outputs[0])
