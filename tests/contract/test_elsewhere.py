"""Every index keeps to the device of its tensors, and finds there what it finds on the CPU."""

import pytest
import torch

import kvindex
from benchmarks.comparing.field import SPECS
from benchmarks.comparing.measure import inmost
from tests.support.elsewhere import PLACE, known
from tests.support.helpers import Case, assert_same_hits, left_padding, part

CASE = Case(q_heads=4, kv_heads=2, head_dim=16, value_dim=8)
K, PROMPT, N = 70, 300, 340
NAMES = [
    spec.replace("{k}", str(K))
    for name in kvindex.names()
    for spec in dict.fromkeys([name, *SPECS.get(name, ())])
]


@pytest.fixture
def elsewhere():
    with known():
        yield


@pytest.mark.parametrize("name", NAMES)
def test_an_index_keeps_to_its_device(name, elsewhere):
    found = {}
    for device in (torch.device("cpu"), PLACE):
        rope = (10_000.0 ** -(torch.arange(8) / 8)).to(device)
        index = CASE.index(name, device=device, rope=rope)
        tokens = [tensor.to(device) for tensor in CASE.tokens(N)]
        valid = left_padding([4], N).to(device)
        asked = CASE.tensor(7, 1, 4, N, 16).to(device)
        positions = torch.arange(N, device=device)
        index.observe_queries(asked[:, :, :PROMPT], positions[:PROMPT])
        index.append(*part(tokens, 0, PROMPT), valid=valid[:, :PROMPT])
        index.end_prompt()
        index.search(asked[:, :, PROMPT], k=K)
        for at in range(PROMPT, PROMPT + 10):
            index.observe_queries(asked[:, :, at : at + 1], positions[at : at + 1])
        index.append(*part(tokens, PROMPT, N), valid=valid[:, PROMPT:])
        index.truncate(N - 10)
        hits = index.search(asked[:, :, -1], k=K)
        rows = index.fetch(hits)
        assert hits.ids.device == rows.keys.device == device
        weight = hits.log_weight if hits.log_weight is None else hits.log_weight.cpu()
        found[device] = kvindex.Hits(hits.ids.cpu(), hits.scores.cpu(), weight), rows.values.cpu()
        index.nbytes(), inmost(index).bytes_per_key()
    (ours, values), (theirs, others) = found.values()
    assert_same_hits(ours, theirs, close=1e-4)
    assert torch.equal(values, others)


def test_devices_that_meet_are_noticed(elsewhere):
    there, here = torch.zeros(3, device=PLACE), torch.ones(3)
    for meeting in (
        lambda: there + here,
        lambda: torch.cat([here, there]),
        lambda: here[there > 0],
    ):
        with pytest.raises(RuntimeError, match="two devices"):
            meeting()
    with pytest.raises(RuntimeError, match="numpy"):
        there.numpy()
    there[torch.tensor([0, 2])] += 1
    assert (there + here.to(PLACE)[1:2]).tolist() == [2, 1, 2]
