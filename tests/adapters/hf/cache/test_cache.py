"""The cache alone: crop, batch operations, reports, and the model after attach().

The file is long, because it lists everything that transformers may do to a cache.
"""

import copy
import functools
from itertools import product
from pathlib import Path

import pytest
import torch
from transformers import AutoConfig, AutoModelForImageTextToText

import kvindex
import kvindex_adapters.hf as kvhf
from kvindex.testing import interrupt_at, lines_of
from kvindex_adapters.hf.model.attachment import attached
from kvindex_adapters.hf.model.attention import NAME
from tests.adapters.tiny import SMALL, build, dense_steps, prompt, steps
from tests.support.helpers import mostly_slow

REGIONS = dict(index="exact", k=500, sink=4, local_window=8, update_every=8, dense_below=0)


@pytest.fixture(scope="module")
def model():
    return build("llama", num_hidden_layers=2)


@pytest.mark.parametrize("cropped", [0, 1, 5, 9, 25, 39])
def test_crop_then_go_on(model, cropped):
    """Crop inside the local window, beyond it, and deep in the index."""
    inputs = prompt(1, 60)
    remaining = 40 - cropped
    again = {name: torch.cat([t[:, :remaining], t[:, 40:]], dim=1) for name, t in inputs.items()}
    expected = dense_steps(model, again, [remaining] + [1] * 20)[1:]
    with kvhf.attach(model, **REGIONS) as cache:
        steps(model, cache, inputs, [30] + [1] * 10)
        cache.crop(-cropped)
        assert cache.get_seq_length() == remaining
        logits = []
        for step in range(20):
            position = torch.tensor([[remaining + step]])
            ids = inputs["input_ids"][:, 40 + step, None]
            with torch.no_grad():
                out = model(input_ids=ids, position_ids=position, past_key_values=cache)
            logits.append(out.logits)
    assert torch.allclose(torch.cat(logits), torch.cat(expected), atol=1e-4)


def test_crop_beyond_the_start_empties(model):
    with kvhf.attach(model, **REGIONS) as cache:
        steps(model, cache, prompt(1, 30), [30])
        cache.crop(-100)
        assert cache.get_seq_length() == 0


def test_crop_takes_a_tensor_as_transformers_5_17_gives_it(model):
    with kvhf.attach(model, **REGIONS) as cache:
        steps(model, cache, prompt(1, 30), [30])
        cache.crop(-torch.tensor(7))
        assert cache.get_seq_length() == 23


def test_crop_refuses_positive_numbers(model):
    with kvhf.attach(model, **REGIONS) as cache:
        steps(model, cache, prompt(1, 30), [30])
        with pytest.raises(ValueError, match="tokens_to_remove: got 5, allowed is a number"):
            cache.crop(5)
        assert cache.get_seq_length() == 30


CHANGES = {
    "repeat": (lambda cache: cache.batch_repeat_interleave(2), [0, 0, 1, 1, 2, 2]),
    "select": (lambda cache: cache.batch_select_indices(torch.tensor([2, 0])), [2, 0]),
    "select-all": (lambda cache: cache.batch_select_indices(torch.tensor([1, 2, 0])), [1, 2, 0]),
    "select-mask": (
        lambda cache: cache.batch_select_indices(torch.tensor([True, False, True])),
        [0, 2],
    ),
    "reorder": (lambda cache: cache.reorder_cache(torch.tensor([1, 1, 0])), [1, 1, 0]),
}
LAYERS = {"llama": 2, "falcon_h1": 2, "zaya": 2, "zamba": 4, "inkling_text": 4}
"""Families, with linear attention in the same layer as full attention or in separate layers, and
their numbers of layers."""


@pytest.mark.parametrize(
    ("family", "how"),
    mostly_slow(
        product(LAYERS, CHANGES),
        *product(["llama"], CHANGES),
        *[("falcon_h1", "select"), ("zaya", "repeat"), ("zamba", "select-mask")],
        *[("falcon_h1", "reorder"), ("inkling_text", "reorder")],
    ),
)
def test_batch_operations(family, how):
    layers, (change, rows) = LAYERS[family], CHANGES[how]
    model = build(family, num_hidden_layers=layers)
    inputs = prompt(3, 50, padded=True)
    chosen = {name: tensor[rows] for name, tensor in inputs.items()}
    expected = dense_steps(model, chosen, [40] + [1] * 10)[1:]
    with kvhf.attach(model, **REGIONS) as cache:
        steps(model, cache, {n: t[:, :40] for n, t in inputs.items()}, [40])
        change(cache)
        logits = []
        for step in range(40, 50):
            with torch.no_grad():
                out = model(
                    input_ids=chosen["input_ids"][:, step, None],
                    attention_mask=chosen["attention_mask"][:, : step + 1],
                    position_ids=chosen["attention_mask"][:, : step + 1].sum(1, keepdim=True) - 1,
                    past_key_values=cache,
                )
            logits.append(out.logits)
    assert torch.allclose(torch.cat(logits), torch.cat(expected), atol=1e-4)


