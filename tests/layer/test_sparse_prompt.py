"""Sparse attention of prompts in an attention layer."""

import copy

import pytest
import torch

import kvindex
from kvindex.layer import AttentionLayer, sparse
from kvindex.layer.sparse import SELECTORS, IndexedRows
from kvindex.ops.block_sparse import BLOCK, attend_chosen
from tests.support.helpers import mostly_slow

H, G, D, N = 4, 2, 16, 1300


def layer_of(spec="exact", **options):
    index = kvindex.create(spec, q_heads=H, kv_heads=G, head_dim=D)
    sizes = dict(k=8, sink=4, local_window=32, update_every=64)
    return AttentionLayer(index, **{**sizes, **options})


def tokens(length=N, batch=1):
    """Draw queries, keys and values. The keys of a block have a common part."""
    torch.manual_seed(0)
    queries = 2 * torch.randn(batch, H, length, D)
    keys, values = torch.randn(2, batch, G, length, D).unbind(0)
    common = 3 * torch.randn(batch, G, -(-length // BLOCK), 4)
    keys[..., :4] += common.repeat_interleave(BLOCK, 2)[:, :, :length]
    return queries, keys, values


def read(layer, given, sizes, end=None):
    """Read the tokens in chunks of the given sizes. Return the attention output."""
    if end is not None:
        layer.expect_prompt(end)
    parts = zip(*(part.split(sizes, 2) for part in given), strict=True)
    return torch.cat([layer.step(*part) for part in parts], 2)


CHUNKS = [[N], [256] * 5 + [20], [384, 128, 640, 148]]


@pytest.mark.parametrize(
    ("spec", "sizes"), mostly_slow([(s, c) for s in ("exact", "pariskv", "quest") for c in CHUNKS])
)
def test_all_of_the_weight_is_dense_attention(spec, sizes):
    given = tokens()
    dense = read(layer_of(spec), given, [N])
    layer = layer_of(spec, prefill="sparse", prefill_mass=1.0)
    torch.testing.assert_close(read(layer, given, sizes, N), dense, rtol=1e-4, atol=1e-5)
    assert layer.prefill_fraction == 1


@pytest.mark.parametrize("sizes", CHUNKS)
@pytest.mark.parametrize("batch", [1, 2])
@pytest.mark.parametrize("selector", SELECTORS)
def test_chunks_have_no_effect_on_the_choice(sizes, batch, selector):
    given = tokens(batch=batch)
    queries, keys, values = given
    options = dict(prefill="sparse", prefill_mass=0.6, prefill_last=150)
    layer = layer_of("pariskv", **options, prefill_selector=selector)
    found = read(layer, given, sizes, N)
    chooser, stop = SELECTORS[selector](0.6), (N - 150) // BLOCK * BLOCK
    summaries = chooser.summarize(keys[:, :, :stop])
    some, scale = queries[:, :, :stop], layer.index.geometry.scale
    chosen = chooser.choose(some, summaries, 0, scale=scale)
    want = attend_chosen(some, keys[:, :, :stop], values[:, :, :stop], chosen, scale=scale)
    torch.testing.assert_close(found[:, :, :stop], want, rtol=1e-4, atol=1e-5)
    causal = chosen.shape[2] * (chosen.shape[2] + 1) // 2
    assert layer.prefill_fraction == pytest.approx(float(chosen.sum()) / (batch * H * causal))
    assert layer.prefill_fraction < 0.9
    dense = read(layer_of(), given, [N])
    torch.testing.assert_close(found[:, :, stop:], dense[:, :, stop:], rtol=1e-4, atol=1e-5)


def test_chunks_inside_blocks_attend_densely_at_their_ends():
    given = tokens()
    dense = read(layer_of(), given, [N])
    layer = layer_of(prefill="sparse", prefill_mass=0.3)
    found = read(layer, given, [500, 400, 400], N)
    for start, stop in ((384, 512), (896, 1024), (1152, N)):
        torch.testing.assert_close(
            found[:, :, start:stop], dense[:, :, start:stop], rtol=1e-4, atol=1e-5
        )
    assert not torch.allclose(found[:, :, 512:896], dense[:, :, 512:896], atol=1e-3)


def test_without_an_announced_end_the_last_tokens_of_each_chunk_are_dense():
    given = tokens()
    dense = read(layer_of(), given, [N])
    found = read(layer_of(prefill="sparse", prefill_mass=0.3), given, [640, 660])
    for start, stop in ((512, 640), (1152, N)):
        torch.testing.assert_close(
            found[:, :, start:stop], dense[:, :, start:stop], rtol=1e-4, atol=1e-5
        )


def test_stored_rows_give_the_result_of_fetched_rows():
    given = tokens()
    options = dict(prefill="sparse", prefill_mass=0.5)
    fetched = read(layer_of("pariskv", **options), given, [512, 788], N)
    layer, outputs = layer_of("pariskv", **options), []
    layer.expect_prompt(N)
    for start, stop in ((0, 512), (512, N)):
        rows = kvindex.Rows(given[1][:, :, :stop], given[2][:, :, :stop])
        outputs.append(layer.read_chunk(given[0][:, :, start:stop], rows))
    torch.testing.assert_close(torch.cat(outputs, 2), fetched, rtol=1e-4, atol=1e-5)


def test_rows_in_int8_keep_an_exact_sink():
    given = tokens()
    options = dict(prefill="sparse", prefill_mass=0.5, sink=200)
    plain = read(layer_of("exact", **options), given, [512, 788], N)
    coded = read(layer_of("exact:row_codec=int8", **options), given, [512, 788], N)
    torch.testing.assert_close(coded, plain, rtol=0.1, atol=0.1)
    assert not torch.equal(coded, plain)


def test_exact_sink_keys_decide_what_is_read():
    given = tokens()
    options = dict(prefill="sparse", prefill_mass=0.5, sink=200, prefill_selector="sampled")
    layer = layer_of("exact:row_codec=int4", **options)
    read(layer, given, [900, 400], N)
    rows = IndexedRows(layer.index, layer._window.rows, layer._window.sink)
    for start, stop in ((0, 128), (128, 384), (0, N), (1000, N)):
        exact = min(max(200 - start, 0), stop - start)
        found, want = rows.keys(start, stop), given[1][:, :, start:stop]
        assert torch.equal(found[:, :, :exact], want[:, :, :exact])
        torch.testing.assert_close(found, want, rtol=0.5, atol=2.0)

    rows, _ = rows._gathered(torch.ones(1, H, 2, N // BLOCK, dtype=torch.bool))
    for found, want in ((rows.keys, given[1]), (rows.values, given[2])):
        assert torch.equal(found[:, :, :200], want[:, :, :200])


def test_means_follow_other_tokens_and_another_order():
    given = tokens(batch=2)
    options = dict(prefill="sparse", prefill_mass=0.4)
    other = [torch.cat([part[:, :, :256], part[:, :, 256:].flip(2)], 2) for part in given]
    swap = torch.tensor([1, 0])
    want = read(layer_of("pariskv", **options), other, [640, 660], N)[swap][:, :, 640:]
    layer = layer_of("pariskv", **options)
    read(layer, [part[:, :, :900] for part in given], [900], N)
    layer.truncate(256)
    layer.expect_prompt(N)
    layer.step(*(part[:, :, 256:640] for part in other))
    layer.reorder(swap)
    layer.expect_prompt(N)
    found = layer.step(*(part[swap][:, :, 640:] for part in other))
    torch.testing.assert_close(found, want, rtol=1e-4, atol=1e-5)


def test_large_rows_are_fetched_for_a_part_of_the_queries_at_a_time(monkeypatch):
    given = tokens()
    options = dict(prefill="sparse", prefill_mass=0.5)
    want = read(layer_of("pariskv", **options), given, [512, 788], N)
    monkeypatch.setattr(sparse, "GATHERED_BYTES", 2 * 4 * G * 2 * D * BLOCK)
    monkeypatch.setattr(sparse, "PIECE", 100)
    layer, fetched = layer_of("pariskv", **options), []
    fetch = layer.index.fetch
    monkeypatch.setattr(layer.index, "fetch", lambda hits: fetched.append(hits) or fetch(hits))
    torch.testing.assert_close(read(layer, given, [512, 788], N), want, rtol=1e-4, atol=1e-5)
    assert len(fetched) > 3


def test_what_was_truncated_is_no_longer_sparse():
    given = tokens()
    layer = layer_of("pariskv", prefill="sparse", prefill_mass=0.5, prefill_last=10)
    assert layer.prefill_fraction is None
    read(layer, [part[:, :, :300] for part in given], [40, 260], 300)  # sparse from 128 on
    before = layer.nbytes()["window"]
    layer.truncate(10**6)  # removes nothing
    assert "read_sparsely" in copy.deepcopy(layer).state_dict()
    layer.truncate(128)
    assert "read_sparsely" not in layer.state_dict()
    layer_of("pariskv").load_state_dict(layer.state_dict())
    assert layer.nbytes()["window"] < before


def test_a_truncation_of_nothing_keeps_the_announced_end():
    given = tokens()
    want = read(layer_of(prefill="sparse", prefill_mass=0.3), given, [640, 660], N)
    layer = layer_of(prefill="sparse", prefill_mass=0.3)
    layer.expect_prompt(N)
    first = layer.step(*(part[:, :, :640] for part in given))
    layer.truncate(640)
    rest = layer.step(*(part[:, :, 640:] for part in given))
    assert torch.equal(torch.cat([first, rest], 2), want)


def test_tokens_beyond_the_announced_end_do_not_move_the_dense_ones():
    given = tokens()
    layer = layer_of(prefill="sparse", prefill_mass=0.3)
    layer.expect_prompt(1000)
    found = layer.step(*given)  # the prompt, and tokens that a caller speculates on
    dense = read(layer_of(), given, [N])
    start = (1000 - 128) // BLOCK * BLOCK
    torch.testing.assert_close(found[:, :, start:], dense[:, :, start:], rtol=1e-4, atol=1e-5)


def test_a_later_prompt_after_decoded_tokens():
    given = tokens()
    layer = layer_of("pariskv", prefill="sparse", prefill_mass=1.0, dense_below=10**6)
    dense = layer_of("pariskv", dense_below=10**6)
    sizes = [700, 1, 1, 1, 597]
    want = read(dense, given, sizes)
    layer.expect_prompt(700)
    found = read(layer, given, sizes)  # the announced end is in the past at the second prompt
    torch.testing.assert_close(found, want, rtol=1e-4, atol=1e-5)


def test_truncate_and_a_failed_call_forget_what_was_read():
    given = tokens()
    layer = layer_of("pariskv", prefill="sparse", prefill_mass=0.5)
    first = [part[:, :, :640] for part in given]
    read(layer, first, [640], N)
    twin = copy.deepcopy(layer)
    bad = [part[:, :, 640:].flip(2) for part in given]  # other keys than those that come later
    bad[0][0, 0, 5] = float("nan")
    with pytest.raises(ValueError, match="queries"):
        layer.step(*bad)
    rest = [part[:, :, 640:] for part in given]
    want = twin.step(*rest)
    assert torch.equal(layer.step(*rest), want)
    layer.truncate(640)
    layer.expect_prompt(N)
    assert torch.equal(layer.step(*rest), want)


def test_a_sparse_prefix_is_not_loaded_into_a_dense_layer():
    given = tokens()
    layer = layer_of("pariskv", prefill="sparse", prefill_mass=0.5)
    read(layer, given, [N], N)
    state = layer.state_dict()
    with pytest.raises(ValueError, match=r"sparse attention.*prefill='sparse'"):
        layer_of("pariskv").load_state_dict(state)
    other = layer_of("pariskv", prefill="sparse")
    other.load_state_dict(state)
    assert "read_sparsely" in other.state_dict()  # and is passed on
    fresh = layer_of("pariskv")
    read(fresh, given, [N])
    layer_of("pariskv", prefill="sparse").load_state_dict(fresh.state_dict())


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (dict(prefill="some"), "prefill: got 'some'"),
        (dict(prefill="sparse", prefill_mass=0.0), "prefill_mass: got 0"),
        (dict(prefill="sparse", prefill_mass=1.5), "prefill_mass: got 1.5"),
        (dict(prefill="sparse", prefill_last=-1), "prefill_last: got -1"),
        (dict(prefill_selector="all"), "prefill_selector: got 'all'"),
        (dict(prefill_mass=0.9), "prefill_mass: got 0.9 together with prefill='dense'"),
        (dict(prefill_last=64), "prefill_last: got 64 together with prefill='dense'"),
        (dict(prefill_selector="pooled"), "prefill_selector: got 'pooled' together with prefill="),
    ],
)
def test_wrong_options_raise_an_error(options, message):
    with pytest.raises(ValueError, match=message):
        layer_of(**options)


def test_layers_that_are_not_supported_raise_an_error():
    index = kvindex.create("exact", q_heads=H, kv_heads=G, head_dim=D, softcap=30.0)
    with pytest.raises(ValueError, match=r"prefill: got 'sparse'.*softcap"):
        AttentionLayer(index, prefill="sparse")


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("valid", torch.arange(200)[None] > 3),
        ("bias", torch.zeros(1, H, 200, 200)),
        ("sink_logits", torch.zeros(H)),
        ("visible", torch.ones(1, 200, 200, dtype=torch.bool)),
    ],
)
def test_chunks_that_are_not_supported_raise_an_error_and_change_nothing(name, value):
    layer = layer_of(prefill="sparse")
    with pytest.raises(ValueError, match=f"{name}.*prefill='dense'"):
        layer.step(*tokens(200), **{name: value})
    assert len(layer) == 0
