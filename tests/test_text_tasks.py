"""MuSiQue, EUREQA, ToolRL: every rule of scoring, the flaws of the official code, files, a step of training."""

import copy
import json
from pathlib import Path

import pytest
import torch
from test_rollout import save_random_model
from test_train import fails

import train
from rewards import UserError, load_task
from rollout import parse_answers
from tasks.files import f1, normalized, tagged, word_f1
from tasks.tool import match, parse_calls


def musique(i: int, hops: int = 2) -> dict:
    paragraphs = [
        {"idx": j, "title": f"T{j}", "paragraph_text": f"Text {j}.", "is_supporting": j < hops}
        for j in range(20)
    ]
    steps = [
        {"id": j, "question": "?", "answer": "x", "paragraph_support_idx": 3 + 2 * j}
        for j in range(hops)
    ]
    return {
        "id": f"{hops}hop__{i}",
        "question": f"Who {i}?",
        "paragraphs": paragraphs,
        "question_decomposition": steps,
        "answer": "The River Thames",
        "answer_aliases": ["Thames", "Isis"],
        "answerable": True,
    }


def eureqa(i: int) -> dict:
    return {
        "idx": i,
        "question": ["Person A wrote Book B.", f"Book B is like Book {i}."],
        "entity_masks": ["Person A", "Book B", "City C", "Film D", "Person E", "Person F"],
        "entities": [f"Ann_{i}", "The_Book", "Rome", "Alien_(film)", "Émile_Zola", "Told"],
    }


def tool(i: int, calls: list | None = None) -> dict:
    calls = (
        [{"name": "weather", "parameters": {"city": "Bonn", "days": 3}}] if calls is None else calls
    )
    block = "<tool_call>\n" + "\n".join(map(json.dumps, calls)) + "\n</tool_call>" if calls else ""
    return {
        "instruction": f"You have tools ({i}).",
        "input": "**user** weather?",
        "output": f"<think> ... </think>\n{block}\n<response> ok </response>",
    }


RECORDS = {"musique": musique, "eureqa": eureqa, "tool": tool}


def written(name: str, n: int, path: str = "data.jsonl") -> str:
    Path(path).write_text("".join(json.dumps(RECORDS[name](i)) + "\n" for i in range(n)))
    return path


@pytest.fixture(autouse=True)
def in_an_empty_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def first(name: str, record: dict):
    """The task over a record, and its problem."""
    Path("one.json").write_text(json.dumps([record]))
    task = load_task(name, data=written(name, 3), test_data="one.json")
    return task, task.problems("test", 1)[0]


def test_text_in_tags():
    """Also where tags are opened again and again: 400,000 characters once took two minutes."""
    assert (
        tagged("<a>x</a><a>y</a>", "a") == "x"
        and tagged("<a>x<a> y </A>", "a") == "y"
        and tagged("<a>x", "a") == ""
    )
    assert tagged("<a>" * 100_000, "a") == ""


def test_texts_are_compared_without_case_articles_and_punctuation():
    assert (
        normalized("  The U.S.  Army, an ally ") == "us army ally"
        and normalized("Theatre") == "theatre"
    )
    assert word_f1("the", "a") == 1.0 and word_f1("", "x") == 0.0 and word_f1("x", "") == 0.0
    assert word_f1("river Thames", "The Thames!") == pytest.approx(2 / 3)
    assert f1("aab", "ab") == pytest.approx(0.8) and f1([], []) == 1.0 and f1([], "a") == 0.0


@pytest.mark.parametrize(
    "answer, vector",
    [
        ("<support>3, 5</support><answer>River Thames</answer>", [1, 1, 1, 1, 1]),
        ("<support>5</support><answer>isis</answer>", [0, 1, 1, 1, 1]),  # an alias
        (
            "<support>[3], [5]</support><answer>Rhine</answer>",
            [1, 1, 1, 1, 0],
        ),  # brackets: officially dropped
        (
            "<support>\u00b3, 5</support><answer>Thames</answer>",
            [0, 1, 1, 1, 1],
        ),  # a superscript: officially a crash
        (
            "<support>1, 1, 2, 4, 3, 5</support><answer>Thames</answer>",
            [1, 0, 1, 1, 1],
        ),  # the first four distinct ones
        ("<support>35</support><answer>x</answer>", [0, 0, 1, 1, 0]),  # not 3 and 5
        (f"<support>{'9' * 5000}</support><answer>x</answer>", [0, 0, 1, 1, 0]),
        ("<support>3, 5</support><answer>  </answer>", [0] * 5),
        ("<support>3, 5</support>", [0] * 5),
        ("", [0] * 5),
        ("<answer>the</answer>", [0, 0, 1, 1, 0]),
        ("<answer>Thames</answer><answer>x</answer>", [0, 0, 1, 1, 1]),
    ],
)
def test_musique(answer, vector):
    task, problem = first("musique", musique(0))
    assert task.reward(problem, answer) == vector
    assert task.scalar(torch.tensor(vector).float()).item() == pytest.approx(
        (sum(vector[:4]) + 3 * vector[4]) / 7
    )


