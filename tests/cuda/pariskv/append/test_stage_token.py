"""One launch puts a token's rows and queries where the step reads them."""

import pytest
import torch

from kvindex.core.geometry import Geometry
from kvindex.core.protocol import Rows
from kvindex.core.resident import ResidentRows
from kvindex_cuda.pariskv.append.stage_token import stage_token

SHAPES = [
    (1, 4, 2, 16, 16, torch.float32),
    (2, 6, 2, 80, 24, torch.float16),
    (3, 8, 8, 128, 256, torch.bfloat16),
]


def made(device, B, H, G, D, Dv, dtype):
    """A buffer with room for 5 rows that contains 3, a token, its places in a window, and
    queries.
    """
    sizes = dict(q_heads=H, kv_heads=G, head_dim=D, value_dim=Dv)
    resident = ResidentRows(Geometry.of(**sizes, dtype=dtype, device=device), B, 5)

    def new(*shape):
        return torch.randn(shape, device=device).to(dtype)

    resident.add(new(B, G, 3, D), new(B, G, 3, Dv), None)
    window = [torch.zeros((B, G, 7, width), dtype=dtype, device=device) for width in (D, Dv)]
    return resident, Rows(new(B, G, 1, D), new(B, G, 1, Dv)), window, new(B, H, D)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("strided", [False, True])
@pytest.mark.parametrize("asked", [False, True])
def test_all_of_it_lies_where_it_should_and_nothing_else_changes(device, shape, strided, asked):
    resident, token, window, queries = made(device, *shape)
    before, D = resident.rows.clone(), shape[3]
    if strided:
        token = Rows(
            *(
                part.transpose(1, 2).contiguous().transpose(1, 2)
                for part in (token.keys, token.values)
            )
        )
        queries = torch.stack([queries, queries], dim=-1)[..., 0]
    place = torch.full(queries.shape, 7, dtype=queries.dtype, device=device) if asked else None
    stage_token(resident, token, Rows(*(part[:, :, 4:5] for part in window)), queries, place)
    assert (len(resident), resident.count.tolist(), resident.mask.all()) == (4, [4], True)
    row = torch.cat([token.keys, token.values], dim=3)
    assert torch.equal(resident.rows[:, :, 3:4], row)
    assert torch.equal(resident.rows[:, :, :3], before[:, :, :3])
    assert torch.equal(resident.rows[:, :, 4:], before[:, :, 4:])
    for part, want in zip(window, row.tensor_split([D], dim=3), strict=True):
        assert torch.equal(part[:, :, 4:5], want)
        assert not part[:, :, :4].any()
        assert not part[:, :, 5:].any()
    assert place is None or torch.equal(place, queries)


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (dict(queries=torch.zeros(2, 4, 8)), r"queries: got shape \(2, 4, 8\), allowed is"),
        (dict(values=torch.zeros(1, 2, 1, 8)), r"values: got shape \(1, 2, 1, 8\), allowed is"),
        (dict(keys=torch.zeros(1, 2, 2, 16)), r"keys: got shape \(1, 2, 2, 16\), allowed is"),
        (dict(keys=torch.zeros(1, 2, 1, 16).half()), r"keys: got torch.float16, allowed is"),
        (dict(full=True), "resident: got 5 rows, allowed is less than 5"),
    ],
    ids=str,
)
def test_what_does_not_fit_is_refused_before_anything_is_held(wrong, message):
    resident, token, window, queries = made("cpu", *SHAPES[0])
    if wrong.pop("full", False):
        resident.claim(2)
    held = len(resident)
    token = Rows(wrong.get("keys", token.keys), wrong.get("values", token.values))
    places = Rows(*(part[:, :, 4:5] for part in window))
    with pytest.raises(ValueError, match=message):
        stage_token(resident, token, places, wrong.get("queries", queries))
    assert (len(resident), int(resident.count)) == (held, 3)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_a_place_that_the_device_knows(device, shape):
    """Several thread blocks stage a token, one of which increments the count.

    Nothing is written past the room.
    """
    resident, token, _, queries = made(device, *shape)
    ticket = torch.zeros(1, dtype=torch.int32, device=device)
    row = torch.cat([token.keys, token.values], dim=3)
    for count in (4, 5, 5):
        before = resident.rows.clone()
        stage_token(resident, token, None, queries, ticket=ticket)
        assert (len(resident), resident.count.tolist(), int(ticket)) == (3, [count], 0)
    assert torch.equal(resident.rows[:, :, 3:], row.expand(-1, -1, 2, -1))
    assert torch.equal(resident.rows, before)
