"""The rows of a prompt stay in memory until its last chunk is read, and change no result."""

from types import SimpleNamespace

import pytest
import torch

import kvindex_adapters.hf as kvhf
from kvindex.layer import AttentionLayer
from kvindex_adapters.hf.cache import prompt_rows
from kvindex_adapters.hf.cache.prompt_rows import ExpectedPrompt, PromptRows, free_bytes
from tests.adapters.decoder.families import ids_of, model_of
from tests.adapters.tiny import build

OPTIONS = dict(index="pariskv", k=20, sink=4, local_window=8, update_every=8, dense_below=0)
TOKENS = 300


@pytest.fixture(scope="module")
def model():
    return model_of("qwen3", num_hidden_layers=2, layer_types=["full_attention"] * 2)


@pytest.fixture
def chunks(monkeypatch):
    """Let all prompts fit, and count the chunks that are read from their rows."""
    monkeypatch.setattr(ExpectedPrompt, "fits", lambda self, keys, values: True)
    found, read = [], AttentionLayer.read_chunk

    def counted(self, queries, rows, **options):
        found.append(queries.shape[2])
        return read(self, queries, rows, **options)

    monkeypatch.setattr(AttentionLayer, "read_chunk", counted)
    return found


def logits(model, cache, ids):
    with torch.no_grad():
        return torch.cat(
            [model(input_ids=one.view(1, 1), past_key_values=cache).logits[0] for one in ids]
        )


def read(model, chunk, *, crop=0, turns=(TOKENS,), **options):
    """Read a prompt in chunks, and decode ten tokens. Return their logits."""
    ids, start = ids_of(TOKENS), 0
    with kvhf.attach(model, **{**OPTIONS, **options}) as cache:
        for end in turns:
            used = "continue" if start else "refuse"
            kvhf.read(model, None, ids[start:end], cache=cache, used=used, chunk=chunk)
            start = end
        assert all(layer._rows is None for layer in cache._indexed())
        if crop:
            cache.crop(-crop)
        return logits(model, cache, ids[:10])


@pytest.mark.parametrize("options", [{}, {"prefill": "sparse", "prefill_mass": 0.5}])
def test_results_are_those_of_rows_from_the_index(model, options, monkeypatch, chunks):
    found = read(model, 64, **options)
    assert len(chunks) == 2 * len(range(0, TOKENS, 64))
    monkeypatch.undo()
    torch.testing.assert_close(found, read(model, 64, **options), rtol=1e-4, atol=1e-4)


def test_other_prompts_are_read_from_the_index(model, chunks):
    read(model, TOKENS)
    assert not chunks  # one chunk reads no earlier row
    read(model, 64, turns=(200, TOKENS), crop=50)
    assert len(chunks) == 2 * 4  # the second prompt continues a sequence

    class OwnSteps(AttentionLayer):
        def step(self, *parts, **terms):
            return super().step(*parts, **terms)

    read(model, 64, layer=OwnSteps)
    assert len(chunks) == 2 * 4


def test_the_last_chunk_is_in_the_index_at_the_end(device, monkeypatch):
    """Otherwise it would stay in the window, and all later steps would read a larger buffer."""
    monkeypatch.setattr(ExpectedPrompt, "fits", lambda self, keys, values: True)
    sizes = dict(num_hidden_layers=2, layer_types=["full_attention"] * 2)
    made, ids = model_of("qwen3", **sizes).to(device), ids_of(TOKENS).to(device)
    kernels = {"backend": "cuda"} if device == "cpu" else {}
    with kvhf.attach(made, index_options=kernels, **OPTIONS) as cache:
        kvhf.read(made, None, ids, cache=cache, chunk=150)
        for layer in cache.attention_layers():
            assert len(layer) - len(layer.index) == OPTIONS["local_window"]


def test_attention_that_needs_more_than_rows_reads_the_index(chunks):
    """Learned sinks: no chunk is read from stored rows, so no memory is used for them."""
    ids = ids_of(TOKENS)
    sinks = build("gpt_oss")
    with kvhf.attach(sinks, **OPTIONS) as cache:
        kvhf.read(sinks, None, ids, cache=cache, chunk=64)
        assert not chunks
        assert all(layer._rows is None for layer in cache._indexed())


