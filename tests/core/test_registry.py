"""Indexes and wrappers by name: their options as text, similar names, installed packages."""

import dataclasses
import importlib
import re
import sys
from importlib.metadata import EntryPoint

import pytest
import torch

import kvindex
from kvindex.core.config import parse_spec
from kvindex.registry import option_names, refused
from kvindex.wrappers import MeasureRecall, Sample

GEOMETRY = dict(q_heads=4, kv_heads=2, head_dim=16)


def test_a_name_with_an_underscore_is_unknown_also_after_its_use():
    kvindex.create("faiss-flat", q_heads=2, kv_heads=1, head_dim=8)
    with pytest.raises(ValueError, match="got 'faiss_flat'"):
        kvindex.get("faiss_flat")


def test_spec_reads_numbers_and_words():
    assert parse_spec("a-b:x=1:y=.5:z=true:w=None:v=host") == (
        "a-b",
        {"x": 1, "y": 0.5, "z": True, "w": None, "v": "host"},
    )


STRINGS = [
    *[(name, "row_codec") for name in ("exact", "pariskv")],
    *[
        (name, field.name)
        for name in kvindex.names()
        for field in dataclasses.fields(kvindex.get(name).Config)
        if field.type in (str, "str")
    ],
]


def config_or_message(spec, **options):
    """Create an index. Return its configuration, or the message if an option is not allowed."""
    try:
        return kvindex.create(spec, **GEOMETRY, **options).config
    except ValueError as error:
        return str(error)


@pytest.mark.parametrize("value", ["none", "true", "1"])
@pytest.mark.parametrize(("name", "option"), STRINGS)
def test_a_string_option_in_a_line_is_the_same_as_by_keyword(name, option, value):
    want = config_or_message(name, **{option: value})
    assert config_or_message(f"{name}:{option}={value}") == want


@pytest.mark.parametrize("options", [dict(coarse="none"), dict(sampling="none"), dict(beta=None)])
def test_none_in_a_line_is_a_word_only_for_string_options(options):
    ((option, value),) = options.items()
    index = kvindex.create(f"pariskv:preset=fast:{option}=none", **GEOMETRY)
    assert getattr(index.config, option) == value


def test_a_string_option_of_a_wrapper_stays_a_string():
    with pytest.raises(ValueError, match="rows: got 'none', allowed is one of"):
        kvindex.create("exact+sharded:rows=none", **GEOMETRY)


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
        ("none", "index: got 'none', but full attention has no index; pass index=None"),
        ("exact+smaple", "wrapper: got 'smaple'.*did you mean 'sample'"),
        ("exact+", "wrapper: got ''"),
        ("reuse:rows=3", "index: got 'reuse', which is a wrapper; .* example 'pariskv.reuse'"),
        ("exact+base", "wrapper: got 'base'"),
        ("exact+sample:shar=.5", "option: got 'shar'.*did you mean 'share'"),
        ("exact+sample:share=2", "share: got 2, allowed"),
        ("exact+sample:inner=2", "option: got 'inner'"),
    ],
)
def test_bad_wrappers_are_named(spec, match):
    with pytest.raises(ValueError, match=match):
        kvindex.create(spec, **GEOMETRY)


def test_an_unknown_option_is_told_all_that_there_are():
    with pytest.raises(ValueError, match=r"'page', .*'store'.*did you mean 'store'"):
        kvindex.create("quest:stroe=host", **GEOMETRY)


@pytest.mark.parametrize("spec", ["pariskv:preset=fast,beta=.1", "pariskv:preset=fast, beta=.1"])
def test_a_comma_between_options_is_told_that_a_colon_belongs_there(spec):
    with pytest.raises(
        ValueError, match=r"allowed is 'pariskv:preset=fast:beta=.1', with ':' between"
    ):
        kvindex.create(spec, **GEOMETRY)
    with pytest.raises(ValueError, match=r"'pariskv:beta=.1'"):
        kvindex.create("pariskv,beta=.1", **GEOMETRY)


