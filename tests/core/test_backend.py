"""The backend that an index gets by default, and what the index reports about it."""

import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

import kvindex
from kvindex.core import backend
from tests.cuda.devices import on, on_devices
from tests.support.helpers import Case

ROOT = Path(__file__).parents[2]
SIZES = dict(q_heads=4, kv_heads=2, head_dim=64)
GPU = torch.device("cuda:0")


def kernels(error=None):
    """Make a backend's module that is ready, or reports why not."""

    def ready(device):
        if error is not None:
            raise error

    return lambda name: SimpleNamespace(ready=ready)


@pytest.mark.parametrize("device", ["cpu", "cuda:0"])
def test_kernels_run_where_they_can(device, monkeypatch):
    monkeypatch.setattr(backend, "resolve", kernels())
    name = device.partition(":")[0]
    assert backend.choose(torch.device(device)) == (name, f"kernels run on {device!r}")


@pytest.mark.parametrize("error", [ImportError("no CuPy"), RuntimeError("too old")], ids=str)
def test_where_they_cannot_it_is_plain_torch_and_says_why(error, monkeypatch):
    monkeypatch.setattr(backend, "resolve", kernels(error))
    assert backend.choose(GPU) == ("torch", f"kernels cannot run: {error}")


def test_other_devices_have_no_kernels():
    assert backend.choose(torch.device("meta")) == ("torch", "tensors are on 'meta'")


@pytest.mark.parametrize("name", kvindex.names())
def test_every_index_explains_itself(name):
    lines = Case().index(name).explain().split("\n")
    assert lines[:2] == ["backend: torch (as requested)", "store: TensorStore, row_codec 'plain'"]


def test_no_backend_is_chosen_in_silence():
    index = kvindex.create("pariskv", **SIZES)
    name = "cpu" if find_spec("numba") else "torch"
    assert index.backend == name
    does = "run on 'cpu'" if name == "cpu" else "cannot run: "
    assert index.explain().startswith(f"backend: {name} (kernels {does}")


@on_devices
@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({}, ["fused sign_votes", "append: kernels write codes", "attend: in one go"]),
        (dict(preset="paper"), ["fused tiered_votes", "append: codes are made op by op"]),
        (
            dict(value_dim=12),
            ["fused sign_votes", "attend: value_dim: got 12, allowed is a multiple"],
        ),
        (
            dict(preset="scan"),
            ["none, op by op (coarse: got 'none', allowed is 'sign_votes' for 'sign_votes'"],
        ),
        (
            dict(preset="fast", group="union"),
            ["op by op (group: got 'union', allowed is 'mean_share' or"],
        ),
        (dict(query_max=127), ["op by op (query_max: got 127, allowed is up to 85)"]),
        (dict(single_stage_below=9), ["op by op (single_stage_below: got 9, allowed is 0)"]),
        (dict(q_heads=40), ["op by op (q_heads: got 20, allowed is 16 a head)"]),
    ],
    ids=str,
)
def test_an_index_on_kernels_says_which_path_it_takes_and_why(device, options, words):
    with on(device):
        made = kvindex.create("pariskv", backend="cuda", device=device, **SIZES | options)
    said = made.explain()
    assert said.startswith("backend: cuda (as requested)\nstore: BlockStore, row_codec 'plain'\n")
    assert [word for word in words if word not in said] == [], said


@on_devices
def test_other_indexes_run_op_by_op_on_kernels(device):
    with on(device):
        made = kvindex.create("exact", backend="cuda", device=device, **SIZES)
    backend, store, rows = made.explain().splitlines()
    assert (backend, store) == (
        "backend: cuda (as requested)",
        "store: BlockStore, row_codec 'plain'",
    )
    assert rows.startswith("rows: 0 on the device, 0 on the host (")


@pytest.mark.slow
def test_compiled_kernels_without_numba_are_refused_in_words():
    code = "import sys; sys.modules['numba'] = None; import kvindex; \
print(kvindex.create('pariskv', q_heads=1, kv_heads=1, head_dim=8).explain()); \
kvindex.create('pariskv', q_heads=1, kv_heads=1, head_dim=8, backend='cpu')"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, check=False
    )
    said = (
        "backend: got 'cpu', but numba is not installed; install it with pip install -e \".[cpu]\""
    )
    assert f"backend: torch (kernels cannot run: {said} in a checkout" in done.stdout
    assert f"ImportError: {said} in a checkout" in done.stderr
