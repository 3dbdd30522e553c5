"""Speculative decoding does not change tokens."""

import json
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from kvindex_adapters.vllm.attention import PagedAttention
from kvindex_adapters.vllm.options import Options
from kvindex_adapters.vllm.unsupported import can_align, kernel_reasons
from tests.cuda import emulator
from tests.vllm.conftest import EVERY, SMALL, prompt, settings, tokens
from tests.vllm.processes import printed_tokens, run
from tests.vllm.test_attention import queries, served

DRAFTS = 3

NGRAM = dict(
    method="ngram", num_speculative_tokens=DRAFTS, prompt_lookup_min=1, prompt_lookup_max=3
)

PROMPTS = [prompt(length, seed) * 3 for seed, length in enumerate((240, 100, 7, 330))]
"""Prompts that repeat themselves, so that there are drafts. Answers cross blocks of 256 tokens."""

PROMPTS.insert(0, prompt(1026, 9))  # its last chunk has two tokens, which are no drafts

FEW = EVERY | {"k": 8}


SCRIPT = """
import json, sys
from vllm import LLM, SamplingParams

if __name__ == "__main__":
    engine, (emulate, count, *prompts) = json.loads(sys.argv[1])
    if emulate:
        from vllm.plugins import load_general_plugins
        from tests.vllm import on_a_cpu
        load_general_plugins()
        on_a_cpu.emulate()
    llm = LLM(**engine)
    params = SamplingParams(temperature=0, max_tokens=count, ignore_eos=True, detokenize=False)
    given = [{"prompt_token_ids": ids} for ids in prompts]
    found = llm.generate(given, params, use_tqdm=False)
    print("TOKENS", json.dumps([list(one.outputs[0].token_ids) for one in found]))
    if emulate:
        assert on_a_cpu.Attention.searched
    found = {one.name: one.value for one in llm.get_metrics() if hasattr(one, "value")}
    names = [f"vllm:spec_decode_num_{what}_tokens" for what in ("draft", "accepted")]
    print("DRAFTS", json.dumps([found.get(name) for name in names]))
"""
"""Speculate in a process of its own: vLLM cannot start a second such engine in a process, because
the package numba, which finds drafts, changes what it expects of modules."""


def speculated(folder, model, asked, count, prompts=PROMPTS, emulate=False, how=NGRAM, **more):
    """Return tokens, and the numbers of drafted and of accepted tokens."""
    options = dict(speculative_config=how, disable_log_stats=False) | more
    given, env = settings(model, asked, **options), {"VLLM_ENABLE_V1_MULTIPROCESSING": "0"}
    done = run(folder, given, [emulate, count, *prompts], SCRIPT, env)
    assert done.returncode == 0, done.stderr
    (line,) = (line for line in done.stdout.splitlines() if line.startswith("DRAFTS "))
    return printed_tokens(done), *json.loads(line.removeprefix("DRAFTS "))


def test_a_step_of_several_tokens_is_several_steps():
    paged, sequence, _, _ = served(1100, k=6, local_window=60)
    several = PagedAttention.of(paged.options, paged.geometry, DRAFTS)
    asked = queries(1 + DRAFTS)
    found = several.attend(asked, sequence)
    for place in range(1 + DRAFTS):  # the index ends one block earlier for the first tokens
        known = replace(sequence, length=1100 - DRAFTS + place)
        expected = paged.attend(asked[place, None], known)
        torch.testing.assert_close(found[place, None], expected)
    assert (several.attend(asked, sequence) - paged.attend(asked, sequence)).abs().max() > 0.01
    longer = queries(2 + DRAFTS)  # a chunk of a prompt
    assert torch.equal(several.attend(longer, sequence), paged.attend(longer, sequence))


def test_on_a_gpu_the_window_covers_drafted_tokens():
    assert kernel_reasons(None, 4, drafted=3) == []
    (reason,) = kernel_reasons(None, 3, drafted=3)
    assert reason.startswith("local_window: got 3, allowed is at least 4 on a GPU")


