"""A saved cache continues in another cache of the same model, and in no other model."""

import re
import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch

import kvindex
import kvindex_adapters.hf as kvhf
from kvindex_adapters.hf.cache import saving
from tests.adapters.hf.cache.test_copies import LINEAR, go_on
from tests.adapters.hf.generation.test_generation import Words
from tests.adapters.tiny import build, prompt, steps
from tests.saving.test_forged_folder import assert_each_field_is_checked, leaves
from tests.support.forged import manifest_of, number, put, sign, tensors_of
from tests.support.helpers import mostly_slow

REGIONS = dict(index="exact", k=500, sink=4, local_window=8, update_every=8, dense_below=0)


@pytest.fixture(scope="module")
def model():
    return build("llama", num_hidden_layers=2)


@pytest.fixture
def folder(model, tmp_path):
    """A saved cache of 40 tokens."""
    with kvhf.attach(model, **REGIONS) as cache:
        kvhf.read(model, Words(), prompt(1, 40)["input_ids"][0], cache=cache)
        cache.save(tmp_path / "saved")
    return tmp_path / "saved"


@pytest.mark.parametrize(
    "family",
    mostly_slow(
        [
            *("llama", "qwen3", "gemma4_text", "zamba2", "qwen3_next"),
            *("inkling_text", "deepseek_v3"),
        ],
        *("llama", "qwen3", "zamba2", "deepseek_v3"),
    ),
)
def test_another_cache_goes_on_as_the_one_that_was_saved(tmp_path, family):
    """Models have sliding windows, linear attention, both in one layer, or latents."""
    linear = dict(layer_types=["linear_attention", "full_attention"] * 2, **LINEAR)
    model, other = (build(family, **(linear if family == "qwen3_next" else {})) for _ in range(2))
    text = prompt(2, 60, padded=family == "llama")
    inputs = {name: part[:, :42] for name, part in text.items()}
    with kvhf.attach(model, **REGIONS) as cache:
        steps(model, cache, inputs, [40, 1, 1])
        cache.save(tmp_path / "saved")
        expected = steps_from(model, cache, text, 42)
    with kvhf.attach(other, **{**REGIONS, "index_options": {"store": "host"}}) as cache:
        cache.load(tmp_path / "saved")
        assert cache.get_seq_length() == 42
        assert cache.ids is None
        assert torch.equal(steps_from(other, cache, text, 42), expected)


def steps_from(model, cache, text, start):
    """Return logits `[B, T, V]` of the tokens from `start` on, one at a time."""
    ids, mask = text["input_ids"], text["attention_mask"]
    positions, logits = (mask.cumsum(-1) - 1).clamp_min(0), []
    for place in range(start, ids.shape[1]):
        one = slice(place, place + 1)
        step = dict(input_ids=ids[:, one], position_ids=positions[:, one])
        with torch.no_grad():
            more = dict(attention_mask=mask[:, : place + 1], past_key_values=cache)
            logits.append(model(**step, **more).logits)
    return torch.cat(logits, 1)


def test_tokens_come_back_and_a_question_follows_them(model, folder):
    ids, question = prompt(1, 40)["input_ids"][0], torch.tensor([5, 6, 7])
    options = dict(max_new_tokens=5, used="continue")
    with kvhf.attach(model, **REGIONS) as cache:
        kvhf.read(model, Words(), ids, cache=cache)
        want = kvhf.generate(model, Words(), question, cache=cache, **options)
        cache.reset()
        cache.load(folder)
        assert torch.equal(cache.ids, ids)
        got = kvhf.generate(
            model, Words(), question, cache=cache, repetition_penalty=1.0, **options
        )
        assert got.answer_ids.tolist() == want.answer_ids.tolist()
        assert cache.get_seq_length() == 40 + 3 + 5


def test_what_only_says_how_to_search_may_be_another(model, folder):
    with kvhf.attach(model, **{**REGIONS, "k": 3, "dense_below": 10**6}) as cache:
        cache.load(folder)
        assert cache.get_seq_length() == 40


OTHERS = {
    "index": (
        dict(index="quest"),
        "layer 0 cannot be loaded: index: got 'quest', but the folder was saved with 'exact'; pass "
        r"index='exact' to attach\(\), or --index exact to the command",
    ),
    "option": (
        dict(index="exact:group=union"),
        "index: got 'exact:group=union', but the folder was saved with 'exact'",
    ),
    "size": (
        dict(sink=5, update_every=9),
        r"sink: got 5, but the folder was saved with 4; pass sink=4 to attach\(\), or --sink 4 to",
    ),
    "codec": (
        dict(index_options={"row_codec": "int8"}),
        "index: got 'exact:row_codec=int8', but the folder was saved with 'exact'",
    ),
    "dense layers": (
        dict(dense_layers=(1,)),
        "layer 1 cannot be loaded: layer: got a saved IndexedLayer, but this cache has a Dyn",
    ),
}


