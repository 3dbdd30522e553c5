"""Layers of different lengths in one step of kernels: each gets what it would get alone."""

import math
from functools import partial
from unittest import mock

import pytest
import torch
from hypothesis import settings
from hypothesis.stateful import run_state_machine_as_test

import kvindex
from kvindex.core.resident import ResidentRows
from kvindex.layer import AttentionLayer
from kvindex.pool import together
from kvindex_cuda.memory.slab_pool import DeviceAllocator
from kvindex_cuda.pariskv import executor
from tests.cuda.devices import DEVICES, mostly_slow_on_cpu, on, slow_on_cpu
from tests.cuda.graphs import counted
from tests.pool.layers import SIZES, FailsAt, LayersMachine, tokens
from tests.support.helpers import Case, mostly_slow, sampled, slow

CLOSE = dict(rtol=1e-5, atol=1e-5)


@pytest.fixture(params=DEVICES)
def device(request):
    with on(request.param):
        yield request.param


def case_on(device):
    return Case(q_heads=4, head_dim=32, value_dim=32, device=device)


def made(case, spec="pariskv", *, store="device", **sizes):
    index = case.index(spec, backend="cuda", store=store, check=True)
    return AttentionLayer(index, k=7, **{**SIZES, **sizes})


def pools(case, lengths, **options):
    """A pool of sequences with the given lengths, and a separate layer for each."""
    pool, alone = kvindex.LayerPool(made(case, **options)), {}
    for seed, length in enumerate(lengths):
        alone[sequence := pool.open()] = made(case, **options)
        if length:
            given = tokens(case, length, seed, 1)
            pool.step([sequence], *given)
            alone[sequence].step(*given)
    return pool, alone


def step(pool, alone, some, case, count, seed):
    """Run a step of the pool, and compare each sequence with its separate layer."""
    given = tokens(case, count, 100 + seed, len(some))
    got = pool.step(some, *given)
    for i, sequence in enumerate(some):
        want = alone[sequence].step(*(part[i : i + 1] for part in given))
        torch.testing.assert_close(got[i : i + 1], want, **CLOSE)


@pytest.mark.parametrize("examples", mostly_slow([1, 4], 1))
def test_any_interleaving_equals_separate_layers(device, examples):
    class Machine(LayersMachine):
        spec, begins, most, slack = "pariskv", (300, 40, 2), 5, 1e-5
        case = case_on(device)

    Machine.options = dict(backend="cuda", store="host", check=True)
    examples, steps = (examples, 10) if device == "cpu" else (2 * examples, 30)
    how = settings(max_examples=examples, stateful_step_count=steps, deadline=None)
    run_state_machine_as_test(Machine, settings=settings(how, derandomize=True))


@slow_on_cpu
@pytest.mark.parametrize(("preset", "on_host"), sampled(["paper", "fast"], [False, True]))
def test_presets_and_rows_on_the_host(device, preset, on_host, monkeypatch):
    if device == "cpu":
        monkeypatch.setattr(DeviceAllocator, "on_host", on_host)
    case = case_on(device)
    options = dict(spec=f"pariskv:preset={preset}", store="host" if on_host else "device")
    pool, alone = pools(case, [300, 2, 40], dense_below=0, **options)
    for seed in range(8):
        step(pool, alone, [*alone], case, 1, seed)
    assert (pool.report().together, pool.report().alone) == (24, 3)
    for sequence, layer in alone.items():
        mine, want = pool[sequence].traffic, layer.traffic
        assert (mine.steps, float(mine.rows_full)) == (want.steps, float(want.rows_full))
        assert float(mine.rows_read) == float(want.rows_read)


def test_lists_that_change_between_steps(device):
    """Sequences in another order, one more or fewer, several tokens, a truncation, and dense
    sequences among them.
    """
    case = case_on(device)
    pool, alone = pools(case, [40, 30, 20, 0, 3])
    a, b, c, new, short = alone
    lists = [([a, b, c], 1), ([c, a, b], 1), ([c, a], 1), ([b, new, a, short], 1), ([b, c], 2)]
    for seed, (some, count) in enumerate(lists):
        step(pool, alone, some, case, count, seed)
    for layers in (pool, alone[b]):
        layers.truncate(*([b] if layers is pool else []), 28)
    for seed, (some, count) in enumerate([([b, a], 9), ([a, b, c, new], 2), ([b, a, short], 1)]):
        step(pool, alone, some, case, count, 10 + seed)
    for sequence, layer in alone.items():
        found, want = pool[sequence].state_dict(), layer.state_dict()
        assert all(torch.equal(found[name], part) for name, part in want.items())


