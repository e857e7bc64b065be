"""Search: find answers to a goal with a budget of scored candidates, by best-of-n or by evolution.

    python search.py runs/maze-seed0                       evolution towards the best task scalar
    python search.py runs/maze-seed0 --goal diamond        towards a goal that training never saw
    python search.py runs/maze-seed0 --strategy best_of_n  the same budget, independent samples
    python search.py runs/maze-seed0 runs/maze-seed1 ...   the same problems for all; means

Evolution keeps three islands for every problem. An island is a grid that holds the best answer of
every behaviour (MAP-Elites, arXiv 1504.04909). The behaviour of an answer is its reward vector,
rounded to quarters. A language model sees a parent and its rewards in the prompt. The tiny model
gets the first words of the parent and writes the rest; the other answers of its set have no parent.
Empty slots and duplicates count as candidates. Each policy has a log of all its candidates, and a
search that was killed goes on from the log to the same result.
"""

import copy
import hashlib
import itertools
import json
import math
import random
import runpy
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from operator import attrgetter, mul
from pathlib import Path

import torch
from tqdm import tqdm

from engine.checkpoints import check_folder
from engine.checks import check_device
from engine.config import Parser, SearchConfig, as_command, parse
from engine.evaluations import (
    Evaluation,
    StoredPolicy,
    check_output,
    comparable,
    held_out,
    policies,
)
from engine.files import checksum, write_text, writing
from engine.kinds import kind_of
from engine.models import Model, Tokenizer, load_policy
from report import plots
from report.markdown import aligned
from report.search_tables import search_table
from rewards import Problem, Task, UserError, did_you_mean
from rollout import (
    Rollouts,
    SamplingOptions,
    build_prompt,
    parse_texts,
    sample,
    sampling_options,
    score,
)
from tasks import as_user_error

USAGE = "RUN [RUN ...] [--goal GOAL] [--budget N] [--strategy NAME] [--FLAG VALUE ...]"
ISLANDS = 3
MIGRATE_EVERY = 4  # rounds between migrations
FRESH = 0.2  # share of the children that have no parent
ROUND = 12  # candidates of a problem per batch


@dataclass
class Candidate:
    """An answer, or the empty slot of one, as it stands in the log."""

    batch: int
    problem: str  # the id
    order: int  # among the candidates of the problem, from 1
    parent: int  # the order of the parent, 0 if there is none
    island: int
    answer: str = ""  # empty where the rollout left the slot empty
    rewards: list[float] = field(default_factory=list)  # (k)
    score: float = 0.0  # what the goal makes of the rewards


class Population:
    """All candidates of one problem, and on every island the best answer of each behaviour."""

    def __init__(self, problem: Problem, target: float):
        self.problem = problem
        self.target = target  # the score that solves the problem
        self.candidates: list[Candidate] = []
        self.islands: list[dict[tuple, Candidate]] = [{} for _ in range(ISLANDS)]

    def add(self, candidate: Candidate) -> None:
        self.candidates.append(candidate)
        self.settle(candidate, candidate.island)

    def settle(self, candidate: Candidate, island: int) -> None:
        """Put an answer in the cell of its behaviour, unless a better one is there."""
        grid = self.islands[island]
        cell = tuple(round(4 * reward) for reward in candidate.rewards)
        if candidate.answer and (cell not in grid or candidate.score >= grid[cell].score):
            grid[cell] = candidate

    def migrate(self) -> None:
        """Settle the best answer of every island on the next island."""
        best = [max(grid.values(), key=by_score, default=None) for grid in self.islands]
        for island, candidate in enumerate(best, 1):
            if candidate:
                self.settle(candidate, island % ISLANDS)

    def parent(self, island: int, selection: str, rng: random.Random) -> Candidate | None:
        """Choose a parent from an island, or None for a child without a parent.

        Without a selection, as in best-of-n, no child has a parent.
        """
        elites = list(self.islands[island].values())
        if not selection or not elites or rng.random() < FRESH:
            return None
        return SELECTIONS[selection](elites, rng)

    def solved_after(self) -> int:
        """Return how many candidates it took to reach the target score, 0 if none reached it."""
        for candidate in self.candidates:
            if candidate.score >= self.target - 1e-6:
                return candidate.order
        return 0