def test_report_counts_rows_bytes_and_memory(model):
    inputs = prompt(1, 60)
    options = {**REGIONS, "index": "pariskv", "k": 5}
    with kvhf.attach(model, **options) as cache:
        steps(model, cache, inputs, [50] + [1] * 10)
        report = cache.report()
        assert cache.report(all_ranks=True) == report  # there is one process
    assert (report.tokens, report.layers, report.steps) == (60, 2, 10)
    # a step reads 4 rows of the sink, 5 hits, 8 local rows and a buffer of 1 to 8 rows; after the
    # prompt of 50 tokens, 8 are local and the buffer is empty
    buffers = [1 + step % 8 for step in range(10)]
    assert report.rows_read == pytest.approx(sum(4 + 5 + 8 + b for b in buffers) / 10)
    assert report.rows_full == pytest.approx(sum(range(51, 61)) / 10)
    assert report.bytes_fetched == 2 * 10 * 2 * 5 * (16 + 16) * 4
    assert report.nbytes["rows"] == 2 * (60 - 8 - 2) * 2 * 32 * 4
    assert set(report.nbytes) == {"codes", "rows", "window"}
    assert "10 searching steps read" in str(report)


@pytest.mark.parametrize("rows", ["int8", "fp8"])
def test_rows_of_a_byte_per_number_stay_near_full_attention(model, rows):
    inputs = prompt(1, 60)
    expected = torch.cat(dense_steps(model, inputs, [50] + [1] * 10)[1:])
    with kvhf.attach(model, **{**REGIONS, "index": f"exact:row_codec={rows}"}) as cache:
        logits = torch.cat(steps(model, cache, inputs, [50] + [1] * 10)[1:])
        report = cache.report()
    assert report.nbytes["rows"] == 2 * (60 - 8 - 2) * 2 * (32 + 16)  # 2 scales, in 16 bytes
    error = (logits - expected).norm() / expected.norm()
    assert 1e-5 < error < 0.05


def test_report_tells_the_share_that_was_asked_for(model):
    inputs = prompt(1, 60)
    with kvhf.attach(model, **{**REGIONS, "coverage": 0.7}) as cache:
        assert cache.report().coverage is None  # there was no search yet
        steps(model, cache, inputs, [50] + [1] * 10)
        report = cache.report()
    with kvhf.attach(model, **REGIONS) as cache:
        steps(model, cache, inputs, [50] + [1] * 10)
        everything = cache.report()
    assert 0.7 < report.coverage < 1
    assert report.rows_read < 0.9 * everything.rows_read
    assert everything.coverage is None


def test_a_new_cache_knows_no_ids(model):
    with kvhf.attach(model, **REGIONS) as cache:
        assert cache.ids is None


def test_a_factory_makes_the_indexes(model):
    made = []

    def factory(**geometry):
        made.append(kvindex.create("exact", **geometry))
        return made[-1]

    with kvhf.attach(model, **{**REGIONS, "index": factory}) as cache:
        steps(model, cache, prompt(1, 30), [30])
        assert [id(index) for index in cache.indexes()] == [id(index) for index in made[1:]]


def test_index_options_reach_the_index(model):
    options = {"index_options": {"beta": 0.3, "store": "host"}}
    with kvhf.attach(model, index="pariskv:rho=0.4", **options) as cache:
        steps(model, cache, prompt(1, 30), [30])
        config = cache.indexes()[0].config
    assert (config.beta, config.rho) == (0.3, 0.4)


def test_the_model_is_as_it_was(model):
    before = model.config.to_dict()
    implementation = model.config._attn_implementation

    def stop_inside():
        with kvhf.attach(model, **REGIONS):
            assert model.config._attn_implementation == NAME
            raise RuntimeError("stop")

    with pytest.raises(RuntimeError, match="stop"):
        stop_inside()
    assert model.config._attn_implementation == implementation
    assert model.config.to_dict() == before
    assert not any(module in attached for module in model.modules())
    assert "forward" not in vars(model.model)
    expected = dense_steps(model, prompt(1, 20), [20])
    assert torch.equal(dense_steps(model, prompt(1, 20), [20])[0], expected[0])


