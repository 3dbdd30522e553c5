"""Cases that two ranks run together with a model in `test_parallel.py`."""

from __future__ import annotations

import tempfile
from functools import partial
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from transformers import AutoModelForCausalLM

import kvindex
import kvindex_adapters.hf as kvhf
from kvindex.core.ranks import Ranks
from kvindex_adapters.common.parallel import check_heads, heads_over_ranks, waiting
from kvindex_adapters.common.unsupported import UnsupportedError
from kvindex_adapters.decoder import Decoder, Sampling
from kvindex_adapters.hf import attach
from kvindex_adapters.hf.cache.prompt_rows import ExpectedPrompt
from kvindex_adapters.llama.heads import HeadRanks
from tests.adapters import tiny
from tests.adapters.decoder.families import ids_of, model_of
from tests.adapters.hf.generation.test_generation import Words

REGIONS = dict(sink=3, local_window=4, update_every=5, dense_below=0)
STEPS = [30, 10, *[1] * 12]
WORDS = 102
"""A vocabulary size that two ranks divide; transformers 5.17 supports no other."""
FAMILIES = ("llama", "qwen3")
DECODED = ("llama, biases, tied", "qwen3")
SHARDED = "exact+sharded:block=8"


def of_heads(family):
    """Return a whole model, and the same model with its heads distributed over the ranks."""
    whole, folder = tiny.build(family, vocab_size=WORDS), [tempfile.mkdtemp()]
    dist.broadcast_object_list(folder)
    if dist.get_rank() == 0:
        whole.save_pretrained(Path(folder[0]))
    dist.barrier()
    shared = AutoModelForCausalLM.from_pretrained(
        folder[0], dtype=torch.float32, **heads_over_ranks()
    )
    return whole, shared.eval()


def greedy(model, inputs, cache=None):
    options = dict(max_new_tokens=16, do_sample=False, pad_token_id=0)
    return model.generate(**inputs, past_key_values=cache, eos_token_id=None, **options)


def is_as_one_process(whole, model, index):
    """Logits are equal within rounding, and greedy tokens are equal, for a padded batch."""
    inputs = tiny.prompt(2, sum(STEPS), padded=True)
    want = tiny.dense_steps(whole, inputs, STEPS)
    with attach(model, index=index, k=1000, **REGIONS) as cache:
        got = tiny.steps(model, cache, inputs, STEPS)
        report, index_of_layer = cache.report(), cache.indexes()[0]
        together = cache.report(all_ranks=True)
        cache.reset()
        answer = greedy(model, inputs, cache)
    for mine, theirs in zip(got, want, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-4)
    assert torch.equal(answer, greedy(whole, inputs))
    assert (report.rank, report.ranks) == (dist.get_rank(), dist.get_world_size())
    assert f"memory of rank {report.rank} of {report.ranks}: " in str(report)
    with attach(whole, index="exact", k=1000, **REGIONS) as cache:
        tiny.steps(whole, cache, inputs, STEPS)
        rows, one = torch.tensor(report.nbytes["rows"]), cache.report()
    dist.all_reduce(rows)
    assert int(rows) == one.nbytes["rows"], "ranks have the rows once"
    assert report.rows_read == one.rows_read
    everywhere = [None] * dist.get_world_size()
    dist.all_gather_object(everywhere, together)
    assert everywhere == [together] * len(everywhere), "all ranks say the same"
    assert together.nbytes["rows"] == one.nbytes["rows"]
    assert together.plain_nbytes == one.plain_nbytes
    assert together.placement == one.placement
    assert (together.rows_read, together.rows_full) == (one.rows_read, one.rows_full)
    assert (together.bytes_fetched, together.steps) == (one.bytes_fetched, one.steps)
    assert f"memory of all {report.ranks}: " in str(together)
    assert together.over_ranks() == together, "and nothing is summed twice"
    return index_of_layer.geometry


def heads_are_shared(family):
    whole, shared = of_heads(family)
    geometry = is_as_one_process(whole, shared, "exact")
    assert (geometry.q_heads, geometry.kv_heads) == (2, 1)


def tokens_are_shared(rows):
    whole = tiny.build("llama")
    geometry = is_as_one_process(whole, whole, f"{SHARDED}:rows={rows}")
    assert (geometry.q_heads, geometry.kv_heads) == (4, 2)


def ranks_read_a_prompt_alike():
    """One rank has memory for the rows of a prompt, and the other one has not."""
    model, ids = tiny.build("llama"), torch.arange(60) % 40 + 1
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ExpectedPrompt, "fits", lambda *_: dist.get_rank() == 0)
        with attach(model, index=f"{SHARDED}:timeout_s=5", k=1000, **REGIONS) as cache:
            kvhf.read(model, None, ids, cache=cache, chunk=20)
            assert cache.get_seq_length() == 60


def what_heads_over_ranks_lack_is_refused():
    with pytest.raises(ValueError, match="got 2, but the model has 1 KV heads"):
        check_heads(tiny.build("llama", num_key_value_heads=1).config)
    shared = of_heads("llama")[1]
    with attach(shared, index="exact") as cache:
        tiny.steps(shared, cache, tiny.prompt(1, 9), [9])
        with pytest.raises(UnsupportedError, match="cache: got the cache of a model whose heads"):
            cache.save("nowhere")
        cache.reset()
        with pytest.raises(UnsupportedError, match="cache: got the cache of a model whose heads"):
            cache.load("nowhere")
    with (
        pytest.raises(UnsupportedError, match="index: got an index that shards tokens"),
        attach(shared, index=f"{SHARDED}+reuse"),
    ):
        pass


