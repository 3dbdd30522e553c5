"""Results do not depend on torch's settings: autocast, default dtype and device, inference mode."""

import itertools
from copy import deepcopy
from functools import partial

import pytest
import torch

import kvindex
from kvindex.layer import AttentionLayer
from kvindex.testing.cases import CASES
from kvindex.testing.contract.contexts import (
    CONTEXTS,
    check_no_context_changes_results,
    default_dtype,
)
from tests.contract import CHECKS
from tests.contract.test_contract import SPECS
from tests.contract.test_faults import WRAPPED
from tests.support.helpers import Case, mostly_slow, slow
from tests.support.sequences import SIZES, Sequence

CASE = Case(q_heads=4, kv_heads=2, head_dim=16, value_dim=8, batch=2, softcap=3.0)


@pytest.mark.parametrize("spec", mostly_slow([*SPECS, *WRAPPED], *kvindex.names(), WRAPPED[0]))
def test_no_index_depends_on_the_context(spec):
    check_no_context_changes_results(partial(CASE.index, spec), CASE)


@pytest.mark.parametrize("context", CONTEXTS)
def test_no_layer_depends_on_the_context(context):
    def outputs():
        layer = AttentionLayer(CASE.index("pariskv"), k=6, **SIZES)
        return [layer.step(*part, valid=None) for part in parts]

    sequence = Sequence.of(CASE, 40)
    parts = [sequence.parts(0, 20), *(sequence.parts(i, i + 1) for i in range(20, 40))]
    want = outputs()
    with CONTEXTS[context]():
        got = outputs()
    for mine, theirs in zip(got, want, strict=True):
        assert torch.equal(mine, theirs)


@pytest.mark.parametrize("codec", ["plain", slow("int4")])
def test_a_layer_goes_in_and_out_of_inference_mode(codec):
    """Modes alternate between steps, reorders, copies and saved states."""

    def life(modes):
        modes = itertools.cycle(modes)
        made = partial(CASE.index, "pariskv", row_codec=codec)
        layers = [AttentionLayer(made(), k=6, **SIZES)]
        for start, stop in [(0, 20), *((i, i + 1) for i in range(20, 60))]:
            with next(modes)():
                if start == 30:
                    layers.append(deepcopy(layers[0]))
                if start == 40:
                    layers.append(AttentionLayer(made(), k=6, **SIZES))
                    layers[2].load_state_dict(layers[0].state_dict())
                if start == 50:
                    layers[0].reorder(torch.tensor([1, 1]))
                parts = sequence.parts(start, stop)
                outputs = [layer.step(*parts, valid=None) for layer in layers]
            yield outputs

    sequence = Sequence.of(CASE, 60)
    want = [*life([torch.no_grad])]
    inside, outside = torch.inference_mode, torch.no_grad
    for modes in ([inside], [inside, outside], [outside, inside, inside]):
        for mine, theirs in zip(life(modes), want, strict=True):
            assert all(map(torch.equal, mine, theirs))


def test_inference_mode_asks_for_no_gradient():
    index, (keys, values) = CASE.index("exact"), CASE.tokens(30)
    with torch.inference_mode():
        index.append(keys.requires_grad_(), values)
        assert torch.is_inference_mode_enabled()
        assert not index.search(CASE.queries().requires_grad_(), k=3).scores.requires_grad
    assert torch.is_grad_enabled()


def test_the_caller_finds_the_context_as_it_was():
    index, tokens, queries = CASE.index("exact"), CASE.tokens(30), CASE.queries()
    with default_dtype(torch.float64), torch.device("meta"), torch.autocast("cpu"):
        index.append(*tokens)
        with pytest.raises(ValueError, match="k: got 0"):
            index.search(queries, k=0)
        assert torch.get_default_dtype() == torch.float64
        assert torch.get_default_device().type == "meta"
        assert torch.is_autocast_enabled("cpu")


class Inside:
    """An index whose calls are all made in a context."""

    def __init__(self, index, entered):
        vars(self).update(index=index, entered=entered)

    def __getattr__(self, name):
        found = getattr(self.index, name)
        if not callable(found):
            return found

        def call(*args, **options):
            with self.entered():
                return found(*args, **options)

        return call

    def __len__(self):
        return len(self.index)


@pytest.mark.slow
@pytest.mark.longest
@pytest.mark.parametrize("name", kvindex.names())
@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
def test_index_keeps_the_contract_in_every_context(check, name):
    for case in CASES:
        for entered in CONTEXTS.values():
            check(lambda c=case, e=entered, **options: Inside(c.index(name, **options), e), case)
