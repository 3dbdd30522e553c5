"""Cases on which two ranks of a decoder agree, in plain torch without kernels (`test_ranks.py`)."""

from __future__ import annotations

import gc
import weakref
from contextlib import nullcontext
from functools import partial
from importlib.util import find_spec
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from kvindex.core.graphs import GRAPHS
from kvindex.core.ranks import RankError
from kvindex_adapters.common.unsupported import UnsupportedError
from kvindex_adapters.decoder import Decoder, Sampling
from kvindex_adapters.llama.fused import Fused
from kvindex_adapters.llama.heads import HeadRanks
from tests.adapters.decoder.families import ids_of, model_of
from tests.cuda.graphs import WholeGraph, recorded
from tests.support.fused import on_a_cpu

EVEN = 102
"""A vocabulary size that ranks divide, unlike `tiny.VOCABULARY`."""

EXACT = "exact:backend=torch"
REGIONS = dict(sink=3, local_window=4, update_every=5, dense_below=0)
WAIT_S = 20
"""Seconds until ranks that make different calls fail."""


def here():
    return HeadRanks.of("cpu", timeout_s=WAIT_S)


def decoders(name="llama", dtype=torch.float32, **options):
    """Make a decoder with all heads, and one with this rank's heads."""
    model = model_of(name, num_hidden_layers=2, **options).to(dtype)
    return Decoder.of(model), Decoder.of(model, ranks=here())


def logits(decoder, prompts, fused=None):
    """Return logits after prompts in chunks, and after three more tokens, which `fused` runs."""
    run = decoder.start(prompts, index=None)
    run.session.fused = fused
    made = [run.session.read_prompt(run.ids, 16, 40)]
    made += [run.session.step(torch.tensor([5 + token, 9][: len(prompts)])) for token in range(3)]
    return torch.stack(made)


def are_close(shared, one, fused=None, batches=(1, 2)):
    for batch in batches:
        prompts = [ids_of(30), ids_of(21)][:batch]
        got, want = logits(shared, prompts, fused), logits(one, prompts)
        torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-4)


def rows_of_the_head_are_gathered(**options):
    one, shared = decoders("llama, biases, tied", vocab_size=EVEN, **options)
    assert 2 * len(shared.weights.head.weight) == EVEN
    are_close(shared, one)


def a_head_has_other_rows_than_the_embedding():
    """Logits are gathered if each rank has some rows of the head, and not if each has all."""
    for rows in (EVEN - 1, EVEN + 2):
        model = model_of("llama", num_hidden_layers=1, vocab_size=EVEN)
        model.lm_head = torch.nn.Linear(model.config.hidden_size, rows, bias=False)
        are_close(Decoder.of(model, ranks=here()), Decoder.of(model))


def half_precision(dtype):
    one, shared = decoders(dtype=dtype, vocab_size=EVEN)
    got, want = (logits(decoder, [ids_of(30)]).float() for decoder in (shared, one))
    assert torch.nn.functional.cosine_similarity(got, want, dim=-1).min() > 0.999


def products_of_kernels_are_summed():
    """With reference kernels, biases and the residual count once, and graphs' inputs stay in
    place."""
    if find_spec("triton") is None:
        return
    with pytest.MonkeyPatch.context() as patch:
        on_a_cpu(patch)
        one, shared = decoders("llama, biases, tied")
        fused = Fused(shared.weights)
        residual = fused._residual(torch.ones(1, 64))
        are_close(shared, one, fused)
        if dist.get_rank():
            assert residual.data_ptr() == fused._residual(torch.ones(1, 64)).data_ptr()
            assert not residual.any()


def what_is_uneven_is_refused():
    """This includes unevenness of a single layer, or of one rank's model; no rank waits for
    others."""
    odd = model_of("llama", num_hidden_layers=2)
    mlp, hidden = odd.model.layers[1].mlp, odd.config.hidden_size
    mlp.gate_proj, mlp.up_proj = (torch.nn.Linear(hidden, 95, bias=False) for _ in range(2))
    mlp.down_proj = torch.nn.Linear(95, hidden, bias=False)
    with pytest.raises(UnsupportedError, match="got 2 ranks, but the model has 95 rows of the MLP"):
        Decoder.of(odd, ranks=here())
    rank = dist.get_rank()
    with pytest.raises(ValueError, match="heads: got kv_heads = 1 on rank 1, allowed is the value"):
        Decoder.of(model_of("llama", num_key_value_heads=2 - rank), ranks=here())
    with pytest.raises(ValueError, match=r"heads: got dtype = 'torch\.float16' on rank 1"):
        Decoder.of(model_of("llama").to((torch.float32, torch.float16)[rank]), ranks=here())


