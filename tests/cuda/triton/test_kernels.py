"""Each Triton kernel, compared with its reference.

On a CPU, Triton's interpreter runs it (`test_interpreter.py`).
"""

import pytest
import torch

from kvindex.pariskv.block_layout import BLOCK, words_of
from tests.support.helpers import sampled

# the imports below need Triton (E402)
triton = pytest.importorskip("triton")

import kvindex_cuda.triton as layers  # noqa: E402
from kvindex_cuda.triton import Matrix, Norm, Tile, reference  # noqa: E402
from kvindex_cuda.triton import products as products_of  # noqa: E402
from kvindex_cuda.triton.operands import OVERLAPS  # noqa: E402
from kvindex_cuda.triton.pages import Newest  # noqa: E402
from tests.cuda.triton import interpreter  # noqa: E402

INTERPRETED = triton.knobs.runtime.interpret
if INTERPRETED:
    interpreter.mend()
ON_A_CPU = [pytest.mark.skipif(not INTERPRETED, reason="test_interpreter.py runs it")]
RUNS = [pytest.param(("cpu", torch.float32, fp8), marks=ON_A_CPU) for fp8 in (False, True)]
RUNS += [
    pytest.param(("cuda", dtype, fp8), marks=pytest.mark.gpu)
    for dtype in (torch.float32, torch.float16, torch.bfloat16)
    for fp8 in (False, True)
]
PLAIN = [one for one in RUNS if not one.values[0][2]]
weightless = pytest.mark.parametrize("run", PLAIN, indirect=True, ids=str)
"""Parameters for kernels that read no weights; for the others, weights may be FP8."""
TILE = Tile(rows=16, columns=64)
BOUNDS = {torch.float32: 2e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}


@pytest.fixture(params=RUNS, ids=str)
def run(request):
    """Device, dtype, and True if weights are FP8."""
    torch.manual_seed(0)
    return request.param


def drawn(run, *shape):
    return torch.randn(*shape, device=run[0]).to(run[1])


def matrix_of(run, N, K, bias=True):
    found = Matrix(drawn(run, N, K) / K**0.5, drawn(run, N) if bias else None)
    return layers.to_fp8(found) if run[2] else found


def poisoned(run, *shape, dtype=None):
    return torch.full(shape, float("nan"), device=run[0], dtype=dtype or run[1])


def norm_of(run, K):
    return Norm(1 + drawn(run, K) / 4, 1e-5)


def close(found, expected, dtype):
    assert found.dtype == expected.dtype
    bound = BOUNDS[dtype]
    torch.testing.assert_close(found.float(), expected.float(), rtol=bound, atol=bound)


products = pytest.mark.parametrize(
    ("B", "size"), sampled((1, 2, 3, 8, 16), ((45, 75), (32, 64), (7, 24), (33, 300)))
)


@products
def test_norm_linear(run, B, size):
    N, K = size
    x, norm, matrix, out = (
        drawn(run, B, K),
        norm_of(run, K),
        matrix_of(run, N, K),
        poisoned(run, B, N),
    )
    assert layers.norm_linear(x, norm, matrix, out=out, tile=TILE) is out
    close(out, reference.norm_linear(x, norm, matrix), run[1])


@products
def test_linear_residual_in_place(run, B, size):
    N, K = size
    x, matrix, residual = drawn(run, B, K), matrix_of(run, N, K, bias=False), drawn(run, B, N)
    expected = reference.linear_residual(x, matrix, residual)
    layers.linear_residual(x, matrix, residual, out=residual, tile=TILE)
    close(residual, expected, run[1])


