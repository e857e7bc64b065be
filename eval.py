"""Evaluation: what a policy is worth to a search that takes the best of k candidates.

    python eval.py runs/maze-seed0                       table and figures of one run of train.py
    python eval.py runs/maze-seed0 runs/maze-seed1 ...   the same for each, then their means over the seeds

Every policy answers the same held-out problems with the same number of candidates (the pool): single
answers, or rollouts of m. The budget counts candidates, not rollouts. A slot that a rollout left empty
is a candidate with the minimal reward, and a duplicate is a candidate like any other, because both have
cost the search an evaluation.

In names such as best@k the letter k counts candidates. In shapes n is the pool, and k the objectives.
"""

import dataclasses
import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

if __name__ == "__main__":  # Ctrl-C while the libraries are loaded, which takes seconds
    from engine.interrupt import stop_in_one_line

    stop_in_one_line()

import torch
from torch import Tensor

from engine.config import Config, Parser, check_ranges, device_of, flag, open_device
from engine.doors import as_command
from engine.evaluations import (
    Estimate,
    Evaluation,
    Pool,
    Results,
    check_comparable,
    evaluation_of,
    output_folders,
)
from engine.files import write_text, writing
from engine.looks import look_of
from engine.processes import run_all
from engine.runs import load_run, policies, progress, task_of
from engine.tasks import held_out
from report import plots, style
from report.table import print_left_out, sentences, training_cost
from rewards import Problem, Task
from rollout import (
    Policy,
    build_prompt,
    load_policy,
    random_generator,
    read_answers,
    sample,
    sampling_options,
    score,
)
from vpo import ADVANTAGES

BUDGETS = (1, 2, 3, 5, 8, 10, 15, 20, 30, 50, 100)
ROLLOUTS_AT_ONCE = 750  # of the tiny model
# Student's t: standard errors on either side of the mean of 2, 3, ... runs. Above 11 runs a little wide.
T_95 = (12.71, 4.30, 3.18, 2.78, 2.57, 2.45, 2.36, 2.31, 2.26, 2.23)


