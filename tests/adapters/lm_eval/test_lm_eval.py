"""Tasks of lm-evaluation-harness, scored and generated in steps that search the index.

The tests need the package lm_eval, which `make test-lm-eval` installs in an environment of its own.
"""

import inspect
import json
import subprocess
import sys

import pytest
import torch
from tokenizers import ByteLevelBPETokenizer
from transformers import PreTrainedTokenizerFast

# the imports below need lm_eval (E402)
lm_eval = pytest.importorskip("lm_eval")

from lm_eval.api.instance import Instance  # noqa: E402

import kvindex_adapters.hf as kvhf  # noqa: E402
from kvindex.layer.arguments import DEFAULT_K  # noqa: E402
from kvindex_adapters.lm_eval import scoring  # noqa: E402
from kvindex_adapters.lm_eval.model import KVIndexLM  # noqa: E402
from tests.adapters.tiny import build  # noqa: E402

REGIONS = dict(sink=4, local_window=8, update_every=8)
TEXT = "The quick brown fox jumps over the lazy dog. " * 3


def tokenizer_of():
    """Make a tokenizer whose tokens are single bytes."""
    made = ByteLevelBPETokenizer()
    names = ["<pad>", "<s>", "</s>"]
    made.train_from_iterator([""], vocab_size=259, special_tokens=names, show_progress=False)
    special = dict(zip(("pad_token", "bos_token", "eos_token"), names, strict=True))
    return PreTrainedTokenizerFast(tokenizer_object=made._tokenizer, **special)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Make a folder with a small model of random weights and its tokenizer."""
    folder = tmp_path_factory.mktemp("model")
    build("llama", vocab_size=259).save_pretrained(folder)
    tokenizer_of().save_pretrained(folder)
    return folder


def model_of(folder, index="exact", k=5, **options):
    return KVIndexLM(str(folder), index, k, device="cpu", **REGIONS, **options)


def full_of(folder):
    return KVIndexLM(str(folder), "none", device="cpu")


def request(kind, *arguments):
    return Instance(request_type=kind, doc={}, arguments=arguments, idx=0)


def one_by_one(model, options, context, continuation):
    """Score a continuation token by token, each in a forward pass of its own."""
    ids = torch.tensor(context)
    with kvhf.attach(model, **options) as cache, torch.no_grad():
        if len(ids) > 1:
            model(ids[None, :-1], past_key_values=cache)
        total, last = 0.0, ids[-1:]
        for token in continuation:
            logits = model(last[None], past_key_values=cache).logits[0, -1].log_softmax(-1)
            total, last = total + float(logits[token]), torch.tensor([token])
    return total


@pytest.mark.parametrize("index", ["exact", "quest:page=4", "h2o:budget=12", "pariskv"])
def test_scores_are_those_of_searching_steps(folder, index, monkeypatch):
    """Each token is scored by a step that searches, also the first, and not by a dense prompt."""
    monkeypatch.setattr(scoring, "PIECE", 4)
    model = model_of(folder, index)
    context = model.tok_encode(TEXT)
    continuations = [model.tok_encode(text) for text in ("a", "b c d", "z y x w v u")]
    assert len(context) > 60
    requests = [(None, context, continuation) for continuation in continuations]
    found = model._loglikelihood_tokens(requests, disable_tqdm=True)
    dense = full_of(folder)._loglikelihood_tokens(requests, disable_tqdm=True)
    for (score, _), (other, _), continuation in zip(found, dense, continuations, strict=True):
        want = one_by_one(model.model, model._options, context, continuation)
        assert score == pytest.approx(want, abs=1e-3)
        assert score != pytest.approx(other, abs=1e-3)


def test_all_rows_are_full_attention(folder):
    model, full = model_of(folder, k=10_000), full_of(folder)
    requests = [request("loglikelihood", TEXT, end) for end in (" a b c", " z", " q q q q")]
    found, want = model.loglikelihood(requests), full.loglikelihood(requests)
    for (score, greedy), (other, same) in zip(found, want, strict=True):
        assert score == pytest.approx(other, abs=1e-3)
        assert greedy == same
    rolling = [request("loglikelihood_rolling", TEXT), request("loglikelihood_rolling", "a b")]
    assert model.loglikelihood_rolling(rolling) == pytest.approx(
        full.loglikelihood_rolling(rolling), abs=1e-2
    )
    asked = [request("generate_until", TEXT, {"until": ["\n"], "max_gen_toks": 5})]
    assert model.generate_until(asked) == full.generate_until(asked)


def test_full_attention_is_that_of_the_model(folder):
    """The score of a continuation equals the one from the logits of a single forward pass."""
    full = full_of(folder)
    ids = full.tok_encode(TEXT)
    context, continuation = ids[:40], ids[40:60]
    ((score, greedy),) = full._loglikelihood_tokens([(None, context, continuation)])
    with torch.no_grad():
        logits = full.model(torch.tensor([ids[:60]])).logits[0, 39:59].log_softmax(-1)
    want = logits.gather(-1, torch.tensor(continuation)[:, None]).sum()
    assert score == pytest.approx(float(want), abs=1e-3)
    assert greedy == (logits.argmax(-1).tolist() == continuation)


def test_every_token_of_a_whole_text_is_a_searching_step(folder, monkeypatch):
    monkeypatch.setattr(scoring, "PIECE", 4)
    model = model_of(folder, "quest:page=4")
    text = [request("loglikelihood_rolling", TEXT[:60])]
    want = one_by_one(model.model, model._options, [1], model.tok_encode(TEXT[:60]))
    assert model.loglikelihood_rolling(text) == pytest.approx([want], abs=1e-2)
    assert model.loglikelihood_rolling(text) != pytest.approx(
        full_of(folder).loglikelihood_rolling(text), abs=1e-2
    )


@pytest.mark.parametrize("options", [None, dict(index="exact", k=5, dense_below=0, **REGIONS)])
def test_linear_attention_is_copied_for_each_continuation(options):
    """The state of linear attention cannot be rolled back."""
    model = build("falcon_h1")
    ids = torch.randint(3, 100, (70,), generator=torch.Generator().manual_seed(0)).tolist()
    ends = [ids[60:63], ids[63:69], ids[60:62]]
    together = scoring.scores(model, options, ids[:60], ends)
    for found, end in zip(together, ends, strict=True):
        ((score, greedy),) = scoring.scores(model, options, ids[:60], [end])
        assert found == (pytest.approx(score, abs=1e-4), greedy)


def test_a_greedy_continuation_is_recognized(folder):
    model = model_of(folder)
    context = model.tok_encode(TEXT)
    with kvhf.attach(model.model, **model._options) as cache:
        kvhf.read(model.model, model.tokenizer, torch.tensor(context[:-1]), cache=cache)
        answer = kvhf.generate(
            *(model.model, model.tokenizer, torch.tensor(context[-1:])),
            **dict(cache=cache, used="continue", max_new_tokens=6),
        ).answer_ids.tolist()
    other = [*answer[:-1], (answer[-1] + 1) % 90]
    found = model._loglikelihood_tokens([(None, context, answer), (None, context, other)])
    assert [greedy for _, greedy in found] == [True, False]


def test_a_context_is_read_once(folder, monkeypatch):
    read = []
    original = scoring.prefill
    monkeypatch.setattr(
        scoring, "prefill", lambda *a, **o: (read.append(o["stop"]), original(*a, **o))
    )
    model = model_of(folder)
    requests = [request("loglikelihood", TEXT, end) for end in (" a", " b", " c d")]
    requests.insert(1, request("loglikelihood", "w40 " + TEXT, " a"))
    model.loglikelihood(requests)
    assert len(read) == 2


def test_an_answer_ends_before_its_stop_string(folder):
    model = model_of(folder)
    plain = model.generate_until([request("generate_until", TEXT, {"max_gen_toks": 24})])[0]
    stop = next(letter for letter in plain[1:] if letter.isascii() and letter != plain[0])
    asked = request("generate_until", TEXT, {"until": [stop], "max_gen_toks": 24})
    assert model.generate_until([asked]) == [plain.partition(stop)[0]]


def test_a_long_context_loses_its_beginning(folder):
    model = model_of(folder, max_length=40)
    ids = model.tok_encode(TEXT)
    assert len(ids) > 60
    short = model._loglikelihood_tokens([(None, ids[-36:], ids[:5])])
    assert model._loglikelihood_tokens([(None, ids, ids[:5])]) == short
    assert len(model.loglikelihood_rolling([request("loglikelihood_rolling", TEXT)])) == 1
    with pytest.raises(ValueError, match="continuation: got 41 tokens, allowed is at most 40"):
        model._loglikelihood_tokens([(None, ids, ids[:41])])


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        (dict(batch_size=4), ValueError, "batch_size: got 4, allowed is 1"),
        (dict(max_length=10**6), ValueError, "max_length: got 1000000, allowed is 2 to 512"),
        (dict(sinks=4), TypeError, "model_args: got 'sinks', .*did you mean 'sink'"),
        (dict(index="parisvk"), ValueError, "did you mean 'pariskv'"),
        (dict(k=0), ValueError, "k: got 0"),
        (dict(index="none", sink=4), ValueError, "attach_options: got .* with index=None"),
    ],
)
def test_a_wrong_option_is_named(folder, options, error, message):
    with pytest.raises(error, match=message):
        KVIndexLM(str(folder), device="cpu", **options)


def test_an_unknown_option_of_a_task_is_named(folder):
    asked = request("generate_until", TEXT, {"until": [], "max_gen_toks": 3, "best_of": 2})
    with pytest.raises(ValueError, match="generation_kwargs: got best_of, allowed are until"):
        model_of(folder).generate_until([asked])


TASK = """
task: letters
dataset_path: json
dataset_kwargs: {data_files: {test: %s}}
test_split: test
output_type: multiple_choice
doc_to_text: "{{text}}"
doc_to_choice: "{{choices}}"
doc_to_target: label
metric_list: [{metric: acc}]
"""


def test_the_command_runs_a_task_of_a_local_file(folder, tmp_path):
    """The launcher finds the model type, and the results name the index."""
    lines = [{"text": TEXT, "choices": ["a", "b"], "label": n % 2} for n in range(2)]
    (tmp_path / "data.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    (tmp_path / "letters.yaml").write_text(TASK % (tmp_path / "data.jsonl"))
    options = f"pretrained={folder},index=quest:page=4,k=5,sink=4,local_window=8,update_every=8"
    command = [sys.executable, "-m", "kvindex_adapters.lm_eval", "--model", "kvindex"]
    command += ["--model_args", options, "--tasks", "letters", "--include_path", str(tmp_path)]
    command += ["--device", "cpu", "--output_path", str(tmp_path / "out")]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    (path,) = (tmp_path / "out").rglob("results*.json")
    result = json.loads(path.read_text())
    assert result["results"]["letters"]["acc,none"] == 0.5
    assert "quest:page=4" in json.dumps(result["config"])


def test_default_number_of_rows():
    assert inspect.signature(KVIndexLM).parameters["k"].default == DEFAULT_K
