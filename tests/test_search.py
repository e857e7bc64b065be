"""Search: what can be reached, goals, populations, prompts with parents, the table, and mistakes of the user."""

import json
import os
import random
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from statistics import mean

import pytest
from test_train import change_config
from tokenizers import Tokenizer, models
from transformers import PreTrainedTokenizerFast

import train
from engine.tasks import load_task, take_problems
from examples import search
from examples.map_elites import Candidate, Population
from examples.search_report import draw, run_curves, search_table
from rewards import Problem, Task, UserError
from rollout import Policy, build_prompt

QUICK = "--problems 3 --among 3 --screen 0 --budget 26 --temperature 1 --out out"


@pytest.fixture(scope="module")
def trained(tmp_path_factory) -> Path:
    """A toy run whose start writes bits, and whose methods have hardly moved from it."""
    folder = tmp_path_factory.mktemp("runs") / "toy-seed0"
    flags = (
        "--task toy --m 2 --warm-steps 60 --steps 2 --method grpo vpo --eval-problems 0 "
        f"--prompts-per-step 2 --snapshots 0 --out {folder}"
    )
    train.main(flags.split())
    return folder


@pytest.fixture(autouse=True)
def in_an_empty_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def run_search(run: Path, flags: str, out: str = "out") -> tuple[dict, list[dict]]:
    """What a search of a run wrote: search.json, and all candidates."""
    search.main([str(run), *flags.split()])
    lines = Path(out, "candidates.jsonl").read_text().splitlines()
    return json.loads(Path(out, "search.json").read_text()), [json.loads(line) for line in lines]


# Targets and goals.


def routes(task, grid: str, route: list[int], left: int) -> Iterator[list[int]]:
    """Every way to the exit of a maze that continues a route by at most `left` steps."""
    if left == 0:
        return
    for cell in task.moves[route[-1]].values():
        if grid[cell] == "E":
            yield [*route, cell]
        elif grid[cell] != "#":
            yield from routes(task, grid, [*route, cell], left - 1)


def test_maze_knows_what_can_be_reached():
    """Against every route through mazes of size 5, one by one, with two steps to spare."""
    task = load_task("maze", size=5)
    for problem in task.problems("test", 6):
        grid = "".join(problem.data["grid"])
        start = grid.index("S")
        shortest = task.distances(grid, start)[grid.index("E")]
        problem.data["budget"] = shortest + 2
        expected = set()
        for route in routes(task, grid, [start], shortest + 2):
            answer = " ".join(task.cells[cell] for cell in route[1:])
            expected.add(tuple(task.reward(problem, answer)))
        assert {tuple(vector) for vector in task.reachable(problem)} == expected


def test_a_maze_with_other_rewards_does_not_know_what_can_be_reached():
    Path("one_number.py").write_text(
        "from tasks.maze import Maze\n\n\nclass Blended(Maze):\n"
        "    def reward(self, problem, answer):\n        return [0.5]\n"
    )
    task = load_task("one_number.py")
    assert task.reachable(task.problems("test", 1)[0]) == []


def fence_that_reaches(value: str) -> Task:
    source = f"    def reachable(self, problem):\n        return {value}\n"
    Path("reach.py").write_text(f"from rewards import Fence\n\n\nclass Mine(Fence):\n{source}")
    return load_task("reach.py")


def test_what_can_be_reached_is_checked():
    """Guards against a vector without its list, with which no problem would ever be solved."""
    for value, message in (
        ("[1.0, 0, 0]", "holds 1.0, which must be a list of numbers"),
        ("[[1, 0]]", "holds .1, 0., which has 2 numbers for 3 objectives"),
        ("None", "must be a list of reward vectors, not None"),
    ):
        task = fence_that_reaches(value)
        with pytest.raises(UserError, match=f"^task fence: reachable .*{message}"):
            search.make_goal("scalar", task).target_of(task.problems("test", 1)[0])


@pytest.mark.parametrize("text", ["scalar", "ann", "ann=2,cid=1"])
@pytest.mark.parametrize("vector", ["[1, 0, 0]", "[100.1, 0.3, 33.3]", "[1 / 3, 2 / 3, 1 / 7]"])
def test_the_best_that_can_be_reached_solves_a_problem(vector, text):
    """Guards against a target that rounding puts above every score."""
    task = fence_that_reaches(f"[{vector}]")
    problem = task.problems("test", 1)[0]
    goal = search.make_goal(text, task)
    population = Population(problem, goal.target_of(problem))
    rewards = search.rounded(eval(vector))
    population.add(Candidate(problem.id, 1, 0, 0, "answer", rewards, goal.score(rewards)))
    assert population.solved_after() == 1


def test_goals_are_scores():
    task = load_task("fence")  # of ann, bob and cid
    rewards = [1.0, 0.5, 0.0]
    scores = {"scalar": 0.5, "all": 0.5, "bob": 0.5, "ann=3,bob=1": 0.875, "cid=2": 0.0}
    for text, expected in scores.items():
        assert search.make_goal(text, task).score(rewards) == pytest.approx(expected), text


