"""The search of the study: evolution towards all diamonds of a maze, with the policies of three seeds.

python study/searches.py        an hour; needs their runs in runs/study/, and writes results/search.json
"""

import json
import os
import sys
from dataclasses import replace
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from engine.errors import as_command
from engine.evaluations import evaluation_of
from engine.files import write_text
from engine.runs import policies, task_of
from engine.tasks import held_out
from examples.search import Search, SearchFlags, make_goal
from rewards import Problem
from study.reproduce import RUNS
from study.results import SEARCH, SIX

SEEDS = range(3)
FLAGS = SearchFlags(goal="diamond", budget=1000, among=1000, screen=30, problems=100, device="cpu")


def solved(row: str, seed: int, problems: list[Problem], flags: SearchFlags) -> list[int]:
    """With how many candidates a policy of a seed solves each problem, 0 if never."""
    cell = "grpo" if row == "start" else row
    evaluation = evaluation_of(RUNS / f"maze-{cell}-seed{seed}", {})
    stored = policies(evaluation.run, evaluation.config.m)[row.partition("-")[0]]
    goal = make_goal(flags.goal, task_of(evaluation.config))
    populations = Search(flags, goal, evaluation, stored).run(problems)
    return [population.solved_after() for population in populations]


@as_command("study/searches.py")
def main() -> None:
    """Search the mazes that no policy of any seed solves with a few independent candidates."""
    task = task_of(evaluation_of(RUNS / "maze-grpo-seed0", {}).config)
    problems = held_out(task, "test", FLAGS.among)
    few = replace(FLAGS, strategy="best_of_n", budget=FLAGS.screen, seed=1)
    counts = [solved(row, seed, problems, few) for row in SIX for seed in SEEDS]
    hard = [problem for problem, *own in zip(problems, *counts, strict=True) if not any(own)]
    hard = hard[: FLAGS.problems]
    found = {row: [solved(row, seed, hard, FLAGS) for seed in SEEDS] for row in SIX}
    names = [problem.id for problem in hard]
    write_text(SEARCH, json.dumps({"flags": vars(FLAGS), "problems": names, "solved": found}))


if __name__ == "__main__":
    os.chdir(Path(__file__).resolve().parents[1])  # where runs/ is
    main()
