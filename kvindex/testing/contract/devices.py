"""Checks that all tensors stay on the device of the index."""

from __future__ import annotations

import torch

from kvindex.bases.index import BaseIndex
from kvindex.core.protocol import Hits
from kvindex.testing.cases import Case, left_padding, part, rope
from kvindex.testing.compare import ROUNDED, assert_same_hits
from kvindex.testing.contract.common import Make
from kvindex.testing.elsewhere import PLACE, known

K, PROMPT, N = 70, 300, 340


def check_tensors_stay_on_their_device(make: Make, case: Case) -> None:
    """An index on a device creates no tensors on the CPU by mistake, and reads none with numpy.

    The device is simulated (`kvindex.testing.elsewhere`), so no GPU is needed.
    """
    if case.device != "cpu":
        return
    with known():
        ours, values = _life(make, case, torch.device("cpu"))
        theirs, others = _life(make, case, PLACE)
    assert_same_hits(ours, theirs, close=1e-4 if case.dtype == torch.float32 else ROUNDED)
    if torch.equal(ours.ids, theirs.ids):
        assert torch.equal(values, others), "rows are those of the CPU"


def _life(make: Make, case: Case, device: torch.device) -> tuple[Hits, torch.Tensor]:
    """Create an index on a device, call its methods, and return the result of the last search.

    The hits, and the values of the tokens that they select, are copied to the CPU.
    """
    B, H, D = case.batch, case.q_heads, case.head_dim
    index = make(device=device, rope=rope(D).to(device))
    keys, values = (tensor.to(device) for tensor in case.tokens(N))
    valid = left_padding([4] * B, N).to(device)
    queries = case.tensor(7, B, H, N, D).to(device)
    positions = torch.arange(N, device=device)
    index.observe_queries(queries[:, :, :PROMPT], positions[:PROMPT])
    index.append(*part((keys, values), 0, PROMPT), valid=valid[:, :PROMPT])
    index.end_prompt()
    index.search(queries[:, :, PROMPT], k=K)
    for at in range(PROMPT, PROMPT + 10):
        index.observe_queries(queries[:, :, at : at + 1], positions[at : at + 1])
    index.append(*part((keys, values), PROMPT, N), valid=valid[:, PROMPT:])
    index.truncate(N - 10)
    hits = index.search(queries[:, :, -1], k=K)
    rows = index.fetch(hits)
    for name, tensor in (("hits.ids", hits.ids), ("rows.keys", rows.keys)):
        assert tensor.device == device, f"{name} are on {device}, got {tensor.device}"
    index.nbytes()
    if isinstance(index, BaseIndex):
        index.bytes_per_key()
    weight = hits.log_weight if hits.log_weight is None else hits.log_weight.cpu()
    return Hits(hits.ids.cpu(), hits.scores.cpu(), weight), rows.values.cpu()
