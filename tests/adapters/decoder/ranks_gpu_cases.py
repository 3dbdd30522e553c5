"""`ranks_cases` on two GPUs of one host, with NCCL, and further cases that need GPUs."""

from __future__ import annotations

from functools import partial

import torch

from kvindex_adapters.llama.heads import HeadRanks
from tests.adapters.decoder import ranks_cases
from tests.adapters.decoder.ranks_cases import decoders, heads_are_one_graph
from tests.support.rank_kernels import device, kernels

BACKEND = "nccl"


def logits_are_those_of_one_gpu(**how):
    """Products in half precision by Triton differ only by the rounding of a few more sums."""
    with kernels():
        one, shared = decoders("llama", torch.bfloat16, **how)
        sessions = [decoder.session(index=None) for decoder in (one, shared)]
        for decoder, session in zip((one, shared), sessions, strict=True):
            decoder.read(torch.arange(3, 60), session)
        for token in (5, 60, 7):
            token = torch.tensor([token], device=device())
            want, got = (session.step(token).float() for session in sessions)
            assert torch.nn.functional.cosine_similarity(got, want).item() > 0.999


def sums_in_one_kernel():
    """Sums use memory that both GPUs can access, also in a graph, or NCCL without such memory."""
    torch.cuda.set_device(device())
    ranks = HeadRanks.of(device(), one_shot=True)
    for dtype in (torch.bfloat16, torch.float32):
        for size in (8, 4096, 10_000, 2**17):
            part = torch.arange(size, device=device()).remainder(64).to(dtype)
            assert torch.equal(ranks.sum(part.clone()), 2 * part)
    part = torch.ones(4096, dtype=torch.bfloat16, device=device())
    ranks.sum(part.clone())
    graph = torch.cuda.CUDAGraph()
    torch.cuda.synchronize()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        found = ranks.sum(part + 0)
    for number in (1, 3):
        part.fill_(number)
        graph.replay()
        assert (found == 2 * number).all()


def cases(ranks, every):
    """Map names to cases."""
    return {
        **ranks_cases.cases(ranks, every),
        "heads, qwen3": partial(heads_are_one_graph, "qwen3"),
        "one kernel": sums_in_one_kernel,
        "logits": logits_are_those_of_one_gpu,
        "logits, one kernel": partial(logits_are_those_of_one_gpu, one_shot=True),
        "heads, one kernel": partial(heads_are_one_graph, "llama", one_shot=True),
    }
