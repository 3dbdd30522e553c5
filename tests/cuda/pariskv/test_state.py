"""State as named tensors, read from blocks and written back, on kernels and in plain torch."""

import torch

import kvindex
from tests.cuda.devices import mostly_slow_on_cpu
from tests.cuda.pariskv.test_backend import CASE, moved, pair
from tests.support.helpers import left_padding, part, sampled


@mostly_slow_on_cpu(
    "spec, row_codec",
    sampled(["exact", "pariskv", "pariskv:preset=paper", "pariskv:center=0"], ["int8", "plain"]),
    *(("exact", "int8"), ("pariskv", "plain"), ("pariskv:preset=paper", "int8")),
)
def test_an_index_that_loads_a_state_goes_on_as_the_one_that_gave_it(spec, row_codec, device):
    mine, plain = pair(spec, device, row_codec=row_codec)
    other, _ = pair(spec, device, row_codec=row_codec)
    tokens, queries = moved(CASE.tokens(700), device), CASE.queries().to(device)
    mine.append(*part(tokens, 0, 300), valid=left_padding([0, 70], 300).to(device))
    mine.append(*part(tokens, 300, 301))
    mine.append(*part(tokens, 301, 600))
    state = mine.state_dict()
    other.load_state_dict(state)
    plain.load_state_dict(state)
    assert state.keys() == plain.state_dict().keys()
    for name, tensor in plain.state_dict().items():
        assert torch.equal(tensor.cpu(), state[name].cpu()), name
    for index in (mine, other):
        index.append(*part(tokens, 600, 700))
        index.truncate(650)
        index.reorder(torch.tensor([1, 0]))
    hits = [index.search(queries, k=20) for index in (mine, other)]
    assert torch.equal(hits[0].ids, hits[1].ids)
    assert torch.equal(hits[0].scores, hits[1].scores)
    rows = [index.fetch(hits[0]) for index in (mine, other)]
    assert torch.equal(rows[0].keys, rows[1].keys)
    last = other.state_dict()
    for name, tensor in mine.state_dict().items():
        assert torch.equal(tensor.cpu(), last[name].cpu()), name


@mostly_slow_on_cpu("count", [256, 600], 600)
def test_what_is_saved_on_kernels_is_loaded_there_and_elsewhere(count, tmp_path, device):
    mine, _ = pair("pariskv", device, store="host")
    mine.append(*moved(CASE.tokens(count), device))
    mine.save(tmp_path / "saved")
    other = kvindex.load(tmp_path / "saved", device=device, backend="cuda", store="host")
    queries = CASE.queries().to(device)
    hits = [index.search(queries, k=20) for index in (mine, other)]
    assert torch.equal(hits[0].ids, hits[1].ids)
    plain = kvindex.load(tmp_path / "saved", backend="torch")
    last = plain.state_dict()
    for name, tensor in mine.state_dict().items():
        assert torch.equal(tensor.cpu(), last[name].cpu()), name
