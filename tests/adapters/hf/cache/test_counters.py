"""While a model generates, another thread reads counters: no call fails, all numbers are right."""

import sys
import threading
from contextlib import contextmanager

import pytest
import torch

import kvindex_adapters.hf as kvhf
from kvindex.layer import AttentionLayer
from kvindex.layer.updates import Updates
from kvindex_adapters.decoder import Decoder
from kvindex_adapters.hf.batching.state import Batching
from tests.adapters.decoder.families import ids_of, model_of
from tests.adapters.hf.batching.test_batching import EXACT, batch, prompts
from tests.adapters.hf.generation.test_generation import Words
from tests.adapters.tiny import build, prompt, steps
from tests.cuda.graphs import WholeGraph, recorded
from tests.support.captured import Captured
from tests.support.helpers import mostly_slow, slow

SIZES = dict(k=500, sink=4, local_window=4, update_every=3, dense_below=0)
"""Rows move from the window into the index at every third token."""
GREEDY = dict(max_new_tokens=40, do_sample=False)


@contextmanager
def asked_all_the_time(*calls):
    """Call functions in turn on another thread. Yield a list of results for each of them."""
    found, done, failed = [[] for _ in calls], threading.Event(), []

    def ask():
        try:
            while not done.is_set():
                for call, results in zip(calls, found, strict=True):
                    results.append(call())
        except BaseException as error:
            failed.append(error)

    interval, thread = sys.getswitchinterval(), threading.Thread(target=ask)
    sys.setswitchinterval(1e-5)  # switch threads as often as possible
    thread.start()
    try:
        yield found
    finally:
        done.set()
        thread.join()
        sys.setswitchinterval(interval)
    assert not failed, failed
    assert all(len(results) > 2 for results in found)


def assert_grows(numbers, least, most):
    assert list(numbers) == sorted(numbers)
    assert least <= numbers[0]
    assert numbers[-1] <= most


CASES = {
    "exact": ("llama", dict(index="exact")),
    "pariskv": ("llama", dict(index="pariskv")),
    "learns": ("llama", dict(index="ctkvr")),
    "dense layer": ("llama", dict(index="exact", dense_layers=(0,))),
    "windows": ("qwen3", dict(index="exact")),
}


@pytest.mark.parametrize("case", mostly_slow(CASES, "pariskv"))
def test_a_report_never_meets_a_step(case):
    family, options = CASES[case]
    model, inputs = build(family, eos_token_id=None), prompt(1, 40)
    with kvhf.attach(model, **SIZES, **options) as cache:
        expected = model.generate(**inputs, past_key_values=cache, **GREEDY)
        quiet = cache.report()
    for _ in range(3):
        with kvhf.attach(model, **SIZES, **options) as cache:
            with asked_all_the_time(
                cache.report, cache.get_seq_length, lambda: (repr(cache), str(cache.report()))
            ) as (reports, lengths, _):
                out = model.generate(**inputs, past_key_values=cache, **GREEDY)
            assert torch.equal(out, expected)
            assert cache.report() == quiet
        assert_grows([one.tokens for one in reports], 0, 79)
        assert_grows([one.steps for one in reports], 0, 39)
        assert_grows([one.bytes_fetched for one in reports], 0, quiet.bytes_fetched)
        assert_grows(lengths, 0, 79)


@pytest.mark.slow
def test_a_report_never_meets_a_replay():
    model, inputs = build("qwen3", eos_token_id=None), prompt(1, 40)
    sizes = {**SIZES, "update_every": 12}
    with recorded(WholeGraph) as graphs:
        with kvhf.attach(model, index=Captured, **sizes) as cache:
            expected = model.generate(**inputs, past_key_values=cache, **GREEDY)
            quiet = cache.report()
        with kvhf.attach(model, index=Captured, **sizes) as cache:
            with asked_all_the_time(cache.report, cache.get_seq_length) as (reports, lengths):
                out = model.generate(**inputs, past_key_values=cache, **GREEDY)
            assert torch.equal(out, expected)
            assert cache.report() == quiet
        assert graphs.replays > 20
    assert_grows([one.tokens for one in reports], 0, 79)
    assert_grows(lengths, 0, 79)


@pytest.mark.parametrize("options", [slow({}), dict(attach_options={"dense_layers": (0,)})])
def test_a_session_is_asked_while_it_generates(options):
    decoder, ids = Decoder.of(model_of("llama", num_hidden_layers=2), Words()), ids_of(40)
    sizes = {name: size for name, size in SIZES.items() if name != "k"}
    options = {"attach_options": {**sizes, **options.get("attach_options", {})}}
    session = decoder.session(index="exact", k=500, **options)
    expected = decoder.generate(ids, session=session, max_new_tokens=40).answer_ids
    other = decoder.session(index="exact", k=500, **options)
    with asked_all_the_time(other.report, lambda: other.length) as (reports, lengths):
        assert torch.equal(
            decoder.generate(ids, session=other, max_new_tokens=40).answer_ids, expected
        )
    assert other.report() == session.report()
    assert_grows([one.tokens for one in reports], 0, 80)
    assert_grows(lengths, 0, 80)


