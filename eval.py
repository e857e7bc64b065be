"""Evaluation: what a policy is worth to a search that takes the best of k candidates.

    python eval.py runs/maze-seed0                      table and figures of one run of train.py
    python eval.py runs/maze-seed0 runs/maze-seed1 ...  figures of each, one table: means over seeds

Every policy answers the same N held-out problems, each with the same number n of candidates (the
pool): single answers, or rollouts of m. A budget k counts candidates, not rollouts. A slot that a
rollout left empty is a candidate with the minimal reward, and a duplicate one like any other: both
have cost the search an evaluation. In shapes d counts the objectives.
"""

import os
import sys

sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))  # even with PYTHONSAFEPATH set
from engine import is_no_part_of_python

sys.path.sort(key=is_no_part_of_python)  # a user's queue.py hides no module of Python
import dataclasses
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor
from tqdm import tqdm

import fast
from engine.bars import progress_bar
from engine.config import Config, Parser, device_of, flag, open_device
from engine.errors import as_command, with_note
from engine.evaluations import Evaluation, Pool, Row, evaluations_of, rows_of, summary_folder
from engine.files import check_writable
from engine.mixtures import mixed, save_mixed
from engine.processes import possible, run_all
from engine.runs import task_of
from engine.tasks import held_out
from report import plots
from report.statistics import spread_weights
from report.table import Table, clusters_of, joint_table, print_costs, print_table, write_table
from rewards import Problem, Task
from rollout import Policy, build_prompt, random_generator, read_answers, sampling_options, score
from vpo import ADVANTAGES

BUDGETS = (1, 2, 3, 5, 8, 10, 15, 20, 30, 50, 100)
ROLLOUTS_AT_ONCE = 750  # of the tiny model
UTILITIES_AT_ONCE = 2**20  # 8 MiB


# Measures and pools.


def pass_at_k(n: int, c: int, k: int) -> float:
    """Probability that one of k candidates passes, when c of n do: 1 - C(n-c, k) / C(n, k).

    Unbiased (arXiv 2107.03374).
    """
    assert 0 <= c <= n and 1 <= k <= n, f"pass_at_k(n={n}, c={c}, k={k})"
    return 1.0 - math.comb(n - c, k) / math.comb(n, k)


def best_at_k(scores: Tensor, k: int) -> Tensor:
    """Expected best of k candidates drawn without replacement from n: scores (..., n) -> (...).

    Unbiased, by order statistics: with ranks counted from 0, rank i is the best of C(i, k-1) of the
    C(n, k) subsets.
    """
    n = scores.shape[-1]
    assert 1 <= k <= n, f"best_at_k(k={k}) of n = {n} candidates"
    n_subsets = math.comb(n, k)
    shares = [math.comb(i, k - 1) / n_subsets for i in range(n)]
    shares = torch.tensor(shares, dtype=torch.float64)  # (n)
    ranked = scores.cpu().double().sort(-1).values  # (..., n)
    return (ranked * shares).sum(-1)


