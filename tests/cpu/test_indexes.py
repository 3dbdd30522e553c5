"""Compare every index on compiled operations with plain torch, and check the contract."""

from dataclasses import replace

import pytest
import torch

import kvindex
from kvindex.core.protocol import Attends, AttendsToAll
from kvindex.core.resident import ResidentRows
from kvindex.cpu.store import CompiledStore
from kvindex.layer import AttentionLayer
from kvindex.ops.attention import attend, attend_blocks
from kvindex.testing import contract
from kvindex.testing.cases import CASES
from tests.support.helpers import ROUNDED, Case, assert_same_hits, left_padding, part, sampled
from tests.support.sequences import Sequence, assert_dense_without_valid_rows

CASE = Case(q_heads=6, kv_heads=2, head_dim=64, value_dim=32, batch=2)

FETCHES = {"retroinfer": "summaries", "shadowkv": "keys of low rank"}
"""Index -> what it fetches in addition to stored rows, so kernels cannot attend in the store."""

CHECKS = [check for check in contract.CHECKS if check.__module__.rpartition(".")[2] != "devices"]

NAMES = kvindex.names()

PRESETS = "pariskv:sampling=priority", "pariskv:preset=fast", "pariskv:preset=paper"

RUNS = [(check, NAMES[(3 * i + j) % len(NAMES)]) for i, check in enumerate(CHECKS) for j in (0, 1)]


def pair(name, case=CASE):
    """Make the index on compiled ops and in plain torch, with 400 tokens, some of them padding."""
    made = [case.index(name, backend=backend) for backend in ("cpu", "torch")]
    keys, values = case.tokens(400)
    for index in made:
        valid = left_padding([0, 30], 390)
        valid[0, 200:230] = valid[1, 380:] = False
        index.append(*part((keys, values), 0, 390), valid=valid)
        index.end_prompt()
        index.append(*part((keys, values), 390, 400))
    return made


@pytest.mark.parametrize("name", NAMES)
def test_an_index_finds_the_same(name):
    for seed, k in enumerate((1, 20, 500)):
        queries = CASE.queries(seed)
        hits = [index.search(queries, k=k) for index in pair(name)]
        assert_same_hits(*hits, close=ROUNDED)


@pytest.mark.parametrize(
    ("dtype", "name"), sampled([torch.float32, torch.bfloat16], NAMES), ids=str
)
def test_an_index_attends_to_what_it_fetches(name, dtype):
    case = replace(CASE, dtype=dtype)
    mine, theirs = pair(name, case)
    assert theirs.capability(Attends) is None
    if name in FETCHES or mine.capability(Attends) is None:
        assert name in FETCHES
        return
    keys, values, shown = *case.tokens(30, seed=7), left_padding([5, 0], 30)
    resident = ResidentRows(mine.geometry, 2, 40)
    resident.add(keys, values, shown)
    queries = case.queries(3)
    hits = mine.search(queries, k=20)
    rows = theirs.fetch(hits)
    seen = torch.cat([hits.ids >= 0, shown[:, None].expand(-1, 2, -1)], dim=2)
    bias = torch.zeros(seen.shape).masked_fill(~seen, float("-inf")).repeat_interleave(3, dim=1)
    if hits.log_weight is not None:
        bias[..., :20] += hits.log_weight
    both = torch.cat([rows.keys, keys], dim=2), torch.cat([rows.values, values], dim=2)
    options = dict(scale=mine.geometry.scale, bias=bias, return_lse=True)
    output, lse = attend(queries, *both, **options)
    close = dict(rtol=1e-5, atol=1e-5) if dtype == torch.float32 else {}
    for found in (mine.attend(queries, resident, k=20), mine.attend_hits(queries, hits, resident)):
        assert found.found.tolist() == (hits.ids >= 0).sum(-1).tolist()
        torch.testing.assert_close(found.output, output, **close)
        torch.testing.assert_close(found.lse, lse, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("value_dim", [32, 64])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("tokens", [1, 3, 8])
def test_an_index_attends_to_all_rows(dtype, tokens, value_dim):
    case = replace(CASE, dtype=dtype, value_dim=value_dim)
    index, queries = case.index("exact", backend="cpu"), case.tensor(5, 2, 6, tokens, 64)
    rows = case.tokens(300)
    for end in (290, 300):  # the second time after an append
        index.append(*part(rows, len(index), end))
        output, lse = index.attend_all(queries.to(dtype))
        keys, values = part(rows, 0, end)
        options = dict(scale=index.geometry.scale, return_lse=True)
        want, sums = attend_blocks(queries.to(dtype), [(keys, values, None)], **options)
        assert output.dtype == dtype
        close = dict(rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(output, want, **(close if dtype == torch.float32 else {}))
        torch.testing.assert_close(lse, sums, **close)
    index.reorder(torch.tensor([1]))
    own = part(rows, 0, 300)
    want = attend_blocks(queries[1:].to(dtype), [(own[0][1:], own[1][1:], None)], **options)[0]
    close = close if dtype == torch.float32 else {}
    torch.testing.assert_close(index.attend_all(queries[1:].to(dtype))[0], want, **close)


def test_rows_that_no_kernel_reads_in_place_are_copied():
    quantized = CASE.index("exact", backend="cpu", row_codec="int8")
    capped = replace(CASE, softcap=20.0).index("exact", backend="cpu")
    assert quantized.capability(AttendsToAll) is capped.capability(AttendsToAll) is None


@pytest.mark.parametrize("name", ["exact", "pariskv"])
def test_full_attention_of_decoded_tokens_reads_rows_in_place(name, monkeypatch):
    layer = AttentionLayer(CASE.index(name, backend="cpu"), local_window=16, update_every=16)
    sequence = Sequence.of(CASE, 240)
    sequence.feed(layer, 0, 220)
    monkeypatch.setattr(CompiledStore, "gather", None)  # which would copy rows
    outputs = [sequence.feed(layer, place, place + 1) for place in range(220, 230)]
    outputs.append(sequence.feed(layer, 230, 236))
    sequence.assert_equals(torch.cat(outputs, 2), sequence.dense(), 220)


@pytest.mark.parametrize("name", NAMES)
def test_a_layer_gives_the_same_output(name):
    sizes = dict(k=20, sink=4, local_window=16, update_every=8, dense_below=64)
    layers = [AttentionLayer(CASE.index(name, backend=b), **sizes) for b in ("cpu", "torch")]
    tokens = CASE.tokens(212)
    for layer in layers:
        queries = CASE.tensor(5, 2, 6, 200, 64)
        layer.step(queries, *part(tokens, 0, 200), valid=left_padding([0, 9], 200))
    for t in range(200, 212):
        query = CASE.tensor(100 + t, 2, 6, 1, 64)
        outputs = [layer.step(query, *part(tokens, t, t + 1)) for layer in layers]
        torch.testing.assert_close(*outputs, rtol=1e-4, atol=1e-5)
    mine, theirs = (layer.traffic for layer in layers)
    assert float(mine.rows_read) == float(theirs.rows_read)


@pytest.mark.parametrize("name", [*NAMES, *PRESETS])
def test_a_layer_is_dense_while_its_index_has_no_valid_row(name):
    assert_dense_without_valid_rows(replace(CASE, value_dim=64), name, backend="cpu")


@pytest.mark.parametrize(("check", "name"), RUNS, ids=lambda p: getattr(p, "__name__", str(p)))
def test_indexes_keep_the_contract_on_compiled_ops(check, name):
    case = CASES[len(check.__name__) % 5]
    check(lambda **options: case.index(name, **{"backend": "cpu", **options}), case)
