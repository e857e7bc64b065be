"""Goal-conditioned (arXiv 2605.22817, baselines): the prompt tells preference weights, and GRPO is paid by them.

    python train.py --task study/goal_conditioned.py --method grpo --model HuggingFaceTB/SmolLM2-135M-Instruct

It is a task around another one, the headlines; take another class in place of `Headline` for another task.
Each problem has random preference weights w ~ Dirichlet(1). Its prompt tells them. In training the reward
is the utility w . r, on held-out problems the reward vector r, as for every other method. A held-out
problem tells all of its candidates the same w. The tiny model has no words for weights, so it is refused.
"""

from random import Random

from rewards import Problem, Task
from tasks.headline import Headline

BASE = Headline


class GoalConditioned(Task):
    """A task whose problems tell what the answer is judged by."""

    name = "goal_conditioned"
    form = BASE.form
    tag = BASE.tag
    flags = BASE.flags
    minimum = BASE.minimum
    defaults = BASE.defaults
    language_defaults = BASE.language_defaults

    def __init__(self, **flags: str):
        self.base = BASE(**flags)

    def problems(self, split: str, n: int, seed: int = 0, start: int = 0) -> list[Problem]:
        found = []
        for problem in self.base.problems(split, n, seed, start):
            rng = Random(f"goal {problem.id}")
            draws = [rng.expovariate(1.0) for _ in self.base.objectives]
            weights = [draw / sum(draws) for draw in draws]  # Dirichlet(1)
            data = {"base": problem.data, "weights": weights, "is_training": split == "train"}
            found.append(Problem(problem.id, data))
        return found

    def prompt(self, problem: Problem, m: int) -> str:
        shares = zip(self.base.objectives, problem.data["weights"], strict=True)
        goal = ", ".join(f"{name} {share:.0%}" for name, share in shares)
        text = self.base.prompt(base_problem(problem), m)
        return f"{text}\nThis time the answer is judged by: {goal}."

    def reward(self, problem: Problem, answer: str) -> list[float]:
        vector = self.base.reward(base_problem(problem), answer)
        if not problem.data["is_training"]:
            return vector
        pairs = zip(problem.data["weights"], vector, strict=True)
        return [sum(weight * value for weight, value in pairs)]

    def canonical(self, problem: Problem, answer: str) -> str:
        return self.base.canonical(base_problem(problem), answer)

    def demonstration(self, problem: Problem, rng: Random) -> str:
        return self.base.demonstration(base_problem(problem), rng)


def base_problem(problem: Problem) -> Problem:
    """The problem of the base task, without the goal."""
    return Problem(problem.id, problem.data["base"])
