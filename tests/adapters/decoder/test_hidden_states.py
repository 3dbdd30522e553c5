"""The hidden states of a prompt in host memory are those in device memory."""

from contextlib import contextmanager
from types import SimpleNamespace

import pytest
import torch
from torch.nn import functional

from kvindex_adapters.decoder import Decoder, hidden_states, prefill
from kvindex_adapters.decoder.hidden_states import DeviceStates, HostStates, states_of
from tests.adapters.decoder.families import ids_of, model_of

REGIONS = dict(sink=4, local_window=8, update_every=8, dense_below=0)
CHUNK = 16


def slab(numbers):
    return torch.full((numbers,), float("nan"))


@contextmanager
def on_host(weights, ids, chunks):
    """Like `states_of`, but with ordinary host memory, in slabs that end within chunks."""
    yield HostStates(weights, ids, chunks, lambda: slab(1000))


def logits(decoder, lengths):
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


class Late:
    """Copies that run only when the computation waits for them."""

    def __init__(self, monkeypatch):
        self._queue, self._ends, copy = [], {}, torch.Tensor.copy_

        def later(target, source, non_blocking=False):
            if non_blocking:
                self._queue.append(lambda: copy(target, source))
                return target
            return copy(target, source)

        monkeypatch.setattr(torch.Tensor, "copy_", later)
        monkeypatch.setattr(hidden_states, "_Copies", lambda buffers: self)

    def wait_for(self, buffer):
        for _ in range(self._ends.get(buffer, 0)):
            self._queue.pop(0)()
        self._ends = {one: end - self._ends.get(buffer, 0) for one, end in self._ends.items()}

    @contextmanager
    def after_computation(self, buffer):
        yield
        self._ends[buffer] = len(self._queue)


@pytest.mark.parametrize("layers", [1, 2, 4])
@pytest.mark.parametrize("chunks", [2, 3, 4, 7])
@pytest.mark.parametrize(("batch", "last"), [(1, 4), (3, 1)])
def test_copies_may_be_as_late_as_the_computation_allows(layers, chunks, batch, last, monkeypatch):
    places = [(4 * i, 4 * i + (last if i == chunks - 1 else 4)) for i in range(chunks)]
    ids = torch.arange(batch * places[-1][1]).view(batch, -1) % 20
    weights = SimpleNamespace(embedding=torch.randn(20, 8), layers=[None] * layers)
    Late(monkeypatch)
    states = HostStates(weights, ids, places, lambda: slab(50))
    want = functional.embedding(ids, weights.embedding)
    for step in range(layers * chunks):
        here = slice(*places[step % chunks])
        states.take(step % chunks).mul_(1.1).add_(step)
        want[:, here] = want[:, here] * 1.1 + step
        states.put(step % chunks)
    assert torch.equal(states.last(), want[:, -1])


def test_on_a_cpu_hidden_states_are_not_copied():
    weights = Decoder.of(model_of("llama")).weights
    chunks = [(start, start + CHUNK) for start in range(0, 160, CHUNK)]
    with states_of(weights, ids_of(160)[None], chunks) as states:
        assert isinstance(states, DeviceStates)


@pytest.fixture
def made(monkeypatch):
    """Blocks of host memory that were made, although prompts are short."""
    made, blocks = [], hidden_states._host_blocks
    monkeypatch.setattr(hidden_states, "HOST_BYTES", 0)
    monkeypatch.setattr(
        hidden_states, "_host_blocks", lambda *given: made.append(blocks(*given)) or made[-1]
    )
    return made


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("lengths", [[200], [200, 41, 1]])
def test_on_a_gpu_a_long_prompt_is_in_pinned_memory(lengths, dtype, made, monkeypatch):
    from kvindex_cuda.memory.block_store import SLAB_BYTES
    from kvindex_cuda.memory.budget import shared_budget

    decoder = Decoder.of(model_of("qwen3").to("cuda", dtype))
    with monkeypatch.context() as patch:
        patch.setattr(hidden_states, "CHUNKS", 10**9)
        want, used = logits(decoder, lengths), shared_budget().used_bytes
    assert not made
    for _ in range(2):
        assert all(map(torch.equal, logits(decoder, lengths), want))
        assert made.pop() is not None
        assert shared_budget().used_bytes == used
    room = 2 * len(decoder.weights.layers) * SLAB_BYTES  # enough for the index alone
    monkeypatch.setattr(shared_budget(), "limit_bytes", used + room)
    assert all(map(torch.equal, logits(decoder, lengths), want))
    assert made.pop() is None


@pytest.mark.gpu
def test_on_a_gpu_states_stay_on_the_device_if_pinning_fails(made, monkeypatch):
    from kvindex_cuda.memory.host_blocks import HostBlocks

    def fails(self):
        raise MemoryError

    decoder = Decoder.of(model_of("qwen3").to("cuda"))
    want = logits(decoder, [200])
    monkeypatch.setattr(HostBlocks, "add", fails)
    assert all(map(torch.equal, logits(decoder, [200]), want))
    assert len(made) == 2


@pytest.mark.gpu
def test_on_a_gpu_copies_wait_for_slow_computation():
    places = [(4 * i, 4 * i + 4) for i in range(6)]
    ids = torch.arange(24, device="cuda")[None]
    weights = SimpleNamespace(embedding=torch.randn(24, 2**18, device="cuda"), layers=[None] * 3)
    states = HostStates(weights, ids, places, lambda: torch.empty(2**20).pin_memory())
    want = functional.embedding(ids, weights.embedding)
    for step in range(18):
        here = slice(*places[step % 6])
        some = states.take(step % 6)
        torch.cuda._sleep(10**6)
        some.mul_(1.1).add_(step)
        want[:, here] = want[:, here] * 1.1 + step
        states.put(step % 6)
    assert torch.equal(states.last(), want[:, -1])
