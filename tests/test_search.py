"""Search: what can be reached, goals, populations, prompts with parents, the table, mistakes."""

import json
import os
import random
import shutil
from collections.abc import Iterator
from pathlib import Path
from statistics import mean
from unittest.mock import Mock

import pytest
from helpers import change_config, fails

from engine.tasks import load_task, take_problems
from examples import search
from examples.map_elites import Candidate, Population
from examples.search_report import draw, run_curves, search_table
from rewards import Problem, UserError

QUICK = "--problems 3 --among 3 --screen 0 --budget 26 --temperature 1 --out out"


def run_search(run: Path, flags: str, out: str = "out") -> tuple[dict, list[dict]]:
    search.main([str(run), *flags.split()])
    lines = Path(out, "candidates.jsonl").read_text("utf-8").splitlines()
    report = json.loads(Path(out, "search.json").read_text("utf-8"))
    return report, [json.loads(line) for line in lines]


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


@pytest.mark.parametrize("text, score", [("scalar", 0.5), ("Bob", 0.5), ("Ann=3,Bob=1", 0.875)])
def test_the_best_that_can_be_reached_solves_a_problem(text, score, monkeypatch):
    """Guards against a target that rounding puts above every score, and one of no reward vector."""
    task = load_task("fence")
    problem = task.problems("test", 1)[0]
    for vector in ([1.0, 0.0, 0.0], [100.1, 0.3, 33.3], [1 / 3, 2 / 3, 1 / 7]):
        monkeypatch.setattr(task, "reachable", Mock(return_value=[vector]))
        goal = search.make_goal(text, task)
        population = Population(problem, goal.target_of(problem))
        rewards = search.rounded(vector)
        population.add(Candidate(problem.id, 1, 0, 0, "answer", rewards, goal.score(rewards)))
        assert population.solved_after() == 1
    assert goal.score([1.0, 0.5, 0.0]) == pytest.approx(score)  # of Ann, Bob and Cid
    monkeypatch.setattr(task, "reachable", Mock(return_value=[1.0, 0.0, 0.0]))
    with pytest.raises(UserError, match="1.0 must be a list of 3 finite numbers .* reachable"):
        search.make_goal(text, task).target_of(problem)


def candidate(order: int, rewards: list[float], answer: str = "answer") -> Candidate:
    return Candidate("problem", order, 0, 0, answer, rewards, sum(rewards))


def test_a_population_keeps_the_best_of_every_behaviour():
    """Guards against a grid that one good answer takes over, which leaves no choice of parents."""
    population = Population(Problem("problem", {}), target=1.2)
    vectors = [[1.0, 0.0], [0.0, 0.9], [0.0, 1.0], [0.0, 0.95], [0.6, 0.6]]
    for order, rewards in enumerate(vectors, 1):
        population.add(candidate(order, rewards))
    population.settle(candidate(6, [9.0, 9.0], answer=""), 0)  # an empty slot settles nowhere
    first, second, _ = population.islands
    assert not second
    population.migrate()
    assert [c.order for c in first.values()] == [1, 3, 5]
    assert [c.order for c in second.values()] == [5]
    assert population.solved_after() == 5


def test_parents_are_selected():
    population = Population(Problem("problem", {}), target=9)
    for order, rewards in ((1, [1.0, 0.0]), (3, [0.0, 1.0]), (5, [0.6, 0.6])):
        population.settle(candidate(order, rewards), 0)
    parents = [population.parent(0, "evolve", random.Random(seed)) for seed in range(1000)]
    assert {parent.order for parent in parents if parent} == {5}
    assert 150 < parents.count(None) < 250  # a fifth of the children have no parent
    assert population.parent(2, "evolve", random.Random(0)) is None
    assert population.parent(0, "best_of_n", random.Random(0)) is None


@pytest.mark.parametrize("strategy", ["evolve", "best_of_n"])
def test_a_search_counts_and_scores_every_candidate(trained, strategy, monkeypatch):
    """As the task scores it. The same command finds the same, however many are sampled at a time."""
    flags = f"{QUICK} --goal all --strategy {strategy}"
    report, candidates = run_search(trained, flags)
    task = load_task("toy")
    problems = take_problems(task, "test", 3)
    assert report["problems"] == [problem.id for problem in problems]
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