def test_each_new_token_as_a_sequence():
    pytest.importorskip("vllm")
    from kvindex_adapters.vllm.gpu_batch import one_by_one

    common = SimpleNamespace(
        query_start_loc=torch.tensor([0, 3, 3, 4, 6]).int(),
        num_actual_tokens=7,  # with one token of padding
        num_reqs=4,
        seq_lens=torch.tensor([10, 0, 257, 30]).int(),
        block_table_tensor=torch.arange(8).int().view(4, 2),
    )
    tables, lengths, owner = one_by_one(common)
    assert lengths.tolist() == [8, 9, 10, 257, 29, 30, 0]
    assert owner.tolist() == [0, 0, 0, 2, 3, 3, 3]
    assert tables[:, 0].tolist() == [0, 0, 0, 4, 6, 6, 6]
    assert tables.dtype == lengths.dtype == torch.int32


@pytest.mark.parametrize("asked", [EVERY, FEW])
def test_tokens_are_those_without_drafts(stock, engine, model, tmp_path, asked):
    expected = tokens(engine(model, asked), PROMPTS, 40)
    assert (expected == tokens(stock, PROMPTS, 40)) == (asked is EVERY)
    found, drafted, accepted = speculated(tmp_path, model, asked, 40)
    assert found == expected
    assert drafted > accepted > 0


def test_drafts_after_sparse_prompts(stock, engine, model, tmp_path):
    if not can_align():
        pytest.skip("this vLLM cannot align chunks")
    asked = EVERY | {"prefill": "sparse", "prefill_mass": 0.4, "prefill_last": 64}
    expected = tokens(engine(model, asked), PROMPTS, 40)
    assert expected != tokens(stock, PROMPTS, 40)
    found, drafted, accepted = speculated(tmp_path, model, asked, 40)
    assert found == expected
    assert drafted > accepted > 0


@pytest.mark.skipif(not emulator.available(), reason="no g++ to emulate with")
def test_the_kernels_verify_drafted_tokens(stock, model, tmp_path):
    asked = EVERY | {"index": "pariskv:preset=fast"}
    prompts = [prompt(length) * 3 for length in (100, 7)]  # few, because the emulator is slow
    found, drafted, _ = speculated(tmp_path, model, asked, 8, prompts, emulate=True)
    assert found == tokens(stock, prompts, 8)
    assert drafted


@pytest.mark.skipif(not emulator.available(), reason="no g++ to emulate with")
def test_drafted_tokens_choose_their_numbers_of_rows(stock, model, tmp_path):
    """The kernels retrieve as many rows for each token as plain torch."""
    auto = EVERY | {"index": "pariskv:sign_decoder=mean", "k": "auto", "error": 0.5}
    auto |= {"dense_below": 350, "local_window": 40}
    prompts = [prompt(length, 3) * 3 for length in (160, 7)]
    for name in ("kernels", "torch"):
        (tmp_path / name).mkdir()
    found, expected = (
        speculated(tmp_path / name, model, auto, 12, prompts, emulate=name == "kernels", **WHOLE)
        for name in ("kernels", "torch")
    )
    assert found == expected
    assert found[1]
    assert found[0] != tokens(stock, prompts, 12)


WHOLE = dict(max_num_batched_tokens=4096, num_gpu_blocks_override=24)
"""Options with which each prompt is one chunk. A single token that is left of a prompt would be a
decode step, and drafts change how much is left."""


def with_eagle(model, folder):
    """Make an EAGLE draft of random weights: one layer after the hidden states and the next
    tokens."""
    transformers = pytest.importorskip("transformers")
    from safetensors.torch import save_file

    torch.manual_seed(1)
    config = transformers.LlamaConfig(**SMALL | {"num_hidden_layers": 1})
    made = transformers.LlamaForCausalLM(config).state_dict()
    weights = {
        name.removeprefix("model."): weight.contiguous()
        for name, weight in made.items()
        if "layers" in name and "input_layernorm" not in name
    }
    weights["fc.weight"] = 0.1 * torch.randn(128, 256)
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    written = config.to_dict() | {"architectures": ["LlamaForCausalLM"]}
    (folder / "config.json").write_text(json.dumps(written))
    return model, dict(method="eagle", model=str(folder), num_speculative_tokens=DRAFTS)


