"""Attention over pages equals attention over plain rows, and an index of the same tokens."""

from itertools import pairwise

import pytest
import torch

import kvindex
from kvindex.core.geometry import Geometry
from kvindex.ops.attention import attend
from kvindex.pariskv.block_layout import BLOCK
from kvindex_adapters.vllm import pages
from kvindex_adapters.vllm.attention import PagedAttention, Sequence
from kvindex_adapters.vllm.options import Options
from tests.vllm.test_pages import scattered

SPECS = ["pariskv", "pariskv:preset=fast", "pariskv:preset=precise", "pariskv:preset=paper"]
H, G, D = 4, 2, 8


def served(length, tokens=256, chunks=(1,), dtype=torch.float32, softcap=None, **options):
    """Return a layer, a sequence in its pages, and its keys and values `[1, G, N, D]`."""
    options = {"k": 5, "sink": 0, "local_window": 0, "dense_below": 0, **options}
    sizes = dict(q_heads=H, kv_heads=G, head_dim=D)
    geometry = Geometry.of(**sizes, dtype=dtype, softcap=softcap)
    paged = PagedAttention.of(Options(**options), geometry)
    memory, table, slots, keys, values = scattered(tokens, length)
    memory, keys, values = (part.to(dtype) for part in (memory, keys, values))
    shape = len(memory), G, tokens // BLOCK, paged.layout.head_bytes
    records = torch.full(shape, 255, dtype=torch.uint8)
    bounds = [0, *(int(length * share) for share in chunks)]
    for start, stop in pairwise(bounds):
        some = slice(start, stop)
        pages.write_rows(memory, slots[some], keys[some], values[some])
        paged.encode(memory, records, slots[some])
    rows = [part.transpose(0, 1)[None] for part in (keys, values)]
    return paged, Sequence(memory, records, table, length), *rows


def index_of(paged, keys, values):
    """Return a separate index of the same tokens."""
    g, options = paged.geometry, paged.options
    sizes = dict(q_heads=H, kv_heads=G, head_dim=D, dtype=g.dtype, softcap=g.softcap)
    index = kvindex.create(options.index, **sizes, backend="torch")
    index.append(keys, values)
    return index


def queries(count=1, dtype=torch.float32):
    return torch.randn(count, H, D, generator=torch.Generator().manual_seed(7)).to(dtype)


@pytest.mark.parametrize("spec", SPECS)
@pytest.mark.parametrize("tokens", [256, 512])
def test_codes_are_the_indexs_own_to_the_byte_however_keys_came(spec, tokens):
    alone = served(1100, tokens, index=spec)
    paged, sequence, keys, values = alone
    pieces = served(1100, tokens, chunks=(0.01, 0.3, 0.9305, 0.931, 1), index=spec)
    mine, theirs = (one[0].codes(one[1], 4 * BLOCK) for one in (alone, pieces))
    state = index_of(paged, keys[:, :, : 4 * BLOCK], values[:, :, : 4 * BLOCK]).state_dict()
    assert {f"codes.{name}" for name in mine} == {name for name in state if "codes." in name}
    for name in mine:
        assert torch.equal(mine[name], theirs[name])
        assert torch.equal(mine[name], state[f"codes.{name}"])
    assert torch.equal(
        pages.read_records(sequence.records, sequence.table, 4),
        pages.read_records(pieces[1].records, pieces[1].table, 4),
    )


@pytest.mark.parametrize("spec", SPECS)
def test_hits_are_those_of_an_index_of_the_same_tokens(spec):
    paged, sequence, keys, values = served(1100, index=spec)
    indexed = paged.searched(sequence.length)
    assert indexed == 4 * BLOCK
    index = index_of(paged, keys[:, :, :indexed], values[:, :, :indexed])
    mine, theirs = paged.hits(queries(), sequence, indexed), index.search(queries(), k=5)
    assert torch.equal(mine.ids, theirs.ids)
    assert torch.equal(mine.scores, theirs.scores)
    if theirs.log_weight is not None:
        assert torch.equal(mine.log_weight, theirs.log_weight)
    rows = index.fetch(theirs)
    expected = attend(
        queries(),
        torch.cat([rows.keys, keys[:, :, indexed:]], 2),
        torch.cat([rows.values, values[:, :, indexed:]], 2),
        scale=paged.geometry.scale,
        bias=None
        if theirs.log_weight is None
        else torch.nn.functional.pad(theirs.log_weight, (0, 1100 - indexed)),
    )
    torch.testing.assert_close(paged.attend(queries(), sequence), expected)


