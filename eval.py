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
import importlib.util
import itertools
import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor

from engine.config import (
    Config,
    Parser,
    check_ranges,
    device_of,
    flag,
    flag_of,
    open_device,
)
from engine.doors import as_command
from engine.evaluations import (
    Evaluation,
    Pool,
    Settings,
    check_comparable,
    evaluation_of,
    output_folders,
)
from engine.files import read_log, write_text, writing
from engine.jobs import run_all
from engine.looks import look_of
from engine.runs import load_run, policies, progress, start_of, task_of
from engine.start import load_start
from engine.tasks import held_out
from rewards import Problem, Task, UserError
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
from vpo import ADVANTAGES, SEVERAL_ANSWERS, answers_per_rollout

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


# Pools.


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


# The table and the picture.


@dataclass
class Report:
    """The measures of one run's policies, or of several runs' policies together."""

    runs: list[str]
    settings: Settings
    measures: dict[str, dict[str, Tensor]]  # policy -> measure -> values (N) or (runs, N)

    def mean(self, policy: str, measure: str) -> float:
        return self.measures[policy][measure].double().mean().item()

    def print_table(self) -> None:
        """Print the means of the main measures, a row per policy."""
        n = self.settings.pool
        columns = [f"best@{k}" for k in (1, 3, 10) if k < n] + [f"best@{n}"]
        if any(values[f"pass@{n}"].any() for values in self.measures.values()):
            columns += ["pass@1", f"pass@{n}"]
        columns += [f"W@{n}", "diversity", "earned", "pareto", "coverage"]
        heading = (
            f"{self.runs[0]}: {self.settings.problems} {self.settings.split} problems, pool of {n} "
            f"candidates, temperature {self.settings.temperature}"
        )
        if len(self.runs) > 1:
            heading = f"mean of {len(self.runs)} runs"
        heads = [f"{column:>11}" for column in columns]
        print(f"\n{heading}\n" + " " * 20 + "".join(heads))
        for policy in self.measures:
            cells = [f"{self.mean(policy, column):11.3f}" for column in columns]
            print(f"{look_of(policy).title:20}" + "".join(cells))
        if not any(values["diversity"].any() for values in self.measures.values()):
            print(
                "all candidates of all policies earned the same: nothing was learnt, or nothing can be"
            )
        elif any(policy in ADVANTAGES for policy in self.measures):
            print(self.in_words())

    def in_words(self) -> str:
        """What the table says: whose variety is left, and who is best for one candidate and for all."""
        n = self.settings.pool
        outcomes = [self.outcome(policy) for policy in self.measures if policy in ADVANTAGES]
        return (
            f"diversity, against the start model's: {', '.join(outcomes)}\n"
            f"one candidate, best@1: {self.ranking('best@1')}\n"
            f"{n} candidates for a user of unknown preferences, W@{n}: {self.ranking(f'W@{n}')}"
        )

    def outcome(self, policy: str) -> str:
        """What became of a method's diversity, such as "GRPO 3% (collapsed)"."""
        title = look_of(policy).title
        # The start model is asked for what the method is asked for.
        start = "start_sets" if policy in SEVERAL_ANSWERS else "start"
        before = self.mean(start, "diversity")
        after = self.mean(policy, "diversity")
        if before < 1e-6:
            return f"{title} {after:.3f} (start model 0)"
        what = variety(after / before)
        utility = f"W@{self.settings.pool}"
        if self.mean(policy, utility) < self.mean(start, utility):
            what += f", {utility} below the start model"
        return f"{title} {after / before:.0%} ({what})"

    def ranking(self, measure: str) -> str:
        """The policies from the best to the worst, with half of the 95% interval of each."""
        has_sets = any(policy in SEVERAL_ANSWERS for policy in self.measures)
        shown = [policy for policy in self.measures if policy != "start_sets" or has_sets]
        shown.sort(key=lambda policy: self.mean(policy, measure), reverse=True)
        parts = []
        for policy in shown:
            margin = half_width(self.measures[policy][measure])
            parts.append(f"{look_of(policy).title} {self.mean(policy, measure):.3f} ± {margin:.3f}")
        return ", ".join(parts)

    def write(self, folder: Path, device: str) -> None:
        """Write eval.json: settings, and of every measure mean and 95% interval."""
        settings = dataclasses.asdict(self.settings) | {"runs": self.runs, "device": device}
        record = {"settings": settings, "policies": {}}
        for policy, values in self.measures.items():
            summaries = record["policies"][policy] = {}
            for name, value in values.items():
                mean = self.mean(policy, name)
                margin = half_width(value)
                summaries[name] = {"mean": mean, "interval": [mean - margin, mean + margin]}
        write_text(folder / "eval.json", json.dumps(record, indent=1))

    def draw_best_at_k(self, path: Path) -> None:
        """Draw best@k and W@k against k, a curve per policy with its 95% band."""
        import matplotlib
        from matplotlib.figure import Figure

        matplotlib.rcParams["svg.hashsalt"] = ""  # equal numbers give equal files
        figure = Figure(figsize=(9, 4.2), layout="constrained")
        panels = {"best@": "best@k: the task scalar", "W@": "W@k: random preference weights"}
        for ax, (prefix, title) in zip(
            figure.subplots(1, 2, sharey=True), panels.items(), strict=True
        ):
            for policy, values in self.measures.items():
                ks = [k for k in (*BUDGETS, self.settings.pool) if f"{prefix}{k}" in values]
                ks = sorted(set(ks))
                means = torch.tensor([self.mean(policy, f"{prefix}{k}") for k in ks])
                margins = torch.tensor([half_width(values[f"{prefix}{k}"]) for k in ks])
                look = look_of(policy)
                label = look.title if prefix == "best@" else None
                ax.plot(ks, means, color=look.color, marker=look.marker, ls=look.line, label=label)
                ax.fill_between(ks, means - margins, means + margins, color=look.color, alpha=0.12)
            ax.set(title=title, xscale="log", xlabel="candidates k", xticks=ks, xticklabels=ks)
            ax.minorticks_off()
            ax.spines[["top", "right"]].set_visible(False)
        figure.legend(loc="outside upper center", ncols=len(self.measures), frameon=False)
        caption = f"{self.settings.problems} {self.settings.split} problems, temperature "
        caption += f"{self.settings.temperature:g}; bands: 95% over "
        caption += "seeds" if len(self.runs) > 1 else "problems"
        figure.supxlabel(caption, fontsize=9)
        metadata = {"svg": {"Date": None}, "pdf": {"CreationDate": None}}
        figure.savefig(path, dpi=150, metadata=metadata.get(path.suffix[1:]))


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


