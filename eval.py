"""Evaluation: what a policy is worth to a search that takes the best of k candidates.

    python eval.py runs/maze-seed0                       table and figures of one run of train.py
    python eval.py runs/maze-seed0 runs/maze-seed1 ...   the same for each, then their means over the seeds

Every policy answers the same held-out problems with the same number of candidates (the pool): single
answers, or rollouts of m. The budget counts candidates, not rollouts. A slot that a rollout left empty
is a candidate with the minimal reward, and a duplicate is a candidate like any other, because both have
cost the search an evaluation.

In names such as best@k the letter k counts candidates. In shapes n is the pool, and k the objectives.
"""

import functools
import math
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor
from tqdm import tqdm

from engine.checkpoints import check_folder
from engine.checks import check_device
from engine.config import Config, EvalConfig, Parser, as_command, check_used, parse
from engine.evaluations import (
    Evaluation,
    comparable,
    held_out,
    output_folders,
    policies,
    read_snapshots,
    start_of,
)
from engine.files import read_log, writing
from engine.kinds import kind_of
from engine.models import Model, Tokenizer, load_config_and_tokenizer, load_policy
from engine.processes import (
    check_device_of_jobs,
    jobs_of,
    progress_line,
    run_all,
    set_threads,
)
from engine.run_folder import progress, task_like
from report import page, plots, style
from report.evaluation import EvalReport, mean_of, training_cost
from report.geometry import geometry_report
from rewards import Problem, Task
from rollout import build_prompt, parse_texts, sample, sampling_options, score
from vpo import ADVANTAGES, answers_per_rollout, sample_weights

USAGE = "RUN [RUN ...] [--split SPLIT] [--out FOLDER] [--FLAG VALUE ...]"
PLOTTED = ("reward", "diversity", "answers", "rollouts", "tokens")  # metrics that a report needs
BUDGETS = (1, 2, 3, 5, 8, 10, 15, 20, 30, 50, 100)


def pass_at_k(n: int, c: int, k: int) -> float:
    """Probability that one of k candidates passes, when c of n do: 1 - C(n-c, k) / C(n, k).

    Unbiased (arXiv 2107.03374). Raises ValueError unless 0 <= c <= n and 1 <= k <= n.
    """
    if not (0 <= c <= n and 1 <= k <= n):
        raise ValueError(f"pass_at_k(n={n}, c={c}, k={k}): needs 0 <= c <= n and 1 <= k <= n")
    return 1.0 - math.comb(n - c, k) / math.comb(n, k)


def best_at_k(scores: Tensor, k: int) -> Tensor:
    """Expected best of k candidates drawn without replacement from n: scores (..., n) -> (...).

    Unbiased, by order statistics: the i-th lowest score is the best of C(i-1, k-1) of the C(n, k)
    subsets. A bootstrap, which draws with replacement, would be biased low.

    Raises:
        ValueError: k is not within 1 and n.
    """
    n = scores.shape[-1]
    if not 1 <= k <= n:
        raise ValueError(f"best_at_k(k={k}): needs 1 <= k <= n = {n} candidates")
    n_subsets = math.comb(n, k)
    shares = [math.comb(i, k - 1) / n_subsets for i in range(n)]
    shares = torch.tensor(shares, dtype=torch.float64, device=scores.device)  # (n)
    ranked = scores.sort(-1).values.double()  # (..., n)
    return (ranked * shares).sum(-1)


def weighted_best_at_k(rewards: Tensor, k: int, objective_mask: Tensor) -> Tensor:
    """W@k: best@k of the utility w . r, averaged over w ~ Dirichlet(1).

    This is what a pool is worth to a user whose preferences were unknown in training, whatever its
    --alpha was.

    Args:
        rewards: (N, n, objectives).
        objective_mask: (N, objectives) bool, those that a problem has, which come first.

    Returns:
        (N).
    """
    sizes = objective_mask.sum(1)
    values = torch.zeros(len(rewards), dtype=torch.float64)
    for size in sizes.unique().tolist():
        generator = torch.Generator().manual_seed(0)
        weights = sample_weights(256, size, sampler="sobol", generator=generator).to(rewards)
        own = rewards[sizes == size][..., :size]  # (N', n, size)
        utilities = (own @ weights.T).mT  # (N', 256, n)
        values[sizes == size] = best_at_k(utilities, k).mean(-1)
    return values


