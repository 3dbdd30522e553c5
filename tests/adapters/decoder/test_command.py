"""`kvindex generate --engine`: the decoder answers like transformers, or reports why not."""

import pytest
import torch

from kvindex_adapters.cli import engine as engines
from kvindex_adapters.decoder import Decoder, Sampling
from kvindex_adapters.decoder.session import Session
from tests.adapters.cli.test_cli import Chats, generated, run, tiny, words
from tests.adapters.decoder.families import model_of
from tests.adapters.tiny import build
from tests.support.helpers import mostly_slow, sampled

__all__ = ["tiny"]


@pytest.mark.parametrize(
    ("index", "more"), sampled(["exact", "none"], [(), ("--chat",), ("--top-k", 1)])
)
def test_both_engines_answer_alike(tiny, tmp_path, index, more):
    given = ("--prompt", words(50), "--index", index, *more)
    ours, shown = generated(tmp_path, *given, "--engine", "decoder")
    theirs, _ = generated(tmp_path, *given, "--engine", "transformers")
    usual, _ = generated(tmp_path, *given)
    assert ours.pop("engine") == "decoder"
    assert theirs.pop("engine") == usual.pop("engine") == "transformers"
    times = dict(prefill_s=0, token_s=0)
    assert ours | times == theirs | times == usual | times
    assert ours["answer"] in shown.stdout
    assert "50 tokens of the prompt in" in shown.stderr or "--chat" in more


@pytest.mark.parametrize("engine", ["decoder", "transformers"])
def test_several_tokens_per_step(tiny, tmp_path, engine):
    given = ("--prompt", f"{words(25)} {words(25)}", "--engine", engine)
    plain, _ = generated(tmp_path, *given, "--index", "none")
    full = ("--speculative-tokens", 3, "--verify", "full", "--index", "exact", "-k", 2)
    told, shown = generated(tmp_path, *given, *full, "--dense-below", 0)
    assert told["answer"] == plain["answer"]
    assert (told["speculative_tokens"], told["verify"]) == (3, "full")
    assert told["acceptance"]["drafted"] > 0
    assert "drafted tokens accepted" in shown.stderr
    for index in ("exact", "none"):
        told, shown = generated(tmp_path, *given, "--speculative-tokens", "auto", "--index", index)
        assert told["answer"] == plain["answer"]
        assert "steps verified drafts" in shown.stderr
        asked = ("--ask", words(7, 2), "--speculative-tokens", 2, "--index", index)
        told = generated(tmp_path, *given, *asked)[0]
        assert told["answers"][0]["acceptance"]["steps"] > 0
    assert "acceptance" not in plain


@pytest.mark.parametrize("engine", ["decoder", "transformers"])
def test_a_draft_model(tiny, tmp_path, monkeypatch, engine):
    """Further questions do not let the draft model of the decoder read the text again."""
    models, tokenizer = {"small": build("llama", num_hidden_layers=2)}, Chats()
    monkeypatch.setattr(
        "kvindex_adapters.hf.model.load_model.load",
        lambda name, **options: (models.get(name, tiny), tokenizer),
    )
    read, real = [], Session._read_prompt

    def counted(session, ids, *more):
        read.append(ids.shape[1])
        return real(session, ids, *more)

    monkeypatch.setattr(Session, "_read_prompt", counted)
    given = ("--prompt", words(50), "--engine", engine)
    drafts = ("--speculative-tokens", 3, "--draft-model", "small")
    for index in ("exact", "none"):
        for asked in ((), ("--ask", words(9, 1), "--ask", words(7, 2))):
            plain, _ = generated(tmp_path, *given, *asked, "--index", index)
            read.clear()
            told, shown = generated(tmp_path, *given, *asked, *drafts, "--index", index)
            assert told["draft_model"] == "small"
            answers, others = told.get("answers", [told]), plain.get("answers", [plain])
            assert [one["answer"] for one in answers] == [one["answer"] for one in others]
            assert all(one["acceptance"]["drafted"] > 0 for one in answers)
            assert "drafted tokens accepted" in shown.stderr
            assert sum(length > 40 for length in read) == (2 if engine == "decoder" else 0)


def test_draft_models_that_the_command_refuses(tiny, monkeypatch):
    given = ("generate", "--model", "tiny", "--prompt", "Hello", "--draft-model", "other")
    for more, message in (
        ((), "draft_model: got a model without speculative_tokens"),
        (("--speculative-tokens", 2, "--verify", "full"), "draft_model: got a model together with"),
    ):
        result = run(*given, *more)
        assert message in str(result.exception or result.stderr)

    def load(name, **options):
        tokenizer = Chats()
        tokenizer.name_or_path = name
        tokenizer.get_vocab = lambda: {"Hello": len(name)}
        return build("llama"), tokenizer

    monkeypatch.setattr("kvindex_adapters.hf.model.load_model.load", load)
    result = run(*given, "--speculative-tokens", 2)
    message = "the tokenizer 'other', in which the token 'Hello' has the id 5, for a model with"
    assert message in str(result.exception)
    monkeypatch.setattr("kvindex_adapters.common.parallel.launched", lambda: True)
    result = run(*given, "--speculative-tokens", 2)
    assert "draft_model: got 'other' under torchrun" in str(result.exception)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (("--speculative-tokens", 0), "speculative_tokens: got 0"),
        (("--verify", "full"), "verify: got 'full' without speculative_tokens"),
        (("--speculative-tokens", 2, "--verify", "some"), "verify: got 'some'"),
        (
            ("--speculative-tokens", 2, "--verify", "full", "--index", "none"),
            "verify: got 'full' without an index",
        ),
    ],
)
def test_wrong_options_of_speculation(given, message):
    result = run("generate", "--model", "tiny", "--prompt", "Hello", *given)
    assert result.exit_code != 0
    assert message in str(result.exception or result.stderr)


