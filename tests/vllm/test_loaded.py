"""Which blocks a KV connector may have loaded, and when they are encoded."""

from types import SimpleNamespace

import torch

from kvindex_adapters.vllm.loaded import Admitted, as_prompts, last_slots, sharing


def step(new=(), cached=(), resumed=()):
    """Return a step of vLLM's scheduler, with names of requests and their computed tokens."""
    names = [name for name, _ in cached]
    running = SimpleNamespace(
        req_ids=names,
        num_computed_tokens=[count for _, count in cached],
        resumed_req_ids=set(resumed),
    )
    made = [SimpleNamespace(req_id=name, num_computed_tokens=count) for name, count in new]
    return SimpleNamespace(scheduled_new_reqs=made, scheduled_cached_reqs=running)


def test_requests_are_admitted_once():
    admitted = Admitted(lambda: ["c", "a", "b", "d"])
    admitted.update(step(new=[("a", 512), ("b", 0)], cached=[("c", 700), ("d", 900)]))
    assert admitted.of_batch() == [0, 512, 0, 0]
    admitted.update(step(cached=[("a", 600), ("c", 701), ("d", 768)], resumed=["d"]))
    assert admitted.of_batch() == [0, 0, 0, 768]
    admitted.update(step(cached=[("d", 769)]))
    assert admitted.of_batch() == []


def test_admitted_requests_read_their_prompts():
    counts = [0, 512, 0]  # without an entry for padding
    for reading, expected in (
        (None, [False, True, False, False]),
        (torch.tensor([True, False, False]), [True, True, False, False]),
        (torch.tensor([False, True, True, False, True]), [False, True, True, False]),
    ):
        assert as_prompts(reading, counts, 4).tolist() == expected


def test_the_last_slots_of_whole_blocks():
    tables = torch.tensor([[3, 7, 1], [4, 2, 5], [6, 8, 9]]).int()
    assert last_slots(tables, [600, 0, 256], 256).tolist() == [1023, 2047, 1791]
    assert last_slots(tables, [255, 0], 256).tolist() == []
    # pages of 512 tokens have two blocks
    assert last_slots(tables, [0, 800], 512).tolist() == [2303, 2559, 1279]
    assert last_slots(tables, [1300], 512).tolist() == [1791, 2047, 3839, 4095, 767]


def test_sequences_that_share_blocks():
    tables = torch.tensor([[3, 7, 1], [3, 2, 5], [6, 1, 9], [0, 0, 0]]).int()
    slots = last_slots(tables, [0, 512], 256)
    assert sharing(tables, slots, 10, 256).tolist() == [True, True, False, False]
    assert not sharing(tables, last_slots(tables, [255], 256), 10, 256).any()
    slots = last_slots(tables, [1536], 512)
    assert sharing(tables, slots, 10, 512).tolist() == [True, True, True, False]
