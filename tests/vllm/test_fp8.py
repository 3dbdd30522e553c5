"""Rows in FP8, in plain torch: how they are rounded, stored, read and encoded."""

import pytest
import torch

from kvindex.core.geometry import Geometry
from kvindex_adapters.vllm import pages
from kvindex_adapters.vllm.attention import PagedAttention, Sequence
from kvindex_adapters.vllm.fp8 import FP8, Scales, device_scales, query_scale, rounded
from kvindex_adapters.vllm.options import Options

G, D = 2, 32


def test_rounding_is_towards_zero():
    numbers = torch.tensor([1.0, 1.12, 1.125, -1.12, 1e9, -1e9, 2.0**-10, 0.0, 1.9 * 2.0**-9])
    found = rounded(numbers).view(FP8).float().tolist()
    assert found == [1.0, 1.0, 1.125, -1.0, 448.0, -448.0, 0.0, 0.0, 2.0**-9]


def test_rows_are_read_as_they_were_stored():
    scales = Scales(0.5, 2.0, torch.bfloat16)
    memory = torch.zeros(3, G, 512, 2 * D, dtype=torch.uint8)
    stored = torch.arange(127, dtype=torch.uint8).repeat(3 * G * D).view(127, -1)[:, : G * D]
    keys = stored.T.reshape(G, D, 127).permute(2, 0, 1).contiguous().view(FP8).float()
    slots = torch.arange(127) + 900
    pages.write_rows(memory, slots, 0.5 * keys, 2.0 * keys.flip(0), scales)
    table = torch.tensor([1])
    rows = pages.read_rows(memory, table, 388, 515 - 3, scales=scales)
    assert torch.equal(rows.keys[0], (0.5 * keys[:124]).bfloat16().transpose(0, 1))
    assert torch.equal(rows.values[0], (2.0 * keys.flip(0)[:124]).bfloat16().transpose(0, 1))
    ids = torch.tensor([[[388, 400], [390, 511]]])
    some = pages.gather_rows(memory, table, ids, scales=scales)
    assert torch.equal(some.keys[0, 1, 1], rows.keys[0, 1, 511 - 388])
    assert torch.equal(some.values[0, 0, 1], rows.values[0, 0, 12])
    segment = pages.segment_keys(memory, torch.tensor([3]), scales=scales)
    assert torch.equal(segment[0, :, 256 - 124 :], rows.keys[0])


def test_codes_are_those_of_stored_keys():
    scales = Scales(0.37, 1.0, torch.float32)
    geometry = Geometry.of(q_heads=4, kv_heads=G, head_dim=D, dtype=torch.float32)
    paged = PagedAttention.of(Options(), geometry)
    memory = torch.zeros(2, G, 256, 2 * D, dtype=torch.uint8)
    records = torch.zeros(2, G, 1, paged.layout.head_bytes, dtype=torch.uint8)
    keys, values = torch.randn(2, 256, G, D)
    for some in (slice(0, 100), slice(100, 256)):  # in chunks, into page 1
        slots = torch.arange(256)[some] + 256
        pages.write_rows(memory, slots, keys[some], values[some], scales)
        paged.encode(memory, records, slots, scales)
    sequence = Sequence(memory, records, torch.tensor([1]), 256, scales)
    stored = sequence.read(0, 256, geometry).keys
    assert not torch.equal(stored[0], keys.transpose(0, 1))
    alone, found = paged.encoding.encode(stored, None), paged.codes(sequence, 256)
    assert all(torch.equal(alone[name], found[name]) for name in found)


def test_scales_of_a_layer():
    layer = torch.nn.Module()
    layer.register_buffer("_k_scale", torch.tensor(0.5))
    layer.register_buffer("_v_scale", torch.tensor([2.0]))
    layer._k_scale_float, layer._v_scale_float = 0.5, 2.0
    assert Scales.of(layer, torch.float16) == Scales(0.5, 2.0, torch.float16)
    del layer._k_scale
    layer._k_scale = torch.nn.Parameter(torch.tensor([0.5]))  # as vLLM 0.26 loads it
    layer._q_scale = torch.nn.Parameter(torch.tensor([3.0]))
    assert Scales.of(layer, torch.float16) == Scales(0.5, 2.0, torch.float16)
    found = [*device_scales(layer), query_scale(layer)]
    assert [one.item() for one in found] == [0.5, 2.0, 3.0]
    assert not any(one.requires_grad for one in found)
    layer._v_scale = torch.ones(G)
    with pytest.raises(ValueError, match="v_scale: got 2 scales, allowed is one scale for all"):
        Scales.of(layer, torch.float16)
