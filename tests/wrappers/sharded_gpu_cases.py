"""Cases of `test_sharded.py` on two GPUs of one host, with NCCL."""

from __future__ import annotations

import copy
from functools import partial

import torch
import torch.distributed as dist

from kvindex.core.protocol import Attends
from kvindex.core.resident import ResidentRows
from kvindex.ops.attention import attend
from tests.support.helpers import Case, all_rows, assert_same_hits

BACKEND = "nccl"
N = 2000


def filled(name, rows, **options):
    """Make an index with rows on both GPUs and 7 resident rows, and compute the expected
    attention."""
    device = f"cuda:{dist.get_rank()}"
    torch.cuda.set_device(device)
    sizes = dict(q_heads=8, kv_heads=2, head_dim=128, value_dim=128)
    case = Case(**sizes, dtype=torch.bfloat16, device=device)
    index = case.index(f"{name}+sharded:rows={rows}:timeout_s=60", **options)
    keys, values = case.tokens(N)
    index.append(keys, values)
    resident = ResidentRows(index.geometry, 1, 16)
    more = case.tokens(7, seed=1)
    resident.add(*more, None)
    every = torch.cat([keys, more[0]], dim=2), torch.cat([values, more[1]], dim=2)
    return case, index, resident, every


def attends_to_all(name, rows, **options):
    case, index, resident, every = filled(name, rows, **options)
    got = index.capability(Attends).attend(case.queries(), resident, k=N)
    want = attend(case.queries(), *every, scale=index.geometry.scale, return_lse=True)
    # bfloat16 rounds two partial outputs and their sum
    torch.testing.assert_close(got.output, want[0], rtol=2e-2, atol=2e-2)
    torch.testing.assert_close(got.lse, want[1], rtol=1e-3, atol=1e-3)
    assert torch.equal(all_rows(index, 1).keys, every[0][:, :, :N])


def a_step_is_captured(rows):
    """A CUDA graph contains the step with its collectives, and is replayed for other queries."""
    options = dict(backend="cuda", store="host")
    case, index, resident, _ = filled("pariskv:preset=fast", rows, **options)
    index.warm_up(k=100, tokens=N)
    attends, queries = index.capability(Attends), case.queries()
    attends.attend(queries, resident, k=100)
    graph = torch.cuda.CUDAGraph()
    torch.cuda.synchronize()
    with torch.cuda.graph(graph):
        captured = attends.attend(queries, resident, k=100)
    for seed in (1, 2):
        queries.copy_(case.queries(seed))
        graph.replay()
        want = attends.attend(queries, resident, k=100)
        assert torch.equal(captured.output, want.output)
        assert torch.equal(captured.found, want.found)


def finds_what_one_gpu_finds():
    case, index, _, every = filled("exact", "own")
    one = case.index("exact")
    one.append(*(part[:, :, :N] for part in every))
    for each in (index, one):
        each.truncate(1500)
    fork = copy.deepcopy(index)
    for each in (fork, one):
        got = each.search(case.queries(), k=50)
        assert_same_hits(got, one.search(case.queries(), k=50), close=1e-4)


def cases(ranks, every):
    """Map names to cases."""
    kernels = dict(backend="cuda", store="host")
    found = {"finds": finds_what_one_gpu_finds}
    for rows in ("own", "best"):
        found[f"attends, exact, {rows}"] = partial(attends_to_all, "exact", rows)
        fast = partial(attends_to_all, "pariskv:preset=fast", rows, **kernels)
        found[f"attends, pariskv, {rows}"] = fast
    found["captured"] = partial(a_step_is_captured, "own")
    return found
