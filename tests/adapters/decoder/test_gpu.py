"""The decoder in bfloat16, and on a CUDA device."""

from dataclasses import replace

import pytest
import torch

import kvindex
import kvindex_adapters.hf as kvhf
from kvindex.core.protocol import AttendsToAll
from kvindex.layer import AttentionLayer
from kvindex.ops.attention import attend_causal
from kvindex_adapters.decoder import Decoder, Sampling
from kvindex_adapters.decoder.recording import Recording
from tests.adapters.decoder.families import ids_of, model_of
from tests.adapters.hf.generation.test_generation import Words

FEW = dict(
    k=20,
    max_new_tokens=60,
    attach_options=dict(sink=4, local_window=8, update_every=8, dense_below=0),
)

DEVICES = [pytest.param("cpu", marks=pytest.mark.slow), pytest.param("cuda", marks=pytest.mark.gpu)]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", ["llama", "qwen2", "qwen3", "mistral"])
def test_logits_in_bfloat16_are_those_of_transformers(name, device):
    """Both differ from float32 by a few hundredths, only through rounding."""
    model, ids = model_of(name).to(device, torch.bfloat16), ids_of(70).to(device)
    everything = dict(index="exact", **{**FEW, "k": 500})
    with torch.no_grad():
        expected = model(input_ids=ids[None]).logits[0, 49:].float()
    for options in (dict(index=None), everything):
        run = Decoder.of(model).start(ids[:50], **options)
        made = [run.session.read_prompt(run.ids, 16, 70)]
        made += [run.session.step(ids[place : place + 1]) for place in range(50, 70)]
        error = (torch.cat(made).float() - expected).abs().amax()
        assert error < 0.1 * expected.abs().amax()


@pytest.mark.gpu
@pytest.mark.parametrize("index", [None, "exact", "pariskv"])
def test_tokens_are_those_of_attach(index):
    model, few = model_of("qwen3").cuda(), FEW if index else {**FEW, "attach_options": None}
    theirs = kvhf.generate(model, Words(), ids_of(60), index=index, **few)
    decoder = Decoder.of(model, Words())
    ours = decoder.generate(ids_of(60), index=index, **few)
    assert torch.equal(ours.answer_ids, theirs.answer_ids)
    report = theirs.report and replace(theirs.report, graph=None)  # the decoder reports none
    assert (ours.backend, ours.report) == (theirs.backend, report)


@pytest.mark.parametrize("device", DEVICES)
def test_a_seed_gives_the_same_tokens_and_prompts_go_together(device):
    decoder = Decoder.of(model_of("llama").to(device, torch.bfloat16), Words())
    given = dict(sampling=Sampling(temperature=0.8, top_k=20, top_p=0.9, seed=3), **FEW)
    given["max_new_tokens"] = 20 if device == "cpu" else 60
    prompts = [ids_of(60), ids_of(33)]
    first, second = (
        [answer.answer_ids.tolist() for answer in decoder.generate(prompts, **given)]
        for _ in range(2)
    )
    assert first == second


@pytest.mark.parametrize("device", DEVICES)
def test_a_recorded_prompt_changes_no_token(device):
    decoder = Decoder.of(model_of("llama").to(device, torch.bfloat16))
    few = {**FEW, "max_new_tokens": 20, "chunk": 16}
    for prompts in ([ids_of(60)], [ids_of(60), ids_of(33)]):
        recording = Recording(queries=True, outputs=True)
        for more in (dict(index="snapkv"), dict(index="pariskv"), dict(k="auto")):
            copied, read = (decoder.start(prompts, **{**few, **more}) for _ in range(2))
            copied.session.reader = recording.read
            mine, theirs = (torch.stack([*run.tokens()]) for run in (copied, read))
            assert torch.equal(mine, theirs), more


