"""Files of benchmarks: lines in the published formats become instances; answers are scored."""

import json
from functools import partial

import pytest

from kvindex_adapters.evaluate import tasks
from kvindex_adapters.evaluate.tasks.infinitebench import (
    chosen,
    first_number,
    last_number,
    leading_numbers,
    named,
)
from kvindex_adapters.evaluate.tasks.longbench import classified, first_line, numbers
from kvindex_adapters.evaluate.tasks.mathematics import boxed, boxed_text
from kvindex_adapters.evaluate.tasks.overlap import characters, edit_similarity, f1, rouge_l
from kvindex_adapters.evaluate.tasks.scoring import common_length

LONGBENCH = {
    "input": "Who sat on the mat?",
    "context": "The cat sat on the mat. " * 400,
    "answers": ["the cat", "a cat"],
    "length": 2400,
    "dataset": "qasper",
    "language": "en",
    "all_classes": None,
    "_id": "x",
}
CHOICE = {
    "id": 0,
    "context": "Ann went to Rome.",
    "input": "Where did Ann go?",
    "answer": ["Rome"],
    "options": ["Oslo", "Rome", "Bonn", "Paris"],
}
PROBLEM = {"problem": "What is 1/2 + 1/4?", "solution": r"It is $\boxed{\frac{3}{4}}$."}


@pytest.fixture
def write(tmp_path):
    """Write records to a file, and return the task's name."""

    def written(name, *records):
        path = tmp_path / name
        path.write_text("\n".join(map(json.dumps, records)) + "\n")
        return f"file:{path}"

    return written


def test_a_byte_order_mark_is_not_part_of_the_first_line(tmp_path, tokenizer):
    path = tmp_path / "longbook_choice_eng.jsonl"
    path.write_bytes(b"\xef\xbb\xbf" + json.dumps(CHOICE).encode())
    assert tasks.make(f"file:{path}", tokenizer, tokens=500, seed=0).tokens() <= 500


def test_longbench_is_cut_in_the_middle(write, tokenizer):
    begin, end = "It begins here. ", "It ends here."
    context = begin + LONGBENCH["context"] + end
    name = write("any.jsonl", {**LONGBENCH, "context": context})
    made = tasks.make(name, tokenizer, tokens=500, seed=0)
    assert made.task == name
    assert 495 <= made.tokens() <= 500
    text = tokenizer.decode(made.context)
    assert begin in text
    assert end in text
    assert "Who sat on the mat?" in tokenizer.decode(made.questions[0].ids)
    assert made.questions[0].max_new_tokens == 128
    assert made.score(0, "The cat.") == 1
    assert made.score(0, "The dog.") == 0
    whole = tasks.make(name, tokenizer, tokens=20_000, seed=0)
    assert context in tokenizer.decode(whole.context)
    with pytest.raises(ValueError, match="tokens: got 10, allowed is at least"):
        tasks.make(name, tokenizer, tokens=10, seed=0)


def test_a_seed_is_a_line(write, tokenizer):
    records = [{**LONGBENCH, "context": f"Text {i}."} for i in range(3)]
    name = write("qasper.jsonl", *records)
    texts = [
        tokenizer.decode(tasks.make(name, tokenizer, tokens=500, seed=seed).context)
        for seed in range(4)
    ]
    assert [text.split()[-1] for text in texts] == ["0.", "1.", "2.", "0."]
    assert tasks.available(name) is None
    assert "qasper.jsonl" in tasks.describe(name)


def test_longbench_classes_are_the_lines_own(write, tokenizer):
    record = {**LONGBENCH, "dataset": "trec", "answers": ["Food"], "all_classes": ["Food", "City"]}
    made = tasks.make(write("trec.jsonl", record), tokenizer, tokens=500, seed=0)
    assert made.score(0, "Food\nType: City") == 1
    assert made.score(0, "Food or City") == 0.5
    assert made.score(0, "City") == 0


def test_infinitebench_asks_for_a_letter(write, tokenizer):
    made = tasks.make(write("longbook_choice_eng.jsonl", CHOICE), tokenizer, tokens=500, seed=0)
    asked = tokenizer.decode(made.questions[0].ids)
    assert "Where did Ann go?\nA. Oslo\nB. Rome\n" in asked
    assert made.questions[0].answers == ("Rome", "B")
    assert made.score(0, "B") == 1
    assert made.score(0, "A") == 0


def test_infinitebench_numbers_are_texts(write, tokenizer):
    record = {"id": 0, "context": "1 + 2 + 3", "input": "", "answer": [3, 6], "options": []}
    made = tasks.make(write("math_calc.jsonl", record), tokenizer, tokens=500, seed=0)
    assert made.score(0, "[3, 6]") == 1
    assert made.score(0, "[3, 7]") == 0.5


@pytest.mark.parametrize("record", [PROBLEM, {"problem": "?", "answer": r"\dfrac34"}])
def test_mathematics_wants_a_box(record, write, tokenizer):
    made = tasks.make(write("math.jsonl", record), tokenizer, tokens=500, seed=0)
    assert made.score(0, r"So \boxed{\frac{3}{4}}.") == 1
    assert made.score(0, r"So \boxed{\frac{4}{3}}.") == 0
    assert made.score(0, "So 3/4.") == 0


