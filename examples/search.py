"""Search: find answers to a goal with a budget of scored candidates, by best-of-n or by evolution.

    python examples/search.py runs/maze-seed0                       evolution towards the best task scalar
    python examples/search.py runs/maze-seed0 --goal diamond        towards a goal that training never saw
    python examples/search.py runs/maze-seed0 --strategy best_of_n  the same budget, independent samples
    python examples/search.py runs/maze-seed0 runs/maze-seed1 ...   the same problems for all; means

Evolution keeps the best answers of different behaviours on islands (map_elites.py). A language model
sees a parent and its rewards in the prompt. The tiny model gets the first words of the parent and
writes the rest; the other answers of its set have no parent. Empty slots and duplicates count as
candidates.
"""

import copy
import itertools
import json
import math
import random
import sys
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Literal

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
import fast
from engine.bars import progress_bar
from engine.config import Parser, device_of, flag, open_device
from engine.errors import as_command
from engine.evaluations import Evaluation, check_comparable, load_evaluations
from engine.files import check_writable, write_text
from engine.runs import StoredPolicy, policies, task_of
from engine.tasks import held_out, reachable_vectors
from examples.map_elites import ISLANDS, Candidate, Population
from examples.search_report import draw, search_table
from rewards import Problem, Task, UserError
from rollout import (
    build_prompt,
    encode_prompts,
    load_policy,
    random_generator,
    read_answers,
    rollout_length,
    sampling_options,
    score,
)

MIGRATE_EVERY = 4  # batches between migrations
ROUND = 12  # candidates of a problem per batch
ROLLOUTS_AT_ONCE = 750  # where the run does not say how many are sampled at a time


@dataclass
class SearchFlags:
    """The flags of search.py."""

    strategy: Literal["evolve", "best_of_n"] = flag(
        "evolve", "parents: the goal's best of three (evolve), or none (best_of_n)"
    )
    goal: str = flag(
        "scalar",
        "scalar: the task's own; all: a mean of 1 over the objectives; or preference weights such as "
        "gold=2,avoid_lava=1, where gold alone means gold=1",
    )
    budget: int = flag(240, "candidates scored for a problem that stays unsolved", 1, 10**6)
    problems: int = flag(40, "number of problems that are searched", 1, 2**20)
    among: int = flag(200, "number of held-out problems that they are taken from", 1, 2**20)
    screen: int = flag(
        30,
        "search only problems that no policy of any run solves with this many independent "
        "candidates; 0: the first problems",
        0,
        10_000,
    )
    policies: list[str] = flag(
        [], "start, start_sets, or methods; none: all that every run has, but start_sets"
    )
    temperature: float = flag(0.7, "sampling temperature of the candidates", 1e-3, 1e3)
    seed: int = flag(0, "seed of parents and candidates", 0, 2**31)
    device: Literal["auto", "cpu", "cuda", "mps"] = flag("auto", "auto: as train.py chooses")
    out: str = flag(
        "", "output folder; empty: TASK-search/GOAL-STRATEGY-BUDGET-SEED beside the first run"
    )


# Goals.


@dataclass
class Goal:
    """The goal of a search among the answers of a task."""

    task: Task
    text: str
    weights: list[float]  # (d) preference weights, of a goal that is neither scalar nor all
    targets: dict[str, float] = field(default_factory=dict)  # by the problem's id, as found so far

    def score(self, rewards: list[float]) -> float:
        """The goal's score of a reward vector (d)."""
        if self.text == "scalar":
            return self.task.scalar(torch.tensor(rewards)).item()
        if self.text == "all":
            return sum(rewards) / len(rewards)
        return sum(w * reward for w, reward in zip(self.weights, rewards, strict=True))

    def target_of(self, problem: Problem) -> float:
        """The score that solves a problem, infinity where the task does not say what is reachable."""
        if self.text == "all":
            return 1.0
        if problem.id not in self.targets:
            reachable = reachable_vectors(self.task, problem)
            scores = [self.score(rounded(rewards)) for rewards in reachable]
            self.targets[problem.id] = max(scores, default=math.inf)
        return self.targets[problem.id]

    def is_known(self, problems: list[Problem]) -> bool:
        """Whether any of some problems can count as solved."""
        return any(math.isfinite(self.target_of(problem)) for problem in problems)