by_score = attrgetter("score")


def tournament(elites: list[Candidate], rng: random.Random) -> Candidate:
    """Choose the goal's best of three."""
    return max(rng.sample(elites, min(3, len(elites))), key=by_score)


def lexicase(elites: list[Candidate], rng: random.Random) -> Candidate:
    """Choose the best in a random objective. The next random objective decides between equals."""
    k = len(elites[0].rewards)
    for i in rng.sample(range(k), k):
        best = max(candidate.rewards[i] for candidate in elites)
        elites = [candidate for candidate in elites if candidate.rewards[i] == best]
    return rng.choice(elites)


def weighting(elites: list[Candidate], rng: random.Random) -> Candidate:
    """Choose the best under random preference weights w ~ Dirichlet(1)."""
    weights = [rng.expovariate(1) for _ in elites[0].rewards]
    return max(elites, key=lambda candidate: weighted_sum(weights, candidate.rewards))


SELECTIONS = {"tournament": tournament, "lexicase": lexicase, "weighting": weighting}


def weighted_sum(weights: list[float], rewards: list[float]) -> float:
    """Return the utility of a reward vector (k) under preference weights (k)."""
    return sum(map(mul, weights, rewards))


@dataclass
class Goal:
    """What a search looks for."""

    key: str  # in the log: the text of --goal, of a file its checksum
    score: Callable[[list[float], str], float]  # of an answer, by its rewards (k) and its text
    target: float | None = None  # the score that solves a problem; None: the best reachable one
    weights: list[float] | None = None  # (k) what a goal-conditioned policy is told

    def target_of(self, problem: Problem, task: Task) -> float:
        """Return the score that solves a problem, infinity where the task does not know it.

        A problem without a known target spends the whole budget.
        """
        if self.target is not None:
            return self.target
        scores = [self.score(rewards, "") for rewards in task.reachable(problem)]
        return max(scores, default=math.inf)


def make_goal(text: str, task: Task) -> Goal:
    """Return the goal that --goal names. Raise UserError if it cannot be used with the task."""
    if text == "scalar":
        return Goal(text, lambda rewards, answer: task.scalar(torch.tensor(rewards)).item())
    if text == "all":
        return Goal(text, lambda rewards, answer: sum(rewards) / len(rewards), target=1.0)
    if text.endswith(".py"):
        return own_goal(text)
    weights = objective_weights(text, task.objectives)
    return Goal(text, lambda rewards, answer: weighted_sum(weights, rewards), weights=weights)


def objective_weights(text: str, objectives: tuple[str, ...]) -> list[float]:
    """Return the preference weights of a text such as gold=2,avoid_lava=1, or of one objective."""
    pairs = text if "=" in text else f"{text}=1"
    try:
        shares = dict(pair.split("=") for pair in pairs.split(","))
        weights = [float(shares.pop(name, 0)) for name in objectives]
        if shares or min(weights) < 0 or not 0 < sum(weights) < math.inf:
            raise ValueError("no such weights")
    except ValueError as error:
        raise UserError(
            f"--goal {text}: take scalar, all, a Python file, one of {', '.join(objectives)}, or a "
            "weighting of these, as gold=2,diamond=1 (none negative, one above 0)"
            f"{did_you_mean(text, ('scalar', 'all', *objectives))}"
        ) from error
    return [weight / sum(weights) for weight in weights]


def own_goal(path: str) -> Goal:
    """Return the goal of a user's file: its score(rewards, answer), and its `target`, if any."""
    if not Path(path).is_file():
        raise UserError(f"--goal {path}: there is no such file")
    with as_user_error(
        f"--goal {path}: cannot be used; it must be a Python file with a function "
        "score(rewards, answer), and may set target"
    ):
        module = runpy.run_path(path)
        own_score = module["score"]
        target = float(module.get("target", math.inf))
        if math.isnan(target):
            raise ValueError("target is nan")

    def score(rewards: list[float], answer: str) -> float:
        with as_user_error(f"--goal {path}: score({rewards}, {answer!r:.60}) failed"):
            value = float(own_score(list(rewards), answer))
            if not math.isfinite(value):
                raise ValueError(f"{value} is not a finite number")
        return value

    return Goal(checksum(Path(path)), score, target)