@pytest.mark.gpu
def test_one_layers_rows_are_on_the_device_at_a_time():
    """Peak memory is that of a short prompt, plus hidden states, codes, and rows of one layer."""
    layers, chunk, length = 8, 512, 32_768
    sizes = dict(num_hidden_layers=layers, head_dim=64, max_position_embeddings=2 * length)
    decoder = Decoder.of(model_of("llama", **sizes).to("cuda", torch.bfloat16))
    found = []
    for tokens in (2 * chunk, 2 * chunk, length):  # the first run compiles
        run = decoder.start(ids_of(50).repeat(tokens // 50 + 1)[:tokens], k=20, chunk=chunk)
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        run.session.read_prompt(run.ids, chunk, tokens)
        most, held = torch.cuda.max_memory_allocated(), torch.cuda.memory_allocated()
        found.append((most - before, held - before))
        del run
    (short, short_held), (most, held) = found[1:]
    config, width = decoder.config, decoder.weights.embedding.shape[1]
    rows = 2 * length * 2 * config.kv_heads * config.head_dim
    hidden = 2 * length * width
    assert held < 0.5 * layers * rows  # rows are on the host
    assert most <= 1.1 * (short + hidden + rows + held - short_held)


@pytest.mark.gpu
def test_a_piece_of_a_prompt_attends_to_those_before_without_a_mask():
    torch.manual_seed(0)
    queries = torch.randn(2, 8, 300, 64, device="cuda", dtype=torch.bfloat16)
    keys, values = torch.randn(2, 2, 2, 20_000, 64, device="cuda", dtype=torch.bfloat16)
    rows = torch.arange(20_000, device="cuda")
    mask = rows <= rows[-300:, None]
    wide = [part.double().repeat_interleave(4, dim=1) for part in (keys, values)]
    logits = 0.125 * queries.double() @ wide[0].mT
    want = logits.masked_fill(~mask, float("-inf")).softmax(-1) @ wide[1]
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    got = attend_causal(queries, keys, values, scale=0.125)
    # below the size of all attention logits
    assert torch.cuda.max_memory_allocated() - before < queries.shape[2] * 20_000
    torch.testing.assert_close(got.double(), want, rtol=2e-2, atol=2e-2)


@pytest.mark.gpu
@pytest.mark.parametrize("D", [64, 128])
@pytest.mark.parametrize(("T", "past"), [(1024, 5317), (2048, 1), (1024, 4096)])
def test_a_piece_of_a_prompt_attends_in_pieces_of_few_sizes(D, T, past):
    torch.manual_seed(0)
    queries = torch.randn(2, T, 8, D, device="cuda", dtype=torch.bfloat16).transpose(1, 2)
    keys, values = torch.randn(2, 2, 2, past + T, D, device="cuda", dtype=torch.bfloat16)
    rows = torch.arange(past + T, device="cuda")
    mask = rows <= rows[-T:, None]
    wide = [part.double().repeat_interleave(4, dim=1) for part in (keys, values)]
    logits = D**-0.5 * queries.double() @ wide[0].mT
    want = logits.masked_fill(~mask, float("-inf")).softmax(-1) @ wide[1]
    got = attend_causal(queries, keys, values, scale=D**-0.5)
    torch.testing.assert_close(got.double(), want, rtol=2e-2, atol=1e-2)


@pytest.mark.gpu
@pytest.mark.parametrize("stored", [True, False])
def test_a_sparse_prompt_on_a_gpu_is_that_of_a_cpu(stored):
    torch.manual_seed(0)
    sizes, N = dict(q_heads=8, kv_heads=2, head_dim=64), 3000
    given = [torch.randn(1, heads, N, 64) for heads in (8, 2, 2)]
    made = []
    for device in ("cpu", "cuda"):
        where = dict(backend="cuda", store="host") if device == "cuda" else {}
        index = kvindex.create("pariskv", **sizes, device=device, **where)
        layer = AttentionLayer(index, prefill="sparse", prefill_mass=0.6)
        layer.expect_prompt(N)
        queries, keys, values = (part.to(device) for part in given)
        outputs = []
        for start, stop in ((0, 1024), (1024, 2048), (2048, N)):
            some = slice(start, stop)
            if stored:
                rows = kvindex.Rows(keys[:, :, :stop], values[:, :, :stop])
                outputs.append(layer.read_chunk(queries[:, :, some], rows))
            else:
                outputs.append(layer.step(*(p[:, :, some] for p in (queries, keys, values))))
        made.append((torch.cat(outputs, 2).cpu(), layer.prefill_fraction))
    assert made[0][1] == pytest.approx(made[1][1], abs=0.01)
    assert made[0][1] < 0.8
    close = torch.isclose(made[0][0], made[1][0], rtol=1e-3, atol=1e-3)
    assert close.float().mean() > 0.97  # a block at the threshold may be chosen on one device alone


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("spec", ["pariskv:store=host", "pariskv:store=device", "exact:store=auto"])
def test_full_attention_reads_rows_where_they_are(spec, dtype):
    """A step of a few tokens attends to all rows as torch does, and copies none of them."""
    pytest.importorskip("triton")
    B, H, G, D, N = 2, 8, 2, 64, 3000
    torch.manual_seed(0)
    shapes = (B, H, N + 40, D), (B, G, N + 40, D), (B, G, N + 40, D)
    given = [torch.randn(shape).to("cuda", dtype) for shape in shapes]
    index = kvindex.create(spec, q_heads=H, kv_heads=G, head_dim=D, dtype=dtype, device="cuda")
    layer = AttentionLayer(index, k=20)
    layer.step(*(part[:, :, :N] for part in given))
    reading = index.capability(AttendsToAll)
    assert reading is index
    assert reading.most_tokens == 32
    read, place = attend_causal(*given, scale=D**-0.5), N
    for count in (1, 7, 32):
        with layer.speculating(count), layer.attending_fully():
            output = layer.step(*(part[:, :, place : place + count] for part in given))
        expected = read[:, :, place : place + count].float()
        error = (output.float() - expected).abs().max() / expected.abs().max()
        assert error < (1e-5 if dtype == torch.float32 else 0.02)
        place += count
