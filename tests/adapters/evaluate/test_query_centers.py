"""`triattention` keeps the same rows with centers that were calibrated on the same prompt."""

import pytest
import torch

import kvindex_adapters.hf as kvhf
from kvindex_adapters.cli.common import check_search
from kvindex_adapters.evaluate.query_centers import calibrate_centers
from kvindex_adapters.evaluate.recall import bytes_per_key
from tests.adapters.tiny import build, prompt

SIZES = dict(k=30, sink=0, local_window=8, update_every=4, dense_below=0)


def written(model, inputs, index, **options):
    """Return tokens, and the ids that each layer keeps."""
    with kvhf.attach(model, index=index, **SIZES, **options) as cache, torch.inference_mode():
        out = model.generate(**inputs, past_key_values=cache, max_new_tokens=12, do_sample=False)
        return out, [made._learned["ids"].sort(-1).values for made in cache.indexes()]


@pytest.mark.parametrize("family", ["llama", "gpt_neox", "smollm3", "gemma2"])
def test_centers_of_the_prompt_beforehand_keep_what_the_prompt_teaches(family):
    model, inputs = build(family), prompt(1, 80)
    found = calibrate_centers(model, inputs["input_ids"][0], chunk=30)
    want, own = written(model, inputs, "triattention:budget=30:most=80")
    got, given = written(model, inputs, "triattention:budget=30", layer_options=found)
    assert torch.equal(got, want)
    assert all(torch.equal(*pair) for pair in zip(given, own, strict=True))
    assert all(ids.shape[-1] == 30 for ids in given)
    for layer in found.values():
        size, mean = layer["centers"].size, layer["centers"].mean.abs()
        assert (size >= mean - 1e-5).all()


def test_centers_of_a_text_serve_a_padded_batch():
    model, inputs = build("llama"), prompt(3, 80, padded=True)
    found = calibrate_centers(model, prompt(1, 120)["input_ids"][0])
    ids = written(model, inputs, "triattention:budget=30", layer_options=found)[1]
    for row, pads in enumerate([0, 5, 10]):
        one = {name: tensor[row : row + 1, pads:] for name, tensor in inputs.items()}
        alone = written(model, one, "triattention:budget=30", layer_options=found)[1]
        for batch, single in zip(ids, alone, strict=True):
            same = (batch[row] - pads)[..., None] == single[0][:, None]
            assert same.any(-1).double().mean() > 0.9  # the written tokens may differ


def test_what_cannot_be_calibrated_is_refused():
    with pytest.raises(ValueError, match="model: got a model whose rotary embedding is unknown"):
        calibrate_centers(build("glm4"), prompt(1, 20)["input_ids"][0])
    with pytest.raises(ValueError, match="ids: got shape"):
        calibrate_centers(build("llama"), prompt(1, 20)["input_ids"])
    with pytest.raises(ValueError, match=r"rope: got None.*TriAttention needs"):
        written(build("glm4"), prompt(1, 20), "triattention")


def test_it_can_be_asked_for_before_there_is_a_model():
    check_search("triattention:budget=7", 100, "cpu")
    assert bytes_per_key("triattention", 64)["stored"] == 0