# The measures.


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
    subsets.

    Raises:
        ValueError: k is not within 1 and n.
    """
    n = scores.shape[-1]
    if not 1 <= k <= n:
        raise ValueError(f"best_at_k(k={k}): needs 1 <= k <= n = {n} candidates")
    n_subsets = math.comb(n, k)
    shares = [math.comb(i, k - 1) / n_subsets for i in range(n)]
    shares = torch.tensor(shares, dtype=torch.float64)  # (n)
    ranked = scores.cpu().double().sort(-1).values  # (..., n)
    return (ranked * shares).sum(-1)


def weighted_best_at_k(rewards: Tensor, k: int, objective_mask: Tensor | None = None) -> Tensor:
    """W@k: best@k of the utility w . r, averaged over w ~ Dirichlet(1).

    This is what a pool is worth to a user whose preferences were unknown in training, whatever its
    --alpha was.

    Args:
        rewards: (N, n, objectives).
        objective_mask: (N, objectives) bool, those that a problem has, which come first. None: all.

    Returns:
        (N).
    """
    rewards = rewards.cpu().double()
    if objective_mask is None:
        objective_mask = torch.ones(len(rewards), rewards.shape[-1], dtype=torch.bool)
    sizes = objective_mask.cpu().sum(1)
    values = torch.zeros(len(rewards), dtype=torch.float64)
    for size in sizes.unique().tolist():
        own = rewards[sizes == size][..., :size]  # (N', n, size)
        utilities = own @ spread_weights(size).T  # (N', n, 256)
        values[sizes == size] = best_at_k(utilities.mT, k).mean(-1)
    return values


def spread_weights(k: int, n: int = 256) -> Tensor:
    """n preference weights (n, k) spread evenly over the simplex: the gaps between k - 1 cuts of [0, 1].

    The cuts come from a scrambled Sobol net, always the same one.
    """
    if k == 1:
        return torch.ones(n, 1, dtype=torch.float64)
    net = torch.quasirandom.SobolEngine(k - 1, scramble=True, seed=0)
    cuts = net.draw(n, dtype=torch.float64).sort(-1).values  # (n, k - 1)
    zeros = torch.zeros(n, 1, dtype=torch.float64)
    return torch.diff(cuts, prepend=zeros, append=zeros + 1)


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


def sample_pool(
    policy: Policy,
    task: Task,
    problems: list[Problem],
    config: Config,
    *,
    m: int,
    size: int,
    temperature: float,
) -> Pool:
    """Sample `size` candidates for each problem, in rollouts of m answers.

    A prompt that needs more rollouts than are sampled at a time is given several times.
    """
    at_once = config.sampling_batch or ROLLOUTS_AT_ONCE
    n_rollouts = math.ceil(size / m)  # for each problem
    times = math.ceil(n_rollouts / max(at_once, config.group_size))
    G = math.ceil(n_rollouts / times)
    generator = random_generator(config.seed, 0, "evaluation")
    options = sampling_options(policy, task, config, m, generator)
    options.temperature = temperature
    options.batch = at_once
    prompts = []
    for problem in problems:
        prompts += [build_prompt(policy, task, problem, m)] * times
    rollouts = sample(policy, prompts, G, options)
    answers = read_answers(task, rollouts, m)
    return pool_of(task, problems, answers, m, size)


def pool_of(
    task: Task, problems: list[Problem], answers: list[list[str]], m: int, size: int
) -> Pool:
    """Score the answers of P * G rollouts, and cut those of each problem to `size` candidates."""
    scored = score(task, problems, answers, m)
    G = len(answers) // len(problems)
    candidates = []
    for first in range(0, len(answers), G):
        slots = []
        for parsed in answers[first : first + G]:
            slots += [*parsed, *[None] * (m - len(parsed))]
        candidates.append(slots[:size])
    rewards = scored.vectors.flatten(1, 2)[:, :size]
    scalars = scored.scalars.flatten(1, 2)[:, :size]
    return Pool(problems, candidates, rewards, scalars, scored.objective_mask)


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
    values["pareto"] = pareto_share(pool.rewards)
    # coverage divides by all objectives. A problem that lacks some is divided by its own.
    k_own = mask.sum(1)  # (N)
    values["coverage"] = coverage(pool.rewards, m) * mask.shape[1] / k_own
    for i, name in enumerate(task.objectives):
        values[f"reward_{name}"] = pool.rewards[..., i].mean(1)
    return values


def half_width(values: Tensor) -> float:
    """Half of the 95% interval of the mean of values (N), over problems, or (runs, N), over runs."""
    over_runs = values.ndim == 2
    if over_runs:
        values = values.double().mean(1)
    n = len(values)
    if n < 2:
        return 0.0
    errors = T_95[min(n - 2, len(T_95) - 1)] if over_runs else 1.96  # standard errors of the mean
    return errors * values.double().std().item() / math.sqrt(n)


# The table and the picture.


def results_of(evaluations: list[Evaluation], measures: dict[str, dict[str, Tensor]]) -> Results:
    """The mean and the interval of every measure: policy -> measure -> values (N) or (runs, N)."""
    estimates = {}
    for policy, by_name in measures.items():
        estimates[policy] = {}
        for name, values in by_name.items():
            mean = values.double().mean().item()
            estimates[policy][name] = Estimate(mean, half_width(values))
    # A finite data set may hold fewer problems than asked for.
    N = measures["start"]["diversity"].shape[-1]
    settings = dataclasses.replace(evaluations[0].settings, problems=N)
    return Results([str(evaluation.run) for evaluation in evaluations], settings, estimates)


def print_table(results: Results) -> None:
    """Print the means of the main measures, a row per policy, and what they say."""
    settings = results.settings
    n = settings.pool
    columns = [f"best@{k}" for k in (1, 3, 10) if k < n] + [f"best@{n}"]
    if any(results.mean(policy, f"pass@{n}") for policy in results.estimates):
        columns += ["pass@1", f"pass@{n}"]
    columns += [f"W@{n}", "diversity", "earned", "pareto", "coverage"]
    heading = (
        f"{results.runs[0]}: {settings.problems} {settings.split} problems, pool of {n} "
        f"candidates, temperature {settings.temperature}"
    )
    if len(results.runs) > 1:
        heading = f"mean of {len(results.runs)} runs"
    heads = [f"{column:>11}" for column in columns]
    print(f"\n{heading}\n" + " " * 20 + "".join(heads))
    for policy in results.estimates:
        cells = [f"{results.mean(policy, column):11.3f}" for column in columns]
        print(f"{look_of(policy).title:20}" + "".join(cells))
    for sentence in sentences(results):
        print(sentence)


def draw_best_at_k(results: Results, path: Path) -> None:
    """Draw best@k and W@k against k, a curve per policy with its 95% band."""
    panels = {"best@": "best@k: the task scalar", "W@": "W@k: random preference weights"}
    with style.new_figure(1, 2, (9, 4.2), sharey=True) as axes:
        for ax, (prefix, title) in zip(axes[0], panels.items(), strict=True):
            for policy, estimates in results.estimates.items():
                ks = [k for k in (*BUDGETS, results.settings.pool) if f"{prefix}{k}" in estimates]
                ks = sorted(set(ks))
                look = look_of(policy)
                means = torch.tensor([estimates[f"{prefix}{k}"].mean for k in ks])
                margins = torch.tensor([estimates[f"{prefix}{k}"].margin for k in ks])
                ax.plot(ks, means, **style.curve_style(look))
                ax.fill_between(ks, means - margins, means + margins, color=look.color, alpha=0.12)
            ax.set(title=title, xscale="log", xlabel="candidates k", xticks=ks, xticklabels=ks)
            ax.minorticks_off()
        caption = f"{results.settings.problems} {results.settings.split} problems, temperature "
        caption += f"{results.settings.temperature:g}; bands: 95% over "
        caption += "seeds" if len(results.runs) > 1 else "problems"
        style.finish(axes, path, caption)


def write(results: Results, folder: Path, device: str, figure_format: str) -> Path:
    """Write eval.json, of every measure mean and 95% interval, and the picture; returns its path."""
    settings = dataclasses.asdict(results.settings) | {"runs": results.runs, "device": device}
    record = {"settings": settings, "policies": {}}
    for policy, estimates in results.estimates.items():
        record["policies"][policy] = {}
        for name, estimate in estimates.items():
            interval = [estimate.mean - estimate.margin, estimate.mean + estimate.margin]
            record["policies"][policy][name] = {"mean": estimate.mean, "interval": interval}
    write_text(folder / "eval.json", json.dumps(record, indent=1))
    picture = folder / f"best_at_k.{figure_format}"
    draw_best_at_k(results, picture)
    return picture


# The evaluation of runs.


def evaluate(
    runs: list[Path],
    *,
    device: str = "cpu",
    jobs: int = 1,
    out: Path | None = None,
    figure_format: str = "png",
    **changes: str | float | None,
) -> None:
    """Evaluate run folders: print tables, write eval.json and figures. Of several runs the means, too.

    Args:
        jobs: policies that are evaluated at a time.
        out: folder for what is written, one in it for each of several runs; None: the run folders.
        changes: fields of Settings that differ from the runs' own.
    """
    evaluations = [evaluation_of(run, changes) for run in runs]
    check_comparable(evaluations)
    for evaluation, folder in zip(evaluations, output_folders(runs, out), strict=True):
        evaluation.folder = folder or evaluation.folder
    measures = []
    for evaluation in evaluations:
        measures.append(evaluate_run(evaluation, device, jobs, figure_format))
    if len(runs) == 1:
        return

    results = results_of(evaluations, stacked(measures))
    print_table(results)
    print_left_out({str(run): list(own) for run, own in zip(runs, measures, strict=True)})
    first = evaluations[0]
    summary = runs[0].parent / f"{first.config.task_name}-summary"
    if first.folder != runs[0]:
        summary = summary / first.folder.name
    folder = out or summary
    with writing(folder):
        picture = write(results, folder, device, figure_format)
    print(f"figures: {picture}")


def evaluate_run(
    evaluation: Evaluation, device: str, jobs: int, figure_format: str
) -> dict[str, dict[str, Tensor]]:
    """Evaluate one run, print its table, and write its eval.json and figures.

    Returns:
        policy -> measure -> values (N).
    """
    run = evaluation.run
    config = evaluation.config
    if config.is_tiny:
        torch.set_num_threads(1)
    names = list(policies(run, config.m))
    jobs = max(1, min(jobs, len(names)))
    task = task_of(config)
    shared = task if jobs == 1 else None  # a process of its own loads it itself
    work = {name: (name, evaluation, device, shared) for name in names}
    pools = run_all(evaluate_policy, work, jobs)
    measures = {name: measure(pools[name], task, config.m) for name in names}

    unfinished = progress(run, config)
    if unfinished:
        print(f"{run} is not finished: {unfinished}")
    results = results_of([evaluation], measures)
    print_table(results)
    costs = [training_cost(run, name, config.m) for name in names if name in ADVANTAGES]
    print(f"sampled in training: {'; '.join(costs)}")
    with writing(evaluation.folder):
        picture = write(results, evaluation.folder, device, figure_format)
        figures = [picture, *plots.run_figures(evaluation, task, pools, figure_format)]
    print(f"figures: {', '.join(map(str, figures))}")
    return measures


def evaluate_policy(
    name: str, evaluation: Evaluation, device: str, task: Task | None = None
) -> Pool:
    """Sample the pool of one policy of a run. Without the run's task it is loaded."""
    config = evaluation.config
    settings = evaluation.settings
    task = task or task_of(config)
    stored = policies(evaluation.run, config.m)[name]
    policy = load_policy(str(stored.folder), task, device=device, dtype=config.dtype)
    problems = held_out(task, settings.split, settings.problems)
    return sample_pool(
        policy,
        task,
        problems,
        config,
        m=stored.m,
        size=settings.pool,
        temperature=settings.temperature,
    )


