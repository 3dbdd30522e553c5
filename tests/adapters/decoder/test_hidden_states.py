"""The hidden states of a prompt in host memory are those in device memory."""

from contextlib import contextmanager

import pytest
import torch

from kvindex_adapters.decoder import Decoder, hidden_states, prefill
from tests.adapters.decoder.families import ids_of, model_of

REGIONS = dict(sink=4, local_window=8, update_every=8, dense_below=0)
CHUNK = 16


@contextmanager
def on_host(weights, ids, chunks):
    """Like `states_of`, but with ordinary host memory."""
    blocks = []

    def new_block():
        nbytes = len(ids) * CHUNK * weights.embedding.shape[1] * weights.embedding.element_size()
        blocks.append(torch.full((nbytes,), 255, dtype=torch.uint8))  # NaN
        return blocks[-1]

    yield hidden_states.HostStates(weights, ids, chunks, new_block)
    assert len(blocks) == len(chunks)


def logits(decoder, lengths, device="cpu"):
    prompts = [ids_of(length) for length in lengths]
    run = decoder.start(prompts, index="pariskv", k=10, chunk=CHUNK, attach_options=REGIONS)
    found = run.session.read_prompt(run.ids, CHUNK, run.ids.shape[1] + 8)
    return [found, *(run.session.step(found.argmax(-1)) for _ in range(2))]


@pytest.mark.parametrize("layers", [1, 2, 3])
@pytest.mark.parametrize("lengths", [[32], [40], [60, 41, 1], [90]])
def test_logits_are_the_same_to_the_bit(layers, lengths, monkeypatch):
    kinds = ["full_attention"] * layers
    decoder = Decoder.of(model_of("qwen3", num_hidden_layers=layers, layer_types=kinds))
    want = logits(decoder, lengths)
    monkeypatch.setattr(prefill, "states_of", on_host)
    assert all(map(torch.equal, logits(decoder, lengths), want))


def test_memory_on_a_cpu_is_that_of_the_device():
    weights = Decoder.of(model_of("llama")).weights
    chunks = [(start, start + CHUNK) for start in range(0, 160, CHUNK)]
    with hidden_states.states_of(weights, ids_of(160)[None], chunks) as states:
        assert isinstance(states, hidden_states.DeviceStates)


@pytest.mark.gpu
@pytest.mark.parametrize("lengths", [[200], [200, 41, 1]])
def test_on_a_gpu_a_long_prompt_is_in_pinned_memory(lengths, monkeypatch):
    from kvindex_cuda.memory.budget import shared_budget

    decoder = Decoder.of(model_of("qwen3").to("cuda"))
    want, used = logits(decoder, lengths), shared_budget().used_bytes
    made = []
    monkeypatch.setattr(hidden_states, "HOST_BYTES", 0)
    blocks = hidden_states._host_blocks
    monkeypatch.setattr(
        hidden_states, "_host_blocks", lambda *given: made.append(blocks(*given)) or made[-1]
    )
    assert all(map(torch.equal, logits(decoder, lengths), want))
    assert made[0] is not None
    assert not made[0].close.alive
    assert shared_budget().used_bytes == used
    monkeypatch.setattr(shared_budget(), "limit_bytes", shared_budget().used_bytes + 10**4)
    assert (
        blocks(decoder.weights, torch.zeros(1, 200, device="cuda"), [(0, 100), (100, 200)]) is None
    )