def another_device_than_the_current_one_is_refused():
    with (
        mock.patch("torch.cuda.current_device", return_value=0),
        pytest.raises(
            ValueError, match="device: got cuda:1, allowed is the current device, cuda:0"
        ),
    ):
        HeadRanks.of("cuda:1")


def a_graph_that_does_not_end_names_who_is_gone():
    ranks = HeadRanks.of("cpu", timeout_s=0.5)  # not those of `here`, which continue
    if dist.get_rank():
        return  # to the other rank, this rank seems to have ended
    with pytest.raises(RankError, match=r"lost rank 1 of 2 .*the device did not finish"):
        ranks.wait_for(mock.Mock(query=lambda: False))


def ranks_end_together(refused):
    """Ranks launch equally many steps after a stop token, even if one driver refuses graphs."""

    def refuse(*given):
        WholeGraph(*given)  # sends the messages of a capture
        raise RuntimeError("no memory")

    one, shared = decoders(head_dim=64)
    want = one.generate(ids_of(30), index=None, max_new_tokens=40).answer_ids.tolist()
    stop = max(want, key=want.index)  # the token whose first occurrence is last
    want = want[: want.index(stop) + 1]
    assert 8 < len(want) < 36
    refuses = dist.get_rank() == refused
    with recorded(WholeGraph) as graph:
        GRAPHS["cpu"] = refuse if refuses else graph
        warned = pytest.warns(match="the driver refuses") if refuses else nullcontext()
        session, options = shared.session(index=None), dict(max_new_tokens=40)
        with warned:
            got = shared.generate(ids_of(30), session=session, stop=[stop], **options)
        with warned:
            shared.generate(ids_of(9, seed=4), session=session, **options)
    assert got.answer_ids.tolist() == want
    said = [None, None]
    dist.all_gather_object(said, session.ids.tolist())
    assert said[0] == said[1]


def sessions_go_on():
    """Sessions fork and truncate, with heads or tokens distributed. Forks survive their session."""
    one, shared = decoders()
    said = []
    for decoder, index in ((one, EXACT), (shared, EXACT), (one, f"{EXACT}+sharded:block=8")):
        session = decoder.session(index=index, k=1000, attach_options=REGIONS)
        decoder.read(ids_of(30), session, chunk=16)
        answer = partial(decoder.generate, max_new_tokens=6)
        answers = [answer(ids_of(9, seed=3), session=session)]
        session.truncate(34)
        answers.append(answer(ids_of(9, seed=5), session=session))
        clone, index = session.fork(), weakref.ref(session._attentions[0].index)
        del session
        gc.collect()
        assert index() is None
        answers.append(answer(ids_of(7, seed=9), session=clone))
        said.append([one.answer_ids.tolist() for one in answers])
    assert said[0] == said[1] == said[2]


def drafts_are_verified_together():
    """Ranks accept the same drafts, with heads or tokens distributed, greedy or sampled."""
    one, shared = decoders(vocab_size=EVEN)
    prompt = torch.cat([ids_of(20), ids_of(20)])
    for verify, sampling in (("index", Sampling()), ("full", Sampling(temperature=0.7, seed=2))):
        given = dict(speculative_tokens=3, verify=verify, sampling=sampling, max_new_tokens=12)
        said = []
        for decoder, index in ((one, EXACT), (shared, EXACT), (one, f"{EXACT}+sharded:block=8")):
            options = dict(index=index, k=1000, attach_options=REGIONS, **given)
            said.append(decoder.generate(prompt, **options))
        assert said[0].acceptance.drafted
        assert len({str(answer.answer_ids.tolist()) for answer in said}) == 1
        assert len({answer.acceptance for answer in said}) == 1


def cases(ranks, every):
    """Map names to cases."""
    return {
        "head": rows_of_the_head_are_gathered,
        "head, untied": partial(rows_of_the_head_are_gathered, tie_word_embeddings=False),
        "other head": a_head_has_other_rows_than_the_embedding,
        "float16": partial(half_precision, torch.float16),
        "bfloat16": partial(half_precision, torch.bfloat16),
        "kernels": products_of_kernels_are_summed,
        "sessions": sessions_go_on,
        "drafts": drafts_are_verified_together,
        "uneven": what_is_uneven_is_refused,
        "device": another_device_than_the_current_one_is_refused,
        "gone": a_graph_that_does_not_end_names_who_is_gone,
        "ends": partial(ranks_end_together, None),
        "ends, one refuses": partial(ranks_end_together, 1),
    }
