"""Values that are the beginning of their keys, as in latents, are stored once."""

import copy

import pytest
import torch

import kvindex
from kvindex.core.geometry import DTYPES, Geometry
from kvindex.core.resident import ResidentRows
from kvindex.layer import AttentionLayer
from kvindex.ops.attention import attend
from kvindex.storage.codecs import CODES, NAMES, codec
from kvindex.storage.store import TensorStore
from kvindex.testing.cases import Case
from kvindex_cuda.memory.block_store import BlockStore
from kvindex_cuda.memory.budget import Budget
from kvindex_cuda.pariskv.dispatch import unreadable
from tests.cuda.host_memory import FakeAllocator
from tests.support.helpers import assert_same_hits, hits_of
from tests.support.sequences import SIZES, Sequence

SMALL = Case(q_heads=4, kv_heads=1, head_dim=24, value_dim=16, batch=2, value_in_key=True)


def geometry_of(case=SMALL, **changed):
    return Geometry.of(**case.geometry() | changed)


@pytest.mark.parametrize(
    ("name", "row_bytes", "twice"),
    [
        ("plain", 1152, 2176),
        ("int8", 592, 1104),
        ("fp8", 592, 1104),
        ("int4", 368, 688),
        ("int2", 224, 416),
    ],
)
def test_the_sizes_of_a_latents_row(name, row_bytes, twice):
    """DeepSeek's sizes in bfloat16: 512 numbers of a latent, 64 of a rotated key."""
    case = Case(q_heads=1, kv_heads=1, head_dim=576, value_dim=512, dtype=torch.bfloat16)
    assert codec(name, geometry_of(case, value_in_key=True)).row_bytes == row_bytes
    assert codec(name, geometry_of(case)).row_bytes == twice


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("widths", [(24, 16), (8, 3), (72, 64)], ids=str)
@pytest.mark.parametrize("name", NAMES)
def test_a_value_is_what_the_decoded_key_begins_with(name, widths, dtype):
    sizes = dict(head_dim=widths[0], value_dim=widths[1], dtype=dtype)
    rows, keys = codec(name, geometry_of(**sizes)), SMALL.tokens(5)[0]
    keys = keys.repeat(1, 1, 1, 3)[..., : widths[0]].to(dtype)
    decoded = rows.decode(rows.encode(keys, keys[..., : widths[1]]))
    assert torch.equal(decoded.values, decoded.keys[..., : widths[1]])
    off = (decoded.keys.double() - keys.double()).norm() / keys.double().norm()
    assert off <= {"plain": 0, "int8": 0.01, "fp8": 0.04, "int4": 0.1, "int2": 0.5}[name]


@pytest.mark.parametrize("name", sorted(CODES))
def test_latent_and_rotated_part_have_scales_of_their_own(name):
    rows, (keys, _) = codec(name, geometry_of()), SMALL.tokens(5)
    keys[..., 16:] *= 2**10
    latents = codec(name, geometry_of(head_dim=16, value_dim=8, value_in_key=False))
    alone = latents.decode(latents.encode(keys[..., :16], keys[..., :8])).keys
    assert torch.equal(rows.decode(rows.encode(keys, keys[..., :16])).values, alone)


def test_a_rotated_part_is_turned_before_few_bits():
    """The part with rotary embedding belongs to a key, and has outliers in a few channels."""
    sizes = dict(head_dim=96, value_dim=64)
    keys = torch.randn(1, 1, 200, 96, generator=torch.Generator().manual_seed(0))
    keys[..., 70] += 30
    rows = codec("int4", geometry_of(**sizes))
    apart = codec("int4", geometry_of(head_dim=64, value_dim=32, value_in_key=False))
    ours = rows.decode(rows.encode(keys, keys[..., :64])).keys[..., 64:]
    unturned = apart.decode(apart.encode(keys[..., :64], keys[..., 64:])).values
    assert (ours - keys[..., 64:]).norm() < 0.75 * (unturned - keys[..., 64:]).norm()


@pytest.mark.parametrize("name", NAMES)
def test_stores_give_the_same_rows_and_tell_the_bytes_of_keys(name):
    pieces = [SMALL.tokens(count, seed) for seed, count in enumerate((3, 300, 1))]
    ours = TensorStore(geometry_of(), row_codec=name)
    room = dict(budget=Budget(), max_tokens=4096)
    theirs = BlockStore(geometry_of(), FakeAllocator(), row_codec=name, **room)
    for store in (ours, theirs):
        for piece in pieces:
            store.append(store.join(*piece))
        assert store.nbytes() == 2 * 304 * codec(name, geometry_of()).row_bytes
    ids = torch.tensor([[[0, 303, -1, 2, 255]]] * 2)
    got, want = theirs.gather(ids), ours.gather(ids)
    assert torch.equal(got.keys, want.keys)
    assert torch.equal(got.values, want.values)
    assert torch.equal(theirs.encoded(), ours.encoded())
    if name == "plain":
        keys = torch.cat([keys for keys, _ in pieces], dim=2)
        assert torch.equal(want.keys[:, :, :2], keys[:, :, [0, 303]])


