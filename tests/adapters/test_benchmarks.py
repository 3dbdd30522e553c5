"""What the benchmarks compute beside running a model."""

import re
from pathlib import Path

import pytest
import torch

from benchmarks.divergence import group_of, ratio_interval
from benchmarks.recall import expand, summary
from benchmarks.rounding import recalls
from kvindex_adapters.evaluate.capture import Captured
from kvindex_adapters.evaluate.recall import Recall


def test_the_ratio_of_equal_divergences_is_1_without_spread():
    kl = torch.rand(500, generator=torch.Generator().manual_seed(0)).double()
    ratio, low, high = ratio_interval([(kl, kl), (2 * kl, 2 * kl)])
    assert ratio == pytest.approx(1)
    assert low == pytest.approx(1)
    assert high == pytest.approx(1)


def test_the_ratio_is_the_geometric_mean_over_cells_and_its_interval_holds_it():
    generator = torch.Generator().manual_seed(0)
    kl = torch.rand(2000, generator=generator).double() + 0.1
    noisy = kl * (1 + 0.3 * torch.randn(2000, generator=generator).double())
    ratio, low, high = ratio_interval([(noisy, kl), (4 * noisy, kl)])
    assert ratio == pytest.approx(2, rel=0.02)
    assert low < ratio < high
    assert high / low < 1.05
    # unpaired, the spread of kl itself would be part of it
    other = kl[torch.randperm(2000, generator=generator)]
    wide = ratio_interval([(other * 2, kl)])
    assert wide[2] / wide[1] > high / low


def test_exact_is_compared_under_the_same_policy():
    assert group_of("pariskv:preset=fast:beta=.02") == "exact"
    assert group_of("pariskv:group=union:beta=.1+sample:share=.5") == "exact:group=union"


def test_specs_at_each_share():
    specs = expand(["paper", "fast", "scan", "preset=fast:refine_factor=1"], [0.1, 0.2], [0.25])
    assert specs == [
        "pariskv:preset=paper:beta=0.1:rho=0.25",
        "pariskv:preset=paper:beta=0.2:rho=0.25",
        "pariskv:preset=fast:beta=0.1",
        "pariskv:preset=fast:beta=0.2",
        "pariskv:preset=scan",
        "pariskv:preset=fast:refine_factor=1",
    ]


def test_the_summary_tells_the_worst_layer_and_the_worst_tenth_of_the_heads():
    recall = torch.full((4, 10), 0.9).double()
    recall[2] = 0.5
    recall[1, 3] = 0.1
    found = summary(Recall(recall, recall / 2, recall))
    assert found["recall"] == pytest.approx((29 * 0.9 + 0.1 + 5) / 40)
    assert found["recall_worst_layer"] == pytest.approx(0.5)
    assert found["recall_worst_decile"] == pytest.approx((0.1 + 3 * 0.5) / 4)
    assert found["mass_ratio"] == pytest.approx(0.5)


def test_recall_of_a_groups_rows_is_all_of_exact_searchs_and_falls_with_the_rounding():
    draw = torch.Generator().manual_seed(0)
    keys, queries = (torch.randn(*shape, generator=draw) for shape in ((2, 464, 64), (4, 3, 64)))
    dots = "pariskv:preset=fast:beta=.1:refine_factor=1:largest="
    specs = ["exact", f"{dots}127", f"{dots}1"]
    found = recalls([Captured(keys, queries, 0.125, None)] * 2, specs, k=20, prompt=460)
    assert found[0] == pytest.approx(1)
    assert 1 > found[1] > found[2]


def test_scripts_write_whole_files_and_read_no_pickles():
    """Through `kvindex_adapters.files`, which refuses what cannot be written before the work."""
    folder = Path(__file__).parents[2] / "benchmarks"
    scripts = {path: path.read_text() for path in folder.rglob("*.py")}
    for name, source in scripts.items():
        assert not re.search(r"torch\.(load|save)\(|\bpickle\b", source), name
        assert not re.search(r"write_text\(json|\.savefig\(", source), name
        for told in re.findall(r'add_argument\(\s*"--(?:json|plot)"(.*)', source):
            assert re.match(r", type=output\(", told), name
    assert sum("type=output(" in source for source in scripts.values()) > 10
