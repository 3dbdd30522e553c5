"""The plug-in in vLLM's engine on a CPU gives full attention's tokens if all rows are retrieved.

Models run in float32, so that rounding does not decide a token.
"""

import re
from types import SimpleNamespace

import pytest
import torch

from kvindex_adapters.vllm import pages, register
from kvindex_adapters.vllm.attention import PagedAttention
from tests.vllm.conftest import EVERY, SMALL, answers, prompt, settings, tokens
from tests.vllm.processes import run

vllm = pytest.importorskip("vllm")

VERSION = tuple(int(part) for part in vllm.__version__.split(".")[:2])

LENGTHS = 700, 300, 20, 1000


@pytest.fixture
def watched(monkeypatch):
    """Record the steps that searched, and compare their codes with codes of the keys alone.

    `computed` counts tokens of all steps and layers.
    """
    seen, attend = SimpleNamespace(steps=[], computed=0), PagedAttention.attend

    def watch(self, queries, sequence, sinks=None, **given):
        seen.computed += len(queries)
        indexed = self.searched(sequence.length)
        if len(queries) == 1 and indexed:
            keys = pages.read_rows(sequence.rows, sequence.table, 0, indexed).keys
            alone = dict(self.encoding.encode(keys, None))
            codes = self.codes(sequence, indexed)
            assert alone.keys() == codes.keys()
            assert all(torch.equal(alone[name], codes[name]) for name in codes)
            seen.steps.append(sequence)
        return attend(self, queries, sequence, sinks, **given)

    monkeypatch.setattr(PagedAttention, "attend", watch)
    return seen


def test_mixed_lengths_in_chunks(stock, searching, watched):
    prompts = [prompt(length, seed) for seed, length in enumerate(LENGTHS)]
    assert tokens(searching, prompts) == tokens(stock, prompts)
    assert watched.steps


def test_few_rows_give_other_tokens(few, stock):
    prompts = [prompt(length, seed) for seed, length in enumerate(LENGTHS)]
    found, exact = tokens(few, prompts), tokens(stock, prompts)
    assert found[2] == exact[2]  # the sequence is shorter than a block
    assert found != exact


@pytest.fixture(scope="module")
def few(engine, model):
    """An engine that retrieves too few rows for the tokens of full attention."""
    return engine(model, {"k": 1, "dense_below": 0, "sink": 0, "local_window": 0})


def test_a_single_token_that_is_left_of_a_prompt(few, stock, monkeypatch):
    """It attends to all tokens, as the rest of its prompt does."""
    seen, attend = [], PagedAttention.attend

    def watch(self, queries, sequence, sinks=None, **given):
        seen.append((len(queries), sequence.length, given["prompt"]))
        return attend(self, queries, sequence, sinks, **given)

    monkeypatch.setattr(PagedAttention, "attend", watch)
    ids = prompt(513, seed=60)

    def first(llm):
        ((answer,),) = ((one.outputs for one in answers(llm, [ids], 1, logprobs=1)),)
        (step,) = answer[0].logprobs
        return {token: one.logprob for token, one in step.items()}

    expected = first(stock)
    for _ in range(2):  # a chunk of 512 tokens and one of 1, then 512 cached tokens
        assert first(few) == pytest.approx(expected, rel=1e-4)
        assert seen[-1] == (1, 513, True)
    assert len(seen) == 2 * (2 + 1)
    answers(few, [ids], 2)
    assert seen[-1] == (1, 514, False)  # a decode step


def test_a_prefix_that_is_shared(stock, searching, watched):
    start = prompt(600, seed=10)
    prompts = [start + prompt(length, seed=11 + length) for length in (5, 150, 400)]
    expected = [tokens(stock, [ids])[0] for ids in prompts]
    for number, ids in enumerate(prompts):
        (outcome,) = answers(searching, [ids])
        assert [list(outcome.outputs[0].token_ids)] == expected[number]
        assert outcome.num_cached_tokens == (512 if number else 0)
    tables = {tuple(sequence.table[:2].tolist()) for sequence in watched.steps}
    assert len(tables) == 1  # the same two blocks, written once


