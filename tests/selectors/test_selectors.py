"""Rules that every block selector follows."""

import pytest
import torch

from kvindex.ops.attention import attend_causal
from kvindex.ops.block_sparse import attend_chosen
from kvindex.selectors import (
    AntidiagonalSelector,
    IndexSelector,
    MaxThresholdSelector,
    OracleSelector,
    PooledSelector,
    SampledSelector,
    SkipSelector,
    VerticalSlashSelector,
    kept_always,
)
from kvindex.selectors.named import SELECTORS as NAMED
from tests.support.selecting import chosen_by, fraction, prompt, whole

SELECTORS = {
    "pooled": PooledSelector(0.6),
    "max-threshold": MaxThresholdSelector(0.1),
    "antidiagonal": AntidiagonalSelector(0.5),
    "vertical-slash": VerticalSlashSelector(0.05, 0.05),
    "index": IndexSelector(0.5),
    "skip": SkipSelector(1.0),
    "sampled": SampledSelector(0.5, queries=128),
    "oracle": OracleSelector(0.5),
}
"""Name -> a selector that leaves out some blocks of `prompt`."""

EVERYTHING = {
    "pooled": PooledSelector(1.0),
    "max-threshold": MaxThresholdSelector(1e-300),
    "antidiagonal": AntidiagonalSelector(1.0),
    "vertical-slash": VerticalSlashSelector(1.0, 0.1),
    "slash": VerticalSlashSelector(0.1, 1.0),
    "index": IndexSelector(1.0),
    "skip": SkipSelector(1e-300),
    "sampled": SampledSelector(1.0, queries=128),
    "oracle": OracleSelector(1.0),
}
"""Name -> the same selector with a parameter that keeps all blocks."""

assert SELECTORS.keys() == NAMED.keys()

each = pytest.mark.parametrize("selector", SELECTORS.values(), ids=SELECTORS.keys())