def with_model(model, folder):
    """Use the model as its own draft, with full attention."""
    return model, dict(method="draft_model", model=model, num_speculative_tokens=DRAFTS)


def with_mtp(model, folder):
    """Make a model with a further layer that predicts the token after the next one."""
    transformers = pytest.importorskip("transformers")
    from safetensors.torch import load_file, save_file

    torch.manual_seed(0)
    experts = dict(n_routed_experts=4, num_experts_per_tok=2, moe_intermediate_size=64)
    config = transformers.Glm4MoeConfig(**SMALL | experts, first_k_dense_replace=1)
    transformers.Glm4MoeForCausalLM(config).save_pretrained(folder)
    weights = load_file(folder / "model.safetensors")
    layer, size = "model.layers.2.", SMALL["hidden_size"]
    for name in [name for name in weights if ".layers.1." in name]:
        weights[name.replace("model.layers.1.", layer)] = weights[name].clone()
    weights[f"{layer}eh_proj.weight"] = 0.1 * torch.randn(size, 2 * size)
    weights |= {f"{layer}{name}.weight": torch.ones(size) for name in ("enorm", "hnorm")}
    weights[f"{layer}shared_head.norm.weight"] = torch.ones(size)
    weights[f"{layer}shared_head.head.weight"] = weights["lm_head.weight"].clone()
    weights[f"{layer}embed_tokens.weight"] = weights["model.embed_tokens.weight"].clone()
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    written = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(written | {"num_nextn_predict_layers": 1}))
    return str(folder), dict(method="mtp", num_speculative_tokens=2)


@pytest.mark.parametrize("make", [with_eagle, with_model, with_mtp])
def test_drafts_of_a_model(stock, engine, model, tmp_path, make):
    """The layers of the draft use vLLM's own attention."""
    folder, how = make(model, tmp_path)
    if make is with_mtp:  # vLLM starts a model with experts only in a process of its own
        expected = speculated(tmp_path, folder, FEW, 24, how=None, **WHOLE)[0]
    else:
        expected = tokens(engine(folder, FEW, **WHOLE), PROMPTS, 24)
        assert expected != tokens(stock, PROMPTS, 24)
    found, drafted, accepted = speculated(tmp_path, folder, FEW, 24, how=how, **WHOLE)
    assert found == expected
    assert drafted > accepted
    assert accepted or make is not with_model


@pytest.mark.skipif(not emulator.available(), reason="no g++ to emulate with")
@pytest.mark.parametrize("make", [with_eagle, with_model])
def test_the_kernels_verify_drafts_of_a_model(stock, model, tmp_path, make):
    folder, how = make(model, tmp_path)
    asked = EVERY | {"index": "pariskv:preset=fast"}
    prompts = [prompt(length) * 3 for length in (100, 7)]
    (tmp_path / "run").mkdir()
    options = dict(emulate=True, how=how)
    found, drafted, accepted = speculated(tmp_path / "run", folder, asked, 8, prompts, **options)
    assert found == tokens(stock, prompts, 8)
    assert drafted
    assert bool(accepted) is (make is with_model)


@pytest.mark.parametrize(
    ("asked", "how", "said"),
    [
        ({}, {"attention_backend": "KVINDEX"}, "speculative_config: got attention_backend=.*KVIND"),
        ({"prefill": "sparse"}, {}, "speculative_config: got the method draft_model with prefill="),
    ],
)
def test_drafts_that_are_not_supported(stock, engine, model, asked, how, said):
    speculative = with_model(model, None)[1] | how
    with pytest.raises(ValueError, match=said):
        engine(model, EVERY | asked, speculative_config=speculative)


