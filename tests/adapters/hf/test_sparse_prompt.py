"""Sparse attention of prompts in transformers models, in sessions of the decoder, and in chats."""

import pytest
import torch

import kvindex_adapters.hf as kvhf
from kvindex.layer import AttentionLayer
from kvindex_adapters.common.prompt_chunks import aligned, chunks
from kvindex_adapters.decoder import Decoder
from kvindex_adapters.hf.generation.prefill import prefill
from kvindex_adapters.hf.model.reread import prefilled
from tests.adapters.decoder.families import ids_of, model_of

REGIONS = dict(sink=4, local_window=8, update_every=8, dense_below=0)
SPARSE = dict(**REGIONS, prefill="sparse", prefill_mass=0.3, prefill_last=40)
TOKENS = 700


@pytest.fixture(scope="module")
def model():
    full = dict(layer_types=["full_attention"] * 2, max_position_embeddings=4096)
    return model_of("qwen3", num_hidden_layers=2, **full)


def logits_after(model, cache, ids):
    with torch.no_grad():
        return model(input_ids=ids[None], past_key_values=cache).logits[0, -1]


def read(model, sizes, **options):
    """Read parts of a prompt, each in chunks. Return the next logits and the report."""
    ids, start = ids_of(TOKENS), 0
    with kvhf.attach(model, index="pariskv", k=20, **{**SPARSE, **options}) as cache:
        for tokens, chunk in sizes:
            some = ids[start : start + tokens]
            kvhf.read(
                model, None, some, cache=cache, used="continue" if start else "refuse", chunk=chunk
            )
            start += tokens
        return logits_after(model, cache, ids[:1]), cache.report()


def test_chunks_have_no_effect(model):
    (want, report), *others = (read(model, [(TOKENS, chunk)]) for chunk in (TOKENS, 256, 300, 130))
    assert report.prefill_fraction < 0.95
    assert f"prompts read {report.prefill_fraction:.0%} of the blocks" in str(report)
    for found, other in others:
        torch.testing.assert_close(found, want, rtol=1e-4, atol=1e-4)
        assert other.prefill_fraction == pytest.approx(report.prefill_fraction)


def test_all_of_the_weight_is_a_dense_prompt(model):
    usual = dict(prefill="dense", prefill_mass=0.95, prefill_last=128)
    dense, report = read(model, [(TOKENS, 256)], **usual)
    assert report.prefill_fraction is None
    for sizes in ([(TOKENS, 256)], [(300, 200), (TOKENS - 300, 256)]):
        found, report = read(model, sizes, prefill_mass=1.0)
        torch.testing.assert_close(found, dense, rtol=1e-4, atol=1e-4)
        assert report.prefill_fraction == 1


@pytest.mark.parametrize("selector", ["pooled", "sampled"])
def test_the_decoder_reads_as_transformers_does(model, selector):
    ids, options = ids_of(TOKENS), {**SPARSE, "prefill_selector": selector}
    decoder = Decoder.of(model)
    session = decoder.session(index="pariskv", k=20, attach_options=options)
    decoder.read(ids, session, chunk=256)
    mine = session.step(ids[:1])[0]
    with kvhf.attach(model, index="pariskv", k=20, **options) as cache:
        kvhf.read(model, None, ids, cache=cache, chunk=256)
        torch.testing.assert_close(logits_after(model, cache, ids[:1]), mine, rtol=1e-4, atol=1e-4)
        assert cache.report().prefill_fraction == session.report().prefill_fraction < 0.95


def test_an_answer_does_not_depend_on_chunks(model):
    how = dict(index="pariskv", k=20, attach_options=SPARSE, max_new_tokens=12, chunk=256)
    decoder = Decoder.of(model)
    tokens = [decoder.generate(ids_of(TOKENS), **{**how, "chunk": size}) for size in (256, 300)]
    assert torch.equal(tokens[0].answer_ids, tokens[1].answer_ids)
    assert tokens[0].report.prefill_fraction == pytest.approx(tokens[1].report.prefill_fraction)


def test_a_cache_that_was_read_sparsely_is_not_loaded_into_a_dense_one(model, tmp_path):
    ids = ids_of(TOKENS)
    with kvhf.attach(model, index="pariskv", k=20, **SPARSE) as cache:
        kvhf.read(model, None, ids, cache=cache)
        cache.save(tmp_path / "sparse")
        want = logits_after(model, cache.fork(), ids[:1])
    with kvhf.attach(model, index="pariskv", k=20, **REGIONS) as cache:
        with pytest.raises(ValueError, match=r"saved with 'sparse'; pass prefill='sparse'"):
            cache.load(tmp_path / "sparse")
        assert cache.get_seq_length() == 0
    with kvhf.attach(model, index="pariskv", k=20, **SPARSE) as cache:
        cache.load(tmp_path / "sparse")
        torch.testing.assert_close(logits_after(model, cache, ids[:1]), want)
    decoder = Decoder.of(model)
    session = decoder.session(index="pariskv", k=20, attach_options=SPARSE)
    decoder.read(ids, session)
    session.save(tmp_path / "session")
    dense = decoder.session(index="pariskv", k=20, attach_options=REGIONS)
    with pytest.raises(ValueError, match=r"saved with 'sparse'; pass prefill='sparse'"):
        dense.load(tmp_path / "session")


