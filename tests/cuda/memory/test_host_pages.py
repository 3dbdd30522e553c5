"""Decode steps over an inference engine's pages whose rows are on the host, behind a cache indexed
by slots.
"""

import pytest
import torch

from kvindex.core.geometry import Geometry
from kvindex_adapters.vllm import pages as plain
from kvindex_adapters.vllm.attention import Sequence
from kvindex_adapters.vllm.options import Options
from kvindex_cuda.memory.budget import Budget
from kvindex_cuda.memory.host_blocks import HostBlocks
from kvindex_cuda.memory.host_pages import HostPages
from kvindex_cuda.memory.layout import BLOCK
from kvindex_cuda.memory.page_rows import gather_pages, write_pages
from kvindex_cuda.memory.pages import Pages
from kvindex_cuda.memory.row_cache import RowCache
from kvindex_cuda.memory.slab_pool import DeviceAllocator, DeviceSlab
from kvindex_cuda.pariskv.steps.host_rows import HostRows
from kvindex_cuda.pariskv.steps.paged import PagedSteps
from tests.cuda.devices import on, on_devices, on_devices_slowly
from tests.cuda.pariskv.steps.test_paged import (
    FP8,
    LAYERS,
    LENGTHS,
    PAGES,
    D,
    Engine,
    G,
    H,
    assert_close,
)
from tests.support.helpers import mostly_slow, slow

SCALES = [None, FP8]
"""Scales of rows in the model's dtype, and of rows in FP8."""


