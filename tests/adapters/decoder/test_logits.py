"""Logits equal those of transformers, for each family, in chunks and in padded batches."""

import pytest
import torch
from transformers.models.qwen3 import modeling_qwen3

from kvindex_adapters.decoder import Decoder, layers
from kvindex_adapters.decoder.batch import left_padded
from kvindex_adapters.decoder.dense import DenseAttention
from kvindex_adapters.decoder.layers import forward
from kvindex_adapters.decoder.sampling import keep_top_k, keep_top_p
from kvindex_adapters.llama.rotary import Rotary, rotate
from kvindex_adapters.llama.weights import Norm, read_weights
from tests.adapters.decoder.families import FAMILIES, ids_of, model_of
from tests.adapters.tiny import LAYERS, VOCABULARY, prompt
from tests.support.helpers import mostly_slow, slow

EVERYTHING = dict(
    index="exact",
    k=500,
    attach_options=dict(sink=4, local_window=8, update_every=8, dense_below=0),
)
FEW = ("llama, biases, tied", "llama, llama3's rotation", "llama, yarn", "mistral", "qwen3")
"""Families with biases, other rotations, one KV head, or norms of queries and keys."""
CLOSE = dict(rtol=1e-4, atol=1e-4)


def logits_of(decoder, prompts, more, **options):
    """Return logits `[B, V]` after prompts, and after each of the tokens `[B, M]`."""
    run = decoder.start(prompts, max_new_tokens=more.shape[1] + 1, **options)
    made = [run.session.read_prompt(run.ids, run.chunk, len(run.ids[0]))]
    return [*made, *(run.session.step(tokens) for tokens in more.unbind(1))]


def expected(model, ids, more):
    """Return the same logits from transformers, which reads each sequence in one call."""
    with torch.no_grad():
        logits = model(input_ids=torch.cat([ids, more])[None]).logits[0]
    return list(logits[len(ids) - 1 :].unsqueeze(1))


@pytest.mark.parametrize("options", [slow(dict(index=None)), EVERYTHING], ids=["dense", "exact"])
@pytest.mark.parametrize("name", mostly_slow(FAMILIES, *FEW))
def test_logits_are_those_of_transformers(name, options):
    model, ids, more = model_of(name), ids_of(61), ids_of(20, seed=3)
    made = logits_of(Decoder.of(model), ids, more[None], chunk=16, **options)
    for ours, theirs in zip(made, expected(model, ids, more), strict=True):
        torch.testing.assert_close(ours, theirs, **CLOSE)


@pytest.mark.parametrize("options", [dict(index=None), EVERYTHING], ids=["dense", "exact"])
@pytest.mark.parametrize("chunk", [8, 1024])
def test_rows_of_a_padded_batch_are_what_they_are_alone(options, chunk):
    model, more = model_of("qwen3"), prompt(3, 20)["input_ids"]
    prompts = [ids_of(40), ids_of(1), ids_of(23)]
    made = logits_of(Decoder.of(model), prompts, more, chunk=chunk, **options)
    for row, ids in enumerate(prompts):
        for ours, theirs in zip(made, expected(model, ids, more[row]), strict=True):
            torch.testing.assert_close(ours[row : row + 1], theirs, **CLOSE)


@pytest.mark.parametrize("length", [1, 2, 3])
@pytest.mark.parametrize("options", [dict(index=None), EVERYTHING], ids=["dense", "exact"])
def test_the_shortest_prompts(options, length):
    model, ids, more = model_of("llama"), ids_of(length), ids_of(4, seed=3)
    made = logits_of(Decoder.of(model), ids, more[None], chunk=2, **options)
    for ours, theirs in zip(made, expected(model, ids, more), strict=True):
        torch.testing.assert_close(ours, theirs, **CLOSE)


@pytest.mark.parametrize("padded", [False, True])
def test_buffers_that_grow_hold_what_large_ones_hold(padded):
    torch.manual_seed(0)
    small, large = DenseAttention(0.25, 3), DenseAttention(0.25, 5000)
    for T in (5, 1, 300, 1, 700):
        queries, keys, values = (torch.randn(2, heads, T, 8) for heads in (4, 2, 2))
        valid = torch.arange(T) >= torch.tensor([[0], [3]]) if padded and T == 5 else None
        outputs = [a.step(queries, keys, values, valid=valid) for a in (small, large)]
        if valid is not None:
            outputs = [output * valid[:, None, :, None] for output in outputs]
        torch.testing.assert_close(*outputs)
    assert len(small) == len(large) == 1007
    assert small.nbytes == large.nbytes == 2 * 1007 * 2 * 2 * 8 * 4


def test_prompts_are_padded_on_the_left():
    ids, padding = left_padded([torch.tensor([5, 6]), torch.tensor([7])], torch.device("cpu"))
    assert ids.tolist() == [[5, 6], [0, 7]]
    assert padding == [0, 1]


class Adds:
    """An attention that reads no tensor's numbers."""

    def step(self, queries, keys, values, *, valid=None):
        return queries + keys.repeat_interleave(2, 1) + values.repeat_interleave(2, 1)


def test_no_layer_asks_the_device_for_a_number():
    """Tensors on the meta device have no numbers, so reading one raises."""
    model = model_of("qwen3").to("meta")
    ids = torch.zeros(2, 1, dtype=torch.int64, device="meta")
    valid = torch.ones(2, 1, dtype=torch.bool, device="meta")
    for padding in (None, valid):
        given = ids, ids, [Adds()] * LAYERS, 16, padding
        assert forward(read_weights(model), *given).shape == (2, VOCABULARY)
    logits = torch.zeros(2, VOCABULARY, device="meta")
    assert keep_top_p(keep_top_k(logits, 5), 0.5).shape == (2, VOCABULARY)


def test_a_norm_and_a_rotation_are_those_of_transformers_to_the_bit():
    torch.manual_seed(0)
    norm = modeling_qwen3.Qwen3RMSNorm(64, eps=1e-6)
    norm.weight.data.normal_()
    hidden = 3 * torch.randn(2, 33, 4, 64)
    mine = Norm(norm.weight.detach(), norm.variance_epsilon)
    assert torch.equal(layers.normalize(hidden, mine), norm(hidden))
    for factor in (1.0, 1.3):
        rotary = Rotary(10_000 ** -torch.linspace(0, 1, 32), factor)
        cos, sin = rotary.at(torch.arange(33).expand(2, -1), torch.float32)
        heads = hidden.transpose(1, 2)
        want, _ = modeling_qwen3.apply_rotary_pos_emb(heads, heads, cos[:, 0], sin[:, 0])
        assert torch.equal(rotate(heads, cos, sin), want)