def test_sequences_that_are_preempted(stock, searching, watched):
    lengths = 1010, 1000, 750  # these fill all 11 blocks; each needs one more soon
    prompts = [prompt(length, seed=20 + length) for length in lengths]
    expected = [tokens(stock, [ids], count=40)[0] for ids in prompts]
    assert tokens(searching, prompts, count=40) == expected
    once = (sum(lengths) + 3 * 39) * SMALL["num_hidden_layers"]
    assert watched.computed > once  # preempted tokens are computed again


def test_a_request_that_is_aborted(stock, searching, watched):
    from vllm import SamplingParams

    gone, stays = prompt(900, seed=30), prompt(600, seed=31)
    expected = tokens(stock, [stays])[0][0]
    params = SamplingParams(temperature=0, max_tokens=16, ignore_eos=True, detokenize=False)
    core = searching.llm_engine
    core.add_request("gone", {"prompt_token_ids": gone}, params)
    core.add_request("stays", {"prompt_token_ids": stays}, params)
    found, steps = [], 0
    while core.has_unfinished_requests():
        found += [one for one in core.step() if one.finished]
        steps += 1
        if steps == 6:
            core.abort_request(["gone"])
    (outcome,) = (one for one in found if one.outputs[0].finish_reason == "length")
    assert list(outcome.outputs[0].token_ids) == expected
    assert tokens(searching, [gone]) == tokens(stock, [gone])


def test_several_answers_to_a_prompt(stock, searching, watched):
    """The prompt is cached. On a CPU, vLLM samples by a seed only if a prompt is not split."""
    ids, options = [prompt(300, seed=40)], dict(n=3, temperature=1.0, seed=5)
    for llm in (searching, stock):
        tokens(llm, ids)
    found = tokens(searching, ids, **options)
    assert found == tokens(stock, ids, **options)
    assert len({tuple(one) for one in found[0]}) > 1


def test_two_models_in_turn_and_blocks_of_512(engine, saved, stock, searching, watched):
    other = saved(num_hidden_layers=3, num_key_value_heads=1, head_dim=64)
    mine = engine(other, {**EVERY, "index": "pariskv:preset=paper"}, block_size=512)
    theirs = engine(other, block_size=512)
    for seed in (50, 51):
        ids = [prompt(600 + seed, seed)]
        assert tokens(mine, ids) == tokens(theirs, ids)
        assert tokens(searching, ids) == tokens(stock, ids)


@pytest.mark.skipif(VERSION < (0, 27), reason="vLLM 0.26 has no one group for two kinds of layers")
def test_sliding_layers_keep_their_own_and_softcaps_are_served(engine, saved, watched):
    family = dict(sliding_window=64, query_pre_attn_scalar=32, attn_logit_softcapping=5.0)
    folder = saved("Gemma2", **family)
    options = dict(disable_hybrid_kv_cache_manager=True)
    prompts = [prompt(length, seed) for seed, length in enumerate(LENGTHS)]
    expected = tokens(engine(folder, **options), prompts)
    assert tokens(engine(folder, EVERY, **options), prompts) == expected
    assert watched.steps


@pytest.mark.skipif(VERSION < (0, 32), reason="vLLM 0.29 has sinks on CPUs in bfloat16 only")
def test_learned_sinks(engine, saved, watched):
    """One of two layers has full attention, and both have sinks, as in gpt-oss."""
    folder = saved("GraniteSWA", sliding_window=64)
    prompts, options = [prompt(700), prompt(20)], dict(num_gpu_blocks_override=24)
    expected = tokens(engine(folder, **options), prompts)
    assert tokens(engine(folder, EVERY, **options), prompts) == expected
    assert watched.steps
    few = EVERY | {"k": 1, "sink": 0, "local_window": 1}
    assert tokens(engine(folder, few, **options), prompts) != expected


def test_registering_again_changes_nothing(stock):
    from vllm.v1.attention.backends.registry import AttentionBackendEnum

    before = AttentionBackendEnum.CPU_ATTN.get_path()
    register()
    assert AttentionBackendEnum.CPU_ATTN.get_path() == before
    assert before.startswith("kvindex_adapters.vllm")