@pytest.mark.parametrize(("other", "match"), OTHERS.values(), ids=OTHERS)
def test_another_index_is_refused_and_changes_nothing(model, folder, other, match):
    with kvhf.attach(model, **{**REGIONS, **other}) as cache:
        with pytest.raises(ValueError, match=match):
            cache.load(folder)
        assert cache.get_seq_length() == 0
        kvhf.read(model, Words(), prompt(1, 9)["input_ids"][0], cache=cache)
        assert cache.lengths() == [9] * len(cache.indexed)


NAMED = [
    *("pariskv", "pariskv:preset=fast", "pariskv:preset=paper:beta=0.05"),
    *("exact+sample", "exact:group=union:row_codec=int8+reuse", "h2o:budget=64"),
]


@pytest.mark.parametrize("index", NAMED)
def test_the_error_names_the_index_that_was_saved(model, tmp_path, index):
    with kvhf.attach(model, **{**REGIONS, "index": index}) as cache:
        kvhf.read(model, Words(), prompt(1, 40)["input_ids"][0], cache=cache)
        cache.save(tmp_path / "saved")
    with kvhf.attach(model, **{**REGIONS, "index": "quest"}) as cache:
        with pytest.raises(ValueError, match=rf"pass index={re.escape(repr(index))} to attach") as (
            caught
        ):
            cache.load(tmp_path / "saved")
        assert f"--index {index} to the command" in str(caught.value)
    with kvhf.attach(model, **{**REGIONS, "index": index}) as cache:
        cache.load(tmp_path / "saved")
        assert cache.get_seq_length() == 40


class Nameless(kvindex.get("exact")):
    """An index class that is not registered under a name."""


def test_the_error_names_the_class_of_an_index_without_a_name(model, tmp_path):
    with kvhf.attach(model, **{**REGIONS, "index": Nameless}) as cache:
        kvhf.read(model, Words(), prompt(1, 40)["input_ids"][0], cache=cache)
        cache.save(tmp_path / "saved")
    match = "was saved with 'Nameless'; pass the same index"
    with kvhf.attach(model, **REGIONS) as cache, pytest.raises(ValueError, match=match):
        cache.load(tmp_path / "saved")


def changed(change):
    other = build("llama", num_hidden_layers=2)
    with torch.no_grad():
        change(other)
    return other


MODELS = {
    "weights": (
        lambda: changed(lambda m: m.model.layers[1].mlp.up_proj.weight.mul_(1.01)),
        "model: got a cache of a model with other weights",
    ),
    "layers": (
        lambda: build("llama", num_hidden_layers=3),
        "num_hidden_layers = 2 .* the attached model has",
    ),
    "family": (lambda: build("olmo2", num_hidden_layers=2), "model: got a cache of a model with "),
    "dtype": (
        lambda: build("llama", num_hidden_layers=2).bfloat16(),
        "with dtype torch.float32 .* has torch.bfloat16",
    ),
    "rotary base": (
        lambda: build("llama", num_hidden_layers=2, rope_theta=77.0),
        "model: got a cache of a model with rope_parameters = .* the attached model has .*77.0",
    ),
}


@pytest.mark.parametrize(("other", "match"), MODELS.values(), ids=MODELS)
def test_another_model_is_refused(folder, other, match):
    with kvhf.attach(other(), **REGIONS) as cache:
        with pytest.raises(ValueError, match=match):
            cache.load(folder)
        assert cache.get_seq_length() == 0


def test_the_same_model_from_another_place_is_the_same(folder):
    other = build("llama", num_hidden_layers=2)
    other.config.name_or_path = "/elsewhere"
    other.lm_head.weight.data.zero_()  # after all keys and values
    with kvhf.attach(other, **REGIONS) as cache:
        cache.load(folder)
        assert cache.get_seq_length() == 40


def test_a_damaged_folder_changes_nothing(model, folder):
    path = folder / "layer-001.safetensors"
    content = path.read_bytes()
    for damage, match in [
        (lambda: path.write_bytes(content[:-1]), "got a file of .* bytes, but"),
        (
            lambda: path.write_bytes(content[:-1] + b"?"),
            "layer 1 cannot be loaded: .*got bytes with SHA-256",
        ),
        (path.unlink, "which lacks the saved file 'layer-001.safetensors'"),
    ]:
        damage()
        with kvhf.attach(model, **REGIONS) as cache:
            with pytest.raises(ValueError, match=match):
                cache.load(folder)
            assert (cache.get_seq_length(), cache.ids) == (0, None)
            go_on(model, cache, prompt(1, 3)["input_ids"], 0)