def diversity(rewards: Tensor) -> Tensor:
    """Mean L1 distance between the reward vectors of two candidates: (N, n, objectives) -> (N)."""
    n = rewards.shape[1]
    distances = torch.cdist(rewards, rewards, p=1)  # (N, n, n)
    return distances.sum((1, 2)) / max(n * (n - 1), 1)


def pareto_share(rewards: Tensor) -> Tensor:
    """Distinct reward vectors that no candidate dominates, as a share of n: (N, n, objectives) -> (N)."""
    a = rewards[:, :, None]  # (N, n, 1, k)
    b = rewards[:, None]  # (N, 1, n, k)
    is_dominated = ((b >= a).all(-1) & (b > a).any(-1)).any(-1)  # (N, n)
    is_repeated = (b == a).all(-1).tril(-1).any(-1)  # an earlier candidate has the same vector
    return (~is_dominated & ~is_repeated).float().mean(-1)


def coverage(rewards: Tensor, m: int) -> Tensor:
    """The best value in each objective among m candidates, averaged over objectives and sets.

    Consecutive candidates form the sets. In pools of m answers per rollout these are the rollouts.

    Args:
        rewards: (N, n, objectives).

    Returns:
        (N).
    """
    N, n, k = rewards.shape
    sets = rewards[:, : n - n % m].reshape(N, -1, m, k)
    return sets.amax(2).mean((1, 2))


@dataclass
class Policy:
    """A model that is asked for m answers per rollout."""

    name: str  # start, start_sets, or a method
    model: Model
    tokenizer: Tokenizer
    m: int


@dataclass
class Pool:
    """The n candidates of one policy for each of N problems."""

    problems: list[Problem]
    answers: list[list[str | None]]  # (N, n) None where a rollout left the slot empty
    rewards: Tensor  # (N, n, k) zero beyond a problem's own objectives
    scalars: Tensor  # (N, n) task scalars
    objective_mask: Tensor  # (N, k) bool, the objectives that each problem has

    def vectors(self) -> list[Tensor]:
        """N times the rewards (n, k) in a problem's own objectives."""
        return [self.rewards[i][:, mask] for i, mask in enumerate(self.objective_mask)]


