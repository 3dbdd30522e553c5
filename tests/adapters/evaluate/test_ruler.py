"""RULER's tasks: texts and scores equal those of the package's own scripts.

Without nvidia-long-context-eval most tests are skipped: pip install -e ".[tasks]".
"""

import json
import random
import re
import subprocess
import sys

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from kvindex_adapters.evaluate import tasks
from kvindex_adapters.evaluate.tasks import ruler, ruler_package
from kvindex_adapters.evaluate.tasks.scoring import contains, contains_any
from kvindex_adapters.evaluate.texts import python_reference

NAMES = [f"ruler-{name}" for name in ruler.TASKS]
TOKENS = 3000
CHAT = "{% for m in messages %}<|user|>{{ m['content'] }}<|end|>{% endfor %}<|assistant|>"

installed = pytest.mark.skipif(
    ruler_package.missing() is not None, reason=ruler_package.missing() or ""
)


@pytest.fixture(scope="module")
def tokenizer():
    """A tokenizer of byte pairs, learned from a page of the Python reference."""
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=2000, initial_alphabet=alphabet, show_progress=False)
    bpe.train_from_iterator(python_reference()[:200], trainer)
    return PreTrainedTokenizerFast(tokenizer_object=bpe, chat_template=CHAT)


def test_thirteen_tasks_are_there_by_name():
    assert len(NAMES) == 13
    assert set(NAMES) <= set(tasks.names())


def test_what_is_missing_is_named(monkeypatch, tokenizer):
    monkeypatch.setattr(ruler_package, "PACKAGES", {"no_such_module": "no-such-package"})
    assert "no-such-package" in tasks.available("ruler-vt")
    with pytest.raises(ModuleNotFoundError, match=r"pip install -e .\.\[tasks\]"):
        tasks.make("ruler-vt", tokenizer, tokens=TOKENS, seed=0)


@given(st.lists(st.text("ab -", max_size=4)), st.lists(st.text("ab -", max_size=4)))
def test_words_are_the_sorted_set_of_all(adjectives, nouns):
    words = ruler_package.Words(adjectives, nouns)
    assert list(words) == sorted(
        {f"{adjective}-{noun}" for adjective in adjectives for noun in nouns}
    )


# The tasks' settings in RULER's paper (table 2, appendix B) and repository (synthetic.yaml)
NIAH = ("type_haystack", "type_needle_k", "type_needle_v", "num_needle_k", "num_needle_v")
PUBLISHED = {
    "niah_single_1": (128, NIAH, ("repeat", "words", "numbers", 1, 1)),
    "niah_single_2": (128, NIAH, ("essay", "words", "numbers", 1, 1)),
    "niah_single_3": (128, NIAH, ("essay", "words", "uuids", 1, 1)),
    "niah_multikey_1": (128, NIAH, ("essay", "words", "numbers", 4, 1)),
    "niah_multikey_2": (128, NIAH, ("needle", "words", "numbers", 1, 1)),
    "niah_multikey_3": (128, NIAH, ("needle", "uuids", "uuids", 1, 1)),
    "niah_multivalue": (128, NIAH, ("essay", "words", "numbers", 1, 4)),
    "niah_multiquery": (128, (*NIAH, "num_needle_q"), ("essay", "words", "numbers", 4, 1, 4)),
    "vt": (30, ("num_chains", "num_hops"), (1, 4)),
    "cwe": (120, ("freq_cw", "freq_ucw", "num_cw"), (30, 3, 10)),
    "fwe": (50, ("alpha", "coded_wordlen"), (2.0, 6)),
    "qa_1": (32, ("dataset",), ("squad",)),
    "qa_2": (32, ("dataset",), ("hotpotqa",)),
}


@installed
@pytest.mark.parametrize("name", PUBLISHED)
def test_settings_are_the_published_ones(name):
    generated, keys, values = PUBLISHED[name]
    arguments = vars(ruler_package.generator(name).args)
    assert arguments["tokens_to_generate"] == generated
    assert tuple(arguments[key] for key in keys) == values


@installed
@pytest.mark.parametrize("name", NAMES)
def test_an_instance_fills_its_tokens_and_holds_its_answer(tokenizer, name):
    instance = tasks.make(name, tokenizer, tokens=TOKENS, seed=5)
    (question,) = instance.questions
    assert TOKENS - (1000 if "qa" in name else 100) < instance.tokens() <= TOKENS
    text, asked = tokenizer.decode(instance.context), tokenizer.decode(question.ids)
    found = [answer for answer in question.answers if answer.lower() in text.lower()]
    assert found if "qa" in name else len(found) == len(question.answers)
    task = ruler_package.published(name[len("ruler-") :].replace("-", "_"))
    begin = asked.partition("<|assistant|>")[2]
    assert re.fullmatch(_pattern(task["answer_prefix"]), begin)
    assert question.max_new_tokens == task["tokens_to_generate"]


def _pattern(template):
    """Return a regular expression of the template's text, for one or several wanted items."""
    return re.sub(r"\\{\w+\\}", ".+", re.escape(template)).replace("are", "(are|is)")


@installed
def test_one_seed_gives_one_instance_and_another_seed_another(tokenizer):
    first, again, other = (
        tasks.make("ruler-vt", tokenizer, tokens=TOKENS, seed=seed) for seed in (2, 2, 3)
    )
    assert first.context.equal(again.context)
    assert first.questions[0].answers == again.questions[0].answers != other.questions[0].answers


