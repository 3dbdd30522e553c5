"""Counters of decode steps, and how they come from worker processes to vLLM's metrics."""

from types import SimpleNamespace

import numpy as np
import pytest

from kvindex_adapters.vllm import metrics, reports
from kvindex_adapters.vllm.attention import PagedAttention
from kvindex_adapters.vllm.costs import Limit
from kvindex_adapters.vllm.metrics import Steps
from kvindex_adapters.vllm.options import Options


@pytest.mark.parametrize("sink", [0, 64, 256])
@pytest.mark.parametrize("local_window", [0, 200, 256])
def test_steps_are_counted_as_attention_computes_them(sink, local_window):
    options = Options(sink=sink, local_window=local_window, k=300)
    limit = Limit(600)
    attention = SimpleNamespace(options=options, limit=limit)
    lengths = [1, 255, 256, 599, 600, 712, 800, 967, 968, 5000]
    searched = dense = read = 0
    for length in lengths:
        indexed = PagedAttention.searched(attention, length)
        searched, dense = searched + bool(indexed), dense + (not indexed)
        found = min(300, indexed - sink)
        read += found + sink + length - indexed if indexed else length
    assert searched
    assert dense
    expected = Steps(searched, dense, read, sum(lengths))
    assert Steps.of(lengths, options, limit) == expected
    whole = Steps.of(lengths, options, limit, search=False)
    assert whole == Steps(0, 10, sum(lengths), sum(lengths))
    assert Steps.of(np.array([], dtype=np.int64), options, limit) == Steps(0, 0, 0, 0)


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.delenv(metrics.FOLDER, raising=False)
    monkeypatch.setenv(reports.FOLDER, str(tmp_path))
    return tmp_path


def collected(folder):
    from prometheus_client.multiprocess import MultiProcessCollector

    found = MultiProcessCollector(None, path=str(folder)).collect()
    return {
        s.name: s.value for metric in found for s in metric.samples if s.labels["engine"] == "1"
    }


def test_counters_are_read_by_another_process(folder, monkeypatch):
    pytest.importorskip("prometheus_client")
    counters = metrics.Counters.open(1)
    counters.add(Steps(1, 2, 30, 400))
    counters.add(Steps(1, 0, 5, 6))
    assert collected(folder) == {
        "vllm:kvindex_searched_steps_total": 2,
        "vllm:kvindex_dense_steps_total": 2,
        "vllm:kvindex_rows_read_total": 35,
        "vllm:kvindex_rows_stored_total": 406,
    }
    monkeypatch.setattr(metrics.os, "getpid", lambda: 5)
    metrics.Counters.open(1).add(Steps(1, 2, 30, 400))  # of a second worker
    metrics.Counters.open(0).add(Steps(1, 2, 30, 400))  # of another engine
    assert collected(folder)["vllm:kvindex_rows_stored_total"] == 806


def test_lookups_in_the_row_cache_are_counted_if_there_is_one(folder):
    pytest.importorskip("prometheus_client")
    counters = metrics.Counters.open(1, lookups=True)
    counters.add_lookups(0, 0)
    found = collected(folder)
    assert len(found) == 6
    assert found["vllm:kvindex_rows_looked_up_total"] == 0
    counters.add_lookups(10, 7)
    counters.add_lookups(5, 5)
    counters.add(Steps(1, 0, 5, 6))
    found = collected(folder)
    assert found["vllm:kvindex_rows_looked_up_total"] == 15
    assert found["vllm:kvindex_rows_cached_total"] == 12
    assert found["vllm:kvindex_rows_read_total"] == 5


def test_the_folder_of_vllm_comes_first(folder, tmp_path, monkeypatch):
    pytest.importorskip("prometheus_client")
    own = tmp_path / "own"
    own.mkdir()
    monkeypatch.setenv(metrics.FOLDER, str(own))
    metrics.Counters.open(1).add(Steps(1, 0, 1, 1))
    assert not list(folder.glob("*.db"))
    assert collected(own)["vllm:kvindex_searched_steps_total"] == 1


def test_nobody_to_read_them(folder, monkeypatch):
    monkeypatch.delenv(reports.FOLDER)
    assert metrics.Counters.open(0) is None


def test_an_engine_counts_its_steps(searching):
    from prometheus_client import REGISTRY
    from vllm.v1.metrics.reader import get_metrics_snapshot

    from tests.vllm.conftest import prompt, tokens

    def values():
        names = [f"{name}_total" for name in metrics.COUNTERS]
        return np.array([REGISTRY.get_sample_value(name, {"engine": "0"}) for name in names])

    before = values()
    tokens(searching, [prompt(20, 1), prompt(700, 2)], count=11)
    searched, dense, read, stored = values() - before
    # the first of 11 tokens comes from the prompt; 512 + 4 + 16 tokens are indexed, all are read
    assert (searched, dense) == (10, 10)
    assert read == stored == sum(range(701, 711)) + sum(range(21, 31))
    found = {one.name: one.value for one in get_metrics_snapshot() if one.name in metrics.COUNTERS}
    assert list(found.values()) == values().tolist()