@pytest.mark.parametrize("spec", SPECS)
@pytest.mark.parametrize("softcap", [None, 3.0])
def test_as_many_rows_as_there_are_give_full_attention(spec, softcap):
    for length, sink, local_window in ((1100, 0, 0), (1024, 70, 300), (257, 1, 0), (300, 290, 3)):
        sizes = dict(sink=sink, local_window=local_window, k=2048)
        paged, sequence, keys, values = served(length, index=spec, softcap=softcap, **sizes)
        scale = paged.geometry.scale
        expected = attend(queries(), keys, values, scale=scale, softcap=softcap)
        torch.testing.assert_close(paged.attend(queries(), sequence), expected)


@pytest.mark.parametrize("softcap", [None, 3.0])
@pytest.mark.parametrize("count", [1, 300])
def test_learned_sinks_are_one_more_term_of_the_softmax(softcap, count):
    paged, sequence, keys, values = served(1100, k=2048, softcap=softcap)
    asked, sinks = queries(count), torch.tensor([2.0, -1.0, 0.5, 8.0])
    found = paged.attend(asked, sequence, sinks)
    for place in {0, count - 1}:
        end = 1100 - count + place + 1
        scores = torch.einsum("hd,hnd->hn", asked[place], keys[0, :, :end].repeat_interleave(2, 0))
        scores *= paged.geometry.scale
        scores = scores if softcap is None else softcap * torch.tanh(scores / softcap)
        weights = torch.cat([scores, sinks[:, None]], 1).softmax(1)[:, :-1]
        expected = torch.einsum("hn,hnd->hd", weights, values[0, :, :end].repeat_interleave(2, 0))
        torch.testing.assert_close(found[place], expected)


def test_few_rows_do_not():
    paged, sequence, keys, values = served(1100, k=1)
    expected = attend(queries(), keys, values, scale=paged.geometry.scale)
    assert (paged.attend(queries(), sequence) - expected).abs().max() > 0.01