@pytest.mark.parametrize("spec", ["pariskv:beta=.1:beta=.2", "exact+sample:share=.5:share=.5"])
def test_an_option_that_is_given_twice_is_named(spec):
    with pytest.raises(ValueError, match=r"which gives '(beta|share)' twice"):
        kvindex.create(spec, **GEOMETRY)


def test_names_of_options_are_those_of_the_configuration_and_those_of_every_index():
    names = option_names("pariskv")
    assert {"beta", "preset", "store", "row_codec", "backend"} <= set(names)
    assert not {"head_dim", "dtype", "device", "rope"} & set(names)


# Installed indexes

SOURCE = """
from kvindex.indexes.exact import Exact

class Mine(Exact):
    presets = {"all": {"group": "max_share"}}

number = 3
"""


@pytest.fixture
def install(tmp_path, monkeypatch):
    """Return a function that installs a package of one module: its folder and `.dist-info`."""
    monkeypatch.syspath_prepend(str(tmp_path))

    def install(package, *, source=SOURCE, **names):
        module = package.replace("-", "_")
        (tmp_path / f"{module}.py").write_text(source)
        info = tmp_path / f"{module}-1.0.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {package}\nVersion: 1.0\n")
        lines = [f"{name.replace('_', '-')} = {module}:{value}" for name, value in names.items()]
        (info / "entry_points.txt").write_text("\n".join(["[kvindex.indexes]", *lines]))
        monkeypatch.delitem(sys.modules, module, raising=False)
        # a folder that was listed in the same tick of the clock would not be listed again
        importlib.invalidate_caches()

    yield install
    for path in tmp_path.glob("*.py"):
        sys.modules.pop(path.stem, None)


def test_an_installed_index_is_known_by_its_entry_points_name(install):
    before = kvindex.names()
    install("their-package", their_index="Mine")
    assert kvindex.names() == sorted([*before, "their-index"])
    assert "their_package" not in sys.modules, "names imports nothing"
    index = kvindex.create("their-index:preset=all+sample", **GEOMETRY)
    assert type(index.inner) is kvindex.get("their-index")
    assert index.config.group == "max_share"
    with pytest.raises(ValueError, match="did you mean 'their-index'"):
        kvindex.create("their-indx", **GEOMETRY)


def test_a_name_of_the_folder_stays_its_own(install):
    before = kvindex.names()
    install("their-package", exact="Mine")
    with pytest.warns(UserWarning, match=r"'exact' from their-package \(their_package:Mine\), but"):
        assert kvindex.names() == before
    assert kvindex.get("exact").__module__ == "kvindex.indexes.exact"
    assert list(refused()) == ["exact"]


def test_a_name_of_two_packages_is_refused(install):
    install("one", same="Mine")
    install("other", same="Mine", fine="Mine")
    says = r"'same' from \w+ \(\w+:Mine\) and \w+ \(\w+:Mine\); only one package"
    with pytest.raises(ValueError, match=says):
        kvindex.create("same", **GEOMETRY)
    with pytest.warns(UserWarning, match=says):
        known = kvindex.names()
    assert "same" not in known
    assert "fine" in known


def test_a_name_that_a_line_cannot_hold_is_left_out(monkeypatch):
    points = [EntryPoint("a+b", "there:Mine", "kvindex.indexes")]
    monkeypatch.setattr("kvindex.registry.entry_points", lambda group: points)
    assert "a+b' from an unknown package (there:Mine), allowed is" in refused()["a+b"]


@pytest.mark.parametrize(
    ("source", "value", "says"),
    [
        ("import no_such_thing", "Mine", r"ModuleNotFoundError: No module named 'no_such_thing'"),
        ("1 / 0", "Mine", "ZeroDivisionError"),
        (SOURCE, "Theirs", "AttributeError.*Theirs"),
        (SOURCE, "number", "which is 3; allowed is a class based on BaseIndex"),
    ],
)
def test_a_broken_entry_point_is_named_when_it_is_asked_for(install, source, value, says):
    install("their-package", source=source, broken=value)
    assert "broken" in kvindex.names()
    with pytest.raises(ImportError, match=rf"'broken' from their-package \(.*{value}\).*{says}"):
        kvindex.get("broken")
    assert kvindex.create("exact", **GEOMETRY) is not None


# Classes without a name

