"""Kernels run correctly with other threads and processes: equal ids, and no process ends."""

import time
import weakref
from concurrent.futures import ThreadPoolExecutor
from queue import SimpleQueue
from threading import Event, Thread, get_ident
from types import SimpleNamespace

import pytest
import torch
from numba.core.caching import IndexDataCacheFile

import kvindex
from kvindex.cpu import threads
from kvindex.cpu.kernels.compile import CodeFiles, keep
from kvindex.cpu.pariskv import executor
from kvindex.cpu.state import State
from tests.support.helpers import mostly_slow
from tests.support.processes import printed

SETUP = """
import os, sys, threading, torch, kvindex
from kvindex.cpu import views
from kvindex.cpu.pariskv import sign_votes, tiered_votes
sign_votes.FEW_KEYS = tiered_votes.FEW_KEYS = views.PARTS_FROM = 2**14
torch.manual_seed(0)
def made(line="pariskv"):
    torch.manual_seed(0)
    index = kvindex.create(line, q_heads=6, kv_heads=3, head_dim=64, backend="cpu")
    index.append(torch.randn(2, 3, 3000, 64), torch.randn(2, 3, 3000, 64))
    return index
queries = torch.randn(2, 6, 64)
index = made()
def ids(index=index):
    return index.search(queries, k=50).ids
"""


LINES = ["pariskv", "pariskv:preset=fast", "pariskv:preset=paper"]


def said(code, before=""):
    """Run code in a new process, and return what it prints."""
    return printed(before + SETUP + code)


@pytest.mark.parametrize("line", mostly_slow(LINES[::2], "pariskv"))
def test_one_to_sixteen_threads_find_the_same(line):
    code = f"""
torch.set_num_threads(1)
index = made({line!r})
want = ids(index)
for count in (2, 3, 16, 1):
    torch.set_num_threads(count)
    assert torch.equal(ids(index), want), count
print(sum(thread.name == "kvindex-cpu" for thread in threading.enumerate()))
"""
    # each of 6 groups has a thread: with more threads, blocks are scanned in parallel
    assert 1 < int(said(code)) < 16


@pytest.mark.slow
def test_ops_of_one_to_three_threads_are_the_same():
    code = """
from kvindex import cpu
estimates, table = torch.randn(2, 3, 2, 9000), torch.randn(2, 3, 9000, 64)
votes, rows = (estimates * 9).int(), torch.randint(-1, 9000, (2, 3, 4000))
def all_of():
    agreed = cpu.group.agree(estimates, "mean_share", scale=1.0, softcap=None)
    taken = cpu.select.candidates(votes, torch.tensor([900, 9000]))
    return agreed, taken, cpu.fetch.gather_rows(table, rows)
torch.set_num_threads(1)
want = all_of()
for count in (2, 3):
    torch.set_num_threads(count)
    assert all(torch.equal(*pair) for pair in zip(all_of(), want)), count
print(sum(thread.name == "kvindex-cpu" for thread in threading.enumerate()))
"""
    assert int(said(code)) == 2


@pytest.mark.slow
def test_a_child_of_a_fork_searches():
    code = """
torch.set_num_threads(2)
want = ids()
child = os.fork()
if not child:
    os._exit(0 if torch.equal(ids(), want) else 3)
print(os.waitpid(child, 0)[1], torch.equal(ids(), want))
"""
    assert said(code) == "0 True"


@pytest.mark.slow
def test_a_child_of_a_fork_before_the_first_search_searches():
    code = """
from kvindex.cpu.pariskv import precompile
child = os.fork()  # which waits until kernels are compiled
assert not any(thread.is_alive() for thread in precompile._threads.values())
if not child:
    os._exit(0 if ids().shape == (2, 3, 50) else 3)
print(os.waitpid(child, 0)[1])
"""
    assert said(code) == "0"


@pytest.mark.slow
def test_a_fork_waits_for_any_thread_that_compiles():
    """Otherwise the compiler's lock would stay locked in the child."""
    code = """
import time
from numba.core.compiler_lock import global_compiler_lock
inside, free = threading.Event(), []
def compiles():
    with global_compiler_lock:
        inside.set()
        time.sleep(0.5)
        free.append(True)
ids()
threading.Thread(target=compiles).start()
inside.wait()
child = os.fork()
if not child:
    os._exit(0 if free and global_compiler_lock._lock.acquire(blocking=False) else 3)
assert global_compiler_lock._lock.acquire(blocking=False)  # nobody holds it here either
print(os.waitpid(child, 0)[1])
"""
    assert said(code) == "0"