def test_a_chunk_with_padding_frees_the_rows(model, chunks):
    ids, mask = ids_of(TOKENS)[None], torch.ones(1, TOKENS, dtype=torch.int64)
    mask[:, 100:103] = 0
    with kvhf.attach(model, **OPTIONS) as cache, torch.no_grad():
        cache.expect_prompt(TOKENS)
        for start, end in ((0, 100), (100, 200)):
            some = dict(input_ids=ids[:, start:end], attention_mask=mask[:, :end])
            model(**some, past_key_values=cache)
            assert [layer._rows is None for layer in cache._indexed()] == [start > 0] * 2
    assert len(chunks) == 2


def test_a_prompt_may_begin_in_inference_mode(model, chunks):
    ids, found = ids_of(TOKENS)[None], []
    for modes in ((torch.no_grad, torch.no_grad), (torch.inference_mode, torch.no_grad)):
        with kvhf.attach(model, **OPTIONS) as cache:
            cache.expect_prompt(TOKENS)
            for mode, start, end in zip(modes, (0, 100), (100, TOKENS), strict=True):
                with mode():
                    logits = model(input_ids=ids[:, start:end], past_key_values=cache).logits
        found.append(logits)
    assert torch.equal(*found)
    assert len(chunks) == 8


def test_a_failed_prompt_frees_its_rows(model, chunks, monkeypatch):
    done = []

    def stop(phase, count, total):
        done.append(count)
        if len(done) == 2:
            raise KeyboardInterrupt

    ids = ids_of(TOKENS)
    with kvhf.attach(model, **OPTIONS) as cache:
        with pytest.raises(KeyboardInterrupt):
            kvhf.read(model, None, ids, cache=cache, chunk=64, on_progress=stop)
        assert chunks
        assert all(layer._rows is layer.expected is None for layer in cache._indexed())
        kvhf.read(model, None, ids, cache=cache, chunk=64)
        found = logits(model, cache, ids[:10])
    torch.testing.assert_close(found, read(model, 64), rtol=1e-4, atol=1e-4)


def test_rows_that_were_cropped_are_not_used(model, chunks):
    """A model that is called directly can do anything between two chunks."""
    ids = ids_of(TOKENS)

    def called(cache, first, last):
        with torch.no_grad():
            some = ids[None, first:last]
            return model(input_ids=some, past_key_values=cache).logits[0, -1]

    results = []
    for expects in (True, False):
        with kvhf.attach(model, **OPTIONS) as cache:
            if expects:
                cache.expect_prompt(TOKENS)
            called(cache, 0, 100)
            cache.crop(-20)
            called(cache, 100, 180)
            results.append(called(cache, 180, TOKENS))
    torch.testing.assert_close(*results, rtol=1e-4, atol=1e-4)
    assert len(chunks) == 2


def test_each_gpu_needs_room_of_its_own(monkeypatch):
    keys = [
        SimpleNamespace(
            is_cuda=True, device=torch.device("cuda", number), nbytes=100, shape=[0] * 2 + [5]
        )
        for number in range(2)
    ]
    need = 3 * 200 * 1000 / 5
    free = {keys[0].device: 2 * need, keys[1].device: 2 * need - 1}
    monkeypatch.setattr(prompt_rows, "free_bytes", free.__getitem__)
    prompt = ExpectedPrompt(1000, 3)
    assert [prompt.fits(one, one) for one in keys] == [True, False]


def test_the_first_layer_decides():
    assert not ExpectedPrompt(100, 2).fits(torch.zeros(1, 2, 5, 8), torch.zeros(1, 2, 5, 8))
    rows = PromptRows(10, torch.zeros(1, 2, 4, 8), torch.zeros(1, 2, 4, 6))
    parts = torch.randn(1, 2, 10, 8), torch.randn(1, 2, 10, 6)
    for end in (4, 10):
        start = rows.length
        found = rows.extended(*(part[:, :, start:end] for part in parts))
        assert torch.equal(found.keys, parts[0][:, :, :end])
        assert torch.equal(found.values, parts[1][:, :, :end])


@pytest.mark.gpu
def test_rows_of_all_layers_must_fit(monkeypatch):
    keys = torch.zeros(1, 2, 8, 64, device="cuda")
    need = 3 * 2 * 1000 * keys[:, :, :1].nbytes
    for free, fits in ((2 * need, True), (2 * need - 1, False)):
        monkeypatch.setattr(prompt_rows, "free_bytes", lambda device, free=free: free)
        prompt = ExpectedPrompt(1000, 3)
        assert prompt.fits(keys, keys) == fits
        monkeypatch.setattr(prompt_rows, "free_bytes", lambda device: 0)
        assert prompt.fits(keys, keys) == fits
    monkeypatch.undo()
    assert free_bytes(keys.device) > 0
