"""rewards.py: answers in a text, how they are asked for and written, the fence and the toy."""

import re
from decimal import Decimal
from fractions import Fraction
from random import Random

import numpy as np
import pytest
import torch
from helpers import ROOT, task_in

from engine.answers import THOUGHTS, write_answers
from engine.tasks import check_task, load_task
from engine.training.logs import shown_examples
from rewards import Fence, Problem, Task, Toy, UserError, parse_answers
from rollout import score


@pytest.mark.parametrize(
    ("text", "m", "expected"),
    [
        ("<answer_1>0 1</answer_1> <answer_2> 1 </answer_2>", 2, ["0 1", "1"]),
        ("talk <answer_2>b</answer_2> talk <answer_1>a</answer_1>", 2, ["a", "b"]),
        ("<answer_1>a</answer_1><answer_2>b</answer_2>", 1, ["a"]),  # more than were asked for
        ("<answer_1>a<answer_2>b</answer_2>", 2, ["b"]),  # the first was never closed
        ("<answer_1>a<answer_2>b</answer_1></answer_2>", 2, []),
        ("<answer_1> red", 1, []),
        ("<answer_1></answer_1>", 1, [""]),
        ("<answer_¹>a</answer_¹>", 1, []),
        ("<answer_1>a<answer_</answer_1>", 1, []),
        ("<answer_1>a<answer_1>b</answer_1>", 1, []),
        ("a</answer_1><answer_2>b<answer_2>c</answer_2>", 2, []),
        # A preface that mentions tags:
        ("I use <answer_1>. So: <answer_1> a </answer_1>", 1, ["a"]),
        ("In <answer_1>, <answer_2>: <answer_1>a</answer_1><answer_2>b</answer_2>", 2, ["a", "b"]),
        ("I end with </answer_1>. <answer_1>a</answer_1>", 1, ["a"]),
        ("So: <answer_1>a</answer_1> in <answer_1>, not <answer_1>b</answer_1>", 1, ["a"]),
        ("So: <answer_1>a</answer_1> In <answer_2>: <answer_2>b</answer_2>", 2, ["a", "b"]),
        ("So: <answer_1><answer_1>a</answer_1></answer_1>", 1, ["a"]),
    ],
)
def test_tags(text, m, expected):
    """Guards against an answer that ends in another's tag, or comes out of a tag never closed."""
    assert parse_answers(text, Task(), m) == expected


@pytest.mark.parametrize(
    ("text", "m", "finished", "unfinished"),
    [
        ("1. red\n2) blue\n3: green", 3, ["red", "blue", "green"], ["red", "blue"]),
        ("Sure:\n 1. red \n2. blue\n2. late\n4. beyond\n", 3, ["red", "blue"], ["red", "blue"]),
        ("1. r", 1, ["r"], []),
        ("1.red\n", 1, ["red"], ["red"]),
        ("**1.** a\n **2. b**\n3. **c**\n", 3, ["a", "b", "**c**"], ["a", "b", "**c**"]),
        ("1.5 apples", 1, ["1.5 apples"], []),
        ("two\nlines", 1, ["two\nlines"], []),
        ("<answer_1> red </answer_1>\n2. blue\n", 2, ["red"], ["red"]),  # tags: lines do not count
        ("<think>1. no\n</think>1. red\n2. blue\n", 2, ["red", "blue"], ["red", "blue"]),
        ("<think>1. no\n2. no\n", 2, [], []),
    ],
)
def test_answers_without_tags(text, m, finished, unfinished):
    """Guards against an end of a rollout at an answer that its next token would change."""
    task = Task()
    assert parse_answers(text, task, m) == finished
    assert parse_answers(text, task, m, finished=False) == unfinished
    task.reads_untagged = False
    assert parse_answers(text, task, m) == (["red"] if "</answer" in text else [])


