import torch
from hypothesis import given
from hypothesis import strategies as st

from kvindex.ops.fetch import gather_rows

shapes = st.sampled_from([(), (5,), (3, 4)])
dtypes = st.sampled_from([torch.float32, torch.bfloat16, torch.uint8])


@given(st.integers(0, 2**31), shapes, dtypes, st.integers(0, 9))
def test_rows_are_those_of_each_id_and_negative_ids_give_zeros(seed, shape, dtype, width):
    generator = torch.Generator().manual_seed(seed)
    table = torch.randint(1, 200, (2, 3, 7, *shape), generator=generator).to(dtype)
    ids = torch.randint(-3, 7, (2, 3, width), generator=generator)
    got = gather_rows(table, ids)
    assert (got.shape, got.dtype) == ((2, 3, width, *shape), dtype)
    for b in range(2):
        for h in range(3):
            for slot, i in enumerate(ids[b, h].tolist()):
                want = table[b, h, i] if i >= 0 else torch.zeros(shape, dtype=dtype)
                assert torch.equal(got[b, h, slot], want)


def test_nan_in_a_row_that_is_not_asked_for_stays_there():
    table = torch.full((1, 1, 2, 4), float("nan"))
    table[0, 0, 1] = 1
    assert gather_rows(table, torch.tensor([[[1, -1]]])).tolist() == [[[[1.0] * 4, [0.0] * 4]]]


def test_a_table_that_is_not_contiguous():
    table = torch.arange(48.0).reshape(1, 6, 2, 4).transpose(1, 2)
    ids = torch.tensor([[[5, 0], [3, 1]]])
    assert torch.equal(gather_rows(table, ids), gather_rows(table.contiguous(), ids))


def test_offsets_past_2_to_the_31_do_not_wrap():
    """In the published code offsets overflow. The test allocates only the pages that it writes."""
    table = torch.empty(1, 2, 2**27 + 2, 8, dtype=torch.uint8)
    table[0, :, -1] = 7
    ids = torch.tensor([[[2**27 + 1, -1]] * 2])
    assert gather_rows(table, ids).tolist() == [[[[7] * 8, [0] * 8]] * 2]
