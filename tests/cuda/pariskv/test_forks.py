"""Forks on kernels: forks share full blocks, and each continues as an index of its own."""

import copy
import gc
import random
import time

import pytest
import torch

from kvindex.layer import AttentionLayer
from tests.cuda.devices import DEVICES, on, slow_on_cpu
from tests.cuda.pariskv.test_rollback import placed
from tests.support.helpers import (
    Case,
    assert_same_snapshot,
    left_padding,
    part,
    slow,
    snapshot,
)
from tests.support.sequences import SIZES, Sequence


@pytest.fixture(params=DEVICES)
def device(request):
    with on(request.param):
        yield request.param


@slow_on_cpu
@pytest.mark.parametrize(
    ("spec", "store"),
    [("pariskv", "host"), slow("pariskv:preset=paper", "device"), ("exact", "host")],
)
def test_any_interleaving_equals_separate_indexes(device, spec, store):
    case, draw = placed(device), random.Random(3)

    def made():
        return case.index(spec, backend="cuda", store=store)

    def separate(index):
        other = made()
        other.load_state_dict(index.state_dict())
        return other

    index = made()
    index.append(*case.tokens(700), valid=left_padding([0, 70], 700, device))
    pairs, deeds = [(index, separate(index))], 16 if device == "cpu" else 60
    for number in range(deeds):
        at = draw.randrange(len(pairs))
        index, truth = pairs[at]
        deed = draw.choice(["append"] * 3 + ["fork"] * 3 + ["truncate", "reorder", "back", "drop"])
        if deed == "fork" and len(pairs) < 3:
            pairs.append((copy.deepcopy(index), separate(truth)))
        elif deed == "drop" and len(pairs) > 1:
            del pairs[at]
        elif deed == "back":
            before = index.checkpoint()
            index.append(*case.tokens(300, seed=99))
            index.rollback(before)
        elif deed in ("append", "truncate", "reorder"):
            tokens, cut = case.tokens(draw.choice([1, 256, 300]), seed=number), draw.randrange(400)
            for one in (index, truth):
                if deed == "append":
                    one.append(*tokens)
                elif deed == "truncate":
                    one.truncate(max(len(one) - cut, 100))
                else:
                    one.reorder(torch.tensor([1, 0], device=device))
        del index, truth
        gc.collect()
        for mine, alone in pairs if device == "cuda" or number % 4 == 3 else ():
            assert_same_snapshot(snapshot(mine, case.queries()), snapshot(alone, case.queries()))


@slow_on_cpu
def test_layers_that_fork_decode_by_themselves(device):
    """Forks also have captured steps of their own."""
    case = placed(device)
    count = 3 if device == "cpu" else 40
    sequence, other = (Sequence.of(case, 40 + count, seed=seed) for seed in (0, 5))
    texts = [sequence, sequence.then(40, other)]

    def made():
        return AttentionLayer(case.index("pariskv", backend="cuda", store="host"), k=9, **SIZES)

    layer = made()
    sequence.feed(layer, 0, 30)
    for token in range(30, 40):
        sequence.feed(layer, token, token + 1)
    alone = [made() for _ in texts]
    for one in alone:
        one.load_state_dict(layer.state_dict())
    forks = [copy.deepcopy(layer) for _ in texts]
    for token in range(40, 40 + count):
        for fork, one, text in zip(forks, alone, texts, strict=True):
            got, want = (text.feed(some, token, token + 1) for some in (fork, one))
            torch.testing.assert_close(got, want)
    assert len(layer) == 40


LONG = Case(q_heads=32, kv_heads=8, head_dim=128, value_dim=128, dtype=torch.bfloat16)


@pytest.mark.gpu
@pytest.mark.parametrize("store", ["host", "device"])
def test_a_fork_of_128k_tokens_takes_a_millisecond_and_copies_no_row(store):
    case, length = Case(**{**vars(LONG), "device": "cuda"}), 2**17
    index = case.index("pariskv", backend="cuda", store=store)
    for start in range(0, length, 2**15):
        index.append(*case.tokens(2**15, seed=start))
    queries = case.queries()
    want = index.search(queries, k=100).ids
    pinned = index._store.pinned_bytes
    times = []
    for _ in range(10):
        torch.cuda.synchronize()
        before, start = torch.cuda.memory_allocated(), time.perf_counter()
        fork = copy.deepcopy(index)
        torch.cuda.synchronize()
        times.append((time.perf_counter() - start) * 1e3)
        taken = torch.cuda.memory_allocated() - before
        assert taken < 2**20, taken  # tables of addresses
        assert torch.equal(fork.search(queries, k=100).ids, want)
        del fork
        gc.collect()
    assert index._store.pinned_bytes == pinned
    print(f"fork of {length} tokens, rows on the {store}: {sorted(times)[5]:.3f} ms (median)")
    assert sorted(times)[5] <= 1


@pytest.mark.gpu
def test_a_fork_goes_on_after_its_source_is_gone():
    case = Case(**{**vars(LONG), "device": "cuda"})
    index = case.index("pariskv", backend="cuda", store="host")
    tokens = case.tokens(5000)
    index.append(*part(tokens, 0, 4000))
    forks = [copy.deepcopy(index) for _ in range(3)]
    del index
    gc.collect()
    for fork in forks:
        fork.append(*part(tokens, 4000, 5000))
    alone = case.index("pariskv", backend="cuda", store="host")
    alone.append(*part(tokens, 0, 4000))
    alone.append(*part(tokens, 4000, 5000))
    for fork in forks:
        assert_same_snapshot(snapshot(fork, case.queries()), snapshot(alone, case.queries()))