def ranked_utilities(
    rewards: Tensor, objective_mask: Tensor | None = None, n_weights: int = 4096
) -> Tensor:
    """The lowest, second lowest, ... utility w . r of a pool, each averaged over w ~ Dirichlet(1).

    Their best@k is W@k: what a pool is worth to a user whose preferences were unknown in training,
    whatever its --alpha was: rewards (N, n, d) -> (N, n).

    Args:
        objective_mask: (N, d) bool, the objectives that each problem has. None: all.
    """
    N, n, d = rewards.shape
    if objective_mask is None:
        objective_mask = torch.ones(N, d, dtype=torch.bool)
    sums = torch.zeros(N, n, dtype=torch.float64)
    for p in range(N):
        own = rewards[p][:, objective_mask[p]].cpu().double()  # (n, d of the problem)
        weights = spread_weights(own.shape[1], n_weights)
        for some in weights.split(1 + UTILITIES_AT_ONCE // n):
            utilities = some @ own.T  # (some of the weights, n)
            sums[p] += utilities.sort(1).values.sum(0)
    return sums / n_weights


def weighted_best_at_k(
    rewards: Tensor, k: int, objective_mask: Tensor | None = None, n_weights: int = 4096
) -> Tensor:
    """W@k: best@k of the utility w . r, averaged as `ranked_utilities` does: (N, n, d) -> (N)."""
    return best_at_k(ranked_utilities(rewards, objective_mask, n_weights), k)


def diversity(rewards: Tensor) -> Tensor:
    """Mean L1 distance between the reward vectors of two candidates: (N, n, d) -> (N)."""
    n = rewards.shape[1]
    gaps = rewards.cpu().double().sort(1).values.diff(dim=1)  # (N, n - 1, d)
    below = torch.arange(1, n)[:, None]  # candidates below a gap
    n_pairs = below * (n - below)  # that a gap is between
    return (gaps * n_pairs).sum((1, 2)) / max(n * (n - 1) / 2, 1)


def sample_pool(
    policy: Policy,
    task: Task,
    problems: list[Problem],
    config: Config,
    m: int,
    size: int,
    bar: tqdm | None = None,
) -> Pool:
    """Sample `size` candidates for each problem, in rollouts of m answers.

    A prompt that needs more rollouts than are sampled at a time is given several times.

    Args:
        bar: counts the problems that are done.
    """
    at_once = config.sampling_batch or ROLLOUTS_AT_ONCE
    n_rollouts = math.ceil(size / m)  # for each problem
    # A group is sampled as a whole, so that one which is too large becomes several.
    times = math.ceil(n_rollouts / max(at_once, config.group_size))
    G = math.ceil(n_rollouts / times)
    # Every policy gets the same random numbers, whichever others are evaluated.
    generator = random_generator(config.seed, 0, "evaluation")
    options = sampling_options(policy, task, config, m, generator)
    options.temperature = config.eval_temperature  # a search may be cooler than the training
    options.batch = at_once
    n = max(1, at_once // (G * times))  # problems at a time
    answers = []
    for first in range(0, len(problems), n):
        prompts = []
        for problem in problems[first : first + n]:
            prompts += [build_prompt(policy, task, problem, m)] * times
        answers += read_answers(task, fast.sample(policy, prompts, G, options), m)
        if bar is not None:
            bar.update(len(prompts) // times)
    return pool_of(task, problems, answers, m, size)


def pool_of(
    task: Task, problems: list[Problem], answers: list[list[str]], m: int, size: int
) -> Pool:
    """Score the answers of P * G rollouts, and cut those of each problem to `size` candidates.

    Which places of its last rollout count is drawn: the first answers may be unlike the others.
    """
    P = len(problems)
    n_whole = size - size % m  # candidates of the whole rollouts
    # One seed for all runs: their pools are cut at the same places.
    order = torch.rand(P, m, generator=random_generator(0, 0, "pools")).argsort(1)
    last = n_whole + order[:, : size % m]
    places = torch.cat([torch.arange(n_whole).expand(P, -1), last], 1)  # (P, size)
    G = len(answers) // P
    candidates = []
    for p, own_places in enumerate(places.tolist()):
        slots = []
        for parsed in answers[p * G : (p + 1) * G]:
            slots += [*parsed, *[None] * (m - len(parsed))]  # an empty one has cost an evaluation
        candidates.append([slots[i] for i in own_places])
    scored = score(task, problems, answers, m)
    rewards = scored.vectors.flatten(1, 2).take_along_dim(places[..., None], 1)
    scalars = scored.scalars.flatten(1, 2).take_along_dim(places, 1)
    return Pool(problems, candidates, rewards, scalars, scored.objective_mask)


def measure(pool: Pool, task: Task) -> dict[str, Tensor]:
    """Every measure of a pool, per problem: name -> (N)."""
    n = pool.scalars.shape[1]
    mask = pool.objective_mask  # (N, d)
    passes = ((pool.rewards >= 1) | ~mask[:, None]).all(-1)  # (N, n): 1 in all its objectives
    utilities = ranked_utilities(pool.rewards, mask)  # (N, n), which serve every k
    values = {}
    for k in [*(k for k in BUDGETS if k < n), n]:
        values[f"best@{k}"] = best_at_k(pool.scalars, k)
        chances = [pass_at_k(n, c, k) for c in passes.sum(1).tolist()]
        values[f"pass@{k}"] = torch.tensor(chances)
        values[f"W@{k}"] = best_at_k(utilities, k)
    is_rewarded = (pool.rewards > task.minimum) & mask[:, None]  # (N, n, d)
    values["rewarded"] = is_rewarded.any(-1).double().mean(1)
    values["diversity"] = diversity(pool.rewards)
    for i, name in enumerate(task.objectives):
        values[f"reward_{name}"] = pool.rewards[..., i].mean(1)
    return values


# The evaluation of runs.


@dataclass
class EvalFlags:
    """The flags of eval.py."""

    split: Literal["test", "validation"] = flag("test", "split of the held-out problems")
    problems: int | None = flag(
        None, "held-out problems; None: as in the first run, 200 after --eval-problems 0", 1, 2**20
    )
    pool: int | None = flag(None, "candidates per problem; None: as in the first run", 1, 10_000)
    temperature: float | None = flag(
        None, "sampling temperature of the candidates; None: as in the first run", 1e-3, 1e3
    )
    mix: list[float] = flag(
        [1.0], "t of the weights that are evaluated, start + t (trained - start)", 0, 1
    )
    save_mixed: str = flag("", "write these weights into this folder, evaluate nothing")
    device: Literal["auto", "cpu", "cuda", "mps"] = flag("auto", "auto: as train.py chooses")
    jobs: int = flag(1, "policies that are evaluated at a time, each in a process", 1, 64)
    out: str = flag("", "folder for what is written; empty: in or beside the run folder")
    figure_format: Literal["png", "svg", "pdf"] = flag("png", "format of the figures")


def evaluate(runs: list[Path], flags: EvalFlags) -> None:
    """Evaluate run folders: write eval.json and figures of each, and print one table."""
    evaluations = evaluations_of(runs, flags)
    rows = rows_of(evaluations)  # raises if they do not fit into one table
    is_alone = len(runs) == 1
    summary = evaluations[0].folder if is_alone else summary_folder(evaluations, flags.out)
    flags.device = device_of(flags.device, all(each.config.is_tiny for each in evaluations))
    open_device(flags.device)
    flags.jobs = possible(flags.jobs)
    check_writable(summary, *(each.folder for each in evaluations))
    tables = {each.run: evaluate_run(each, flags, tells=is_alone) for each in evaluations}
    if not is_alone:
        table = joint_table(tables, rows)
        figure = summary / f"best_at_k.{flags.figure_format}"
        write_table(table, summary / "eval.json", flags.device)
        plots.best_at_k(table, figure)
        print_table(table)
        print(f"figure: {figure}")


def evaluate_run(evaluation: Evaluation, flags: EvalFlags, tells: bool) -> Table:
    """Evaluate one run, and write its eval.json and figures; its table is printed if it `tells`."""
    run = evaluation.run
    config = evaluation.config
    if config.is_tiny:
        torch.set_num_threads(1)
    task = task_of(config)
    # A finite data set may hold fewer problems than asked for.
    problems = held_out(task, evaluation.settings.split, evaluation.settings.problems)
    settings = dataclasses.replace(evaluation.settings, problems=len(problems))
    n = len(evaluation.policies) * len(problems)
    with progress_bar(total=n, desc="evaluation", unit="problem") as bar:
        work = {row: (row, evaluation, flags.device) for row in evaluation.policies}
        if flags.jobs == 1:  # else each process loads the task itself
            work = {row: (*arguments, task, bar) for row, arguments in work.items()}
        pools = run_all(evaluate_policy, work, flags.jobs, flags.device, bar)
    measures = {row: measure(pool, task) for row, pool in pools.items()}
    table = Table([str(run)], settings, measures, clusters_of(problems))
    if evaluation.unfinished:
        print(f"{run} is not finished: {evaluation.unfinished}")
    write_table(table, evaluation.folder / "eval.json", flags.device)
    figures = [evaluation.folder / f"best_at_k.{flags.figure_format}"]
    plots.best_at_k(table, figures[0])
    if len(settings.mix) == 1:
        figures += plots.run_figures(evaluation, task, pools, measures, flags.figure_format)
    if tells:
        print_table(table)
        methods = dict.fromkeys(row.method for row in pools)
        print_costs(run, [name for name in methods if name in ADVANTAGES], config.m)
        print(f"figures in {evaluation.folder}: {', '.join(path.name for path in figures)}")
    return table


def evaluate_policy(
    row: Row, evaluation: Evaluation, device: str, task: Task | None = None, bar: tqdm | None = None
) -> Pool:
    """Sample the pool of one policy of a run. Without the run's task it is loaded."""
    settings = evaluation.settings
    config = dataclasses.replace(evaluation.config, eval_temperature=settings.temperature)
    task = task or task_of(config)
    policy = mixed(evaluation.run, row.method, row.t, task, config, device)
    problems = held_out(task, settings.split, settings.problems)
    m = evaluation.policies[row].m
    with with_note(f"evaluation of {row.title}"):
        return sample_pool(policy, task, problems, config, m, settings.pool, bar)


@as_command("eval.py")
def main(argv: list[str] | None = None) -> None:
    """Evaluate the runs that the command names, or save their mixed weights."""
    parser = Parser(EvalFlags, "eval.py", __doc__)
    parser.add_argument("runs", nargs="+", metavar="RUN", help="run folders of train.py")
    flags, rest = parser.parse_args_into_dataclass(argv)
    runs = [Path(name) for name in rest.runs]
    if flags.save_mixed:
        save_mixed(evaluations_of(runs, flags), flags.save_mixed)
    else:
        evaluate(runs, flags)


if __name__ == "__main__":
    main()
