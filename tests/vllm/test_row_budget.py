"""`k="auto"` over vLLM's pages: as many rows as the error asks for, as a layer of kvindex reads."""

import math
from types import SimpleNamespace

import pytest
import torch

import kvindex
from kvindex.core.protocol import ErrorLimit, Rows
from kvindex.layer.output_scale import FEWEST, LAST, OutputScale
from kvindex.ops.attention import attend, with_sink_logits
from kvindex_adapters.vllm.attention import PagedAttention, Sequence, resident_lse
from kvindex_adapters.vllm.costs import Limit
from kvindex_adapters.vllm.metrics import Steps
from kvindex_adapters.vllm.options import Options
from kvindex_adapters.vllm.row_budget import RowBudget
from kvindex_adapters.vllm.unsupported import row_reasons
from tests.vllm.test_attention import LATENTS, D, G, H, latents_served, queries, served

AUTO = dict(k="auto", error=0.5)


def measured(paged, sequence, count=40):
    """Let a layer attend to the newest tokens with full attention, and return their outputs."""
    return paged.attend(queries(count), sequence, prompt=True)


def rows_of(hits):
    return (hits.ids >= 0).sum(-1)


def test_options():
    assert (Options(k="auto").most_rows, Options(k="auto").allowed_error) == (1024, 0.1)
    assert (Options(k=64, error=0.2).most_rows, Options(k=64, error=0.2).allowed_error) == (64, 0.2)
    assert Options().allowed_error is None
    text = Options(k="auto", error=0.3).explain(Limit(600))
    assert "up to 1024 rows, as many as error=0.3 asks for," in text


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (dict(k="many"), "k: got 'many', allowed is a number of at least 1, or 'auto'"),
        (dict(k="auto", error=0), "error: got 0, allowed is a positive finite number"),
        (dict(k="auto", index="pariskv:preset=fast"), "k: got 'auto', but the index 'pariskv:p"),
        (dict(error=0.1, index="pariskv:preset=paper"), "error: got 0.1, but the index 'pariskv"),
    ],
)
def test_bad_options(given, said):
    with pytest.raises(ValueError, match=said):
        Options.of(given)


def test_a_gpu_says_what_it_does_not_support():
    def reasons(options, shared, ubatching):
        parallel = SimpleNamespace(use_ubatching=ubatching)
        config = SimpleNamespace(parallel_config=parallel)
        return row_reasons(config, options, shared=shared)

    assert reasons(Options(), True, True) == []
    assert reasons(Options(k="auto"), False, False) == []
    first, second = reasons(Options(k="auto"), True, True)
    said = "in a model whose layers share keys and values, allowed is"
    assert first.startswith(f"k: got 'auto' {said} a number on a GPU")
    assert second.startswith("use_ubatching: got True, allowed is False with k='auto' on a GPU")
    (reason,) = reasons(Options(error=0.1), True, False)
    assert reason.startswith(f"error: got 0.1 {said} None on a GPU")


@pytest.mark.parametrize("sinks", [None, torch.tensor([2.0, -1.0, 0.5, 3.0])])
def test_hits_are_those_of_an_index_of_the_same_tokens(sinks):
    paged, sequence, keys, values = served(1100, **AUTO)
    measured(paged, sequence)
    scale = OutputScale()
    asked = queries(40)
    outputs = [
        attend(asked[i, None], keys[:, :, : 1061 + i], values[:, :, : 1061 + i], scale=D**-0.5)
        for i in range(40)
    ]
    scale.measure(values[:, :, 1060:1100], torch.stack(outputs, 2), None)
    query = 3 * queries()
    folded = query.view(1, G, -1, D)
    lse = (folded @ keys[:, :, 1024:].mT * D**-0.5).logsumexp(-1).flatten(1)
    lse = lse if sinks is None else torch.logaddexp(lse, sinks)
    limit = ErrorLimit(scale.variance(0.5), lse)
    sizes = dict(q_heads=H, kv_heads=G, head_dim=D)
    index = kvindex.create(paged.options.index, **sizes, backend="torch")
    index.append(keys[:, :, :1024], values[:, :, :1024])
    hits = index.search_within(query, k=1024, limit=limit)
    assert 16 <= rows_of(hits).min() <= rows_of(hits).max() < 1024
    rows = index.fetch(hits)
    output, lse = attend(
        query,
        torch.cat([rows.keys, keys[:, :, 1024:]], 2),
        torch.cat([rows.values, values[:, :, 1024:]], 2),
        scale=D**-0.5,
        bias=torch.nn.functional.pad(hits.log_weight, (0, 76)),
        return_lse=True,
    )
    output = output if sinks is None else with_sink_logits(output, lse, sinks)
    torch.testing.assert_close(paged.attend(query, sequence, sinks), output)
    assert paged.budget.take_found() == rows_of(hits).float().mean()


def test_a_smaller_error_is_closer_to_full_attention():
    differences = []
    for error in (2.0, 0.02):
        paged, sequence, keys, values = served(1100, k="auto", error=error)
        measured(paged, sequence)
        expected = attend(queries(), keys, values, scale=D**-0.5)
        differences.append((paged.attend(queries(), sequence) - expected).norm())
    assert differences[1] < 0.2 * differences[0]


def test_steps_attend_to_all_tokens_until_enough_outputs_are_measured():
    paged, sequence, keys, values = served(1100, **AUTO)
    full = attend(queries(), keys, values, scale=D**-0.5)
    for _ in range(FEWEST):
        assert not paged.budget.known
        torch.testing.assert_close(paged.attend(queries(), sequence), full)
    assert paged.budget.known
    assert (paged.attend(queries(), sequence) - full).abs().max() > 1e-3


