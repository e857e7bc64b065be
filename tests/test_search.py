"""Search: the population, goals, the log from which it goes on, and every mistake at its doors."""

import json
import random
import re
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from test_rollout import save_random_model

import search
import train
from rewards import load_task, take_problems
from rollout import build_prompt
from search import Candidate, Population

ROOT = Path(__file__).resolve().parent.parent
QUICK = ["--problems", "3", "--among", "3", "--screen", "0", "--budget", "26", "--temperature", "1"]


@pytest.fixture(scope="module")
def trained(tmp_path_factory) -> Path:
    """A toy run whose start has learnt to write bits, and whose methods have hardly moved from it."""
    folder = tmp_path_factory.mktemp("runs") / "toy-seed0"
    train.main(
        [
            "--task",
            "toy",
            "--m",
            "2",
            "--out",
            str(folder),
            "--warm-steps",
            "60",
            "--steps",
            "2",
            "--method",
            "grpo",
            "vpo",
            "--eval-problems",
            "0",
            "--prompts-per-step",
            "2",
            "--device",
            "cpu",
        ]
    )
    return folder


@pytest.fixture(autouse=True)
def in_an_empty_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def records(log: str) -> list[dict]:
    return [json.loads(line) for line in Path(log).read_text().splitlines()[1:]]


def head(log: str) -> dict:
    return json.loads(Path(log).read_text().split("\n")[0])


def fails(argv: list[str], capsys, *parts: str) -> None:
    with pytest.raises(SystemExit) as stop:
        search.main(argv)
    told = capsys.readouterr().err
    assert stop.value.code == 2 and all(part in told for part in parts), told
    assert told.strip().count("\n") <= 1 or "%" in told  # a progress bar may stand before it


def test_maze_knows_what_can_be_reached():
    """Against every route through mazes of size 5, one by one, with two steps to spare."""
    task = load_task("maze", size=5)

    def routes(grid: str, route: list[int], left: int) -> Iterator[list[int]]:
        for i in task.ways[route[-1]].values() if left else ():
            if grid[i] == "E":
                yield [*route, i]
            elif grid[i] != "#":
                yield from routes(grid, [*route, i], left - 1)

    for problem in task.problems("test", 6):
        grid = "".join(problem.data["grid"])
        start = grid.index("S")
        problem.data["budget"] = task.distances(grid, start)[grid.index("E")] + 2
        found = {
            tuple(task.reward(problem, " ".join(task.cells[i] for i in route[1:])))
            for route in routes(grid, [start], problem.data["budget"])
        }
        assert {tuple(vector) for vector in task.reachable(problem)} == found
    blended = load_task(str(ROOT / "examples/rewards/blended.py"))
    assert blended.reachable(blended.problems("test", 1)[0]) == []  # its rewards are not the maze's


def candidate(order: int, rewards: list[float]) -> Candidate:
    return Candidate(order, 0, 0, f"answer {order}", rewards, sum(rewards))


def test_a_population_keeps_the_best_of_every_behaviour():
    """Guards against a grid that one good answer takes over: then there is nothing left to choose a parent from."""
    population = Population()
    vectors = [[1.0, 0.0], [0.0, 0.9], [0.0, 1.0], [0.0, 0.95], [0.6, 0.6]]
    population.candidates = [candidate(order, rewards) for order, rewards in enumerate(vectors, 1)]
    for each in population.candidates:
        population.settle(each, 0)
    assert [c.order for c in population.islands[0].values()] == [
        1,
        3,
        5,
    ] and not population.islands[1]
    population.settle(Candidate(6, 0, 0, "", [9.0, 9.0], 18.0), 0)  # an empty slot settles nowhere
    population.migrate()
    assert [[c.order for c in grid.values()] for grid in population.islands] == [[1, 3, 5], [5], []]
    assert population.solved(1.2) == 5 and population.solved(30) == 0
    chosen = {
        selection: {
            c.order
            for seed in range(60)
            if (c := population.parent(0, selection, random.Random(seed)))
        }
        for selection in ("tournament", "lexicase", "weighting")
    }
    assert chosen == {"tournament": {5}, "lexicase": {1, 3}, "weighting": {1, 3, 5}}
    fresh = sum(
        population.parent(0, "lexicase", random.Random(seed)) is None for seed in range(1000)
    )
    assert 150 < fresh < 250 and population.parent(2, "lexicase", random.Random(0)) is None