def test_an_alias_that_is_no_word_pays_nothing():
    """Two texts without words are equal: an alias "The" paid for "<answer>!</answer>"."""
    task, problem = first("musique", musique(0) | {"answer_aliases": ["", "The"]})
    assert task.reward(problem, "<answer>!</answer>")[-1] == 0


def test_musique_holds_out_as_many_of_each_kind():
    """Guards against an evaluation on the first 300 rows, which are nearly all of two hops."""
    counts = {2: 30, 3: 12, 4: 9}
    Path("test.jsonl").write_text(
        "".join(json.dumps(musique(i, hops)) + "\n" for hops, n in counts.items() for i in range(n))
    )
    task = load_task("musique", data=written("musique", 20), test_data="test.jsonl")
    hops = [len(problem.data["support"]) for problem in task.problems("test", 27)]
    assert [hops.count(n) for n in (2, 3, 4)] == [9, 9, 9]
    assert len({problem.id for problem in task.problems("test", 51)}) == 51
    train, validation = (
        {p.id for p in task.problems(split, n)} for split, n in (("train", 18), ("validation", 2))
    )
    assert len(train) == 18 and not train & validation


def test_the_split_follows_the_ids_and_the_run_its_files():
    """Guards against one that follows the order of the lines, and a run that goes on with other problems."""
    lines = Path(written("tool", 200)).read_text().splitlines()
    one = load_task("tool", data="data.jsonl")
    Path("data.jsonl").write_text("\n".join(lines[::-1]))
    other = load_task("tool", data="data.jsonl")
    assert one.parts == other.parts and one.fingerprint != other.fingerprint
    held_out = {p["instruction"] for p in one.parts["test"]}
    assert len(held_out) == 4 and held_out != {f"You have tools ({i})." for i in range(4)}
    Path("data.jsonl").write_text("\n".join(lines))
    files = {"data": "data.jsonl", "test_data": written("tool", 3, "test.jsonl")}
    one = load_task("tool", **files).fingerprint
    assert one == load_task("tool", **files).fingerprint
    written("tool", 4, "test.jsonl")
    assert one != load_task("tool", **files).fingerprint


def test_musique_is_judged_on_the_papers_three_hundred():
    assert load_task("musique", data=written("musique", 20)).eval_problems == 300


@pytest.mark.parametrize(
    "answer, vector",
    [
        (
            "<entity_A>ann 0</entity_A><entity_B> book </entity_B><entity_C>ROME</entity_C>\n<entity_D>Alien_film</entity_D>"
            "<ENTITY_E>\u00c9mile Zola</ENTITY_E>",
            [1, 1, 1, 1, 1],
        ),
        (
            "<entity_A>Ann_0</entity_A><entity_B></entity_B><entity_C>Roma</entity_C>",
            [1, 0, 0, 0, 0],
        ),
        ("<entity_E>Emile Zola</entity_E>", [0] * 5),
        ("<entity_C>the</entity_C>", [0] * 5),
        ("", [0] * 5),
    ],
)
def test_eureqa(answer, vector):
    task, problem = first("eureqa", eureqa(0))
    assert task.reward(problem, answer) == vector


def test_eureqa_trains_on_half_of_the_hard_file():
    Path("hard.json").write_text(
        json.dumps([eureqa(i) | {"entities": ["Hard", *"bcdef"]} for i in range(9)])
    )
    task = load_task("eureqa", data=written("eureqa", 11), test_data="hard.json")
    parts = {name: [p["entities"][0] == "Hard" for p in part] for name, part in task.parts.items()}
    assert parts["test"] == [True] * 5 and sum(parts["train"] + parts["validation"]) == 4
    assert len(parts["train"] + parts["validation"]) == 15
    task = load_task(
        "eureqa", data=written("eureqa", 100), test_data=written("eureqa", 200, "more.jsonl")
    )
    ids = [int(p["id"].split("-")[1]) for p in task.parts["validation"]]
    assert 0 < sum(i < 100 for i in ids) < len(ids) == 20, "validation holds both kinds"


