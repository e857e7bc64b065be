"""Search: what a run's policies find with a budget of scored candidates, by best-of-n or by evolution.

    python search.py runs/maze-seed0                          evolution towards the best reachable task scalar
    python search.py runs/maze-seed0 --goal diamond           towards a goal that training never saw
    python search.py runs/maze-seed0 --strategy best_of_n     the same budget, independent samples
    python search.py runs/maze-seed0 runs/maze-seed1 ...      one list of problems for all, means over the runs

Evolution keeps a few islands for a problem, each a grid with the best answer of every behaviour (MAP-Elites, arXiv
1504.04909); the reward vector, rounded to quarters, is the behaviour. A language model is shown a parent and its
rewards; the tiny model gets the parent's first words and writes the rest anew, and its set's other answers as ever.
Candidates, empty slots and duplicates too, are the budget. A log holds all; a killed search resumes to the same end."""

import signal

from engine.flags import as_command, search_parser

if __name__ == "__main__":
    search_parser(
        __doc__
    ).parse_args()  # --help and mistakes are answered here: what follows takes seconds to import
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # as_command takes Ctrl-C back

import argparse
import contextlib
import hashlib
import importlib.util
import itertools
import json
import math
import random
import re
import types
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import torch
from tqdm import tqdm

from engine.models import check_device, load_policy
from engine.runs import check_folder, checksum, comparable, held_out, policies, write_text, writing
from engine.tiny import is_tiny
from report import plots
from report.results import searched
from rewards import Problem, Task, UserError
from rollout import build_prompt, parse_answers, rollout_length, sample, score_texts

ISLANDS, MIGRATE_EVERY, FRESH = (
    3,
    4,
    0.2,
)  # rounds between migrations; share of the children that have no parent
ROUND = 12  # candidates for a problem between two looks at its population


@dataclass
class Candidate:
    order: int  # among the problem's candidates, from 1
    parent: int  # its order, 0: none
    island: int
    answer: str  # empty where a rollout left the slot empty
    rewards: list[float]
    score: float  # what the goal makes of the rewards


class Population:
    """The program database of one problem: all candidates, and on every island the best of each behaviour."""

    def __init__(self):
        self.candidates: list[Candidate] = []
        self.islands: list[dict[tuple, Candidate]] = [{} for _ in range(ISLANDS)]

    def settle(self, candidate: Candidate, island: int) -> None:
        """An answer takes the cell of its behaviour, unless a better one is there."""
        grid, cell = self.islands[island], tuple(round(4 * reward) for reward in candidate.rewards)
        if candidate.answer and (cell not in grid or candidate.score >= grid[cell].score):
            grid[cell] = candidate

    def migrate(self) -> None:
        best = [max(grid.values(), key=lambda c: c.score, default=None) for grid in self.islands]
        for island, candidate in enumerate(best, 1):
            if candidate:
                self.settle(candidate, island % ISLANDS)

    def parent(self, island: int, selection: str, rng: random.Random) -> Candidate | None:
        """An inhabitant of an island, or None for a fresh start. Lexicase: best in a random objective, ties by the
        next one; weighting: the best under one w ~ Dirichlet(1); tournament: the goal's best of three."""
        elites = list(self.islands[island].values())
        if not elites or rng.random() < FRESH:
            return None
        k = len(elites[0].rewards)
        if selection == "tournament":
            return max(rng.sample(elites, min(3, len(elites))), key=lambda c: c.score)
        if selection == "weighting":
            w = [rng.expovariate(1) for _ in range(k)]
            return max(elites, key=lambda c: sum(a * b for a, b in zip(w, c.rewards, strict=True)))
        for i in rng.sample(range(k), k):
            top = max(c.rewards[i] for c in elites)
            elites = [c for c in elites if c.rewards[i] == top]
        return rng.choice(elites)

    def solved(self, target: float) -> int:
        """How many candidates it took to reach the target; 0 if none has."""
        return next((c.order for c in self.candidates if c.score >= target - 1e-6), 0)


