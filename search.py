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
import dataclasses
import hashlib
import itertools
import json
import math
import random
import runpy
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from operator import attrgetter
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor
from tqdm import tqdm

from engine.config import Config, Parser, check_ranges, device_of, flag, open_device
from engine.doors import as_command, as_user_error, did_you_mean
from engine.evaluations import check_comparable, evaluation_of, output_folders
from engine.files import write_text, writing
from engine.runs import StoredPolicy, policies, task_of
from engine.tasks import held_out, reachable_vectors
from eval import ROLLOUTS_AT_ONCE, print_left_out
from report import plots
from report.markdown import aligned
from report.search_tables import search_table
from rewards import Problem, Task, UserError
from rollout import (
    Policy,
    Rollouts,
    build_prompt,
    encode_prompts,
    load_policy,
    random_generator,
    read_answers,
    rollout_length,
    sample,
    sampling_options,
    score,
)

ISLANDS = 3
MIGRATE_EVERY = 4  # batches between migrations
FRESH = 0.2  # share of the children that have no parent
ROUND = 12  # candidates of a problem per batch


@dataclass
class SearchFlags:
    """The flags of search.py."""

    strategy: Literal["evolve", "best_of_n"] = flag("evolve", "evolution, or independent samples")
    selection: Literal["tournament", "lexicase", "weighting"] = flag(
        "tournament", "how evolution chooses parents"
    )
    goal: str = flag(
        "scalar",
        "scalar: the task's own; all: every objective at once; an objective's name; preference "
        "weights such as gold=2,avoid_lava=1; or a Python file with score(rewards, answer)",
    )
    budget: int = flag(240, "candidates scored for a problem that stays unsolved")
    problems: int = flag(40, "number of problems that are searched")
    among: int = flag(
        0, "number of held-out problems that they are taken from; 0: as in the first run"
    )
    screen: int = flag(
        30,
        "search only problems that no policy of any run solves with this many independent "
        "candidates; 0: the first problems",
    )
    policies: list[str] = flag(
        [], "start, start_sets, or methods of the runs; none: all but start_sets"
    )
    temperature: float = flag(
        0.0, "sampling temperature of the candidates; 0: as in the first run's evaluation"
    )
    seed: int = flag(0, "seed of parents and candidates")
    device: Literal["auto", "cpu", "cuda", "mps"] = flag("auto", "auto: as train.py chooses")
    out: str = flag(
        "",
        "folder for logs, table and figures; empty: TASK-search/GOAL-STRATEGY-SELECTION-BUDGET beside "
        "the first run",
    )


# Candidates, and the parents among them.


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


by_score = attrgetter("score")


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
        """A parent from an island, or None for a child without a parent.

        Without a selection, as in best-of-n, no child has a parent.
        """
        elites = list(self.islands[island].values())
        if not selection or not elites or rng.random() < FRESH:
            return None
        return SELECTIONS[selection](elites, rng)

    def solved_after(self) -> int:
        """How many candidates it took to reach the target score, 0 if none reached it."""
        for candidate in self.candidates:
            if candidate.score >= self.target - 1e-6:
                return candidate.order
        return 0


def tournament(elites: list[Candidate], rng: random.Random) -> Candidate:
    """The goal's best of three."""
    return max(rng.sample(elites, min(3, len(elites))), key=by_score)


def lexicase(elites: list[Candidate], rng: random.Random) -> Candidate:
    """The best in a random objective. The next random objective decides between equals."""
    k = len(elites[0].rewards)
    for i in rng.sample(range(k), k):
        best = max(candidate.rewards[i] for candidate in elites)
        elites = [candidate for candidate in elites if candidate.rewards[i] == best]
    return rng.choice(elites)


def weighting(elites: list[Candidate], rng: random.Random) -> Candidate:
    """The best under random preference weights w ~ Dirichlet(1)."""
    weights = [rng.expovariate(1) for _ in elites[0].rewards]
    return max(elites, key=lambda candidate: weighted_sum(weights, candidate.rewards))