PLANES = """
from dataclasses import dataclass
from kvindex.indexes.exact import Exact

@dataclass(frozen=True)
class Config:
    bits: int = 8
    group: str = "mean_share"

class Planes(Exact):
    Config = Config

def function(**options):
    return Planes(**options)
"""


@pytest.fixture
def planes(tmp_path, monkeypatch):
    """A file `planes.py` in a folder that Python searches, and an index class in it."""
    monkeypatch.syspath_prepend(str(tmp_path))
    (tmp_path / "planes.py").write_text(PLANES)
    yield
    sys.modules.pop("planes", None)


@pytest.mark.usefixtures("planes")
def test_a_class_needs_no_name():
    index = kvindex.create("planes:Planes:bits=4+sample:share=.5", **GEOMETRY)
    assert type(index.inner) is kvindex.get("planes:Planes") is sys.modules["planes"].Planes
    assert (index.config.bits, index.share) == (4, 0.5)
    assert kvindex.create("planes:Planes", **GEOMETRY).config.bits == 8
    assert parse_spec("a.b:C.D:x=1") == ("a.b:C.D", {"x": 1})


@pytest.mark.usefixtures("planes")
@pytest.mark.parametrize("name", ["planes", "my.planes", "my-planes"])
def test_an_unknown_name_may_be_that_of_a_file(name):
    with pytest.raises(
        ValueError, match=r"'triattention'\]; a class in a file (.*).py is written"
    ) as (caught):
        kvindex.create(f"{name}:bits=4", **GEOMETRY)
    module = name.replace("-", "_")
    assert f"in a file {module.replace('.', '/')}.py is written '{module}:Class'" in str(
        caught.value
    )
    for near in ("quests", "QUEST", "Quests"):
        with pytest.raises(ValueError, match=rf"got '{near}'.*; did you mean 'quest'\?$"):
            kvindex.create(near, **GEOMETRY)
    with pytest.raises(ValueError, match=r"'triattention'\]$"):
        kvindex.create("8 planes", **GEOMETRY)


@pytest.mark.usefixtures("planes")
@pytest.mark.parametrize(
    ("spec", "kind", "says"),
    [
        ("plains:Planes", ImportError, "got 'plains:Planes', which.*No module named 'plains'"),
        ("planes:Plane", ImportError, "got 'planes:Plane', which.*no attribute 'Plane'"),
        ("planes:function", ImportError, "which is <function.*allowed is a class based on BaseInd"),
        ("planes:Config", ImportError, "allowed is a class based on BaseIndex"),
        ("planes:Planes:Planes", ValueError, "got 'planes:Planes:Planes', allowed is the form"),
        ("planes:Planes:bit=4", ValueError, "option: got 'bit'.*did you mean 'bits'"),
        ("pariskv:fast", ValueError, "got 'pariskv:fast', allowed is the form pariskv:option=val"),
        ("pariskv:preset=fast:", ValueError, "allowed is the form name:option=value"),
    ],
)
def test_a_class_that_cannot_be_used_is_named(spec, kind, says):
    with pytest.raises(kind, match=says):
        kvindex.create(spec, **GEOMETRY)


@pytest.mark.parametrize("name", ["exact", "pariskv", "quest"])
def test_a_missing_size_is_named_and_a_similar_name_suggested(name):
    with pytest.raises(ValueError, match="did you mean 'head_dim'"):
        kvindex.create(name, q_heads=4, kv_heads=2, headdim=16)
    with pytest.raises(ValueError, match="head_dim: got no value"):
        kvindex.create(name, q_heads=4, kv_heads=2)
    with pytest.raises(ValueError, match=r"option: got 'num_heads'.*'head_dim'.*'q_heads'") as told:
        kvindex.create(name, num_heads=4, kv_heads=2, head_dim=16)
    assert not {"'self'", "'options'"} & set(re.findall("'[a-z]+'", str(told.value)))


def test_the_name_of_a_dtype_is_refused_as_a_string():
    with pytest.raises(ValueError, match=r"dtype: got 'float16', allowed is one of \[torch.float3"):
        kvindex.create("exact", **GEOMETRY, dtype="float16")
