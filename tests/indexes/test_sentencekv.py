"""SentenceKV: the mean of all products of two sentences; boundaries from any source.

The file is long, because signals, the text and the length give boundaries with one effect.
"""

import pytest
import torch

from kvindex.layer import AttentionLayer
from kvindex.wrappers.reuse import Reuse
from tests.support.exactly import assert_follows_exact_in_a_layer, assert_stays_exact
from tests.support.helpers import Case, assert_same_hits, left_padding, part

CASE = Case(q_heads=6, kv_heads=2, head_dim=16, value_dim=8, batch=2)
STOP, COMMA = 13, 11


def text(count, seed=0, rows=2, every=7):
    """Return token ids int64 `[rows, count]`, about one in `every` of them a stop."""
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(100, 200, (rows, count), generator=generator)
    ends = torch.rand((rows, count), generator=generator) < 1 / every
    return tokens.masked_fill(ends, STOP)


def in_words(tokens, valid, longest):
    """Return the sentences of one sequence, as lists of ids."""
    found, open_one = [], []
    for i, (token, real) in enumerate(zip(tokens, valid, strict=True)):
        if real:
            open_one.append(i)
        if real and (token == STOP or len(open_one) == longest):
            found, open_one = [*found, open_one], []
    return [*found, open_one] if open_one else found


def sentences(index):
    """Return the ids of each sentence, for each sequence of the batch."""
    found = []
    for b, sizes in enumerate(index._codes["sizes"][:, 0].tolist()):
        ids = index._members()[b].tolist()
        starts = [sum(sizes[:i]) for i in range(len(sizes))]
        found.append([ids[s : s + n] for s, n in zip(starts, sizes, strict=True) if n])
    return found


def assert_as_in_words(index, keys, tokens, valid, close=1e-6):
    longest = index.config.longest
    want = [in_words(*row, longest) for row in zip(tokens.tolist(), valid.tolist(), strict=True)]
    assert sentences(index) == want
    for b, ids in enumerate(want):
        for s, one in enumerate(ids):
            mean = keys[b, :, one].mean(1)
            torch.testing.assert_close(index._codes["means"][b, :, s], mean, rtol=0, atol=close)


@pytest.mark.parametrize("longest", [1, 5, 64])
@pytest.mark.parametrize("when", ["before", "between", "after", "step by step"])
def test_sentences_are_those_in_words_whenever_they_are_said(when, longest):
    """Prompts have different lengths, and sentences of different sequences end in other places."""
    index = CASE.index("sentencekv", longest=longest, punctuation=(COMMA, STOP))
    rows, tokens, valid = CASE.tokens(90), text(90), left_padding([0, 31], 90)
    if when == "before":
        index.observe_tokens(tokens, first=0)
    for start, stop in ((0, 40), (40, 41), (41, 77), (77, 90)):
        index.append(*part(rows, start, stop), valid=valid[:, start:stop])
        if when == "between" and start == 41:
            index.observe_tokens(tokens, first=0)
        if when == "step by step":
            index.observe_tokens(tokens[:, start:stop], first=start)
    if when == "after":
        index.observe_tokens(tokens[:, :3], first=0)
        index.observe_tokens(tokens[:, 3:], first=3)
    assert_as_in_words(index, rows[0], tokens, valid)


def test_the_comparison_can_fail():
    index, rows, tokens = CASE.index("sentencekv", punctuation=STOP), CASE.tokens(60), text(60)
    index.append(*rows)
    index.observe_tokens(tokens, first=0)
    real = torch.ones_like(tokens, dtype=torch.bool)
    assert_as_in_words(index, rows[0], tokens, real)
    with pytest.raises(AssertionError):
        assert_as_in_words(index, rows[0], tokens.roll(1, 1), real)
    with pytest.raises(AssertionError):
        assert_as_in_words(index, rows[0].roll(1, 2), tokens, real)


def test_sentences_through_truncation_reordering_and_another_text():
    index = CASE.index("sentencekv", longest=9, punctuation=STOP)
    rows, tokens, valid = CASE.tokens(80), text(80, seed=3), left_padding([5, 44], 80)
    index.observe_tokens(tokens, first=0)
    index.append(*rows, valid=valid)
    index.truncate(61)
    order = torch.tensor([1, 0, 1])
    index.reorder(order)
    other = text(40, seed=4, rows=3)
    index.observe_tokens(other[:, :30], first=61)  # some tokens come later
    more = CASE.tokens(40, seed=1, batch=3)
    index.append(*part(more, 0, 12))
    index.append(*part(more, 12, 40))
    index.observe_tokens(other[:, 25:], first=86)
    keys = torch.cat([rows[0][order, :, :61], more[0]], dim=2)
    tokens = torch.cat([tokens[order, :61], other], dim=1)
    valid = torch.cat([valid[order, :61], torch.ones(3, 40, dtype=torch.bool)], dim=1)
    assert_as_in_words(index, keys, tokens, valid)
    index.truncate(48)  # cuts the first sentences of the second sequence
    assert_as_in_words(index, keys[:, :, :48], tokens[:, :48], valid[:, :48])


