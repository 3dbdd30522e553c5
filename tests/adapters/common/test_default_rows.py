"""Layers, adapters and commands retrieve the same number of rows by default."""

import dataclasses
import inspect

import pytest

from kvindex.layer import AttentionLayer
from kvindex.layer.arguments import DEFAULT_K
from kvindex_adapters import hf
from kvindex_adapters.cli import chat, compare, demo, generate
from kvindex_adapters.common.layer_options import LayerOptions
from kvindex_adapters.evaluate import fidelity, reuse_threshold
from kvindex_adapters.vllm.options import Options


@pytest.mark.parametrize(
    "call",
    [
        AttentionLayer.__init__,
        LayerOptions.__init__,
        hf.attach,
        hf.attach_batch,
        hf.generate,
        fidelity.teacher_forced,
        reuse_threshold.calibrate_tau,
        chat.chat,
        demo.demo,
        generate.generate,
    ],
)
def test_default_number_of_rows(call):
    assert inspect.signature(call).parameters["k"].default == DEFAULT_K


def test_default_number_of_rows_of_options():
    assert {field.name: field.default for field in dataclasses.fields(Options)}["k"] == DEFAULT_K
    assert str(DEFAULT_K) == compare.K