def test_sub_configurations_are_restored_and_the_vision_part_is_left_alone():
    vision = dict(hidden_size=32, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2)
    text = {**SMALL, "layer_types": ["full_attention"] * 4, "query_pre_attn_scalar": 16}
    config = AutoConfig.for_model(
        "gemma3",
        text_config=text,
        vision_config={**vision, "image_size": 28, "patch_size": 14},
        mm_tokens_per_image=4,
        image_token_index=100,
        boi_token_index=99,
        eoi_token_index=98,
    )
    torch.manual_seed(0)
    model = AutoModelForImageTextToText.from_config(config, attn_implementation="eager").eval()
    inputs = prompt(1, 30)
    inputs["input_ids"] = inputs["input_ids"].clamp_max(90)
    with torch.no_grad():
        expected = model(**inputs).logits
    with kvhf.attach(model, **REGIONS) as cache:
        assert model.config.text_config._attn_implementation == NAME
        assert model.config.vision_config._attn_implementation == "eager"
        with torch.no_grad():
            logits = model(**inputs, past_key_values=cache).logits
    assert torch.allclose(logits, expected, atol=1e-4)
    parts = (model.config, model.config.text_config, model.config.vision_config)
    assert [part._attn_implementation for part in parts] == ["eager"] * 3


def fails_in_the_last_layer(model, error, **inputs):
    """Make a forward pass that raises when all layers except the last have stored its tokens."""

    def fail(*call):
        raise error

    handle = model.model.layers[-1].self_attn.register_forward_pre_hook(fail)
    with pytest.raises(error), torch.no_grad():
        model(**inputs)
    handle.remove()


@pytest.mark.parametrize("error", [ZeroDivisionError, KeyboardInterrupt])
@pytest.mark.parametrize("dense_layers", [(), (0,)])
def test_a_step_that_fails_half_way_is_undone(model, error, dense_layers):
    inputs = prompt(1, 40)
    expected = dense_steps(model, inputs, [30] + [1] * 10)
    with kvhf.attach(model, dense_layers=dense_layers, **REGIONS) as cache:
        fails_in_the_last_layer(model, error, past_key_values=cache, **prompt(2, 9))
        assert cache.get_seq_length() == 0  # the failed step was the first one
        logits = steps(model, cache, {n: t[:, :30] for n, t in inputs.items()}, [30])
        before = cache.report()
        ids = inputs["input_ids"][:, 30:31]
        fails_in_the_last_layer(model, error, past_key_values=cache, input_ids=ids)
        assert [layer.get_seq_length() for layer in cache.layers] == [30, 30]
        assert cache.report() == before  # rows of an undone step do not count
        for step in range(30, 40):
            with torch.no_grad():
                ids = inputs["input_ids"][:, step, None]
                logits.append(model(input_ids=ids, past_key_values=cache).logits)
    assert torch.allclose(torch.cat(logits, 1), torch.cat(expected, 1), atol=1e-4)


def test_sliding_layers_go_back_too_and_another_forward_is_put_back():
    model = build("qwen3")
    own = model.model.forward
    model.model.forward = lambda *args, **kwargs: own(*args, **kwargs)  # as accelerate does
    mine, inputs = model.model.forward, prompt(1, 60)
    expected = dense_steps(model, inputs, [50] + [1] * 10)
    with kvhf.attach(model, **REGIONS) as cache:
        assert {layer.is_sliding for layer in cache.layers} == {True, False}
        logits = steps(model, cache, {n: t[:, :50] for n, t in inputs.items()}, [50])
        for step in range(50, 60):
            ids = inputs["input_ids"][:, step, None]
            fails_in_the_last_layer(model, RuntimeError, past_key_values=cache, input_ids=ids)
            with torch.no_grad():
                logits.append(model(input_ids=ids, past_key_values=cache).logits)
    assert torch.allclose(torch.cat(logits, 1), torch.cat(expected, 1), atol=1e-4)
    assert model.model.forward is mine


LINEAR = dict(
    layer_types=["linear_attention", "full_attention"] * 2,
    linear_key_head_dim=16,
    linear_value_head_dim=16,
    linear_num_key_heads=2,
    linear_num_value_heads=2,
    num_experts=4,
    num_experts_per_tok=2,
    moe_intermediate_size=32,
    shared_expert_intermediate_size=32,
)


