"""Decode steps over latents in an inference engine's pages, compared with attention over the same
pages in plain torch.
"""

import weakref

import pytest
import torch

from kvindex.core.geometry import Geometry
from kvindex_adapters.vllm.options import Options
from kvindex_cuda.pariskv.steps.latents import LatentsStep
from kvindex_cuda.pariskv.steps.paged import unserved
from kvindex_cuda.pariskv.steps.sign_votes import SignVotesStep
from tests.cuda.devices import on_devices, on_devices_slowly
from tests.cuda.pariskv.steps.test_paged import LENGTHS, Engine, assert_close
from tests.support.helpers import mostly_slow, slow

LATENT = dict(kv_heads=1, value_in_key=True)
MANY = dict(q_heads=20, head_dim=128, value_dim=96, **LATENT)
"""Query heads in tiles: the kernels for latents."""

FEW = dict(q_heads=4, head_dim=64, value_dim=48, **LATENT)
"""So few query heads that the first four kernels are those of usual attention."""

LARGE = dict(q_heads=16, head_dim=576, value_dim=512, **LATENT)
"""DeepSeek-V2-Lite. With tensor parallelism, each process has a part of the query heads."""


class Latents(Engine):
    """The caches of an engine whose layers have multi-head latent attention."""

    def __init__(self, device, sizes=MANY, **options):
        self.sizes = sizes
        super().__init__(device, **options)


@on_devices
@pytest.mark.parametrize(
    ("sizes", "tokens", "order"),
    mostly_slow([(MANY, 256, "HND"), (MANY, 512, "packed"), (FEW, 512, "NHD")], (MANY, 256, "HND")),
)
def test_as_many_rows_as_there_are_give_full_attention(sizes, tokens, order, device):
    engine = Latents(device, sizes, tokens=tokens, order=order)
    engine.prefill()
    pairs = list(engine.decode())
    assert_close(pairs)
    assert not pairs[0][0][-1].any()  # an unused place
    kind = LatentsStep if sizes is MANY else SignVotesStep
    assert {type(step) for step, _ in engine.steps._steps.values()} == {kind}
    whole = Latents(device, sizes, tokens=tokens, order=order, dense_below=4096)
    whole.prefill()
    assert_close(whole.decode())


@on_devices
@pytest.mark.parametrize(
    ("sizes", "spec"),
    mostly_slow(
        [
            (sizes, f"pariskv:{spec}")
            for sizes in (MANY, FEW)
            for spec in ("preset=fast", "sign_decoder=mean", "preset=precise")
        ],
        (MANY, "pariskv:preset=fast"),
        (MANY, "pariskv:sign_decoder=mean"),
        (FEW, "pariskv:sign_decoder=mean"),
    ),
)
def test_few_rows_are_those_of_plain_torch(sizes, spec, device):
    engine = Latents(device, sizes, index=spec, k=6)
    engine.prefill()
    assert_close(engine.decode())


@on_devices_slowly
@pytest.mark.parametrize("heads", [16, 2, slow(128)])
def test_sizes_of_models(heads, device):
    """Tensor cores round attention weights to 16 bits, and so are the outputs: to 2^-8 each."""
    sizes = LARGE | dict(q_heads=heads)
    engine = Latents(device, sizes, dtype=torch.bfloat16, order="packed", k=6)
    engine.prefill()
    assert_close(engine.decode(), rtol=2**-7, atol=2**-7)


@on_devices
def test_some_sequences_of_a_batch_get_full_attention(device):
    """They are as long as others that search."""
    engine = Latents(device, k=6)
    engine.prefill()
    whole = [False, True, True, True, False, False]
    assert_close(engine.decode(whole=whole))
    g = engine.geometry
    queries = engine.normal(len(LENGTHS), g.q_heads, g.head_dim)
    searched, full = (engine.expected(0, queries, LENGTHS, some) for some in ((), whole))
    differs = (searched - full).abs().amax(dim=(1, 2)) > 0.01
    assert differs.tolist() == [False, True, False, True, False, False]
    assert_close(engine.decode())  # the next step searches again


@on_devices
@pytest.mark.parametrize("sizes", mostly_slow([MANY, FEW], MANY))
def test_batches_of_all_sizes_take_turns_in_the_same_buffers(sizes, device):
    engine = Latents(device, sizes, k=6)
    engine.prefill()
    for count in (4, 2, 6, 1, 4):
        assert_close(engine.decode(LENGTHS[:count]))


@on_devices
def test_a_step_keeps_no_output(device):
    """Outputs are memory of a CUDA graph, which the next capture can use again."""
    engine = Latents(device, k=6)
    engine.prefill()
    pairs = list(engine.decode())
    outputs = [weakref.ref(output) for output, _ in pairs]
    del pairs
    assert {output() for output in outputs} == {None}


@pytest.mark.parametrize("sizes", [MANY, FEW])
def test_a_smaller_batch_has_the_buffers_of_a_larger_one(sizes):
    """Only what does not depend on the batch is allocated for each step."""
    engine = Latents("cpu", sizes, k=6)

    def places(rows):
        step = engine.steps._step_for(rows)
        owners = vars(step) | vars(step._latents)
        parts = {name: one for name, one in owners.items() if isinstance(one, torch.Tensor)}
        return {name: one.untyped_storage().data_ptr() for name, one in parts.items() if len(one)}

    large, small = places(6), places(3)
    own = {name for name, place in small.items() if place != large[name]}
    assert own <= {"rotation", "levels", "factors"}
    assert small.keys() >= {"list", "_partial"}


@pytest.mark.parametrize(
    ("sizes", "spec", "said"),
    [
        (MANY, "pariskv", "sign_decoder: got 'regression', allowed is 'mean'"),
        (FEW, "pariskv:preset=paper", "coarse: got 'tiered_votes', allowed is 'sign_votes'"),
        (MANY | dict(q_heads=129), "pariskv:preset=fast", "q_heads: got 129"),
        (FEW | dict(value_dim=44), "pariskv:preset=fast", "value_dim: got 44, allowed is a mult"),
        (MANY, "pariskv:preset=fast", None),
        (FEW, "pariskv:preset=fast", None),
        (LARGE, "pariskv:sign_decoder=mean", None),
    ],
)
def test_what_pages_of_latents_do_not_support(sizes, spec, said):
    geometry = Geometry.of(**sizes, dtype=torch.float32, device=torch.device("cpu"))
    why = unserved(Options(index=spec).config, geometry)
    assert why is None if said is None else said in why


def test_rows_of_latents_are_a_fixed_number_on_the_device():
    with pytest.raises(ValueError, match="value_in_key=True with limits, caches or scales"):
        Latents("cpu", index="pariskv:sign_decoder=mean", k="auto")
