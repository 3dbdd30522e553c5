"""Tasks: texts contain the answers, lengths fit, seeds repeat, wrong answers score less."""

import json
import random
import re
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvindex_adapters.common.prompt import encode_prompt
from kvindex_adapters.evaluate import tasks
from kvindex_adapters.evaluate.tasks import registry, vocabulary
from kvindex_adapters.evaluate.tasks.draft import Asked, Draft, encode, longest, most_parts
from kvindex_adapters.evaluate.tasks.haystack import hidden, paragraphs, prose
from kvindex_adapters.evaluate.tasks.records import cells
from kvindex_adapters.evaluate.tasks.returning import in_order
from kvindex_adapters.evaluate.tasks.scoring import begins_with, contains, contains_any, is_settled

OURS = [name for name in tasks.names() if not name.startswith("ruler-")]

LENGTH = 2500


@pytest.fixture(scope="module")
def piece(tokenizer):
    """Return the tokens of the longest paragraph, the longest part of a haystack."""
    return max(len(tokenizer(text)["input_ids"]) for text in paragraphs())


def parts(answer, name):
    """Return the parts of a reference that the text contains; for a record, its values."""
    return map(str, json.loads(answer).values()) if name == "table" else [answer]


def right_answer(name, question):
    """Return an answer with all references of a question; for the table, what follows its
    beginning."""
    if name == "table":
        return f"{', '.join(question.answers)}]".partition('"age": ')[2]
    return "\n".join(question.answers)


@pytest.mark.parametrize("name", OURS)
def test_every_task(name, tokenizer, piece):
    made = tasks.make(name, tokenizer, tokens=LENGTH, seed=1)
    assert (made.task, made.seed) == (name, 1)
    assert LENGTH - piece - 8 < made.tokens() <= LENGTH
    text = tokenizer.decode(made.context)
    for number, question in enumerate(made.questions):
        for answer in question.answers:
            assert all(part in text for part in parts(answer, name))
        assert made.score(number, right_answer(name, question)) == 1
        assert made.score(number, "I do not know.") == 0
        assert made.score(number, "") == 0
    assert tasks.describe(name)
    assert tasks.available(name) is None


@pytest.mark.parametrize("name", OURS)
def test_a_seed_repeats_and_another_differs(name, tokenizer):
    first, again, other = (
        tasks.make(name, tokenizer, tokens=1500, seed=seed) for seed in (3, 3, 4)
    )
    assert torch.equal(first.context, again.context)
    for question, same in zip(first.questions, again.questions, strict=True):
        assert torch.equal(question.ids, same.ids)
        assert question.answers == same.answers
    assert first.questions[0].answers != other.questions[0].answers


@pytest.mark.parametrize("name", OURS)
def test_too_few_tokens_are_refused(name, tokenizer):
    with pytest.raises(ValueError, match=r"tokens: got 20, allowed is at least \d+"):
        tasks.make(name, tokenizer, tokens=20, seed=0)


def test_names_are_those_of_tasks(tokenizer, monkeypatch):
    assert tasks.names() == sorted(tasks.names())
    with pytest.raises(ValueError, match=r"task: got 'nedle', .* did you mean 'needle'"):
        tasks.make("nedle", tokenizer, tokens=LENGTH, seed=0)
    with pytest.raises(ValueError, match="task: got the name 'needle' twice"):
        registry.register(registry.Task("needle", "", None))
    lacking = registry.Task("lacking", "nothing", None, lambda: "allowed is after pip install it")
    monkeypatch.setitem(registry._TASKS, "lacking", lacking)
    assert "pip install" in tasks.available("lacking")
    with pytest.raises(ModuleNotFoundError, match="task: got 'lacking', allowed is after pip"):
        tasks.make("lacking", tokenizer, tokens=LENGTH, seed=0)


def test_the_page_has_every_task():
    page = (Path(__file__).parents[3] / "docs/adapters/tasks.md").read_text()
    assert sorted(re.findall(r"^\| `([\w-]+)` \|", page, re.MULTILINE)) == OURS


def test_a_task_is_one_function(tokenizer, monkeypatch):
    monkeypatch.setattr(registry, "_TASKS", dict(registry._TASKS))

    @registry.task("color", "the color of a door")
    def color(rng, parts):
        value = rng.choice(["red", "green"])
        body = hidden(rng, prose(rng, parts), [f"The door is {value}."])
        return Draft("\n\n".join(body), (Asked("\n\nWhich color has it?", (value,)),))

    made = tasks.make("color", tokenizer, tokens=1000, seed=0)
    assert f"The door is {made.questions[0].answers[0]}." in tokenizer.decode(made.context)


# From texts to ids

DRAFT = Draft(
    "The sky is blue, the grass is green.",
    (Asked("\n\nWhat is blue?", ("sky",)), Asked("\n\nWhat is green?", ("grass",), begin="The")),
)


def test_context_and_question_are_the_whole_prompt(tokenizer):
    made = encode(tokenizer, DRAFT, task="x", seed=0)
    for asked, question in zip(DRAFT.questions, made.questions, strict=True):
        message = {"role": "user", "content": DRAFT.context + asked.text}
        begin = tokenizer(asked.begin)["input_ids"]
        whole = encode_prompt(tokenizer, [message]).tolist() + begin
        assert torch.cat([made.context, question.ids]).tolist() == whole
    assert "green." in tokenizer.decode(made.context)
    assert "What" not in tokenizer.decode(made.context)  # although both questions begin with it
    assert made.tokens() == longest(tokenizer, DRAFT)


