"""What limits kernels, but for the profiler: how its table is read, what is said of it."""

import pytest
import torch

from benchmarks import limits
from benchmarks.tabling import limits as tabling


def written(*launches):
    """A table as `ncu` writes it, of kernels and their counters by the name in the result."""
    names = ["ID", "Kernel Name", "Grid Size", *limits.COUNTERS.values()]
    lines = ["==PROF== connected", ",".join(f'"{name}"' for name in names)]
    lines.append(",".join('""' for _ in names))
    for number, (kernel, counters) in enumerate(launches):
        values = [counters.get(name, 0.5) for name in limits.COUNTERS]
        cells = [number, kernel, "(8, 1, 1)", *(f"{value:,}" for value in values)]
        lines.append(",".join(f'"{cell}"' for cell in cells))
    return "\n".join(lines) + "\n"


SCAN = "scan", dict(us=12500.0, memory=71.0, issue=40.0, shared=30.0, read_bytes=1234567.0)
AGREE = "agree", dict(us=9000.0, memory=3.0, issue=9.0, shared=5.0, long_scoreboard=7.5)
FILL = "void at::native::fill(int)", {}


def test_a_table_is_read():
    scan, agree = limits.parsed(written(SCAN, FILL, AGREE))
    assert (scan["kernel"], scan["us"], scan["read_bytes"]) == ("scan", 12.5, 1234567.0)
    assert scan["limit"] == "memory, 71%"
    assert agree["limit"] == "latency: long scoreboard"


def test_a_stall_that_a_gpu_does_not_count_is_none():
    text = written(AGREE).replace("stalled_long_scoreboard", "another")
    (agree,) = limits.parsed(text)
    assert agree["long_scoreboard"] == 0


def test_what_is_no_table_is_said():
    with pytest.raises(ValueError, match="ncu: got no table: ==ERROR== no permission"):
        limits.parsed("==ERROR== no permission\n")
    without = written(SCAN).replace("dram__bytes_read.sum", "another")
    with pytest.raises(ValueError, match=r"ncu: got no dram__bytes_read.sum of scan"):
        limits.parsed(without)


def test_the_page_has_a_row_for_each_launch():
    works = {"pariskv": limits.parsed(written(SCAN, AGREE))}
    about = dict(gpu="g", torch="2", transformers="5")
    page = tabling.limits(dict(works=works, tokens=131_072, keys=2**20, machine=about))
    assert "| `pariskv` | `scan` | 12.5 | 1.2 | 71% | 40% | 30% | 0.5 | memory, 71% |" in page
    assert "| 3% | 9% | 5% | 0.5 | latency: long scoreboard 54%, barrier 4% |" in page


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (["--tokens", "5"], "tokens: got 5, allowed is at least 4096"),
        (["--works", "none"], "invalid choice"),
        (["--json", "/nowhere/a.json"], "allowed is a file in a folder that exists"),
    ],
)
def test_what_cannot_be_done_is_said(given, message, capsys):
    with pytest.raises(SystemExit):
        limits.arguments(given)
    assert message in capsys.readouterr().err


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_nothing_is_measured(tmp_path, capsys):
    with pytest.raises(SystemExit):
        limits.arguments(["--json", str(tmp_path / "a.json")])
    assert "torch sees none" in capsys.readouterr().err
