"""A decode step as one graph that contains kernels: emulated on a CPU, captured on a GPU."""

from dataclasses import replace

import pytest
import torch

import kvindex_adapters.hf as kvhf
from kvindex_adapters.hf.graph import token_graph
from tests.adapters.tiny import build, prompt

REGIONS = dict(k=10, sink=4, local_window=8, update_every=8, dense_below=0)
SMALL = dict(num_hidden_layers=2, head_dim=64, eos_token_id=None)
FULL = dict(layer_types=["full_attention"] * 2)
WINDOWS = dict(layer_types=["sliding_attention", "full_attention"], sliding_window=16)
EAGER = 3
"""Number of steps without a replay: one ends the prompt, and two are traced and compared."""


def model_of(device, family="llama", dtype=torch.float32, **options):
    return build(family, **{**SMALL, **options}).to(device, dtype)


def both(model, inputs, count, *, attach=None, **options):
    """Return tokens and reports with a graph of the decode step, and without."""
    device, answers = model.device, []
    inputs = {name: tensor.to(device) for name, tensor in inputs.items()}
    index_options = {"backend": "cuda"} if device.type == "cpu" else {}
    for on in (True, False):
        torch.manual_seed(0)
        how = dict(index_options=index_options, graphs=False, token_graph=on, **REGIONS)
        with kvhf.attach(model, **{**how, **(attach or {})}) as cache:
            how = {"do_sample": False, "max_new_tokens": count, **options}
            tokens = model.generate(**inputs, past_key_values=cache, **how)
            answers.append((tokens, cache.report()))
    return answers


@pytest.mark.slow
def test_tokens_and_report_are_those_without_graphs(device, graphs):
    """One graph serves updates of both layers. Sequences start at different tokens.

    Steps that are traced run twice, so a row cache counts more accesses.
    """
    (mine, report), (theirs, plain) = both(model_of(device), prompt(2, 60, padded=True), 24)
    assert torch.equal(mine, theirs)
    asked = dict(looked_up=plain.placement.looked_up, found=plain.placement.found)
    placement = replace(report.placement, **asked)
    assert replace(report, graph=None, placement=placement) == plain
    assert (graphs.made, graphs.replays) == (1, 23 - EAGER)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("family", "options"),
    [
        ("llama", {}),
        ("qwen2", FULL),
        ("qwen3", FULL),
        ("mistral", {}),
        ("phi3", {}),
        ("glm4", {}),
        ("mixtral", {}),
        ("qwen3_moe", {}),
        ("falcon_h1", {}),
    ],
)
def test_families_on_a_gpu(dtype, family, options):
    model = model_of("cuda", family, dtype, **options)
    (mine, report), (theirs, _) = both(model, prompt(1, 60), 60)
    assert torch.equal(mine, theirs)
    assert report.graph == f"{59 - EAGER} of 59 tokens were replays"


def logits_of(model, ids, first, token_graph):
    """Return logits `[B, T, V]` of ids `[B, N]` from `first` on, one by one, and the report."""
    made, how = [], dict(graphs=False, token_graph=token_graph, **REGIONS)
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
@pytest.mark.parametrize("family", ["gemma3_text", "gpt_oss"])
def test_windows_beside_kernels(device, graphs, family):
    """A window's ring is passed more than once with one graph, or two if rows get more memory."""
    dtypes = [torch.float32] if device == "cpu" else [torch.float32, torch.bfloat16]
    if device == "cuda" and family == "gpt_oss":
        del dtypes[0]  # torch's grouped float32 matrix products read offsets on the host
    for dtype in dtypes:
        model = model_of(device, family, dtype, **WINDOWS)
        ids = prompt(2, 80 if device == "cpu" else 160)["input_ids"].to(device)
        before = graphs.made, graphs.replays
        mine, said = logits_of(model, ids, 60, True)
        made, replays = graphs.made - before[0], graphs.replays - before[1]
        theirs, _ = logits_of(model, ids, 60, False)
        apart = float((mine - theirs).abs().max() / theirs.abs().max())
        assert apart < (1e-4 if dtype is torch.float32 else 2**-4)
        count = ids.shape[1] - 60
        assert made == 1 or (device == "cuda" and made == 2)
        assert replays == count - EAGER
        assert said == f"{count - EAGER} of {count} tokens were replays"


@pytest.mark.gpu
@pytest.mark.parametrize("graphs", [True, False])
@pytest.mark.parametrize("store", ["device", "host", "auto"])
def test_beside_graphs_of_layers_and_wherever_rows_are(graphs, store):
    attach = dict(graphs=graphs, index_options={"store": store})
    sampling = dict(do_sample=True, temperature=0.8, top_k=20)
    for inputs in (prompt(1, 60), prompt(3, 60, padded=True)):
        (mine, report), (theirs, _) = both(model_of("cuda"), inputs, 40, attach=attach, **sampling)
        assert torch.equal(mine, theirs)
        assert report.graph == f"{39 - EAGER} of 39 tokens were replays"


@pytest.mark.gpu
def test_beams_on_a_gpu():
    (mine, _), (theirs, _) = both(model_of("cuda"), prompt(2, 60, padded=True), 24, num_beams=3)
    assert torch.equal(mine, theirs)


@pytest.mark.gpu
def test_turns_leave_no_memory_behind():
    model, ids, memory = model_of("cuda", dtype=torch.bfloat16), prompt(1, 60)["input_ids"], []
    for _ in range(8):
        with kvhf.attach(model, token_graph=True, **REGIONS) as cache:
            some = ids.to("cuda")
            for _ in range(2):
                some = model.generate(some, past_key_values=cache, max_new_tokens=20)
            assert int(cache.report().graph.split()[0]) > 20
        del cache
        torch.cuda.empty_cache()  # other memory is in use, or belongs to a graph
        memory.append((torch.cuda.memory_allocated(), torch.cuda.memory_reserved()))
    assert memory[-1] <= memory[2]


@pytest.mark.gpu
def test_a_forward_that_reads_the_device_is_told_before_a_capture(monkeypatch):
    monkeypatch.setattr(token_graph, "GRAPHS", {"cuda": None})  # would raise TypeError
    model = model_of("cuda", "mixtral", experts_implementation="eager")
    (mine, report), (theirs, _) = both(model, prompt(1, 60), 12)
    assert torch.equal(mine, theirs)
    assert "the host reads what the device has" in report.graph