LATENT = dict(
    num_key_value_heads=4,
    kv_lora_rank=512,  # plus 64 rotary dimensions, the only size that vLLM supports on a CPU
    qk_rope_head_dim=64,
    q_lora_rank=64,
    qk_nope_head_dim=32,
    v_head_dim=32,
    first_k_dense_replace=2,  # so no layer has experts
)


@pytest.mark.skipif(VERSION < (0, 28), reason="codes have no place in the pages of latents")
@pytest.mark.parametrize("first", [EVERY, None])
def test_latent_attention_whichever_engine_comes_first(engine, saved, first):
    """vLLM caches the selected backend, but only an engine that uses kvindex searches.

    The backend that vLLM selects on CPUs with AMX does not support float32.
    """
    from vllm.v1.attention import selector

    folder = saved("DeepseekV3", **LATENT)
    options = dict(dtype="bfloat16", num_gpu_blocks_override=None, block_size=None)
    selector._cached_get_attn_backend.cache_clear()
    for asked in (first, None if first else EVERY):
        mine = engine(folder, asked, **options)
        assert tokens(mine, [prompt(20)], 2)
        layers = mine.llm_engine.vllm_config.compilation_config.static_forward_context.values()
        found = [vars(layer).get("impl") for layer in layers]
        kinds = {type(impl).__module__.partition(".")[0] for impl in found if impl is not None}
        assert kinds == {"kvindex_adapters" if asked else "vllm"}


def test_the_backend_by_name_in_worker_processes(model, tmp_path):
    """The log shows which layers search."""
    done = run(tmp_path, settings(model, EVERY))
    text = done.stdout + done.stderr
    assert done.returncode == 0, text
    layers = ", ".join(f"model.layers.{number}.self_attn.attn" for number in range(2))
    said = (
        f"kvindex: 2 of 2 attention layers search: {layers}. By pariskv:sign_decoder=mean: k=2048 "
    )
    assert text.count(said) == 1


def test_without_the_plug_in_the_error_is_that_of_vllm(model, tmp_path):
    done = run(tmp_path, settings(model, EVERY), env={"VLLM_PLUGINS": ""})
    assert done.returncode != 0
    assert "Unknown attention backend: 'KVINDEX'" in done.stderr


@pytest.mark.parametrize(
    ("asked", "options", "said"),
    [
        # found in the first process
        ({"k": 0}, {"block_size": 320}, ["k: got 0", "block_size: got 320"]),
        # found by a layer, in the process of the engine core or of a worker
        ({"rows": "host"}, {}, ["rows: got host"]),
        ({"rows": "host"}, {"tensor_parallel_size": 2}, ["rows: got host"]),
    ],
)
def test_the_reason_is_the_last_that_the_user_sees(model, tmp_path, asked, options, said):
    done = run(tmp_path, settings(model, asked, **options))
    assert done.returncode != 0
    last = done.stderr.rpartition("ValueError: kvindex: ")[2].splitlines()
    # Python warns about shared memory that vLLM leaves after any failed start
    last = [line for line in last if not re.search("resource_tracker|warnings.warn", line)]
    assert len(last) == (1 if len(said) == 1 else 1 + len(said)), done.stderr
    for line, reason in zip(last[-len(said) :], said, strict=True):
        assert line.removeprefix("- ").startswith(reason)


def test_the_error_determines_the_number_of_rows(engine, model, stock):
    """With a small error, tokens are those of full attention, from fewer rows."""
    prompts = [prompt(length, seed) for seed, length in enumerate(LENGTHS)]
    sizes = {"dense_below": 0, "sink": 0, "local_window": 1}
    exact, tight = engine(model, EVERY), engine(model, {"k": "auto", "error": 1e-3, **sizes})
    loose = engine(model, {"k": "auto", "error": 2.0, **sizes})
    expected = tokens(exact, prompts)
    assert expected == tokens(stock, prompts) == tokens(tight, prompts)
    assert tokens(loose, prompts) != expected
    from kvindex_adapters.vllm.engine import attention_layers

    read = []
    for llm in (tight, loose):
        context = llm.llm_engine.vllm_config.compilation_config.static_forward_context
        budgets = [layer.impl.paged.budget for layer in attention_layers(context).values()]
        assert all(budget.known for budget in budgets)
        read.append(sum(budget.take_found() for budget in budgets))
    assert 0 < read[1] < read[0]