def test_which_tokens_are_measured():
    """The newest ones, where the sequence is long enough to be searched."""
    budget = RowBudget(0.1, dense_below=600)
    assert list(budget.places(599, 599)) == []
    assert list(budget.places(601, 50)) == [599, 600]
    assert budget.places(900, 5) == range(895, 900)
    assert budget.places(5000, 4000) == range(5000 - LAST, 5000)


def fed(*measured):
    """Return a `RowBudget` with measurements (length, number of tokens, size of outputs)."""
    budget = RowBudget(1.0, dense_below=600)
    for length, count, size in measured:
        outputs = torch.full((1, H, count, D), float(size))
        budget.measure(torch.ones(1, G, count, D), outputs, length)
    return budget


def variance(budget, length):
    return budget.limit(torch.zeros(1, H), length).variance[0, 0].item()


def test_sequences_of_other_lengths_do_not_set_the_limit():
    """Otherwise short prompts, whose outputs are larger, allow long ones too large an error."""
    alone = variance(fed((8000, LAST, 1)), 8000)
    assert alone == H / G
    budget = fed(*[(700, LAST, 3)] * 5, (8000, LAST, 1), *[(700, LAST, 3)] * 5)
    assert variance(budget, 8000) == variance(budget, 4096) == alone
    assert variance(budget, 700) == variance(budget, 1023) == pytest.approx(9 * alone)


def test_a_length_without_measurements_takes_the_nearest():
    budget = fed((700, LAST, 3), (8000, LAST, 1), (100_000, FEWEST - 1, 5))
    assert variance(budget, 1024) == pytest.approx(9 * H / G)
    assert variance(budget, 2048) == variance(budget, 100_000) == H / G
    few = fed((700, FEWEST - 1, 1), (8000, FEWEST - 1, 1))
    assert not few.known
    few.measure(torch.ones(1, G, 1, D), torch.ones(1, H, 1, D), 700)
    assert few.known


def test_a_limit_is_a_moving_average():
    """A first request that differs from all others is forgotten."""
    budget = fed((8000, LAST, 100))
    before = variance(budget, 8000)
    for _ in range(60):
        budget.measure(torch.ones(1, G, LAST, D), torch.ones(1, H, LAST, D), 8000)
    assert variance(budget, 8000) == pytest.approx(H / G, rel=1e-2)
    assert before > 1000


@pytest.mark.parametrize("value", [math.nan, math.inf, 1e30])
@pytest.mark.parametrize("part", ["values", "outputs"])
def test_a_measurement_that_is_not_finite_is_ignored(value, part):
    budget = fed((8000, FEWEST - 1, 1))
    bad = dict(values=torch.ones(1, G, LAST, D), outputs=torch.ones(1, H, LAST, D))
    bad[part][0, 0, 3, 5] = value
    budget.measure(**bad, length=8000)
    assert not budget.known
    budget.measure(torch.ones(1, G, 1, D), torch.ones(1, H, 1, D), 8000)
    assert variance(budget, 8000) == H / G


def test_a_sequence_with_nan_does_not_change_the_searches_of_others():
    found = []
    for bad in (False, True):
        paged, sequence, *_ = served(1100, **AUTO)
        if bad:
            asked = queries(40).clone()
            asked[7, 0, 0] = math.nan
            paged.attend(asked, sequence, prompt=True)
        measured(paged, sequence)
        found.append(paged.attend(queries(), sequence))
    assert torch.equal(*found)


def test_drafted_tokens_choose_their_numbers_one_after_another():
    paged, sequence, *_ = served(1100, **AUTO)
    measured(paged, sequence)
    several = PagedAttention.of(paged.options, paged.geometry, drafted=3)
    object.__setattr__(several, "budget", paged.budget)
    asked = queries(3)
    alone = [
        paged.attend(asked[i, None], Sequence(sequence.rows, sequence.records, sequence.table, n))
        for i, n in enumerate((1098, 1099, 1100))
    ]
    assert torch.equal(several.attend(asked, sequence), torch.cat(alone))


def test_latents():
    paged, sequence, keys = latents_served(1100, **AUTO)
    asked = torch.randn(40, 6, 24, generator=torch.Generator().manual_seed(7))
    paged.attend(asked, sequence, prompt=True)
    assert paged.budget.known
    expected = attend(asked[:1], keys, keys[..., :16], scale=paged.geometry.scale)
    found = paged.attend(asked[:1], sequence)
    assert 0 < (found - expected).norm() / expected.norm() < 1
    assert 16 <= paged.budget.take_found() < 1024
    assert LATENTS["value_in_key"]


def test_the_log_sum_of_sink_window_and_learned_sinks():
    paged, _, keys, values = served(300, softcap=2.0)
    part = Rows(keys[:, :, :30], values[:, :, :30])
    sinks = torch.tensor([0.3, -math.inf, 5.0, 1.0])
    found = resident_lse(queries(), (part,), paged.geometry, sinks)
    _, lse = attend(
        *(queries(), part.keys, part.values),
        **dict(scale=paged.geometry.scale, softcap=2.0, return_lse=True),
    )
    torch.testing.assert_close(found, torch.logaddexp(lse, sinks))


def test_rows_that_were_found_are_counted():
    options = Options(sink=64, local_window=256, dense_below=600, k="auto")
    limit = Limit(600)
    found = Steps.of([1000, 300], options, limit, found=70)
    assert found == Steps(1, 1, 70 + 64 + 488 + 300, 1300)
    assert Steps.of([1000], options, limit, search=False, found=5) == Steps(0, 1, 1005, 1000)