@pytest.mark.parametrize("softcap", [None, 3.0])
@pytest.mark.parametrize("count", [1, 2, 300, 1100])
def test_chunks_and_short_sequences_are_attended_to_exactly(softcap, count):
    paged, sequence, keys, values = served(1100, softcap=softcap, dense_below=1101, k=1)
    asked = queries(count)
    found = paged.attend(asked, sequence)
    for place in {0, count // 2, count - 1}:
        end = 1100 - count + place + 1
        seen = keys[:, :, :end], values[:, :, :end]
        options = dict(scale=paged.geometry.scale, softcap=softcap)
        expected = attend(asked[place, None], *seen, **options)
        torch.testing.assert_close(found[place, None], expected)


def test_a_single_token_of_a_prompt_attends_to_all_tokens():
    paged, sequence, keys, values = served(1100, k=1)
    expected = attend(queries(), keys, values, scale=paged.geometry.scale)
    torch.testing.assert_close(paged.attend(queries(), sequence, prompt=True), expected)
    output = torch.empty(2, H, D)
    asked = queries().repeat(2, 1, 1)
    paged.attend_batch(asked, output, [sequence] * 2, [0, 1, 2], prompts=[True])
    torch.testing.assert_close(output[:1], expected)
    assert torch.equal(output[1:], paged.attend(queries(), sequence))  # a decode step searches
    assert not torch.equal(output[1], output[0])


def test_what_is_searched_is_whole_blocks_before_the_window():
    paged = served(1, sink=64, local_window=200, dense_below=600)[0]
    lengths = (1, 599, 600, 711, 712, 967, 968)
    assert [paged.searched(length) for length in lengths] == [0, 0, 256, 256, 512, 512, 768]
    assert served(1, sink=256)[0].searched(511) == 0  # all tokens are in the sink


def test_the_sink_is_never_a_hit():
    paged, sequence, _, _ = served(1100, sink=300, k=2048)
    ids = paged.hits(queries(), sequence, 1024).ids
    assert ids.shape[-1] == 724
    assert ids.min() == 300


def test_bf16():
    paged, sequence, keys, values = served(1100, dtype=torch.bfloat16, k=2048)
    asked = queries(dtype=torch.bfloat16)
    found = paged.attend(asked, sequence)
    assert found.dtype == torch.bfloat16
    expected = attend(asked.float(), keys.float(), values.float(), scale=paged.geometry.scale)
    torch.testing.assert_close(found.float(), expected, atol=0.02, rtol=0.02)


def latents_served(length, tokens=256, **options):
    """Return a layer of latent attention, a sequence in its pages, and its keys `[1, 1, N, D]`."""
    options = {"k": 5, "sink": 0, "local_window": 0, "dense_below": 0, **options}
    geometry = Geometry.of(**LATENTS)
    paged = PagedAttention.of(Options(**options), geometry)
    memory, table, slots, keys, _ = scattered(tokens, length)
    keys = torch.cat([keys, keys.flip(-1), keys.roll(3, -1)], dim=-1)[:, :1]
    memory = memory[:, :1, :, :1].repeat(1, 1, 1, geometry.head_dim)
    records = torch.zeros(len(memory), 1, tokens // BLOCK, paged.layout.head_bytes).byte()
    pages.write_rows(memory, slots, keys, None)
    paged.encode(memory, records, slots)
    return paged, Sequence(memory, records, table, length), keys.transpose(0, 1)[None]


LATENTS = dict(q_heads=6, kv_heads=1, head_dim=24, value_dim=16, value_in_key=True)


@pytest.mark.parametrize("tokens", [256, 512])
def test_latents_are_searched_as_by_an_index_of_latents(tokens):
    paged, sequence, keys = latents_served(1100, tokens)
    asked = torch.randn(1, 6, 24, generator=torch.Generator().manual_seed(7))
    index = kvindex.create(paged.options.index, **LATENTS, backend="torch")
    index.append(keys[:, :, : 4 * BLOCK], keys[:, :, : 4 * BLOCK, :16])
    mine, theirs = paged.hits(asked, sequence, 4 * BLOCK), index.search(asked, k=5)
    assert torch.equal(mine.ids, theirs.ids)
    assert torch.equal(mine.log_weight, theirs.log_weight)
    few = paged.attend(asked, sequence)
    every = latents_served(1100, tokens, k=2048)[0].attend(asked, sequence)
    expected = attend(asked, keys, keys[..., :16], scale=paged.geometry.scale)
    torch.testing.assert_close(every, expected)
    assert (few - expected).abs().max() > 0.01


@pytest.mark.parametrize("count", [1, 2, 300, 1100])
def test_chunks_attend_to_latents_exactly(count):
    paged, sequence, keys = latents_served(1100, k=1)
    asked = torch.randn(count, 6, 24, generator=torch.Generator().manual_seed(7))
    found = paged.attend(asked, sequence, prompt=True)
    assert found.shape == (count, 6, 16)
    for place in {0, count // 2, count - 1}:
        seen = keys[:, :, : 1100 - count + place + 1]
        expected = attend(asked[place, None], seen, seen[..., :16], scale=paged.geometry.scale)
        torch.testing.assert_close(found[place, None], expected)


def test_a_batch_is_its_sequences_one_after_another():
    paged, sequence, *_ = served(1100)
    short = Sequence(sequence.rows, sequence.records, sequence.table, 300)
    several = PagedAttention.of(paged.options, paged.geometry, drafted=3)
    asked, output = queries(9), torch.full((9, H, D), torch.nan)
    batch, starts = [sequence, short, short, sequence], [0, 1, 1, 3, 5]
    several.attend_batch(asked, output, batch, starts, prompts=[False, False, True, False])
    expected = [
        several.attend(asked[0:1], sequence),
        several.attend(asked[1:3], short, prompt=True),
        several.attend(asked[3:5], sequence),
    ]
    assert torch.equal(output[:5], torch.cat(expected))
    assert output[5:].isnan().all()  # padding
    drafts = several.attend(asked[1:3], short)
    several.attend_batch(asked, output, batch, starts, prompts=[])
    assert torch.equal(output[1:3], drafts)
    assert not torch.equal(drafts, expected[1])