@pytest.mark.slow
def test_a_list_is_one_step_of_the_executor_and_is_replayed(device):
    """Updates begin for one sequence and not for the other."""
    case = case_on(device)
    with counted(device) as graphs:
        pool, alone = pools(case, [30, 42], update_every=6, dense_below=0)
        before = graphs.made
        for seed in range(20):
            step(pool, alone, [*alone], case, 1, seed)
        assert graphs.made > before
    report = pool.report()
    assert (report.together, report.alone) == (40, 2)
    assert pool.explain().startswith(
        "sequences: tokens that search, or have but a window, together"
    )


def test_what_is_wrong_is_refused_and_changes_nothing(device):
    case = case_on(device)
    pool, alone = pools(case, [30, 20])
    some = [*alone]
    step(pool, alone, some, case, 1, 0)
    queries, keys, values = tokens(case, 1, 1, 2)
    with pytest.raises(ValueError, match="keys: got dtype"):
        pool.step(some, queries, keys.half(), values)
    with pytest.raises(ValueError, match=r"queries.shape\[2\] \(tokens\): got 0"):
        pool.step(some, queries[:, :, :0], keys[:, :, :0], values[:, :, :0])
    with pytest.raises(ValueError, match="without duplicates"):
        pool.step(some[:1] * 2, queries, keys, values)
    if device == "cpu":
        wrong = keys.clone()
        wrong[1, 0, 0, 3] = math.nan
        with pytest.raises(ValueError, match="keys: got"):
            pool.step(some, queries, wrong, values)
        pool, alone = pools(case, [30, 3])
        wrong = queries.clone()
        wrong[1, 0, 0, 3] = math.nan  # for a sequence that has only a window
        with pytest.raises(ValueError, match="queries: got"):
            pool.step(some, wrong, keys, values)
        pool, alone = pools(case, [31, 21])
    assert [len(pool[each]) for each in some] == [31, 21]
    step(pool, alone, some, case, 1, 2)


@slow_on_cpu
def test_a_step_that_fails_after_a_cut_is_undone(device):
    case = case_on(device)
    pool, alone = pools(case, [30, 33])
    a, _ = alone
    some = [*alone]
    step(pool, alone, some, case, 1, 0)
    pool.truncate(a, 29)
    alone[a].truncate(29)
    with (
        mock.patch.object(AttentionLayer, "end_joined", FailsAt("end_joined", 2)),
        pytest.raises(MemoryError),
    ):
        pool.step(some, *tokens(case, 1, 1, 2))
    assert [len(pool[each]) for each in some] == [29, 34]
    step(pool, alone, some, case, 1, 2)


class Fails:
    """A function that raises MemoryError at its n-th call."""

    def __init__(self, function, last):
        self.function, self.left = function, last

    def __get__(self, one, kind):
        return partial(self, one)

    def __call__(self, *given, **options):
        self.left -= 1
        if self.left == 0:
            raise MemoryError("no more")
        return self.function(*given, **options)


@slow_on_cpu
@pytest.mark.parametrize(
    ("whose", "name", "last", "others"),
    [
        slow(together, "ResidentRows", 1, 3),  # a buffer for one more
        slow(ResidentRows, "row", 1, 2),  # the place of one that has left
        (AttentionLayer, "lie_in", 2, 3),  # the second of those that leave
    ],
)
def test_a_list_that_finds_no_memory_is_followed_by_others(device, whose, name, last, others):
    case = case_on(device)
    pool, alone = pools(case, [30, 33, 40])
    some = [*alone]
    step(pool, alone, some[:2], case, 1, 0)
    failing = Fails(getattr(whose, name), last)
    with mock.patch.object(whose, name, failing), pytest.raises(MemoryError):
        pool.step(some[::-1][:others], *tokens(case, 1, 1, others))
    for seed, count in enumerate((2, 2, 3)):
        step(pool, alone, some[:count], case, 1, 2 + seed)