SELECTIONS = {"tournament": tournament, "lexicase": lexicase, "weighting": weighting}


def weighted_sum(weights: list[float], rewards: list[float]) -> float:
    """The utility of a reward vector (k) under preference weights (k)."""
    return sum(w * reward for w, reward in zip(weights, rewards, strict=True))


# Goals.


@dataclass
class Goal:
    """What a search looks for among the answers of a task."""

    task: Task
    key: str  # in the log: the text of --goal, of a file its checksum
    score: Callable[[list[float], str], float]  # of an answer, by its rewards (k) and its text
    target: float | None = None  # the score that solves a problem; None: the best reachable one
    targets: dict[str, float] = field(default_factory=dict)  # found so far, by the problem's id

    def target_of(self, problem: Problem) -> float:
        """The score that solves a problem, infinity where nobody knows it."""
        if self.target is not None:
            return self.target
        if problem.id not in self.targets:
            reachable = reachable_vectors(self.task, problem)
            scores = [self.score(as_logged(rewards), "") for rewards in reachable]
            self.targets[problem.id] = max(scores, default=math.inf)
        return self.targets[problem.id]

    def is_known(self, problems: list[Problem]) -> bool:
        """Whether any of some problems can count as solved."""
        return any(math.isfinite(self.target_of(problem)) for problem in problems)


def make_goal(text: str, task: Task) -> Goal:
    """The goal that --goal names. Raises UserError if it cannot be used with the task."""
    if text == "scalar":
        return Goal(task, text, lambda rewards, answer: task.scalar(torch.tensor(rewards)).item())
    if text == "all":
        return Goal(task, text, lambda rewards, answer: sum(rewards) / len(rewards), target=1.0)
    if text.endswith(".py"):
        return own_goal(text, task)
    weights = objective_weights(text, task.objectives)
    return Goal(task, text, lambda rewards, answer: weighted_sum(weights, rewards))


def objective_weights(text: str, objectives: tuple[str, ...]) -> list[float]:
    """Preference weights from a text such as gold=2,avoid_lava=1, or from one objective's name."""
    pairs = text if "=" in text else f"{text}=1"
    try:
        shares = dict(pair.split("=") for pair in pairs.split(","))
        weights = [float(shares.pop(name, 0)) for name in objectives]
        if shares or min(weights) < 0 or not 0 < sum(weights) < math.inf:
            raise ValueError("no such weights")
    except ValueError as error:
        choices = "scalar, all or a Python file"
        if objectives:
            example = f"{objectives[0]}=2,{objectives[-1]}=1"
            choices += (
                f", one of {', '.join(objectives)}, or a weighting of these, as {example} (none "
                "negative, one above 0)"
            )
        suggestion = did_you_mean(text, ("scalar", "all", *objectives))
        raise UserError(f"--goal {text}: take {choices}{suggestion}") from error
    return [weight / sum(weights) for weight in weights]


def own_goal(path: str, task: Task) -> Goal:
    """The goal of a user's file: its score(rewards, answer), and its `target`, if any."""
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

    return Goal(task, hashlib.sha256(Path(path).read_bytes()).hexdigest(), score, target)


# The search of one policy.


@dataclass
class SearchedRun:
    """A run whose policies search."""

    folder: Path
    config: Config
    policies: dict[str, StoredPolicy]


@dataclass
class Child:
    """A rollout that is asked for."""

    batch: int
    problem: Problem
    order: int  # of its first candidate
    island: int
    parent: Candidate | None
    prompt: str
    prefix: str  # the words at the end of the prompt with which the rollout begins


