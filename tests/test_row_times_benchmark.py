"""The times of rows as codes, but for the clock."""

import pytest
import torch

from benchmarks import row_times
from kvindex.core.geometry import Geometry
from kvindex_cuda.memory.device_store import DeviceStore
from kvindex_cuda.pariskv.step import Step
from tests.cuda import emulator

pytestmark = pytest.mark.skipif(not emulator.available(), reason="no g++ to emulate kernels with")


def test_attention_to_rows_of_every_codec_is_timed(monkeypatch):
    monkeypatch.setattr(row_times, "STORES", {"device": DeviceStore})
    monkeypatch.setattr(row_times, "K", 8)
    monkeypatch.setattr(row_times, "NEAR", 3)
    monkeypatch.setattr(row_times, "PIECE", 200)
    attend, codecs = Step.attend, []

    def attended(step, queries, state):
        codecs.append(state.codec)
        assert step.ids.max() < 300
        output = attend(step, queries, state)
        assert output.isfinite().all()
        return output

    monkeypatch.setattr(Step, "attend", attended)
    geometry = Geometry.of(q_heads=2, kv_heads=1, head_dim=64, dtype=torch.bfloat16)

    def timed(run, layers):
        run()
        return {"median_us": float(layers)}

    with emulator.emulated():
        found = row_times.attend(geometry, 300, 2, timed)
    assert found == {name: {"device": {"median_us": 2.0}} for name in ("plain", "int8", "fp8")}
    assert codecs == ["plain", "plain", "int8", "int8", "fp8", "fp8"]
