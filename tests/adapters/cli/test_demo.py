"""What the demo concludes from its measurements."""

import pytest

from kvindex_adapters.cli.demo import _conclusion, _quartiles


def result(full, index, found=(True, True)):
    """Return a result of the demo with the given times of tokens in seconds."""
    halves = {
        name: {
            "found": list(found),
            "token_s": sorted(times)[len(times) // 2],
            "quartiles_s": _quartiles(times),
            "rows_full": 100,
        }
        for name, times in (("full", full), ("index", index))
    }
    speedup = halves["full"]["token_s"] / halves["index"]["token_s"]
    return {**halves, "speedup": speedup, "gain_from": 4000 if speedup > 1 else None}


def test_steady_times_give_one_sentence_and_the_start_of_the_gain():
    said = _conclusion(result([0.2] * 9, [0.1] * 9))
    assert "2.00 times as long with full attention" in said
    assert "varied" not in said


@pytest.mark.parametrize("full", [[0.2] * 9, [0.05] * 9])
def test_varying_times_give_a_warning(full):
    said = _conclusion(result(full, [0.1, 0.1, 0.1, 0.1, 0.4, 0.4, 0.4]))
    assert "on an idle machine, or with as many threads as there are free cores" in said
    assert "4.0 times the lower one" in said
    assert "not faster" not in said


def test_a_single_time_has_quartiles():
    assert _quartiles([0.3]) == (0.3, 0.3)