@pytest.mark.slow
def test_a_child_of_a_fork_beside_a_first_search_searches():
    """Threads compute what searches of one state share, without a lock that the child would
    need."""
    code = """
from kvindex.cpu.pariskv.sign_votes import Stages
want, inside, go = ids(), threading.Event(), threading.Event()
index.truncate(2900)
blocks = Stages.__dict__["_blocks"]
make = blocks._make
def slowly(stages):
    inside.set()
    go.wait()
    return make(stages)
blocks._make = slowly
searching = threading.Thread(target=ids)
searching.start()
inside.wait()
blocks._make = make
child = os.fork()
if not child:
    os._exit(0 if ids().shape == want.shape else 3)
print(os.waitpid(child, 0)[1])
go.set()
searching.join()
"""
    assert said(code) == "0"


@pytest.mark.parametrize("line", mostly_slow(LINES, "pariskv"))
def test_threads_search_one_index_at_once(line):
    code = f"""
from concurrent.futures import ThreadPoolExecutor
torch.set_num_threads(1)
index, others = made({line!r}), [torch.randn(2, 6, 64) for _ in range(8)]
want = [index.search(one, k=50) for one in others]
index.append(torch.randn(2, 3, 9, 64), torch.randn(2, 3, 9, 64))
index.truncate(3000)  # so that the first searches prepare what all share
with ThreadPoolExecutor(4) as pool:
    found = list(pool.map(lambda i: index.search(others[i % 8], k=50), range(200)))
def same(mine, theirs):
    weights = mine.log_weight, theirs.log_weight
    return torch.equal(mine.ids, theirs.ids) and (weights[0] is None or torch.equal(*weights))
print(sum(same(hits, want[i % 8]) for i, hits in enumerate(found)))
"""
    assert said(code) == "200"


@pytest.mark.parametrize("line", ["pariskv", "pariskv:preset=fast", "pariskv:preset=paper"])
def test_kernels_read_memory_that_no_other_search_frees(line, monkeypatch):
    """Two first searches prepare the same data, and the later one replaces the earlier one's."""
    index = kvindex.create(line, q_heads=2, kv_heads=1, head_dim=64, backend="cpu")
    index.append(torch.randn(1, 1, 300, 64), torch.randn(1, 1, 300, 64))
    queries = torch.randn(1, 2, 64)
    want = index.search(queries, k=9)
    index.append(torch.randn(1, 1, 1, 64), torch.randn(1, 1, 1, 64))
    index.truncate(300)

    make, first, begun, replace = State.of, get_ident(), Event(), Event()
    prepared, freed = [], []
    later = Thread(target=index.search, args=(queries,), kwargs={"k": 9})

    def slowly(*contents):
        if get_ident() == first:
            later.start()
            assert begun.wait(60)
            state = make(*contents)
            prepared.extend(weakref.ref(tensor) for tensor in state.held)
            return state
        begun.set()
        assert replace.wait(60)
        return make(*contents)

    def run(part, most):
        if get_ident() == first:
            replace.set()
            later.join()
            freed.extend(tensor() is None for tensor in prepared)
        threads.run(part, most)

    monkeypatch.setattr(State, "of", slowly)
    monkeypatch.setattr(executor, "threads", SimpleNamespace(run=run))
    found = index.search(queries, k=9)
    assert freed
    assert not any(freed)
    assert torch.equal(found.ids, want.ids)


def test_kernels_are_compiled_ahead_of_the_first_search():
    code = """
from kvindex.cpu.pariskv import precompile
from kvindex.cpu.kernels.sampled_rows import sample_rows
from kvindex.cpu.kernels.step import attend_groups
precompile.wait()
before = [len(kernel.signatures) for kernel in (sample_rows, attend_groups)]
ids()
from kvindex.core.resident import ResidentRows
index.attend(queries, ResidentRows(index.geometry, 2, 3), k=50)
print(before, [len(kernel.signatures) for kernel in (sample_rows, attend_groups)])
"""
    assert said(code) == "[1, 1] [1, 1]"


