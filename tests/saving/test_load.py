"""Saved indexes, wrappers and layers are loaded, and continue like the original."""

import subprocess
import sys
from dataclasses import dataclass, field, replace

import pytest
import torch

import kvindex
from kvindex.indexes.exact import Exact
from kvindex.indexes.triattention import Centers
from kvindex.layer import AttentionLayer
from kvindex.testing.cases import rope
from kvindex.wrappers import Wrapper
from tests.contract.test_state import CASE, SPECS, assert_equal, assert_same_state, do, life, made
from tests.support.helpers import mostly_slow
from tests.support.sequences import SIZES, Sequence


@pytest.mark.parametrize(
    "spec",
    mostly_slow(
        [*SPECS, "sentencekv:punctuation=3", "exact+vattention"],
        *(*kvindex.names(), "h2o+recall", "exact+vattention"),
    ),
)
def test_an_index_goes_on_as_the_one_that_was_saved(tmp_path, spec):
    index, deeds = made(spec), [*enumerate(life(0))]
    for deed in deeds[:9]:
        do(index, *deed)
    index.save(tmp_path / "saved")
    other = kvindex.load(tmp_path / "saved", backend="torch")
    assert type(other) is type(index)
    assert other.config == index.config
    assert other.recipe() == index.recipe()
    assert_same_state(index, other)
    for deed in deeds[9:]:
        assert_equal(do(index, *deed), do(other, *deed))
    assert_same_state(index, other)


def test_options_of_all_kinds_come_back(tmp_path):
    mean, size = torch.randn(4, 8, dtype=torch.complex64), torch.rand(4, 8)
    index = made("triattention", centers=Centers(mean, size), budget=9, rope=rope(16).double())
    index.save(tmp_path / "centers")
    other = kvindex.load(tmp_path / "centers")
    assert torch.equal(other.config.centers.mean, mean)
    assert torch.equal(other.geometry.rope, index.geometry.rope)
    case = replace(CASE, dtype=torch.bfloat16, softcap=2.5)
    index = made("pariskv:beta=.1:preset=paper+reuse:tau=.25", case, row_codec="fp8", scale=1 / 3)
    index.append(*case.tokens(20))
    index.save(tmp_path / "line")
    other = kvindex.load(tmp_path / "line", store="host")
    assert (other.tau, other.config, other.row_bytes) == (0.25, index.config, index.row_bytes)
    assert other.geometry == index.geometry
    assert_same_state(index, other)


@dataclass(frozen=True)
class OddConfig:
    """A configuration with an option that is no number, text or tensor."""

    odd: dict[str, int] = field(default_factory=dict)


def test_an_option_that_no_folder_can_hold_is_refused_in_words(tmp_path):
    class Odd(Exact):
        Config = OddConfig

    with pytest.raises(TypeError, match=r"recipe: got \{'a': 1\}, allowed are numbers, text"):
        CASE.made(Odd, odd={"a": 1}).save(tmp_path / "saved")
    assert list(tmp_path.iterdir()) == []


def test_it_is_loaded_onto_another_backend(tmp_path):
    pytest.importorskip("numba")
    index = made("pariskv")
    index.append(*CASE.tokens(600))
    index.save(tmp_path / "saved")
    other = kvindex.load(tmp_path / "saved", backend="cpu")
    assert other.backend == "cpu"
    assert_same_state(index, other)
    queries = CASE.queries(1)
    assert torch.equal(index.search(queries, k=9).ids, other.search(queries, k=9).ids)


@pytest.mark.slow
def test_another_process_finds_the_same(tmp_path):
    index = made("quest")
    index.append(*CASE.tokens(60))
    index.save(tmp_path / "saved")
    code = (
        "import sys, kvindex; from tests.contract.test_state import CASE;"
        "index = kvindex.load(sys.argv[1], backend='torch');"
        "print(index.search(CASE.queries(1), k=5).ids.tolist())"
    )
    command = [sys.executable, "-c", f"import sys; sys.path[:0] = {sys.path!r}; {code}"]
    done = subprocess.run([*command, tmp_path / "saved"], capture_output=True, text=True)
    assert done.stdout.strip() == str(index.search(CASE.queries(1), k=5).ids.tolist()), done.stderr