def make_goal(text: str, task: Task) -> Goal:
    """The goal that --goal names."""
    if text in ("scalar", "all"):
        return Goal(task, text, [])
    given = {}
    for pair in text.split(","):
        name, _, weight = pair.partition("=")
        given[name] = weight or "1"
    try:
        weights = [float(given.pop(name, 0)) for name in task.objectives]
        is_weighting = not given and min(weights) >= 0 and 0 < sum(weights) < math.inf
    except ValueError:
        is_weighting = False
    if not is_weighting:
        raise UserError(
            f"--goal {text}: take scalar, all, or weights such as NAME=2,NAME=1, none negative, of "
            f"the task's objectives ({', '.join(task.objectives) or 'it names none'})"
        )
    return Goal(task, text, [weight / sum(weights) for weight in weights])


def rounded(rewards: list[float]) -> list[float]:
    """A reward vector (d) in float32 to six digits, so that equal ones have equal scores."""
    return [round(reward, 6) for reward in torch.tensor(rewards, dtype=torch.float32).tolist()]


# The search of one policy.


@dataclass
class Child:
    """A rollout that is asked for."""

    island: int
    parent: Candidate | None
    prompt: str
    prefix: str  # the words at the end of the prompt with which the rollout begins


class Search:
    """The search of one policy for answers to problems."""

    def __init__(
        self, flags: SearchFlags, goal: Goal, evaluation: Evaluation, stored: StoredPolicy
    ):
        self.flags = flags
        self.goal = goal
        self.task = goal.task
        self.config = evaluation.config
        self.m = stored.m
        self.policy = load_policy(
            str(stored.folder), self.task, device=flags.device, dtype=self.config.dtype
        )
        self.n_tokens = rollout_length(self.task, self.m, self.config.max_new_tokens)

    def run(self, problems: list[Problem]) -> list[Population]:
        """Search until every problem is solved or its budget is spent."""
        populations = [Population(problem, self.goal.target_of(problem)) for problem in problems]
        for batch in itertools.count():
            unfinished = [own for own in populations if self.is_unfinished(own)]
            if not unfinished:
                break
            self.add_batch(batch, unfinished)
            if (batch + 1) % MIGRATE_EVERY == 0:
                for population in unfinished:
                    population.migrate()
        return populations

    def is_unfinished(self, population: Population) -> bool:
        """Whether a problem is unsolved and its budget has room for another rollout."""
        has_room = len(population.candidates) + self.m <= self.flags.budget
        return has_room and not population.solved_after()

    def add_batch(self, batch: int, populations: list[Population]) -> None:
        """Sample and score G rollouts for each of P unfinished problems, and add their answers."""
        room = self.flags.budget - len(populations[0].candidates)  # the same for all unfinished
        G = min(max(1, ROUND // self.m), room // self.m)

        # 1. Parents and prompts.
        children = []  # (P * G)
        for population in populations:
            rng = random.Random(f"{self.flags.seed}-{batch}-{population.problem.id}")
            for g in range(G):
                children.append(self.child(population, (batch + g) % ISLANDS, rng))

        # 2. Rollouts.
        generator = random_generator(self.flags.seed, batch, "search")
        options = sampling_options(self.policy, self.task, self.config, self.m, generator)
        options.temperature = self.flags.temperature
        options.batch = self.config.sampling_batch or ROLLOUTS_AT_ONCE
        # Without parents the prompts of a problem are equal.
        per_prompt = G if self.flags.strategy == "best_of_n" else 1
        prompts = [child.prompt for child in children[::per_prompt]]
        rollouts = fast.sample(self.policy, prompts, per_prompt, options)
        for row, child in enumerate(children):
            rollouts.texts[row] = child.prefix + rollouts.texts[row]

        # 3. Rewards.
        answers = read_answers(self.task, rollouts, self.m)  # (P * G) lists of up to m
        problems = [population.problem for population in populations]
        scored = score(self.task, problems, answers, self.m)

        # 4. Candidates.
        for row, child in enumerate(children):
            p, g = divmod(row, G)
            vectors = scored.vectors[p, g][:, scored.objective_mask[p]]  # (m, d)
            self.add_answers(populations[p], child, answers[row], vectors.tolist())

    def child(self, population: Population, island: int, rng: random.Random) -> Child:
        """Choose a parent, or none, and write the prompt for its child.

        A language model reads the parent and its rewards in the prompt. For the tiny model the
        prompt ends with the first words of the parent.
        """
        problem = population.problem
        prompt = build_prompt(self.policy, self.task, problem, self.m)
        without_parent = Child(island, None, prompt, "")
        parent = population.parent(island, self.flags.strategy, rng)
        if not parent:
            return without_parent
        if self.policy.is_tiny:
            words = parent.answer.split()
            kept = words[: rng.randrange(len(words))]
            prefix = " ".join([f"<{self.task.tag}_1>", *kept])
            child = Child(island, parent, f"{prompt} {prefix}", f"{prefix} ")
        else:
            task = task_with_parent(self.task, parent)
            child = Child(island, parent, build_prompt(self.policy, task, problem, self.m), "")
        try:
            encode_prompts(self.policy, [child.prompt], self.n_tokens)
        except UserError:  # the parent leaves no room for a rollout in the model's context
            return without_parent
        return child

    def add_answers(
        self, population: Population, child: Child, answers: list[str], vectors: list[list[float]]
    ) -> None:
        """Add the m slots of a rollout, of which the first hold answers, with rewards (m, d)."""
        slots = answers + [""] * (self.m - len(answers))
        for j, answer in enumerate(slots):
            # Only the first answer of the tiny model's set begins as the parent.
            inherits = child.parent and (j == 0 or not child.prefix)
            rewards = rounded(vectors[j])
            candidate = Candidate(
                population.problem.id,
                order=len(population.candidates) + 1,
                parent=child.parent.order if inherits else 0,
                island=child.island,
                answer=answer,
                rewards=rewards,
                score=self.goal.score(rewards),
            )
            population.add(candidate)


def task_with_parent(task: Task, parent: Candidate) -> Task:
    """A copy of a task whose prompt ends with a parent and its rewards."""
    names = task.objectives or [f"objective {i + 1}" for i in range(len(parent.rewards))]
    rewards = zip(names, parent.rewards, strict=True)
    earned = ", ".join(f"{name} {reward:g}" for name, reward in rewards)
    request = f"An earlier answer was:\n{parent.answer}\n\nIt earned: {earned}. Write a better one."
    changed = copy.copy(task)
    changed.prompt = lambda problem, m: f"{task.prompt(problem, m)}\n\n{request}"
    return changed


# The command.

Found = dict[str, list[list[Population]]]  # by policy, for each run the populations


def search_all(
    flags: SearchFlags, goal: Goal, problems: list[Problem], evaluations: list[Evaluation]
) -> Found:
    """Search with all policies of all runs."""
    found = {name: [] for name in flags.policies}
    pairs = list(itertools.product(found, evaluations))
    for name, evaluation in progress_bar(pairs, unit="policy"):
        stored = policies(evaluation.run, evaluation.config.m)[name]
        found[name].append(Search(flags, goal, evaluation, stored).run(problems))
    return found


def screened(
    flags: SearchFlags, goal: Goal, problems: list[Problem], evaluations: list[Evaluation]
) -> list[Problem]:
    """The problems that no policy of any run solves with a few independent candidates."""
    names = choose_policies([], evaluations)
    few = replace(flags, budget=flags.screen, seed=flags.seed + 1, policies=names)
    few.strategy = "best_of_n"
    solved = set()
    for of_runs in search_all(few, goal, problems, evaluations).values():
        for population in itertools.chain.from_iterable(of_runs):
            if population.solved_after():
                solved.add(population.problem.id)
    hard = [problem for problem in problems if problem.id not in solved]
    counts = f"{len(hard)} of {len(problems)} problems"
    print(f"{counts} are solved by no policy with {flags.screen} candidates")
    if not hard:
        raise UserError(f"--screen {flags.screen}: leaves no problem; lower it, or change --goal")
    return hard


def choose_policies(names: list[str], evaluations: list[Evaluation]) -> list[str]:
    """The named policies, or if none is named all that every run has, but start_sets."""
    of_each = [policies(evaluation.run, evaluation.config.m) for evaluation in evaluations]
    shared = [name for name in of_each[0] if all(name in own for own in of_each)]
    for name in names:
        if name not in shared:
            raise UserError(f"--policies {name}: not in every run; choose from {', '.join(shared)}")
    return names or [name for name in shared if name != "start_sets"]


def curves(populations: list[Population], ticks: list[int]) -> dict[str, list]:
    """The finds of a policy of a run, problem by problem.

    Returns:
        solved: with how many candidates, 0 if never.
        best: for every number in `ticks` the best score among so many candidates, up to the solution.
        behaviours: likewise the number of distinct reward vectors.
    """
    result = {"solved": [], "best": [], "behaviours": []}
    for population in populations:
        solved = population.solved_after()
        best = []
        behaviours = []
        for tick in ticks:
            first = population.candidates[: min(tick, solved or tick)]
            best.append(max(candidate.score for candidate in first))
            behaviours.append(len({tuple(candidate.rewards) for candidate in first}))
        result["solved"].append(solved)
        result["best"].append(best)
        result["behaviours"].append(behaviours)
    return result


def report(
    flags: SearchFlags, goal: Goal, problems: list[Problem], runs: list[str], found: Found
) -> None:
    """Print the table, and write search.json, its figure and all candidates."""
    grid = [round(10 ** (i / 8)) for i in range(49)]  # 1 to a million, even on a log scale
    ticks = sorted({min(flags.budget, n) for n in grid})
    results = {}
    for name, of_runs in found.items():
        results[name] = [curves(populations, ticks) for populations in of_runs]
    targets = [goal.target_of(problem) for problem in problems]
    document = {
        "settings": vars(flags) | {"runs": runs},
        "ticks": ticks,
        "problems": [problem.id for problem in problems],
        "targets": [target if math.isfinite(target) else None for target in targets],
        "policies": results,
    }
    out = Path(flags.out)
    write_text(out / "search.json", json.dumps(document))
    records = []
    for name, of_runs in found.items():
        for run, populations in zip(runs, of_runs, strict=True):
            for population in populations:
                for candidate in population.candidates:
                    records.append(json.dumps({"run": run, "policy": name} | vars(candidate)))
    write_text(out / "candidates.jsonl", "\n".join(records))
    has_targets = goal.is_known(problems)
    draw(results, ticks, has_targets, out / "search.png")
    print(f"\n{len(problems)} problems, {flags.budget} candidates each, from {', '.join(runs)}")
    print(search_table(results, flags.budget, has_targets))
    if not has_targets:
        print(f"-: task {goal.task.name} does not say what can be reached (Task.reachable)")
    print(f"written: {out}/search.json, search.png and candidates.jsonl")


@as_command("examples/search.py")
def main(argv: list[str] | None = None) -> None:
    """Search with the policies of some runs."""
    parser = Parser(SearchFlags, "examples/search.py", __doc__)
    parser.add_argument("runs", nargs="+", metavar="RUN", help="run folders of one task")
    flags, rest = parser.parse_args_into_dataclass(argv)
    folders = [Path(name) for name in rest.runs]
    evaluations = load_evaluations(folders, {})
    check_comparable(evaluations)
    config = evaluations[0].config
    for name in ("budget", "screen"):
        value = getattr(flags, name)
        if 0 < value < config.m:
            raise UserError(f"--{name} {value}: less than the {config.m} answers of a rollout")

    task = task_of(config)
    goal = make_goal(flags.goal, task)
    flags.policies = choose_policies(flags.policies, evaluations)
    flags.device = device_of(flags.device, config.is_tiny)
    open_device(flags.device)
    if config.is_tiny:
        torch.set_num_threads(1)  # so that no number depends on the machine's cores
    beside = f"{folders[0].parent}/{config.task_name}-search"
    flags.out = flags.out or f"{beside}/{flags.goal}-{flags.strategy}-{flags.budget}-{flags.seed}"

    problems = held_out(task, "test", flags.among)
    check_writable(Path(flags.out))
    if flags.screen and goal.is_known(problems):
        problems = screened(flags, goal, problems, evaluations)
    problems = problems[: flags.problems]
    found = search_all(flags, goal, problems, evaluations)
    report(flags, goal, problems, [str(folder) for folder in folders], found)


if __name__ == "__main__":
    main()
