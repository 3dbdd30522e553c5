import dataclasses

import pytest
import torch

import kvindex
from kvindex.core.config import parse_spec
from kvindex.wrappers import MeasureRecall, Sample

GEOMETRY = dict(q_heads=4, kv_heads=2, head_dim=16)


def test_spec_reads_numbers_and_words():
    assert parse_spec("a-b:x=1:y=.5:z=true:w=None:v=host") == (
        "a-b",
        {"x": 1, "y": 0.5, "z": True, "w": None, "v": "host"},
    )


def test_spec_gives_options_and_keywords_override_them():
    index = kvindex.create("pariskv:preset=paper:beta=.05:rho=.1", **GEOMETRY, rho=0.3)
    assert (index.config.beta, index.config.rho) == (0.05, 0.3)


def test_preset_is_overridden_field_by_field():
    index = kvindex.create("pariskv", **GEOMETRY, preset="paper", group="union")
    paris = kvindex.get("pariskv")
    assert index.config == paris.Config(**paris.presets["paper"], group="union")


@pytest.mark.parametrize("name", kvindex.names())
def test_config_is_frozen(name):
    config = kvindex.get(name).Config()
    for field in dataclasses.fields(config):
        with pytest.raises(dataclasses.FrozenInstanceError):
            setattr(config, field.name, 1)


def test_geometry_fills_in_defaults():
    geometry = kvindex.create("exact", **GEOMETRY).geometry
    assert geometry.value_dim == 16
    assert geometry.scale == 0.25
    assert geometry.group_size == 2
    assert geometry.device == torch.device("cpu")


def test_wrappers_follow_after_a_plus():
    index = kvindex.create("exact:group=max_share+sample:share=.5:pool=3", **GEOMETRY)
    assert isinstance(index, Sample)
    assert (index.share, index.pool, index.config.group) == (0.5, 3, "max_share")
    both = kvindex.create("pariskv+sample+recall", **GEOMETRY, preset="paper")
    assert isinstance(both, MeasureRecall)
    assert isinstance(both.inner, Sample)
    paris = kvindex.get("pariskv")
    assert both.config == paris.Config(**paris.presets["paper"])


@pytest.mark.parametrize(
    ("spec", "match"),
    [
        ("exact+smaple", "wrapper: got 'smaple'.*did you mean 'sample'"),
        ("exact+", "wrapper: got ''"),
        ("exact+base", "wrapper: got 'base'"),
        ("exact+sample:shar=.5", "option: got 'shar'.*did you mean 'share'"),
        ("exact+sample:share=2", "share: got 2, allowed"),
        ("exact+sample:inner=2", "option: got 'inner'"),
    ],
)
def test_bad_wrappers_are_named(spec, match):
    with pytest.raises(ValueError, match=match):
        kvindex.create(spec, **GEOMETRY)