def test_marked_boundaries_are_those_that_are_read():
    rows, tokens = CASE.tokens(60), text(60, rows=1)
    marked, read = CASE.index("sentencekv"), CASE.index("sentencekv", punctuation=STOP)
    for i, token in enumerate(tokens[0].tolist()):
        marked.append(*part(rows, i, i + 1))
        if token == STOP:
            marked.mark_boundary()
    read.append(*rows)
    read.observe_tokens(tokens[0], first=0)
    assert sentences(marked) == sentences(read)
    hits = [each.search(CASE.queries(), k=20) for each in (marked, read)]
    assert_same_hits(*hits)


def test_a_boundary_lies_at_the_newest_query():
    """A layer's window delays keys, so the boundary after a token is known before they come."""
    index, rows = CASE.index("sentencekv"), CASE.tokens(30)
    for position in range(30):
        if position in (4, 17):
            index.mark_boundary()
        index.observe_queries(CASE.queries(position)[:, :, None], torch.tensor([position]))
    index.append(*rows)
    assert [len(one) for one in sentences(index)[0]] == [4, 13, 13]


def test_without_boundaries_sentences_are_pages():
    index = CASE.index("sentencekv", longest=8)
    index.append(*CASE.tokens(20))
    assert [len(one) for one in sentences(index)[0]] == [8, 8, 4]
    assert index.unit == 8


def test_sentences_are_averaged_in_blocks(monkeypatch):
    rows, tokens = CASE.tokens(90), text(90)
    whole = CASE.index("sentencekv", punctuation=STOP)
    whole.observe_tokens(tokens, first=0)
    whole.append(*rows)
    monkeypatch.setattr("kvindex.indexes.sentencekv.BLOCK", 3 * 64)
    index = CASE.index("sentencekv", punctuation=STOP)
    index.observe_tokens(tokens, first=0)
    index.append(*rows)
    assert torch.equal(index._codes["means"], whole._codes["means"])


# Searches


def spoken(index, queries, ends=()):
    """Simulate decoding: observe queries `[B, H, T, D]` one by one, with boundaries after some
    tokens."""
    first = len(index)
    index.end_prompt()
    for i in range(queries.shape[2]):
        index.observe_queries(queries[:, :, i : i + 1], torch.tensor([first + i]))
        if i in ends:
            index.mark_boundary()


@pytest.mark.parametrize("seen", [True, False])
def test_a_score_is_the_mean_of_all_products_of_two_sentences(seen):
    """This follows from linearity. With one head per group, scores are estimates, not weights."""
    case = Case(q_heads=2, kv_heads=2, head_dim=16, value_dim=8, batch=2)
    index, rows, tokens = case.index("sentencekv", punctuation=STOP), case.tokens(50), text(50)
    index.observe_tokens(tokens, first=0)
    index.append(*rows)
    queries = case.tensor(5, 2, 2, 12, 16)
    spoken(index, queries if seen else queries[:, :, :-1], ends=(3, 6))
    hits = index.search(queries[:, :, -1], k=50)
    products = queries[:, :, 7:] @ rows[0].mT  # [B, H, 5, N]: the sentence of the last five
    for b, found in enumerate(sentences(index)):
        for one in found:
            want = products[b, :, :, one].mean((1, 2))
            for h in range(2):
                got = hits.scores[b, h][torch.isin(hits.ids[b, h], torch.tensor(one))]
                torch.testing.assert_close(got, want[h].expand(len(one)), rtol=1e-4, atol=1e-5)
        order = [products[b, 0, :, one].mean().item() for one in found]
        best = found[max(range(len(found)), key=order.__getitem__)]
        assert hits.ids[b, 0, : len(best)].tolist() == best, "a whole sentence comes first"


def test_the_query_of_the_token_that_ends_a_sentence_belongs_to_it():
    index = CASE.index("sentencekv", longest=8)
    index.append(*CASE.tokens(40))
    queries = CASE.tensor(5, 2, 6, 9, 16)
    spoken(index, queries, ends=(4, 8))
    alone = CASE.index("sentencekv", longest=8, query="token")
    alone.append(*CASE.tokens(40))
    for given, of in ((queries[:, :, 8], slice(5, 9)), (CASE.queries(), None)):
        mean = given if of is None else queries[:, :, of].mean(2)
        want = alone.search(mean, k=20)
        assert_same_hits(index.search(given, k=20), want, close=1e-5)


