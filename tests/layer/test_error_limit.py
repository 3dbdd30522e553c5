"""A layer with `k="auto"` retrieves as many rows as the error of its output asks for."""

import copy
import math

import pytest
import torch
from torch.nn.functional import pad

import kvindex
from kvindex.core.protocol import CapturesStep, ErrorLimit
from kvindex.layer import AttentionLayer
from kvindex.layer.output_scale import FEWEST
from kvindex.layer.retrieval import _resident_lse
from kvindex.ops import attention
from kvindex.wrappers import Wrapper

D, N = 32, 1200
SIZES = dict(q_heads=4, kv_heads=2, head_dim=D)
REGIONS = dict(sink=8, local_window=32, update_every=256, dense_below=0)


def quiet(queries, keys, values):
    """Return sharper queries, for which few rows have most of the attention weight."""
    return 3 * queries, keys, values


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


def test_the_number_of_rows_may_change():
    """A layer with a fixed number has measured nothing, and has not counted how many it finds."""
    made = layer(k=10)
    made.step(*some(1, seed=2))
    assert made.traffic.found is None
    made.set_rows("auto", error=0.5)
    assert (made.k, made.error, made.measuring) == (1024, 0.5, True)
    for step in range(FEWEST + 3):
        made.step(*some(1, seed=10 + step))
    assert made.traffic.steps == 3
    assert made.traffic.found.sum() == 2 * 3
    made.set_rows(20)
    assert (made.k, made.error) == (20, None)
    made.step(*some(1, seed=3))
    assert made.traffic.found is None
    assert float(made.traffic.bytes_fetched) == 20 * 2 * (2 * D * 4)
    for k, error, words in ((0, None, "k: got 0"), (5, -1.0, "error: got -1.0"), ("all", 1, "k:")):
        with pytest.raises(ValueError, match=words):
            made.set_rows(k, error=error)
    assert (made.k, made.error) == (20, None)
    with pytest.raises(ValueError, match="k: got 'auto' together with coverage"):
        layer(k=10, coverage=0.9).set_rows("auto")


def test_the_number_of_rows_can_be_rolled_back():
    made = layer(k=10)
    before = made.checkpoint()
    made.set_rows("auto", error=0.5)
    made.rollback(before)
    assert (made.k, made.error) == (10, None)
    made.step(*some(1, seed=2))
    assert rows_of(made) == 10
    made = layer()
    before = made.checkpoint()
    made.set_rows(10)
    made.rollback(before)
    made.step(*some(1, seed=2))
    assert made.traffic.found.sum() == 2


def test_steps_attend_to_all_tokens_until_enough_outputs_are_measured():
    _, keys, values = some(N, seed=1)
    made = layer(read=0)
    made.append(keys, values)
    token = some(1, seed=2)
    output = made.step(*token)
    assert made.traffic.steps == 0
    every = (torch.cat(pair, dim=2) for pair in zip((keys, values), token[1:], strict=True))
    full = attention.attend(token[0][:, :, 0], *every, scale=D**-0.5)
    torch.testing.assert_close(output[:, :, 0], full)
    for step in range(FEWEST - 1):
        made.step(*some(1, seed=3 + step))
    assert made.traffic.steps == 0
    made.step(*some(1, seed=99))
    assert made.traffic.steps == 1


def test_a_search_does_not_change_the_limit():
    made = layer()
    before = made._wanted().variance
    made.step(*some(1, seed=2))
    assert torch.equal(made._wanted().variance, before)
    made.step(*some(300, seed=3))
    assert not torch.equal(made._wanted().variance, before)


@pytest.mark.parametrize("padding", [100, 600])
@pytest.mark.parametrize("left", [True, False])
def test_padding_is_not_measured(padding, left):
    queries, keys, values = some(N, seed=1)
    plain = layer(read=0)
    plain.step(queries, keys, values)
    after = (0, 0, padding, 0) if left else (0, 0, 0, padding)
    queries, keys, values = (pad(part, after, value=math.nan) for part in (queries, keys, values))
    valid = ~queries[:, 0, :, 0].isnan()
    padded = layer(read=0)
    padded.step(queries, keys.nan_to_num(0), values.nan_to_num(0), valid=valid)
    torch.testing.assert_close(padded._wanted().variance, plain._wanted().variance)