TAG = "<answer_1> red </answer_1>"
TAG_2 = "<answer_2> blue </answer_2>"


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (f"<think>Maybe <answer_1> draft </answer_1>? no.</think>{TAG}", ["red"]),
        (f"<think>Form: <answer_1> ... </answer_1></think>\n{TAG} {TAG_2}", ["red", "blue"]),
        ("<think><answer_1> x </answer_1>", []),
        (f"draft <answer_1> x </answer_1></think>{TAG}", ["red"]),  # opened in the prompt
        (f"{TAG}<think>1. no</think>{TAG_2}", ["red", "blue"]),
        ("<think>a <think>b</think> 1. no\n</think>\n1. red\n2. blue", ["red", "blue"]),
        ("<think>so</think>\nHere they are:\n1. red\n2. blue", ["red", "blue"]),
        ("<think>so</think> red", ["red"]),
    ],
)
@pytest.mark.parametrize("marks", THOUGHTS)
def test_thoughts_are_no_answers(text, expected, marks):
    """Guards against drafts that are graded, and against a preamble that is taken for an answer."""
    opening, closing = marks
    text = text.replace("<think>", opening).replace("</think>", closing)
    for form in ("tags", "lines"):
        assert parse_answers(text, task_in(form), len(expected) or 1) == expected


@pytest.mark.parametrize("marks", THOUGHTS)
def test_a_thought_may_speak_of_other_marks(marks):
    """Guards against a mark inside a thought that is taken for a thought without an end."""
    opening, closing = marks
    for other, other_closing in THOUGHTS:
        for said in (other, other_closing, f"{other} {other_closing}"):
            thought = f"{opening}not {said} no{closing}\n1. red\n2. blue\n"
            is_own = opening in said or closing in said
            assert is_own or parse_answers(thought, task_in("lines"), 2) == ["red", "blue"]


def test_thoughts_are_no_answers_in_a_form_of_ones_own():
    task = Task()
    task.find_answers = lambda text, m, finished: re.findall(r"\[(\w*)\]", text)
    for text in ("<think>[no]</think>[red]", "[no]</think>[red]", "[red][m is 1]"):
        assert parse_answers(text, task, 1) == ["red"]


@pytest.mark.parametrize("m", [1, 2])
def test_a_list_whose_first_number_stands_in_the_prompt(m):
    """The rollout may begin with an empty line, or with a number that is part of the answer."""
    task = task_in("lines")
    assert parse_answers("\nred blue\n", task, m) == ["red blue"]
    assert parse_answers("5 apples\n", task, m, finished=False) == ["5 apples"]
    assert parse_answers(" \n", task, m) == []
    assert parse_answers("1. red\n2. blue", task, m) == ["red", "blue"][:m]
    assert parse_answers("red\n2. blue\nOr:\n1. grey", task, m) == ["red", "blue"][:m]
    assert parse_answers("2. blue\n", task, 2) == ["blue"]


@pytest.mark.parametrize("preface", ["Sure! Here they are:\n", " Of course.\n\n", "\nSure:\n**"])
def test_what_stands_before_a_line_numbered_1_is_a_preface(preface):
    """Guards against a preface for the first answer, and a rollout of one answer that ends with it."""
    task = task_in("lines")
    text = f"{preface}1. red\n2. blue\n3. grey"
    bold = text.replace("**1.", "**1.**")
    assert parse_answers(bold, task, 3) == ["red", "blue", "grey"]
    for form in ("0{}. {}", "({}) {}", "### {}. {}", "> {}) {}", "{}\\. {}", "{}、{}", "【{}】{}"):
        rows = [form.format(i, word) for i, word in ((2, "blue"), (1, "red"), (3, "grey"))]
        text = "\n".join(["Here they are:", *rows])
        assert parse_answers(text, task, 3) == ["red", "blue", "grey"]
    assert parse_answers("red\n2. blue\n\n1. grey", task, 2) == ["red", "blue"]
    assert parse_answers("Sure:\n", task, 1, finished=False) == []
    assert parse_answers("Sure: red\n", task, 1, finished=False) == ["Sure: red"]