def test_queries_of_the_prompt_and_of_a_cut_sequence_do_not_count():
    index = CASE.index("sentencekv", longest=8)
    alone = CASE.index("sentencekv", longest=8, query="token")
    for each in (index, alone):
        each.append(*CASE.tokens(40))
    queries = CASE.tensor(5, 2, 6, 50, 16)
    index.observe_queries(queries[:, :, :40], torch.arange(40))
    spoken(index, queries[:, :, 40:46])
    index.observe_queries(queries[:, :, 45:46], torch.tensor([42]))  # the third token again
    mean = queries[:, :, [40, 41, 45]].mean(2)
    hits = index.search(queries[:, :, 45], k=20)
    assert_same_hits(hits, alone.search(mean, k=20), close=1e-5)
    index.truncate(41)
    alone.truncate(41)
    mean = (queries[:, :, 40] + CASE.queries()) / 2
    hits = index.search(CASE.queries(), k=20)
    assert_same_hits(hits, alone.search(mean, k=20), close=1e-5)
    with pytest.raises(AssertionError):
        assert_same_hits(hits, alone.search(CASE.queries(), k=20), close=1e-5)


def test_a_sentence_of_queries_is_no_longer_than_one_of_keys():
    index = CASE.index("sentencekv", longest=4)
    index.append(*CASE.tokens(40))
    queries = CASE.tensor(5, 2, 6, 20, 16)
    spoken(index, queries)
    assert len(index._signals.positions) == 4
    alone = CASE.index("sentencekv", longest=4, query="token")
    alone.append(*CASE.tokens(40))
    want = alone.search(queries[:, :, 16:].mean(2), k=20)
    assert_same_hits(index.search(queries[:, :, 19], k=20), want, close=1e-5)


@pytest.mark.parametrize("policy", ["mean_share", "max_share", "union", "mean_query"])
def test_sentences_of_one_token_are_exact(policy):
    """The hits stay exact through appends, boundaries, queries, truncation, reordering and
    padding."""
    pads, tokens, more = left_padding([0, 9], 40), CASE.tokens(40), CASE.tokens(30, seed=1)
    index = CASE.index("sentencekv", longest=1, group=policy)
    exact = CASE.index("exact", group=policy)
    changes = [
        lambda i: i.append(*tokens, valid=pads),
        lambda i: i.end_prompt(),
        lambda i: i.append(*part(more, 0, 1)),
        lambda i: i.observe_queries(CASE.queries()[:, :, None], torch.tensor([41])),
        lambda i: (i.mark_boundary(), i.append(*part(more, 1, 30))),
        lambda i: i.truncate(50),
        lambda i: i.reorder(torch.tensor([1, 1, 0])),
        lambda i: i.truncate(30),
        lambda i: i.append(*CASE.tokens(3, seed=2, batch=3)),
    ]
    assert_stays_exact(CASE, index, exact, changes)


def test_in_a_layer_sentences_of_one_token_follow_exact():
    assert_follows_exact_in_a_layer(CASE, "sentencekv", longest=1)


def test_in_a_layer_the_searched_query_counts_once():
    index = CASE.index("sentencekv", punctuation=STOP)
    layer = AttentionLayer(index, k=9, sink=3, local_window=4, update_every=5, dense_below=0)
    queries, (keys, values), seen = CASE.tensor(5, 2, 6, 60, 16), CASE.tokens(60), []
    index.observe_tokens(torch.full((60,), STOP), first=0)
    index.observe_tokens(torch.zeros(29, dtype=torch.int64), first=31)
    search = index._search
    index._search = lambda q, k: (seen.append(index._signals.mean_query(q, 64)), search(q, k))[1]
    for some in (slice(0, 30), *(slice(i, i + 1) for i in range(30, 60))):
        layer.step(*(t[:, :, some] for t in (queries, keys, values)))
    assert len(seen) == 30
    torch.testing.assert_close(seen[0], queries[:, :, 30], msg="the token 30 ends its sentence")
    for i in range(31, 60):
        torch.testing.assert_close(seen[i - 30], queries[:, :, 31 : i + 1].mean(2))


def test_reuse_marks_boundaries():
    index = Reuse(CASE.index("sentencekv"), tau=2.0)
    layer = AttentionLayer(index, k=9, sink=0, local_window=1, update_every=1, dense_below=0)
    queries, (keys, values) = CASE.tensor(5, 2, 6, 20, 16), CASE.tokens(20)
    for some in (slice(0, 10), *(slice(i, i + 1) for i in range(10, 20))):
        layer.step(*(t[:, :, some] for t in (queries, keys, values)))
    assert [len(one) for one in sentences(index.inner)[0]] == [10] + [1] * (len(index.inner) - 10)


