"""Arguments of kernels that are found by name: in which namespaces, and what is rejected."""

from dataclasses import dataclass
from types import SimpleNamespace

import pytest
import torch

from kvindex_cuda.runtime import launch as launching
from kvindex_cuda.runtime.resolve import NamedLaunch

SOURCE = """
struct Arguments {
    const float* queries;
    int* counts;
    i64 row, k;
    float scale;
};
extern "C" __global__ void some(const __grid_constant__ Arguments args) {}
"""


@dataclass(frozen=True)
class Layer:
    """Half of the arguments."""

    row: int
    k: int = 0

    @property
    def width(self):
        return 2 * self.row


def step():
    return SimpleNamespace(queries=torch.zeros(3), sums=torch.ones(2, dtype=torch.int32), scale=0.5)


@pytest.fixture
def passed(tmp_path, monkeypatch):
    """The arguments that the kernel was launched with."""
    (tmp_path / "some.cu").write_text(SOURCE)
    monkeypatch.setattr(launching, "SOURCES", tmp_path)
    calls = []
    monkeypatch.setitem(
        launching.LOADERS, "cpu", lambda *which: lambda *given: calls.append((which, given))
    )
    return calls


SIZES = dict(grid=(2,), block=(32,), defines=dict(D=8))


def test_each_argument_is_the_attribute_of_its_name_when_it_is_launched(passed):
    buffers = step()
    run = NamedLaunch("some.cu", "some", buffers, Layer, counts="sums", row="width")
    for scale, row in ((0.5, 4), (0.25, 8)):
        buffers.scale = scale
        run(buffers, Layer(row=row, k=7), **SIZES, shared_bytes=16, overlap=True)
    places = buffers.queries.data_ptr(), buffers.sums.data_ptr()
    which, sizes = ("some.cu", "some", (("D", 8),)), ((2,), (32,))
    assert passed == [
        (which, (*sizes, [*places, 8, 7, 0.5], 16, True)),
        (which, (*sizes, [*places, 16, 7, 0.25], 16, True)),
    ]


def test_what_a_call_gives_is_looked_up_nowhere(passed):
    run = NamedLaunch("some.cu", "some", step(), Layer, given=("k", "counts"))
    run(step(), Layer(row=1, k=7), **SIZES, k=9, counts=None)
    assert passed[0][1][2][1:] == [0, 1, 9, 0.5]


@pytest.mark.parametrize(
    ("namespaces", "options", "message"),
    [
        (
            (step(), Layer),
            {},
            "some.counts: got no attribute 'counts' in SimpleNamespace and Layer, allowed is exa",
        ),
        ((step(), Layer), dict(counts="none"), "some.counts: got no attribute 'none' in"),
        (
            (SimpleNamespace(**vars(step()), k=1), Layer),
            dict(counts="sums"),
            "some.k: got several attributes 'k' in SimpleNamespace and Layer, allowed is exactly",
        ),
        (
            (step(), Layer),
            dict(sum="sums"),
            r"some: got \['sum'\], allowed are its parameters \['queries', 'co",
        ),
        (
            (step(), Layer),
            dict(given=["sum"]),
            r"some: got \['sum'\], allowed are its parameters \['queries'",
        ),
    ],
)
def test_a_name_that_is_missing_or_ambiguous_is_refused_at_once(
    passed, namespaces, options, message
):
    with pytest.raises(ValueError, match=message):
        NamedLaunch("some.cu", "some", *namespaces, **options)


@pytest.mark.parametrize("given", [{}, dict(k=1, counts=None), dict(counts=None)])
def test_a_call_gives_what_was_said(passed, given):
    run = NamedLaunch("some.cu", "some", step(), Layer, given=["k"], counts="sums")
    with pytest.raises(
        ValueError, match=r"some: got keyword arguments \[.*\], allowed are \['k'\]"
    ):
        run(step(), Layer(row=1), **SIZES, **given)


def test_a_type_that_is_wrong_is_refused_as_of_any_launch(passed):
    run = NamedLaunch("some.cu", "some", step(), Layer, counts="sums")
    with pytest.raises(ValueError, match=r"some\.row: got 1\.5, allowed is int"):
        run(step(), Layer(row=1.5), **SIZES)


def test_no_namespace_is_kept(passed):
    buffers = step()
    run = NamedLaunch("some.cu", "some", buffers, Layer, counts="sums")
    assert all(buffers is not part for part in vars(run).values())