@pytest.mark.parametrize(
    ("name", "record", "said"),
    [
        (
            "a.jsonl",
            {"text": "x"},
            r"file: got a line with the fields \['text'\], allowed is \['answers', ",
        ),
        ("a.jsonl", {**LONGBENCH, "dataset": "other"}, "dataset: got 'other', allowed is one of"),
        ("a.jsonl", {**LONGBENCH, "context": 3}, "context: got 3, allowed is a string"),
        (
            "a.jsonl",
            {**LONGBENCH, "answers": []},
            "answers: got an empty list, allowed is at least one",
        ),
        ("a.jsonl", CHOICE, "file name: got 'a', allowed is one of"),
        ("a.jsonl", {"problem": "?", "solution": "3"}, "solution: got a text without"),
        ("a.jsonl", [3], "allowed is a JSON object"),
    ],
)
def test_lines_of_no_format_are_refused(name, record, said, write, tokenizer):
    with pytest.raises(ValueError, match=said):
        tasks.make(write(name, record), tokenizer, tokens=500, seed=0)


def test_files_that_cannot_be_read_are_refused(tmp_path, tokenizer):
    missing = f"file:{tmp_path / 'nothing.jsonl'}"
    assert tasks.available(missing) == "allowed is a file that exists"
    with pytest.raises(ModuleNotFoundError, match=r"nothing.jsonl', allowed is a"):
        tasks.make(missing, tokenizer, tokens=500, seed=0)
    for text, said in (("", "which is empty"), ("{", "allowed is JSON")):
        path = tmp_path / f"{len(text)}.jsonl"
        path.write_text(text)
        with pytest.raises(ValueError, match=said):
            tasks.make(f"file:{path}", tokenizer, tokens=500, seed=0)


# Metrics


def test_f1_counts_words_whatever_their_case_and_articles():
    assert f1("The cat!", ("cat",)) == 1
    assert f1("cat dog", ("cat", "bird")) == pytest.approx(2 / 3)
    assert f1("dog", ("cat",)) == 0
    assert f1("", ("cat",)) == 0
    assert f1("我是猫", ("猫是我",), words=characters) == 1


def test_rouge_l_counts_words_in_order():
    assert rouge_l("a b c d", ("a b c d",)) == 1
    assert rouge_l("a x c", ("a b c",)) == pytest.approx(2 / 3)
    assert rouge_l("c b a", ("a b c",)) == pytest.approx(1 / 3)
    assert rouge_l("x", ("a b c",)) == 0


def test_code_is_compared_by_its_first_line():
    assert edit_similarity("```python\nx = 1\ny = 2", ("x = 1",)) == 1
    assert edit_similarity("# a comment\nx = 2", ("x = 1",)) == pytest.approx(0.8)
    assert edit_similarity("```", ("x = 1",)) == 0


@pytest.mark.parametrize(
    ("first", "second", "length"),
    [("abcd", "abcd", 4), ("abcd", "dcba", 1), ("axbxc", "abc", 3), ("", "a", 0), ("a", "b", 0)],
)
def test_longest_common_subsequence(first, second, length):
    assert common_length(first, second) == length
    assert common_length(second, first) == length


def test_classes_and_numbers_are_counted():
    classes = ("city", "city center", "food")
    assert classified("city center", ("city center",), classes) == 1
    assert classified("city or food", ("city",), classes) == 0.5
    assert classified("food", ("city",), classes) == 0
    assert numbers("Paragraph 12", ("Paragraph 12",)) == 1
    assert numbers("12 or 13", ("Paragraph 12",)) == 0.5
    assert numbers("none", ("Paragraph 12",)) == 0
    line = partial(first_line, metric=f1)
    assert line("\ncat\nQuestion: x", ("cat",)) == 1
    assert line("dog\ncat", ("cat",)) == 0


def test_numbers_and_names_of_infinitebench():
    assert first_number("It is 42, not 43.", ("42",)) == 1
    assert first_number("It is 43, not 42.", ("42",)) == 0
    assert last_number("1 + 2 = 3", ("3",)) == 1
    assert last_number("3 = 1 + 2", ("3",)) == 0
    assert named('{"key": "a-b"}', ("a-b",)) == 1
    assert named("a-bc", ("a-b",)) == 0
    assert leading_numbers("1 2 4", ("1", "2", "3")) == pytest.approx(2 / 3)
    assert leading_numbers("2 1", ("1", "2")) == 0


@pytest.mark.parametrize("answer", ["B", "B.", "(B) Rome", "The answer is B", "She went to Rome."])
def test_a_choice_is_right(answer):
    assert chosen(answer, ("Rome", "B")) == 1


@pytest.mark.parametrize("answer", ["A", "The answer is C, not B", "I do not know", "A city", ""])
def test_a_choice_is_wrong(answer):
    assert chosen(answer, ("Rome", "B")) == 0


@pytest.mark.parametrize(
    ("given", "wanted", "right"),
    [
        ("73", "073", 1),
        (r"\dfrac{1}{2}", r"\frac12", 1),
        ("1,000", "1000", 1),
        (r"\text{Evelyn}", "Evelyn", 1),
        (r"\text{Evelyn}", r"\text{Angela}", 0),
        (r"5\text{ cm}", "5", 1),
        (r"90^\circ", "90", 1),
        (r"\left(1, 2\right)", "(1,2)", 1),
        ("1,2", "12", 0),
        ("x=5", "5.0", 1),
        ("6", "5", 0),
    ],
)
def test_boxes_are_compared_as_numbers_or_plain_tex(given, wanted, right):
    assert boxed(rf"First \boxed{{9}}, then \boxed{{{given}}}.", (wanted,)) == right


def test_what_a_box_holds():
    assert boxed_text(r"\boxed{\frac{1}{2}} or so") == r"\frac{1}{2}"
    assert boxed_text(r"\boxed{1") is None
    assert boxed_text("1}") is None