@pytest.mark.parametrize("strategy", ["evolve", "best_of_n"])
def test_a_search_and_its_log(trained, strategy, capsys):
    """Every candidate is counted and scored as the task scores it; a child begins as its parent; a killed search goes
    on to the same log, wherever it was cut."""
    command = [str(trained), *QUICK, "--goal", "all", "--strategy", strategy, "--out", "out"]
    search.main(command)
    table = capsys.readouterr().out
    assert all(
        name in table for name in ("start model", "GRPO", "VPO", "3 problems, 26 candidates each")
    )
    assert Path("out/search.png").exists() and Path("out/family.png").exists()
    report, task = json.loads(Path("out/search.json").read_text()), load_task("toy")
    problems = {problem.id: problem for problem in take_problems(task, "test", 3)}
    assert set(report["problems"]) == set(problems) and report["ticks"][-1] == 26
    for name in ("start", "grpo", "vpo"):
        found = records(f"out/toy-seed0/{name}.jsonl")
        for i, problem in enumerate(report["problems"]):
            own = [record for record in found if record["problem"] == problem]
            assert [record["order"] for record in own] == list(range(1, len(own) + 1))
            solved = next((record["order"] for record in own if record["rewards"] == [1.0] * 3), 0)
            assert report["policies"][name][0]["solved"][i] == solved
            assert len(own) == 26 or 0 < solved <= len(own) <= 26
            for record in own:
                assert record["rewards"] == pytest.approx(
                    task.reward(problems[problem], record["answer"]), abs=1e-6
                )
                parent = own[record["parent"] - 1]["answer"].split() if record["parent"] else []
                assert parent or strategy == "best_of_n" or record["parent"] == 0
        assert strategy == "evolve" or not any(record["parent"] for record in found)
        assert {record["island"] for record in found} == {0, 1, 2}
    assert (
        len({head(f"out/toy-seed0/{name}.jsonl")["weights"] for name in ("start", "grpo", "vpo")})
        == 3
    )
    log = Path("out/toy-seed0/vpo.jsonl")
    whole = log.read_text()
    assert strategy == "best_of_n" or any(record["parent"] for record in records(log))
    for cut in (len(whole) // 2, len(whole) - 3, whole.index("\n", len(whole) // 3) + 1):
        log.write_text(whole[:cut])
        search.main([*command, "--policies", "vpo"])
        assert log.read_text() == whole
    lines = whole.splitlines(keepends=True)
    for damaged in ("5\n", '{"batch": 1}\n', ""):  # a line that is no record, or is missing
        log.write_text("".join([*lines[:9], damaged, *lines[10:]]))
        search.main([*command, "--policies", "vpo"])
        assert log.read_text() == whole
    for changed in (["--seed", "1"], ["--budget", "30"], ["--temperature", "0.5"]):
        fails(
            [*command, *changed],
            capsys,
            "start.jsonl: the log of another search",
            "name another folder with --out",
        )
    assert log.read_text() == whole


def test_islands_exchange_their_best(trained, monkeypatch):
    moved, migrate = [], search.Population.migrate
    monkeypatch.setattr(
        search.Population, "migrate", lambda self: moved.append(self) or migrate(self)
    )
    monkeypatch.setattr(search, "MIGRATE_EVERY", 2)
    search.main([str(trained), *QUICK, "--goal", "all", "--policies", "vpo", "--out", "out"])
    assert (
        len(moved) == 3 == len(set(map(id, moved)))
    )  # three problems, once each in their second round


def test_a_child_begins_as_its_parent(trained, monkeypatch):
    """Of the tiny model's children the first answer keeps a part of the parent's: what comes after is the policy's."""
    asked, ask = [], search.ask
    monkeypatch.setattr(
        search, "ask", lambda *given: asked.append((given[4], *ask(*given))) or asked[-1][1:]
    )
    search.main([str(trained), *QUICK, "--goal", "all", "--policies", "vpo", "--out", "out"])
    children = [(parent.answer.split(), prompt, begun) for parent, prompt, begun in asked if parent]
    assert len(children) > 5 and any(len(begun.split()) > 1 for *_, begun in children)
    for words, prompt, begun in children:
        tag, *kept = begun.split()
        assert tag == "<answer_1>" and kept == words[: len(kept)] and len(kept) < len(words)
        assert prompt.endswith(begun.strip()) and prompt.startswith("answers=2 bits")
    found = records("out/toy-seed0/vpo.jsonl")
    kept = [begun.split()[1:] for _, _, begun in asked]
    first = [
        record["answer"].split() for record in found if record["order"] % 2
    ]  # of each rollout of two answers
    assert len(first) == len(kept)
    assert all(
        answer[: len(words)] == words for answer, words in zip(first, kept, strict=True) if answer
    )
    assert any(record["parent"] for record in found)  # and none of a set's second answers
    assert not any(record["parent"] for record in found if record["order"] % 2 == 0)


def test_problems_are_hard_for_every_policy(trained, capsys):
    """What any policy solves in independent pools is left out, whichever policies are then searched; and it is said if
    nothing remains."""
    task = "goal.py"
    Path(task).write_text("target = 2.5\ndef score(rewards, answer):\n    return sum(rewards)\n")
    command = [str(trained), "--among", "3", "--budget", "12", "--goal", task, "--policies", "grpo"]
    search.main([*command, "--screen", "2", "--out", "out"])
    told = capsys.readouterr().out
    hard = set(json.loads(Path("out/search.json").read_text())["problems"])
    easy = {
        record["problem"]
        for name in ("start", "grpo", "vpo")
        for record in records(f"out/screen/toy-seed0/{name}.jsonl")
        if record["score"] >= 2.5
    }
    assert f"{len(hard)} of 3" in told and hard.isdisjoint(easy) and len(hard | easy) == 3
    fails(
        [
            str(trained),
            "--among",
            "3",
            "--goal",
            "block_1",
            "--screen",
            "0",
            "--policies",
            "vpo",
            "none",
        ],
        capsys,
        "--policies none",
        "choose from start, start_sets, grpo, vpo",
    )
    shutil.copytree(trained, "toy-seed1")
    search.main(
        [
            str(trained),
            "toy-seed1",
            *command[1:],
            "--problems",
            "1",
            "--screen",
            "2",
            "--out",
            "two",
            "--strategy",
            "best_of_n",
        ]
    )
    report = json.loads(Path("two/search.json").read_text())
    assert (
        report["problems"]
        == [problem for problem in (f"toy-test-{i}" for i in range(3)) if problem in hard][:1]
    )
    assert len(report["policies"]["grpo"]) == 2
    assert capsys.readouterr().out.count("|  |  |\n") == 1  # nobody to compare GRPO with
    folders = ("screen/toy-seed0", "screen/toy-seed1", "toy-seed0")
    seeds = [head(f"two/{folder}/grpo.jsonl")["seed"] for folder in folders]
    assert seeds == [1, 1, 0]  # the pools are not those of the search
    Path(task).write_text("target = 0\ndef score(rewards, answer):\n    return 1\n")
    fails([*command, "--out", "out2"], capsys, "--screen 30: every problem is solved by then")


@pytest.mark.parametrize(
    "text, parts",
    [
        ("", ["no module named", "score(rewards, answer)"]),
        ("score = 1 / 0", ["ZeroDivisionError"]),
        ("x = 1", ["AttributeError"]),
        ("def score(rewards, answer):\n    return 'many'", ["raised ValueError", "finite"]),
        (
            "def score(rewards, answer):\n    return rewards[9]",
            ["raised IndexError", "score([", "finite number"],
        ),
        ("def score(rewards, answer):\n    return float('nan')", ["gave nan"]),
        (
            "def score(rewards, answer):\n    raise SystemExit('one\\ntwo')",
            ["raised SystemExit: one two"],
        ),
        ("raise SystemExit(3)", ["SystemExit: 3"]),
        ("target = float('nan')\nscore = max", ["target is nan"]),
    ],
)
def test_a_scorer_that_fails_is_named(trained, text, parts, capsys):
    if text:
        Path("own.py").write_text(text)
    else:
        parts = ["own.py: cannot be used"]
    fails(
        [str(trained), *QUICK, "--goal", "own.py", "--out", "out"], capsys, "--goal own.py", *parts
    )


@pytest.mark.parametrize(
    "flags, parts",
    [
        (["--budget", "1"], ["--budget 1: less than a rollout of vpo holds, 2 answers"]),
        (["--screen", "1"], ["--screen 1: less than a rollout of vpo holds"]),
        (["--goal", "gold"], ["--goal gold: take scalar, all", "block_1"]),
        (["--goal", "block_1=a"], ["--goal block_1=a"]),
        (["--goal", "block_1=-1,block_2=2"], ["none negative"]),
        (["--strategy", "hope"], ["--strategy hope", "evolve"]),
    ],
)
def test_wrong_flags_are_named(trained, flags, parts, capsys):
    fails([str(trained), *QUICK, "--out", "out", *flags], capsys, *parts)
    assert not Path("out").exists()


def test_a_run_without_checkpoints_is_refused(trained, capsys):
    fails(["nowhere"], capsys, "nowhere: no config.json")
    Path("empty").mkdir()
    (Path("empty") / "config.json").write_text((trained / "config.json").read_text())
    fails(["empty"], capsys, "empty: holds no checkpoint yet")


def test_a_language_model_is_shown_the_parent(tmp_path):
    """In words: the answer, what each objective gave, and the request; nothing is written into its mouth."""
    from transformers import AutoTokenizer

    save_random_model(tmp_path / "model", "llama")
    tokenizer, task = AutoTokenizer.from_pretrained(tmp_path / "model"), load_task("maze")
    problem = task.problems("test", 1)[0]
    parent = Candidate(1, 0, 0, "UP UP", [1.0, 0.5, 0.0, 1.0], 0.6)
    plain = build_prompt(tokenizer, task, problem, 1)
    prompt, begun = search.ask(tokenizer, task, problem, 1, parent, None, random.Random(0))
    assert (
        begun == ""
        and "UP UP" in prompt
        and "completion 1, gold 0.5, diamond 0, avoid_lava 1" in prompt
    )
    assert len(prompt) > len(plain) and prompt.startswith(plain.rstrip()[:200])
    assert search.ask(tokenizer, task, problem, 1, None, None, random.Random(0)) == (plain, "")


def test_the_scorer_of_the_documentation(trained, capsys):
    """The snippet is run as it stands."""
    snippet = re.search(
        r"```python\n(# my_goal.py.*?)```", (ROOT / "docs/own.md").read_text(), re.DOTALL
    )[1]
    Path("my_goal.py").write_text(snippet)
    search.main([str(trained), *QUICK, "--goal", "my_goal.py", "--policies", "vpo", "--out", "out"])
    assert "VPO" in capsys.readouterr().out
