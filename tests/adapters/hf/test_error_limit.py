"""`k="auto"` and `error=…` in the adapters: as many rows as the error asks for."""

import pytest
import torch

import kvindex_adapters.hf as kvhf
from kvindex_adapters.decoder import Decoder
from kvindex_adapters.evaluate.parallel import ParallelLayer
from tests.adapters.hf.generation.test_generation import Words
from tests.adapters.tiny import build, prompt, steps

REGIONS = dict(sink=4, local_window=8, update_every=64, dense_below=0)
AUTO = dict(k="auto", error=0.3, **REGIONS)
PROMPT = 300
SIZES = [PROMPT] + [1] * 4


@pytest.fixture
def model():
    return build("llama", num_hidden_layers=2)


def test_the_report_says_how_many_rows_were_found(model):
    with kvhf.attach(model, **AUTO) as cache:
        outputs = steps(model, cache, prompt(1, sum(SIZES)), SIZES)
        report = cache.report()
    assert all(output.isfinite().all() for output in outputs)
    found = report.rows_found
    assert report.steps == 4
    assert len(found.by_layer) == 2
    assert 16 <= min(found.by_layer) <= found.mean <= max(found.by_layer) <= found.p99 <= PROMPT
    assert f"searches found {found.mean:.0f} rows per KV head on average" in str(report)


def test_a_fixed_number_of_rows_is_not_counted(model):
    with kvhf.attach(model, k=20, **REGIONS) as cache:
        steps(model, cache, prompt(1, sum(SIZES)), SIZES)
        assert cache.report().rows_found is None


def test_a_smaller_error_is_closer_to_full_attention(model):
    inputs = prompt(1, sum(SIZES))
    found = []
    for options in (dict(k=500), dict(k="auto", error=2.0), dict(k="auto", error=0.02)):
        with kvhf.attach(model, **REGIONS, **options) as cache:
            found.append(torch.cat(steps(model, cache, inputs, SIZES), 1))
    full, loose, tight = found
    assert (tight - full).norm() < (loose - full).norm()


def test_parallel_steps_equal_steps_one_after_the_other(model):
    inputs = prompt(1, sum(SIZES))
    with kvhf.attach(model, **AUTO) as cache:
        one_by_one = torch.cat(steps(model, cache, inputs, SIZES), 1)
    with kvhf.attach(model, layer=ParallelLayer, **AUTO) as cache:
        read = steps(model, cache, inputs, SIZES[:1])
        for layer in cache.layers:
            layer.attention.begin()
        rest = model(input_ids=inputs["input_ids"][:, PROMPT:], past_key_values=cache).logits
    torch.testing.assert_close(torch.cat([*read, rest], 1), one_by_one, atol=1e-4, rtol=1e-4)


def test_generate_and_the_decoder(model):
    ids = prompt(1, PROMPT)["input_ids"][0]
    options = dict(k="auto", max_new_tokens=4, attach_options=dict(error=0.3, **REGIONS))
    answer = kvhf.generate(model, Words(), ids, **options)
    assert answer.report.rows_found is not None
    other = Decoder.of(model).generate(ids, **options)
    assert len(other.answer_ids) == len(answer.answer_ids)


@pytest.mark.parametrize("backend", ["torch", "cpu"])
def test_latents(backend):
    """Latents are searched within the limit, too."""
    model, inputs = build("deepseek_v3", num_hidden_layers=2), prompt(1, sum(SIZES))
    options = dict(index="pariskv", index_options=dict(backend=backend), **REGIONS)
    found = []
    for error in (2.0, 0.02):
        with kvhf.attach(model, k="auto", error=error, **options) as cache:
            found.append(torch.cat(steps(model, cache, inputs, SIZES), 1))
            report = cache.report()
        assert report.steps == 4
        assert 16 <= report.rows_found.mean <= PROMPT
    with kvhf.attach(model, k=500, **options) as cache:
        full = torch.cat(steps(model, cache, inputs, SIZES), 1)
    loose, tight = found
    assert (tight - full).norm() < (loose - full).norm()


def test_uniform_attention_takes_the_ceiling_and_reports_it(model):
    """Queries of zero in the first layer attend to all tokens equally."""
    projection = model.model.layers[0].self_attn.q_proj
    projection.weight.data.zero_()
    with kvhf.attach(model, **AUTO | dict(k=64, error=1e-3)) as cache:
        steps(model, cache, prompt(1, sum(SIZES)), SIZES)
        found = cache.report().rows_found
    assert found.by_layer[0] == 64
    assert found.p99 == 64
    assert f"{found.p99} at the 99th percentile" in str(found)
    assert found.ceiling >= 0.5  # one of the two layers
    assert f"; {found.ceiling:.1%} took as many as k allows" in str(found)


def test_the_ceiling_is_not_reported_if_no_head_takes_it(model):
    with kvhf.attach(model, **AUTO | dict(error=1e3)) as cache:
        steps(model, cache, prompt(1, sum(SIZES)), SIZES)
        found = cache.report().rows_found
    assert (found.mean, found.ceiling) == (16, 0)
    assert str(found).endswith("16 at the 99th percentile")


def test_a_fork_continues_with_the_measured_sizes(model):
    inputs = prompt(1, sum(SIZES))
    with kvhf.attach(model, **AUTO) as cache:
        steps(model, cache, {n: part[:, :PROMPT] for n, part in inputs.items()}, [PROMPT])
        fork = cache.fork()
        made = [
            torch.cat(steps(model, one, {n: p[:, PROMPT:] for n, p in inputs.items()}, [1] * 4), 1)
            for one in (cache, fork)
        ]
        assert torch.equal(*made)
        assert fork.report().rows_found.mean == cache.report().rows_found.mean


@pytest.mark.parametrize(
    ("attach", "options", "message"),
    [
        ("attach_batch", dict(k="auto"), "k: got 'auto', allowed with attach_batch is a number"),
        ("attach", dict(k="auto", index="quest"), "k: got 'auto', but Quest"),
    ],
)
def test_what_does_not_support_it_says_so(model, attach, options, message):
    with pytest.raises(ValueError, match=message), getattr(kvhf, attach)(model, **options):
        pass