def test_a_chunk_of_padding_changes_nothing():
    made, (queries, keys, values) = layer(batch=2), some(1100, seed=2, batch=2)
    before, valid = made._wanted().variance, torch.ones(2, 1100, dtype=torch.bool)
    valid[1] = False
    made.step(queries, keys, values, valid=valid)
    after = made._wanted().variance
    assert torch.equal(after[1], before[1])
    assert not torch.equal(after[0], before[0])


@pytest.mark.parametrize("sizes", [[100] * 12, [1, 599, 600], [20] + [1] * 1180])
def test_the_limit_hardly_depends_on_the_chunks(sizes):
    queries, keys, values = some(N, seed=1)
    whole, made, start = layer(), layer(read=0, dense_below=2048), 0
    for size in sizes:
        part = slice(start, start + size)
        made.step(queries[:, :, part], keys[:, :, part], values[:, :, part])
        start += size
    ratio = made._wanted().variance / whole._wanted().variance
    assert ratio.max() < 6  # the outputs of the first tokens are much larger than later ones


def test_a_truncation_to_nothing_forgets_the_sizes():
    made = layer()
    made.truncate(N - 10)
    assert made._scale.known
    made.truncate(0)
    made.append(*some(N, seed=4)[1:])
    made.step(*some(1, seed=5))
    assert made.traffic.steps == 0


def test_tensors_with_gradients():
    made = layer("cpu")
    queries, keys, values = some(1, seed=2)
    twin = copy.deepcopy(made)
    output = made.step(queries.requires_grad_(), keys.requires_grad_(), values)
    assert torch.equal(output.detach(), twin.step(queries.detach(), keys.detach(), values))
    made.step(*(part.requires_grad_() for part in some(300, seed=3)))
    assert not made._wanted().variance.requires_grad


def test_the_log_sum_of_sink_and_window():
    made = layer(search_up_to=4)
    made.step(*some(40, seed=7))
    query = some(1, seed=8)[0][:, :, 0]
    window, index = made._window, made.index
    seen = torch.ones(1, len(window), dtype=torch.bool)
    seen[:, -3:] = False
    lse = _resident_lse(index, window, query, seen, None, None)
    rows, mask = window.with_sink(seen)
    keys = rows.keys[:, :, mask[0]]
    assert keys.shape[2] == 8 + len(window) - 3
    _, expected = attention.attend(query, keys, keys, scale=D**-0.5, return_lse=True)
    torch.testing.assert_close(lse, expected)


def test_a_loaded_layer_continues_equally(tmp_path):
    made, token = layer("cpu", error=0.3), quiet(*some(1, seed=2))
    made.save(tmp_path / "saved")
    loaded = kvindex.load(tmp_path / "saved")
    assert (loaded.k, loaded.error) == (made.k, made.error)
    assert torch.equal(loaded._wanted().variance, made._wanted().variance)
    assert torch.equal(loaded.step(*token), made.step(*token))
    assert 16 <= rows_of(made) == rows_of(loaded) < 900


def test_a_state_with_only_one_of_the_means_is_refused():
    state = layer().state_dict()
    del state["scale.outputs"]
    with pytest.raises(ValueError, match=r"state\['scale.outputs'\]: got none"):
        layer(read=0).load_state_dict(state)


def test_rollback_and_copies_restore_the_measured_sizes():
    made = layer()
    before, token = made.checkpoint(), some(1, seed=2)
    twin = copy.deepcopy(made)
    made.step(*quiet(*some(300, seed=3)))
    assert not torch.equal(made._wanted().variance, twin._wanted().variance)
    made.rollback(before)
    assert torch.equal(made._wanted().variance, twin._wanted().variance)
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


