"""The bytes of a token that docs/adapters/vllm.md shows, computed from the layout of the pages."""

import re
from pathlib import Path

import pytest

from kvindex.pariskv.block_layout import BLOCK
from kvindex_adapters.vllm.options import Options

PAGE = (Path(__file__).parents[2] / "docs/adapters/vllm.md").read_text()

ROW = r"^\| (\d+) layers, (\d+) KV heads of (\d+) .*?\| ([\d, |]+) \|$"


def codes_bytes(head_dim):
    """Return the bytes that the codes of a token take in a page, per KV head and layer."""
    return -(-Options().layout(head_dim).head_bytes // BLOCK)


@pytest.mark.parametrize("row", re.findall(ROW, PAGE, re.MULTILINE))
def test_bytes_of_a_token(row):
    layers, heads, dim = map(int, row[:3])
    shown = [int(number.replace(",", "")) for number in row[3].split(" | ")]
    rows, codes = layers * heads * 2 * dim * 2, layers * heads * codes_bytes(dim)
    assert shown == [rows, rows + codes, codes + 2 * layers, rows]


def test_all_rows_of_the_table_are_checked():
    assert len(re.findall(ROW, PAGE, re.MULTILINE)) == 4
    (text,) = re.findall(r"for its codes (.*?)\.\n", PAGE)
    assert text == "36 bytes (`D` = 64), 68 (128) or 133 (256)"
    assert [codes_bytes(dim) for dim in (64, 128, 256)] == [36, 68, 133]


def test_the_example():
    token, shared = 36 * 8 * 512, 36 * (8 * 68 + 2)
    fit = {"678,000": 1e11 / token, "598,000": 1e11 / (36 * 8 * 580), "745,000": 1.1e11 / token}
    for shown, tokens in fit.items():
        assert shown in PAGE
        assert tokens == pytest.approx(int(shown.replace(",", "")), rel=2e-3)
    assert 1.1e11 / token * shared == pytest.approx(14.7e9, rel=5e-3)
    sequences = [tokens / 131_072 for tokens in fit.values()]
    assert sequences == pytest.approx([5.2, 4.6, 5.7], abs=0.05)