def test_weights_that_are_asked_for_early_change_no_bit(run, monkeypatch):
    """Early prefetch is used for one sequence, if address and matrix row are multiples of
    16 bytes.
    """
    asked, launch = [], products_of.launch

    def recorded(*given, EARLY, **named):
        asked.append(EARLY)
        launch(*given, EARLY=EARLY, **named)

    monkeypatch.setattr(products_of, "launch", recorded)
    there = run[0] == "cpu" or torch.cuda.get_device_capability() >= OVERLAPS
    tile = TILE._replace(overlap=there)  # no effect on a CPU
    even, short = matrix_of(run, 45, 64), matrix_of(run, 45, 75)
    room = even.weight.new_empty(45 * 64 + 1)
    odd = even._replace(weight=room[1:].view(45, 64).copy_(even.weight))
    for matrix, B in ((even, 1), (even, 2), (short, 1), (odd, 1)):
        x, residual = drawn(run, B, matrix.weight.shape[1]), drawn(run, B, 45)
        given = x, matrix, residual
        one, other = (layers.linear_residual(*given, tile=tile, early=e) for e in (False, True))
        assert torch.equal(one, other)
    assert asked[::2] == [False] * 4
    assert asked[1::2] == [True, False, False, False]


@pytest.mark.parametrize("ahead", [1, 2, 5])
def test_products_are_the_same_however_much_is_read_ahead(run, ahead):
    tile = TILE._replace(ahead=ahead)
    for K in (75, 600):  # fewer columns than are read before the wait, or more
        x, matrix, norm = drawn(run, 1, 2 * K), matrix_of(run, 45, K), norm_of(run, K)
        found = layers.norm_linear(x[:, :K], norm, matrix, tile=tile)
        close(found, reference.norm_linear(x[:, :K], norm, matrix), run[1])
        residual = drawn(run, 1, 45)
        found = layers.swiglu_linear(x, matrix, residual, tile=tile)
        close(found, reference.swiglu_linear(x, matrix, residual), run[1])


@products
def test_norm_swiglu(run, B, size):
    N, K = size
    x, norm, matrix, out = (
        drawn(run, B, K),
        norm_of(run, K),
        matrix_of(run, 2 * N, K),
        poisoned(run, B, N),
    )
    assert layers.norm_swiglu(x, norm, matrix, out=out, tile=TILE) is out
    close(out, reference.norm_swiglu(x, norm, matrix), run[1])


@products
def test_swiglu_linear(run, B, size):
    N, K = size
    x, matrix, residual = drawn(run, B, 2 * K), matrix_of(run, N, K), drawn(run, B, N)
    out = poisoned(run, B, N)
    layers.swiglu_linear(x, matrix, residual, out=out, tile=TILE)
    close(out, reference.swiglu_linear(x, matrix, residual), run[1])


@weightless
@pytest.mark.parametrize(
    ("B", "normed", "shape"),
    sampled((1, 3, 8, 13), (True, False), ((6, 2, 20, 75), (2, 2, 16, 96), (3, 1, 64, 40))),
)
def test_project_heads(run, B, normed, shape):
    H, G, D, K = shape
    x, norm, matrix = drawn(run, B, K), norm_of(run, K), matrix_of(run, (H + 2 * G) * D, K)
    angles = torch.randn(B, D, device=run[0])
    slots = torch.tensor([4, 0, -1, 5, 2, 1, 3, 9, 0, 0, 1, 1, 2][:B], device=run[0])
    norms = dict(query_norm=norm_of(run, D), key_norm=norm_of(run, D)) if normed else {}
    found, expected = (
        (poisoned(run, B, H, D), poisoned(run, B, G, 5, D), poisoned(run, B, 5, G, D))
        for _ in range(2)
    )
    found, expected = ((q, k, v.transpose(1, 2)) for q, k, v in (found, expected))
    given = x, norm, matrix, angles.cos(), angles.sin(), slots
    tickets = torch.zeros(H + 2 * G, dtype=torch.int32, device=run[0])
    layers.project_heads(*given, *found, tickets, **norms, tile=TILE)
    assert not tickets.any()
    reference.project_heads(*given, *expected, **norms)
    for one, other in zip(found, expected, strict=True):
        assert torch.equal(one.isnan(), other.isnan())  # only the slots are written
        close(one.nan_to_num(), other.nan_to_num(), run[1])


@pytest.fixture
def filled():
    """Fill new tensors with NaN, or with the highest integer."""
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