@dataclass
class Goal:
    score: Callable[[list[float], str], float]  # of a reward vector and its answer
    target: Callable[
        [Problem], float
    ]  # infinite where nobody knows: then the whole budget is spent
    weights: list[float] | None = (
        None  # of the objectives, where the goal is such; told to a policy that listens
    )


def make_goal(text: str, task: Task) -> Goal:
    """The goal that --goal names. UserError for one that the task does not know."""
    if text.endswith(".py"):
        return own_goal(Path(text))
    if text == "all":
        return Goal(lambda rewards, answer: sum(rewards) / len(rewards), lambda problem: 1.0)
    weights, score = None, lambda rewards, answer: task.scalar(torch.tensor(rewards)).item()
    if text != "scalar":
        given = (
            dict(part.partition("=")[::2] for part in text.split(","))
            if "=" in text
            else {text: "1"}
        )
        try:
            shares = {
                name: float(value) for name, value in given.items() if name in task.objectives
            }
        except ValueError:
            shares = {}
        if (
            len(shares) < len(given)
            or min(shares.values()) < 0
            or not 0 < sum(shares.values()) < math.inf
        ):
            raise UserError(
                f"--goal {text}: take scalar, all, a Python file, one of {', '.join(task.objectives)}, or "
                "a weighting of these, as gold=2,diamond=1 (none negative, one above 0)"
            )
        weights = [shares.get(name, 0.0) / sum(shares.values()) for name in task.objectives]
        score = lambda rewards, answer: sum(a * b for a, b in zip(weights, rewards, strict=True))  # noqa: E731
    return Goal(
        score,
        lambda problem: max(
            (score(vector, "") for vector in task.reachable(problem)), default=math.inf
        ),
        weights,
    )


def own_goal(path: Path) -> Goal:
    """score(rewards, answer) of a user's file, and its `target`. UserError if there is none, or score fails later."""
    try:
        spec = importlib.util.spec_from_file_location("own_goal", path)
        spec.loader.exec_module(module := importlib.util.module_from_spec(spec))
        own, target = module.score, float(getattr(module, "target", math.inf))
        if math.isnan(target):
            raise ValueError("target is nan")
    except (Exception, SystemExit) as error:
        raise UserError(
            f"--goal {path}: cannot be used ({type(error).__name__}: {error}); it must be a Python file "
            "with a function score(rewards, answer), and may set target"
        ) from error

    def score(rewards: list[float], answer: str) -> float:
        try:
            value = float(own(list(rewards), answer))
            if math.isfinite(value):
                return value
            why = f"gave {value}"
        except (Exception, SystemExit) as error:
            why = f"raised {type(error).__name__}: {' '.join(str(error).split())}"
        raise UserError(
            f"--goal {path}: score({rewards}, {answer!r:.60}) {why}; it must give a finite number"
        )

    return Goal(score, lambda problem: target)


def ask(
    tokenizer,
    task: Task,
    problem: Problem,
    m: int,
    parent: Candidate | None,
    weights: list[float] | None,
    rng: random.Random,
) -> tuple[str, str]:
    """The prompt for a child of a parent, and the words at its end that belong to the rollout already."""
    if parent is None:
        return build_prompt(tokenizer, task, problem, m, weights), ""
    words = parent.answer.split()
    if is_tiny(tokenizer):
        begun = " ".join([f"<{task.tag}_1>", *words[: rng.randrange(len(words))]])
        return f"{build_prompt(tokenizer, task, problem, m, weights)} {begun}", f"{begun} "
    names = task.objectives or [f"test {i + 1}" for i in range(len(parent.rewards))]
    earned = ", ".join(
        f"{name} {reward:g}" for name, reward in zip(names, parent.rewards, strict=True)
    )
    shown = (
        f"\n\nAn earlier answer was:\n{parent.answer}\n\nIt earned: {earned}. Write a better one."
    )
    edited = types.SimpleNamespace(
        prompt=lambda *asked: task.prompt(*asked) + shown, objectives=task.objectives
    )
    return build_prompt(tokenizer, edited, problem, m, weights), ""