def test_heads_of_a_layer_choose_apart():
    """A KV head with uniform attention takes the ceiling; one row is enough for the other."""
    made = layer(k=512, error=0.02)
    queries, keys, values = some(1, seed=2)
    queries[:, :2] = 0
    queries[:, 2:] = 8 * made._window.rows.keys[:, 1:, -1].repeat_interleave(2, 1)[:, :, None]
    made.step(queries, keys, values)
    found = made.traffic.found
    assert found[512] == 1
    assert found[16] == 1
    assert found.sum() == 2


def test_tokens_that_attend_to_all_do_not_search():
    made = layer()
    with made.attending_fully():
        made.step(*some(1, seed=2))
    assert made.traffic.steps == 0
    with made.speculating(3):
        made.step(*some(3, seed=3))
    assert made.traffic.steps == 3
    assert made.traffic.found.sum() == 6


def test_a_sparse_prompt_is_measured():
    made = layer(read=0, prefill="sparse", prefill_last=32)
    queries, keys, values = some(N, seed=1)
    made.step(queries, keys, values)
    assert made._scale.known
    made.step(*some(1, seed=2))
    assert made.traffic.steps == 1


def test_sequences_of_a_pool_keep_their_measured_sizes():
    pool = kvindex.LayerPool(layer(read=0, error=0.3))
    one = pool.open()
    pool.step([one], *some(N, seed=1))
    fork = pool.fork(one)
    assert torch.equal(pool[fork]._wanted().variance, pool[one]._wanted().variance)
    token = quiet(*some(1, seed=2))
    assert torch.equal(pool.step([one], *token), pool.step([fork], *token))
    assert torch.equal(pool[fork].traffic.found, pool[one].traffic.found)


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
        (dict(error=0.0), "error: got 0.0, allowed is a positive finite number"),
        (dict(error=math.nan), "error: got nan, allowed is a positive finite number"),
        (dict(error=math.inf), "error: got inf, allowed is a positive finite number"),
        (dict(error="0.1"), "error: got '0.1', allowed is a positive finite number"),
        (dict(error=True), "error: got True, allowed is a positive finite number"),
        (dict(coverage=0.9), "k: got 'auto' together with coverage=0.9"),
        (dict(k=10, error=0.1, coverage=0.9), "error: got 0.1 together with coverage=0.9"),
        (dict(index="quest"), "k: got 'auto', but Quest with these options cannot predict"),
        (dict(index="pariskv:preset=fast"), "k: got 'auto', but ParisKV with these options"),
        (dict(index="pariskv+reuse"), "k: got 'auto', but"),
        (dict(index="pariskv+sharded"), "k: got 'auto', but Sharded with these options cannot"),
        (dict(index="exact"), "k: got 'auto', but Exact with these options cannot predict"),
    ],
)
def test_bad_input(options, message):
    with pytest.raises(ValueError, match=message):
        layer(read=0, **options)


def test_recall_is_counted_with_a_limit():
    made = layer(index="pariskv+recall", error=0.3)
    made.step(*quiet(*some(1, seed=2)))
    assert 0 < made.index.recall() < 1
    assert rows_of(made) < 900


def test_a_search_within_a_limit_is_protected_from_settings_of_the_caller():
    made = layer()
    query, wanted = some(1, seed=2)[0][:, :, 0], made._wanted()
    limit = ErrorLimit(wanted.variance)
    found = made.index.search_within(query, k=300, limit=limit)
    with torch.autocast("cpu", torch.bfloat16):
        other = made.index.search_within(query, k=300, limit=limit)
    assert torch.equal(found.ids, other.ids)
    assert torch.equal(found.log_weight, other.log_weight)


def test_a_graph_captures_a_step_only_if_its_kernels_choose_the_number_of_rows():
    made = layer()
    made.step(*some(1, seed=2))
    made.index = NoLimits(made.index)
    assert "error: got 0.1, allowed is None and a number for k" in made.capture_refusal()
    assert made.prepare_replay() is None
    assert not made.joins(1)


class NoLimits(Wrapper):
    """An index that has decode steps for a graph, but with a fixed number of rows."""

    own = frozenset({CapturesStep})

    def prepare_replay(self, resident, *, k):
        raise NotImplementedError

    def captured_step(self, queries, token, resident, *, k):
        raise NotImplementedError
