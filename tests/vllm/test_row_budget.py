"""`k="auto"` over vLLM's pages: as many rows as the error asks for, as a layer of kvindex reads."""

import math

import pytest
import torch

import kvindex
from kvindex.core.protocol import ErrorLimit, Rows
from kvindex.layer.output_scale import FEWEST, HORIZON, LAST, OutputScale
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


def test_a_gpu_says_that_it_does_not_support_it():
    assert row_reasons(100, None) == []
    (reason,) = row_reasons("auto", None)
    assert reason.startswith("k: got 'auto', allowed is a number on a GPU")
    assert row_reasons(100, 0.1)[0].startswith("error: got 0.1, allowed is None on a GPU")


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


def test_only_long_sequences_are_measured_and_only_once():
    budget = RowBudget(0.1, dense_below=600)
    assert list(budget.places(599, 599)) == []
    assert list(budget.places(601, 50)) == [599, 600]
    assert budget.places(900, 5) == range(895, 900)
    assert budget.places(5000, 4000) == range(5000 - LAST, 5000)
    values, outputs = torch.ones(1, G, HORIZON, D), torch.ones(1, H, HORIZON, D)
    budget.measure(values, outputs)
    before = budget.limit(torch.zeros(1, H)).variance
    assert not budget.places(5000, 4000)
    assert budget.limit(torch.zeros(1, H)).variance is before


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