def test_a_sequence_of_a_batch_is_refused(device):
    case = case_on(device)
    pool, _ = pools(case, [3, 30])
    some = [*pool]
    pool[some[0]].reorder(torch.tensor([0, 0]))
    with pytest.raises(ValueError, match="keys: got shape"):
        pool.step(some, *tokens(case, 1, 0, 2))
    assert [len(pool[each]) for each in some] == [3, 30]


@pytest.mark.parametrize("part", ["update_state", "put_valid"])
def test_a_first_search_that_finds_no_memory_leaves_nothing_half_read(device, part):
    """Tokens of which some are padding."""
    case = case_on(device)
    valid = torch.arange(300, device=case.device)[None] >= 20
    failed, index = (case.index("pariskv", backend="cuda", store="device") for _ in range(2))
    for each in (failed, index):
        each.append(*case.tokens(300), valid=valid)
    failing = mock.patch.object(executor, part, Fails(getattr(executor, part), 1))
    with failing, pytest.raises(MemoryError):
        failed.search(case.queries(), k=7)
    want = index.search(case.queries(), k=7)
    assert torch.equal(failed.search(case.queries(), k=7).ids, want.ids)


def test_pools_of_whole_indexes_read_no_resident_rows(device):
    """A pool of layers and a pool of indexes use the same buffers in turn."""
    case = case_on(device)
    pool, alone = pools(case, [30, 20])
    other = kvindex.Pool(case.index("pariskv", backend="cuda", store="device"))
    some = [other.open(), other.open()]
    other.append(some, *case.tokens(30, 3, 2))
    queries = case.queries(5, 2)
    want = other.attend(some, queries, k=7)
    step(pool, alone, [*alone], case, 1, 0)
    got = other.attend(some, queries, k=7)
    torch.testing.assert_close(got.output, want.output, **CLOSE)


LONG = Case(32, 8, 128, 128, torch.bfloat16, device="cuda")


@pytest.mark.gpu
def test_a_token_of_long_sequences_equals_each_alone_and_takes_less_time():
    lengths = [2**17, 300, 2**15 + 17, 5000]
    pools_of = [
        kvindex.LayerPool(AttentionLayer(LONG.index("pariskv", backend="cuda"))) for _ in range(2)
    ]
    some = [[pool.open() for _ in lengths] for pool in pools_of]
    for i, length in enumerate(lengths):
        for start in range(0, length, 2**13):
            given = tokens(LONG, min(2**13, length - start), i + start, 1)
            for pool, mine in zip(pools_of, some, strict=True):
                pool.step([mine[i]], *given)
    times = [[], []]
    for seed in range(40):
        given = tokens(LONG, 1, 10**6 + seed, len(lengths))
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        together = pools_of[0].step(some[0], *given)
        end.record()
        torch.cuda.synchronize()
        times[0].append(begin.elapsed_time(end))
        begin.record()
        apart = [
            pools_of[1].step([one], *(part[i : i + 1] for part in given))
            for i, one in enumerate(some[1])
        ]
        end.record()
        torch.cuda.synchronize()
        times[1].append(begin.elapsed_time(end))
        torch.testing.assert_close(together, torch.cat(apart), rtol=2e-2, atol=2e-2)
    middle = [sorted(each)[20] for each in times]
    print(f"lengths {lengths}: {middle[0]:.3f} ms together, {middle[1]:.3f} ms one by one (median)")
    assert pools_of[0].report().together > 0


AUTO = dict(k="auto", error=0.5, dense_below=0)


def auto(case, **options):
    """Return an empty layer with a limit of the error."""
    index = case.index("pariskv", backend="cuda", store="device", check=True)
    return AttentionLayer(index, **{**SIZES, **AUTO, **options})


def sharp(case, count, seed, batch):
    """Return queries for which some rows have most of the attention weight, keys and values."""
    queries, *rows = tokens(case, count, seed, batch)
    return (2 * queries, *rows)


@mostly_slow_on_cpu("lengths", [[300, 140, 90], [500, 33]], [300, 140, 90])
def test_sequences_choose_their_numbers_of_rows_together(device, lengths):
    """A sequence that has too few measured outputs, or is dense, runs alone."""
    check_numbers_of_rows(case_on(device), lengths)