@pytest.mark.parametrize(
    ("family", "options"), [("qwen3_next", LINEAR), ("falcon_h1", {})], ids=["apart", "one layer"]
)
def test_linear_attention_cannot_go_back_and_says_so(family, options):
    model = build(family, **options)
    inputs = prompt(1, 30)
    with kvhf.attach(model, **REGIONS) as cache:
        expected = steps(model, cache, inputs, [20] + [1] * 10)
        ids = inputs["input_ids"][:, :1]
        assert not cache.is_croppable
        with pytest.raises(RuntimeError, match="does not track past states"):
            cache.crop(-1)
        fails_in_the_last_layer(model, RuntimeError, past_key_values=cache, input_ids=ids)
        with pytest.raises(RuntimeError, match="could not be undone; call reset"):
            model(input_ids=ids, past_key_values=cache)
        cache.reset()
        again = steps(model, cache, inputs, [20] + [1] * 10)
    assert torch.allclose(torch.cat(again, 1), torch.cat(expected, 1), atol=1e-5)


@pytest.mark.parametrize(
    ("change", "error", "match"),
    [
        (lambda cache: cache.crop(-3), RuntimeError, "past"),
        (lambda cache: cache.reorder_cache(torch.tensor([5, 0])), (ValueError, IndexError), None),
        (lambda cache: cache.reorder_cache(torch.tensor([-1, 0])), (ValueError, IndexError), None),
        (
            lambda cache: cache.batch_select_indices(torch.tensor([-1])),
            ValueError,
            "batch indices from 0",
        ),
        (
            lambda cache: cache.batch_select_indices(torch.tensor([True])),
            (ValueError, IndexError),
            None,
        ),
        (lambda cache: cache.batch_repeat_interleave(0), ValueError, "repeats: got 0"),
        (lambda cache: cache.crop(-1.5), ValueError, "tokens_to_remove: got -1.5"),
        (lambda cache: cache.crop(True), ValueError, "tokens_to_remove: got True"),
    ],
    ids=["crop", "reorder", "reorder-negative", "select", "mask", "repeat", "float", "flag"],
)
@pytest.mark.parametrize("family", ["qwen3", "llama"])
def test_a_change_that_is_refused_changes_no_layer(family, change, error, match):
    """This includes models with sliding windows, which cannot be cropped once they have lost
    rows."""
    model, inputs = build(family), prompt(2, 50, padded=True)
    if family == "llama" and error is RuntimeError:
        pytest.skip("has no sliding window")
    expected = dense_steps(model, inputs, [40] + [1] * 10)
    with kvhf.attach(model, **REGIONS) as cache:
        first = {name: tensor[:, :40] for name, tensor in inputs.items()}
        logits = steps(model, cache, first, [40])
        with pytest.raises(error, match=match):
            change(cache)
        mask = inputs["attention_mask"]
        for step in range(40, 50):
            with torch.no_grad():
                out = model(
                    input_ids=inputs["input_ids"][:, step, None],
                    attention_mask=mask[:, : step + 1],
                    position_ids=mask[:, : step + 1].sum(1, keepdim=True) - 1,
                    past_key_values=cache,
                )
            logits.append(out.logits)
    got = torch.cat(logits, 1).masked_fill(mask[..., None] == 0, 0)
    assert torch.allclose(got, torch.cat(expected, 1), atol=1e-4)


@pytest.mark.parametrize("change", ["crop", "reorder_cache"])
def test_an_interrupt_of_a_change_changes_no_layer(change):
    model, how = build("llama", num_hidden_layers=3), {"crop": -5}
    given = how.get(change, torch.tensor([1, 1]))
    with kvhf.attach(model, index="exact", sink=2, local_window=4, update_every=4) as cache:
        steps(model, cache, prompt(2, 30), [30])
        whole = copy.deepcopy(cache)
        count = lines_of(lambda: getattr(whole, change)(given), Path(kvhf.__file__).parent)
        for line in range(count):
            some = copy.deepcopy(cache)
            call = functools.partial(getattr(some, change), given)
            assert interrupt_at(call, line, Path(kvhf.__file__).parent)
            assert some.lengths() == cache.lengths()
            rows = [layer.index.fetch(all_ids(layer)).keys for layer in some.attention_layers()]
            want = [layer.index.fetch(all_ids(layer)).keys for layer in cache.attention_layers()]
            assert all(map(torch.equal, rows, want))
            some.crop(-1)  # the cache is still usable


def all_ids(layer):
    ids = torch.arange(len(layer.index)).expand(2, 2, -1)
    return kvindex.Hits(ids, torch.zeros(ids.shape))


def test_a_cache_beside_linear_attention_says_whether_it_has_seen_a_token():
    model = build("qwen3_next", **LINEAR)
    with kvhf.attach(model) as cache:
        assert not cache.is_initialized
        with torch.no_grad():
            model(**prompt(1, 10), past_key_values=cache)
        assert cache.is_initialized