class Own(Exact):
    """An index without a name."""


class OwnWrapper(Wrapper):
    """A wrapper without a name."""


def test_an_index_without_a_name_is_loaded_into_one_that_is_empty(tmp_path):
    for number, make in enumerate(
        (lambda: CASE.made(Own), lambda: OwnWrapper(made("exact")), lambda: Wrapper(made("exact")))
    ):
        index, folder = make(), tmp_path / str(number)
        index.append(*CASE.tokens(9))
        index.save(folder)
        with pytest.raises(ValueError, match=r"index: got the class '.*', which is not registered"):
            kvindex.load(folder)
        empty = make()
        assert kvindex.load(folder, into=empty) is empty
        assert_same_state(index, empty)
        with pytest.raises(ValueError, match="state: got an index with 9 tokens"):
            kvindex.load(folder, into=empty)


def test_it_is_not_loaded_into_another(tmp_path):
    index = made("exact")
    index.append(*CASE.tokens(9))
    index.save(tmp_path / "saved")
    for other, match in [
        (made("pariskv"), "index = 'Exact', allowed is 'ParisKV'"),
        (made("exact:group=union"), "config.group = 'mean_share', allowed is 'union'"),
        (made("exact", replace(CASE, head_dim=32)), "geometry.head_dim = 16, allowed is 32"),
        (made("exact", row_codec="int8"), "row_codec = 'plain', allowed is 'int8'"),
        (AttentionLayer(made("exact")), "allowed is 64|allowed is None"),
    ]:
        with pytest.raises(ValueError, match=match):
            kvindex.load(tmp_path / "saved", into=other)
        assert len(other) == 0
    with pytest.raises(
        TypeError, match="into: got int, which does not support the protocol KeepsState"
    ):
        kvindex.load(tmp_path / "saved", into=3)
    with pytest.raises(ValueError, match="into: got an object together with device, store"):
        kvindex.load(tmp_path / "saved", into=made("exact"), store="host")


class OwnLayer(AttentionLayer):
    """A layer class of a user."""


@pytest.mark.parametrize("spec", ["pariskv", "exact+recall", "h2o"])
def test_a_layer_goes_on_as_the_one_that_was_saved(tmp_path, spec):
    sizes = {**SIZES, "dense_below": 0, "update_phase": 0.3, "search_up_to": 2, "k": 7}
    layer, sequence = AttentionLayer(made(spec), **sizes), Sequence.of(CASE, 60, [3, 0])
    for start, stop in [(0, 12), *((i, i + 1) for i in range(12, 40))]:
        sequence.feed(layer, start, stop)
    layer.save(tmp_path / "saved")
    other = kvindex.load(tmp_path / "saved", backend="torch")
    assert other.recipe() == layer.recipe()
    assert {name: other.recipe()["options"][name] for name in sizes} == sizes
    for token in range(40, 60):
        outputs = [sequence.feed(one, token, token + 1) for one in (layer, other)]
        assert torch.equal(*outputs)
    assert_same_state(layer, other)


def test_a_layer_of_another_class_is_loaded_into_one(tmp_path):
    layer = OwnLayer(made("exact"), **SIZES)
    Sequence.of(CASE, 20).feed(layer, 0, 20)
    layer.save(tmp_path / "saved")
    with pytest.raises(ValueError, match=r"a layer of class '.*:OwnLayer', allowed"):
        kvindex.load(tmp_path / "saved")
    other = kvindex.load(tmp_path / "saved", into=OwnLayer(made("exact"), **SIZES))
    assert_same_state(layer, other)