@installed
def test_without_a_chat_template_the_prompt_is_the_published_text(tokenizer):
    plain = PreTrainedTokenizerFast(tokenizer_object=tokenizer.backend_tokenizer)
    instance = tasks.make("ruler-vt", plain, tokens=TOKENS, seed=0)
    text = plain.decode([*instance.context, *instance.questions[0].ids])
    assert text.startswith(" Memorize and track")
    assert text.endswith("they are: ")


@installed
@pytest.mark.parametrize("name", ["ruler-cwe", "ruler-qa-2", "ruler-vt"])
def test_too_few_tokens_are_refused(tokenizer, name):
    with pytest.raises(ValueError, match="tokens: got 100, allowed is at least"):
        tasks.make(name, tokenizer, tokens=100, seed=0)


@installed
def test_a_script_leaves_nothing_behind(tokenizer):
    ruler_package.generator.cache_clear()
    random.seed(1)
    np.random.seed(1)
    before = (
        sys.argv,
        sys.path,
        list(sys.path),
        random.getstate(),
        np.random.get_state()[1].tolist(),
    )
    tasks.make("ruler-vt", tokenizer, tokens=TOKENS, seed=0)
    after = sys.argv, sys.path, list(sys.path), random.getstate(), np.random.get_state()[1].tolist()
    assert before == after
    assert not {"tokenizer", "constants"} & sys.modules.keys()


@installed
@pytest.mark.parametrize("answer", ["", "Paris", "PARIS, rome.", "rome berlin paris", "par is"])
def test_scores_are_the_published_ones(answer):
    theirs = ruler_package._constants("eval").TASKS
    references = ["Paris", "Rome"]
    for ours, task in [(contains, "niah"), (contains, "vt"), (contains_any, "qa")]:
        task = {"vt": "variable_tracking"}.get(task, task)
        percent = theirs[task]["metric_fn"]([answer], [references])
        assert 100 * ours(answer, tuple(references)) == pytest.approx(percent, abs=0.01)


SCRIPT = """
import json, sys
script, seed, call, *sys.argv = json.loads(sys.argv[1])
sys.path[:0] = [script.rpartition("/")[0]]
made = {"__name__": "script", "__file__": script}
exec(compile(open(script).read(), script, "exec"), made)
if "sent_tokenize" in made:  # without nltk's download
    import punkt
    made["sent_tokenize"] = punkt.sent_tokenize
made["random"].seed(seed)
if "np" in made:
    made["np"].random.seed(seed)
print("\\n" + json.dumps(eval(call, made)))
"""
"""Run a script unchanged with its imports, and print the result of a call of its functions."""


def scripted(name, tokenizer, folder, *, seed, call):
    """Return the result of the package's script, run separately."""
    for module in ("nltk", "scipy", "tenacity"):
        pytest.importorskip(module)
    tokenizer.save_pretrained(folder)
    task = ruler_package.published(name)["task"]
    script = ruler_package._folder() / "data" / "synthetic" / f"{task}.py"
    options = {"tokenizer_type": "hf", "tokenizer_path": folder, "max_seq_length": TOKENS}
    arguments = [*ruler_package._arguments(name), *(f"--{k}={v}" for k, v in options.items())]
    order = [str(script), seed, call, "script", *arguments, f"--random_seed={seed}"]
    command = [sys.executable, "-c", SCRIPT, json.dumps(order)]
    environment = {"PYTHONPATH": ":".join(sys.path)}
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=True)
    return json.loads(done.stdout.splitlines()[-1])


CALLS = {
    "fwe": "generate_input_output(10**6, num_words=300, vocab_size=60, alpha=2.0)[:2]",
    "qa_1": "generate_input_output(7, 300)",
    "qa_2": "generate_input_output(7, 300)",
}


@installed
@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(PUBLISHED.keys() - {"vt"}))
def test_a_text_is_the_script_s_own(tokenizer, tmp_path, name):
    call = CALLS.get(name, "generate_input_output(300)")
    text, answers = scripted(name, tokenizer, tmp_path, seed=7, call=call)
    found = ruler.source(name, tokenizer, TOKENS, 7)
    with ruler_package.seeded(7):
        ours = found.sample(300)
    assert (ours[0], list(ours[1])) == (text, answers)


@installed
@pytest.mark.slow
def test_variables_are_traced_as_in_the_script_s_text(tokenizer, tmp_path):
    call = f"""sys_vartrack_w_noise_random(1, {TOKENS}, icl_example=
        sys_vartrack_w_noise_random(1, 500, incremental=5)[0])[0]["input"]"""
    theirs = scripted("vt", tokenizer, tmp_path, seed=7, call=call)
    found = ruler.source("vt", tokenizer, TOKENS, 7)
    with ruler_package.seeded(7):
        ours, _ = found.sample(100)
    assert _sentences(ours) == _sentences(theirs)


def _sentences(text):
    """Return the text's sentences in order, with equal names and values, without filler
    sentences."""
    masked = re.sub(
        r"\d+", "9", re.sub(r"\b[A-Z]{5}\b", "NAME", re.sub(r"\b[A-Z]{3}\b", "VAR", text))
    )
    fill = r"The grass is green|The sky is blue|The sun is yellow|Here we go|There and back again"
    return re.sub(rf"({fill}|[\s.])+", " ", masked)
