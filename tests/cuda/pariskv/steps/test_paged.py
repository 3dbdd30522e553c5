"""Decode steps over an inference engine's pages, compared with attention over the same pages in
plain torch.
"""

from typing import ClassVar

import pytest
import torch

from kvindex.core.geometry import Geometry
from kvindex_adapters.vllm import pages
from kvindex_adapters.vllm.attention import PagedAttention, Sequence
from kvindex_adapters.vllm.fp8 import Scales
from kvindex_adapters.vllm.options import Options
from kvindex_cuda.memory.layout import BLOCK
from kvindex_cuda.memory.pages import Pages
from kvindex_cuda.pariskv.steps.page_limits import PageLimits
from kvindex_cuda.pariskv.steps.paged import PagedSteps, unserved
from tests.cuda.devices import on, on_devices, on_devices_slowly
from tests.support.helpers import mostly_slow, slow

H, G, D, LAYERS, PAGES = 4, 2, 16, 2, 16

LENGTHS = 1100, 700, 300, 1024, 1, 0
"""Lengths of sequences; the last one is an unused place in the batch."""


class Engine:
    """The caches of an engine, filled with old data, and sequences that get new tokens."""

    sinks = None
    """Logits of learned sinks, float32 `[H]`, or None."""

    sizes: ClassVar = {}
    """Arguments of `Geometry.of` other than `H`, `G` and `D`."""

    def __init__(
        self, device, *, tokens=BLOCK, order="HND", dtype=torch.float32, scales=None, **options
    ):
        """`scales`: scales of keys and values in FP8, a pair of numbers for each layer."""
        given = {"index": "pariskv:preset=fast", "k": 4096, "sink": 4, "local_window": 20}
        self.options = Options(**{**given, "dense_below": 400, **options})
        sizes = dict(q_heads=H, kv_heads=G, head_dim=D) | self.sizes
        self.geometry = Geometry.of(**sizes, dtype=dtype, device=torch.device(device))
        g = self.geometry
        width = g.head_dim if g.value_in_key else 2 * g.head_dim  # numbers of a row
        self.paged = PagedAttention.of(self.options, self.geometry)
        self.tokens, self.device, self.generator = tokens, device, torch.Generator().manual_seed(0)
        self.scales, kept, fill = [None] * LAYERS, dtype, 7
        places = None
        if scales is not None:
            self.scales, kept = [Scales(*pair, dtype) for pair in scales], torch.uint8
            fill = 0x7E  # 448, the largest number
            places = [
                tuple(torch.tensor([scale], device=device) for scale in pair) for pair in scales
            ]
        # a page of records has whole bytes per token, as the vLLM plug-in's cache has
        record = -(-self.paged.layout.head_bytes // BLOCK) * BLOCK
        shape = PAGES, g.kv_heads, tokens // BLOCK, record
        self.codes = [self.filled(shape, 0xA5, torch.uint8) for _ in range(LAYERS)]
        if order == "HND":
            shape = PAGES, g.kv_heads, tokens, width
            rows = [self.filled(shape, fill, kept) for _ in range(LAYERS)]
        elif order == "packed":  # the records of a head are behind its rows, in the same page
            size = tokens * width * kept.itemsize
            shape = PAGES, g.kv_heads, size + tokens // BLOCK * record
            memory = [self.filled(shape, 0xA5, torch.uint8) for _ in range(LAYERS)]
            parts = [page[..., :size].view(kept) for page in memory]
            rows = [part.view(PAGES, g.kv_heads, tokens, width).fill_(fill) for part in parts]
            shape = PAGES, g.kv_heads, tokens // BLOCK, record
            self.codes = [page[..., size:].view(shape) for page in memory]
        else:
            shape = PAGES, tokens, g.kv_heads, width
            rows = [self.filled(shape, fill, kept) for _ in range(LAYERS)]
            rows = [part.transpose(1, 2) for part in rows]
        self.rows = rows
        blocks = -(-max(LENGTHS) // tokens)
        free = (torch.randperm(PAGES - 1, generator=self.generator) + 1).tolist()
        self.tables = torch.zeros(len(LENGTHS), blocks, dtype=torch.int32, device=device)
        for b, length in enumerate(LENGTHS):
            for i in range(-(-length // tokens)):
                self.tables[b, i] = free.pop()
        self.pages = Pages(self.codes, self.rows, scales=places)
        self.layers, self.limits = [self.paged] * LAYERS, None
        if self.options.allowed_error is not None:
            self.layers = [PagedAttention.of(self.options, self.geometry) for _ in range(LAYERS)]
            self.limits = PageLimits(
                self.geometry,
                layers=LAYERS,
                error=self.options.allowed_error,
                dense_below=self.paged.limit.dense_below,
                most_rows=len(LENGTHS),
            )
        self.steps = PagedSteps(
            self.geometry,
            self.options.config,
            self.pages,
            limits=self.limits,
            k=self.options.most_rows,
            sink=self.options.sink,
            local_window=self.options.local_window,
            dense_below=self.paged.limit.dense_below,
            most_rows=len(LENGTHS),
            tokens=1280,
            new_tokens=2048,
        )

    def filled(self, shape, value, dtype):
        return torch.full(shape, value, dtype=dtype, device=self.device)

    def write(self, sequence, start, stop):
        """Write new tokens of a sequence in all layers, and return their slots."""
        places = torch.arange(start, stop, device=self.device)
        table = self.tables[sequence].long()
        slots = table[places // self.tokens] * self.tokens + places % self.tokens
        for rows, scales in zip(self.rows, self.scales, strict=True):
            shape = stop - start, self.geometry.kv_heads, self.geometry.head_dim
            keys = self.normal(*shape)
            values = None if self.geometry.value_in_key else self.normal(*shape)
            pages.write_rows(rows, slots, keys, values, scales)
        return slots

    def normal(self, *shape):
        made = torch.randn(*shape, generator=self.generator)
        return made.to(self.geometry.dtype).to(self.device)

    def prefill(self):
        """Write all but the last token of each sequence, in two chunks."""
        for chunk in range(2):
            slots = []
            for b, length in enumerate(LENGTHS):
                bounds = 0, length // 3, max(length - 1, 0)
                slots.append(self.write(b, bounds[chunk], bounds[chunk + 1]))
            self.begin(torch.cat(slots), rows=0)

    def begin(self, slots, *, rows, lengths=LENGTHS, whole=None):
        lengths = torch.tensor(lengths, dtype=torch.int32, device=self.device)
        if whole is not None:
            whole = torch.tensor(whole, device=self.device)
        tables = self.tables[: max(len(lengths), 1)]
        with on(self.device):
            self.steps.begin(tables, lengths, slots, rows=rows, whole=whole)

    def decode(self, lengths=LENGTHS, whole=None):
        """Run a step for all sequences; return the outputs of the kernels and of torch for each
        layer. Sequences with a true entry in `whole` get full attention.
        """
        slots = [
            self.write(b, length - 1, length) if length else torch.tensor([-1], device=self.device)
            for b, length in enumerate(lengths)
        ]
        self.begin(torch.cat(slots), rows=len(lengths), lengths=lengths, whole=whole)
        for layer in range(LAYERS):
            queries = self.normal(len(lengths), self.geometry.q_heads, self.geometry.head_dim)
            output = self.output(queries, torch.nan)
            with on(self.device):
                self.steps.attend(layer, queries, output, sinks=self.sinks)
            yield output, self.expected(layer, queries, lengths, whole or ())

    def output(self, queries, value):
        return queries.new_full((*queries.shape[:2], self.geometry.value_dim), value)

    def expected(self, layer, queries, lengths, whole=()):
        """The reference reads the codes that the kernels wrote."""
        found = self.output(queries, 0)
        records = self.codes[layer][..., : self.paged.layout.head_bytes]
        for b, length in enumerate(lengths):
            if length:
                rows, scales = self.rows[layer], self.scales[layer]
                sequence = Sequence(rows, records, self.tables[b], length, scales)
                full = b < len(whole) and whole[b]
                paged = self.layers[layer]
                found[b] = paged.attend(queries[b, None], sequence, self.sinks, prompt=full)[0]
        return found


def assert_close(pairs, **bounds):
    for found, expected in pairs:
        torch.testing.assert_close(found, expected, **(bounds or dict(rtol=1e-4, atol=1e-5)))


@on_devices_slowly
@pytest.mark.parametrize(
    ("tokens", "order"),
    mostly_slow([(256, "HND"), (512, "NHD"), (512, "packed")], (512, "NHD")),
)
def test_as_many_rows_as_there_are_give_full_attention(tokens, order, device):
    engine = Engine(device, tokens=tokens, order=order, index="pariskv:preset=fast")
    engine.prefill()
    assert_close(engine.decode())
    whole = Engine(device, tokens=tokens, order=order, dense_below=4096)
    whole.prefill()
    assert_close(whole.decode())


@on_devices
def test_learned_sinks_and_codes_in_the_pages_of_rows(device):
    engine = Engine(device, tokens=512, order="packed", k=6)
    engine.prefill()
    plain = [found for found, _ in engine.decode()]
    engine = Engine(device, tokens=512, order="packed", k=6)
    engine.sinks = torch.tensor([3.0, -1.0, 0.5, 6.0], device=device)
    engine.prefill()
    pairs = list(engine.decode())
    assert_close(pairs)
    assert all(
        (found - old).abs().max() > 0.1 for (found, _), old in zip(pairs, plain, strict=True)
    )
    assert not pairs[0][0][-1].any()  # an unused place


@on_devices
@pytest.mark.parametrize(
    "spec", mostly_slow(["pariskv:preset=fast", "pariskv:preset=precise"], "pariskv:preset=fast")
)
def test_few_rows_are_those_of_plain_torch(spec, device):
    engine = Engine(device, index=spec, k=6)
    engine.prefill()
    assert_close(engine.decode())


@on_devices
def test_some_sequences_of_a_batch_get_full_attention(device):
    """They are as long as others that search."""
    engine = Engine(device, k=6)
    engine.prefill()
    whole = [False, True, True, True, False, False]
    pairs = list(engine.decode(whole=whole))
    assert_close(pairs)
    queries = engine.normal(len(LENGTHS), H, D)
    searched, full = (engine.expected(0, queries, LENGTHS, some) for some in ((), whole))
    differs = (searched - full).abs().amax(dim=(1, 2)) > 0.01
    assert differs.tolist() == [False, True, False, True, False, False]
    assert_close(engine.decode())  # the next step searches again


@on_devices
def test_rows_that_are_drawn(device):
    engine = Engine(device, index="pariskv:sign_decoder=mean", k=6)
    engine.prefill()
    assert_close(engine.decode())


@on_devices_slowly
def test_a_block_that_fills_is_searched_once_the_window_has_passed_it(device):
    engine = Engine(device, sink=0, local_window=1, dense_below=0, k=4)
    engine.prefill()
    for step in range(3):  # 1,024 tokens are full blocks, and the next step searches them
        lengths = tuple(length + step if length else 0 for length in LENGTHS)
        if -(-lengths[3] // BLOCK) > engine.tables.shape[1]:
            continue
        engine.tables[3, 4] = 0 if step == 0 else 15
        assert_close(engine.decode(lengths))


@on_devices_slowly
@pytest.mark.parametrize("index", ["pariskv:preset=fast", slow("pariskv:sign_decoder=mean")])
def test_batches_of_all_sizes_take_turns_in_the_same_buffers(index, device):
    engine = Engine(device, index=index, k=6)
    engine.prefill()
    for count in (4, 2, 6, 1, 4):
        assert_close(engine.decode(LENGTHS[:count]))


@on_devices
def test_memory_of_batches_that_grow_by_one_does_not_add_up(device):
    engine = Engine(device, index="pariskv:preset=fast", k=6)
    nowhere = torch.tensor([-1], device=device)
    for count in (1, 2, 3, 4, 5, 6, 3):
        engine.begin(nowhere, rows=count, lengths=[0] * count)
    lists = [step.list.untyped_storage() for step, _ in engine.steps._steps.values()]
    taken = {one.data_ptr(): one.nbytes() for one in lists}
    single = min(taken.values())
    assert sorted(size // single for size in taken.values()) == [1, 2, 4, 6]


@on_devices
@pytest.mark.parametrize("tokens", mostly_slow([256, 512], 512))
def test_full_blocks_have_the_codes_of_their_keys_and_others_none(tokens, device):
    engine = Engine(device, tokens=tokens, index="pariskv:preset=fast")
    engine.prefill()
    list(engine.decode())
    engine.begin(torch.tensor([-1], device=device), rows=0)
    for rows, codes in zip(engine.rows, engine.codes, strict=True):
        written = 0
        for b, length in enumerate(LENGTHS):
            full = length // BLOCK * BLOCK
            written += full // BLOCK
            if not full:
                continue
            records = codes[..., : engine.paged.layout.head_bytes]
            sequence = Sequence(rows, records, engine.tables[b], full)
            found = engine.paged.codes(sequence, full)
            keys = pages.read_rows(rows, sequence.table, 0, full).keys
            alone = dict(engine.paged.encoding.encode(keys, None))
            for name in ("signs", "magnitudes", "weights"):  # sums of a center are rounded
                assert (found[name] == alone[name]).float().mean() > 0.99
            close = dict(rtol=0.01, atol=1e-3)
            torch.testing.assert_close(found["centers"].float(), alone["centers"].float(), **close)
        parts = codes.transpose(1, 2).flatten(0, 1)
        assert int((parts != 0xA5).flatten(1).any(1).sum()) == written


FP8 = [(0.5, 0.37), (1.0, 1.0)]


@on_devices
@pytest.mark.parametrize("dtype", mostly_slow([torch.float32, torch.bfloat16], torch.float32))
@pytest.mark.parametrize("order", mostly_slow(["HND", "NHD", "packed"], "packed"))
def test_rows_in_fp8(order, dtype, device):
    """Both the codes and the attention are those of converted rows."""
    bounds = dict(rtol=1e-4, atol=1e-5) if dtype == torch.float32 else dict(rtol=0.02, atol=0.02)
    few = Engine(device, tokens=512, order=order, dtype=dtype, scales=FP8, k=6)
    few.prefill()
    assert_close(few.decode(), **bounds)
    every = Engine(device, tokens=512, order=order, dtype=dtype, scales=FP8)
    every.prefill()
    assert_close(every.decode(), **bounds)
    few.begin(torch.tensor([-1], device=device), rows=0)
    assert_codes(few)


def assert_codes(engine):
    """Check that full blocks have the codes of their converted keys."""
    parts = zip(engine.rows, engine.codes, engine.scales, strict=True)
    for rows, codes, scales in parts:
        for b, length in enumerate(LENGTHS):
            if not (full := length // BLOCK * BLOCK):
                continue
            records = codes[..., : engine.paged.layout.head_bytes]
            sequence = Sequence(rows, records, engine.tables[b], full, scales)
            found = engine.paged.codes(sequence, full)
            keys = sequence.read(0, full, engine.geometry).keys
            alone = dict(engine.paged.encoding.encode(keys, None))
            for name in ("signs", "magnitudes", "weights"):  # sums of a center are rounded
                assert (found[name] == alone[name]).float().mean() > 0.99
            close = dict(rtol=0.01, atol=1e-3)
            torch.testing.assert_close(found["centers"].float(), alone["centers"].float(), **close)


@on_devices
def test_scales_that_change_are_read_in_the_next_step(device):
    """Kernels read them from the device, as in a CUDA graph."""
    engine = Engine(device, scales=FP8, k=4096)
    engine.prefill()
    plain = [found.clone() for found, _ in engine.decode()]
    value = engine.steps._pages.scales[0][1]
    value *= 2
    engine.scales[0] = Scales(0.5, 0.74, torch.float32)
    pairs = list(engine.decode())
    assert_close(pairs)
    assert not torch.allclose(pairs[0][0], plain[0])


def test_scales_must_fit_the_rows():
    codes, rows = torch.zeros(2, 1, 1, 256, dtype=torch.uint8), torch.zeros(2, 1, 256, 32)
    scale = torch.ones(1)
    with pytest.raises(ValueError, match=r"scales: got scales for rows of torch\.float32"):
        Pages([codes], [rows], scales=[(scale, scale)])
    rows = rows.to(torch.uint8)
    with pytest.raises(ValueError, match=r"scales: got none for rows of torch\.uint8"):
        Pages([codes], [rows])
    with pytest.raises(ValueError, match=r"scales: got 2 numbers of torch\.float32 on cpu"):
        Pages([codes], [rows], scales=[(scale, torch.ones(2))])


def test_what_is_not_served_is_said():
    geometry = Geometry.of(q_heads=H, kv_heads=G, head_dim=D)
    assert unserved(Options().config, geometry) is None
    said = unserved(Options(index="pariskv").config, geometry)
    assert "sign_decoder: got 'regression', allowed is 'mean'" in said
    for preset in ("fast", "precise"):
        assert unserved(Options(index=f"pariskv:preset={preset}").config, geometry) is None
    said = unserved(Options(index="pariskv:preset=scan").config, geometry)
    assert "coarse: got 'none'" in said
    said = unserved(Options(index="pariskv:preset=paper").config, geometry)
    assert "coarse: got 'tiered_votes', allowed is 'sign_votes' (pariskv:preset=fast or" in said
    many = Geometry.of(q_heads=64, kv_heads=2, head_dim=D, value_in_key=False)
    assert "q_heads" in unserved(Options(index="pariskv:preset=fast").config, many)