def test_an_entity_without_words_can_be_named():
    task, problem = first("eureqa", eureqa(0) | {"entities": ["!!!", *"bcdef"]})
    assert task.reward(problem, "<entity_A>!!!</entity_A><entity_C> </entity_C>") == [1, 0, 0, 0, 0]


WANTED = [
    {"name": "book", "parameters": {"seats": 2, "vip": True, "name": "Ann Lee", "price": "1.5"}},
    {"name": "mail", "parameters": {"to": ["Ann", "Bob"], "options": {"html": False, "copies": 1}}},
]


def output(calls: object, think: str = "<think>so</think>") -> str:
    text = "\n".join(map(json.dumps, calls)) if isinstance(calls, list) else str(calls)
    return f"{think}<tool_call>{text}</tool_call>"


def changed(**values) -> list:
    calls = copy.deepcopy(WANTED)
    for key, value in values.items():
        calls[0]["parameters"][key] = value
    return calls


@pytest.mark.parametrize(
    "answer, vector",
    [
        (output(WANTED), [1, 1, 1, 1]),
        (output(WANTED[::-1]), [1, 1, 1, 1]),
        (output(json.dumps(WANTED)), [1, 1, 1, 1]),
        (output(WANTED, ""), [0, 1, 1, 1]),
        (output(WANTED, "<think>so"), [0, 1, 1, 1]),
        (output(WANTED[:1]), [1, 2 / 3, 0.5, 0.5]),
        ("<think>so</think>", [0, 0, 0, 0]),
        ("", [0, 0, 0, 0]),
        (output(changed(vip="false")), [1, 1, 1, 7 / 8]),  # truthiness: officially a match
        (output(changed(vip=1)), [1, 1, 1, 7 / 8]),
        (output(changed(price="15")), [1, 1, 1, 7 / 8]),  # without its point: officially a match
        (output(changed(price=1.5, seats="2")), [1, 1, 1, 1]),
        (output(changed(seats=2.0)), [1, 1, 1, 1]),
        (output(changed(name="Ann")), [1, 1, 1, (3 + 2 / 3) / 4 / 2 + 0.5]),
        (
            output(changed(extra=0)),
            [1, 1, (8 / 9 + 1) / 2, (4 / 5 + 1) / 2],
        ),  # a key too many: officially free
        (
            output([WANTED[0] | {"name": "cook"}, WANTED[1]]),
            [1, 0.5, 0.5, 0.5],
        ),  # the wrong function: officially paid
        (output(WANTED + WANTED[:1]), [1, 0.8, 2 / 3, 2 / 3]),
        (output('{"name": "book"} nonsense'), [1, 2 / 3, 0, 0]),
        (output("[" * 100_000), [0, 0, 0, 0]),
        (output('{"name": "book", "parameters": [NaN, 1e999]}'), [1, 2 / 3, 0, 0]),
        (
            output('{"name": "book", "parameters": {"seats": NaN, "price": 1e999}}'),
            [1, 2 / 3, 1 / 3, 0],
        ),
        (
            output('{"name": "book", "parameters": {"seats": 1%s}}' % ("0" * 400)),
            [1, 2 / 3, 0.2, 0],
        ),
        (
            output('{"name": "mail", "parameters": {"to": %s}}' % ("[" * 990 + "]" * 990)),
            [0, 0, 0, 0],
        ),
        (f"<think>{output(WANTED, '')}</think>", [0, 0, 0, 0]),  # a thought is no call
        ("<think>a <tool_call> it is</think>" + output(WANTED, ""), [1, 1, 1, 1]),
    ],
)
def test_tool(answer, vector):
    task, problem = first("tool", tool(0, WANTED))
    assert task.reward(problem, answer) == pytest.approx(vector)


