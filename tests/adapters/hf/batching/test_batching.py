"""Continuous batching with indexes gives the results of transformers' own `generate_batch`."""

import pytest
import torch
from transformers import GenerationConfig
from transformers.generation import ContinuousBatchingConfig
from transformers.generation.continuous_batching import PagedAttentionCache

import kvindex_adapters.hf as kvhf
from kvindex_adapters.hf.batching import layer
from kvindex_adapters.hf.model.patch import IMPLEMENTATION
from tests.adapters.tiny import VOCABULARY, build
from tests.support.helpers import slow

REGIONS = dict(sink=2, local_window=4, update_every=8, dense_below=0)
"""Small regions, so that nearly every decode step searches."""
EXACT = dict(index="exact", k=500, **REGIONS)
TOKENS = 12
NEWER = "page_size" in ContinuousBatchingConfig.__dataclass_fields__
"""True for transformers after 5.17.

In 5.17, `page_size` is called `block_size`, and only one answer of a request is returned.
"""


def prompts(*lengths, seed=3, prefix=()):
    """Return random token ids, one list for each request."""
    generator = torch.Generator().manual_seed(seed)
    random_ids = [torch.randint(3, VOCABULARY, (n,), generator=generator).tolist() for n in lengths]
    return [[*prefix, *ids] for ids in random_ids]


def batch(model, inputs, *, answers=1, **options):
    """Return the tokens of `generate_batch` for each request."""
    sizes = dict(page_size=16, block_size=16, num_blocks=64, max_batch_tokens=64)
    sizes.pop("block_size" if NEWER else "page_size")
    sampling = dict(do_sample=True, top_k=1) if answers > 1 else dict(do_sample=False)
    config = GenerationConfig(
        max_new_tokens=TOKENS, eos_token_id=-1, num_return_sequences=answers, **sampling
    )
    found = model.generate_batch(
        inputs,
        generation_config=config,
        continuous_batching_config=ContinuousBatchingConfig(**{**sizes, **options}),
    )
    assert len(found) == len(inputs) * answers
    assert all(result.error is None for result in found.values())
    return [result.generated_tokens for result in found.values()]


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def model(request):
    return build("llama", num_hidden_layers=2).to(request.param)


@pytest.mark.parametrize(
    ("index", "options"),
    [
        slow("exact", {}),
        slow("pariskv", {"allow_block_sharing": False}),
        slow("quest", {"max_batch_tokens": 24}),  # prompts come in chunks
        ("pariskv", {"num_blocks": 12}),  # requests are preempted
    ],
)
def test_tokens_with_all_rows_are_those_of_plain_attention(model, index, options):
    shared = prompts(32, seed=9)[0]
    inputs = prompts(1, 7, 30, 61, 90) + prompts(5, 9, seed=4, prefix=shared)
    expected = batch(model, inputs, **options)
    with kvhf.attach_batch(model, **{**EXACT, "index": index}) as batching:
        assert batch(model, inputs, **options) == expected
        report = batching.report()
        assert report.steps >= 5 * TOKENS
        assert report.nbytes == {"indexes": 0}  # all indexes are freed


