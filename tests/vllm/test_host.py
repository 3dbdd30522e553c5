"""Which sequences of a batch are copied from the host together."""

from itertools import accumulate
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvindex_adapters.vllm import unsupported
from kvindex_adapters.vllm.host import single, split
from kvindex_adapters.vllm.options import Options
from tests.vllm.test_options import engine


def test_first_sequences_of_one_token():
    assert single([0, 1, 2, 5]) == 2
    assert single([0, 3, 4]) == 0
    assert single([0, 1, 2]) == 2
    assert single([0]) == 0
    assert single([0, 1, 2, 5], [False, True, True]) == 1
    assert single([0, 1, 2], [False, False]) == 2
    assert single([0, 1, 1], [False]) == 1  # the last one is padding


@given(
    batch=st.lists(st.tuples(st.integers(0, 300), st.integers(0, 500)), min_size=1, max_size=8),
    first=st.integers(0, 8),
    room=st.integers(5, 12),
)
def test_parts_are_all_sequences_that_bring_tokens_and_fit(batch, first, room):
    counts, lengths = [count for count, _ in batch], [count + more for count, more in batch]
    starts, first = [0, *accumulate(counts)], min(first, len(batch))
    parts = split(starts, lengths, first=first, page_tokens=256, room=room)
    covered = [number for part in parts for number in range(len(batch))[part.sequences]]
    assert covered == sorted(set(covered))
    assert {number for number in range(first, len(batch)) if counts[number]} <= set(covered)
    for part in parts:
        some = range(len(batch))[part.sequences]
        assert part.tokens == slice(starts[some[0]], starts[some[-1] + 1])
        assert part.width * len(some) <= room
        assert part.width * 256 >= part.longest == max(lengths[number] for number in some)
        assert part.new == max(counts[number] for number in some)


def test_options():
    assert Options.of({"rows": "host", "cached_rows": 4}).rows == "host"
    for asked, said in (
        ({"rows": "disk"}, "rows: got 'disk', allowed is one of device, host"),
        ({"cached_rows": 100}, "cached_rows: got 100, allowed is a power of two, at least 4"),
        ({"cached_rows": 2}, "cached_rows: got 2"),
        ({"cached_rows": 0}, "cached_rows: got 0"),
        ({"cached_rows": -4}, "cached_rows: got -4"),
        ({"cached_rows": "a"}, "cached_rows: got 'a'"),
        ({"cached_rows": True}, "cached_rows: got True"),
        ({"cached_rows": 4096.0}, "cached_rows: got 4096.0"),
        ({"rows": None}, "rows: got None"),
    ):
        with pytest.raises(ValueError, match=said):
            Options.of(asked)


def test_what_the_host_does_not_serve_is_refused():
    fine = dict(prefix_match_unit=None, use_ubatching=False, enable_sleep_mode=False)
    host_reasons = unsupported.host_reasons
    assert host_reasons(engine(**fine), sliding=False) == []
    assert host_reasons(engine(**{**fine, "prefix_match_unit": 256}), sliding=False) == []
    for other, sliding, said in (
        (fine, True, "rows: got host in a model with sliding-window"),
        ({**fine, "prefix_match_unit": 64}, False, "prefix_match_unit: got 64"),
        ({**fine, "use_ubatching": True}, False, "use_ubatching: got True"),
        ({**fine, "enable_sleep_mode": True}, False, "enable_sleep_mode: got True"),
        (
            {**fine, "speculative_config": SimpleNamespace(method="ngram")},
            False,
            "speculative_config: got the method ngram, allowed is None",
        ),
    ):
        (reason,) = host_reasons(engine(**other), sliding=sliding)
        assert reason.startswith(said)
    (reason,) = host_reasons(engine(**fine), sliding=False, shared=True)
    assert reason.startswith("rows: got host in a model whose layers share keys and values")
    (reason,) = unsupported.device_reasons("host")
    assert reason.startswith("rows: got host, allowed is 'device' on a CPU")
    assert unsupported.device_reasons("device") == []
    with pytest.raises(ValueError, match="kvindex: no room; set num_gpu_blocks_override"):
        unsupported.refuse_memory(MemoryError("no room"))
    unsupported.refuse_capture(False)
    with pytest.raises(ValueError, match="rows: got host, with a graph that is captured"):
        unsupported.refuse_capture(True)