NUMBERS = """1、 2、|1． 2．|1） 2）|（1） （2）|(1) (2)|1\\. 2\\.|1\\) 2\\)|１． ２．|１、 ２、|１. ２.|（１） （２）|1： 2：|【1】 【2】|① ②
①、 ②、|⑴ ⑵|⒈ ⒉|❶ ❷|一、 二、|（一） （二）|㈠ ㈡|**1、** **2、**|**（1）** **②**|1️⃣ 2️⃣|１・ ２・|\u30001） \u30002）"""
PROSE = """3.14 metres|3．14 米|2、3 个|２、３個|2.5|10：30 开会|二、三月|①②都对|一个|1|1月2日|(三个|2024、2025|1 、|十分好。"""


@pytest.mark.parametrize("numbers", re.split(r"[|\n]", NUMBERS))
@pytest.mark.parametrize("form", ["tags", "lines"])
def test_numbers_as_chinese_japanese_and_korean_models_write_them(numbers, form):
    """After a preface or without one, with a blank or without; what grows is read as what has ended."""
    first, second = numbers.split(" ")
    for blank in ("", " "):
        answers = f"{first}{blank}三文鱼\n{second}{blank}파란 집 3、4\n"
        for text in (answers, f"好的，以下是：\n\n{answers}", f"{answers}\n以上。"):
            for finished in (True, False):
                found = parse_answers(text, task_in(form), 2, finished)
                assert found == ["三文鱼", "파란 집 3、4"]
    assert parse_answers("好的：\n", task_in("lines"), 1, finished=False) == []


@pytest.mark.parametrize("text", PROSE.split("|"))
def test_prose_that_begins_with_a_number_is_no_list(text):
    assert parse_answers(f"{text}\n", task_in("tags"), 1) == [text]
    assert parse_answers(f"{text}\n2. x", task_in("lines"), 1, finished=False) == [text]
    assert parse_answers(f"红\n{text}", task_in("tags"), 3) == []


@pytest.mark.parametrize("form", ["tags", "lines"])
def test_what_is_written_is_read(form):
    """Guards against a warm-up that imitates what no parser reads, such as two lines as one of a list."""
    task = task_in(form)
    for answers in (["red"], ["red", "blue"]):
        text = write_answers(task, answers)
        assert parse_answers(text, task, 2) == answers
        assert text.startswith("<answer_1>" if form == "tags" else " red")
        prompt = task.request("1. Paint!\nFor example:\n", 3, answers)
        assert shown_examples(f"{prompt}<|im_end|>\n<think>\n\n</think>\n\n1.", task) == answers
    assert shown_examples("1. Paint!\n2. Sing!", task) == []
    assert parse_answers(write_answers(task, ["red\n"]), task, 1) == ["red"]
    if form == "lines":
        for write in (write_answers, lambda task, answers: task.request("Paint!", 3, answers)):
            with pytest.raises(ValueError, match='one line .* form = "tags"'):
                write(task, ["red\nblue"])


def test_no_text_breaks_the_parser():
    """Fragments in random order: at most m answers, each from the text, and none changes as it grows."""
    rng = Random(2)
    pieces = [f"<{slash}answer_{i}>" for i in range(3) for slash in ("", "/")]
    pieces += ["1. ", "2) ", "red", " ", "\n", "<", "answer_", "é\ud800", "\0", "</think>", "."]
    for _ in range(3000):
        text = ""
        counted: list[str] = []
        m = rng.randint(1, 3)
        for piece in rng.choices(pieces, k=12):
            text += piece
            answers = parse_answers(text, Task(), m)
            assert len(answers) <= m and all(answer in text for answer in answers)
            growing = parse_answers(text, Task(), m, finished=False)
            may_change = "answer_" in text or "</think>" in text or m > 1
            assert may_change or not counted or growing == counted
            counted = growing


