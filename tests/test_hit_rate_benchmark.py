"""The cache that benchmarks/hit_rate.py plays, against the kernels' own; and what it writes."""

import json
from dataclasses import MISSING, fields
from itertools import count

import pytest
import torch

import kvindex
from benchmarks import hit_rate
from benchmarks.hit_rate import found, rates, selected
from benchmarks.tabling.hits import hit_rate as table_of
from kvindex.core.geometry import Geometry
from kvindex.core.protocol import Hits
from kvindex_adapters.evaluate.capture import Captured
from kvindex_cuda.memory.layout import Layout
from kvindex_cuda.memory.row_cache import RowCache
from kvindex_cuda.pariskv.base_step import State
from kvindex_cuda.pariskv.step import Step
from tests.adapters.tiny import build
from tests.cuda import emulator


def one(*steps, rows=16):
    """Of one cache: rows found in each step."""
    return [found(torch.tensor([[step] for step in steps]).numpy(), rows)[:, 0].tolist()]


def test_a_row_is_found_once_it_was_used():
    assert one([1, 2], [2, 3], [1, 3]) == [[0, 1, 2]]


def test_a_set_gives_up_its_oldest_row():
    ids = range(20_000)
    same = [i for i in ids if (i * 2654435761 & 0xFFFFFFFF) >> 12 & 3 == 0][:6]  # one set of 4
    a, b, c, d, e, _ = same
    steps = [[a, -1], [b, -1], [c, d], [a, -1], [e, -1], [b, -1]]
    assert one(*steps) == [[0, 0, 0, 1, 0, 0]]
    assert one(same[:5], same[:5]) == [[0, 4]]  # all four serve the step


def test_the_second_half_of_each_layer_counts():
    first = torch.tensor([[[1, 2]], [[1, 2]], [[1, 9]], [[1, 2]]])
    assert rates(torch.stack([first, first + 4 * torch.arange(4)[:, None, None]]), 64) == [0.75, 0]


@pytest.mark.skipif(not emulator.available(), reason="no g++ to emulate with")
@pytest.mark.parametrize("rows", [4, 16, 64, 256])
def test_it_finds_what_the_kernel_finds(rows):
    draw = torch.Generator().manual_seed(rows)
    steps, groups, k, blocks = 40, 3, 37, 1024
    order = torch.rand(steps, groups, 300, generator=draw).argsort(-1)
    ids = order[..., :k] * 977 % (256 * blocks)
    ids[::3, 1, -4:] = -1
    geometry = Geometry.of(q_heads=groups, kv_heads=groups, head_dim=8)
    step = Step(geometry, Layout(8, 3), batch=1, k=k, most=1)
    assert 8 * step.splits >= k  # a warp for each row, and the emulator runs one after another
    block = torch.zeros(groups, 256, 16)  # that all addresses lead to
    cache = RowCache(groups, 64, torch.device("cpu"), capacity=rows)
    nothing = torch.zeros(1, dtype=torch.int64)
    needed = {field.name: nothing for field in fields(State) if field.default is MISSING}
    state = State(
        **needed
        | dict(near=torch.zeros(1, groups, 1, 16), shown=nothing.byte(), row_bytes=64)
        | dict(rows=torch.full((1, blocks), block.data_ptr()), cache=cache)
    )
    got, queries = [], torch.zeros(1, groups, 8)
    with emulator.emulated():
        for now in ids:
            before = cache.counts.clone()
            step.attend(queries, state, Hits(now[None], torch.zeros(1, groups, k)))
            asked, hits = (cache.counts - before).unbind(1)
            assert torch.equal(asked, (now >= 0).sum(1).int())
            got.append(hits.tolist())
    assert cache.clocks.tolist() == [steps] * groups
    assert found(ids.numpy(), rows).tolist() == got
    assert max(map(max, got)) > 0


def layer(count=300, steps=7):
    draw = torch.Generator().manual_seed(0)
    keys = torch.randn(2, count, 64, generator=draw)
    return Captured(keys, torch.randn(4, steps, 64, generator=draw), 0.125, None)


def test_steps_searched_at_once_select_what_each_selects(monkeypatch):
    one = layer()
    index = kvindex.create("pariskv", q_heads=4, kv_heads=2, head_dim=64)
    index.append(one.keys[None, :, :-7], one.keys[None, :, :-7])
    want = [index.search(one.queries[None, :, t], k=9).ids[0] for t in range(7)]
    monkeypatch.setattr(hit_rate, "PIECE", 3 * 4 * 300)
    assert torch.equal(selected(one, "pariskv", 9), torch.stack(want))