class Search:
    """The search of one policy for answers to problems.

    Args:
        run: the policy's run.
        name: the policy's name.
    """

    def __init__(
        self,
        flags: SearchFlags,
        goal: Goal,
        problems: list[Problem],
        run: SearchedRun,
        name: str,
    ):
        self.flags = flags
        self.goal = goal
        self.task = goal.task
        self.config = run.config
        self.folder = run.policies[name].folder
        self.m = run.policies[name].m
        self.log = Path(flags.out) / run.folder.name / f"{name}.jsonl"
        self.policy = load_policy(
            str(self.folder), self.task, device=flags.device, dtype=self.config.dtype
        )
        self.n_tokens = rollout_length(self.task, self.m, self.config.max_new_tokens)
        self.populations = {}
        for problem in problems:
            self.populations[problem.id] = Population(problem, goal.target_of(problem))

    def run(self) -> list[Population]:
        """Search until every problem is solved or its budget is spent. Returns their populations.

        Batches that are in the log already are not sampled again, but for the last one.

        Raises:
            UserError: the log is of another search, or the goal fails.
        """
        batches = read_batches(self.log, self.header())
        for candidates in batches:
            self.absorb(candidates)
        with tqdm(desc=self.log.stem, unit="candidate", leave=False) as bar:
            for batch in itertools.count(len(batches)):
                unfinished = list(filter(self.is_unfinished, self.populations.values()))
                if not unfinished:
                    break
                candidates = self.propose(batch, unfinished)
                append_batch(self.log, candidates)
                self.absorb(candidates)
                bar.update(len(candidates))
        return list(self.populations.values())

    def header(self) -> str:
        """The first line of the log, which tells a search from another one."""
        ids = " ".join(self.populations)
        header = {
            "version": 4,  # of the log
            "goal": self.goal.key,
            "task": checksum_of_task(self.config.task),
            "problems": hashlib.sha256(ids.encode()).hexdigest(),
            "m": self.m,
            "weights": checksum_of_weights(self.folder),
        }
        for name in ("temperature", "strategy", "selection", "budget", "seed"):
            header[name] = getattr(self.flags, name)
        return json.dumps(header)

    def is_unfinished(self, population: Population) -> bool:
        """Whether a problem is unsolved and its budget has room for another rollout."""
        has_room = len(population.candidates) + self.m <= self.flags.budget
        return has_room and not population.solved_after()

    def propose(self, batch: int, populations: list[Population]) -> list[Candidate]:
        """Sample and score the rollouts of a batch, G for each of P unfinished problems.

        Returns:
            Candidates (P * G * m).
        """
        # All unfinished problems have equally many candidates.
        n_scored = len(populations[0].candidates)
        room = self.flags.budget - n_scored
        G = min(max(1, ROUND // self.m), room // self.m)
        children = []  # (P * G)
        for population in populations:
            rng = random.Random(f"{self.flags.seed}-{batch}-{population.problem.id}")
            for g in range(G):
                order = n_scored + g * self.m + 1
                children.append(self.child(batch, population, order, (batch + g) % ISLANDS, rng))

        rollouts = self.sample(children, G)
        answers = read_answers(self.task, rollouts, self.m)  # (P * G) lists of up to m
        problems = [population.problem for population in populations]
        scored = score(self.task, problems, answers, self.m)
        candidates = []
        for row, child in enumerate(children):
            p, g = divmod(row, G)
            vectors = scored.vectors[p, g][:, scored.objective_mask[p]]  # (m, k)
            candidates += self.candidates_of(child, answers[row], vectors)
        return candidates

    def child(
        self, batch: int, population: Population, order: int, island: int, rng: random.Random
    ) -> Child:
        """Choose a parent, or none, and write the prompt for its child.

        A parent that leaves no room for a rollout in the model's context is not shown.
        """
        problem = population.problem
        parent = population.parent(island, self.flags.selection, rng)
        prompt, prefix = child_prompt(self.policy, self.task, problem, self.m, parent, rng)
        if parent and not self.fits(prompt):
            parent = None
            prompt, prefix = child_prompt(self.policy, self.task, problem, self.m, parent, rng)
        return Child(batch, problem, order, island, parent, prompt, prefix)

    def fits(self, prompt: str) -> bool:
        """Whether the model's context holds a prompt and its rollout."""
        try:
            encode_prompts(self.policy, [prompt], self.n_tokens)
        except UserError:
            return False
        return True

    def sample(self, children: list[Child], G: int) -> Rollouts:
        """The rollouts of P * G children, with the words with which they begin."""
        generator = random_generator(self.flags.seed, children[0].batch, "search")
        options = sampling_options(self.policy, self.task, self.config, self.m, generator)
        options.temperature = self.flags.temperature
        options.batch = self.config.sampling_batch or ROLLOUTS_AT_ONCE
        # Without parents the prompts of a problem are equal.
        per_prompt = 1 if self.flags.selection else G
        prompts = [child.prompt for child in children[::per_prompt]]
        rollouts = sample(self.policy, prompts, per_prompt, options)
        texts = [child.prefix for child in children]
        for row, text in enumerate(rollouts.texts):
            texts[row] += text
        return replace(rollouts, texts=texts)

    def candidates_of(self, child: Child, answers: list[str], vectors: Tensor) -> list[Candidate]:
        """The m candidates of a rollout, from its up to m answers and their reward vectors (m, k)."""
        slots = answers + [""] * (self.m - len(answers))
        candidates = []
        for j, answer in enumerate(slots):
            # Only the first answer of the tiny model's set begins as the parent.
            inherits = j == 0 or not child.prefix
            rewards = as_logged(vectors[j].tolist())
            candidate = Candidate(
                child.batch,
                child.problem.id,
                order=child.order + j,
                parent=child.parent.order if child.parent and inherits else 0,
                island=child.island,
                answer=answer,
                rewards=rewards,
                score=self.goal.score(rewards, answer),
            )
            candidates.append(candidate)
        return candidates

    def absorb(self, candidates: list[Candidate]) -> None:
        """Add a batch of candidates to their populations, which migrate every fourth batch."""
        for candidate in candidates:
            self.populations[candidate.problem].add(candidate)
        if (candidates[0].batch + 1) % MIGRATE_EVERY == 0:
            for problem in {candidate.problem for candidate in candidates}:
                self.populations[problem].migrate()


def child_prompt(
    policy: Policy,
    task: Task,
    problem: Problem,
    m: int,
    parent: Candidate | None,
    rng: random.Random,
) -> tuple[str, str]:
    """The prompt for a child, and the words at its end with which the rollout begins.

    A language model reads the parent and its rewards in the prompt. For the tiny model the prompt
    ends with the first words of the parent.
    """
    if parent is None:
        return build_prompt(policy, task, problem, m), ""
    if not policy.is_tiny:
        return build_prompt(policy, task_with_parent(task, parent), problem, m), ""
    words = parent.answer.split()
    kept = words[: rng.randrange(len(words))]
    prefix = " ".join([f"<{task.tag}_1>", *kept])
    return f"{build_prompt(policy, task, problem, m)} {prefix}", f"{prefix} "


def task_with_parent(task: Task, parent: Candidate) -> Task:
    """A copy of a task whose prompt ends with a parent and its rewards."""
    names = task.objectives or [f"objective {i + 1}" for i in range(len(parent.rewards))]
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


# The log.


def checksum_of_weights(folder: Path) -> str:
    """A checksum of a policy's weights, which tells whether a log is of this policy."""
    digest = hashlib.sha256()
    for path in sorted(folder.glob("*.safetensors")):
        with path.open("rb") as file:
            digest.update(hashlib.file_digest(file, "sha256").digest())
    return digest.hexdigest()


def checksum_of_task(name: str) -> str:
    """A checksum of a user's file of a task; the name of a built-in task."""
    if Path(name).suffix != ".py":
        return name
    return hashlib.sha256(Path(name).read_bytes()).hexdigest()


def as_logged(rewards: list[float]) -> list[float]:
    """A reward vector (k) as a candidate's stands in the log, so that equal ones have equal scores."""
    return [round(reward, 6) for reward in torch.tensor(rewards, dtype=torch.float32).tolist()]


def append_batch(log: Path, candidates: list[Candidate]) -> None:
    """Append the candidates of a batch to a log, one a line."""
    lines = [json.dumps(vars(candidate)) for candidate in candidates]
    with log.open("a") as file:
        file.write("\n".join(lines) + "\n")


def read_batches(log: Path, header: str) -> list[list[Candidate]]:
    """The batches of a log but the last, which a kill may have cut, and which is cut off.

    Sampled again it is the same. Begins a log where there is none.

    Raises:
        UserError: the log has another header, or is damaged.
    """
    lines = log.read_text(errors="replace").split("\n") if log.exists() else [header]
    if lines[0] != header:
        raise UserError(f"{log}: the log of another search; name another folder with --out")
    try:
        whole_lines = lines[1:-1]  # the last one is empty, or cut by a kill
        candidates = [Candidate(**json.loads(line)) for line in whole_lines]
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


# The command.


def run(argv: list[str] | None) -> None:
    """Search with the policies of some runs, and write logs, a table and figures.

    Raises:
        UserError: a flag is wrong, or the screening leaves no problem.
    """
    parser = Parser(SearchFlags, "search.py", __doc__.split("\n\n")[0])
    parser.add_argument(
        "runs", nargs="+", metavar="RUN", help="run folders of train.py, all of one task"
    )
    flags, rest = parser.parse_args_into_dataclasses(argv)
    runs = load_runs([Path(name) for name in rest.runs], flags)
    config = runs[0].config
    task = task_of(config)
    goal = make_goal(flags.goal, task)
    shared = [name for name in runs[0].policies if all(name in run.policies for run in runs)]
    if not flags.policies:
        print_left_out({str(run.folder): list(run.policies) for run in runs})
    all_but_sets = [name for name in shared if name != "start_sets"]
    flags.policies = flags.policies or all_but_sets
    check_policies(flags, runs[0], shared, screened=all_but_sets)
    flags.device = device_of(flags.device, config.is_tiny)
    open_device(flags.device)
    if config.is_tiny:
        torch.set_num_threads(1)  # so that no number depends on the machine's cores
    if flags.strategy == "best_of_n":
        flags.selection = ""  # no child has a parent
    flags.out = flags.out or default_folder(flags, runs[0].folder, config.task_name)
    output_folders([run.folder for run in runs], Path(flags.out))

    problems = held_out(task, "test", flags.among)
    if flags.screen and goal.is_known(problems):
        screening = replace(
            flags,
            strategy="best_of_n",
            selection="",
            policies=all_but_sets,
            budget=flags.screen,
            seed=flags.seed + 1,
            out=f"{flags.out}/screen",
        )
        problems = unsolved(problems, search_all(screening, goal, problems, runs), flags.screen)
    problems = problems[: flags.problems]
    report(flags, goal, runs, search_all(flags, goal, problems, runs))


def load_runs(folders: list[Path], flags: SearchFlags) -> list[SearchedRun]:
    """The runs, and in the flags what is as in the first of them.

    Raises:
        UserError: a flag is out of range, or the runs are incomplete or cannot be compared.
    """
    check_ranges(replace(flags, temperature=flags.temperature or 1.0))
    if not flags.problems:
        raise UserError("--problems 0: must be at least 1")
    changes = {"problems": flags.among or None, "temperature": flags.temperature or None}
    settings = evaluation_of(folders[0], changes).settings
    flags.among = settings.problems
    flags.temperature = settings.temperature
    evaluations = [evaluation_of(folder, dataclasses.asdict(settings)) for folder in folders]
    check_comparable(evaluations)
    runs = []
    for evaluation in evaluations:
        config = evaluation.config
        runs.append(SearchedRun(evaluation.run, config, policies(evaluation.run, config.m)))
    return runs


def check_policies(
    flags: SearchFlags, run: SearchedRun, shared: list[str], screened: list[str]
) -> None:
    """Raise UserError for a policy that not all runs have, or whose rollouts no budget holds.

    Args:
        shared: the policies that all runs have.
        screened: those that --screen searches with.
    """
    for name in flags.policies:
        if name not in shared:
            raise UserError(f"--policies {name}: not in every run; choose from {', '.join(shared)}")
    needed = [("--budget", flags.budget, name) for name in flags.policies]
    if flags.screen:
        needed += [("--screen", flags.screen, name) for name in screened]
    for flag_name, n_candidates, name in needed:
        m = run.policies[name].m
        if n_candidates < m:
            raise UserError(
                f"{flag_name} {n_candidates}: less than a rollout of {name} holds, {m} answers"
            )


def default_folder(flags: SearchFlags, run: Path, task_name: str) -> str:
    """TASK-search/GOAL-STRATEGY-SELECTION-BUDGET beside the first run."""
    goal = Path(flags.goal).name.removesuffix(".py")
    strategy = f"{flags.strategy}-{flags.selection}".removesuffix("-")
    return f"{run.parent}/{task_name}-search/{goal}-{strategy}-{flags.budget}"


def search_all(
    flags: SearchFlags, goal: Goal, problems: list[Problem], runs: list[SearchedRun]
) -> dict[str, list[list[Population]]]:
    """Search with all policies of all runs. Returns name -> for each run the populations."""
    found = {name: [] for name in flags.policies}
    for name, of_runs in found.items():
        for run in runs:
            search = Search(flags, goal, problems, run, name)
            with writing(search.log.parent):
                of_runs.append(search.run())
    return found


def unsolved(
    problems: list[Problem], found: dict[str, list[list[Population]]], budget: int
) -> list[Problem]:
    """The problems that no policy of any run solved. Raises UserError if there are none."""
    solved = set()
    for of_runs in found.values():
        for population in itertools.chain.from_iterable(of_runs):
            if population.solved_after():
                solved.add(population.problem.id)
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
    flags: SearchFlags,
    goal: Goal,
    runs: list[SearchedRun],
    found: dict[str, list[list[Population]]],
) -> None:
    """Print the table, and write search.json and its figure."""
    grid = [round(10 ** (i / 8)) for i in range(49)]  # 1 to a million, even on a log scale
    ticks = sorted({min(flags.budget, n) for n in grid})
    results = {}
    for name, of_runs in found.items():
        results[name] = [curves(populations, ticks) for populations in of_runs]
    problems = [population.problem for population in found[flags.policies[0]][0]]
    targets = [goal.target_of(problem) for problem in problems]
    document = {
        "settings": vars(flags) | {"runs": [str(run.folder) for run in runs]},
        "ticks": ticks,
        "problems": [problem.id for problem in problems],
        "targets": [target if math.isfinite(target) else None for target in targets],
        "policies": results,
    }
    out = Path(flags.out)
    n_runs = "1 run" if len(runs) == 1 else f"{len(runs)} runs"
    print(f"\n{out}: {len(problems)} problems, {flags.budget} candidates each, {n_runs}")
    print(aligned(search_table(document)))
    is_known = goal.is_known(problems)
    if not is_known:
        unknown = f"task {goal.task.name} does not say what can be reached (Task.reachable)"
        if flags.goal.endswith(".py"):
            unknown = f"{flags.goal} sets no target"
        print(
            f"-: {unknown}, so no problem counts as solved, and --screen left none out; compare the "
            "best scores"
        )
    write_text(out / "search.json", json.dumps(document))
    plots.search(ticks, results, out / "search.png", is_known)
    print(f"written: {out}/search.json (who solved what), {out}/search.png")


def curves(populations: list[Population], ticks: list[int]) -> dict[str, list]:
    """What a policy of a run found, problem by problem.

    Returns:
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
    as_command("search.py", lambda: run(argv))


if __name__ == "__main__":
    main()
