"""MuSiQue, EUREQA, ToolRL: the rules of scoring, known flaws of the official code, files."""

import contextlib
import json
from pathlib import Path

import pytest
import torch
from helpers import task_in

from engine.tasks import load_task
from rewards import Problem, Task, UserError, parse_answers
from tasks import code
from tasks.code import find_blocks, job
from tasks.files import word_f1
from tasks.tool import Tool, match, parse_calls


def musique(i: int, hops: int = 2) -> dict:
    paragraphs = []
    for index in range(20):
        paragraphs.append({"idx": index, "title": f"T{index}", "paragraph_text": f"Text {index}."})
    steps = [{"paragraph_support_idx": index} for index in (3, 5, 7, 9)]
    record = {"id": f"{hops}hop__{i}", "question": f"Who {i}?", "paragraphs": paragraphs}
    record |= {"question_decomposition": steps[:hops], "answerable": True}
    return record | {"answer": "The River Thames", "answer_aliases": ["Thames", "Isis"]}


def eureqa(i: int) -> dict:
    return {
        "idx": i,
        "question": ["Person A wrote Book B.", f"Book B is like Book {i}."],
        "entity_masks": ["Person A", "Book B", "City C", "Film D", "Person E", "Person F"],
        "entities": [f"Ann_{i}", "The_Book", "Rome", "Alien_(film)", "Émile_Zola", "Told"],
    }


FORECAST = [{"name": "weather", "parameters": {"city": "Bonn", "days": 3}}]


def tool(i: int, calls: list = FORECAST) -> dict:
    text = "\n".join(json.dumps(call) for call in calls)
    section = f"<tool_call>\n{text}\n</tool_call>" if calls else ""
    return {
        "instruction": f"You have tools ({i}).",
        "input": "**user** weather?",
        "output": f"<think> ... </think>\n{section}\n<response> ok </response>",
    }


RECORDS = {"musique": musique, "eureqa": eureqa, "tool": tool}


def write_records(path: str, records: list[dict]) -> str:
    Path(path).write_text("".join(json.dumps(record) + "\n" for record in records), "utf-8")
    return path


def write(name: str, n: int, path: str = "data.jsonl") -> str:
    return write_records(path, [RECORDS[name](i) for i in range(n)])


def task_and_problem(name: str, record: dict) -> tuple[Task, Problem]:
    """The task, and the problem of a record that it holds out."""
    test_data = write_records("one.jsonl", [record])
    task = load_task(name, data=write(name, 3), test_data=test_data)
    return task, task.problems("test", 1)[0]


