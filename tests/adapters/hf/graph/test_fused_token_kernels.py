"""A decode step with the decoder's kernels and the index's: emulated on a CPU, real on a GPU."""

from dataclasses import replace

import pytest
import torch

import kvindex_adapters.hf as kvhf
from kvindex.core import graphs as capturing
from kvindex_adapters.llama.weights import are_joined, products
from tests.adapters.decoder.families import FAMILIES, model_of
from tests.adapters.hf.graph.test_fused_token import EAGER, said
from tests.adapters.tiny import prompt
from tests.support.fused import on_a_cpu

pytest.importorskip("triton")

REGIONS = dict(sink=4, local_window=8, update_every=8, dense_below=0, graphs=False)
EVERY_ROW = dict(index="pariskv:preset=fast", k=128)
"""Number of rows to retrieve: all. With fewer, different rounding may choose different rows."""
FULL = dict(layer_types=["full_attention"] * 2)


@pytest.fixture
def kernels(device, monkeypatch):
    """Return the decoder's kernels; on a CPU their reference implementations in torch."""
    if device == "cpu":
        on_a_cpu(monkeypatch)


def small(name, device, dtype=torch.float32):
    full = FULL if name.startswith("qwen") else {}
    return model_of(name, num_hidden_layers=2, head_dim=64, **full).to(device, dtype)


def tokens_of(model, inputs, count, **how):
    """Return tokens and report of an answer."""
    inputs = {name: tensor.to(model.device) for name, tensor in inputs.items()}
    if model.device.type == "cpu":
        how["index_options"] = {"backend": "cuda"}
    with kvhf.attach(model, **REGIONS, **EVERY_ROW, **how) as cache:
        given = dict(do_sample=False, max_new_tokens=count, past_key_values=cache)
        return model.generate(**inputs, **given), cache.report()


def logits_of(model, ids, first, **how):
    """Return logits `[B, T, V]` of ids `[B, N]` from `first` on, one by one, and the report."""
    made, how = [], {**REGIONS, **EVERY_ROW, **how}
    if model.device.type == "cpu":
        how["index_options"] = {"backend": "cuda"}
    with kvhf.attach(model, **how) as cache, torch.no_grad():
        model(ids[:, :first], past_key_values=cache)
        for at in range(first, ids.shape[1]):
            positions = torch.full((len(ids), 1), at, device=ids.device)
            step = dict(position_ids=positions, past_key_values=cache)
            made.append(model(ids[:, at : at + 1], **step).logits)
        return torch.cat(made, 1), cache.report().graph


@pytest.mark.slow
def test_tokens_and_report_are_those_of_the_models_own_forward(device, graphs, kernels):
    """One graph serves updates of both layers. Sequences start at different tokens."""
    model, inputs = small("qwen3", device), prompt(2, 60, padded=True)
    mine, report = tokens_of(model, inputs, 24, fused=True)
    theirs, plain = tokens_of(model, inputs, 24, token_graph=False)
    assert torch.equal(mine, theirs)
    assert replace(report, graph=None) == plain
    assert (graphs.made, graphs.replays) == (1, 23 - EAGER)


@pytest.mark.gpu
@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_families_on_a_gpu(name, dtype):
    """Compare logits for batches of 1 to 16 sequences, with all rows retrieved.

    In bfloat16 (relative rounding error 2^-8), the model rounds after each of some 40 operations of
    a layer, and the kernels after 6. With the reference kernels on a CPU, logits differ by 0.01 at
    the median token.
    """
    model, bound = small(name, "cuda", dtype), 1e-3 if dtype is torch.float32 else 2**-5
    for batch in (1, 3, 16):
        ids = prompt(batch, 120)["input_ids"].to("cuda")
        mine, report = logits_of(model, ids, 60, fused=True)
        theirs, _ = logits_of(model, ids, 60, token_graph=False)
        assert report == said(60 - EAGER, 60)
        apart = (mine - theirs).abs().amax(-1) / theirs.abs().amax()
        assert float(apart.median()) < bound


@pytest.mark.gpu
@pytest.mark.parametrize("store", ["device", "host", "auto"])
def test_wherever_rows_are(store):
    model, inputs = small("llama", "cuda"), prompt(3, 60, padded=True)
    mine, report = tokens_of(model, inputs, 40, fused=True, index_options={"store": store})
    theirs, _ = tokens_of(model, inputs, 40, token_graph=False, index_options={"store": store})
    assert torch.equal(mine, theirs)
    assert report.graph == said(39 - EAGER, 39)


@pytest.mark.gpu
def test_under_inference_mode():
    model = small("qwen2", "cuda")
    with torch.inference_mode():
        mine, report = tokens_of(model, prompt(2, 60), 40, fused=True)
        theirs, _ = tokens_of(model, prompt(2, 60), 40, token_graph=False)
    assert torch.equal(mine, theirs)
    assert report.graph == said(39 - EAGER, 39)


@pytest.mark.gpu
def test_weights_are_held_once_and_turns_leave_no_memory_behind():
    model, memory = small("qwen2", "cuda", torch.bfloat16), []
    before = torch.cuda.memory_allocated()
    for _ in range(8):
        with kvhf.attach(model, fused=True, **REGIONS) as cache:
            assert all(are_joined(*modules) for modules in products(model.model))
            if not memory:  # later, cuBLAS has a workspace for each stream
                assert torch.cuda.memory_allocated() < before + 64 * 1024
            some = prompt(1, 60)["input_ids"].to("cuda")
            for _ in range(2):
                some = model.generate(some, past_key_values=cache, max_new_tokens=20)
            assert int(cache.report().graph.split()[0]) > 20
        del cache
        torch.cuda.empty_cache()
        memory.append((torch.cuda.memory_allocated(), torch.cuda.memory_reserved()))
    allocated, reserved = memory[2]
    assert memory[-1][0] <= allocated
    # up to two segments are outside of the reserved memory
    assert memory[-1][1] <= reserved + 2**22


@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore:token_graph")  # only runs that compile kernels warn
def test_a_driver_that_refuses_is_said_and_tokens_go_on(monkeypatch):
    def refuse(*_):
        raise RuntimeError("out of graphs")

    model = small("llama", "cuda")
    theirs, _ = tokens_of(model, prompt(1, 60), 12, token_graph=False)
    monkeypatch.setitem(capturing.GRAPHS, "cuda", refuse)
    mine, report = tokens_of(model, prompt(1, 60), 12, fused=True)
    assert torch.equal(mine, theirs)
    assert "out of graphs" in report.graph
