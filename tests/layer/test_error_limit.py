"""A layer with `k="auto"` retrieves as many rows as the error of its output asks for."""

import copy
import math

import pytest
import torch

import kvindex
from kvindex.layer import AttentionLayer
from kvindex.ops import attention

D, N = 32, 1200
SIZES = dict(q_heads=4, kv_heads=2, head_dim=D)
REGIONS = dict(sink=8, local_window=32, update_every=256, dense_below=0)


def layer(backend="torch", index="pariskv", batch=1, read=N, **options):
    made = kvindex.create(index, **SIZES, backend=backend)
    made = AttentionLayer(made, **{"k": "auto", **REGIONS, **options})
    if read:
        made.step(*some(read, seed=1, batch=batch))
    return made


def some(tokens, seed, batch=1):
    """Return queries, keys and values of new tokens."""
    made = torch.Generator().manual_seed(seed)
    heads = (4, 2, 2)
    return tuple(torch.randn(batch, h, tokens, D, generator=made) for h in heads)


def rows_of(made):
    """Return the mean number of rows that steps have read from the index, per KV head."""
    traffic = made.traffic
    return float(traffic.bytes_fetched) / traffic.steps / 2 / (2 * D * 4)


@pytest.mark.parametrize("backend", ["torch", "cpu"])
def test_the_error_of_outputs_is_about_the_limit(backend):
    made = layer(backend, error=0.2)
    errors = []
    for step in range(40):
        queries, keys, values = some(1, seed=10 + step)
        before = copy.deepcopy(made)
        before.error, before.dense_below = None, 2**62
        full = before.step(queries, keys, values)
        found = made.step(queries, keys, values)
        errors.append((found - full).square().sum() / full.square().sum())
    error = math.sqrt(sum(errors) / len(errors))
    assert 0.06 < error < 0.25
    assert 16 < rows_of(made) < 1024


def test_a_smaller_error_reads_more_rows():
    counts = []
    for error in (0.5, 0.2, 0.1):
        made = layer(error=error)
        made.step(*some(1, seed=2))
        counts.append(rows_of(made))
    assert counts == sorted(counts)
    assert counts[0] < counts[-1]


def test_auto_is_a_default_error_and_a_ceiling():
    made = layer(read=0)
    assert (made.k, made.error) == (1024, 0.1)
    made = layer(k=64, error=1e-9)
    made.step(*some(1, seed=2))
    assert rows_of(made) == 64


def test_without_measured_outputs_a_step_attends_to_all_tokens_first():
    _, keys, values = some(N, seed=1)
    made = layer(read=0)
    made.append(keys, values)
    token = some(1, seed=2)
    output = made.step(*token)
    assert made.traffic.steps == 0
    every = (torch.cat(pair, dim=2) for pair in zip((keys, values), token[1:], strict=True))
    full = attention.attend(token[0][:, :, 0], *every, scale=D**-0.5)
    torch.testing.assert_close(output[:, :, 0], full)
    made.step(*some(1, seed=3))
    assert made.traffic.steps == 1


def test_a_search_does_not_change_the_limit():
    made = layer()
    before = made._wanted().variance
    made.step(*some(1, seed=2))
    assert torch.equal(made._wanted().variance, before)
    made.step(*some(300, seed=3))
    assert not torch.equal(made._wanted().variance, before)


def test_padding_is_not_measured():
    queries, keys, values = some(N, seed=1)
    valid = torch.ones(1, N, dtype=torch.bool)
    valid[:, -100:] = False
    padded = layer(read=0)
    padded.step(queries, keys, values, valid=valid)
    loud = values.clone()
    loud[:, :, -100:] = 1e6
    other = layer(read=0)
    other.step(queries, keys, loud, valid=valid)
    assert torch.equal(padded._wanted().variance, other._wanted().variance)


def test_a_loaded_layer_continues_equally(tmp_path):
    made, token = layer(), some(1, seed=2)
    made.save(tmp_path / "saved")
    loaded = kvindex.load(tmp_path / "saved")
    assert (loaded.k, loaded.error) == (made.k, made.error)
    assert torch.equal(loaded.step(*token), made.step(*token))


def test_a_state_with_only_one_of_the_means_is_refused():
    state = layer().state_dict()
    del state["scale.outputs"]
    with pytest.raises(ValueError, match=r"state\['scale.outputs'\]: got none"):
        layer(read=0).load_state_dict(state)


def test_rollback_and_copies_restore_the_measured_sizes():
    made = layer()
    before, token = made.checkpoint(), some(1, seed=2)
    twin = copy.deepcopy(made)
    made.step(*some(300, seed=3))
    made.rollback(before)
    assert torch.equal(made.step(*token), twin.step(*token))


def test_each_sequence_has_a_limit_of_its_own():
    queries, keys, values = some(N, seed=1, batch=2)
    values[1] *= 3
    made = layer(read=0)
    made.step(queries, keys, values)
    limits = made._wanted().variance
    assert limits.shape == (2, 2)
    made.reorder(torch.tensor([1, 0]))
    assert torch.equal(made._wanted().variance, limits[[1, 0]])
    output = made.step(*some(1, seed=2, batch=2))
    assert output.isfinite().all()


def test_learned_sinks_and_several_tokens():
    """A large sink logit leaves little attention weight for the index, so few rows are read."""
    few, many = layer(search_up_to=4), layer(search_up_to=4)
    sinks = torch.full((4,), 20.0)
    few.step(*some(3, seed=2), sink_logits=sinks)
    many.step(*some(3, seed=2))
    assert few.traffic.steps == many.traffic.steps == 3
    assert rows_of(few) == 16 < rows_of(many)


def test_a_bias_counts_as_weight_outside_the_index():
    made = layer()
    bias = torch.zeros(1, 4, 1, N + 1)
    bias[..., -10:] = 20.0
    made.step(*some(1, seed=2), bias=bias)
    assert rows_of(made) == 16


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (dict(k="many"), "k: got 'many', allowed is a number of at least 1, or 'auto'"),
        (dict(error=0.0), "error: got 0.0, allowed is a number above 0"),
        (dict(error=math.nan), "error: got nan, allowed is a number above 0"),
        (dict(coverage=0.9), "k: got 'auto' together with coverage=0.9"),
        (dict(k=10, error=0.1, coverage=0.9), "error: got 0.1 together with coverage=0.9"),
        (dict(index="quest"), "k: got 'auto', but Quest with these options cannot predict"),
        (dict(index="pariskv:preset=fast"), "k: got 'auto', but ParisKV with these options"),
        (dict(index="pariskv+recall"), "k: got 'auto', but"),
    ],
)
def test_bad_input(options, message):
    with pytest.raises(ValueError, match=message):
        layer(read=0, **options)


def test_a_graph_cannot_capture_a_step():
    assert "error: got 0.1" in layer().capture_refusal()
    assert not layer().joins(1)
