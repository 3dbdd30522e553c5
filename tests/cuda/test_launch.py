"""What the driver is passed, without one."""

import ctypes
import struct
from types import SimpleNamespace

import pytest
import torch

from kvindex_cuda.runtime import launch as launching


@pytest.fixture
def driver(monkeypatch):
    """Notes launches, and reads arguments as a driver does: where it is told that they lie."""
    noted = SimpleNamespace(launches=[], kinds="", fails=0)

    def run(config, function, places, extra):
        config = config._obj
        kinds = {"q": ctypes.c_longlong, "f": ctypes.c_float}
        passed = [
            kinds[kind].from_address(place).value
            for kind, place in zip(noted.kinds, places, strict=True)
        ]
        sizes = [getattr(config, name) for name, _ in config._fields_[:7]]
        noted.launches.append((sizes, config.stream, config.count, function.value, passed))
        return noted.fails

    monkeypatch.setattr(launching, "_driver", lambda: SimpleNamespace(cuLaunchKernelEx=run))
    monkeypatch.setattr(launching, "raw_stream", lambda device: 77)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    return noted


def kernel(static=0):
    function = SimpleNamespace(shared_size_bytes=static, kernel=SimpleNamespace(ptr=4321))
    return launching._Kernel("some", function, 0), function


def test_arguments_lie_where_the_driver_is_told(driver):
    run, driver.kinds = kernel()[0], "qfqqffq"
    given = [2**47 + 8, 0.5, 0, -3, 1.25, float("inf"), 2**62]
    run((3, 2), (256,), given, 64, True)
    run((9,), (32, 2, 1), [*given[:1], 2.0, *given[2:]], 0, False)
    first, second = driver.launches
    assert first == ([3, 2, 1, 256, 1, 1, 64], 77, 1, 4321, given)
    assert second == ([9, 1, 1, 32, 2, 1, 0], 77, 0, 4321, [*given[:1], 2.0, *given[2:]])


def test_a_call_of_other_kinds_is_refused(driver):
    run, driver.kinds = kernel()[0], "qf"
    run((1,), (1,), [1, 0.5], 0, False)
    for wrong in ([1, 0.5, 2], [1], [0.5, 0.5]):
        with pytest.raises(struct.error):
            run((1,), (1,), wrong, 0, False)
    assert len(driver.launches) == 1


def test_shared_memory_beyond_48_kb_is_asked_for_once(driver):
    run, function = kernel(static=1024)
    run((1,), (1,), [], 47 * 1024, False)
    assert not hasattr(function, "max_dynamic_shared_size_bytes")
    run((1,), (1,), [], 100_000, False)
    assert function.max_dynamic_shared_size_bytes == 100_000
    function.max_dynamic_shared_size_bytes = None
    run((1,), (1,), [], 90_000, False)
    assert function.max_dynamic_shared_size_bytes is None


def test_a_driver_that_refuses_is_an_error(driver):
    run, driver.fails = kernel()[0], 209
    with pytest.raises(RuntimeError, match="some: the driver refuses to launch it, error 209"):
        run((1,), (1,), [], 0, False)