# Populations.


def candidate(order: int, rewards: list[float], answer: str = "answer") -> Candidate:
    return Candidate("problem", order, 0, 0, answer, rewards, sum(rewards))


def test_a_population_keeps_the_best_of_every_behaviour():
    """Guards against a grid that one good answer takes over, which leaves no choice of parents."""
    population = Population(Problem("problem", {}), target=1.2)
    vectors = [[1.0, 0.0], [0.0, 0.9], [0.0, 1.0], [0.0, 0.95], [0.6, 0.6]]
    for order, rewards in enumerate(vectors, 1):
        population.add(candidate(order, rewards))
    population.settle(candidate(6, [9.0, 9.0], answer=""), 0)  # an empty slot settles nowhere
    first, second, third = population.islands
    assert [c.order for c in first.values()] == [1, 3, 5]
    assert not second
    population.migrate()
    assert [c.order for c in first.values()] == [1, 3, 5]
    assert [c.order for c in second.values()] == [5]
    assert not third
    assert population.solved_after() == 5
    population.target = 30
    assert population.solved_after() == 0


@pytest.mark.parametrize(
    "strategy, expected", [("evolve", {5}), ("lexicase", {1, 3}), ("weighting", {1, 3, 5})]
)
def test_parents_are_selected(strategy, expected):
    population = Population(Problem("problem", {}), target=9)
    for order, rewards in ((1, [1.0, 0.0]), (3, [0.0, 1.0]), (5, [0.6, 0.6])):
        population.settle(candidate(order, rewards), 0)
    parents = [population.parent(0, strategy, random.Random(seed)) for seed in range(1000)]
    assert {parent.order for parent in parents if parent} == expected
    assert 150 < parents.count(None) < 250  # a fifth of the children have no parent
    assert population.parent(2, strategy, random.Random(0)) is None
    assert population.parent(0, "best_of_n", random.Random(0)) is None


# Searches.


@pytest.mark.parametrize("strategy", ["evolve", "best_of_n"])
def test_a_search_counts_and_scores_every_candidate(trained, strategy, monkeypatch):
    """As the task scores it. The same command finds the same again, whatever is sampled at a time."""
    flags = f"{QUICK} --goal all --strategy {strategy}"
    report, candidates = run_search(trained, flags)
    task = load_task("toy")
    problems = take_problems(task, "test", 3)
    assert report["problems"] == [problem.id for problem in problems]
    assert report["ticks"][-1] == 26
    assert list(report["policies"]) == ["start", "grpo", "vpo"]
    for name, (results,) in report["policies"].items():
        for problem, solved in zip(problems, results["solved"], strict=True):
            own = [c for c in candidates if (c["policy"], c["problem"]) == (name, problem.id)]
            assert [record["order"] for record in own] == list(range(1, len(own) + 1))
            solutions = [record["order"] for record in own if record["rewards"] == [1.0] * 3]
            assert solved == min(solutions, default=0)
            assert len(own) == 26 or 0 < solved <= len(own) <= 26
            for record in own:
                expected = task.reward(problem, record["answer"])
                assert record["rewards"] == pytest.approx(expected, abs=1e-6)
                assert not record["parent"] or own[record["parent"] - 1]["answer"]
    assert {record["island"] for record in candidates} == {0, 1, 2}
    parents = {record["parent"] for record in candidates}
    assert (len(parents) > 1) == (strategy == "evolve")
    monkeypatch.setattr(search, "ROLLOUTS_AT_ONCE", 5)
    assert run_search(trained, flags) == (report, candidates)


def test_a_child_begins_as_its_parent(trained):
    """The first answer of a tiny set keeps a part of the parent; the policy writes the rest."""
    _, candidates = run_search(trained, f"{QUICK} --budget 80 --goal all --policies vpo")
    by_place = {(record["problem"], record["order"]): record for record in candidates}
    kept = {True: [], False: []}  # whether it has a parent: first words shared with an earlier one
    for first in candidates[::2]:  # of each rollout of two answers
        earlier = by_place[first["problem"], first["parent"] or max(1, first["order"] - 2)]
        shared = os.path.commonprefix([first["answer"].split(), earlier["answer"].split()])
        kept[first["parent"] > 0].append(len(shared))
    assert mean(kept[True]) > mean(kept[False]) + 1
    assert not any(second["parent"] for second in candidates[1::2])