# Scores.


def test_problems_may_differ_in_their_objectives():
    """Shorter vectors are padded with 0, also where the minimum is another, and the padding is marked."""

    class Varying(Task):
        minimum = -1.0

        def reward(self, problem, answer):
            return [1.0] * problem.data

    problems = [Problem("a", 2), Problem("b", 3)]
    scored = score(Varying(), problems, [["x"], []], 1)
    assert scored.vectors.tolist() == [[[[1, 1, 0]]], [[[-1, -1, -1]]]]
    assert scored.scalars.tolist() == [[[1]], [[-1]]]
    assert scored.objective_mask.tolist() == [[True, True, False], [True, True, True]]


def test_what_is_a_number_may_stand_in_a_vector():
    task = Task()
    values = [
        Fraction(1, 3),
        2**63,
        Decimal("0.5"),
        np.bool_(1),
        np.float32(0.25),
        torch.tensor(0.5),
    ]
    task.reward = lambda problem, answer: values
    scored = score(task, [Problem("a", None)], [["x"]], 1)
    expected = [1 / 3, 2.0**63, 0.5, 1, 0.25, 0.5]
    assert scored.vectors.flatten().tolist() == pytest.approx(expected)


@pytest.mark.parametrize("value", ["half", None, 1j, Decimal("NaN"), 10**400, [1], 2**200])
def test_what_is_no_number_is_named(value):
    task = Task()
    task.reward = lambda problem, answer: [value]
    with pytest.raises(UserError, match="(list|finite).* problem 'a', answer ''"):
        score(task, [Problem("a", None)], [["x"]], 1)


# The fence and the toy.


@pytest.mark.parametrize(
    ("answer", "vector"),
    [
        ("red red red red red red", [1, 0, 0]),
        ("grey grey grey grey grey grey", [0.35] * 3),
        ("red  red blue\ngreen grey grey", [2.7 / 6, 1.7 / 6, 1.7 / 6]),
        ("red red red red red", [0] * 3),  # five boards
        ("red red red red red fence", [0] * 3),  # a word, but no color
        ("", [0] * 3),
    ],
)
def test_what_a_fence_pays(answer, vector):
    fence = Fence()
    assert fence.reward(Problem("fence", None), answer) == pytest.approx(vector)


def test_toy_is_a_deceptive_valley():
    """Every bit that is set costs, until the block is full; the other blocks do not matter."""
    toy = Toy()
    problem = Problem("toy", {})
    for block, expected in (("000", 0.8), ("100", 0.4), ("110", 0.0), ("111", 1.0)):
        answer = " ".join("000" + block + "000")
        assert toy.reward(problem, answer) == pytest.approx([0.8, expected, 0.8])
    for text in ("", "1", "1 1 1 1 1 1 1 1 2", "1 1 1 1 1 1 1 1 1 1"):
        assert toy.reward(problem, text) == [0.0] * 3


CODE = pytest.param("code", marks=pytest.mark.linux)


@pytest.mark.parametrize("name", ["fence", "toy", "maze", CODE, f"{ROOT}/examples/my_task.py"])
def test_a_tiny_model_knows_every_word(name):
    """Guards against words that the vocabulary lacks: they would become padding, silently."""
    task = load_task(name)
    check_task(task, 3)
    rng = Random(1)
    n_perfect = 0
    for split in ("train", "demonstrations", "test"):
        for problem in task.problems(split, 20):
            answer = task.demonstration(problem, rng)
            assert {*task.tiny_prompt(problem).split(), *answer.split()} <= set(task.words)
            assert len(answer.split()) <= task.answer_words
            vector = task.reward(problem, answer)
            assert len(vector) == len(task.objectives)
            assert max(vector) >= task.minimum
            n_perfect += min(vector) == 1
    assert n_perfect < 20, "demonstrations should leave something to discover"
