"""What the drift study measures: shifts of the size they say, recall that can be 1 and can fail."""

import itertools
import json
import re
from pathlib import Path

import pytest
import torch
from rich.progress import Progress

from benchmarks import drift
from benchmarks.drifting import kept, measure, shifts, show, systems
from kvindex_adapters.evaluate.capture import Captured

ROOT = Path(__file__).parents[1]
PROMPT, WRITTEN = 400, 200


def layer(seed=0, later=0.0):
    """Two KV heads read by two query heads each; the keys after the prompt are moved."""
    draw = torch.Generator().manual_seed(seed)
    keys = torch.randn(2, PROMPT + WRITTEN, 16, generator=draw)
    keys[:, PROMPT:] += later
    return Captured(keys, torch.randn(4, WRITTEN, 16, generator=draw), 0.25, None)


def test_captured_layers_are_kept_and_a_pickle_is_refused(tmp_path):
    layers = [layer(0), Captured(*(t.bfloat16() for t in (layer(1).keys, layer(1).queries)), 2, 5)]
    kept.save(layers, tmp_path / "a.safetensors")
    for was, now in zip(layers, kept.load(tmp_path / "a.safetensors"), strict=True):
        assert torch.equal(was.keys, now.keys)
        assert torch.equal(was.queries, now.queries)
        assert (was.scale, was.softcap) == (now.scale, now.softcap)
    torch.save(layers, tmp_path / "b.safetensors")
    with pytest.raises(ValueError, match=r"keep: got '.*', allowed is a file that this script"):
        kept.load(tmp_path / "b.safetensors")


def exact(one, **options):
    return systems.System("exact", lambda _: systems.Indexed("exact", one), **options)


def pq(one):
    return systems.Quantized(subspace=8)


@pytest.mark.parametrize("options", [{}, dict(rebuilt=True), dict(rescored=True)], ids=str)
def test_exact_search_finds_everything_whatever_shifts(options):
    one = layer()
    found, size = measure.along(one, exact(one, **options), [400, 450, 536], 10)
    assert torch.stack(found).eq(1).all()
    assert found[0].shape == (4,)
    assert size["kept"] == 0
    moved = measure.shifted(one, exact(one, **options), 10, 150)
    assert torch.stack(list(moved.values())).eq(1).all()
    sizes = [(kind, size) for kind, (_, sizes, _) in shifts.SHIFTS.items() for size in sizes]
    assert list(moved) == sizes


def test_recall_can_fail():
    one = layer()
    system = exact(one)
    searcher = system.make(one)
    searcher.add(one.keys[:, measure.SINK : 400].flip(1))  # ids that mean other keys
    found = system.recall(searcher, one.keys[:, measure.SINK : 400], one.queries[:, :8], 10)
    assert found.mean() < 0.2


def test_candidates_are_scored_again_but_no_more_are_found_than_there_are():
    one = layer()
    keys, queries = one.keys[:, measure.SINK : 400], one.queries[:, :8]
    options = {"whole": {}, "candidates": dict(rescored=True)}
    shares = {}
    for stage, option in options.items():
        system = systems.System("PQ", pq, **option)
        searcher = system.make(one)
        searcher.add(keys)
        shares[stage] = float(system.recall(searcher, keys, queries, 10).mean())
    assert 0 < shares["whole"] < shares["candidates"] < 1


def test_what_learns_from_the_prompt_alone_falls_behind_what_is_rebuilt():
    one = layer(later=3.0)
    stale, fresh = (
        measure.along(one, systems.System("PQ", pq, rebuilt=rebuilt), [400, 536], 50)[0]
        for rebuilt in (False, True)
    )
    assert torch.equal(stale[0], fresh[0])
    assert stale[1].mean() < fresh[1].mean() - 0.05


@pytest.mark.parametrize("size", [1.0, 2.0])
def test_shifts_do_what_they_say(size):
    learned, keys = layer().keys, layer(seed=1).keys

    def draw():
        return torch.Generator().manual_seed(0)

    norms = (learned - learned.mean(1, keepdim=True)).norm(dim=-1).mean(1)
    moved = shifts.mean_shift(keys, learned, size, draw()) - keys
    torch.testing.assert_close(moved.norm(dim=-1), (size * norms)[:, None].expand(-1, 600))
    middle = learned.mean(1, keepdim=True)
    scaled = (shifts.covariance_shift(keys, learned, size, draw()) - middle) / (keys - middle)
    torch.testing.assert_close(scaled, scaled[:, :1].expand_as(scaled), rtol=1e-2, atol=1e-3)
    assert scaled.min() > 0
    tails = (shifts.tail_shift(keys, learned, size, draw()) - middle).norm(dim=-1)
    ratio = tails / (keys - middle).norm(dim=-1)
    # the median of χ²₃ is 2.366: half of the keys are scaled by more than (3/2.366)^(size / 2)
    assert abs(float((ratio > (3 / 2.366) ** (size / 2)).float().mean()) - 0.5) < 0.06  # 4 σ
    for change, _, _ in shifts.SHIFTS.values():
        still = change(keys, learned, 0.0, draw())
        torch.testing.assert_close(still, keys, atol=1e-5, rtol=1e-5)


def test_the_study_names_every_system_and_draws(tmp_path):
    def few(one):
        return systems.Quantized(subspace=8)

    compared = [
        systems.System("PQ", few),
        systems.System("PQ", few, rebuilt=True, rescored=True, shifts=False),
        systems.System("fast", lambda one: systems.Indexed("pariskv:preset=fast", one)),
    ]
    runs = {"a": [layer(0), layer(1)], "b": [layer(2), layer(3)]}
    with Progress(disable=True) as progress:
        cells, sizes = drift.study(runs, compared, [400, 450, 500], 10, progress)
    assert set(sizes) == {"PQ", "fast"}
    points = [("a", 3), ("b", 3), ("mean", 4), ("covariance", 4), ("tails", 4)]
    for kind, count in points:
        line = show.lines(cells, kind)["fast", "whole", "prompt"]
        assert len(line) == count
        assert all(0 < share <= 1 for share in line.values())
    assert len(show.lines(cells, "a")["PQ", "candidates", "all keys"]) == 3
    keys = [(c["system"], c["stage"], c["learns_from"], c["kind"], c["at"]) for c in cells]
    assert all(a != b for a, b in itertools.combinations(keys, 2))
    json.dumps(cells)
    show.show(cells, 10)
    pytest.importorskip("matplotlib")
    show.plot(cells, sizes, 10, tmp_path / "drift.png")
    assert (tmp_path / "drift.png").stat().st_size > 10_000


def test_figures_in_the_pages_text_are_in_the_results():
    page = (ROOT / "docs/drift.md").read_text()
    result = json.loads((ROOT / "benchmarks/results/drift.json").read_text())
    before, _, after = re.split(r"<!-- drift:(?:begin|end) -->\n", page)
    shares = {f"{one['recall']:.3f}"[1:] for one in result["cells"]}
    named = re.findall(r"(?<!\d)\.\d{3}(?!\d)", before + after)
    assert named
    assert set(named) <= shares