def test_a_batch_with_padding_is_refused(model):
    decoder = Decoder.of(model)
    with pytest.raises(ValueError, match=r"valid: got padding tokens.*prefill='dense'"):
        decoder.generate([ids_of(300), ids_of(200)], index="exact", attach_options=SPARSE)


def test_chunks_end_at_multiples_of_a_unit_in_the_sequence():
    assert [*chunks(1000, 300, unit=128)] == [(0, 256), (256, 512), (512, 768), (768, 1000)]
    assert [*chunks(500, 200, first=100, unit=128)] == [
        (0, 156),
        (156, 284),
        (284, 412),
        (412, 500),
    ]
    assert [*chunks(100, 30, unit=128)] == [*chunks(100, 30)]  # chunks that are shorter
    assert aligned(1000, 100, 128) == 924
    assert aligned(20, 100, 128) == 0


@pytest.mark.parametrize("first", [0, 1, 100, 126, 127, 128, 129, 255, 2559])
@pytest.mark.parametrize("chunk", [2, 100, 127, 128, 129, 200, 256, 1024])
def test_no_chunk_after_other_tokens_has_one_token(first, chunk):
    for stop in (2, 129, 130, 258, 330, 1084):
        parts = [*chunks(stop, chunk, first=first, unit=128)]
        assert [start for start, _ in parts[1:]] == [end for _, end in parts[:-1]]
        assert (parts[0][0], parts[-1][1]) == (0, stop)
        assert min(end - start for start, end in parts) > 1
        if chunk >= 128:  # and the inner ends are ends of blocks
            assert all((first + end) % 128 == 0 for _, end in parts[:-1])
            assert max(end - start for start, end in parts) <= chunk + 128


@pytest.mark.parametrize("tokens", [255, 383])
def test_a_later_turn_searches_in_no_chunk(model, tokens):
    ids = ids_of(tokens + 330)
    for chunk in (128, 200):
        with kvhf.attach(model, index="pariskv", k=20, **SPARSE) as cache:
            kvhf.read(model, None, ids[:tokens], cache=cache)
            kvhf.read(model, None, ids[tokens:], cache=cache, used="continue", chunk=chunk)
            assert cache.report().steps == 0
            stops = {prefilled(model, cache, more, chunk) for more in range(chunk, chunk + 300)}
            assert 0 in stops
            assert 1 not in stops
        decoder = Decoder.of(model)
        session = decoder.session(index="pariskv", k=20, attach_options=SPARSE)
        decoder.read(ids[:tokens], session)
        decoder.read(ids[tokens:], session, chunk=chunk)
        assert session.report().steps == 0


def test_a_failed_prompt_withdraws_its_announced_end(model):
    class StopError(Exception):
        pass

    def fails(*_):
        raise StopError

    with kvhf.attach(model, index="pariskv", k=20, **SPARSE) as cache:
        with model.model.layers[1].register_forward_pre_hook(fails), pytest.raises(StopError):
            kvhf.read(model, None, ids_of(4000 - 1), cache=cache, chunk=256)
        assert [layer.expected for layer in cache.layers] == [None, None]


def test_a_layer_class_of_the_caller_need_not_know_the_options(model):
    class Own(AttentionLayer):
        def __init__(self, index, *, k, coverage, sink, local_window, update_every, **rest):
            assert not any(name.startswith("prefill") for name in rest)
            sizes = dict(sink=sink, local_window=local_window, update_every=update_every)
            super().__init__(index, k=k, coverage=coverage, **sizes, **rest)

    with kvhf.attach(model, index="exact", layer=Own, **REGIONS) as cache:
        kvhf.read(model, None, ids_of(50), cache=cache)
    with pytest.raises(AssertionError), kvhf.attach(model, index="exact", layer=Own, **SPARSE):
        pass


def test_the_tokens_after_a_prompt_do_not_move_its_end(model):
    ids, causal = ids_of(1280), {}
    for rest in (0, 256):
        with kvhf.attach(model, index="pariskv", k=20, **SPARSE) as cache:
            prefill(model, ids[: 1024 + rest], cache, stop=1024, chunk=1024, prompt=1024)
            causal[rest] = [layer.attention.prefill_fraction for layer in cache.layers]
    assert causal[0] == causal[256]