@weightless
@pytest.mark.parametrize(
    ("B", "N", "D", "factor"), [(1, 75, 12, 1.0), (3, 1024, 128, 1.25), (8, 2100, 2, 0.9)]
)
def test_begin_token(run, filled, B, N, D, factor):
    """Strided embeddings, ids from a wider tensor, one position for all sequences, and large
    positions.
    """
    embedding = drawn(run, 40, N + 1)[:, 1:]
    ids = torch.randint(40, (B, 3), device=run[0])[:, 1]
    frequencies = 10_000 ** -torch.linspace(0, 1, D // 2, device=run[0])
    far = torch.randint(2**20, (B,), device=run[0])
    for positions in (far, torch.tensor([7], device=run[0]).expand(B)):
        given = ids, positions, embedding, frequencies, factor
        expected = reference.begin_token(*given)
        found = layers.begin_token(*given)
        assert torch.equal(found[0], expected[0])
        for one, other in zip(found[1:], expected[1:], strict=True):
            close(one, other, run[1])


@weightless
def test_an_id_without_a_row_gives_nan(run):
    embedding, positions = drawn(run, 40, 24), torch.arange(4, device=run[0])
    ids, frequencies = torch.tensor([39, 40, -1, 2**40], device=run[0]), torch.ones(2).to(run[0])
    given = ids, positions, embedding, frequencies, 1.0
    hidden, expected = layers.begin_token(*given)[0], reference.begin_token(*given)[0]
    torch.testing.assert_close(hidden, expected, rtol=0, atol=0, equal_nan=True)
    assert hidden.isnan().all(1).tolist() == [False, True, True, True]


@weightless
@pytest.mark.parametrize(("B", "V"), [(1, 75), (3, 2048), (8, 5000), (2, 2049)])
def test_most_likely(run, B, V):
    """Launched twice, with the scratch memory that the first launch leaves."""
    scratch = torch.zeros(9, 2, dtype=torch.int64, device=run[0])
    for logits in (drawn(run, B, V + 1)[:, 1:], -drawn(run, B, V).abs() - 1):
        out = torch.full((B,), -7, device=run[0])
        assert layers.most_likely(logits, scratch, out=out) is out
        assert torch.equal(out, reference.most_likely(logits))
        assert not scratch.any()


@weightless
def test_equal_logits_go_to_the_lower_id_and_nan_is_the_highest(run):
    """The highest logit may be in any program.

    Of equal ones, of NaNs, and of zeros of either sign, the first is returned.
    """
    inf, nan = float("inf"), float("nan")
    logits, scratch = drawn(run, 8, 5000).clamp(max=3), torch.zeros(8, 2).long().to(run[0])
    logits[0, [2047, 2048, 4999]] = 7
    logits[1, [10, 4000]], logits[1, 11] = 7, 6
    logits[2, [100, 4500]], logits[2, [3000, 4000]] = inf, nan
    logits[3], logits[4], logits[5] = -inf, nan, -inf
    logits[5, 4999] = torch.finfo(run[1]).min
    logits[6] = -1
    logits[6, 3], logits[6, 4] = -0.0, 0.0
    logits[7, 4096] = -torch.tensor(nan)
    want = [2047, 10, 3000, 0, 0, 4999, 3, 4096]
    assert reference.most_likely(logits).tolist() == want
    assert layers.most_likely(logits, scratch).tolist() == want


@weightless
def test_bad_ends_of_a_token_are_refused(run):
    ids, logits = torch.zeros(2, device=run[0]).long(), drawn(run, 2, 24)
    embedding, ones, scratch = drawn(run, 40, 24), torch.ones(4, device=run[0]), ids.new_zeros(2, 2)
    for at, bad, said in (
        (0, ids[:0], r"ids: got shape \[0\], allowed is \[B\]"),
        (0, ids.int(), "ids: got torch.int32 on .*, allowed is int64 on"),
        (1, ids[:1], r"positions: got shape \[1\], allowed is \[2\]"),
        (1, ids.float(), "positions: got torch.float32 on"),
        (2, embedding.double(), "embedding: got torch.float64 of shape"),
        (2, embedding.T, "embedding: got a stride of 24 in the last dimension, allowed is 1"),
        (3, ones[None], r"frequencies: got shape \[1, 4\], allowed is \[D/2\]"),
        (3, ones.half(), "frequencies: got torch.float16, allowed is torch.float32"),
    ):
        given = [ids, ids, embedding, ones, 1.0]
        given[at] = bad
        with pytest.raises(ValueError, match=f"^{said}"):
            layers.begin_token(*given)
    for given, said in (
        ((logits.double(), scratch), r"logits: got torch.float64 of shape \[2, 24\], allowed is"),
        ((logits.T, scratch), "logits: got a stride of"),
        (
            (logits, scratch[:1]),
            r"scratch: got shape \[1, 2\] .*, allowed is a contiguous tensor \[2 or more, 2\]",
        ),
        ((logits, scratch[:, :1].clone()), r"scratch: got shape \[2, 1\], allowed is \[2, 2\]"),
        ((logits, scratch.int()), "scratch: got torch.int32, allowed is torch.int64"),
    ):
        with pytest.raises(ValueError, match=f"^{said}"):
            layers.most_likely(*given)
    with pytest.raises(ValueError, match=r"^out: got shape \[1\], allowed is \[2\]"):
        layers.most_likely(logits, scratch, out=ids[:1])


def test_products_of_several_rows_by_their_usual_tiles(run):
    sizes = [(100, 1088), (96, 544)]
    if run[0] == "cuda":  # the interpreter takes 15 s
        sizes.append((4300, 1088))
    for N, K in sizes:
        x, norm, matrix = drawn(run, 4, K), norm_of(run, K), matrix_of(run, N, K)
        residual, out = drawn(run, 4, N), poisoned(run, 4, N)
        tile = layers.tile_of("norm_linear", matrix, 4)
        layers.norm_linear(x, norm, matrix, out=out, tile=tile)
        close(out, reference.norm_linear(x, norm, matrix), run[1])
        found = layers.norm_swiglu(x, norm, matrix, tile=tile)
        close(found, reference.norm_swiglu(x, norm, matrix), run[1])
        found = layers.linear_residual(x, matrix, residual, tile=tile)
        close(found, reference.linear_residual(x, matrix, residual), run[1])


def test_large_activations_are_normalized(run):
    """Squares are split into two operands of the matrix units, for activations of any size."""
    x = drawn(run, 4, 96) * torch.tensor([1e-3, 1.0, 30.0, 3e3], device=run[0])[:, None]
    x, norm, matrix = x.to(run[1]), norm_of(run, 96), matrix_of(run, 20, 96)
    close(
        layers.norm_linear(x, norm, matrix, tile=TILE),
        reference.norm_linear(x, norm, matrix),
        run[1],
    )


def pages_of(keys, values, page):
    """Return pages `[B, S, G, page, D + Dv]`, NaN after the last row, and the table of their
    addresses.
    """
    (B, G, N, _), rows = keys.shape, torch.cat((keys, values), -1)
    S = -(-N // page)
    pages = rows.new_full((B, S, G, page, rows.shape[3]), float("nan"))
    for first in range(0, N, page):
        some = rows[:, :, first : first + page]
        pages[:, first // page, :, : some.shape[2]] = some
    step = pages[0, 0].nbytes
    places = pages.data_ptr() + step * torch.arange(B * S, dtype=torch.int64).view(B, S)
    return pages, torch.nn.functional.pad(places, (0, 1)).to(keys.device)


@weightless
@pytest.mark.parametrize("splits", [1, 4])
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize(
    ("B", "H", "G", "T", "D", "Dv", "lengths"),
    [(1, 2, 2, 5, 16, 16, [5]), (2, 6, 2, 9, 20, 12, [70, 41]), (2, 4, 1, 3, 8, 24, [2, 33])],
)
def test_attend_pages(run, splits, causal, B, H, G, T, D, Dv, lengths):
    queries, keys = drawn(run, B, H, T, D), drawn(run, B, G, max(lengths), D)
    values, lengths = drawn(run, B, G, max(lengths), Dv), torch.tensor(lengths, device=run[0])
    pages, table = pages_of(keys, values, 32)
    found, lse = layers.attend_pages(
        queries,
        table,
        lengths,
        kv_heads=G,
        value_dim=Dv,
        scale=D**-0.5,
        row_bytes=(D + Dv) * pages.element_size(),
        head_bytes=pages[0, 0, 0].nbytes,
        page_tokens=32,
        causal=causal,
        splits=splits,
        tile=Tile(rows=16, columns=16),
    )
    given = queries, keys, values, lengths
    expected, sums = reference.attend_pages(*given, scale=D**-0.5, causal=causal)
    close(found, expected, run[1])
    close(lse, sums, run[1])


@weightless
@pytest.mark.parametrize("splits", [1, 4])
@pytest.mark.parametrize(
    ("B", "H", "G", "T", "D", "Dv"), [(1, 8, 2, 5, 16, 16), (2, 6, 2, 1, 8, 24)]
)
def test_attend_pages_and_newest_rows(run, splits, B, H, G, T, D, Dv):
    """The first rows of the buffer are also in the pages, and its last ones are not written yet."""
    older, begin, new, room = 70, 3, 20, 40
    queries, keys = drawn(run, B, H, T, D), drawn(run, B, G, older + new, D)
    if splits > 1:  # in memory, the heads of a token follow each other
        queries = queries.transpose(1, 2).contiguous().transpose(1, 2)
    values = drawn(run, B, G, older + new, Dv)
    pages, table = pages_of(keys[:, :, :older], values[:, :, :older], 32)
    rows = pages.new_full((B, G, room, D + Dv), float("nan"))
    rows[:, :, begin : begin + new] = torch.cat((keys, values), -1)[:, :, older:]
    places = rows.data_ptr() + rows[0].nbytes * torch.arange(B, dtype=torch.int64)
    lengths = torch.full((B,), begin + new, device=run[0])
    newest = Newest(places[:, None].to(run[0]), lengths, rows, begin)
    found, lse = layers.attend_pages(
        queries,
        table,
        torch.full((B,), older, device=run[0]),
        kv_heads=G,
        value_dim=Dv,
        scale=D**-0.5,
        row_bytes=(D + Dv) * pages.element_size(),
        head_bytes=pages[0, 0, 0].nbytes,
        page_tokens=32,
        causal=False,
        newest=newest,
        splits=splits,
        tile=Tile(rows=16, columns=16),
    )
    ends = torch.full((B,), older + new, device=run[0])
    expected, sums = reference.attend_pages(queries, keys, values, ends, scale=D**-0.5)
    close(found, expected, run[1])
    close(lse, sums, run[1])
    if splits > 1:
        assert found.transpose(1, 2).is_contiguous()
        assert lse.transpose(1, 2).is_contiguous()


def test_attend_pages_takes_queries_in_two_orders(run):
    table, lengths = torch.zeros(1, 1, dtype=torch.int64), torch.ones(1, dtype=torch.int64)
    queries = torch.zeros(1, 4, 16, 8, device=run[0]).transpose(2, 3)
    how = dict(kv_heads=2, value_dim=16, scale=1.0, row_bytes=128, head_bytes=2048, page_tokens=16)
    with pytest.raises(ValueError, match=r"queries: got strides .* or the transposed view of one"):
        layers.attend_pages(queries, table.to(run[0]), lengths.to(run[0]), **how)


@weightless
@pytest.mark.parametrize("splits", [1, 4])
def test_attend_pages_without_hidden_rows(run, splits):
    """Rows are hidden in pages, among them a whole page, and among the newest rows. Lengths have a
    stride of 0."""
    B, H, G, T, D, older, new, room = 2, 4, 2, 3, 16, 70, 20, 32
    queries, keys = drawn(run, B, H, T, D), drawn(run, B, G, older + new, D)
    values = drawn(run, B, G, older + new, D)
    seen = torch.ones(B, older + new, dtype=torch.bool)
    seen[0, :37], seen[1, 5:9], seen[1, 66:80:3] = False, False, False
    pages, table = pages_of(keys[:, :, :older], values[:, :, :older], 32)
    pages[0, 0] = 100.0
    rows = pages.new_full((B, G, room, 2 * D), float("nan"))
    rows[:, :, :new] = torch.cat((keys, values), -1)[:, :, older:]
    places = rows.data_ptr() + rows[0].nbytes * torch.arange(B, dtype=torch.int64)
    mask = torch.ones(B, room, dtype=torch.uint8)
    mask[:, :new] = seen[:, older:]
    blocks = -(-table.shape[1] * 32 // BLOCK)
    words = words_of(seen[:, :older], blocks).flatten(1)[:, : table.shape[1]].contiguous()
    lengths = torch.tensor([new], device=run[0]).expand(B)
    found, lse = layers.attend_pages(
        queries,
        table,
        torch.tensor([older], device=run[0]).expand(B),
        kv_heads=G,
        value_dim=D,
        scale=D**-0.5,
        row_bytes=2 * D * pages.element_size(),
        head_bytes=pages[0, 0, 0].nbytes,
        page_tokens=32,
        causal=False,
        valid=words.to(run[0]),
        newest=Newest(places[:, None].to(run[0]), lengths, rows, 0, mask.to(run[0])),
        splits=splits,
        tile=Tile(rows=16, columns=16),
    )
    for b in range(B):
        some = slice(b, b + 1), slice(None), seen[b].to(run[0])
        end = torch.tensor([int(seen[b].sum())], device=run[0])
        given = queries[b : b + 1], keys[some], values[some], end
        expected, sums = reference.attend_pages(*given, scale=D**-0.5)
        close(found[b : b + 1], expected, run[1])
        close(lse[b : b + 1], sums, run[1])


@weightless
@pytest.mark.parametrize("normed", [True, False])
@pytest.mark.parametrize(
    ("B", "T", "H", "G", "D"), [(1, 5, 2, 1, 16), (2, 19, 4, 2, 12), (2, 33, 6, 2, 96)]
)
def test_rotate_heads(run, normed, B, T, H, G, D):
    projected = drawn(run, B, T, (H + 2 * G) * D).split([H * D, G * D, G * D], dim=-1)
    angles = drawn(run, 2, B, T, D).unbind(0)
    norm = layers.Norm(drawn(run, D), 1e-5) if normed else None
    made = []
    for module in (layers, reference):
        queries, buffer = drawn(run, B, T, H, D).transpose(1, 2), drawn(run, 2, B, G, T + 7, D)
        buffer.zero_()
        keys, values = buffer[:, :, :, 3 : 3 + T].unbind(0)
        given = *projected, *angles, queries, keys, values
        module.rotate_heads(*given, query_norm=norm, key_norm=norm)
        made.append((queries, buffer))
    for found, expected in zip(*made, strict=True):
        close(found, expected, run[1])


@weightless
def test_swiglu(run):
    gate, up = drawn(run, 5, 3000).chunk(2, dim=-1)
    close(layers.swiglu(gate, up), reference.swiglu(gate, up), run[1])


@pytest.mark.parametrize(
    ("name", "wrong"),
    [
        ("query", lambda of: of["query"][:, :, 1:]),
        ("keys", lambda of: of["keys"].double()),
        ("sin", lambda of: of["sin"][:, 1:]),
        ("value", lambda of: of["value"].mT.contiguous().mT),
    ],
)
def test_rotate_heads_refuses_what_does_not_fit(name, wrong):
    sizes = dict(query=(1, 4, 16), key=(1, 4, 8), value=(1, 4, 8), cos=(1, 4, 8), sin=(1, 4, 8))
    sizes |= dict(queries=(1, 2, 4, 8), keys=(1, 1, 4, 8), values=(1, 1, 4, 8))
    given = {each: torch.zeros(size) for each, size in sizes.items()}
    given[name] = wrong(given)
    with pytest.raises(ValueError, match=f"^{name}"):
        layers.rotate_heads(**given)
    assert not given["queries"].any()


@weightless
@pytest.mark.parametrize("splits", [1, 4])
@pytest.mark.parametrize(
    ("B", "H", "G", "D", "Dv", "starts", "ends"),
    [
        (1, 2, 2, 16, 16, [0], [150]),
        (3, 6, 2, 20, 12, [0, 7, 3], [64, 61, 3]),  # the last sequence has none
        (2, 8, 1, 8, 24, [2, 0], [33, 1]),
    ],
)
def test_attend_token(run, splits, B, H, G, D, Dv, starts, ends):
    queries, keys = drawn(run, B, H, D), drawn(run, B, G, 160, D).transpose(1, 2).contiguous()
    values = drawn(run, B, G, 160, Dv)
    for at, (start, end) in enumerate(zip(starts, ends, strict=True)):
        keys[at, end:] = values[at, :, end:] = float("nan")  # no kernel has written there
        keys[at, :start] = values[at, :, :start] = float("nan")
    given = queries, keys.transpose(1, 2), values
    places = torch.tensor(starts, device=run[0]), torch.tensor(ends, device=run[0])
    tile = Tile(rows=16, columns=16, warps=4, stages=2)
    found = layers.attend_token(*given, *places, scale=D**-0.5, splits=splits, tile=tile)
    clean = [part.nan_to_num(0) for part in given]
    close(found, reference.attend_token(*clean, *places, scale=D**-0.5), run[1])


@weightless
def test_attend_token_of_one_end_for_all(run):
    queries, keys, values = drawn(run, 2, 4, 16), drawn(run, 2, 2, 40, 16), drawn(run, 2, 2, 40, 16)
    starts, end = torch.tensor([0, 5], device=run[0]), torch.tensor([33], device=run[0])
    less = dict(splits=2, tile=TILE) if run[0] == "cpu" else {}
    found = layers.attend_token(queries, keys, values, starts, end.expand(2), scale=0.3, **less)
    want = reference.attend_token(queries, keys, values, starts, end.expand(2), scale=0.3)
    close(found, want, run[1])


def test_bad_arguments_are_refused_and_nothing_is_written(run):
    x, norm, matrix, out = (
        drawn(run, 3, 24),
        norm_of(run, 24),
        matrix_of(run, 16, 24),
        poisoned(run, 3, 16),
    )
    with pytest.raises(ValueError, match=r"^x: got shape \[17, 24\], allowed is \[1 to 16, 24\]"):
        layers.norm_linear(drawn(run, 17, 24), norm, matrix)
    with pytest.raises(ValueError, match=r"^out: got shape"):
        layers.norm_linear(x, norm, matrix, out=out[:, 1:])
    with pytest.raises(ValueError, match=r"^rows: got 12, allowed is a power of two"):
        layers.norm_linear(x, norm, matrix, out=out, tile=Tile(rows=12))
    with pytest.raises(ValueError, match=r"^ahead: got 0, allowed is at least 1"):
        layers.norm_linear(x, norm, matrix, out=out, tile=Tile(ahead=0))
    with pytest.raises(ValueError, match=r"^weight: got 15 rows, allowed is an even number"):
        layers.norm_swiglu(x, norm, matrix_of(run, 15, 24), out=out)
    with pytest.raises(ValueError, match=r"^rows: got 1, allowed is at least 2"):
        layers.norm_swiglu(x, norm, matrix, out=out[:, :8], tile=Tile(rows=1))
    with pytest.raises(ValueError, match=r"^weight: got torch.float64"):
        layers.norm_linear(x, norm, Matrix(matrix.weight.double()), out=out)
    with pytest.raises(ValueError, match=r"^residual: got shape"):
        layers.linear_residual(x, matrix, out[:2])
    with pytest.raises(ValueError, match=r"^gate_up: got shape"):
        layers.swiglu_linear(x, matrix, out)
    assert out.isnan().all()


def test_stacked_matrices_give_their_products_side_by_side(run):
    x, norm = drawn(run, 2, 24), norm_of(run, 24)
    parts = [matrix_of(run, N, 24, bias=N == 5) for N in (5, 16)]
    found = layers.norm_linear(x, norm, layers.stack(*parts), tile=TILE)
    apart = [reference.norm_linear(x, norm, part) for part in parts]
    close(found, torch.cat(apart, 1), run[1])