def variety(share: float) -> str:
    """What became of a policy's diversity, given as a share of the start model's."""
    if share < 1 / 3:
        return "collapsed"
    if share < 0.9:
        return "narrowed"
    return "kept" if share < 1.1 else "grew"


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

    Raises:
        UserError: the runs are incomplete or cannot be compared.
    """
    evaluations = [evaluation_of(run, changes) for run in runs]
    check_comparable(evaluations)
    for evaluation, folder in zip(evaluations, output_folders(runs, out), strict=True):
        evaluation.folder = folder or evaluation.folder
    reports = []
    for evaluation in evaluations:
        reports.append(evaluate_run(evaluation, device, jobs, figure_format))
    if len(runs) > 1:
        means = mean_of(reports)
        means.print_table()
        print_left_out({report.runs[0]: list(report.measures) for report in reports})
        summary = runs[0].parent / f"{evaluations[0].config.task_name}-summary"
        if evaluations[0].folder != runs[0]:
            summary = summary / evaluations[0].folder.name
        folder = out or summary
        with writing(folder):
            means.write(folder, device)
            means.draw_best_at_k(folder / f"best_at_k.{figure_format}")
        print(f"figures: {folder / f'best_at_k.{figure_format}'}")


def evaluate_run(
    evaluation: Evaluation, device: str, jobs: int = 1, figure_format: str = "png"
) -> Report:
    """Evaluate one run, print its table, and write its eval.json and figures."""
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
    # A finite data set may hold fewer problems than asked for.
    settings = dataclasses.replace(evaluation.settings, problems=len(pools["start"].problems))
    report = Report([str(run)], settings, measures)
    unfinished = progress(run, config)
    if unfinished:
        print(f"{run} is not finished: {unfinished}")
    report.print_table()
    costs = [training_cost(run, name, config.m) for name in names if name in ADVANTAGES]
    print(f"sampled in training: {'; '.join(costs)}")
    with writing(evaluation.folder):
        report.write(evaluation.folder, device)
        picture = evaluation.folder / f"best_at_k.{figure_format}"
        report.draw_best_at_k(picture)
        figures = [picture]
        if importlib.util.find_spec("report"):
            plots = importlib.import_module("report.plots")
            figures += plots.run_figures(evaluation, task, pools, figure_format)
    print(f"figures: {', '.join(map(str, figures))}")
    return report


def sample_held_out(  # noqa: PLR0913
    policy: Policy, task: Task, config: Config, method: str, n_problems: int, size: int
) -> Pool:
    """The pool of a policy that is still trained, on the first held-out problems."""
    return sample_pool(
        policy,
        task,
        held_out(task, "test", n_problems),
        config,
        m=answers_per_rollout(method, config.m),
        size=size,
        temperature=config.eval_temperature,
    )


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


def training_cost(run: Path, method: str, m: int) -> str:
    """What a method sampled in training, which shows whether a comparison of methods is fair."""
    rows = read_log(run / method / "metrics.jsonl", "rollouts", "tokens")
    answers = answers_per_rollout(method, m) * sum(row["rollouts"] for row in rows)
    tokens = sum(row["tokens"] for row in rows)
    return f"{look_of(method).title} {len(rows)} steps, {answers:,} answers, {tokens:,} tokens"


def mean_of(reports: list[Report]) -> Report:
    """Several runs as one report, of the policies that all of them have."""
    first = reports[0]
    measures = {}
    for policy in first.measures:
        if all(policy in report.measures for report in reports):
            measures[policy] = {}
            for name in first.measures[policy]:
                stacked = [report.measures[policy][name] for report in reports]
                measures[policy][name] = torch.stack(stacked)  # (runs, N)
    return Report([report.runs[0] for report in reports], first.settings, measures)


def print_left_out(policies_of: dict[str, list[str]]) -> None:
    """Name the policies that a mean over runs lacks, given those of each run."""
    of_any = itertools.chain.from_iterable(policies_of.values())
    for policy in dict.fromkeys(of_any):
        lacking = [run for run, own in policies_of.items() if policy not in own]
        if lacking:
            title = look_of(policy).title
            print(f"{title} is left out of the mean: not trained in {', '.join(lacking)}")


def print_reward_geometry(name: str, task_name: str, n_problems: int, device: str) -> None:
    """Print what a start model's rollouts on validation problems say of the task's reward vector.

    Args:
        name: a run folder, whose start model is asked; or a model, asked with the task's defaults.
        task_name: the task of a model.
    """
    config, task, model = start_of(name, task_name, device)
    policy = load_start(model, task, device=device, dtype=config.dtype)
    problems = held_out(task, "validation", n_problems)
    size = 4 * config.group_size
    pool = sample_pool(
        policy, task, problems, config, m=1, size=size, temperature=config.temperature
    )
    print(f"\n{name}: the start model on {len(problems)} validation problems, {size} answers each")
    geometry = importlib.import_module("report.geometry")
    text = geometry.geometry_report(
        pool.rewards, pool.objective_mask, pool.scalars, config.group_size, task.objectives
    )
    print(text)


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
    page: bool = flag(False, "only write report.html, a page that shows the training in a browser")
    film: bool = flag(False, "only write film.gif, the answers drawn step by step")
    reward_geometry: bool = flag(
        False, "only say what the start model's rollouts tell about the reward; RUN may be a model"
    )
    task: str = flag("", "the task of a model, with --reward-geometry")


def run(argv: list[str] | None) -> None:
    """Do what the flags ask for."""
    parser = Parser(EvalFlags, "eval.py", __doc__.split("\n\n")[0])
    parser.add_argument("runs", nargs="+", metavar="RUN", help="run folders of train.py")
    flags, rest = parser.parse_args_into_dataclasses(argv)
    check_ranges(
        dataclasses.replace(flags, pool=flags.pool or 1, temperature=flags.temperature or 1)
    )
    check_used(flags)
    runs = [Path(name) for name in rest.runs]
    out = Path(flags.out) if flags.out else None
    is_tiny = all((run / "start").is_dir() and load_run(run).config.is_tiny for run in runs)
    device = device_of(flags.device, is_tiny)
    open_device(device)
    if flags.reward_geometry:
        for name in rest.runs:
            print_reward_geometry(name, flags.task or "maze", flags.problems or 100, device)
    elif flags.page or flags.film:
        page = importlib.import_module("report.page")
        for run, folder in zip(runs, output_folders(runs, out), strict=True):
            page.write_page_or_film(run, folder or run, flags.page, flags.film)
    else:
        evaluate(
            runs,
            device=device,
            jobs=flags.jobs,
            out=out,
            figure_format=flags.figure_format,
            split=flags.split,
            problems=flags.problems or None,
            pool=flags.pool or None,
            temperature=flags.temperature or None,
        )


def check_used(flags: EvalFlags) -> None:
    """Raise UserError for a flag that --page, --film or --reward-geometry would ignore."""
    if flags.reward_geometry:
        mode = "--reward-geometry"
        used = {"reward_geometry", "task", "device", "problems"}
    elif flags.page or flags.film:
        mode = "--page and --film"
        used = {"page", "film", "out"}
    elif flags.task:
        raise UserError(f"--task {flags.task}: only used with --reward-geometry; leave it out")
    else:
        return
    for field in dataclasses.fields(EvalFlags):
        value = getattr(flags, field.name)
        if value != field.default and field.name not in used:
            raise UserError(f"{flag_of(field.name)} {value}: not used by {mode}; leave it out")


def main(argv: list[str] | None = None) -> None:
    as_command("eval.py", lambda: run(argv))


if __name__ == "__main__":
    main()
