"""Sessions and streams enter and leave inference mode without a change of tokens."""

import itertools

import pytest
import torch

from kvindex_adapters.decoder import Decoder
from tests.adapters.decoder.families import ids_of, model_of
from tests.adapters.decoder.test_open_session import FEW, SMALL, asked
from tests.adapters.hf.generation.test_generation import Words
from tests.support.helpers import mostly_slow

INSIDE, OUTSIDE = torch.inference_mode, torch.no_grad


def life(decoder, options, modes, folder):
    """Make all calls of a session, each in the next mode, then stream token by token."""
    modes = itertools.cycle(modes)

    def call(method, *given, **how):
        with next(modes)():
            return method(*given, **how)

    session = call(decoder.session, **options)
    call(decoder.read, ids_of(40), session, chunk=16)
    answers = [call(asked, decoder, session, ids_of(20, seed=3))]
    fork = call(session.fork)
    answers.append(call(asked, decoder, fork, ids_of(9, seed=4)))
    call(session.truncate, 50)
    answers.append(call(asked, decoder, session, ids_of(9, seed=5)))
    call(session.save, folder)
    loaded = call(decoder.session, **options)
    call(loaded.load, folder)
    answers.append(call(asked, decoder, loaded, ids_of(9, seed=5)))
    prompts = [ids_of(30, seed=1), ids_of(22, seed=2)]
    stream = decoder.stream(prompts, max_new_tokens=10, chunk=16, **options)
    while (token := call(next, stream, None)) is not None:
        answers.append(token.tolist())
    return answers


@pytest.fixture(scope="module", params=[FEW, dict(index=None)], ids=["pariskv", "dense"])
def outside(request, tmp_path_factory):
    """A decoder, options of a session, and what all calls outside of inference mode give."""
    decoder = Decoder.of(model_of("llama", **SMALL), Words())
    want = life(decoder, request.param, [OUTSIDE], tmp_path_factory.mktemp("outside") / "none")
    return decoder, request.param, want


MODES = {
    "all": [INSIDE],
    "first": [INSIDE, OUTSIDE],
    "second": [OUTSIDE, INSIDE],
    "two": [INSIDE, INSIDE, OUTSIDE],
}


@pytest.mark.parametrize("modes", mostly_slow(MODES.values(), MODES["two"]), ids=MODES)
def test_calls_may_be_in_inference_mode_or_not(outside, modes, tmp_path):
    decoder, options, want = outside
    assert life(decoder, options, modes, tmp_path / "some") == want
