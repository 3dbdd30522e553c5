"""Requests with LoRA adapters give the tokens of vLLM's own attention, in its engine on a CPU."""

import json

import pytest
import torch

from tests.vllm.conftest import EVERY, SMALL, prompt

vllm = pytest.importorskip("vllm")

RANK = 4

WIDTHS = {
    "q_proj": SMALL["num_attention_heads"] * SMALL["head_dim"],
    "k_proj": SMALL["num_key_value_heads"] * SMALL["head_dim"],
    "v_proj": SMALL["num_key_value_heads"] * SMALL["head_dim"],
}
"""Projections with an adapter, and the sizes of their outputs."""

OPTIONS = dict(enable_lora=True, max_lora_rank=8, max_loras=2)


@pytest.fixture(scope="module")
def adapters(tmp_path_factory, model):
    """Save two adapters of random weights."""
    from safetensors.torch import save_file
    from vllm.lora.request import LoRARequest

    made = []
    for number in (1, 2):
        folder = tmp_path_factory.mktemp("adapter")
        draw, weights = torch.Generator().manual_seed(number), {}
        for layer in range(SMALL["num_hidden_layers"]):
            for name, width in WIDTHS.items():
                part = f"base_model.model.model.layers.{layer}.self_attn.{name}"
                shapes = {"A": (RANK, SMALL["hidden_size"]), "B": (width, RANK)}
                for side, shape in shapes.items():
                    weight = 0.2 * torch.randn(shape, generator=draw)
                    weights[f"{part}.lora_{side}.weight"] = weight
        save_file(weights, folder / "adapter_model.safetensors")
        config = dict(
            peft_type="LORA",
            r=RANK,
            lora_alpha=2 * RANK,
            target_modules=list(WIDTHS),
            base_model_name_or_path=model,
            bias="none",
        )
        (folder / "adapter_config.json").write_text(json.dumps(config))
        made.append(LoRARequest(f"adapter{number}", number, str(folder)))
    return made


def answered(llm, prompts, adapters):
    """Return the tokens of each answer, and the numbers of cached tokens."""
    params = vllm.SamplingParams(temperature=0, max_tokens=8, ignore_eos=True, detokenize=False)
    given = [{"prompt_token_ids": ids} for ids in prompts]
    found = llm.generate(given, params, use_tqdm=False, lora_request=adapters)
    return [list(one.outputs[0].token_ids) for one in found], [
        one.num_cached_tokens for one in found
    ]


def test_a_batch_of_two_adapters(engine, model, adapters, stock):
    """The keys of an adapter differ, so its cached prefixes are its own.

    The model without an adapter has batches of its own: on a CPU, vLLM 0.32 computes other tokens
    for it in a batch with adapters, with and without the plug-in.
    """
    own, mine = engine(model, **OPTIONS), engine(model, EVERY, **OPTIONS)
    ids = [prompt(700)] * 2
    expected, _ = answered(own, ids, adapters)
    (plain,), _ = answered(stock, ids[:1], None)
    assert len({tuple(answer) for answer in [plain, *expected]}) == 3
    for seen in (0, 512):
        assert answered(mine, ids, adapters) == (expected, [seen] * 2)
        assert answered(mine, ids[:1], None) == ([plain], [seen])
    few = engine(model, EVERY | {"k": 1, "sink": 0, "local_window": 1}, **OPTIONS)
    assert answered(few, ids, adapters)[0] != expected