def stacked(measures: list[dict[str, dict[str, Tensor]]]) -> dict[str, dict[str, Tensor]]:
    """The measures of several runs together, (runs, N), of the policies that all of them have."""
    together = {}
    for policy, by_name in measures[0].items():
        if all(policy in own for own in measures):
            together[policy] = {}
            for name in by_name:
                together[policy][name] = torch.stack([own[policy][name] for own in measures])
    return together


# The command.


@dataclass
class EvalFlags:
    """The flags of eval.py."""

    split: Literal["test", "validation"] = flag(
        "test", "held-out problems; validation is for tuning"
    )
    problems: int = flag(
        0, "number of held-out problems; 0: as in the run, 200 after --eval-problems 0"
    )
    pool: int = flag(0, "candidates per problem; 0: as in the run")
    temperature: float = flag(0.0, "sampling temperature of the candidates; 0: as in the run")
    device: Literal["auto", "cpu", "cuda", "mps"] = flag("auto", "auto: as train.py chooses")
    jobs: int = flag(1, "policies that are evaluated at a time, each in a process")
    out: str = flag("", "folder for what is written; empty: the run folder")
    figure_format: Literal["png", "svg", "pdf"] = flag("png", "format of the figures")


def run(argv: list[str] | None) -> None:
    """Evaluate what the command names."""
    parser = Parser(EvalFlags, "eval.py", __doc__.split("\n\n")[0])
    parser.add_argument("runs", nargs="+", metavar="RUN", help="run folders of train.py")
    flags, rest = parser.parse_args_into_dataclasses(argv)
    used = dataclasses.replace(flags, pool=flags.pool or 1, temperature=flags.temperature or 1)
    check_ranges(used)
    runs = [Path(name) for name in rest.runs]
    is_tiny = all(load_run(run).config.is_tiny for run in runs)
    device = device_of(flags.device, is_tiny)
    open_device(device)
    evaluate(
        runs,
        device=device,
        jobs=flags.jobs,
        out=Path(flags.out) if flags.out else None,
        figure_format=flags.figure_format,
        split=flags.split,
        problems=flags.problems or None,
        pool=flags.pool or None,
        temperature=flags.temperature or None,
    )


def main(argv: list[str] | None = None) -> None:
    as_command("eval.py", lambda: run(argv))


if __name__ == "__main__":
    main()