def search(
    model,
    tokenizer,
    task: Task,
    problems: list[Problem],
    goal: Goal,
    log: Path,
    settings: dict,
    *,
    m: int,
    told: list[float] | None = None,
    max_new_tokens: int,
    sampling_batch: int = 0,
) -> list[Population]:
    """Search all problems at once. The log must agree with `settings`: strategy, selection, budget, temperature, seed
    and what else shapes the result. Two halves of the problems take turns, so that one is sampled while the other is
    scored. UserError if the log is of another search, or the goal fails."""
    index, populations = (
        {problem.id: i for i, problem in enumerate(problems)},
        [Population() for _ in problems],
    )
    targets, budget = [goal.target(problem) for problem in problems], settings["budget"]
    evolve, known = settings["strategy"] == "evolve", read_batches(log, settings)
    bar = tqdm(total=budget * len(problems), desc=log.stem, unit="candidate", leave=False)

    def is_open(i: int) -> bool:
        return len(populations[i].candidates) + m <= budget and not populations[i].solved(
            targets[i]
        )

    def absorb(records: list[dict]) -> None:
        for record in records:
            population = populations[index[record["problem"]]]
            population.candidates.append(
                Candidate(**{key: record[key] for key in Candidate.__dataclass_fields__})
            )
            population.settle(population.candidates[-1], record["island"])
        if (records[0]["batch"] // 2 + 1) % MIGRATE_EVERY == 0:
            for i in {index[record["problem"]] for record in records}:
                populations[i].migrate()
        bar.n = sum(
            len(p.candidates) if is_open(i) else budget for i, p in enumerate(populations)
        )  # closed: done
        bar.set_postfix(
            solved=sum(
                bool(p.solved(target)) for p, target in zip(populations, targets, strict=True)
            )
        )

    def sampled(batch: int) -> tuple | None:
        """Texts for the open problems of this batch's half; None if none is open."""
        chosen = [i for i in range(batch % 2, len(problems), 2) if is_open(i)]
        if not chosen:
            return None
        left = budget - len(populations[chosen[0]].candidates)  # all that are open have as many
        rollouts = min(max(1, ROUND // m), left // m)
        children, each = [], 1 if evolve else rollouts
        for i in chosen:
            rng = random.Random(f"{settings['seed']}-{batch}-{problems[i].id}")
            for g in range(rollouts // each):
                island = (batch // 2 + g) % ISLANDS
                parent = (
                    populations[i].parent(island, settings["selection"], rng) if evolve else None
                )
                children += [
                    (parent, *ask(tokenizer, task, problems[i], m, parent, told, rng))
                ] * each
        generator = torch.Generator(model.device).manual_seed(
            2**40 + settings["seed"] * 1_000_003 + batch
        )
        texts = sample(
            model,
            tokenizer,
            [prompt for _, prompt, _ in children[::each]],
            each,
            generator=generator,
            max_new_tokens=max_new_tokens,
            temperature=settings["temperature"],
            batch=sampling_batch,
            task=task,
            m=m,
        ).texts
        parents, _, begun = zip(*children, strict=True)
        return (
            batch,
            chosen,
            parents,
            [start + text for start, text in zip(begun, texts, strict=True)],
        )

    def judged(
        batch: int, chosen: list[int], parents: list[Candidate | None], texts: list[str]
    ) -> list[dict]:
        """The records of a batch; it touches no population."""
        scored = score_texts(task, [problems[i] for i in chosen], texts, m)
        records, G, sizes = [], len(texts) // len(chosen), scored.objective_mask.sum(1).tolist()
        for n, text in enumerate(texts):
            p, g = divmod(n, G)
            answers, before = parse_answers(text, task, m), len(populations[chosen[p]].candidates)
            for j, answer in enumerate(answers + [""] * (m - len(answers))):
                rewards = [
                    round(reward, 6) for reward in scored.vectors[p, g, j, : sizes[p]].tolist()
                ]
                parent = (
                    parents[n].order if parents[n] and not (j and is_tiny(tokenizer)) else 0
                )  # it began the first
                records.append(
                    {
                        "batch": batch,
                        "problem": problems[chosen[p]].id,
                        "order": before + g * m + j + 1,
                        "parent": parent,
                        "island": (batch // 2 + g) % ISLANDS,
                        "answer": answer,
                        "rewards": rewards,
                        "score": goal.score(rewards, answer),
                    }
                )
        records[-1]["last"] = True
        return records

    batch, waiting, halves_done = 0, None, 0
    with ThreadPoolExecutor(1) as scorer, log.open("a") as file, bar:
        for records in known:
            absorb(records)
            batch = records[0]["batch"] + 1
        while halves_done < 2:
            found = sampled(batch)
            if waiting:
                file.write("".join(json.dumps(record) + "\n" for record in waiting.result()))
                file.flush()
                absorb(waiting.result())
            waiting = scorer.submit(judged, *found) if found else None
            halves_done, batch = (0 if found else halves_done + 1), batch + 1
    return populations


def read_batches(log: Path, settings: dict) -> list[list[dict]]:
    """The whole batches of a log, which is begun where there is none and cut where it is damaged or not complete."""
    head = json.dumps(settings)
    lines = log.read_text(errors="replace").splitlines() if log.exists() else [head]
    if lines[:1] != [head]:
        was, now = (set(re.findall(r'"\w+": [^,}]+', text)) for text in ([*lines, ""][0], head))
        raise UserError(
            f"{log}: the log of another search, {', '.join(sorted(was - now)) or 'unknown'}, "
            f"now {', '.join(sorted(now - was))}; name another folder with --out"
        )
    batches, records, orders = [], [], Counter()
    with contextlib.suppress(
        ValueError, KeyError, TypeError
    ):  # a line cut off by a kill, or edited
        for line in lines[1:]:
            records.append(json.loads(line))
            orders[records[-1]["problem"]] += 1
            if records[-1]["order"] != orders[records[-1]["problem"]]:  # a line is missing
                break
            if "last" in records[-1]:
                batches.append(records)
                records = []
    write_text(log, "\n".join(lines[: 1 + sum(map(len, batches))]) + "\n")
    return batches


def curves(
    populations: list[Population], targets: list[float], ticks: list[int]
) -> dict[str, list]:
    """Of every problem: solved with so many candidates (0: never); best score and reward vectors after each tick."""
    solved = [
        population.solved(target) for population, target in zip(populations, targets, strict=True)
    ]
    kept = [
        population.candidates[: at or None]
        for population, at in zip(populations, solved, strict=True)
    ]
    return {
        "solved": solved,
        "best": [[max(c.score for c in each[:tick]) for tick in ticks] for each in kept],
        "behaviours": [
            [len({tuple(c.rewards) for c in each[:tick]}) for tick in ticks] for each in kept
        ],
    }


def run(args: argparse.Namespace) -> None:
    runs, device = [Path(run) for run in args.runs], check_device(args.device)
    plans = comparable(
        runs, Path(args.out or "."), {"problems": args.among, "temperature": args.temperature}
    )
    _, flags, task, at, _ = plans[0]
    goal, known = make_goal(args.goal, task), [policies(run, flags["m"]) for run in runs]
    shared = [name for name in known[0] if all(name in each for each in known)]
    single = [name for name in shared if name != "start_sets"]
    names = list(dict.fromkeys(args.policies or single))
    for name in names:
        if name not in shared:
            raise UserError(f"--policies {name}: not in every run; choose from {', '.join(shared)}")
        for flag, value in (("budget", args.budget), ("screen", args.screen or 10**6)):
            if value < known[0][name][1]:
                raise UserError(
                    f"--{flag} {value}: less than a rollout of {name} holds, {known[0][name][1]} answers"
                )
    selection = args.selection * (args.strategy == "evolve")
    named = [Path(args.goal).name.removesuffix(".py"), args.strategy, selection, str(args.budget)]
    out = Path(
        args.out
        or runs[0].parent / f"{Path(flags['task']).stem}-search" / "-".join(filter(None, named))
    )
    problems = among = held_out(task, at["split"], at["problems"])

    def of(
        run: Path, flags: dict, name: str, problems: list[Problem], folder: Path, **plan
    ) -> list[Population]:
        """The search of one policy, which is loaded for it."""
        start, m = policies(run, flags["m"])[name]
        check_folder(start)
        model, tokenizer = load_policy(str(start), task, device=device, dtype=flags["dtype"])
        ids = hashlib.sha256(" ".join(problem.id for problem in problems).encode()).hexdigest()
        what = checksum(Path(args.goal)) if args.goal.endswith(".py") else args.goal
        settings = {
            "goal": what,
            "problems": ids,
            "m": m,
            "temperature": at["temperature"],
            "weights": checksum(start / "checksums.json"),
        } | plan
        told = name == "goal_conditioned" and (
            goal.weights or [1 / len(task.objectives)] * len(task.objectives)
        )
        with writing(folder):
            return search(
                model,
                tokenizer,
                task,
                problems,
                goal,
                folder / f"{name}.jsonl",
                settings,
                m=m,
                told=told or None,
                max_new_tokens=rollout_length(task, tokenizer, m, flags["max_new_tokens"]),
                sampling_batch=0 if is_tiny(tokenizer) else flags.get("sampling_batch") or 96,
            )

    for (run_, own, *_), name in itertools.product(plans, single) if args.screen else ():
        found = of(
            run_,
            own,
            name,
            among,
            out / "screen" / run_.name,
            strategy="best_of_n",
            selection="",
            budget=args.screen,
            seed=args.seed + 1,
        )
        easy = {p.id for p, each in zip(among, found, strict=True) if each.solved(goal.target(p))}
        problems = [problem for problem in problems if problem.id not in easy]
    if args.screen:
        print(
            f"{len(problems)} of {len(among)} problems are solved by no policy with {args.screen} candidates"
        )
    if not problems:
        raise UserError(
            f"--screen {args.screen}: every problem is solved by then; take a lower one, or another --goal"
        )
    problems = problems[: args.problems]
    targets = [goal.target(problem) for problem in problems]
    ticks = sorted({min(args.budget, round(10 ** (i / 8))) for i in range(49)})
    found = {
        name: [
            of(
                run_,
                own,
                name,
                problems,
                out / run_.name,
                strategy=args.strategy,
                selection=selection,
                budget=args.budget,
                seed=args.seed,
            )
            for run_, own, *_ in plans
        ]
        for name in names
    }
    whole = {
        "settings": vars(args),
        "ticks": ticks,
        "problems": [problem.id for problem in problems],
        "policies": {
            name: [curves(populations, targets, ticks) for populations in each]
            for name, each in found.items()
        },
    }
    print(
        f"\n{out}: {len(problems)} problems, {args.budget} candidates each, runs: {len(runs)}\n{searched(whole)}"
    )
    write_text(out / "search.json", json.dumps(whole))
    plots.search(ticks, whole["policies"], out / "search.png")
    plots.family({name: each[0] for name, each in found.items()}, targets, out / "family.png")
    print(
        f"written: {out / 'search.json'} (who solved what), {out / 'search.png'}, {out / 'family.png'}"
    )


def main(argv: list[str] | None = None) -> None:
    args = search_parser(__doc__).parse_args(argv)
    as_command(search_parser(), lambda: run(args))


if __name__ == "__main__":
    main()