def decoders(name, **how):
    """Make a decoder with all heads of a tiny model, and one with this rank's."""
    whole, ranks = model_of(name), HeadRanks.of("cpu")
    return Decoder.of(whole, Words(), **how), Decoder.of(whole, Words(), ranks=ranks, **how)


def same_logits(one, shared):
    """Check logits of tokens after a prompt, within rounding, and return both sessions."""
    sessions = [decoder.session(index="exact", attach_options=REGIONS) for decoder in (one, shared)]
    for decoder, session in zip((one, shared), sessions, strict=True):
        decoder.read(ids_of(40), session)
    for token in (5, 60, 7):
        want, got = (session.step(torch.tensor([token])) for session in sessions)
        torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-4)
    return sessions


def decoder_shares_bytes():
    """FP8 scales are computed for whole matrix rows, so all ranks multiply by the same numbers."""
    if find_spec("triton") is not None:  # Triton's kernels round
        one, shared = decoders("llama, biases, tied", weights="fp8")
        whole, own = one.weights.layers[0].down, shared.weights.layers[0].down
        assert own.weight.dtype == torch.float8_e4m3fn
        assert torch.equal(own.scale, whole.scale)
        same_logits(one, shared)


def decoder_shares_heads(name):
    """Logits of each token are equal within rounding, and tokens are equal, also sampled ones."""
    one, shared = decoders(name)
    prompts = [ids_of(40), ids_of(31, seed=1)]
    whole, own = one.weights.layers[0], shared.weights.layers[0]
    for part in ("query", "key", "value", "gate", "up"):
        assert 2 * len(vars(own)[part].weight) == len(vars(whole)[part].weight)
    assert 2 * own.down.weight.shape[1] == whole.down.weight.shape[1]
    for index in (None, "exact"):
        attach = None if index is None else {"attach_options": REGIONS}
        options = dict(index=index, k=1000, chunk=16, max_new_tokens=12, **attach or {})
        for sampling in (Sampling(), Sampling(temperature=1.0, top_p=0.9, seed=3)):
            mine, theirs = (
                decoder.generate(prompts, sampling=sampling, **options) for decoder in (shared, one)
            )
            for got, want in zip(mine, theirs, strict=True):
                assert torch.equal(got.answer_ids, want.answer_ids)
    sessions = same_logits(one, shared)
    together = sessions[1].report(all_ranks=True)
    assert together.nbytes["rows"] == sessions[0].report().nbytes["rows"]
    assert "\nheads: those of rank " in sessions[1].explain()
    assert "heads" not in sessions[0].explain()


def decoder_shares_tokens():
    one = Decoder.of(model_of("llama"), Words())
    options = dict(k=1000, attach_options=REGIONS, max_new_tokens=12)
    want = one.generate(ids_of(40), index="exact", **options)
    got = one.generate(ids_of(40), index=SHARDED, **options)
    assert torch.equal(got.answer_ids, want.answer_ids)


def the_first_rank_chooses():
    """Where ranks differ by rounding, all use the token of rank 0."""
    shared, ranks = decoders("llama")[1], HeadRanks.of("cpu")
    own = torch.tensor([10 + dist.get_rank()])
    assert ranks.first(own).tolist() == [10]
    session = shared.session(index=None)
    assert session.agreed(torch.tensor([3 + dist.get_rank()])).tolist() == [3]


def what_a_decoder_of_heads_lacks_is_refused():
    ranks = HeadRanks.of("cpu")
    with pytest.raises(UnsupportedError, match="heads: got 2 ranks, but the model has 1 KV heads"):
        Decoder.of(model_of("mistral"), ranks=ranks)
    odd = model_of("llama", intermediate_size=95)
    with pytest.raises(UnsupportedError, match="got 2 ranks, but the model has 95 rows of the MLP"):
        Decoder.of(odd, ranks=ranks)
    other = model_of("llama", num_hidden_layers=1 + dist.get_rank())
    with pytest.raises(ValueError, match="heads: got layers = 2 on rank 1, allowed is the value"):
        Decoder.of(other, ranks=ranks)
    shared = decoders("llama")[1]
    with pytest.raises(UnsupportedError, match="index: got an index that shards tokens"):
        shared.session(index=SHARDED)
    session = shared.session(index="exact")
    shared.read(ids_of(9), session)
    with pytest.raises(ValueError, match="session: got a session of a decoder with ranks="):
        session.save("nowhere")


def a_token_is_waited_for_as_long_as_a_rank():
    one, shared = (
        kvindex.create(name, q_heads=4, kv_heads=2, head_dim=8) for name in ("exact", SHARDED)
    )
    assert waiting([one, shared]) == {"wait": shared.wait_for}
    assert waiting([one]) == {"wait": Ranks.of().wait_for}


SAMPLE = ("heads, llama", "tokens, own", "chunks", "decoder, tokens", f"decoder, {DECODED[0]}")
"""One case of each kind."""


def cases(ranks, every):
    """Return cases by name; every: all of them, or the sample."""
    found = {
        **{f"heads, {family}": partial(heads_are_shared, family) for family in FAMILIES},
        **{f"tokens, {rows}": partial(tokens_are_shared, rows) for rows in ("own", "best")},
        "chunks": ranks_read_a_prompt_alike,
        "waits": a_token_is_waited_for_as_long_as_a_rank,
        "refused": what_heads_over_ranks_lack_is_refused,
        **{f"decoder, {name}": partial(decoder_shares_heads, name) for name in DECODED},
        "decoder, FP8": decoder_shares_bytes,
        "decoder, tokens": decoder_shares_tokens,
        "decoder, agreed": the_first_rank_chooses,
        "decoder, refused": what_a_decoder_of_heads_lacks_is_refused,
    }
    return found if every else {name: found[name] for name in SAMPLE}