def test_a_step_that_searches_does_not_read_all_rows_from_the_pages(model, monkeypatch):
    sizes, update = [], PagedAttentionCache.update

    def counted(*args, **kwargs):
        keys, values = update(*args, **kwargs)
        sizes.append(keys.numel())
        return keys, values

    monkeypatch.setattr(PagedAttentionCache, "update", counted)
    config = model.config
    with kvhf.attach_batch(model, **{**EXACT, "k": 1}) as batching:
        batch(model, prompts(60))
        assert batching.report().steps == TOKENS - 1
    rows = [size // (config.num_key_value_heads * config.head_dim) for size in sizes]
    # the prompt, and once for the index
    assert sum(count > 40 for count in rows) == 2 * config.num_hidden_layers


def test_sliding_layers_keep_their_own():
    model, inputs = build("qwen3"), prompts(20, 45, 70)
    expected, own = batch(model, inputs), model.model.layers[0].self_attn.config
    with kvhf.attach_batch(model, **EXACT) as batching:
        assert set(batching.layers) == {1, 3}
        assert model.model.layers[0].self_attn.config is own
        assert batch(model, inputs) == expected


@pytest.mark.skipif(not NEWER, reason="transformers 5.17 gives one answer a request")
@pytest.mark.parametrize("sharing", [True, slow(False)])
def test_several_answers_go_on_from_one_index(model, monkeypatch, sharing):
    forks, fork = [], layer.Pool.fork
    monkeypatch.setattr(layer.Pool, "fork", lambda *a: forks.append(a) or fork(*a))
    inputs = prompts(50, 40)
    options = dict(answers=3, allow_block_sharing=sharing)
    expected = batch(model, inputs, **options)
    with kvhf.attach_batch(model, **EXACT):
        assert batch(model, inputs, **options) == expected
    assert bool(forks) == sharing


def test_one_query_rows_read_few_rows_and_all_else_is_exact(model):
    inputs = prompts(80, 90, 10)
    expected = batch(model, inputs)
    with kvhf.attach_batch(model, **{**EXACT, "k": 1}) as batching:
        few = batch(model, inputs)
        report = batching.report()
    # the prompt's logits give this token
    assert [tokens[0] for tokens in few] == [tokens[0] for tokens in expected]
    assert few != expected
    assert report.rows_read < 0.4 * report.rows_full
    with kvhf.attach_batch(model, **{**EXACT, "k": 1, "dense_below": 200}) as batching:
        assert batch(model, inputs) == expected
        assert batching.report().steps == 0


def test_requests_that_end_close_their_sequences(model):
    seen = []
    with kvhf.attach_batch(model, **EXACT) as batching:
        layer, config = batching.layers[1], GenerationConfig(eos_token_id=-1, do_sample=False)
        attend = layer.attend
        layer.attend = lambda *given: [attend(*given), seen.append(len(layer.pool))][0]
        sizes = ContinuousBatchingConfig(num_blocks=8, max_batch_tokens=64)
        with model.continuous_batching_context_manager(
            generation_config=config, continuous_batching_config=sizes
        ) as manager:
            for ids, count in zip(prompts(30, 31, 32), (3, 6, 9), strict=True):
                manager.add_request(ids, max_new_tokens=count)
            results = [manager.get_result(timeout=60) for _ in range(3)]
        assert all(result.error is None for result in results)
    assert max(seen) == 3
    assert seen[-1] == 1


def test_a_step_that_fails_leaves_nothing(model):
    inputs = prompts(30, 60)
    expected = batch(model, inputs)
    with kvhf.attach_batch(model, **EXACT) as batching:
        layer = batching.layers[1]
        attend, calls = layer.attend, []

        def failing(*given):
            calls.append(given)
            if len(calls) == 4:
                raise RuntimeError("out of memory")
            return attend(*given)

        layer.attend = failing
        with pytest.raises(AssertionError):
            batch(model, inputs)  # transformers returns results with the error
        assert len(calls) == 4
        assert all(len(one.pool) == 0 for one in batching.layers.values())
        layer.attend = attend
        assert batch(model, inputs) == expected
    assert batch(model, inputs) == expected


@pytest.mark.slow
def test_two_models_in_turn_and_each_is_restored(model):
    other, inputs = build("qwen2", num_hidden_layers=2, layer_types=None), prompts(20, 50)
    expected = batch(model, inputs), batch(other, inputs)
    kinds = type(model), type(other)
    with kvhf.attach_batch(model, **EXACT), kvhf.attach_batch(other, **EXACT):
        for _ in range(2):
            assert (batch(model, inputs), batch(other, inputs)) == expected
    assert (type(model), type(other)) == kinds
    for module in (*model.modules(), *other.modules()):
        config = vars(module).get("config")
        assert config is None or vars(config)[IMPLEMENTATION] == "sdpa"
    with kvhf.attach(model, **EXACT) as cache:
        model(torch.tensor([inputs[0]], device=model.device), past_key_values=cache)


def test_bfloat16(model):
    model.to(torch.bfloat16)
    with kvhf.attach_batch(model, **{**EXACT, "index": "pariskv", "k": 4}) as batching:
        assert all(len(tokens) == TOKENS for tokens in batch(model, prompts(40, 70)))
        assert batching.report().steps
        assert batching.explain().count("layer") == 2


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"index": "h2o"}, "queries of a prompt"),
        ({"index": "nothing"}, "index: got 'nothing'"),
        ({"dense_layers": (0, 1)}, "leaves no layer with an index"),
        ({"k": 0}, "k: got 0"),
    ],
)
def test_bad_options_are_refused(model, options, says):
    before, kind = model.model.layers[0].self_attn.config, type(model)
    with pytest.raises(ValueError, match=says), kvhf.attach_batch(model, **options):
        pass
    assert model.model.layers[0].self_attn.config is before
    assert type(model) is kind
    with kvhf.attach_batch(model, **EXACT):
        pass


@pytest.mark.parametrize(
    ("family", "says"),
    [
        ("gpt_oss", "attention 'eager'"),
        ("gemma2", "attention 'eager'"),
        ("deepseek_v3", "latent attention"),
        ("falcon_h1", "LinearAttention"),
        ("gemma4_text", "several shapes"),
    ],
)
def test_models_are_refused(family, says):
    model = build(family)
    with pytest.raises(kvhf.UnsupportedError, match=says), kvhf.attach_batch(model, **EXACT):
        pass


def test_calls_are_refused(model):
    inputs = torch.tensor(prompts(9), device=model.device)
    with kvhf.attach_batch(model, **EXACT):
        for call in (model, model.generate):
            with pytest.raises(
                kvhf.UnsupportedError, match="does not come from continuous batching"
            ):
                call(inputs)
        with pytest.raises(kvhf.UnsupportedError, match="outside of continuous batching"):
            model.model(inputs)
        for option in ({"use_cuda_graph": True}, {"use_async_batching": True}):
            with pytest.raises(kvhf.UnsupportedError, match=next(iter(option))):
                batch(model, prompts(9), **option)
        with pytest.raises(ValueError, match="attached already"), kvhf.attach(model):
            pass
        batch(model, prompts(9))


def test_what_a_step_refuses_is_raised_by_generate_batch(model):
    with kvhf.attach_batch(model, **EXACT):
        model.model.layers[1].self_attn.sinks = torch.zeros(4)
        with pytest.raises(kvhf.UnsupportedError, match="learned sinks"):
            batch(model, prompts(9))
        del model.model.layers[1].self_attn.sinks
        batch(model, prompts(9))