def test_a_child_begins_as_its_parent(trained, monkeypatch):
    """The first answer of a tiny set keeps a part of it. A parent too long for the context is left out."""
    flags = f"{QUICK} --budget 80 --goal all --policies vpo"
    _, candidates = run_search(trained, flags)
    by_place = {(record["problem"], record["order"]): record for record in candidates}
    kept = {True: [], False: []}  # whether it has a parent: first words shared with an earlier one
    islands = set()
    for first in candidates[::2]:  # of each rollout of two answers
        earlier = by_place[first["problem"], first["parent"] or max(1, first["order"] - 2)]
        shared = os.path.commonprefix([first["answer"].split(), earlier["answer"].split()])
        kept[first["parent"] > 0].append(len(shared))
        islands.add((first["parent"] > 0, first["island"] == earlier["island"]))
    assert mean(kept[True]) > mean(kept[False]) + 1
    assert (True, False) in islands  # a parent that has migrated
    assert not any(second["parent"] for second in candidates[1::2])
    monkeypatch.setattr(search, "encode_prompts", Mock(side_effect=UserError("too long")))
    assert not any(record["parent"] for record in run_search(trained, flags)[1])


def test_problems_are_hard_for_every_policy_of_every_run(trained, monkeypatch, capsys):
    """What any policy solves in pools of another seed is left out, whichever policies are searched."""
    shutil.copytree(trained, "toy-seed1")
    change_config(Path("toy-seed1"), seed=1, pool=9, eval_problems=7)  # their own do not matter
    targets = {"toy-test-0": 0.9, "toy-test-3": 0.9}  # more than anything earns
    monkeypatch.setattr(search.Goal, "target_of", lambda _, problem: targets.get(problem.id, 0.7))
    both = "toy-seed1 --goal all --among 6 --temperature 1 --out"
    flags = f"{both} pools --strategy best_of_n --seed 1 --budget 4 --screen 0"
    report, _ = run_search(trained, flags, "pools")
    solved = [results["solved"] for runs in report["policies"].values() for results in runs]
    by_problem = zip(report["problems"], *solved, strict=True)
    hard = [problem for problem, *after in by_problem if not any(after)]
    assert 0 < len(hard) < 6
    report, _ = run_search(trained, f"{both} out --policies vpo --budget 12 --screen 4")
    assert report["problems"] == hard
    assert len(report["policies"]["vpo"]) == 2
    assert f"{len(hard)} of 6 problems" in capsys.readouterr().out


def test_the_table_and_the_figure():
    """VPO alone solves one of two problems, in one of two runs. Where nobody knows what can be reached, there is no zero."""
    lost = {"solved": [0, 0], "best": [[0.1, 0.5]] * 2, "behaviours": [[1, 2]] * 2}
    won = lost | {"solved": [40, 0]}
    policies = {"start": [lost, lost], "vpo": [won, lost]}
    *_, known = search_table(policies, 100, has_targets=True).splitlines()
    *_, unknown = search_table(policies, 100, has_targets=False).splitlines()
    assert known == "| VPO | 0.000 | 0.250 | 3.178 | 0.500 | 2.0 |"
    assert unknown == "| VPO | - | - | - | 0.500 | 2.0 |"
    assert run_curves([won, lost], "solved", [30, 100]).tolist() == [[0.0, 0.5], [0.0, 0.0]]
    draw(policies, [30, 100], False, Path("search.svg"))


def test_a_task_that_does_not_say_what_can_be_reached(trained):
    report, _ = run_search(trained, "--problems 2 --among 3 --budget 9 --goal block_1=1 --out out")
    assert report["targets"] == [None, None]


@pytest.mark.parametrize(
    "flags, message",
    [
        ("--budget 1", "--budget 1: less than the 2 answers of a rollout"),
        ("--goal gold", "--goal gold: take scalar, all, or weights .* block_1, block_2"),
        ("--strategy hope", "--strategy: invalid choice: 'hope' .* evolve"),
        ("--policies vpo none", "--policies none: .* choose from start, start_sets, grpo, vpo"),
    ],
)
def test_wrong_flags_are_named(trained, flags, message, capsys):
    flags = [str(trained), *QUICK.split(), *flags.split()]
    fails(flags, capsys, *message.split(" .* "), command=search.main)
    assert not Path("out").exists()
