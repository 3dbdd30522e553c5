"""Calls that a graph would replay while the index grows. On a CPU they are recorded.

`test_capture.py` captures them in CUDA graphs, on a GPU.
"""

import pytest
import torch

from kvindex.bases.deferred import DeferredChecks
from kvindex.core.resident import ResidentRows
from kvindex_cuda.ops import sampling
from kvindex_cuda.pariskv import executor
from kvindex_cuda.pariskv.executor import ParisKVExecutor
from tests.cuda import emulator
from tests.cuda.devices import torch_ops_and_an_executor
from tests.cuda.recorder import Recorded
from tests.support.helpers import Case, left_padding, part, slow

CASE = Case(q_heads=2, kv_heads=1, head_dim=64)
K = 20

pytestmark = pytest.mark.skipif(not emulator.available(), reason="no g++ to emulate with")


@pytest.fixture
def setup(monkeypatch):
    """Return a function that makes an index of 300 tokens by name, and records calls on it."""
    torch_ops_and_an_executor(monkeypatch, on_host=True, sampling=sampling)

    def make(name):
        index, tokens = CASE.index(name, backend="cuda"), CASE.tokens(700)
        index.append(*part(tokens, 0, 300), valid=left_padding([70], 300))
        resident = ResidentRows(index.geometry, 1, 12)
        resident.add(*CASE.tokens(10, seed=9), left_padding([3], 10))
        index.warm_up(k=K, tokens=700)
        monkeypatch.setattr(executor, "capturing", lambda device: True)
        with Recorded() as recorded:
            output = index.attend(queries := CASE.queries(), resident, k=K).output
            hits = index.search(queries, k=K)
        monkeypatch.setattr(executor, "capturing", lambda device: False)
        return index, tokens, resident, queries, recorded, output, hits

    with emulator.emulated():
        yield make


def assert_replayed(setup, name):
    """Outputs and hits of replays equal those of calls, while tokens are appended and removed."""
    index, tokens, resident, queries, recorded, output, hits = setup(name)
    for seed, known in enumerate((301, 700, 250, 280)):
        queries.copy_(CASE.queries(seed=seed))
        index.truncate(known)
        if known > len(index):
            index.append(*part(tokens, len(index), known))
        resident.add(*CASE.tokens(1, seed=20 + seed), None) if len(
            resident
        ) < resident.room else resident.clear()
        recorded.replay()
        assert torch.equal(hits.ids, index.search(queries, k=K).ids)
        torch.testing.assert_close(output, index.attend(queries, resident, k=K).output)


@pytest.mark.parametrize("name", [slow("pariskv"), "pariskv:preset=fast+sample"])
def test_a_replay_is_a_call(setup, name):
    assert_replayed(setup, name)


def test_ids_that_a_graph_would_hold_to_the_hosts_length_are_refused(setup, monkeypatch):
    index, *_, hits = setup("pariskv")
    monkeypatch.setattr(DeferredChecks, "_captured", lambda self: True)
    with pytest.raises(RuntimeError, match=r"graph: got a call \(such as fetch\) that"):
        index.fetch(hits)
    monkeypatch.setattr(ParisKVExecutor, "length", None)
    with pytest.raises(RuntimeError, match=r"graph: got a call \(such as fetch\) that"):
        index.attend_hits(CASE.queries(), hits, ResidentRows(index.geometry, 1, 1))


@pytest.mark.slow
def test_a_length_that_stays_as_it_was_recorded_is_seen(setup, monkeypatch):
    monkeypatch.setattr(
        ParisKVExecutor, "length", None
    )  # ids are compared with the number of tokens that the host knows
    with pytest.raises(AssertionError):
        assert_replayed(setup, "pariskv:preset=fast+sample")
