"""Cases in which two ranks decode together, with one graph per decode step (`test_ranks.py`).

On CPUs, kernels are emulated, graphs are recorded functions, and messages use gloo. On GPUs,
messages use NCCL inside a CUDA graph.
"""

from __future__ import annotations

import re
from functools import partial

import torch

from kvindex_adapters.decoder import Decoder, Sampling
from kvindex_adapters.hf import attach
from kvindex_adapters.llama.heads import HeadRanks
from tests.adapters.decoder.families import ids_of, model_of
from tests.adapters.hf.generation.test_generation import Words
from tests.cuda.graphs import WholeGraph, counted
from tests.support.rank_kernels import device, kernels

REGIONS = dict(sink=4, local_window=8, update_every=8, dense_below=0)
ALL = 400
"""Number of rows to retrieve: all, so that ranks differ from one process only by rounding."""


def answers(decoder, index, count=12, sampling=None, graphs=True, fused=True):
    index_options = {"backend": "cuda"} if device() == "cpu" and index else {}
    attach = None if index is None else {**REGIONS, "index_options": index_options}
    options = dict(index=index, k=ALL, attach_options=attach, graphs=graphs, fused=fused)
    sampling = sampling or Sampling()
    return decoder.generate(ids_of(60), max_new_tokens=count, sampling=sampling, **options)


def decoders(name, dtype=torch.float32, **how):
    """Make a decoder with all heads, and one with this rank's heads."""
    more = {"layer_types": ["full_attention"] * 2} if name == "qwen3" else {}
    model = model_of(name, num_hidden_layers=2, head_dim=64, **more).to(device(), dtype)
    ranks = HeadRanks.of(device(), **how)
    return Decoder.of(model, Words()), Decoder.of(model, Words(), ranks=ranks)


def heads_are_one_graph(name, **how):
    """Each rank's decode step is one graph, including sums over ranks, also for sampled tokens."""
    warm = Sampling(temperature=1.0, top_p=0.9, seed=3)
    with kernels():
        one, shared = decoders(name, **how)
        for index, sampling in (("pariskv", None), (None, warm)):
            where = torch.device(device()).type
            with counted(where, *([WholeGraph] if where == "cpu" else [])) as graphs:
                got = answers(shared, index, sampling=sampling)
                # the other steps end the prompt, or warm up
                assert graphs.replays == 11 - (2 if index else 1)
            want = answers(one, index, sampling=sampling, graphs=False)
            assert torch.equal(got.answer_ids, want.answer_ids)
            steps = answers(shared, index, sampling=sampling, graphs=False)
            assert torch.equal(steps.answer_ids, want.answer_ids)


def tokens_are_one_graph():
    with kernels():
        one = decoders("llama")[0]
        where = torch.device(device()).type
        with counted(where, *([WholeGraph] if where == "cpu" else [])) as graphs:
            got = answers(one, "pariskv+sharded:block=16")
            assert graphs.replays == 11 - 2
        want = answers(one, "pariskv", graphs=False)
        assert torch.equal(got.answer_ids, want.answer_ids)
        assert got.report.rows_read == want.report.rows_read


def transformers_tokens_are_one_graph():
    """The graph contains transformers' own forward pass, with the messages between ranks."""
    with kernels():
        model, found = model_of("llama", num_hidden_layers=2, head_dim=64).to(device()), []
        more = {"index_options": {"backend": "cuda"}} if device() == "cpu" else {}
        where, given = torch.device(device()).type, dict(do_sample=False, max_new_tokens=12)
        for index in ("pariskv+sharded:block=16", "pariskv"):
            with (
                counted(where, *([WholeGraph] if where == "cpu" else [])),
                attach(model, index=index, k=ALL, token_graph=True, **REGIONS, **more) as cache,
            ):
                given["past_key_values"] = cache
                ids = ids_of(60)[None].to(device())
                found.append(model.generate(input_ids=ids, pad_token_id=0, **given))
                replays = re.search(r"(\d+) of 11 tokens were replays", str(cache.report()))
                assert int(replays[1]) > 4
        assert torch.equal(*found)


def cases(ranks, every):
    """Map names to cases."""
    return {
        "heads": partial(heads_are_one_graph, "llama"),
        "tokens": tokens_are_one_graph,
        "transformers": transformers_tokens_are_one_graph,
    }
