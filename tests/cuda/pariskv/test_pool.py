"""Sequences of different lengths in one step: each gets what it would get alone, and no block is
lost.
"""

import gc
import itertools
import time
from contextlib import nullcontext
from dataclasses import replace

import pytest
import torch
from hypothesis import settings
from hypothesis.stateful import run_state_machine_as_test

import kvindex
from kvindex.core.protocol import Hits, JoinsBatch
from kvindex.pariskv import decode_step
from kvindex_cuda.memory.slab_pool import DeviceAllocator
from kvindex_cuda.pariskv.steps.graph import WARM
from kvindex_cuda.pariskv.steps.sign_votes import SignVotesStep
from kvindex_cuda.pariskv.steps.tiered_votes import TieredVotesStep
from tests.cuda.buffers import addressed
from tests.cuda.devices import DEVICES, on, on_devices, slow_on_cpu
from tests.cuda.graphs import recorded
from tests.pool.machine import PoolMachine
from tests.support.helpers import Case, mostly_slow
from tests.support.steps import Layer

LENGTHS = [700, 5, 256, 1, 257, 900]
CASE = Case(q_heads=6, kv_heads=3, head_dim=32, value_dim=32)


@pytest.fixture(params=DEVICES)
def device(request):
    with on(request.param):
        yield request.param


def counted(device):
    """On a CPU, graphs are recorded launches."""
    return recorded() if device == "cpu" else nullcontext()


def joined(states):
    """Combine states of one sequence each into the state of a batch, with a length per sequence."""
    most = max(state.codes.shape[1] for state in states)

    def together(name):
        parts = [vars(state)[name] for state in states]
        if parts[0] is None:
            return None
        if name in ("codes", "rows", "valid"):
            parts = [
                torch.cat([part, part.new_zeros(1, most - part.shape[1], *part.shape[2:])], dim=1)
                for part in parts
            ]
        return torch.cat(parts)

    names = [name for name, part in vars(states[0]).items() if isinstance(part, torch.Tensor)]
    parts = {name: together(name) for name in names}
    return replace(states[0], **parts)


