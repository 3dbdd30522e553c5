"""Host memory in huge pages, without a GPU."""

import ctypes
import dis
import errno
import mmap
import os
import signal
import sys
import threading

import pytest

from kvindex_cuda.memory import host_memory
from kvindex_cuda.memory.budget import bytes_left_in_groups
from kvindex_cuda.memory.host_memory import HUGE_PAGE, STEP, map_memory

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="only Linux has these calls")

NBYTES = 5 * STEP + 3 * mmap.PAGESIZE


def mapping(address):
    """Return the entries of `/proc/self/smaps` for the mapping that contains an address, or None.

    Sizes are in bytes.
    """
    entries = None
    with open("/proc/self/smaps", encoding="utf-8") as lines:
        for line in lines:
            name, *rest = line.split()
            if not name.endswith(":"):  # the header of a mapping
                if entries:
                    return entries
                first, end = (int(part, 16) for part in name.split("-"))
                entries = {} if first <= address < end else None
            elif entries is not None:
                sizes = rest and rest[-1] == "kB"
                entries[name[:-1]] = int(rest[0]) * 1024 if sizes else rest
    return entries


def holds(address, nbytes):
    """Return True if each page of a range is in memory."""
    resident = (ctypes.c_uint8 * (nbytes // mmap.PAGESIZE))()
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.mincore(ctypes.c_void_p(address), ctypes.c_size_t(nbytes), resident):
        assert ctypes.get_errno() == errno.ENOMEM  # not mapped
        return False
    return all(page & 1 for page in resident)


@pytest.fixture
def join(monkeypatch):
    """Return a function that waits for the end of the threads that map and populate memory."""
    ends, start = [], host_memory.start_new_thread

    def recorded(function, arguments):
        def run():
            function(*arguments)
            ended.set()

        ended = threading.Event()
        start(run, ())
        ends.append(ended)

    monkeypatch.setattr(host_memory, "start_new_thread", recorded)
    return lambda: [ends.pop().wait(10) or pytest.fail("a thread hangs") for _ in list(ends)]


@pytest.fixture
def mapped(monkeypatch):
    """Record the addresses of memory that is mapped and not unmapped yet."""
    live, map_aligned, unmap = set(), host_memory._map_aligned, host_memory._unmap

    def recorded(nbytes):
        address = map_aligned(nbytes)
        live.add(address)
        return address

    def forget(address, nbytes):
        live.discard(address)
        unmap(address, nbytes)

    monkeypatch.setattr(host_memory, "_map_aligned", recorded)
    monkeypatch.setattr(host_memory, "_unmap", forget)
    return live


@pytest.mark.parametrize("nbytes", [1, HUGE_PAGE, NBYTES])
def test_all_pages_are_there_and_go_with_free(nbytes):
    memory = map_memory(nbytes)
    whole = -(-nbytes // mmap.PAGESIZE) * mmap.PAGESIZE
    assert (memory.address % HUGE_PAGE, memory.nbytes) == (0, whole)
    assert holds(memory.address, whole)
    assert mapping(memory.address)["Rss"] >= whole
    view = (ctypes.c_uint8 * whole).from_address(memory.address)
    assert view[0] == view[whole - 1] == 0
    view[0] = view[whole - 1] = 7  # the memory can be written
    memory.free()
    assert not holds(memory.address, whole)


def test_each_step_is_populated_once(monkeypatch):
    populate, seen = host_memory._populate, []

    def recorded(address, nbytes):
        seen.append((address, nbytes))
        populate(address, nbytes)

    monkeypatch.setattr(host_memory, "_populate", recorded)
    memory = map_memory(NBYTES)
    places = [(address - memory.address, nbytes) for address, nbytes in seen]
    assert places == [(step * STEP, min(STEP, NBYTES - step * STEP)) for step in range(6)]
    memory.free()


def advice(monkeypatch, refused):
    """Refuse some kinds of advice. Return a list of all advice that is given."""
    advise, given = host_memory._advise, []

    def recorded(address, nbytes, kind):
        given.append(kind)
        if kind in refused:
            raise OSError(refused[kind], os.strerror(refused[kind]))
        advise(address, nbytes, kind)

    monkeypatch.setattr(host_memory, "_advise", recorded)
    return given


@pytest.mark.parametrize("refused", [{}, {14: errno.EINVAL}, {23: errno.EINVAL}], ids=str)
def test_an_older_kernel_needs_no_huge_pages_and_no_advice(refused, monkeypatch):
    """14 asks for huge pages, and 23 populates, which one write per page can replace."""
    given = advice(monkeypatch, refused)
    memory = map_memory(NBYTES)
    assert holds(memory.address, NBYTES)
    assert {10, 14, 23} <= {*given}
    memory.free()


def test_huge_pages_are_used_where_the_system_offers_them():
    with open("/sys/kernel/mm/transparent_hugepage/enabled", encoding="utf-8") as setting:
        if "[never]" in setting.read():
            pytest.skip("huge pages are turned off")
    memory = map_memory(4 * HUGE_PAGE)
    flags = mapping(memory.address)["VmFlags"]
    memory.free()
    assert "hg" in flags
    assert {"dc", "dd"} <= {*flags}, "child processes and core dumps do not get the memory"


@pytest.mark.parametrize("kind", [10, 23])
def test_a_failure_leaves_nothing_mapped(kind, mapped, monkeypatch):
    """10 keeps the memory out of child processes."""
    advice(monkeypatch, {kind: errno.ENOMEM})
    with pytest.raises(MemoryError, match=rf"cannot map {NBYTES} bytes.*Cannot allocate memory"):
        map_memory(NBYTES)
    assert not mapped


def test_an_interrupted_caller_leaves_the_memory_to_the_thread(mapped, join, monkeypatch):
    """It does not wait for the thread, which unmaps the memory when it is done."""
    populate, main = host_memory._populate, threading.get_ident()
    go, finished = threading.Event(), []

    def slow(address, nbytes):
        if address in mapped:  # the first step
            signal.pthread_kill(main, signal.SIGINT)
        assert go.wait(10)
        assert mapped
        populate(address, nbytes)
        finished.append(threading.get_ident())

    monkeypatch.setattr(host_memory, "_populate", slow)
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell may ignore it
    try:
        with pytest.raises(KeyboardInterrupt):
            map_memory(NBYTES)
    finally:
        signal.signal(signal.SIGINT, before)
    assert (len(mapped), finished) == (1, [])
    go.set()
    join()
    assert (len(mapped), len(finished)) == (0, 6)
    assert main not in finished


def test_an_interrupt_at_any_instruction_neither_hangs_nor_leaks(mapped, join):
    """KeyboardInterrupt is raised before each instruction of the caller, one after the other.

    Python raises none before it returns, so the memory cannot be lost there.
    """

    def returns(frame):
        return dis.opname[frame.f_code.co_code[frame.f_lasti]].startswith("RETURN")

    class Interrupt:
        def __init__(self, at):
            self.left = at

        def __call__(self, frame, event, argument):
            if frame.f_code.co_filename == host_memory.__file__:
                frame.f_trace_opcodes = True
                if event == "opcode" and not returns(frame):
                    self.left -= 1
                    if self.left < 0:
                        sys.settrace(None)
                        raise KeyboardInterrupt
            return self

    at, tracing = 0, sys.gettrace()
    while True:
        try:
            sys.settrace(Interrupt(at))
            memory = map_memory(mmap.PAGESIZE)
            break
        except KeyboardInterrupt:
            at += 1
        finally:
            sys.settrace(tracing)
        join()
        assert not mapped
    memory.free()
    assert at > 50


def test_without_a_thread_there_is_no_memory(mapped, monkeypatch):
    def refused(*given):
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(host_memory, "start_new_thread", refused)
    with pytest.raises(MemoryError, match=rf"cannot map {NBYTES} bytes.*can't start new thread"):
        map_memory(NBYTES)
    assert not mapped


@pytest.mark.parametrize("left", [0, NBYTES, NBYTES + 99])
def test_memory_that_is_short_is_not_touched(left, monkeypatch):
    """Linux would kill a process instead of returning an error."""
    host_memory._spare_bytes.cache_clear()
    monkeypatch.setattr(host_memory, "available_bytes", lambda: 1000)
    monkeypatch.setattr(host_memory, "bytes_left_in_groups", lambda: [5000])
    assert host_memory._spare_bytes() == 100
    monkeypatch.setattr(host_memory, "available_bytes", lambda: 1000 * NBYTES)
    monkeypatch.setattr(host_memory, "bytes_left_in_groups", lambda: [5000 * NBYTES, left])
    monkeypatch.setattr(host_memory, "_map_aligned", None)
    with pytest.raises(MemoryError, match=f"needs {NBYTES} .* and 100 .* but {left} bytes are"):
        map_memory(NBYTES)
    host_memory._spare_bytes.cache_clear()


def test_another_system_is_refused(monkeypatch):
    monkeypatch.setattr(sys, "platform", "darwin")
    with pytest.raises(MemoryError, match="platform: got darwin, allowed is linux"):
        map_memory(NBYTES)


def in_child(work):
    """Return the exit status of a child process that runs `work`."""
    child = os.fork()
    if not child:
        try:
            work()
        except BaseException:
            os._exit(1)
        os._exit(0)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_a_child_process_maps_and_frees_its_own_memory_alone():
    memory = map_memory(NBYTES)  # starts a thread, which the child does not have

    def work():
        assert not holds(memory.address, NBYTES)
        populated = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | mmap.MAP_POPULATE
        access = mmap.PROT_READ | mmap.PROT_WRITE
        other = host_memory._libc().mmap(memory.address, mmap.PAGESIZE, access, populated, -1, 0)
        assert other == memory.address, "the child has other memory at this address"
        memory.free()
        assert holds(other, mmap.PAGESIZE)
        own = map_memory(NBYTES)
        assert holds(own.address, NBYTES)
        own.free()

    assert in_child(work) == 0
    assert holds(memory.address, NBYTES)
    memory.free()


def test_the_memory_of_a_container_is_limited(tmp_path):
    """With both versions of control groups, in the group of the process or in one above it."""
    group, root = tmp_path / "cgroup", tmp_path / "groups"
    given = group, root
    assert bytes_left_in_groups(*given) == []  # no such files
    group.write_text("0::/one/two\n")
    (root / "one/two").mkdir(parents=True)
    (root / "one/two/memory.max").write_text("max\n")
    assert bytes_left_in_groups(*given) == []
    (root / "one/memory.max").write_text("500000\n")
    (root / "one/memory.current").write_text("300000\n")
    (root / "one/memory.stat").write_text("anon 200000\ninactive_file 100000\n")
    assert bytes_left_in_groups(*given) == [300_000]
    (root / "memory.max").write_text("1000\n")  # a limit that has been lowered
    (root / "memory.current").write_text("300000\n")
    (root / "memory.stat").write_text("inactive_file 0\n")
    assert bytes_left_in_groups(*given) == [300_000, 0]
    group.write_text("5:cpu:/\n4:memory:/elsewhere\n")  # seen from inside the container
    old = root / "memory"
    old.mkdir()
    (old / "memory.limit_in_bytes").write_text("700000\n")
    (old / "memory.usage_in_bytes").write_text("500000\n")
    (old / "memory.stat").write_text("inactive_file 1\ntotal_inactive_file 250000\n")
    assert bytes_left_in_groups(*given) == [450_000]
