"""The adapter runs an index on kernels where possible, otherwise in torch, and reports why."""

from importlib.util import find_spec
from types import SimpleNamespace

import pytest
import torch

import kvindex_adapters.hf as kvhf
from kvindex.core import backend
from kvindex.core.protocol import Attends
from kvindex.wrappers import MeasureRecall
from kvindex_adapters.common.placement import default_placement
from kvindex_cuda.memory.block_store import BlockStore
from tests.adapters.tiny import build, dense_steps, prompt, steps
from tests.cuda.devices import DEVICES, on
from tests.support.helpers import slow

KERNELS = {"backend": "cuda", "store": "host"}
REGIONS = dict(k=500, sink=4, local_window=8, update_every=4, dense_below=0)


def module(error=None):
    """Make a backend that is ready, or reports why not."""

    def ready(device):
        if error:
            raise error

    return SimpleNamespace(ready=ready)


@pytest.mark.parametrize("device", [None, "cpu", torch.device("cpu")])
def test_on_a_cpu_nothing_is_changed(device):
    assert default_placement(device, "pariskv") == {}


def test_on_a_gpu_an_index_runs_on_kernels_unless_told_otherwise(monkeypatch):
    monkeypatch.setattr(backend, "resolve", lambda name: {"cuda": module()}[name])
    assert default_placement("cuda:0", "pariskv+sample:share=.5") == KERNELS
    assert default_placement("cuda", "pariskv:store=device") == {"backend": "cuda"}
    assert default_placement("cuda", "pariskv", {"store"}) == {"backend": "cuda"}
    assert (
        default_placement("cuda", "pariskv:backend=torch")
        == default_placement("cuda", "pariskv", {"backend"})
        == {}
    )


@pytest.mark.parametrize("error", [ImportError("needs CuPy"), RuntimeError("too old")], ids=str)
def test_where_kernels_cannot_run_a_warning_says_why(monkeypatch, error):
    monkeypatch.setattr(backend, "resolve", lambda name: module(error))
    with pytest.warns(UserWarning, match=f"plain torch on the GPU: {error}"):
        assert default_placement("cuda", "pariskv") == {}


def test_attach_on_a_cpu_makes_the_compiled_index():
    model = build("llama")
    inputs = prompt(1, 40)
    with kvhf.attach(model, index="pariskv", **REGIONS) as cache:
        steps(model, cache, inputs, [38, 1, 1])
        index = cache.indexes()[0]
    assert index.backend == ("cpu" if find_spec("numba") else "torch")
    assert index.attends == (index.backend == "cpu")
    assert MeasureRecall(index).backend == index.backend
    assert not isinstance(index._store, BlockStore)


@pytest.fixture(params=DEVICES)
def device(request):
    """Device of the model. On a CPU the kernels are emulated, and must be requested."""
    with on(request.param):
        yield request.param


def moved(model, inputs, device, dtype):
    return model.to(device, dtype), {name: part.to(device) for name, part in inputs.items()}


def options(device):
    return {"backend": "cuda"} if device == "cpu" else {}


FAMILIES = {  # heads of 64, for which other tests compile the kernels too
    "llama": dict(num_hidden_layers=2, head_dim=64),
    "gemma2": dict(  # a softcap, and sliding windows in every other layer
        num_hidden_layers=2, layer_types=["sliding_attention", "full_attention"], head_dim=64
    ),
}


@pytest.mark.parametrize(
    ("family", "padded", "dtype"),
    [
        ("llama", False, torch.float32),
        slow("llama", True, torch.bfloat16),
        slow("gemma2", True, torch.float32),
        slow("gemma2", False, torch.bfloat16),
    ],
    ids=str,
)
def test_a_model_on_the_kernels_is_the_model(family, padded, dtype, device):
    """With k above the length, attention is full, whatever the dtype, padding and group size."""
    model, inputs = build(family, **FAMILIES[family]), prompt(2, 52, padded=padded)
    model, inputs = moved(model, inputs, device, dtype)
    sizes = [46, *[1] * 6]
    want = dense_steps(model, inputs, sizes)
    given = dict(index="pariskv:candidates_per=group", index_options=options(device))
    with kvhf.attach(model, **given, **REGIONS) as cache:
        got = steps(model, cache, inputs, sizes)
        index, report = cache.indexes()[0], cache.report()
    assert index.capability(Attends) is index
    assert index.backend == "cuda"
    assert report.steps == 6
    rows = sum(index.placement().device + index.placement().host for index in cache.indexes())
    place = report.placement
    assert (report.k, place.row_codec, place.device + place.host) == (500, "plain", rows)
    assert (place.device == 0, place.cache_rows) == (
        (True, 4096) if device != "cpu" else (False, 0)
    )
    assert "k 500, rows: " in str(report)
    assert index._store.on_host == (device != "cpu")
    for mine, theirs in zip(got, want, strict=True):
        error = (mine.float() - theirs.float()).norm() / theirs.float().norm()
        assert error < (1e-4 if dtype == torch.float32 else 0.05)


def test_it_retrieves_what_plain_torch_retrieves(device):
    """With few rows, logits differ only where rounding of estimates changes which rows are read."""
    model, inputs = moved(
        build("llama", **FAMILIES["llama"]), prompt(2, 112), device, torch.float32
    )
    sizes, few = [104, *[1] * 8], {**REGIONS, "k": 16}
    found = []
    for given in (options(device), {"backend": "torch", "store": "device"}):
        with kvhf.attach(
            model, index="pariskv:candidates_per=group", index_options=given, **few
        ) as cache:
            found.append(torch.cat(steps(model, cache, inputs, sizes)[1:], dim=1))
    off = (found[0] - found[1]).norm(dim=-1) / found[1].norm(dim=-1)
    assert off.median() < 1e-3
    want = torch.cat(dense_steps(model, inputs, sizes)[1:], dim=1)
    # this shows that few rows are used
    assert ((found[1] - want).norm(dim=-1) / want.norm(dim=-1)).median() > 1e-2


@pytest.mark.slow
def test_generation_through_the_kernels(device):
    model = build("llama", **FAMILIES["llama"], eos_token_id=None)
    model, inputs = moved(model, prompt(3, 60, padded=True), device, torch.float32)
    words = dict(max_new_tokens=7, do_sample=False)
    expected = model.generate(**inputs, **words)
    given = dict(index="pariskv:candidates_per=group", index_options=options(device))
    with kvhf.attach(model, **given, **REGIONS) as cache:
        out = model.generate(**inputs, past_key_values=cache, **words)
    assert torch.equal(out, expected)