def counter_of(options, counted):
    """Return a `StepCounter` without layers that appends `Steps` to the list `counted`."""
    from kvindex_adapters.vllm.costs import Limit
    from kvindex_adapters.vllm.engine import StepCounter

    counter = StepCounter.__new__(StepCounter)
    counter._options, counter._drafted, counter._mixed = options, DRAFTS, False
    counter._counters = SimpleNamespace(add=counted.append)
    counter._config = counter._host = None
    counter._limit, counter._layers, counter._rows = Limit(options.dense_below), {}, 0.0
    return counter


def test_steps_of_several_tokens_are_counted(monkeypatch):
    pytest.importorskip("vllm")
    from kvindex_adapters.vllm import engine as module
    from kvindex_adapters.vllm.metrics import Steps

    counted = []
    counter = counter_of(Options(**EVERY), counted)
    limit = counter._limit
    monkeypatch.setattr(module, "batch_searches", lambda *given: True)
    common = SimpleNamespace(
        query_start_loc_cpu=torch.tensor([0, 4, 5, 5]),
        seq_lens_cpu_upper_bound=torch.tensor([900, 40, 0]),
        num_reqs=3,
        max_query_len=4,
        is_prefilling=None,
    )
    counter.count(common)
    assert counted == [Steps.of([900, 899, 898, 897, 40], Options(**EVERY), limit)]
    common.is_prefilling = torch.tensor([True, False, False])  # four tokens of a prompt
    for counter._mixed in (True, False):
        counter.count(common)
    assert counted[1:] == [Steps.of([40], Options(**EVERY), limit)] * 2
    common.seq_lens_cpu_upper_bound = torch.tensor([900, 640, 0])
    common.query_start_loc_cpu = torch.tensor([0, 4, 6, 6])
    counter.count(common)
    assert counted[3] == Steps.of([640, 639], Options(**EVERY), limit)
    assert counted[3].searched == 2
    common.query_start_loc_cpu = torch.tensor([0, 5, 6, 6])  # FlashAttention computes the batch
    common.max_query_len = 5
    counter.count(common)
    assert counted[4].searched == 0


def test_rows_that_searches_chose_are_counted_as_a_mean_over_layers(monkeypatch):
    """Fractions of a row are added to the rows of the next batch."""
    pytest.importorskip("vllm")
    from kvindex_adapters.vllm import engine as module
    from kvindex_adapters.vllm.metrics import Steps

    class Budget:
        known, found = True, 0.0

        def take_found(self):
            found, self.found = self.found, 0.0
            return found

    options, counted, budgets = Options(**EVERY | dict(k="auto")), [], [Budget(), Budget()]
    counter = counter_of(options, counted)
    impls = [SimpleNamespace(paged=SimpleNamespace(budget=budget)) for budget in budgets]
    impls += [SimpleNamespace(paged=SimpleNamespace(budget=None)), SimpleNamespace()]
    layers = {str(number): SimpleNamespace(impl=impl) for number, impl in enumerate(impls)}
    monkeypatch.setattr(module, "attention_layers", lambda layers_: layers)
    monkeypatch.setattr(module, "batch_searches", lambda *given: True)
    common = SimpleNamespace(
        query_start_loc_cpu=torch.tensor([0, 1]),
        seq_lens_cpu_upper_bound=torch.tensor([900]),
        num_reqs=1,
        max_query_len=1,
        is_prefilling=None,
    )
    for found in ((0.0, 0.0), (20.0, 21.5), (30.0, 30.5), (0.0, 0.0)):  # means 0, 20.75, 30.25, 0
        budgets[0].found, budgets[1].found = found
        counter.count(common)
    how = dict(options=options, limit=counter._limit)
    assert counted == [Steps.of([900], found=rows, **how) for rows in (0, 20, 31, 0)]
    budgets[1].known = False  # then steps use full attention
    counter.count(common)
    assert counted[4] == Steps(0, 1, 900, 900)