@dataclass
class SearchPolicy:
    """A policy, and how its rollouts are sampled."""

    model: Model
    tokenizer: Tokenizer
    weights: str  # the checksum of its files
    task: Task
    m: int  # answers per rollout
    goal: list[float] | None  # (k) preference weights that a goal-conditioned policy is told
    options: SamplingOptions


@dataclass
class Search:
    """The search of one policy for answers to problems.

    The problems are split in two halves, which take turns: even batches are for one half and odd
    batches for the other.
    """

    config: SearchConfig
    policy: SearchPolicy
    goal: Goal
    problems: list[Problem]
    log: Path

    def __post_init__(self):
        self.populations = {}
        for problem in self.problems:
            target = self.goal.target_of(problem, self.policy.task)
            self.populations[problem.id] = Population(problem, target)

    def run(self) -> list[Population]:
        """Search until every problem is solved or its budget is spent. Return their populations.

        Batches that are in the log already are not sampled again, but for the last one. Raises
        UserError if the log is of another search, or the goal fails.
        """
        batch = 0
        for candidates in read_batches(self.log, self.header()):
            self.absorb(candidates)
            batch = candidates[0].batch + 1

        populations = list(self.populations.values())
        with tqdm(desc=self.log.stem, unit="candidate", leave=False) as bar:
            while any(map(self.is_unfinished, populations)):
                unfinished = list(filter(self.is_unfinished, populations[batch % 2 :: 2]))
                if unfinished:
                    candidates, texts = self.propose(batch, unfinished)
                    self.score(candidates, texts, unfinished)
                    append_batch(self.log, candidates)
                    self.absorb(candidates)
                    bar.update(len(candidates))
                batch += 1
        return populations

    def header(self) -> str:
        """Return the first line of the log, which holds all that shapes the result."""
        config = self.config
        ids = " ".join(self.populations)
        return json.dumps(
            {
                "version": 2,  # of the log
                "goal": self.goal.key,
                "problems": hashlib.sha256(ids.encode()).hexdigest(),
                "m": self.policy.m,
                "temperature": self.policy.options.temperature,
                "weights": self.policy.weights,
                "strategy": config.strategy,
                "selection": config.selection,
                "budget": config.budget,
                "seed": config.seed,
            }
        )

    def is_unfinished(self, population: Population) -> bool:
        """Return whether a problem is unsolved and its budget has room for another rollout."""
        has_room = len(population.candidates) + self.policy.m <= self.config.budget
        return has_room and not population.solved_after()

    def propose(
        self, batch: int, populations: list[Population]
    ) -> tuple[list[Candidate], list[list[str]]]:
        """Sample the rollouts of a batch, G for each of P unfinished problems.

        Returns candidates (P * G * m), which have no answers yet, and the up to m answers of every
        rollout (P * G).
        """
        config = self.config
        m = self.policy.m
        # All unfinished problems of a half have equally many candidates.
        scored = len(populations[0].candidates)
        G = min(max(1, ROUND // m), (config.budget - scored) // m)
        candidates = []
        prompts = []
        prefixes = []
        for population in populations:
            problem = population.problem
            rng = random.Random(f"{config.seed}-{batch}-{problem.id}")
            order = scored
            for g in range(G):
                island = (batch // 2 + g) % ISLANDS
                parent = population.parent(island, config.selection, rng)
                prompt, prefix = child_prompt(self.policy, problem, parent, rng)
                prompts.append(prompt)
                prefixes.append(prefix)
                for j in range(m):
                    order += 1
                    # Only the first answer of the tiny model's set begins as the parent.
                    is_child = parent and (j == 0 or not prefix)
                    parent_order = parent.order if is_child else 0
                    candidates.append(Candidate(batch, problem.id, order, parent_order, island))

        # Without parents the prompts of a problem are equal.
        per_prompt = 1 if config.selection else G
        rollouts = self.sample(prompts[::per_prompt], per_prompt, batch)
        texts = [prefix + text for prefix, text in zip(prefixes, rollouts.texts, strict=True)]
        return candidates, parse_texts(self.policy.task, texts, m, rollouts.ended)

    def sample(self, prompts: list[str], G: int, batch: int) -> Rollouts:
        """Sample G rollouts of every prompt with the random numbers of a batch."""
        model = self.policy.model
        seed = 2**40 + self.config.seed * 1_000_003 + batch
        generator = torch.Generator(model.device).manual_seed(seed)
        options = replace(self.policy.options, generator=generator)
        return sample(model, self.policy.tokenizer, prompts, G, options)

    def score(
        self,
        candidates: list[Candidate],
        answers: list[list[str]],
        populations: list[Population],
    ) -> None:
        """Score the answers of P * G rollouts, those of a problem side by side, for their candidates."""
        m = self.policy.m
        slots = []  # (P * G * m)
        for parsed in answers:
            slots += parsed + [""] * (m - len(parsed))

        problems = [population.problem for population in populations]
        scored = score(self.policy.task, problems, answers, m)
        vectors = []
        for of_problem, mask in zip(scored.vectors, scored.objective_mask, strict=True):
            vectors += of_problem[..., mask].flatten(0, 1).tolist()  # (G, m, k) -> (G * m, k)

        for candidate, answer, vector in zip(candidates, slots, vectors, strict=True):
            candidate.answer = answer
            candidate.rewards = [round(reward, 6) for reward in vector]
            candidate.score = self.goal.score(candidate.rewards, answer)

    def absorb(self, candidates: list[Candidate]) -> None:
        """Add a batch of candidates to their populations, which migrate every fourth round."""
        for candidate in candidates:
            self.populations[candidate.problem].add(candidate)

        rounds = candidates[0].batch // 2 + 1
        if rounds % MIGRATE_EVERY == 0:
            for problem in {candidate.problem for candidate in candidates}:
                self.populations[problem].migrate()


def child_prompt(
    policy: SearchPolicy, problem: Problem, parent: Candidate | None, rng: random.Random
) -> tuple[str, str]:
    """Return the prompt for a child, and the words at its end with which the rollout begins.

    A language model reads the parent and its rewards in the prompt. For the tiny model the prompt
    ends with the first words of the parent.
    """
    task = policy.task
    reads_parent = kind_of(policy.tokenizer).is_pretrained
    if parent and reads_parent:
        task = task_with_parent(task, parent)
    prompt = build_prompt(policy.tokenizer, task, problem, policy.m, policy.goal)
    if not parent or reads_parent:
        return prompt, ""
    words = parent.answer.split()
    kept = words[: rng.randrange(len(words))]
    prefix = " ".join([f"<{task.tag}_1>", *kept])
    return f"{prompt} {prefix}", f"{prefix} "


def task_with_parent(task: Task, parent: Candidate) -> Task:
    """Return a copy of a task whose prompt ends with a parent and its rewards."""
    names = task.objectives or [f"test {i + 1}" for i in range(len(parent.rewards))]
    rewards = zip(names, parent.rewards, strict=True)
    earned = ", ".join(f"{name} {reward:g}" for name, reward in rewards)

    def prompt(problem: Problem, m: int) -> str:
        return (
            f"{task.prompt(problem, m)}\n\nAn earlier answer was:\n{parent.answer}\n\n"
            f"It earned: {earned}. Write a better one."
        )

    changed = copy.copy(task)
    changed.prompt = prompt
    return changed


def append_batch(log: Path, candidates: list[Candidate]) -> None:
    """Append the candidates of a batch to a log, one a line."""
    lines = [json.dumps(vars(candidate)) for candidate in candidates]
    with log.open("a") as file:
        file.write("\n".join(lines) + "\n")


def read_batches(log: Path, header: str) -> list[list[Candidate]]:
    """Read the batches of a log but the last, which a kill may have cut, and cut that off.

    Sampled again it is the same. Begins a log where there is none. Raises UserError if the log has
    another header, or is damaged.
    """
    lines = log.read_text(errors="replace").split("\n") if log.exists() else [header]
    if lines[0] != header:
        raise UserError(f"{log}: the log of another search; name another folder with --out")
    try:
        candidates = [Candidate(**json.loads(line)) for line in lines[1:-1]]
    except (ValueError, TypeError) as error:  # not what a kill leaves
        raise UserError(f"{log}: damaged ({error}); delete it") from error
    orders = Counter()  # by problem: of its last candidate
    for candidate in candidates:
        orders[candidate.problem] += 1
        if candidate.order != orders[candidate.problem]:
            raise UserError(f"{log}: damaged (a line is missing); delete it")
    by_batch = itertools.groupby(candidates, key=attrgetter("batch"))
    complete = [list(batch) for _, batch in by_batch][:-1]
    n_lines = 1 + sum(map(len, complete))
    write_text(log, "\n".join(lines[:n_lines]) + "\n")
    return complete


def run(config: SearchConfig) -> None:
    """Search with the policies of some runs, and write logs, a table and figures.

    Raises UserError for a mistake in the flags, or if the screening leaves no problem.
    """
    config.device = check_device(config.device)
    if config.strategy == "best_of_n":
        config.selection = ""  # no child has a parent
    runs = [Path(run) for run in config.runs]
    evaluations = comparable(runs, problems=config.among, temperature=config.temperature)
    first = evaluations[0]
    goal = make_goal(config.goal, first.task)
    m = first.config.m
    shared = list(policies(first.run, m))
    for evaluation in evaluations:
        known = policies(evaluation.run, m)
        shared = [name for name in shared if name in known]
    searched_by_default = [name for name in shared if name != "start_sets"]
    config.policies = config.policies or searched_by_default
    check_flags(config, shared, policies(first.run, m), screened=searched_by_default)
    config.out = config.out or default_folder(config, first.config.task_name)
    check_output(runs, Path(config.out))

    problems = held_out(first.task, first.settings.split, first.settings.problems)
    if config.screen:
        screening = replace(
            config,
            strategy="best_of_n",
            selection="",
            policies=searched_by_default,
            budget=config.screen,
            seed=config.seed + 1,
            out=f"{config.out}/screen",
        )
        easy = search_all(screening, evaluations, goal, problems)
        problems = unsolved(problems, easy, config.screen)
    problems = problems[: config.problems]
    report(config, problems, search_all(config, evaluations, goal, problems))


def check_flags(
    config: SearchConfig,
    shared: list[str],
    stored: dict[str, StoredPolicy],
    screened: list[str],
) -> None:
    """Raise UserError for a policy that not all runs have, or whose rollouts no budget holds.

    Args:
        shared: the policies that all runs have.
        screened: those that --screen searches with.
    """
    for name in config.policies:
        if name not in shared:
            raise UserError(f"--policies {name}: not in every run; choose from {', '.join(shared)}")
        check_holds("budget", config.budget, name, stored[name].m)
    if config.screen:
        for name in screened:
            check_holds("screen", config.screen, name, stored[name].m)


def check_holds(flag: str, n_candidates: int, policy: str, m: int) -> None:
    """Raise UserError if so many candidates do not hold one rollout of a policy."""
    if n_candidates < m:
        raise UserError(
            f"--{flag} {n_candidates}: less than a rollout of {policy} holds, {m} answers"
        )


def default_folder(config: SearchConfig, task_name: str) -> str:
    """Return TASK-search/GOAL-STRATEGY-SELECTION-BUDGET beside the first run."""
    goal = Path(config.goal).name.removesuffix(".py")
    strategy = f"{config.strategy}-{config.selection}".removesuffix("-")
    folder = Path(config.runs[0]).parent
    return f"{folder}/{task_name}-search/{goal}-{strategy}-{config.budget}"


def search_all(
    config: SearchConfig, evaluations: list[Evaluation], goal: Goal, problems: list[Problem]
) -> dict[str, list[list[Population]]]:
    """Search with all policies of all runs. Return name -> for each run the populations."""
    populations = {name: [] for name in config.policies}
    for name, of_runs in populations.items():
        for evaluation in evaluations:
            policy = load(evaluation, name, goal, config.device)
            folder = Path(config.out) / evaluation.run.name
            search = Search(config, policy, goal, problems, folder / f"{name}.jsonl")
            with writing(folder):
                of_runs.append(search.run())
    return populations


def load(evaluation: Evaluation, name: str, goal: Goal, device: str) -> SearchPolicy:
    """Load a policy of a run."""
    config = evaluation.config
    task = evaluation.task
    stored = policies(evaluation.run, config.m)[name]
    check_folder(stored.folder)
    model, tokenizer = load_policy(str(stored.folder), task, device=device, dtype=config.dtype)
    weights = None
    if name == "goal_conditioned":
        k = len(task.objectives)
        weights = goal.weights or [1 / k] * k
    options = sampling_options(
        tokenizer,
        task,
        stored.m,
        config.max_new_tokens,
        temperature=evaluation.settings.temperature,
        batch=config.sampling_batch,
    )
    files = checksum(stored.folder / "checksums.json")
    return SearchPolicy(model, tokenizer, files, task, stored.m, weights, options)


def unsolved(
    problems: list[Problem], found: dict[str, list[list[Population]]], budget: int
) -> list[Problem]:
    """Return the problems that no policy of any run solved. Raise UserError if there are none."""
    solved = set()
    for of_runs in found.values():
        for populations in of_runs:
            solved |= {
                population.problem.id for population in populations if population.solved_after()
            }
    hard = [problem for problem in problems if problem.id not in solved]
    print(
        f"{len(hard)} of {len(problems)} problems are solved by no policy with {budget} candidates"
    )
    if not hard:
        raise UserError(
            f"--screen {budget}: every problem is solved by then; "
            "take a lower one, or another --goal"
        )
    return hard


def report(
    config: SearchConfig, problems: list[Problem], found: dict[str, list[list[Population]]]
) -> None:
    """Print the table, and write search.json and its figure."""
    grid = [round(10 ** (i / 8)) for i in range(49)]  # 1 to a million, even on a log scale
    ticks = sorted({min(config.budget, n) for n in grid})
    results = {}
    for name, of_runs in found.items():
        results[name] = [curves(populations, ticks) for populations in of_runs]
    document = {
        "settings": vars(config),
        "ticks": ticks,
        "problems": [problem.id for problem in problems],
        "policies": results,
    }
    out = Path(config.out)
    runs = "1 run" if len(config.runs) == 1 else f"{len(config.runs)} runs"
    print(
        f"\n{out}: {len(problems)} problems, {config.budget} candidates each, {runs}\n"
        f"{aligned(search_table(document))}"
    )
    write_text(out / "search.json", json.dumps(document))
    plots.search(ticks, results, out / "search.png")
    print(f"written: {out}/search.json (who solved what), {out}/search.png")


def curves(populations: list[Population], ticks: list[int]) -> dict[str, list]:
    """Return what a policy of a run found, problem by problem.

    solved: with how many candidates, 0 if never.
    best: for every number in `ticks` the best score among so many candidates, up to the solution.
    behaviours: likewise the number of distinct reward vectors.
    """
    result = {"solved": [], "best": [], "behaviours": []}
    for population in populations:
        solved = population.solved_after()
        candidates = population.candidates[: solved or None]
        best = []
        behaviours = []
        for tick in ticks:
            first = candidates[:tick]
            best.append(max(candidate.score for candidate in first))
            behaviours.append(len({tuple(candidate.rewards) for candidate in first}))
        result["solved"].append(solved)
        result["best"].append(best)
        result["behaviours"].append(behaviours)
    return result


def main(argv: list[str] | None = None) -> None:
    parser = Parser("search.py", __doc__, USAGE)
    config, _ = parse(parser, SearchConfig, argv)
    as_command(parser, lambda: run(config))


if __name__ == "__main__":
    main()
