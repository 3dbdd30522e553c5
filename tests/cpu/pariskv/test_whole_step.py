"""A step with arguments that are made once equals the same stages called one by one, bit by bit."""

from dataclasses import replace
from threading import Thread

import pytest
import torch

from kvindex.core.protocol import Rows
from kvindex.core.resident import ResidentRows
from kvindex.layer import AttentionLayer
from tests.support.helpers import Case, left_padding, part

CASE = Case(q_heads=6, kv_heads=2, head_dim=64, batch=2)
SIZES = dict(k=20, sink=4, local_window=16, update_every=24, dense_below=64)


def pair(case=CASE, **options):
    """Make two equal layers; the second one calls the stages one by one in every step."""
    layers = []
    for has_tables in (True, False):
        index = case.index("pariskv", backend="cpu", **options)
        index._executor._has_tables = has_tables
        layers.append(AttentionLayer(index, **SIZES))
    return layers


def feed(layers, tokens, queries, start, stop, **options):
    """Let all layers take one step, and return their outputs."""
    some = queries[:, :, start:stop], *part(tokens, start, stop)
    return [layer.step(*some, **options) for layer in layers]


def sequence(case, count):
    """Return tokens and queries of `count` positions."""
    queries = case.tensor(5, case.batch, case.q_heads, count, case.head_dim)
    return case.tokens(count), queries.to(case.dtype)


def assert_same_steps(layers, tokens, queries, start, stop):
    for t in range(start, stop):
        outputs = feed(layers, tokens, queries, t, t + 1)
        assert torch.equal(*outputs)


def step_of(layer):
    return layer.index._executor._step


@pytest.mark.parametrize(
    ("sizes", "options"),
    [
        ({}, {}),
        (dict(batch=1, q_heads=9, kv_heads=3), {}),
        ({}, dict(preset="fast")),
        ({}, dict(preset="fast", center=0)),
        ({}, dict(sampling="priority", query_max=127)),
        (dict(head_dim=40, value_dim=24, softcap=5.0), dict(magnitude_bits=5)),
        (dict(dtype=torch.bfloat16), {}),
        (dict(dtype=torch.float16, q_heads=2), {}),
    ],
    ids=str,
)
def test_steps_equal_those_of_the_stages_one_by_one(sizes, options):
    case = replace(CASE, **sizes)
    (tokens, queries), layers = sequence(case, 460), pair(case, **options)
    feed(layers, tokens, queries, 0, 400)
    assert_same_steps(layers, tokens, queries, 400, 460)
    assert step_of(layers[0]) is not None
    assert step_of(layers[1]) is None
    assert layers[0].traffic == layers[1].traffic
    states = [layer.state_dict() for layer in layers]
    assert all(torch.equal(states[0][name], states[1][name]) for name in states[0])


def test_a_prompt_with_padding_changes_nothing():
    (tokens, queries), layers = sequence(CASE, 430), pair()
    feed(layers, tokens, queries, 0, 400, valid=left_padding([0, 70], 400))
    assert_same_steps(layers, tokens, queries, 400, 430)


def test_tensors_may_have_gaps():
    (tokens, queries), layers = sequence(CASE, 410), pair()
    feed(layers, tokens, queries, 0, 400)
    for t in range(400, 410):
        some = queries[:, :, t : t + 1], *part(tokens, t, t + 1)
        wide = [torch.stack([tensor, tensor], dim=-1)[..., 0] for tensor in some]
        assert not any(tensor.is_contiguous() for tensor in wide)
        assert torch.equal(layers[0].step(*wide), layers[1].step(*some))


def test_arguments_stay_until_the_index_or_the_buffer_changes():
    (tokens, queries), layers = sequence(CASE, 460), pair()
    feed(layers, tokens, queries, 0, 400)
    steps, lengths = [], []
    for t in range(400, 460):
        feed(layers, tokens, queries, t, t + 1)
        lengths.append(len(layers[0].index))
        steps.append(step_of(layers[0]))
    assert len({id(step) for step in steps if step is not None}) == len(set(lengths))
    layers[0].k = layers[1].k = 7
    again = sequence(CASE, 470)
    assert_same_steps(layers, *again, 460, 470)
    assert step_of(layers[0]) is None or step_of(layers[0]).k == 7