@each
@pytest.mark.parametrize("tokens", [1, 127, 128, 129, 256, 128 * 5 + 70])
def test_the_choice_has_its_shape_is_causal_and_has_the_kept_blocks(selector, tokens):
    queries, keys, _ = prompt(tokens)
    chosen = chosen_by(selector, queries, keys)
    blocks = -(-tokens // 128)
    assert chosen.shape == (2, 4, blocks, blocks)
    assert chosen.dtype == torch.bool
    assert not chosen.triu(1).any()
    assert chosen[:, :, kept_always(blocks, blocks, 0)].all()


@each
def test_some_blocks_are_left_out_and_sequences_and_heads_differ(selector):
    queries, keys, _ = prompt(128 * 8)
    chosen = chosen_by(selector, queries, keys)
    assert 0.3 < fraction(chosen) < 0.95
    assert not torch.equal(chosen[0], chosen[1])
    assert not torch.equal(chosen[:, 0], chosen[:, 1])


@each
@pytest.mark.parametrize("chunk", [128, 256, 640])
def test_the_choice_does_not_depend_on_chunks(selector, chunk):
    tokens = 128 * 7 + 33
    queries, keys, _ = prompt(tokens)
    once = chosen_by(selector, queries, keys)
    for first in range(0, tokens, chunk):
        some = queries[:, :, first : first + chunk]
        got = chosen_by(selector, some, keys[:, :, : first + some.shape[2]], first=first)
        rows = once[:, :, first // 128 : first // 128 + got.shape[2]]
        assert torch.equal(got, rows[..., : got.shape[3]])
        assert not rows[..., got.shape[3] :].any()


@each
def test_later_keys_have_no_effect_and_summaries_can_be_appended(selector):
    queries, keys, _ = prompt(128 * 8)
    summaries = selector.summarize(keys)
    parts = [selector.summarize(keys[:, :, a : a + 256]) for a in range(0, 1024, 256)]
    torch.testing.assert_close(torch.cat(parts, 2), summaries)
    early = queries[:, :, : 128 * 4]
    short = selector.choose(early, summaries[:, :, :3], 0, scale=0.25)
    assert torch.equal(selector.choose(early, summaries, 0, scale=0.25), short)


@each
def test_a_sequence_is_chosen_as_if_it_was_alone(selector):
    queries, keys, _ = prompt(128 * 6)
    together = chosen_by(selector, queries, keys)
    for b in range(2):
        assert torch.equal(chosen_by(selector, queries[b : b + 1], keys[b : b + 1])[0], together[b])


@each
def test_query_heads_use_the_keys_of_their_group(selector):
    queries, keys, _ = prompt(128 * 6)
    spread = keys.repeat_interleave(2, 1)  # a KV head for each query head
    assert torch.equal(chosen_by(selector, queries, keys), chosen_by(selector, queries, spread))


@each
def test_a_head_with_all_its_weight_in_one_block_keeps_this_block_alone(selector):
    queries, keys, _ = prompt(128 * 9, B=1, H=1, G=1)
    keys = 0.01 * keys
    keys[:, :, 128 * 4 : 128 * 5] += 20 * torch.eye(16)[0]
    queries = 0.01 * queries + 20 * torch.eye(16)[0]
    last = chosen_by(selector, queries, keys)[0, 0, 8]
    kept = last.nonzero()[:, 0].tolist()
    if isinstance(selector, VerticalSlashSelector):
        # the slash lines of 128 queries through a block of 128 keys cross both of its neighbors
        assert {0, 4, 7, 8} <= set(kept) <= {0, 3, 4, 5, 7, 8}
    elif isinstance(selector, SkipSelector):
        assert kept[-3:] == [4, 7, 8]  # blocks before block 4 are read before the maximum is known
    else:
        assert kept == [0, 4, 7, 8]


@pytest.mark.parametrize("selector", EVERYTHING.values(), ids=EVERYTHING.keys())
@pytest.mark.parametrize("D", [16, 64, 96, 128, 256])
def test_attention_to_everything_is_full_attention(selector, D):
    queries, keys, values = prompt(128 * 4 + 9, D=D)
    chosen = chosen_by(selector, queries, keys)
    assert fraction(chosen) == 1
    got = attend_chosen(queries, keys, values, chosen, scale=D**-0.5)
    want = attend_causal(queries, keys, values, scale=D**-0.5)
    torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-4)


@each
@pytest.mark.parametrize("wrong", [float("nan"), float("inf"), -float("inf")])
def test_numbers_that_are_not_finite_raise(selector, wrong):
    queries, keys, _ = prompt(128 * 4)
    summaries = selector.summarize(keys)
    for place in (383, 382, 256):  # some selectors use only a part of the queries
        bad = queries.clone()
        bad[1, 2, place, 3] = wrong
        with pytest.raises(ValueError, match=r"queries: got .*(nan|inf), allowed"):
            selector.choose(bad, summaries, 0, scale=0.25)
    keys[1, 0, 200, 3] = wrong
    with pytest.raises(ValueError, match=r"keys: got .*(nan|inf), allowed"):
        selector.summarize(keys)


@each
def test_summaries_that_are_not_finite_raise(selector):
    queries, keys, _ = prompt(128 * 4)
    summaries = selector.summarize(keys)
    if summaries.is_floating_point():
        summaries[0, 1, 1] = float("nan")
        with pytest.raises(ValueError, match="summaries: got nan, allowed"):
            selector.choose(queries, summaries, 0, scale=0.25)


@each
def test_arguments_that_do_not_fit_raise(selector):
    queries, keys, _ = prompt(128 * 4)
    summaries = selector.summarize(keys)
    choose = selector.choose
    with pytest.raises(ValueError, match="keys: got 200 tokens, allowed is a multiple of 128"):
        selector.summarize(keys[:, :, :200])
    with pytest.raises(ValueError, match="first: got 64, allowed is a multiple of 128"):
        choose(queries, summaries, 64, scale=0.25)
    with pytest.raises(ValueError, match="first: got -128"):
        choose(queries, summaries, -128, scale=0.25)
    with pytest.raises(ValueError, match="summaries: got 4 blocks, allowed is at least 5"):
        choose(queries, summaries, 256, scale=0.25)
    with pytest.raises(ValueError, match="scale: got 0"):
        choose(queries, summaries, 0, scale=0.0)
    with pytest.raises(ValueError, match="queries: got no tokens"):
        choose(queries[:, :, :0], summaries, 0, scale=0.25)
    with pytest.raises(ValueError, match="summaries: got 2 KV heads, allowed is a divisor of 3"):
        choose(queries[:, :3], summaries, 0, scale=0.25)
    with pytest.raises(ValueError, match="summaries: got shape"):
        choose(queries[:1], summaries, 0, scale=0.25)
    with pytest.raises(ValueError, match="summaries: got shape"):
        choose(queries[..., :8], summaries, 0, scale=0.25)
    with pytest.raises(TypeError, match="queries: got list"):
        choose([queries], summaries, 0, scale=0.25)


@each
def test_half_precision_is_computed_in_float32(selector):
    queries, keys, _ = (part.bfloat16() for part in prompt(128 * 6))
    got = chosen_by(selector, queries, keys)
    assert torch.equal(got, chosen_by(selector, queries.float(), keys.float()))


def test_all_selectors_keep_whole_blocks_only():
    queries, keys, _ = prompt(130)
    assert whole(keys).shape[2] == 128
    assert chosen_by(PooledSelector(), queries, keys).all(-1).tolist() == [[[False, True]] * 4] * 2