@pytest.mark.parametrize(
    "answer, vector",
    [
        ("<think>no need</think><response>Hello</response>", [1, 1, 1, 1]),
        ("Hello", [0, 1, 1, 1]),
        ("<think>so</think><tool_call></tool_call>", [1, 1, 1, 1]),
        (output(WANTED), [0, 0, 0, 0]),
        (output("nonsense"), [0, 1, 1, 1]),
    ],
)
def test_tool_where_no_call_is_right(answer, vector):
    task, problem = first("tool", tool(0, []))
    assert task.reward(problem, answer) == vector


@pytest.mark.parametrize(
    "ours, rest", [([1, 0], [1, 1, 1]), ([0], [2 / 3, 0.5, 0.5]), ([0, 0], [1, 1, 0.5])]
)
def test_calls_of_one_function_are_paired_by_what_they_share(ours, rest):
    """Also with equal keys; a call is a partner once."""
    calls = [{"name": "find", "parameters": {"tag": tag}} for tag in ("xbox", "android", "mac")]
    task, problem = first("tool", tool(0, calls[:2]))
    assert task.reward(problem, output([calls[i] for i in ours])) == pytest.approx([1, *rest])
    wanted = [
        {"name": "find", "parameters": {"tag": "xbox"}},
        {"name": "find", "parameters": {"sort": "new"}},
    ]
    task, problem = first("tool", tool(1, wanted))
    assert task.reward(problem, output(wanted[::-1])) == [1, 1, 1, 1]


@pytest.mark.parametrize(
    "ours, gold, same",
    [
        ("15 km", "1.5 km", 0.5),
        ("$15", "$1.5", 0),
        ("105%", "10.5%", 0),
        ("v15", "v1.5", 0),
        ("5 C", "-5 C", 0.5),
        ("2024-11-1", "2024-1-11", 0),
        ("407128,-740060", "40.7128,-74.0060", 0),
        ("!=", "==", 0),
        ("==", "==", 1),
        (["15 km"], ["1.5 km"], 0),
        (["!="], ["=="], 0),
        (1234567890123456788, 1234567890123456789, 0),
        ("1234567890123456788", "1234567890123456789", 0),
        ([1.50, "x"], ["1.5", "X"], 1),
        (0.1, "0.10", 1),
        (["true"], [True], 0),
        (["null"], [None], 0),
        ([[1]], [[1]], 1),
        (True, 1, 0),
        (1, True, 0),
        (True, True, 1),
    ],
)
def test_values_that_only_look_alike(ours, gold, same):
    assert match(ours, gold) == pytest.approx(same)


def test_values_of_arguments():
    assert match(["Bob", "the Ann"], ["ann", "bob"]) == 1 and match(
        ["ann"], ["ann", "bob"]
    ) == pytest.approx(2 / 3)
    assert match([1, "2"], [1.0, 2]) == 1 and match([True], [1]) == 0 and match([[1]], [[1]]) == 1
    assert match({"a": 1}, {"a": 1, "b": 2}) == 0.5 and match({}, {}) == 1
    assert match({"a": {"b": 1}}, {"a": {"b": "1"}}) == 1
    assert (
        match(None, None) == 1
        and match(None, "") == 0
        and match(0, False) == 0
        and match("x", ["x"]) == 0
    )
    assert match("1e3", 1000) == 1 and match("+5", 5) == 1 and match("five", 5) == 0
    calls = parse_calls('{"name": "f", "arguments": {"x": 1}}, {"name": 3}\n{"name": " g "}')
    assert calls == ([["f", {"x": 1}], ["g", {}]], False)
    assert parse_calls('[{"name": "f", "parameters": null}]') == (
        [["f", {}]],
        True,
    ) and parse_calls("") == ([], True)