# The rest


def test_what_is_read_before_the_first_append_is_reordered_and_fixes_the_batch():
    index, tokens = CASE.index("sentencekv", punctuation=STOP), text(30)
    index.observe_tokens(tokens, first=0)
    with pytest.raises(
        ValueError,
        match="keys: got a batch of 3, but the index was given the text of 2 sequences",
    ):
        index.append(*CASE.tokens(30, batch=3))
    index.reorder(torch.tensor([1, 0, 1]))
    rows = CASE.tokens(30, batch=3)
    index.append(*rows)
    tokens = tokens[[1, 0, 1]]
    assert_as_in_words(index, rows[0], tokens, torch.ones_like(tokens, dtype=torch.bool))
    index.reset()
    assert index._signals.ends.shape == (1, 0)
    index.mark_boundary()  # a boundary of an empty index


def test_what_is_read_of_another_batch_is_forgotten():
    index, tokens = CASE.index("sentencekv", punctuation=STOP), text(30, rows=3)
    index.observe_tokens(text(20), first=0)
    index.observe_tokens(tokens[:, 20:], first=20)
    rows = CASE.tokens(30, batch=3)
    index.append(*rows)
    tokens[:, :20] = 0
    assert_as_in_words(index, rows[0], tokens, torch.ones_like(tokens, dtype=torch.bool))


def test_what_is_heard_while_an_append_is_under_way_stays():
    index, queries = CASE.index("sentencekv", longest=8), CASE.tensor(5, 2, 6, 2, 16)
    index.append(*CASE.tokens(20))
    index.end_prompt()
    end = index.start_append(*CASE.tokens(5, seed=1))
    index.observe_queries(queries, torch.tensor([30, 31]))
    index.mark_boundary()
    end()
    assert index._signals.positions.tolist() == [30, 31]
    assert index._signals.ends[0].nonzero()[:, 0].tolist() == [31]


def test_a_view_of_many_rows_has_what_was_heard():
    case = Case(q_heads=6, kv_heads=2, head_dim=16, value_dim=8)
    index, queries = case.index("sentencekv", longest=8), case.tensor(5, 1, 6, 3, 16)
    index.append(*case.tokens(40))
    spoken(index, queries)
    want = index.search(queries[:, :, 2], k=9)
    hits = index.expand_batch(3).search(queries[:, :, 2].expand(3, -1, -1), k=9)
    assert torch.equal(hits.ids, want.ids.expand(3, -1, -1))


def test_a_refused_reading_changes_nothing():
    index = CASE.index("sentencekv", punctuation=STOP)
    index.append(*CASE.tokens(30))
    index.observe_tokens(text(30), first=0)
    before, tokens = sentences(index), text(5)
    with pytest.raises(ValueError, match=r"tokens: got shape \[3, 5\], allowed is \[B=2, T\]"):
        index.observe_tokens(text(5, rows=3), first=30)
    with pytest.raises(ValueError, match="first: got -1"):
        index.observe_tokens(tokens, first=-1)
    with pytest.raises(ValueError, match="tokens: got dtype"):
        index.observe_tokens(tokens.float(), first=30)
    with pytest.raises(ValueError, match=r"queries: got shape .* allowed is .*H=6, T, D=16"):
        index.observe_queries(CASE.queries()[:, :2, None], torch.arange(1))
    with pytest.raises(ValueError, match=r"positions: got shape \[2\], allowed is \[T=1\]"):
        index.observe_queries(CASE.queries()[:, :, None], torch.arange(2))
    assert sentences(index) == before


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (dict(longest=0), "longest: got 0"),
        (dict(punctuation=(3, -1)), "punctuation: got -1"),
        (dict(punctuation="."), "punctuation: got '.'"),
        (dict(query="mean"), "query: got 'mean'"),
        (dict(group="sum"), "group: got 'sum'"),
    ],
)
def test_bad_option_is_refused(options, words):
    with pytest.raises(ValueError, match=words):
        CASE.index("sentencekv", **options)


def test_bytes():
    """A mean per sentence and KV head, a size per sentence, and flags of tokens are counted."""
    case = Case(q_heads=6, kv_heads=2, head_dim=16, value_dim=8, dtype=torch.float16)
    index = case.index("sentencekv", longest=8)
    index.append(*case.tokens(64))
    assert index.nbytes()["codes"] == 8 * (2 * 32 + 4)
    assert index.bytes_per_key() == {"stored": (32 + 2) / 8, "scanned": (32 + 2) / 8}
    index.mark_boundary()
    assert index.nbytes()["codes"] == 8 * (2 * 32 + 4) + 64