def test_one_answer_at_one_place_has_a_depth(tokenizer):
    (sky, _), text = DRAFT.questions, DRAFT.context
    drafts = [Draft(text, (sky,)), DRAFT, Draft(text + text, (sky,)), Draft(text, (Asked("", ()),))]
    depths = [encode(tokenizer, draft, task="x", seed=0).depth for draft in drafts]
    assert depths == [text.index("sky") / len(text), None, None, None]
    assert tasks.make("needle", tokenizer, tokens=1000, seed=0).depth < 1


def test_without_a_chat_template_the_text_ends_with_a_cue(plain):
    made = encode(plain, DRAFT, task="x", seed=0)
    prompts = [plain.decode(torch.cat([made.context, q.ids])) for q in made.questions]
    assert prompts[0] == f"{DRAFT.context}\n\nWhat is blue?\n\nAnswer:"
    assert prompts[1] == f"{DRAFT.context}\n\nWhat is green?\n\nAnswer: The"


@pytest.mark.parametrize("seed", range(20))
def test_as_many_pieces_as_fit(seed):
    rng = random.Random(seed)
    sizes = [rng.randint(1, 9) for _ in range(rng.randint(5, 300))]
    tokens = rng.randint(60, 400)

    def length(parts):
        return 50 + sum(sizes[i % len(sizes)] for i in range(parts))

    found = most_parts(length, tokens)
    assert length(found) <= tokens < length(found + 1)
    most = max(found - 3, 1)
    assert most_parts(length, tokens, most=most) == most


# Haystacks and words


def test_facts_stay_in_order_and_prose_repeats():
    rng = random.Random(0)
    facts = [str(i) for i in range(9)]
    body = hidden(rng, prose(rng, 5), facts)
    assert [piece for piece in body if piece in facts] == facts
    assert len(body) == 14
    whole = prose(rng, 2 * len(paragraphs()))
    assert all(whole.count(text) == 2 for text in whole[:20])


@pytest.mark.parametrize("kind", ["names", "coined", "variables", "uuids"])
def test_words_differ(kind):
    found = vars(vocabulary)[kind](random.Random(0), 5000)
    assert len(set(found)) == len(found) == 5000


# Metrics


def test_contained_answers_are_counted():
    assert contains("It is ABC and 12.", ("abc", "12", "13", "14")) == 0.5
    assert contains_any("It is ABC.", ("abc", "13")) == 1
    assert contains_any("It is AB C.", ("abc", "13")) == 0


def test_a_quote_counts_up_to_its_first_error():
    assert begins_with("one two 3 four", ("one two three four",)) == 0.5
    assert begins_with("two three four", ("one two three four",)) == 0
    assert begins_with("one two three four five", ("one two three four",)) == 1


@given(st.text("ab ", max_size=8), st.text("ab ", max_size=8))
@settings(derandomize=True, max_examples=300)
def test_what_follows_a_settled_answer_changes_no_score(answer, more):
    wanted = ("a b ab",)
    for metric in (begins_with, contains, contains_any):
        if is_settled(metric, answer, wanted):
            assert metric(answer + more, wanted) == metric(answer, wanted)


def test_a_quote_is_settled_when_a_word_is_wrong_or_all_are_there():
    wanted = ("one two three",)
    answers = {"one tw": False, "one tw ": True, "one two three": False, "one two three.": False}
    answers |= {"one two three ": True, "one two three four": True, "": False, "4": False}
    assert {answer: is_settled(begins_with, answer, wanted) for answer in answers} == answers
    assert not is_settled(in_order, "one two three ", wanted)  # unknown for this metric


def test_a_list_counts_in_its_order():
    wanted = ("sun", "moon", "star", "sun")
    assert in_order("1. Sun\n2. moon\n3. star\n4. sun", wanted) == 1
    assert in_order("1. sun\n2. moon\n3. star", wanted) == 0.75  # the list is not repeated
    assert in_order("star moon sun", wanted) == 0.5
    assert in_order("star " * 5 + "sun moon star sun", wanted) == 0.25  # too many words before


def test_a_table_counts_by_cells():
    wanted = ('{"name": "A", "age": 3, "city": "X"}', '{"name": "B", "age": 4, "city": "Y"}')
    assert cells(f"[{', '.join(wanted)}]", wanted) == 1
    assert cells(f"```json\n[{wanted[1]}", wanted) == 0.5
    assert cells('3, "city": "X"}]', wanted, begin='[{"name": "A", "age": ') == 0.5
    given = '[{"name": "C", "age": 5, "city": "Z"}, {"name": "A", "age": '
    assert cells(f'3, "city": "X"}}, {wanted[1]}]', wanted, begin=given) == 1
    assert cells('[{"age": "3", "name": "A", "city": "Y"}, {"name": "B"}]', wanted) == 0.25
    assert cells('[{"name": "A", "age": 3, {"name"', wanted) == 0  # no JSON
    assert cells("A is 3 years old and lives in X.", wanted) == 0
    more = (*wanted, '{"name": "C", "age": 3}', '{"name": "A", "age": 5}')
    assert cells(", ".join(more), wanted) == 0.5
    assert cells(f"[{wanted[0]}]\n\nAgain:\n[{', '.join(wanted)}]", wanted) == 0.5