@pytest.mark.parametrize(
    "name, change, parts",
    [
        ("musique", {"answer": ""}, ["field answer: must be text"]),
        ("musique", {"answerable": False}, ["musique_ans"]),
        (
            "musique",
            {"question_decomposition": [{"paragraph_support_idx": 99}]},
            ["[99] are not up to 4"],
        ),
        ("musique", {"paragraphs": [1]}, ["field idx"]),
        ("musique", {"answer_aliases": "x"}, ["field answer_aliases"]),
        ("eureqa", {"entities": ["a"]}, ["five or more"]),
        ("eureqa", {"entities": ["a", " ", *"cde"]}, ["five or more"]),
        ("eureqa", {"question": []}, ["must be texts"]),
        ("musique", {"answer": " "}, ["field answer: must be text"]),
        ("eureqa", {"idx": None}, ["field idx"]),
        ("tool", {"output": 3}, ["field output: must be text"]),
        *(
            (
                "tool",
                {"output": f"<think> a <tool_call> </think> {output}"},
                ["field output: a call is cut off, or no JSON"],
            )
            for output in (
                "<tool_call>{</tool_call>",
                "<tool_call></tool_call>",
                '<tool_call>{"name": "f"}',
                '<tool_call>{"name": "f"} {"name": "g", "para</tool_call>',  # a gold call less would pay the wrong
                '<tool_call>{"name": "f", "parameters": [1]}</tool_call>',
                '<tool_call>{"a": 1}</tool_call>',
            )
        ),
        ("musique", {"question": "\ud800"}, ["can't encode"]),
        ("tool", {"input": None}, ["field input"]),
    ],
)
def test_a_bad_line_is_named(name, change, parts):
    lines = Path(written(name, 6)).read_text().splitlines()
    lines[3] = json.dumps(json.loads(lines[3]) | change)
    Path("data.jsonl").write_text("\n".join(lines))
    with pytest.raises(UserError) as told:
        load_task(name, data="data.jsonl", test_data="")
    assert all(part in str(told.value) for part in ["--data data.jsonl, line 4", *parts])


def test_files_that_are_none(capsys):
    for name in RECORDS:
        with pytest.raises(
            UserError, match=f"--task {name}: needs --data FILE .*(github|huggingface)"
        ):
            load_task(name)
    for text, part in (
        ("{", "line 1"),
        ("[1]", "item 1, not a JSON object but 1"),
        ("[", "cannot be read"),
        ("", "too few"),
        ("[" * 100_000, "cannot be read"),
        (" \n[1]", "item 1, not a JSON object but"),
        (json.dumps(musique(0)) + "\n" + json.dumps(musique(0) | {"question": "?"}), "there twice"),
    ):
        Path("bad.jsonl").write_text(text)
        with pytest.raises(UserError, match="bad.jsonl") as told:
            load_task("musique", data="bad.jsonl", test_data="")
        assert part in str(told.value)
    data = written("tool", 101)
    with pytest.raises(
        UserError, match="101 problems to train on, 101 held out: too few, or one file twice"
    ):
        load_task("tool", data=data, test_data=data)
    Path(data).write_text(
        Path(data).read_text() + json.dumps(tool(7))
    )  # the same once more: the file has no ids
    task = load_task("tool", data=data)
    assert [len(task.parts[split]) for split in ("train", "validation", "test")] == [89, 9, 3], (
        "one in fifty"
    )
    fails(
        ["--task", "musique", "--data", "absent", "--model", "x"],
        capsys,
        "--data absent: cannot be read",
    )


@pytest.mark.parametrize("name", RECORDS)
def test_held_out_problems_that_are_trained_on_are_told(name, capsys):
    """A copy of the file under another name; of EUREQA's second file half is trained on by design, so not told."""
    load_task(name, data=written(name, 30), test_data=written(name, 10, "test.jsonl"))
    n = 5 if name == "eureqa" else 10
    assert (
        f"test.jsonl: {n} of {n} held-out problems stand in training too: not held out"
        in capsys.readouterr().err
    )
    load_task(name, data=written(name, 30))
    assert not capsys.readouterr().err


@pytest.mark.parametrize("name", RECORDS)
def test_one_step_of_training(name, capsys):
    """Read, asked, sampled, judged, evaluated with a small random model; the form that is asked for can be parsed."""
    task = load_task(name, data=written(name, 30), test_data="")
    prompt = task.prompt(task.problems("train", 1)[0], 3)
    asked = parse_answers(prompt[prompt.index(f"<{task.tag}_1>") :], task, 3)
    assert len(asked) == 3 and task.reward(task.problems("train", 1)[0], asked[0]) is not None
    train.main(
        [
            "--task",
            name,
            "--data",
            "data.jsonl",
            "--model",
            save_random_model(Path("m"), "llama"),
            "--m",
            "2",
            "--out",
            "run",
            "--device",
            "cpu",
            "--steps",
            "1",
            "--method",
            "vpo",
            "--prompts-per-step",
            "1",
            "--group-size",
            "2",
            "--eval-problems",
            "1",
            "--pool",
            "2",
            "--max-new-tokens",
            "4",
        ]
    )
    assert "1 test problems" in capsys.readouterr().out