@slow_on_cpu
def test_sequences_of_latents_choose_their_numbers_of_rows_together(device):
    case = Case(20, 1, 64, 48, value_in_key=True, device=device)
    check_numbers_of_rows(case, [300, 140, 90])


def check_numbers_of_rows(case, lengths):
    pool, alone = kvindex.LayerPool(auto(case)), {}
    for seed, length in enumerate((*lengths, 20)):
        alone[sequence := pool.open()] = auto(case)
        given = sharp(case, length, seed, 1)
        pool.step([sequence], *given)
        alone[sequence].step(*given)
    *long, short = alone
    counts = set()
    for seed, some in enumerate([long, long[::-1], [*long, short], long, long]):
        for count in (1, 2) if seed == 1 else (1,):
            given = sharp(case, count, 100 + 2 * seed + count, len(some))
            got = pool.step(some, *given)
            for i, sequence in enumerate(some):
                want = alone[sequence].step(*(part[i : i + 1] for part in given))
                torch.testing.assert_close(got[i : i + 1], want, **CLOSE)
    for sequence, layer in alone.items():
        mine, want = pool[sequence].traffic, layer.traffic
        assert mine.steps == want.steps
        if mine.steps:
            assert torch.equal(mine.found, want.found)
            counts |= {*want.found.nonzero().flatten().tolist()}
    assert pool.report().together == 6 * len(long)
    assert len(counts) > 1


@mostly_slow_on_cpu("change", ["chunk", "truncation", "fixed"], "chunk")
def test_a_limit_of_one_sequence_may_change(device, change):
    """A chunk of tokens changes the limit of its sequence; the others keep theirs."""
    case = case_on(device)
    pool, alone = kvindex.LayerPool(auto(case)), {}
    for seed, length in enumerate((300, 200)):
        alone[sequence := pool.open()] = auto(case)
        for layer in (pool[sequence], alone[sequence]):
            layer.step(*sharp(case, length, seed, 1))
    first, _ = alone
    for seed in range(6):
        if seed == 3:
            for layer in (pool[first], alone[first]):
                if change == "chunk":
                    layer.step(*(3 * part for part in sharp(case, 100, 50, 1)))
                elif change == "truncation":
                    layer.truncate(150)
                else:
                    layer.k, layer.error = 7, None
        given = sharp(case, 1, 200 + seed, 2)
        got = pool.step([*alone], *given)
        for i, layer in enumerate(alone.values()):
            want = layer.step(*(part[i : i + 1] for part in given))
            torch.testing.assert_close(got[i : i + 1], want, **CLOSE)
    together = pool.report().together
    assert together == (6 if change == "fixed" else 12)


def test_a_pool_of_an_index_whose_kernels_choose_no_number_runs_alone(device):
    """An index without fused steps searches within the limit one sequence after another."""
    case = case_on(device)
    layer = AttentionLayer(case.index("pariskv", backend="torch"), **{**SIZES, **AUTO})
    pool = kvindex.LayerPool(layer)
    some = [pool.open(), pool.open()]
    for seed, sequence in enumerate(some):
        pool.step([sequence], *sharp(case, 60, seed, 1))
    pool.step(some, *sharp(case, 1, 5, 2))
    assert (pool.report().together, pool.report().alone) == (0, 4)
    assert [pool[sequence].traffic.steps for sequence in some] == [1, 1]


@pytest.mark.parametrize("limited", [False, True])
def test_what_runs_together_is_explained(device, limited):
    """With a limit of the error, a sequence with only a window runs alone."""
    case = case_on(device)
    pool = kvindex.LayerPool(auto(case) if limited else made(case))
    some = [pool.open() for _ in range(3)]
    for seed, (sequence, length) in enumerate(zip(some, (60, 90, 2), strict=True)):
        pool.step([sequence], *tokens(case, length, seed, 1))
    before = pool.report()
    pool.step(some, *tokens(case, 1, 9, 3))
    after = pool.report()
    assert not len(pool[some[2]].index)
    counted = after.together - before.together, after.alone - before.alone
    assert counted == ((2, 1) if limited else (3, 0))
    together, _, alone = pool.explain().partition(", together, by kernels; ")
    assert ("window" in together, "only a window" in alone) == (not limited, limited)
    assert ("too few measured outputs" in alone) is limited
