"""An index that learns from its first append learns from the whole prompt, however it is read."""

import pytest
import torch

from kvindex.core.capability import capability
from kvindex.core.protocol import LearnsOnce, Rows
from kvindex.indexes.pqcache import PQCache
from kvindex.layer import AttentionLayer
from kvindex.wrappers import Sample
from tests.support.helpers import Case
from tests.support.sequences import Sequence

CASE = Case(batch=2)
PROMPT, END = 90, 110
CHUNKS = {"at once": [90], "chunks": [30, 25, 35], "small": [7] * 12 + [6], "last": [88, 2]}
OPTIONS = {
    "clusterkv": dict(per_cluster=5, block=16),
    "doublesparsity": {},
    "icecache": {},
    "magicpig": {},
    "pqcache": dict(bits=2),
    "retroinfer": dict(per_cluster=5, block=16),
    "squeezed": dict(per_cluster=5, block=16),
}


def layer(name="pqcache", **sizes):
    index = CASE.index(name, **OPTIONS.get(name, {}))
    return AttentionLayer(
        index, k=5, **{**dict(sink=3, local_window=4, update_every=8, dense_below=0), **sizes}
    )


def read(made, sequence, sizes, start=0):
    for size in sizes:
        sequence.feed(made, start, start := start + size)
    return made


def decoded(made, sequence):
    return [sequence.feed(made, place, place + 1) for place in range(PROMPT, END)]


@pytest.mark.parametrize("pads", [None, [0, 11]], ids=str)
@pytest.mark.parametrize("name", OPTIONS)
@pytest.mark.parametrize("chunks", CHUNKS)
def test_chunks_change_nothing(name, chunks, pads):
    sequence = Sequence.of(CASE, END, pads)
    once, made = (read(layer(name), sequence, CHUNKS[each]) for each in ("at once", chunks))
    assert len(made.index) == 0
    for mine, want in zip(decoded(made, sequence), decoded(once, sequence), strict=True):
        torch.testing.assert_close(mine, want)
    assert len(made.index) == len(once.index) >= PROMPT - 4
    for part, want in made.index._learned.items():
        torch.testing.assert_close(once.index._learned[part], want, msg=part)


def test_a_long_prompt_does_not_wait_for_its_end(monkeypatch):
    monkeypatch.setattr(PQCache, "learns_from", 50)
    made, sequence, lengths = layer(), Sequence.of(CASE, END), []
    for start in range(0, PROMPT, 10):
        sequence.feed(made, start, start + 10)
        lengths.append(len(made.index))
    assert lengths == [0, 0, 0, 0, 46, 56, 66, 76, 86]


def test_after_a_short_prompt_tokens_move_as_into_any_index():
    sequence, lengths = Sequence.of(CASE, END), []
    for name in ("pqcache", "exact"):
        made = read(layer(name), sequence, [6])
        lengths.append([])
        for place in range(6, 24):
            sequence.feed(made, place, place + 1)
            lengths[-1].append(len(made.index))
    assert lengths[0] == lengths[1]
    assert lengths[0][-1] > 0


def test_a_truncated_prompt_is_learned_from_what_remains():
    sequence = Sequence.of(CASE, END)
    made, want = read(layer(), sequence, [60, 25]), read(layer(), sequence, [70])
    made.truncate(70)
    for each in (made, want):
        read(each, sequence, [20], start=70)
        sequence.feed(each, 90, 91)
    assert torch.equal(made.index._learned["codebooks"], want.index._learned["codebooks"])


def test_a_saved_layer_goes_on_waiting():
    sequence, want = Sequence.of(CASE, END), layer()
    made = read(layer(), sequence, [30, 25])
    loaded = layer()
    loaded.load_state_dict(made.state_dict())
    read(want, sequence, [90])
    read(loaded, sequence, [35], start=55)
    for each in (loaded, want):
        decoded(each, sequence)
    assert torch.equal(loaded.index._learned["codebooks"], want.index._learned["codebooks"])


def test_chunks_whose_rows_the_caller_stores_wait_too():
    sequence = Sequence.of(CASE, END)
    queries, keys, values = sequence.parts(0, PROMPT)
    made = layer()
    for start, stop in ((0, 40), (40, PROMPT)):
        rows = Rows(keys[:, :, :stop], values[:, :, :stop])
        made.read_chunk(queries[:, :, start:stop], rows)
        assert len(made.index) == 0
    sequence.feed(made, PROMPT, PROMPT + 1)
    assert len(made.index) == PROMPT - 4


def test_a_wrapper_of_such_an_index_waits():
    wrapper = Sample(CASE.index("pqcache"))
    assert capability(wrapper, LearnsOnce).learns_from == PQCache.learns_from
    assert capability(Sample(CASE.index("exact")), LearnsOnce) is None