def test_continuous_batching_is_asked_while_it_generates():
    model, inputs = build("llama", num_hidden_layers=2), prompts(40, 25, 31)
    with kvhf.attach_batch(model, **EXACT):
        expected = batch(model, inputs)
    with kvhf.attach_batch(model, **EXACT) as batching:
        assert isinstance(batching, Batching)
        with asked_all_the_time(batching.report) as (reports,):
            assert batch(model, inputs) == expected
    assert_grows([one.steps for one in reports], 0, 3 * 12)


def test_a_length_is_right_at_every_line_of_a_move_into_the_index(monkeypatch):
    """Read the length at every line at which the thread that moves rows may be interrupted."""
    model, inputs = build("llama", num_hidden_layers=1), prompt(1, 45)
    seen = set()

    finish = Updates.finish

    def asked(self):
        ask = lambda *_: seen.add(cache.attention_layers()[0].tokens) or ask  # noqa: E731
        sys.settrace(ask)
        try:
            finish(self)
        finally:
            sys.settrace(None)

    monkeypatch.setattr(Updates, "finish", asked)
    with kvhf.attach(model, index="exact", **SIZES) as cache:
        steps(model, cache, inputs, [40])
        seen.clear()
        steps(model, cache, {n: t[:, 40:] for n, t in inputs.items()}, [3])
    assert seen == {43}


# Conflicting calls: the second one raises an error, the first one continues


def conflict(module, first, second):
    """Call `second` while another thread is in `first`, inside the module.

    Return the error message of `second`, and the result of `first`.
    """
    inside, go_on, result = threading.Event(), threading.Event(), []

    def wait(*_):
        inside.set()
        assert go_on.wait(30)

    handle = module.register_forward_pre_hook(wait)
    thread = threading.Thread(target=lambda: result.append(first()))
    thread.start()
    assert inside.wait(30)
    try:
        with pytest.raises(RuntimeError) as caught:
            second()
    finally:
        handle.remove()
        go_on.set()
        thread.join()
    (made,) = result
    return str(caught.value), made


SECOND = {
    "save": lambda model, cache, folder: cache.save(folder / "saved"),
    "load": lambda model, cache, folder: cache.load(folder),
    "fork": lambda model, cache, folder: cache.fork(),
    "update": lambda model, cache, folder: cache.update(*torch.zeros(2, 1, 2, 1, 16), 1),
    "generate": lambda model, cache, folder: model.generate(**prompt(1, 9), past_key_values=cache),
}


@pytest.mark.parametrize("call", SECOND)
def test_what_changes_a_cache_raises_beside_generate(call, tmp_path):
    model, inputs = build("llama", num_hidden_layers=2, eos_token_id=None), prompt(1, 40)
    expected = model.generate(**inputs, **GREEDY)
    with kvhf.attach(model, index="exact", **SIZES) as cache:
        message, out = conflict(
            model.model.layers[1].mlp,
            lambda: model.generate(**inputs, past_key_values=cache, **GREEDY),
            lambda: SECOND[call](model, cache, tmp_path),
        )
    assert "while another thread is in a call of the same attached model" in message
    assert torch.equal(out, expected)


def test_between_the_steps_of_generate_others_raise_too():
    """The error is the same whenever the call is made."""
    model, inputs = build("llama", num_hidden_layers=2, eos_token_id=None), prompt(1, 40)
    with kvhf.attach(model, index="exact", **SIZES) as cache:
        message, _ = conflict(
            model.lm_head,
            lambda: model.generate(**inputs, past_key_values=cache, **GREEDY),
            lambda: cache.crop(-1),
        )
    assert "while another thread is in a call" in message


SESSION = {
    "read": lambda decoder, session: decoder.read(ids_of(9), session),
    "generate": lambda decoder, session: decoder.generate(ids_of(9), session=session),
    "fork": lambda decoder, session: session.fork(),
    "truncate": lambda decoder, session: session.truncate(1),
    "step": lambda decoder, session: session.step(torch.tensor([4])),
}


@pytest.mark.parametrize("call", SESSION)
def test_what_changes_a_session_raises_beside_another_call(call, monkeypatch):
    decoder = Decoder.of(model_of("llama", num_hidden_layers=2), Words())
    options = dict(index="exact", k=500, attach_options=dict(local_window=4, dense_below=0))
    expected = decoder.generate(ids_of(40), max_new_tokens=6, **options).answer_ids
    session, inside, go_on = decoder.session(**options), threading.Event(), threading.Event()
    step, first = AttentionLayer.step, []

    def slow(self, *args, **kwargs):
        if threading.current_thread() is thread:
            inside.set()
            assert go_on.wait(30)
        return step(self, *args, **kwargs)

    monkeypatch.setattr(AttentionLayer, "step", slow)
    generate = lambda: decoder.generate(ids_of(40), session=session, max_new_tokens=6)  # noqa: E731
    thread = threading.Thread(target=lambda: first.append(generate()))
    thread.start()
    assert inside.wait(30)
    with pytest.raises(RuntimeError, match="session: got a call while another thread"):
        SESSION[call](decoder, session)
    go_on.set()
    thread.join()
    assert torch.equal(first[0].answer_ids, expected)
    assert session.length == 46