N = 128_000
B = " " * N
LONG_TEXTS = [f" a{B}b\n", f"1. a{B}b\n2. c", f"{B}1", f"1.{B}x", f"{B}`", f"```{B}`", "9" * N]
LONG_TEXTS += [f"```\n{B}x\n```", f"```\n```{B}x", "`" * N + "x", "~" * N + "`", "**1." + "*" * N]
MARKS = ("1. ", "1 ", "<answer_1>", "<answer>", "<tool_call>", "**1.\n", "```\n", "a,", "x\n# x\n")
LONG_TEXTS += [mark * (N // 2) for mark in (*MARKS, "from __future__ import x\n# x\n")]


@pytest.fixture(scope="module")
def tasks_and_problems(tmp_path_factory) -> list[tuple[Task, Problem]]:
    with contextlib.chdir(tmp_path_factory.mktemp("files")):
        return [task_and_problem(name, record(0)) for name, record in RECORDS.items()]


@pytest.mark.parametrize("text", LONG_TEXTS, ids=lambda text: repr(text[:20]))
def test_reading_takes_time_in_proportion_to_the_text(text, tasks_and_problems):
    """Guards against a search to the end of the text from every tag: eight minutes, which pytest.ini's limit ends."""
    for form in ("tags", "lines"):
        for finished in (True, False):
            parse_answers(text, task_in(form), 1, finished)
    find_blocks(text, finished=True)
    job({"before": "", "after": "", "tests": [], "call": None}, text)
    code._is_arithmetic(text)
    parse_calls(text)
    for task, problem in tasks_and_problems:
        for tag in ("answer", "tool_call"):
            task.reward(problem, f"<{tag}>{text}</{tag}>")


@pytest.mark.parametrize(
    "ours, gold, score",
    [
        ("the", "a", 0),  # what has no other word keeps its article
        ("A.", "a", 1),
        ("...", "a", 0),
        ("river Thames", "The Thames!", 2 / 3),
        ("  The U.S.  Army, an ally ", "us army ally", 1),
        ("Theatre", "atre", 0),  # an article is a word
        ("a1 a1 b1", "a1 b1", 0.8),  # multisets
        ("E\u0301mile Zo\u00adla", "\u00c9mile Zola", 1),  # NFD; a soft hyphen
        ("O\u2019Brien\u2019s “Lo\u200bve”", "O'Brien's \"Love\"", 1),
        ("O´Brien", "O'Brien", 1),
        ("1914–1918", "1914-1918", 1),
        ("x — y − z", "x - y - z", 1),
        ("ＡＢＣ１２３，\u3000｢red｣\u3000cat", "ABC123 “red” cat", 1),
        ("New\u00a0York\u202fCity\ufeff", "new york city", 1),
        ("《红楼梦》 ofﬁce", "红楼梦 office", 1),
        ("¿北京。", "北京", 1),
        ("20 m²", "20 m2", 1),
        ("Émile", "Emile", 0),  # another letter
    ],
)
def test_texts_are_compared_without_case_articles_and_punctuation(ours, gold, score):
    assert word_f1(ours, gold) == pytest.approx(score)


ALL_FIVE = (
    "<entity_A>ann 0</entity_A><entity_B> book </entity_B><entity_C>ROME</entity_C>\n"
    "<entity_D>Alien_film</entity_D><ENTITY_E>\u00c9mile Zola</ENTITY_E>"
)
WANTED = [
    {"name": "book", "parameters": {"seats": 2, "vip": True, "name": "Ann Lee", "price": "1.5"}},
    {"name": "mail", "parameters": {"to": ["Ann", "Bob"], "options": {"html": False, "copies": 1}}},
]


def output(calls: list | str, think: str = "<think>so</think>") -> str:
    text = calls
    if isinstance(calls, list):
        text = "\n".join(json.dumps(call) for call in calls)
    return f"{think}<tool_call>{text}</tool_call>"


def booked(parameters: str) -> str:
    return output(f'{{"name": "book", "parameters": {{{parameters}}}}}')


def changed(**values) -> list[dict]:
    """WANTED with other values in the first call."""
    first, second = WANTED
    return [first | {"parameters": first["parameters"] | values}, second]


TAGS = [{"tag": tag} for tag in ("xbox", "android", "mac")]


def found(*parameters: dict) -> list[dict]:
    """Calls of one function with these parameters."""
    return [{"name": "find", "parameters": own} for own in parameters]


DEEP = "[" * 990 + "]" * 990
# A task and a record of its file.
MUSIQUE = ("musique", musique(0))
EUREQA = ("eureqa", eureqa(0))
ODD_NAME = ("eureqa", eureqa(0) | {"entities": ["!!!", *"bcdef"]})
CALLS = ("tool", tool(0, WANTED))
TWO_BLOCKS = ("tool", tool(0) | {"output": output(WANTED[:1]) + output(WANTED[1:], "")})
NO_CALL = ("tool", tool(0, []))
FIND_TWO = ("tool", tool(0, found(*TAGS[:2])))
FIND_AND_SORT = ("tool", tool(0, found(TAGS[0], {"sort": "new"})))


@pytest.mark.parametrize(
    "asked, answer, vector",
    [
        (MUSIQUE, "<support>3, 5</support><answer>River Thames</answer>", [1, 1, 1, 1, 1]),
        (MUSIQUE, "<support>5</support><answer>isis</answer>", [0, 1, 1, 1, 1]),  # an alias
        # Brackets, officially dropped; a superscript, officially a crash; the first four distinct ones.
        (MUSIQUE, "<support>[3], [5]</support><answer>Rhine</answer>", [1, 1, 1, 1, 0]),
        (MUSIQUE, "<support>\u00b3, 5</support><answer>Thames</answer>", [0, 1, 1, 1, 1]),
        (MUSIQUE, "<support>1, 1, 2, 4, 3, 5</support><answer>Thames</answer>", [1, 0, 1, 1, 1]),
        (MUSIQUE, "<support>35</support><answer>x</answer>", [0, 0, 1, 1, 0]),  # not 3 and 5
        (MUSIQUE, f"<support>{'9' * 5000}</support><answer>x</answer>", [0, 0, 1, 1, 0]),
        (MUSIQUE, "<support>3, 5</support><answer>  </answer>", [0] * 5),
        (MUSIQUE, "<answer>the</answer>", [0, 0, 1, 1, 0]),
        (EUREQA, ALL_FIVE, [1, 1, 1, 1, 1]),
        (EUREQA, "<entity_A>Ann_0</entity_A><entity_B></entity_B>", [1, 0, 0, 0, 0]),
        (EUREQA, "<entity_C>Roma</entity_C>", [0] * 5),
        (EUREQA, "<entity_E>E\u0301mile\u00a0Zola\u200b</entity_E>", [0, 0, 0, 0, 1]),
        (EUREQA, "<entity_E>Emile Zola</entity_E>", [0] * 5),
        (EUREQA, "<entity_C>the</entity_C>", [0] * 5),
        (ODD_NAME, "<entity_A>!!!</entity_A>", [1, 0, 0, 0, 0]),
        (CALLS, output(WANTED), [1, 1, 1, 1]),
        (CALLS, output(WANTED[::-1]), [1, 1, 1, 1]),
        (CALLS, output(json.dumps(WANTED)), [1, 1, 1, 1]),
        (CALLS, output(WANTED, ""), [0, 1, 1, 1]),
        (CALLS, output(WANTED[:1]), [1, 2 / 3, 0.5, 0.5]),
        (CALLS, "<think>so</think>", [0, 0, 0, 0]),
        (CALLS, output(changed(vip="false")), [1, 1, 1, 7 / 8]),  # truthiness: officially a match
        (CALLS, output(changed(price="15")), [1, 1, 1, 7 / 8]),  # 1.5 without its point: likewise
        (CALLS, output(changed(price=1.5, seats="2")), [1, 1, 1, 1]),
        (CALLS, output(changed(name="Ann")), [1, 1, 1, (3 + 2 / 3) / 4 / 2 + 0.5]),
        # A key too many, officially free; the wrong function, officially paid.
        (CALLS, output(changed(extra=0)), [1, 1, (8 / 9 + 1) / 2, (4 / 5 + 1) / 2]),
        (CALLS, output([WANTED[0] | {"name": "cook"}, WANTED[1]]), [1, 0.5, 0.5, 0.5]),
        (CALLS, output(WANTED + WANTED[:1]), [1, 0.8, 2 / 3, 2 / 3]),
        (CALLS, output('{"name": "book"} nonsense'), [1, 2 / 3, 0, 0]),
        # Each call in a block of its own, as Qwen and Hermes write them.
        (CALLS, output(WANTED[:1]) + "\n" + output(WANTED[1:], ""), [1, 1, 1, 1]),
        (CALLS, output(WANTED[:1]) + output(WANTED[:1], ""), [1, 0.5, 0.5, 0.5]),
        (CALLS, output(WANTED[:1]) + output(WANTED[1:], "")[:-30], [1, 2 / 3, 0.5, 0.5]),
        (TWO_BLOCKS, output(WANTED), [1, 1, 1, 1]),
        (CALLS, output("[" * 100_000), [0, 0, 0, 0]),
        (CALLS, booked('"seats": NaN, "price": 1e999'), [1, 2 / 3, 1 / 3, 0]),
        (CALLS, booked(f'"seats": 1{"0" * 400}'), [1, 2 / 3, 0.2, 0]),
        (CALLS, output(f'{{"name": "mail", "parameters": {{"to": {DEEP}}}}}'), [0, 0, 0, 0]),
        (CALLS, f"<think>{output(WANTED, '')}</think>", [0, 0, 0, 0]),  # a thought is no call
        (CALLS, "<think>a <tool_call> it is</think>" + output(WANTED, ""), [1, 1, 1, 1]),
        (NO_CALL, "<think>no need</think><response>Hello</response>", [1, 1, 1, 1]),
        (NO_CALL, "Hello", [0, 1, 1, 1]),
        (NO_CALL, "<think>so</think><tool_call></tool_call>", [1, 1, 1, 1]),
        (NO_CALL, output(WANTED), [0, 0, 0, 0]),
        (NO_CALL, output("nonsense"), [0, 1, 1, 1]),
        # Calls of one function are paired by keys and values; a call is a partner once.
        (FIND_TWO, output(found(TAGS[1], TAGS[0])), [1, 1, 1, 1]),
        (FIND_TWO, output(found(TAGS[0])), [1, 2 / 3, 0.5, 0.5]),
        (FIND_TWO, output(found(TAGS[0], TAGS[0])), [1, 1, 1, 0.5]),
        (FIND_AND_SORT, output(found({"sort": "new"}, TAGS[0])), [1, 1, 1, 1]),
    ],
)
def test_what_an_answer_earns(asked, answer, vector):
    task, problem = task_and_problem(*asked)
    assert task.reward(problem, answer) == pytest.approx(vector)


def test_the_answer_weighs_three_hops():
    task, _ = task_and_problem(*MUSIQUE)
    assert task.scalar(torch.tensor([0.0, 1.0, 1.0, 1.0, 0.5])).item() == pytest.approx(4.5 / 7)


def test_musique_holds_out_as_many_of_each_kind():
    """Guards against an evaluation on the first 300 rows, which are nearly all of two hops."""
    records = []
    for hops, n in ((2, 30), (3, 12), (4, 9)):
        records += [musique(i, hops) for i in range(n)]
    test_data = write_records("test.jsonl", records)
    task = load_task("musique", data=write("musique", 20), test_data=test_data)
    hops = [len(problem.data["support"]) for problem in task.problems("test", 27)]
    assert [hops.count(n) for n in (2, 3, 4)] == [9, 9, 9]
    assert len(ids_of(task, "test", 51)) == 51
    train = ids_of(task, "train", 18)
    assert len(train) == 18
    assert not train & ids_of(task, "validation", 2)


def ids_of(task: Task, split: str, n: int) -> set[str]:
    return {problem.id for problem in task.problems(split, n)}


def test_eureqa_trains_on_half_of_the_hard_file():
    hard = [eureqa(i) | {"entities": ["Hard", *"bcdef"]} for i in range(9)]
    Path("hard.json").write_text(json.dumps(hard), "utf-8")
    task = load_task("eureqa", data=write("eureqa", 11), test_data="hard.json")
    first = {split: [data["entities"][0] for data in part] for split, part in task.parts.items()}
    assert first["test"] == ["Hard"] * 5
    training = first["train"] + first["validation"]
    assert len(training) == 15
    assert training.count("Hard") == 4


def test_an_attempt_keeps_its_thoughts():
    """Guards against a format that nobody can meet, and a draft in the rollout's own thought that counts."""
    task = Tool.__new__(Tool)  # without a file
    attempt = output([{"name": "f", "parameters": {}}])
    text = f"<think> as <attempt_1> no </attempt_1> </think><attempt_1> {attempt} </attempt_1>"
    assert parse_answers(text, task, 1) == [attempt]
    assert parse_answers(text.partition("</think>")[2], task, 1) == [attempt]
    assert parse_answers("<think> <attempt_1> no </attempt_1>", task, 1) == []


SAME = """"−5 °C" "-5 °C" | "１５" 15 | "O’Brien" "O'Brien" | "Ju\u0301lia" "Júlia" |
"==" "==" | [1.50, "x"] ["1.5", "X"] | 0.1 "0.10" | [[1]] [[1]] | true true | {} {} | null null |
["Bob", "the Ann"] ["ann", "bob"] | [1, "2"] [1.0, 2] | {"a": {"b": 1}} {"a": {"b": "1"}} | "1e3" 1000 | "+5" 5"""
HALF = '"15 km" "1.5 km" | "5 C" "-5 C" | {"a": 1} {"a": 1, "b": 2}'
DIFFERENT = """"$15" "$1.5" | "10⁵" 105 | "105%" "10.5%" | "v15" "v1.5" | "2024-11-1" "2024-1-11" | "!=" "==" |
"407128,-740060" "40.7128,-74.0060" | ["15 km"] ["1.5 km"] | ["!="] ["=="] | ["true"] [true] |
1234567890123456788 1234567890123456789 | "1234567890123456788" "1234567890123456789" | ["null"] [null] |
true 1 | 1 true | [true] [1] | null "" | 0 false | "x" ["x"] | "five" 5"""


@pytest.mark.parametrize(
    "pairs, same", [(SAME, 1), (HALF, 0.5), (DIFFERENT, 0), ('["ann"] ["ann", "bob"]', 2 / 3)]
)
def test_values_of_arguments(pairs, same):
    """Some only look alike. A pair of JSON values each: what the policy wrote and what is right."""
    for pair in pairs.split("|"):
        decoder = json.JSONDecoder()
        ours, end = decoder.raw_decode(pair.strip())
        gold = json.loads(pair.strip()[end:])
        assert match(ours, gold) == pytest.approx(same), pair


def test_calls_in_a_text():
    text = '{"name": "f", "arguments": {"x": 1}}, {"name": 3}\n{"name": " g "}'
    assert parse_calls(text) == [["f", {"x": 1}], ["g", {}]]
    assert parse_calls('[{"name": "f", "parameters": null}]') == [["f", {}]]
    assert parse_calls("") == []


CALL = '<tool_call>{"name": "f"}</tool_call>'


@pytest.mark.parametrize(
    "name, change",
    [
        ("musique", {"answer": " "}),
        ("musique", {"question_decomposition": [{"paragraph_support_idx": 99}]}),
        ("musique", {"paragraphs": 1}),
        ("musique", {"paragraphs": 2 * musique(0)["paragraphs"]}),
        ("eureqa", {"entities": ["a", " ", *"cde"]}),
        ("tool", {"output": 3}),
        # With one true call less, a wrong answer would be paid.
        ("tool", {"output": "<tool_call>{</tool_call>"}),
        ("tool", {"output": "<tool_call></tool_call>"}),
        ("tool", {"output": '<tool_call>{"name": "f"}'}),
        ("tool", {"output": CALL.replace("}", '} {"name":')}),
        ("tool", {"output": CALL + CALL.removesuffix("</tool_call>")}),
        ("tool", {"output": CALL.replace("}", ', "parameters": [1]}')}),
    ],
)
def test_a_bad_line_is_named(name, change):
    """Of six records the fourth has a change, and the error names its line and field."""
    records = [RECORDS[name](i) for i in range(6)]
    records[3] |= change
    (field,) = change
    with pytest.raises(UserError, match=f"^--data data.jsonl, line 4, .*{field}"):
        load_task(name, data=write_records("data.jsonl", records), test_data="")


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ('{"id": 1 "answer": 2}', "line 1 is not JSON: Expecting ',' delimiter at column 10"),
        ("[]x", "cannot be read"),
        ("5", "line 1 is no JSON object with fields: '5'"),
        ('{"instruction": "a", "inрut": ""}', "has no field input; it has instruction, inрut$"),
    ],
)
def test_what_a_line_lacks_is_told(line, message):
    Path("data.jsonl").write_text(line, "utf-8")
    with pytest.raises(UserError, match=f"^--data data.jsonl.*{message}"):
        load_task("tool", data="data.jsonl")


def test_one_file_is_not_given_twice():
    """Guards against an evaluation on the problems of the training."""
    path = write_records("data.jsonl", [RECORDS["musique"](i) for i in range(6)])
    with pytest.raises(UserError, match="--data data.jsonl: one file twice"):
        load_task("musique", data=path, test_data=path)


def test_of_tool_one_in_fifty_is_held_out():
    """A record that stands there twice counts once: the file has no ids."""
    data = write_records("data.jsonl", [tool(i) for i in range(101)] + [tool(7)])
    parts = load_task("tool", data=data).parts
    assert [len(parts[split]) for split in ("train", "validation", "test")] == [89, 9, 3]


@pytest.mark.parametrize("name", RECORDS)
def test_the_form_that_a_prompt_shows_can_be_parsed(name):
    task, problem = task_and_problem(name, RECORDS[name](5))
    prompt = task.prompt(problem, 3)
    form = prompt[prompt.index(f"<{task.tag}_1>") :]
    answers = parse_answers(form, task, 3)
    assert len(answers) == 3
    assert len(task.reward(problem, answers[0])) == len(task.objectives)