def test_what_cannot_be_saved_or_loaded_is_said_in_words(model, folder, tmp_path):
    with kvhf.attach(model, **REGIONS) as cache:
        with pytest.raises(ValueError, match=r"len\(cache\): got 0, allowed is an integer of at"):
            cache.save(tmp_path / "new")
        cache.load(folder)
        with pytest.raises(ValueError, match="cache: got a cache with 40 tokens; use an empty"):
            cache.load(folder)
        with pytest.raises(OSError, match=r"folder: got .* which already exists"):
            cache.save(folder)
        cache.layers.append(SimpleNamespace(keys=[1]))
        with pytest.raises(ValueError, match="allowed are tensors, numbers"):
            cache.save(tmp_path / "new")
    assert not (tmp_path / "new").exists()
    with pytest.raises(RuntimeError, match="ended"):
        cache.load(folder)


def test_one_layer_at_a_time_is_copied(model, tmp_path, monkeypatch):
    """While a file is written, no state of another layer exists."""
    alive, most = set(), []

    class StateSizes(dict):
        def __init__(self, state):
            super().__init__(state)
            alive.add(id(self))
            most.append(len(alive))

        def __del__(self):
            alive.discard(id(self))

    made = saving._tensors
    monkeypatch.setattr(saving, "_tensors", lambda layer: StateSizes(made(layer)))
    with kvhf.attach(model, **REGIONS) as cache:
        go_on(model, cache, prompt(1, 3)["input_ids"], 0)
        cache.save(tmp_path / "saved")
    assert most == [1, 1]


@pytest.mark.slow
def test_another_process_answers_from_it(model, folder):
    code = f"""
import sys
sys.path[:0] = {sys.path!r}
import torch, kvindex_adapters.hf as kvhf
from tests.adapters.hf.cache.test_saving import REGIONS
from tests.adapters.hf.generation.test_generation import Words
from tests.adapters.tiny import build
model = build("llama", num_hidden_layers=2)
with kvhf.attach(model, **REGIONS) as cache:
    cache.load(sys.argv[1])
    question = torch.tensor([5, 6, 7])
    answer = kvhf.generate(model, Words(), question, cache=cache, used="branch", max_new_tokens=5)
    print(answer.answer_ids.tolist())
"""
    done = subprocess.run([sys.executable, "-c", code, folder], capture_output=True, text=True)
    ids = torch.cat([prompt(1, 40)["input_ids"][0], torch.tensor([5, 6, 7])])
    options = {name: value for name, value in REGIONS.items() if name not in ("index", "k")}
    want = kvhf.generate(
        *(model, Words(), ids), index="exact", k=500, max_new_tokens=5, attach_options=options
    )
    assert done.stdout.splitlines()[-1:] == [str(want.answer_ids.tolist())], done.stderr


@pytest.mark.slow
@pytest.mark.parametrize("family", ["llama", "qwen3_next"])
def test_each_field_of_the_manifest_of_a_cache_is_checked(tmp_path, monkeypatch, family):
    linear = dict(layer_types=["linear_attention", "full_attention"] * 2, **LINEAR)
    model = build(family, **(linear if family == "qwen3_next" else {"num_hidden_layers": 2}))
    with kvhf.attach(model, **REGIONS) as cache:
        steps(model, cache, prompt(1, 20), [19, 1])
        cache.save(tmp_path / "saved")

    def load():
        with kvhf.attach(model, **REGIONS) as cache:
            try:
                cache.load(tmp_path / "saved")
            finally:
                cache.reset()

    if family == "llama":
        assert_each_field_is_checked(tmp_path / "saved", load, wrong=(leaves,))
    monkeypatch.setattr(saving, "check_identity", lambda *_: None)  # the check reads all weights
    wrong = (leaves, None, "x")
    assert_each_field_is_checked(tmp_path / "saved", load, wrong=wrong, but=("about", "model"))


def test_a_forged_cache_is_refused(model, folder):
    def refused(match):
        with kvhf.attach(model, **REGIONS) as cache:
            with pytest.raises(ValueError, match=match):
                cache.load(folder)
            assert cache.get_seq_length() == 0

    before = manifest_of(folder)
    manifest = manifest_of(folder)
    manifest["about"]["layers"][0]["geometry"]["head_dim"] = 2**20
    sign(folder, manifest)
    refused("geometry.head_dim: got 1048576, allowed is 1 to 4096")
    sign(folder, before)
    state = tensors_of(folder, "layer-000.safetensors")
    put(folder, state | {"attention.index.length": number(10**9)}, "layer-000.safetensors")
    refused(r"layer 0 .*state\['rows'\]")
    put(folder, state, "layer-000.safetensors")
    put(folder, {"ids": torch.arange(39)}, "tokens.safetensors")
    refused(r"state\['ids'\]: got torch.int64 \[39\], allowed is torch.int64 \[40\]")