@pytest.mark.parametrize("spec", ["exact", "pariskv:preset=fast", "shadowkv", "retroinfer"])
@pytest.mark.parametrize("backend", ["torch", "cpu"])
def test_hits_and_rows_are_those_of_values_beside_keys(spec, backend):
    options = dict(backend=backend, rope=None)
    once, twice = (
        kvindex.create(spec, **SMALL.geometry() | options | dict(value_in_key=in_key))
        for in_key in (True, False)
    )
    for index in (once, twice):
        index.append(*SMALL.tokens(700))
        index.end_prompt()
        index.append(*SMALL.tokens(9, seed=1))
    hits = once.search(SMALL.queries(), k=30)
    assert_same_hits(hits, twice.search(SMALL.queries(), k=30))
    got, want = once.fetch(hits), twice.fetch(hits)
    assert torch.equal(got.keys, want.keys)
    assert torch.equal(got.values, want.values)
    assert (once.row_bytes, twice.row_bytes) == (96, 160)
    assert once.nbytes()["rows"] * 160 == twice.nbytes()["rows"] * 96


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("spec", ["exact", "pariskv:preset=fast"])
def test_compiled_attention_reads_the_value_in_the_key(spec, dtype):
    geometry = SMALL.geometry() | dict(dtype=dtype)
    index = kvindex.create(spec, backend="cpu", **geometry)
    keys, values = (tensor.to(dtype) for tensor in SMALL.tokens(300))
    index.append(keys, values)
    resident = ResidentRows(index.geometry, 2, 4)
    beside = tuple(tensor.to(dtype) for tensor in SMALL.tokens(3, seed=1))
    resident.add(*beside, None)
    queries, hits = SMALL.queries().to(dtype), hits_of(torch.tensor([[[7, 299, -1]]] * 2))
    got = index.attend_hits(queries, hits, resident)
    rows = [
        torch.cat([mine[:, :, [7, 299]], other], dim=2).float()
        for mine, other in zip((keys, values), beside, strict=True)
    ]
    want = attend(queries.float(), *rows, scale=index.geometry.scale)
    torch.testing.assert_close(got.output.float(), want, rtol=1e-2, atol=2e-2)


@pytest.mark.parametrize("backend", ["torch", "cpu"])
@pytest.mark.parametrize("name", ["plain", "int8"])
def test_saved_forked_cut_and_in_a_layer(tmp_path, name, backend):
    options = dict(row_codec=name, backend=backend)
    layer = AttentionLayer(SMALL.index("exact", **options), k=500, **SIZES)
    text = Sequence.of(SMALL, 60, [0, 5])
    text.feed(layer, 0, 40)
    layer.save(tmp_path / "saved")
    fork, loaded = copy.deepcopy(layer), kvindex.load(tmp_path / "saved", backend=backend)
    assert loaded.index.geometry.value_in_key
    outputs = [text.feed(one, 40, 60) for one in (fork, loaded)]
    assert torch.equal(*outputs)
    if name == "plain":
        text.assert_equals(outputs[0], text.dense(), 40)
        text.feed(layer, 40, 45)
        layer.truncate(32)
        assert torch.equal(text.feed(layer, 32, 60)[:, :, 8:], outputs[0])


def test_state_of_values_beside_keys_is_refused():
    index, other = (
        kvindex.create("exact", **SMALL.geometry() | dict(value_in_key=in_key))
        for in_key in (True, False)
    )
    other.append(*SMALL.tokens(3))
    with pytest.raises(ValueError, match="value_in_key = None, allowed is True"):
        index.load_state_dict(other.state_dict())
    assert len(index) == 0
    assert "value_in_key" not in other.recipe()["geometry"]  # like folders of earlier versions


def test_a_pool_forks_and_counts_latents():
    keys, values = (tensor[:1] for tensor in SMALL.tokens(40))
    held = {}
    for in_key in (True, False):
        pool = kvindex.Pool("exact", **SMALL.geometry() | dict(value_in_key=in_key))
        first = pool.open()
        pool.append([first], keys, values)
        second = pool.fork(first)
        pool.append([second], keys, values)
        rows = pool.fetch([first, second], hits_of(torch.tensor([[[39]], [[79]]])))
        assert torch.equal(rows.values, values[:, :, 39:].expand(2, -1, -1, -1))
        held[in_key] = pool.report().separate_bytes
    assert held[True] * 160 == held[False] * 96


@pytest.mark.parametrize("sizes", [dict(value_dim=24), dict(value_dim=32), dict(value_dim=None)])
def test_a_value_as_wide_as_its_key_is_refused(sizes):
    with pytest.raises(ValueError, match="value_in_key: got True with value_dim = "):
        geometry_of(**sizes)


def test_other_values_are_refused_and_nothing_changes():
    index, (keys, values) = SMALL.index("exact"), SMALL.tokens(5)
    index.append(keys, values)
    wrong = values.clone()
    wrong[1, 0, 3, 15] += 1
    with pytest.raises(
        ValueError, match=r"values: got .*, allowed is the same number as in the key"
    ):
        index.append(keys, wrong)
    assert len(index) == 5
    keys[0, :, 0] = values[0, :, 0] = float("nan")  # padded: may hold anything
    valid = torch.ones(2, 5, dtype=torch.bool)
    valid[0, 0] = False
    index.append(keys, values, valid=valid)


def test_kernels_of_a_gpu_refuse_more_heads_in_words():
    many = geometry_of(q_heads=129)
    said = unreadable(TensorStore(many), many)
    assert said == "q_heads: got 129, allowed is up to 128 a head"