def test_problems_are_hard_for_every_policy_of_every_run(trained, monkeypatch, capsys):
    """What any policy solves in independent pools is left out, whichever policies are searched.

    The pools of the screening are not those of the search: their seed is another one.
    """
    shutil.copytree(trained, "toy-seed1")
    change_config(Path("toy-seed1"), seed=1, pool=9, eval_problems=7)  # their own do not matter
    monkeypatch.setattr(search.Goal, "target_of", lambda goal, problem: 0.7)
    both = "toy-seed1 --goal all --among 6 --temperature 1 --out"
    report, _ = run_search(
        trained, f"{both} pools --strategy best_of_n --seed 1 --budget 4 --screen 0", "pools"
    )
    easy = set()
    for runs in report["policies"].values():
        for results in runs:
            pairs = zip(report["problems"], results["solved"], strict=True)
            easy |= {problem for problem, solved in pairs if solved}
    assert 0 < len(easy) < 6
    report, _ = run_search(trained, f"{both} out --policies grpo --budget 12 --screen 4")
    assert report["problems"] == [f"toy-test-{i}" for i in range(6) if f"toy-test-{i}" not in easy]
    assert len(report["policies"]["grpo"]) == 2
    assert f"{6 - len(easy)} of 6 problems" in capsys.readouterr().out


def test_a_parent_without_room_in_the_context_is_not_shown(trained, monkeypatch):
    """Guards against a search that fails when its programs have grown long."""

    def too_long(policy, prompts, max_new_tokens):
        raise UserError("a prompt and its rollout need a longer context")

    monkeypatch.setattr(search, "encode_prompts", too_long)
    _, candidates = run_search(trained, f"{QUICK} --goal all --policies vpo")
    assert not any(record["parent"] for record in candidates)


def test_a_language_model_reads_the_parent_in_its_prompt():
    """It reads the answer, its rewards and the request. The rollout begins with no given words."""
    words = Tokenizer(models.WordLevel({"word": 0}, unk_token="word"))
    policy = Policy(None, PreTrainedTokenizerFast(tokenizer_object=words))
    task = load_task("maze")
    problem = task.problems("test", 1)[0]
    plain = build_prompt(policy, task, problem, 1)
    changed = search.task_with_parent(task, candidate(1, [1.0, 0.5, 0.0, 1.0], answer="UP UP"))
    prompt = build_prompt(policy, changed, problem, 1)
    assert "An earlier answer was:\nUP UP\n" in prompt
    assert "completion 1, gold 0.5, diamond 0, avoid_lava 1" in prompt
    assert prompt.startswith(plain.rstrip()[:200])
    assert build_prompt(policy, task, problem, 1) == plain  # the task itself is as before


# The report.


def made_search() -> dict[str, list[dict]]:
    """A search of two runs and two problems, of which VPO alone solves the first in one run."""
    lost = {"solved": [0, 0], "best": [[0.1, 0.5]] * 2, "behaviours": [[1, 2]] * 2}
    won = lost | {"solved": [40, 0]}
    return {"start": [lost, lost], "grpo": [lost, lost], "vpo": [won, lost]}


def test_the_table_and_the_figure():
    """Where nobody knows what can be reached, no zero claims that nothing was found."""
    head, _, *rows = search_table(made_search(), 100, has_targets=True).splitlines()
    assert "| solved by 30 | solved by 100 | 95% interval |" in head
    assert rows[2] == "| VPO | 0.000 | 0.250 | [0.000, 1.000] | 0.500 | 2.0 | 1 0 | 1 0 |"
    *_, unknown = search_table(made_search(), 100, has_targets=False).splitlines()
    assert unknown == "| VPO | - | - | - | 0.500 | 2.0 | - | - |"

    runs = made_search()["vpo"]
    assert run_curves(runs, "solved", [30, 100]).tolist() == [[0.0, 0.5], [0.0, 0.0]]
    assert run_curves(runs, "best", [30, 100]).tolist() == [[0.1, 0.5]] * 2
    draw(made_search(), [30, 100], False, Path("search.svg"))
    assert Path("search.svg").exists()


def test_a_task_that_does_not_say_what_can_be_reached(trained, capsys):
    """No problem is screened out, and no problem counts as solved."""
    report, _ = run_search(trained, "--problems 2 --among 3 --budget 9 --goal block_1=1 --out out")
    printed = capsys.readouterr().out
    [row] = [line for line in printed.splitlines() if line.startswith("VPO ")]
    assert row.split()[1:3] == ["-", "-"]
    assert "task toy does not say what can be reached (Task.reachable)" in printed
    assert "solved by no policy" not in printed
    assert report["targets"] == [None, None]


@pytest.mark.parametrize(
    "flags, message",
    [
        ("--budget 1", "--budget 1: less than the 2 answers of a rollout"),
        ("--among 0", "--among 0: must be at least 1"),
        ("--goal gold", "--goal gold: take scalar, all, or weights .* block_1, block_2"),
        ("--goal block_1=a", "--goal block_1=a: take"),
        ("--goal block_1=-1,block_2=2", "none negative"),
        ("--strategy hope", "--strategy hope .*evolve"),
        ("--policies vpo none", "--policies none: .* choose from start, start_sets, grpo, vpo"),
    ],
)
def test_wrong_flags_are_named(trained, flags, message, capsys):
    with pytest.raises(SystemExit) as stop:
        search.main([str(trained), *QUICK.split(), *flags.split()])
    error = capsys.readouterr().err
    assert stop.value.code == 2 and error.count("\n") == 1
    assert re.search(message, error)
    assert not Path("out").exists()