@pytest.mark.slow
def test_two_threads_search_at_once():
    code = """
torch.set_num_threads(2)
indexes, want, equal = [made() for _ in range(4)], ids(), []
def search(index):
    equal.extend(torch.equal(ids(index), want) for _ in range(30))
callers = [threading.Thread(target=search, args=(index,)) for index in indexes]
for caller in callers: caller.start()
for caller in callers: caller.join()
print(len(equal), all(equal))
"""
    assert said(code) == "120 True"


def test_callers_at_once_begin_each_thread_once(monkeypatch):
    class SlowThread(threads.Thread):
        def __init__(self, **options):
            time.sleep(0.05)  # the other threads read the same list
            super().__init__(**options)

    monkeypatch.setattr(torch, "get_num_threads", lambda: 2)
    monkeypatch.setattr(threads, "Thread", SlowThread)
    monkeypatch.setattr(threads, "_threads", [])
    monkeypatch.setattr(threads, "_work", SimpleQueue())
    with ThreadPoolExecutor(4) as callers:
        calls = [callers.submit(threads.run, lambda i, parts: None, 2) for _ in range(4)]
        assert [call.exception() for call in calls] == [None] * 4
    assert [thread.is_alive() for thread in threads._threads] == [True]


def test_a_thread_that_fails_says_so_and_the_next_works():
    torch.set_num_threads(2)

    def part(i, parts):
        if i:
            raise ValueError("part: got 1")

    with pytest.raises(ValueError, match="part: got 1"):
        threads.run(part, 2)
    seen = []
    threads.run(lambda i, parts: seen.append((i, parts)), 5)
    assert sorted(seen) == [(0, 2), (1, 2)]


@pytest.mark.slow
def test_a_process_without_a_folder_for_compiled_code_searches():
    nowhere = """
from numba.core import caching
for cache in (caching.CacheImpl, caching.CompileResultCacheImpl): cache._locator_classes = []
"""
    code = """
from kvindex.cpu.kernels.scan import scan
print(len(ids()), type(scan._cache).__name__)
"""
    assert said(code, before=nowhere) == "2 NullCache"


@pytest.mark.slow
@pytest.mark.parametrize("line", ["pariskv", "pariskv:preset=fast"])
@pytest.mark.parametrize(("features", "looks_up"), [("", "False"), ("+avx2,+fma", "True")])
def test_a_machine_without_vectors_of_512_bits_finds_the_same(line, features, looks_up):
    code = f"""
from kvindex.cpu.kernels import lookup
print(lookup.SERVED, ids(made({line!r})).flatten().tolist())
"""
    machine = {"NUMBA_CPU_NAME": "generic", "NUMBA_CPU_FEATURES": features}
    plain = said(code, before=f"import os; os.environ.update({machine!r})")
    assert plain.split(" ", 1) == [looks_up, said(code).split(" ", 1)[1]]


@pytest.mark.parametrize("kind", [CodeFiles, IndexDataCacheFile])
def test_processes_that_compile_at_once_keep_their_own_code(tmp_path, kind):
    """Both processes find no stored code, so Numba would give both files the same name."""
    one, other, later = (kind(str(tmp_path), "kernel", 0) for _ in range(3))
    save = other._save_data
    one._load_index = dict

    def beside_one(name, data):
        one.save("float32", "code for float32")
        save(name, data)

    other._save_data = beside_one
    other.save("float16", "code for float16")
    own = later.load("float32") == "code for float32"
    assert own is (kind is CodeFiles)


def test_kernels_are_kept_in_such_files():
    assert isinstance(keep._cache._cache_file, CodeFiles)


def test_a_thread_holds_nothing_of_a_part_that_is_done(monkeypatch):
    class Slow(SimpleQueue):
        def put(self, item):
            super().put(item)
            time.sleep(0.2)  # let the other thread run, whose condition now holds

    class Read:
        pass

    monkeypatch.setattr(threads, "SimpleQueue", Slow)
    monkeypatch.setattr(threads, "parts_of", lambda most: most)
    read = Read()
    held = weakref.ref(read)

    def part(i, parts, read=read):
        assert read is not None

    threads.run(part, 2)
    del part, read
    assert held() is None