class WritingEngine(Engine):
    """An engine whose pages of rows are on the device. Tokens are written by the kernel."""

    def write(self, sequence, start, stop):
        places = torch.arange(start, stop, device=self.device)
        table = self.tables[sequence].long()
        slots = table[places // self.tokens] * self.tokens + places % self.tokens
        for layer in range(LAYERS):
            # with gaps between rows, as the result of a matrix product has
            rows = self.normal(stop - start, G, 3 * D)
            keys, values = rows[..., :D], rows[..., 2 * D :]
            with on(self.device):
                self.write_layer(layer, keys, values, slots)
        return slots

    def write_layer(self, layer, keys, values, slots):
        write_pages(self.pages, layer, keys, values, slots)


class HostEngine(WritingEngine):
    """An engine whose pages of rows are on the host. Tokens are written by the kernel."""

    def __init__(self, device, *, cached=4096, longest=1280, scales=None, **options):
        super().__init__(device, scales=scales, **options)
        fp8, sizes = scales is not None, dict(tokens=longest, page_tokens=self.tokens)
        self.host = HostRows(self.geometry, cached=cached, fp8=fp8, **sizes)
        for layer in range(LAYERS):
            assert self.host.add_layer() == layer
        for cache in self.host.caches:  # so that a test notices a row that was not written
            cache.data.fill_(0xFF)
        o = self.options
        self.steps = self.host.open(
            o.config,
            self.codes,
            scales=self.pages.scales,
            limits=self.limits,
            k=o.most_rows,
            sink=o.sink,
            local_window=o.local_window,
            dense_below=o.dense_below,
            most_rows=len(LENGTHS),
            new_tokens=2048,
        )
        self.caches, self.pages = self.host.caches, self.host.pages
        self.rows = self.pages.rows
        self.unused = 0x7F if fp8 else torch.nan  # in FP8, torch converts it to NaN
        for rows in self.rows:
            rows.fill_(self.unused)

    def write_layer(self, layer, keys, values, slots):
        self.host.write(layer, keys, values, slots)

    def expected(self, layer, queries, lengths, whole=()):
        if self.device == "cuda":
            torch.cuda.synchronize()
        found = torch.zeros_like(queries)
        records = self.codes[layer][..., : self.paged.layout.head_bytes]
        rows = self.rows[layer].to(self.device)
        for b, length in enumerate(lengths):
            if length:
                sequence = Sequence(rows, records, self.tables[b], length, self.scales[layer])
                full = b < len(whole) and whole[b]
                paged = self.layers[layer]
                found[b] = paged.attend(queries[b, None], sequence, self.sinks, prompt=full)[0]
        return found


@on_devices_slowly
@pytest.mark.parametrize("scales", SCALES)
@pytest.mark.parametrize("tokens", [pytest.param(256, marks=pytest.mark.slow), 512])
def test_as_many_rows_as_there_are_give_full_attention(tokens, scales, device):
    engine = HostEngine(device, tokens=tokens, scales=scales)
    engine.prefill()
    assert_close(engine.decode())
    whole = HostEngine(device, tokens=tokens, scales=scales, dense_below=4096)
    whole.prefill()
    assert_close(whole.decode())


@on_devices
@pytest.mark.parametrize(
    ("index", "cached", "scales", "dtype"),
    [
        ("pariskv:preset=fast", 4, None, torch.float32),
        ("pariskv:preset=fast", 4, FP8, torch.float32),
        slow("pariskv:sign_decoder=mean", 4096, None, torch.float32),
        slow("pariskv:preset=fast", 4096, None, torch.float32),
        slow("pariskv:sign_decoder=mean", 4, None, torch.float32),
        slow("pariskv:sign_decoder=mean", 64, FP8, torch.float32),
        slow("pariskv:preset=fast", 64, FP8, torch.bfloat16),
    ],
)
def test_few_rows_are_those_of_plain_torch_for_tokens_in_a_row(
    index, cached, scales, dtype, device
):
    close = dict(rtol=1e-4, atol=1e-5) if dtype == torch.float32 else dict(rtol=0.02, atol=0.02)
    engine = HostEngine(device, index=index, k=6, cached=cached, scales=scales, dtype=dtype)
    engine.prefill()
    for step in range(3):
        lengths = tuple(length + step if length else 0 for length in LENGTHS)
        assert_close(engine.decode(lengths), **close)


@on_devices
@pytest.mark.parametrize("scales", SCALES)
def test_results_are_those_of_rows_on_the_device_to_the_bit(scales, device):
    """Both engines get the same tokens, and the kernel writes the same bytes."""
    host = HostEngine(device, k=6, cached=64, scales=scales)
    other = WritingEngine(device, k=6, scales=scales)
    assert torch.equal(host.tables, other.tables)
    for engine in (host, other):
        engine.prefill()
    for step in range(2):
        lengths = tuple(length + step if length else 0 for length in LENGTHS)
        pairs = zip(host.decode(lengths), other.decode(lengths), strict=True)
        assert all(torch.equal(found, expected) for (found, _), (expected, _) in pairs)
    for engine in (host, other):
        engine.begin(torch.tensor([-1], device=device), rows=0)
    size = 1 if scales else 4
    assert host.host.nbytes()["host"] == LAYERS * PAGES * G * BLOCK * 2 * D * size
    assert ("pinned (FP8)" in host.host.explain()) is (size == 1)
    used = host.tables.unique().long().cpu()
    for layer in range(LAYERS):
        assert torch.equal(host.codes[layer], other.codes[layer])
        old, rows = other.rows[layer].cpu()[used], host.rows[layer].cpu()[used]
        fill = rows != host.unused if scales else ~rows.isnan()
        assert fill.any()
        assert torch.equal(rows[fill], old[fill])


@on_devices
@pytest.mark.parametrize("scales", SCALES)
def test_rows_that_were_read_are_read_from_the_cache(scales, device):
    # no set of the cache is full
    engine = HostEngine(device, k=6, dense_below=4096, cached=2**16, scales=scales)
    engine.prefill()
    assert_close(engine.decode())
    for cache in engine.caches:
        assert cache.use()[1] == 0
        cache.counts.zero_()
    for rows in engine.rows:  # nobody reads them any more
        rows.fill_(engine.unused)
    lengths = tuple(length + 1 if length else 0 for length in LENGTHS)
    found = [output for output, _ in engine.decode(lengths)]
    looked_up, hits = engine.caches[0].use()
    assert hits == looked_up - G * sum(length > 0 for length in LENGTHS)  # except for the new ones
    # the kernels convert 0x7F in FP8 to 480, and values of rows are small
    assert not any(output.isnan().any() or (output.abs() > 100).any() for output in found)


@on_devices_slowly
def test_a_slot_that_is_written_again_is_forgotten(device):
    engine = HostEngine(device, k=6)
    engine.prefill()
    assert_close(engine.decode())
    engine.prefill()  # other sequences' tokens, in the same pages
    assert_close(engine.decode())


@on_devices_slowly
@pytest.mark.parametrize(
    "order",
    ["random", *(pytest.param(one, marks=pytest.mark.slow) for one in ("forward", "backward"))],
)
@pytest.mark.parametrize("scales", SCALES)
def test_sequences_that_share_pages_share_rows(order, scales, device):
    engine = HostEngine(device, k=6, cached=64, scales=scales)
    engine.prefill()
    list(engine.decode())
    engine.tables[1, :2] = engine.tables[0, :2]  # 512 of its 700 tokens
    for _ in range(3):
        lengths = torch.tensor(LENGTHS, dtype=torch.int32, device=device)
        nowhere = torch.full((len(LENGTHS),), -1, device=device)
        with on(device, order=order):
            engine.steps.begin(engine.tables, lengths, nowhere, rows=len(LENGTHS))
            for layer in range(LAYERS):
                queries = engine.normal(len(LENGTHS), H, D)
                output = torch.full_like(queries, torch.nan)
                engine.steps.attend(layer, queries, output)
                assert_close([(output, engine.expected(layer, queries, LENGTHS))])


@on_devices_slowly
@pytest.mark.parametrize("order", mostly_slow(["forward", "random"], "random"))
def test_nobody_reads_a_row_that_another_sequence_brings_in_the_same_step(order, device):
    """Three sequences share a text and more.

    A team that finds the tag of a row cannot know whether the row has arrived.
    """
    engine = HostEngine(device, k=6, cached=2**16)
    engine.prefill()
    list(engine.decode())  # this step encodes
    longest = max(range(len(LENGTHS)), key=LENGTHS.__getitem__)
    engine.tables[:] = engine.tables[longest].clone()
    lengths = (LENGTHS[longest],) * len(LENGTHS)
    for cache in engine.caches:
        cache.forget()
        cache.counts.zero_()
    for step in range(2):
        nowhere = torch.full((len(lengths),), -1, device=device)
        with on(device, order=order):
            given = torch.tensor(lengths, dtype=torch.int32, device=device)
            engine.steps.begin(engine.tables, given, nowhere, rows=len(lengths))
            queries = engine.normal(1, H, D).repeat(len(lengths), 1, 1)
            output = torch.full_like(queries, torch.nan)
            engine.steps.attend(0, queries, output)
        assert_close([(output, engine.expected(0, queries, lengths))])
        looked_up, hits = engine.caches[0].use()
        if not step:
            assert hits == 0
    assert hits > looked_up / 3  # the next step asks for some of these rows again


@pytest.mark.parametrize(("fp8", "shown"), [(False, 3.37), (True, 2.84)])
def test_a_sequence_of_128k_tokens_takes_a_fifth_of_the_devices_memory(fp8, shown):
    """The memory of 8 KV heads of 128 numbers of 16 bits or in FP8: codes, cached rows, and a copy
    of a layer's rows for prompts, in GB as docs/adapters/vllm.md shows it.
    """
    options = Options(index="pariskv:preset=fast", rows="host")
    nowhere = torch.device("meta")
    shape = dict(q_heads=32, kv_heads=8, head_dim=128, dtype=torch.bfloat16, device=nowhere)
    tokens, layers, geometry = 131_072, 32, Geometry.of(**shape)
    sizes = dict(tokens=tokens, page_tokens=256, cached=options.cached_rows)
    rows = HostRows(geometry, fp8=fp8, **sizes)
    for _ in range(layers):
        rows.add_layer()
    own = layers * tokens * 8 * 2 * 128 * 2
    codes = layers * tokens // 256 * 8 * options.layout(128).head_bytes
    found = codes + rows.nbytes()["device"]
    assert found < 0.2 * own
    tables = 2 * layers * tokens  # bytes with which vLLM passes a block table to the layers
    assert (found + tables) / 1e9 == pytest.approx(shown, abs=0.005)


def rounded(numbers, scale):
    """Round numbers as vLLM rounds keys and values to FP8 on a GPU. The result is uint8."""
    inside = (numbers.float() / scale).clamp(-448, 448)
    return inside.to(torch.float8_e4m3fn).view(torch.uint8)


@on_devices
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_every_number_is_rounded_to_the_nearest_one_in_fp8(dtype, device):
    """The head dimension is 24, so that a row is not a multiple of 16 bytes in each half."""
    dim, tokens = 24, 2816
    bits = torch.arange(2 * tokens * dim).to(torch.int16)[: tokens * dim].view(-1, 1, dim)
    keys = bits.view(torch.float16 if dtype == torch.float16 else torch.bfloat16).to(dtype)
    keys = torch.where(keys.isnan(), 1.0, keys).to(device)
    keys = keys * 1.001 if dtype == torch.float32 else keys  # numbers between those of 16 bits
    values, slots = keys.flip(0), torch.arange(tokens, device=device)
    for scale in (1.0, 0.37):
        given = [torch.tensor([one], device=device) for one in (scale, 2.5)]
        rows = torch.zeros(tokens // BLOCK, 1, BLOCK, 2 * dim, dtype=torch.uint8, device=device)
        codes = torch.zeros(len(rows), 1, 1, 256, dtype=torch.uint8, device=device)
        pages = Pages([codes], [rows], scales=[tuple(given)])
        copy = torch.zeros_like(rows)[None]
        table = torch.arange(len(rows), dtype=torch.int32, device=device)[None]
        with on(device):
            write_pages(pages, 0, keys, values, slots)
            gather_pages(
                pages,
                0,
                copy,
                tables=table,
                lengths=torch.tensor([tokens], dtype=torch.int32, device=device),
                starts=torch.tensor([0, 300], dtype=torch.int32, device=device),
                keys=keys[-300:].clone(),
                values=values[-300:].clone(),
            )
        expected = torch.cat([rounded(keys, scale), rounded(values, 2.5)], dim=-1)
        assert torch.equal(rows.flatten(0, 2), expected[:, 0])
        assert torch.equal(copy.flatten(0, 3), expected[:, 0])
        rows.zero_()
        with on(device):
            write_pages(pages, 0, keys[:1] * torch.nan, values[:1], slots[:1])
        assert (rows[0, 0, 0, :dim] == 0x7F).all()


@on_devices
def test_a_slot_of_no_page_is_written_nowhere(device):
    engine = HostEngine(device)
    keys = torch.ones(3, G, D, dtype=engine.geometry.dtype, device=device)
    slots = torch.tensor([-1, PAGES * 256, 5], device=device)
    with on(device):
        engine.host.write(0, keys, 2 * keys, slots)
    if device == "cuda":
        torch.cuda.synchronize()
    rows = engine.rows[0]
    assert (rows[0, :, 5] == torch.tensor([1.0, 2.0]).repeat_interleave(D)).all()
    assert int((~rows.isnan()).sum()) == G * 2 * D


@on_devices
@pytest.mark.parametrize("scales", SCALES)
@pytest.mark.parametrize("tokens", [256, 512])
def test_sequences_are_gathered_up_to_their_last_tokens(tokens, scales, device):
    engine = HostEngine(device, tokens=tokens, longest=6144, scales=scales)
    lengths, new = (1100, 300, 5, 0), (600, 1, 5, 0)
    for b, length in enumerate(lengths):
        engine.write(b, 0, length)
    if device == "cuda":
        torch.cuda.synchronize()
    starts = torch.tensor([0, *new]).cumsum(0).int()
    keys, values = (engine.normal(int(starts[-1]), G, D) for _ in range(2))
    width = -(-max(lengths) // tokens)
    engine.host.scratch.fill_(9)
    with on(device):
        copy = engine.host.gather(
            1,
            tables=engine.tables[:4, :width],
            lengths=torch.tensor(lengths, dtype=torch.int32, device=device),
            starts=starts.to(device),
            keys=keys,
            values=values,
        )
    assert engine.host.table(4, width).tolist() == torch.arange(4 * width).view(4, width).tolist()
    copy = copy[: 4 * width].unflatten(0, (4, width))
    for b, (length, count) in enumerate(zip(lengths, new, strict=True)):
        rows = copy[b].transpose(0, 1).flatten(1, 2)  # G, width * tokens
        assert (rows[:, length:] == 9).all()
        old = plain.read_rows(engine.rows[1], engine.tables[b].cpu(), 0, length)
        old = torch.cat([old.keys, old.values], dim=-1)[0].to(device)
        assert torch.equal(rows[:, : length - count], old[:, : length - count])
        here = slice(int(starts[b]), int(starts[b + 1]))
        fresh = torch.cat([keys[here], values[here]], dim=-1).transpose(0, 1)
        if scales:
            own = [rounded(part[here], by) for part, by in zip((keys, values), FP8[1], strict=True)]
            fresh = torch.cat(own, dim=-1).transpose(0, 1)
        assert torch.equal(rows[:, length - count : length], fresh)


def test_more_than_may_be_pinned_is_refused_with_numbers():
    geometry = Geometry.of(q_heads=4, kv_heads=2, head_dim=8)
    budget = Budget(100_000)
    options = dict(layers=2, tokens=256, budget=budget, allocator=None)
    with pytest.raises(
        MemoryError, match=r"got 2 pages of 256 tokens for each of 2 layers.*1 pages"
    ):
        HostPages(geometry, pages=2, **options)
    assert budget.used_bytes == 0
    pages = HostPages(geometry, pages=1, **options)
    assert budget.used_bytes == pages.nbytes == 2 * 2 * 256 * 16 * 4
    pages.close()
    assert budget.used_bytes == 0


def test_what_fails_to_be_pinned_leaves_nothing():
    class Fails(DeviceAllocator):
        calls = 0

        def allocate(self, nbytes):
            Fails.calls += 1
            if Fails.calls == 2:
                raise MemoryError("none left")
            return super().allocate(nbytes)

    geometry, budget = Geometry.of(q_heads=4, kv_heads=2, head_dim=8), Budget(10**9)
    with pytest.raises(MemoryError, match="none left"):
        HostPages(
            geometry, layers=2, pages=2, tokens=256, budget=budget, allocator=Fails(geometry.device)
        )
    assert budget.used_bytes == 0


def test_freeing_goes_on_after_an_interruption():
    class Slow(DeviceSlab):
        left = 2

        def settle(self):
            Slow.left -= 1
            if not Slow.left:
                raise KeyboardInterrupt

    class Allocates(DeviceAllocator):
        def allocate(self, nbytes):
            return Slow(super().allocate(nbytes).memory)

    budget, device = Budget(10**6), torch.device("cpu")
    options = dict(block_bytes=100, allocator=Allocates(device), budget=budget)
    blocks = HostBlocks(device, count=4, **options)
    for _ in range(4):
        blocks.add()
    with pytest.raises(KeyboardInterrupt):
        blocks.close()
    assert budget.used_bytes == 400
    blocks.close()
    assert budget.used_bytes == 0
    blocks.close()
    assert budget.used_bytes == 0
    with pytest.raises(MemoryError):
        HostBlocks(device, count=10**6, **options)
    assert budget.used_bytes == 0


def test_caches_that_do_not_fit_are_refused():
    engine = HostEngine("cpu")
    o, one = engine.options, engine.caches[0]
    clock = one.clocks
    other = RowCache(G, 2 * D * 4, torch.device("cpu"), 4)
    narrow = RowCache(G, 16, torch.device("cpu"), 4, clock=clock)
    for caches in ([one], [one, other], [narrow, narrow]):
        with pytest.raises(ValueError, match="caches: got"):
            PagedSteps(
                engine.geometry,
                o.config,
                engine.pages,
                k=6,
                sink=4,
                local_window=20,
                dense_below=400,
                most_rows=2,
                tokens=1280,
                new_tokens=64,
                caches=caches,
            )


def test_what_does_not_fit_is_refused_before_a_launch():
    engine = HostEngine("cpu")
    host, g = engine.host, engine.geometry
    keys, slots = torch.zeros(3, G, D), torch.zeros(3, dtype=torch.int64)
    for given, said in (
        ((keys.half(), keys, slots), "keys"),
        ((keys, keys[:, :1], slots), "values"),
        ((keys, keys, slots[:2]), "slots"),
        ((keys, keys, slots.int()), "slots"),
        ((torch.zeros(3, G, 2 * D)[..., ::2], keys, slots), "keys: got .* strides"),
    ):
        with pytest.raises((ValueError, TypeError), match=said):
            host.write(0, *given)
    counts = dict(lengths=torch.ones(2).int(), starts=torch.arange(3).int(), keys=keys, values=keys)
    with pytest.raises(
        ValueError, match="got 2 sequences of 9 pages, but the buffer `scratch` has room for 5"
    ):
        host.gather(0, tables=torch.zeros(2, 9).int(), **counts)
    with pytest.raises(ValueError, match="geometry: got "):
        host.check_layer(Geometry.of(q_heads=H, kv_heads=G, head_dim=2 * D))
    with pytest.raises(ValueError, match="FP8: got True, but all layers must have False"):
        host.check_layer(g, fp8=True)
    host.check_layer(g)
    scale = torch.ones(())
    rows = torch.zeros(1, G, 256, 2 * D, dtype=torch.uint8)
    codes = torch.zeros(1, G, 1, 2560, dtype=torch.uint8)
    with pytest.raises(
        ValueError, match="scales: got those of 1 layers, allowed are those of all 2"
    ):
        Pages([codes, codes.clone()], [rows, rows.clone()], scales=[(scale, scale)])
    with pytest.raises(ValueError, match="codes: got 1 layers, but add_layer added 2"):
        host.open(engine.options.config, engine.codes[:1])
    assert host.opened
    assert host.nbytes()["host"] == LAYERS * PAGES * G * 256 * 2 * D * 4
    assert "16 pages" in host.explain()
    host.close()
    assert host.nbytes()["host"] == 0
    with pytest.raises(RuntimeError, match="rows on the host: no pages are allocated"):
        host.write(0, keys, keys, slots)