@pytest.mark.parametrize("spec", ["sentencekv", "exact+reuse"])
def test_what_follows_the_steps_is_refused(spec):
    with pytest.raises(ValueError, match=r"index: got .* serves many queries at once"):
        selected(layer(), spec, 9)


def test_a_result_is_written_after_each_text(tmp_path, monkeypatch):
    def tokenizer(*_, **__):
        return {"input_ids": [i % 50 + 3 for i in range(90)]}

    machine = dict(cores=1, processor="p", torch="2", transformers="5")
    monkeypatch.setattr(hit_rate, "loaded", lambda given: (build("llama"), tokenizer))
    described = dict(model="m", lora=None, machine=machine)
    monkeypatch.setattr(hit_rate, "described", lambda given: described)
    texts, out = [tmp_path / name for name in ("a.txt", "b.txt")], tmp_path / "hit_rate.json"
    for text in texts:
        text.write_text("x")
    command = ["hit_rate", "--text", *map(str, texts), "--tokens", "80", "--written", "6"]
    command += ["--k", "5", "--rows", "16", "4096", "--json", str(out), "--index", "exact"]

    def measured(*more):
        monkeypatch.setattr("sys.argv", [*command, *more])
        hit_rate.main()
        return json.loads(out.read_text())

    result = measured()
    assert [cell["text"] for cell in result["cells"]] == ["a", "b"]
    assert result["not_begun"] == []
    small, large = result["cells"][0]["caches"]
    assert (small["rows"], large["rows"]) == (16, 4096)
    assert small["hit_rate"] < large["hit_rate"] <= 1
    assert len(large["layers"]) > 1
    assert large["worst_layer"] == min(large["layers"])
    page = table_of(result)
    assert page.count("| 80 | 4,096 |") == 2
    assert f"| {large['hit_rate']:.2f} |" in page
    assert "By layer" in page
    now = count(step=40)
    monkeypatch.setattr(hit_rate.time, "monotonic", lambda: float(next(now)))
    cut = measured("--seconds", "60")  # asked after 40 s, and after more
    assert [cell["text"] for cell in cut["cells"]] == ["a"]
    assert cut["not_begun"] == [{"text": "b", "tokens": 80}]


def run_of(*cells, **other):
    about = dict(model="m", lora=None, index="pariskv", k=100, steps=256, machine={"gpu": "g"})
    some = [dict(text=text, tokens=tokens, caches=[]) for text, tokens in cells]
    return {**about, "cells": some, "not_begun": [], **other}


def test_a_run_gets_the_texts_that_it_lacks_from_another():
    late = [dict(text="b", tokens=9), dict(text="c", tokens=5)]
    first = run_of(("a", 5), ("b", 5), not_begun=late)
    found = hit_rate.joined(first, run_of(("b", 9), ("a", 5), machine={"gpu": "g", "cores": 2}))
    assert [(cell["text"], cell["tokens"]) for cell in found["cells"]] == [
        *[("a", 5), ("b", 5), ("b", 9)]
    ]
    assert found["not_begun"] == late[1:]
    assert found["joined"] == [{"cells": late[:1], "machine": {"gpu": "g", "cores": 2}}]
    assert first["not_begun"] == late


@pytest.mark.parametrize(
    "other",
    [
        run_of(("b", 5), k=50),
        run_of(("b", 5), machine={"gpu": "h"}),
        run_of(("b", 5), cells=[dict(text="b", tokens=5, caches=[{"rows": 64}])]),
        run_of(("b", 5), joined=[]),
        run_of(("a", 5)),
    ],
    ids=["k", "machine", "slots", "joined", "held"],
)
def test_a_run_of_something_else_or_of_nothing_more_is_not_joined(other):
    with pytest.raises(ValueError, match="join: got"):
        hit_rate.joined(run_of(("a", 5)), other)


@pytest.mark.parametrize("given", [[], ["--text", "a", "--join", "b"], ["--join", "b"]], ids=str)
def test_either_texts_are_read_or_a_run_is_joined(given, capsys):
    with pytest.raises(SystemExit):
        hit_rate.arguments(given)
    assert "allowed is" in capsys.readouterr().err