def test_another_thread_has_buffers_of_its_own():
    (tokens, queries), layers = sequence(CASE, 420), pair()
    feed(layers, tokens, queries, 0, 400)
    owners = []
    for t in range(400, 420):
        outputs = []
        work = Thread(
            target=lambda t=t, to=outputs: to.extend(feed(layers, tokens, queries, t, t + 1))
        )
        work.start()
        work.join()
        owners += [step_of(layers[0]).buffers] if step_of(layers[0]) else []
        assert torch.equal(*outputs)
        assert_same_steps(layers, *(sequence(CASE, 421)), 420, 421)
    assert len({id(owner) for owner in owners}) > 1


def lone(**options):
    """Make an index with tokens, and the arguments of one step."""
    index, rows = CASE.index("pariskv", backend="cpu", **options), Rows(*CASE.tokens(1))
    index.append(*CASE.tokens(300))
    window = Rows(torch.empty_like(rows.keys), torch.empty_like(rows.values))
    return index, CASE.queries(), rows, ResidentRows(index.geometry, 2, 2), window


@pytest.mark.parametrize("check", [None, True, False])
def test_numbers_are_checked_unless_the_index_checks_none(check):
    index, queries, rows, resident, window = lone(check=check)
    assert index.checks_tokens is (check is not False)
    bad = Rows(rows.keys.clone(), rows.values)
    queries[0, 1, 2] = bad.keys[1, 0, 0, 5] = float("nan")
    for asked, token, name in ((queries, rows, "queries"), (CASE.queries(), bad, "keys")):
        if check is False:
            index.decode_step(asked, token, resident, window, k=9)
        else:
            with pytest.raises(ValueError, match=f"{name}: got nan, allowed is a finite number"):
                index.decode_step(asked, token, resident, window, k=9)
    assert len(resident) == (2 if check is False else 0)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda part: part[..., :3], r"values: got .* \(2, 2, 1, 3\)"),
        (lambda part: part.half(), "values: got torch.float16"),
        (lambda part: part.to("meta"), "values: got .* on meta"),
    ],
)
def test_a_token_of_another_kind_is_refused(change, said):
    index, queries, rows, resident, window = lone()
    wrong = Rows(rows.keys, change(rows.values))
    with pytest.raises(ValueError, match=said):
        index.decode_step(queries, wrong, resident, window, k=9)
    with pytest.raises(ValueError, match=f"window.{said}"):
        index.decode_step(queries, rows, resident, wrong, k=9)
    assert len(resident) == 0


def test_a_buffer_without_room_is_refused():
    index, queries, rows, resident, window = lone()
    for _ in range(2):
        index.decode_step(queries, rows, resident, window, k=9)
    with pytest.raises(ValueError, match="resident: got 2 rows"):
        index.decode_step(queries, rows, resident, window, k=9)


@pytest.mark.parametrize("sizes", [dict(q_heads=3, kv_heads=1), dict(value_dim=32)])
def test_resident_rows_of_another_shape_are_refused(sizes):
    index, queries, *_ = lone()
    case = replace(CASE, **sizes)
    rows, other = Rows(*case.tokens(1)), ResidentRows(case.index("pariskv").geometry, 2, 2)
    window = Rows(torch.empty_like(rows.keys), torch.empty_like(rows.values))
    with pytest.raises(ValueError, match=r"resident: got torch\.float32"):
        index.decode_step(queries, rows, other, window, k=9)


def test_a_key_is_checked_by_the_layer_if_the_index_checks_none():
    (tokens, queries), layers = sequence(CASE, 401), pair(check=False)
    feed(layers, tokens, queries, 0, 400)
    keys, values = part(tokens, 400, 401)
    keys[0, 0, 0, 0] = float("inf")
    with pytest.raises(ValueError, match="keys: got inf"):
        layers[0].step(queries[:, :, 400:], keys, values)
    assert len(layers[0]) == 400
