"""What two ranks do together with a model in `test_parallel.py`."""

from __future__ import annotations

import tempfile
from functools import partial
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from transformers import AutoModelForCausalLM

from kvindex_adapters.hf import attach
from kvindex_adapters.hf.parallel import check_heads, heads_over_ranks
from kvindex_adapters.hf.unsupported import UnsupportedError
from tests.adapters import tiny

REGIONS = dict(sink=3, local_window=4, update_every=5, dense_below=0)
STEPS = [30, 10, *[1] * 12]
FAMILIES = ("llama", "qwen3")
SHARDED = "exact+sharded:block=8"


def of_heads(family):
    """A model whole, and the same with its heads over the ranks."""
    whole, folder = tiny.build(family), [tempfile.mkdtemp()]
    dist.broadcast_object_list(folder)
    if dist.get_rank() == 0:
        whole.save_pretrained(Path(folder[0]))
    dist.barrier()
    shared = AutoModelForCausalLM.from_pretrained(
        folder[0], dtype=torch.float32, **heads_over_ranks()
    )
    return whole, shared.eval()


def greedy(model, inputs, cache=None):
    options = dict(max_new_tokens=16, do_sample=False, pad_token_id=0)
    return model.generate(**inputs, past_key_values=cache, eos_token_id=None, **options)


def is_as_one_process(whole, model, index):
    """Logits within rounding, and the same greedy tokens, of a padded batch."""
    inputs = tiny.prompt(2, sum(STEPS), padded=True)
    want = tiny.dense_steps(whole, inputs, STEPS)
    with attach(model, index=index, k=1000, **REGIONS) as cache:
        got = tiny.steps(model, cache, inputs, STEPS)
        report, index_of_layer = cache.report(), cache.indexes()[0]
        cache.reset()
        answer = greedy(model, inputs, cache)
    for mine, theirs in zip(got, want, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-4)
    assert torch.equal(answer, greedy(whole, inputs))
    assert (report.rank, report.ranks) == (dist.get_rank(), dist.get_world_size())
    assert f"memory of rank {report.rank} of {report.ranks}: " in str(report)
    with attach(whole, index="exact", k=1000, **REGIONS) as cache:
        tiny.steps(whole, cache, inputs, STEPS)
        rows, one = torch.tensor(report.nbytes["rows"]), cache.report()
    dist.all_reduce(rows)
    assert int(rows) == one.nbytes["rows"], "ranks have the rows once"
    assert report.rows_read == one.rows_read
    return index_of_layer.geometry


def heads_are_shared(family):
    whole, shared = of_heads(family)
    geometry = is_as_one_process(whole, shared, "exact")
    assert (geometry.q_heads, geometry.kv_heads) == (2, 1)


def tokens_are_shared(rows):
    whole = tiny.build("llama")
    geometry = is_as_one_process(whole, whole, f"{SHARDED}:rows={rows}")
    assert (geometry.q_heads, geometry.kv_heads) == (4, 2)


def what_heads_over_ranks_lack_is_refused():
    with pytest.raises(ValueError, match="got 2 processes for 1 KV heads, allowed are numbers"):
        check_heads(tiny.build("llama", num_key_value_heads=1).config)
    shared = of_heads("llama")[1]
    with attach(shared, index="exact") as cache:
        tiny.steps(shared, cache, tiny.prompt(1, 9), [9])
        with pytest.raises(UnsupportedError, match="cache: got one of a model whose heads"):
            cache.save("nowhere")
        cache.reset()
        with pytest.raises(UnsupportedError, match="cache: got one of a model whose heads"):
            cache.load("nowhere")
    with (
        pytest.raises(
            UnsupportedError, match="index: got one whose tokens are sharded, of a model"
        ),
        attach(shared, index=f"{SHARDED}+reuse"),
    ):
        pass


def cases(ranks, every):
    """By name."""
    return {
        **{f"heads, {family}": partial(heads_are_shared, family) for family in FAMILIES},
        **{f"tokens, {rows}": partial(tokens_are_shared, rows) for rows in ("own", "best")},
        "refused": what_heads_over_ranks_lack_is_refused,
    }