@on_devices
@pytest.mark.parametrize("preset", mostly_slow(["sampled", "fast", "paper"], "sampled", "paper"))
def test_a_ragged_step_is_that_of_each_row_alone(preset, device):
    """There are more groups than the scan has warps.

    No address is read past a sequence's length.
    """
    layers = [
        Layer.of(CASE, count, preset=preset, tokens=CASE.tokens(count + 40, seed))
        for seed, count in enumerate(LENGTHS)
    ]
    config, state = layers[0].config, joined([layer.state for layer in layers])
    queries, B, k = CASE.queries(7, len(layers)), len(layers), layers[0].k
    geometry = replace(config.geometry, device=torch.device(device))
    sizes = dict(batch=B, k=k, multiprocessors=1, ragged=True, seed=config.seed)
    if preset == "paper":
        step = TieredVotesStep(geometry, config.layout, most=max(LENGTHS), **sizes)
    else:
        sizes |= dict(query_max=config.query_max, centered=config.centered, sampled=config.sampled)
        sizes |= dict(tempered=config.tempered, together=state.regression is not None)
        step = SignVotesStep(geometry, config.layout, most=int(state.wanted.max()), **sizes)
    read, _, _blocks = addressed(state, device)
    for b, count in enumerate(LENGTHS):
        for table in (read.codes, read.rows):
            table[b, -(-count // 256) :] = 0
    with on(device):
        step(queries.to(device), read)
    want = decode_step.decode_step(queries, state, k, config)
    torch.testing.assert_close(step.output.cpu(), want.output, rtol=2e-5, atol=2e-5)
    torch.testing.assert_close(step.lse.cpu(), want.lse, rtol=2e-5, atol=2e-5)
    assert torch.equal(step.found.cpu().view(B, -1), want.found)
    ids = step.ids.cpu().view(B, CASE.kv_heads, k)
    for b in range(B):
        query = queries[b : b + 1]
        alone = decode_step.find_rows(query, state.row(b), k, config)
        for h, found in enumerate(alone.found[0].tolist()):
            assert torch.equal(ids[b, h, :found], alone.ids[0, h, :found])


def assert_all_free(index):
    """No block of the rows' pool is in use, and each is there once."""
    pool = index._store._pool
    pool.shared([])  # update the counts of what is gone
    assert [ledger for ledger in pool._ledgers.values() if ledger] == []
    assert sorted([*pool._free, *pool._unread]) == [*range(len(pool._views) * pool.slab_blocks)]


@slow_on_cpu
def test_any_interleaving_equals_separate_indexes(device):
    class Machine(PoolMachine):
        spec, begins, most = "pariskv", (300, 40), 4
        case = Case(q_heads=4, head_dim=32, value_dim=32, device=device)

        def no_leak(self):
            gc.collect()
            assert_all_free(self.pool._like)

    # errors are raised immediately
    Machine.options = dict(backend="cuda", store="host", check=True)
    examples, steps = (3, 9) if device == "cpu" else (30, 60)
    how = settings(max_examples=examples, stateful_step_count=steps, deadline=None)
    run_state_machine_as_test(Machine, settings=settings(how, derandomize=True))


@slow_on_cpu
@pytest.mark.parametrize("on_host", mostly_slow([False, True], True))
def test_lists_of_sequences_that_change_between_steps(device, on_host, monkeypatch):
    """After appends, truncations, forks and reorders, the batch's copy of each sequence's state is
    renewed.
    """
    if device == "cpu":
        monkeypatch.setattr(DeviceAllocator, "on_host", on_host)
    case = Case(q_heads=4, head_dim=32, value_dim=32, device=device)
    store = "host" if on_host else "device"
    pool = kvindex.Pool("pariskv", **case.geometry(), backend="cuda", store=store)
    number = iter(range(100))

    def append(sequence, count):
        pool.append([sequence], *case.tokens(count, next(number)))

    def check(*some):
        queries = case.queries(next(number), len(some))
        hits, attended = pool.search(some, queries, k=9), pool.attend(some, queries, k=9)
        for i, sequence in enumerate(some):
            query = queries[i : i + 1]
            want = pool[sequence].search(query, k=9)
            assert torch.equal(hits.ids[i], want.ids[0])
            want = pool.attend([sequence], query, k=9)
            torch.testing.assert_close(attended.output[i], want.output[0], rtol=1e-5, atol=1e-5)
            torch.testing.assert_close(attended.lse[i], want.lse[0], rtol=1e-5, atol=1e-5)
            assert torch.equal(attended.found[i], want.found[0])

    a, b = pool.open(), pool.open()
    append(a, 300)
    append(b, 20)
    check(a, b)
    check(b, a)
    append(b, 500)
    check(b, a)
    c = pool.fork(b)
    pool.truncate(b, 260)
    check(b, c)
    append(b, 40)  # places of rows that are in a cache
    check(b, c)
    pool.close(a)
    check(c, b)

    def asked_with_nan(call):
        call([b, c], case.queries(batch=2) * float("nan"), k=9)
        pool.truncate(b, 0)  # on a GPU, the error is raised later

    for call in (pool.attend, pool.search):
        with pytest.raises(ValueError, match="queries"):
            asked_with_nan(call)
    check(b, c)


@slow_on_cpu
@pytest.mark.parametrize("row_codec", mostly_slow(["int8", "fp8"], "int8"))
def test_coded_rows_are_read_from_the_center_of_their_sequence(device, row_codec):
    """This includes a sequence that starts again in a place whose address a graph contains."""
    case = Case(q_heads=4, head_dim=32, value_dim=32, device=device)
    options = dict(backend="cuda", store="device", row_codec=row_codec, preset="fast")
    number = iter(range(100))

    def append(sequence, count):
        keys, values = case.tokens(count, next(number))
        offset = 50 * case.tokens(1, next(number))[0].to(device)
        pool.append([sequence], keys + offset, values)

    def check(*some):
        queries = case.queries(next(number), len(some)) / 8
        hits, got = pool.search(some, queries, k=9), pool.attend(some, queries, k=9)
        for i, sequence in enumerate(some):
            own = Hits(hits.ids[i : i + 1], hits.scores[i : i + 1])
            rows = pool[sequence].fetch(own)
            folded = queries[i].double().view(2, 2, 32)
            logits = folded @ rows.keys[0].double().mT * 32**-0.5
            want = (logits.softmax(-1) @ rows.values[0].double()).flatten(0, 1)
            torch.testing.assert_close(got.output[i].double(), want, rtol=1e-3, atol=1e-3)
            want = logits.logsumexp(-1).flatten()
            torch.testing.assert_close(got.lse[i].double(), want, rtol=1e-5, atol=1e-4)

    with counted(device):
        pool = kvindex.Pool("pariskv", **case.geometry(), **options)
        a, b = pool.open(), pool.open()
        append(a, 300)
        append(b, 40)
        for _ in range(WARM + 2):
            check(a, b)
        c = pool.fork(b)
        pool.truncate(b, 0)
        append(b, 40)
        for _ in range(WARM + 2):
            check(a, b)
        check(c, b, a)
        for _ in range(WARM + 2):
            check(c)
        pool.truncate(c, 0)
        append(c, 70)
        check(c)
        check(b)


def test_a_step_finds_no_token_that_is_not_valid(device):
    case = Case(q_heads=4, head_dim=32, value_dim=32, device=device)
    pool = kvindex.Pool("pariskv", **case.geometry(), backend="cuda", store="device")
    some, sink = [pool.open(), pool.open()], 60
    for seed, (sequence, count) in enumerate(zip(some, (300, 70), strict=True)):
        valid = torch.arange(count, device=device)[None] >= sink
        pool.append([sequence], *case.tokens(count, seed), valid=valid)
    queries = case.queries(5, 2)
    ids, found = pool.search(some, queries, k=20).ids, pool.attend(some, queries, k=20)
    assert ids[ids >= 0].min() >= sink
    assert ((ids >= 0).sum(-1)[:, 0]).tolist() == [20, 10]
    for i, sequence in enumerate(some):
        want = pool.attend([sequence], queries[i : i + 1], k=20)
        torch.testing.assert_close(found.output[i], want.output[0], rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(found.lse[i], want.lse[0], rtol=1e-5, atol=1e-5)


def test_steps_that_are_alike_are_replayed_as_sequences_grow(device):
    case = Case(q_heads=4, head_dim=32, value_dim=32, device=device)
    with counted(device) as graphs:
        pool = kvindex.Pool("pariskv", **case.geometry(), backend="cuda", store="device")
        some = [pool.open(), pool.open()]
        pool.append(some, *case.tokens(300, 1, 2))
        for seed in range(6):
            if seed > 3:
                pool.append(some[1:], *case.tokens(seed, seed, 1))
            queries = case.queries(seed, 2)
            got = pool.attend(some, queries, k=9)
            for i, sequence in enumerate(some):
                want = pool.attend([sequence], queries[i : i + 1], k=9)
                torch.testing.assert_close(got.output[i], want.output[0], rtol=1e-5, atol=1e-5)
                torch.testing.assert_close(got.lse[i], want.lse[0], rtol=1e-5, atol=1e-5)
                assert torch.equal(got.found[i], want.found[0])
    if device == "cpu":
        assert (graphs.made, graphs.replays) == (1, 7 - WARM)


@pytest.mark.slow
def test_calls_may_be_in_inference_mode_or_not(device):
    case = Case(q_heads=4, head_dim=32, value_dim=32, device=device)

    def life(*modes):
        modes = itertools.cycle(modes)
        with next(modes)():
            pool = kvindex.Pool("pariskv", **case.geometry(), backend="cuda", store="device")
        some = [pool.open(), pool.open()]
        for seed in range(5):
            with next(modes)():
                pool.append(some, *case.tokens(300 if not seed else 1, seed, 2))
            with next(modes)():
                output = pool.attend(some, case.queries(seed, 2), k=9).output
            yield output
            with next(modes)():
                pool.search(some[::-1], case.queries(seed, 2), k=9)

    inside, outside = torch.inference_mode, torch.no_grad
    want = [*life(outside)]
    for modes in ([inside, outside], [outside, inside, inside]):
        with counted(device):
            got = [*life(*modes)]
        torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5)


def test_only_indexes_that_can_are_rows_of_a_batch(device):
    case = Case(q_heads=4, head_dim=32, value_dim=32, batch=2, device=device)
    index = case.index("pariskv", backend="cuda", store="device")
    index.append(*case.tokens(5))
    with pytest.raises(ValueError, match="batch_row: got an index with 2 sequences, allowed is 1"):
        index.batch_row(case.queries(), k=3)
    with pytest.raises(ValueError, match="queries: got shape"):
        index.batch_row(case.queries()[:1], k=3)
    pool = kvindex.Pool(case.index("pariskv", backend="cuda", store="device"))
    assert pool.explain().startswith("sequences: together, by kernels (with coverage, or where one")
    assert case.index("exact", backend="cuda").capability(JoinsBatch) is None
    assert case.index("pariskv").capability(JoinsBatch) is None
    with pytest.raises(ValueError, match="batch_row: got an index with backend='torch'"):
        case.index("pariskv").new_batch()


def milliseconds(call, times=20):
    """Return the shortest time of a repeated call."""
    found = []
    for _ in range(times):
        torch.cuda.synchronize()
        start = time.perf_counter()
        call()
        torch.cuda.synchronize()
        found.append((time.perf_counter() - start) * 1e3)
    return min(found)


LONG = Case(32, 8, 128, 128, torch.bfloat16, device="cuda")


@pytest.mark.gpu
@pytest.mark.parametrize("store", ["host", "device"])
def test_a_fork_of_128k_tokens_takes_a_millisecond(store):
    pool = kvindex.Pool("pariskv", **LONG.geometry(), store=store)
    sequence = pool.open()
    for seed in range(4):
        pool.append([sequence], *LONG.tokens(2**15, seed))
    queries, times = LONG.queries(), []
    pool.search([sequence], queries, k=100)
    before = pool.report()
    for _ in range(10):
        torch.cuda.synchronize()
        start = time.perf_counter()
        fork = pool.fork(sequence)
        torch.cuda.synchronize()
        times.append((time.perf_counter() - start) * 1e3)
        assert pool.report().stored_bytes == before.stored_bytes
        pool.close(fork)
    print(f"fork of {2**17} tokens, rows on the {store}: {sorted(times)[5]:.3f} ms (median)")
    assert sorted(times)[5] <= 1


@pytest.mark.gpu
def test_a_step_of_long_sequences_equals_each_alone():
    pool, lengths = kvindex.Pool("pariskv", **LONG.geometry()), [2**17, 300, 2**15 + 17, 5000]
    some = [pool.open() for _ in lengths]
    for seed, (sequence, length) in enumerate(zip(some, lengths, strict=True)):
        for start in range(0, length, 2**15):
            count = min(2**15, length - start)
            pool.append([sequence], *LONG.tokens(count, seed + start))
    queries = LONG.queries(batch=4)
    for _ in range(2):
        hits, attended = pool.search(some, queries, k=100), pool.attend(some, queries, k=100)
        for i, sequence in enumerate(some):
            query = queries[i : i + 1]
            alone = pool.search([sequence], query, k=100)
            assert torch.equal(hits.ids[i], alone.ids[0])
            want = pool.attend([sequence], query, k=100)
            torch.testing.assert_close(attended.output[i], want.output[0], rtol=2e-2, atol=2e-2)
        some, queries = some[::-1], queries.flip(0)
    together = milliseconds(lambda: pool.attend(some, queries, k=100))
    pairs = [([sequence], queries[i : i + 1]) for i, sequence in enumerate(some)]
    apart = milliseconds(lambda: [pool.attend(*pair, k=100) for pair in pairs])
    print(f"lengths {lengths}: {together:.3f} ms together, {apart:.3f} ms one after the other")