def test_weights_in_fp8_are_the_decoders(tiny, tmp_path):
    pytest.importorskip("triton")
    given = ("--prompt", words(50), "--index", "none")
    made = generated(tmp_path, *given, "--weights", "fp8")[0]
    assert (made["engine"], made["weights"]) == ("decoder", "fp8")
    decoder = Decoder.of(tiny, Chats(), weights="fp8")
    assert made["answer"] == decoder.generate(words(50), index=None, max_new_tokens=6).text


@pytest.mark.parametrize("index", ["exact", "none"])
def test_questions_about_a_text_are_answered_alike(tiny, tmp_path, index):
    given = ("--prompt", words(50), "--ask", words(9, 1), "--ask", words(7, 2), "--index", index)
    ours, _ = generated(tmp_path, *given, "--engine", "decoder")
    theirs, _ = generated(tmp_path, *given, "--engine", "transformers")
    for mine, other in zip(ours["answers"], theirs["answers"], strict=True):
        assert mine["answer"] == other["answer"]
        assert mine.get("rows_read_fraction") == other.get("rows_read_fraction")


@pytest.mark.parametrize("engine", mostly_slow(["decoder", "transformers"], "decoder"))
def test_what_an_engine_saved_both_answer_from(tiny, tmp_path, engine):
    folder, document, question = tmp_path / "saved", words(50), words(9, 1)
    given = ("--prompt", document, "--engine", engine)
    generated(tmp_path, *given, "--ask", words(7, 2), "--save-cache", folder)
    want, _ = generated(tmp_path, "--prompt", f"{document} {question}")
    for other in ("decoder", "transformers"):
        asked = ("--prompt", document, "--engine", other, "--ask", question)
        told, result = generated(tmp_path, *asked, "--load-cache", folder)
        assert told["answers"][0]["answer"] == want["answer"]
        assert "loaded 48 tokens" in result.output
    shorter = (*given[:1], words(30), *given[2:], "--load-cache", folder)
    assert "tokens, but only the first" in str(generated(tmp_path, *shorter, status=1)[1].exception)


def test_a_seed_draws_the_same_answer(tiny, tmp_path):
    given = ("--prompt", words(50), "--engine", "decoder", "--temperature", 5)
    made = [generated(tmp_path, *given, "--seed", seed)[0]["answer"] for seed in (3, 3, 4)]
    assert made[0] == made[1] != made[2]


@pytest.mark.parametrize(
    ("more", "said"),
    [
        (("--engine", "vllm"), "engine: got 'vllm', allowed is one of"),
        (
            ("--engine", "decoder", "--repetition-penalty", 1.1),
            "engine: got 'decoder', which does not support these options: repetition_penalty: got",
        ),
        (
            ("--engine", "decoder", "--min-p", 0.1),
            "min_p: got 0.1, but the decoder does not implement min_p",
        ),
        (("--weights", "int4"), "weights: got 'int4', allowed is one of"),
        (("--weights", "fp8", "--save-cache", "x"), "weights: got 'fp8' with --save-cache or"),
        (
            ("--weights", "fp8", "--engine", "transformers"),
            "weights: got 'fp8' with --engine transformers, which allows only 'plain'",
        ),
    ],
)
def test_what_the_decoder_does_not_do_is_an_error(tiny, more, said):
    result = run("generate", "--model", "tiny", "--prompt", words(9), *more)
    assert said in str(result.exception)


def test_a_model_that_the_decoder_does_not_run_is_an_error(tiny, monkeypatch):
    monkeypatch.setattr(
        "kvindex_adapters.hf.model.load_model.load", lambda *a, **o: (build("gemma3_text"), Chats())
    )
    given = ("generate", "--model", "tiny", "--prompt", words(9), "--engine", "decoder")
    assert "which does not support these options: model: got Gemma3ForCausalLM" in str(
        run(*given).exception
    )


class OnGpu:
    """A model that claims to be on a GPU."""

    device = torch.device("cuda")

    def __init__(self, model):
        self.config, self.generation_config = model.config, model.generation_config


def test_on_a_gpu_the_decoder_is_the_default_where_it_can(monkeypatch, capsys):
    made = []
    monkeypatch.setattr(
        engines.Decoder, "of", lambda *given, **more: made.append(given) or Answers()
    )
    model = OnGpu(model_of("llama"))
    chosen = engines.choose(None, model, None, {"do_sample": False}, 5)
    assert chosen.name == "decoder"
    assert chosen.generate("x") == ("x", Sampling(seed=5))
    assert engines.choose("transformers", model, None, {}, 0).name == "transformers"
    assert capsys.readouterr().err == ""
    model.generation_config.num_beams = 4  # the command makes one answer whatever this is
    assert engines.choose(None, model, None, {}, 0).name == "decoder"
    assert engines.choose(None, model, None, {"min_p": 0.1, "do_sample": True}, 0).name == (
        "transformers"
    )
    assert "using transformers instead of the decoder" in capsys.readouterr().err
    assert len(made) == 2


class Answers:
    """A decoder that returns its prompt."""

    def generate(self, prompt, sampling):
        return prompt, sampling