def sample_pool(
    policy: Policy,
    task: Task,
    problems: list[Problem],
    config: Config,
    *,
    size: int,
    temperature: float,
    in_training: bool = False,
) -> Pool:
    """Sample `size` candidates for each problem.

    A goal-conditioned policy is told other preference weights for each candidate.

    Args:
        in_training: sample no more rollouts at a time than a training step does, and draw no
            progress bar.
    """
    # A problem has a prompt for each of these; None: the prompt tells no preference weights.
    goals = goals_of_prompts(policy, task, config, size, in_training)
    per_prompt = math.ceil(size / (policy.m * len(goals)))  # rollouts
    options = sampling_options(
        policy.tokenizer,
        task,
        policy.m,
        config.max_new_tokens,
        temperature=temperature,
        batch=config.sampling_batch if in_training else 0,
        generator=torch.Generator(policy.model.device).manual_seed(config.seed),
    )

    prompts = []  # those of a problem side by side
    for problem in problems:
        prompts += [build_prompt(policy.tokenizer, task, problem, policy.m, goal) for goal in goals]
    at_once = max(1, kind_of(policy.tokenizer).pool_batch(config, policy.m) // size)  # problems
    chunk = at_once * len(goals)
    title = f"evaluate {style.Entry(policy.name).title}"
    bar = tqdm(
        range(0, len(prompts), chunk),
        title,
        leave=False,
        disable=in_training,
        position=progress_line(),
    )
    answers = []  # of each rollout
    for first in bar:
        asked = prompts[first : first + chunk]
        rollouts = sample(policy.model, policy.tokenizer, asked, per_prompt, options)
        answers += parse_texts(task, rollouts.texts, policy.m, rollouts.ended)
    return pool_of(problems, answers, task, policy.m, size)


def goals_of_prompts(
    policy: Policy, task: Task, config: Config, size: int, in_training: bool
) -> list[list[float]] | list[None]:
    """The preference weights that each prompt of a problem tells. The arguments are `sample_pool`'s."""
    if policy.name == "goal_conditioned":
        generator = torch.Generator().manual_seed(config.seed)
        return sample_weights(size, len(task.objectives), generator=generator).tolist()
    if not in_training:
        return [None]
    # The same prompt several times, for no more rollouts each than in training.
    return [None] * math.ceil(size / (policy.m * config.group_size))


def pool_of(
    problems: list[Problem], answers: list[list[str]], task: Task, m: int, size: int
) -> Pool:
    """Score the answers of P * G rollouts, and cut those of each problem to `size` candidates."""
    scored = score(task, problems, answers, m)
    slots = []  # (P * G * m)
    for parsed in answers:
        slots += [*parsed, *[None] * (m - len(parsed))]
    per_problem = len(slots) // len(problems)
    candidates = []
    for first in range(0, len(slots), per_problem):
        candidates.append(slots[first : first + size])
    return Pool(
        problems,
        candidates,
        scored.vectors.flatten(1, 2)[:, :size],
        scored.scalars.flatten(1, 2)[:, :size],
        scored.objective_mask,
    )


def measure(pool: Pool, task: Task, m: int) -> dict[str, Tensor]:
    """Every measure of a pool, per problem: name -> (N)."""
    n = pool.scalars.shape[1]
    mask = pool.objective_mask  # (N, k)
    passes = ((pool.rewards >= 1) | ~mask[:, None]).all(-1)  # (N, n)
    counts = passes.sum(1).tolist()
    budgets = [k for k in BUDGETS if k < n]
    budgets.append(n)
    values = {}
    for k in budgets:
        values[f"best@{k}"] = best_at_k(pool.scalars, k)
        values[f"pass@{k}"] = torch.tensor([pass_at_k(n, c, k) for c in counts])
        values[f"W@{k}"] = weighted_best_at_k(pool.rewards, k, mask)
    is_earning = (pool.rewards > task.minimum) & mask[:, None]  # (N, n, k)
    values["earned"] = is_earning.any(-1).double().mean(1)
    values["diversity"] = diversity(pool.rewards)
    values["pareto_share"] = pareto_share(pool.rewards)
    # coverage divides by all objectives. A problem that lacks some is divided by its own.
    k_own = mask.sum(1)  # (N)
    values["coverage"] = coverage(pool.rewards, m) * mask.shape[1] / k_own
    for i, name in enumerate(task.objectives):
        values[f"reward_{name}"] = pool.rewards[..., i].mean(1)
    return values


@dataclass
class RunPools:
    """The pools of one run's policies, and which of the problems show the same prompt."""

    pools: dict[str, Pool]
    prompt_ids: Tensor | None  # (N), equal where two problems show the same prompt; None: all do


def evaluate_run(
    evaluation: Evaluation, device: str, names: list[str] | None = None, jobs: int = 1
) -> RunPools:
    """Sample the pools of the start model and of every method of a run, or of `names`.

    Args:
        jobs: policies that are evaluated at a time.

    Raises:
        UserError: a checkpoint is damaged.
    """
    config = evaluation.config
    task = evaluation.task
    settings = evaluation.settings
    stored = policies(evaluation.run, config.m)
    names = names or list(stored)
    for name in names:
        check_folder(stored[name].folder)
    problems = held_out(task, settings.split, settings.problems)
    jobs = min(jobs, len(names))

    def evaluate(name: str) -> Pool:
        own_task = task if jobs == 1 else task_like(config)  # a process needs a sandbox of its own
        folder = str(stored[name].folder)
        model, tokenizer = load_policy(folder, own_task, device=device, dtype=config.dtype)
        return sample_pool(
            Policy(name, model, tokenizer, stored[name].m),
            own_task,
            problems,
            config,
            size=settings.pool,
            temperature=settings.temperature,
        )

    work = {name: functools.partial(evaluate, name) for name in names}
    pools = run_all(work, jobs)
    _, tokenizer = load_config_and_tokenizer(str(stored[names[0]].folder), task)
    prompts = [build_prompt(tokenizer, task, problem, 1) for problem in problems]
    distinct = list(dict.fromkeys(prompts))
    prompt_ids = None
    if len(distinct) > 1:
        prompt_ids = torch.tensor([distinct.index(prompt) for prompt in prompts])
    return RunPools(pools, prompt_ids)


def evaluate_runs(
    runs: list[Path],
    *,
    device: str = "cpu",
    jobs: int | None = None,
    out: Path | None = None,
    figure_format: str = "png",
    **changes: str | float | None,
) -> None:
    """Evaluate run folders: print tables, write eval.json and figures. Of several runs the means, too.

    Args:
        jobs: policies that are evaluated at a time; None: the default of train.py --jobs.
        changes: fields of EvalSettings that differ from the runs' own.

    Raises:
        UserError: see `comparable` and `output_folders`.
    """
    evaluations = comparable(runs, **changes)
    if out is not None:
        for evaluation, folder in zip(evaluations, output_folders(runs, out), strict=True):
            evaluation.folder = folder
    reports = []
    for evaluation in evaluations:
        evaluation.config.jobs = jobs
        check_device_of_jobs(evaluation.config, device)
        reports.append(report_run(evaluation, device, figure_format))
    if len(runs) > 1:
        means = mean_of(reports)
        means.print_table()
        folder = out or evaluations[0].summary_folder
        figure = folder / f"best_at_k.{figure_format}"
        with writing(folder):
            means.write(folder)
            plots.best_at_k(means, figure)
        print(f"figures: {figure}")


def report_run(evaluation: Evaluation, device: str, figure_format: str) -> EvalReport:
    """Evaluate one run, print its table, and write its eval.json and figures."""
    config = evaluation.config
    settings = evaluation.settings
    set_threads(config, device)
    result = evaluate_run(evaluation, device, jobs=jobs_of(config, device))
    measures = {}
    logs = {}
    costs = []
    for name, pool in result.pools.items():
        entry = style.Entry(name)
        measures[entry] = measure(pool, evaluation.task, config.m)
        if name in ADVANTAGES:
            logs[entry] = read_log(evaluation.run / name / "metrics.jsonl", *PLOTTED)
            m = answers_per_rollout(name, config.m)
            costs.append(training_cost(name, logs[entry], m))
    report = EvalReport(
        str(evaluation.run),
        settings.split,
        len(result.pools["start"].problems),  # a finite set may hold fewer than asked for
        settings.pool,
        settings.temperature,
        measures,
        result.prompt_ids,
    )
    unfinished = progress(evaluation.run, config)
    if unfinished:
        print(f"{evaluation.run} is not finished: {unfinished}")
    report.print_table()
    print(f"sampled in training: {'; '.join(costs)}")
    with writing(evaluation.folder):
        report.write(evaluation.folder)
        plots.run_figures(evaluation, report, logs, result.pools, figure_format)
    return report


def print_reward_geometry(name: str, config: EvalConfig, device: str) -> None:
    """Print what a start model's rollouts on validation problems say of the task's reward vector."""
    start_config, task, folder = start_of(name, config.task, device == "cuda")
    model, tokenizer = load_policy(folder, task, device=device, dtype=start_config.dtype)
    problems = held_out(task, "validation", config.problems or 100)
    size = 4 * start_config.group_size
    pool = sample_pool(
        Policy("start", model, tokenizer, m=1),
        task,
        problems,
        start_config,
        size=size,
        temperature=start_config.temperature,
    )
    print(f"\n{name}: the start model on {len(problems)} validation problems, {size} answers each")
    print(
        geometry_report(
            pool.rewards,
            pool.objective_mask,
            pool.scalars,
            start_config.group_size,
            task.objectives,
        )
    )


def write_page_or_film(run: Path, folder: Path, config: EvalConfig) -> None:
    """The page and the film of a run, from the snapshots and metrics that its training kept."""
    snapshots = read_snapshots(run)
    with writing(folder):
        if config.page:
            page.write_page(folder / "report.html", snapshots)
        if config.film:
            page.write_film(folder / "film.gif", snapshots)


def run(config: EvalConfig) -> None:
    """Do what the flags ask for."""
    runs = [Path(name) for name in config.runs]
    out = Path(config.out) if config.out else None
    if config.reward_geometry:
        device = check_device(config.device)
        for name in config.runs:
            print_reward_geometry(name, config, device)
    elif config.page or config.film:
        targets = output_folders(runs, out) if out else runs
        for folder, target in zip(runs, targets, strict=True):
            write_page_or_film(folder, target, config)
    else:
        evaluate_runs(
            runs,
            device=check_device(config.device),
            jobs=config.jobs,
            out=out,
            figure_format=config.figure_format,
            split=config.split,
            problems=config.problems,
            pool=config.pool,
            temperature=config.temperature,
        )


def main(argv: list[str] | None = None) -> None:
    parser = Parser("eval.py", __doc__, USAGE)
    config, flags_given = parse(parser, EvalConfig, argv)
    check_used(config, flags_given, parser)
    as_command(parser, lambda: run(config))


if __name__ == "__main__":
    main()
