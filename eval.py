"""Evaluation: what a policy is worth to a search that takes the best of k candidates, and the pictures that show it.

    python eval.py runs/maze-seed0                       table and figures of one run of train.py
    python eval.py runs/maze-seed0 runs/maze-seed1 ...   the same for each, then their means over the seeds

Every policy answers the same held-out problems with the same number of candidates (the pool): single answers, or rollouts
of m. Candidates, not rollouts, are the unit of budget. A slot that a rollout left empty is a candidate worth zero, and a
duplicate is a candidate like any other: both have cost the search an evaluation.
"""

import argparse
import json
import math
import os
import sys
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor
from tqdm import tqdm
from transformers.utils import logging as transformers_logging

from folders import check_folder, checkpoints, load_config, task_of
from policy import is_tiny, load_policy
from rewards import Problem, Task, UserError
from rollout import build_prompt, parse_answers, rollout_length, sample, score_texts
from vpo import ADVANTAGES, answers_per_rollout, sample_weights

NAMES = {"start": "start model", "start_sets": "start model, sets", "grpo": "GRPO", "multi_rlvr": "Multi-RLVR", "vpo": "VPO"}
COLORS = {"start": "#8a8a8a", "start_sets": "#8a8a8a", "grpo": "#c0392b", "multi_rlvr": "#d68910", "vpo": "#1f6fb4"}
OTHERS = ("#7d3c98", "#148f77", "#943126", "#5d6d7e")  # for methods that have no color of their own yet
BUDGETS = (1, 2, 3, 5, 8, 10, 15, 20, 30, 50, 100)


def title(name: str) -> str:
    """What a policy is called in tables and figures."""
    return NAMES.get(name, name)


def color(name: str) -> str:
    """A policy's color in every figure."""
    return COLORS.get(name) or OTHERS[list(ADVANTAGES).index(name) % len(OTHERS)]


def pass_at_k(n: int, c: int, k: int) -> float:
    """Probability that one of k candidates out of n passes when c of the n do: 1 - C(n-c, k) / C(n, k), unbiased.

    (Chen et al. 2021, arXiv 2107.03374.) Raises ValueError unless 0 <= c <= n and 1 <= k <= n.
    """
    if not (0 <= c <= n and 1 <= k <= n):
        raise ValueError(f"pass_at_k(n={n}, c={c}, k={k}): needs 0 <= c <= n and 1 <= k <= n")
    return 1.0 - math.comb(n - c, k) / math.comb(n, k)


def best_at_k(scores: Tensor, k: int) -> Tensor:
    """Expected best of k candidates drawn without replacement from n: scores (..., n) -> (...), unbiased.

    By order statistics: the i-th smallest is the best of C(i-1, k-1) of the C(n, k) subsets. A bootstrap over the n, with
    replacement, would be biased low. Raises ValueError unless 1 <= k <= n.
    """
    n = scores.shape[-1]
    if not 1 <= k <= n:
        raise ValueError(f"best_at_k(k={k}): needs 1 <= k <= n = {n} candidates")
    share = torch.tensor([math.comb(i, k - 1) / math.comb(n, k) for i in range(n)], dtype=torch.float64)
    return (scores.sort(-1).values.double() * share.to(scores.device)).sum(-1)


def weighted_best_at_k(rewards: Tensor, k: int, *, objective_mask: Tensor | None = None, n_weights: int = 256,
                       alpha: float = 1.0, seed: int = 0) -> Tensor:
    """W@k: best@k of the scalar w . r, averaged over weightings w ~ Dirichlet(alpha): rewards (N, n, objectives) -> (N).

    What the pool is worth to a user whose preference was not known in training. Low-discrepancy weightings, over those
    objectives that a problem has: objective_mask (N, objectives), the existing ones first.
    """
    sizes = torch.full(rewards.shape[:1], rewards.shape[-1]) if objective_mask is None else objective_mask.sum(1)
    values = torch.zeros(len(rewards), dtype=torch.float64)
    for size in sizes.unique().tolist():
        generator = torch.Generator().manual_seed(seed)
        weights = sample_weights(n_weights, size, alpha=alpha, sampler="sobol", generator=generator).to(rewards)
        values[sizes == size] = best_at_k((rewards[sizes == size][..., :size] @ weights.T).mT, k).mean(-1)
    return values


def diversity(rewards: Tensor) -> Tensor:
    """Mean pairwise L1 distance of the reward vectors of one pool (paper, evaluation): (N, n, objectives) -> (N)."""
    n = rewards.shape[1]
    return torch.cdist(rewards, rewards, p=1).sum((1, 2)) / max(n * (n - 1), 1)


def pareto_share(rewards: Tensor) -> Tensor:
    """Distinct reward vectors that no other candidate dominates, as a share of the pool: (N, n, objectives) -> (N)."""
    a, b = rewards[:, :, None], rewards[:, None]  # (N, n, 1, k), (N, 1, n, k)
    dominated = ((b >= a).all(-1) & (b > a).any(-1)).any(-1)
    repeated = (b == a).all(-1).tril(-1).any(-1)  # an earlier candidate has the same vector
    return (~dominated & ~repeated).float().mean(-1)


def coverage(rewards: Tensor, m: int) -> Tensor:
    """What m candidates of one rollout reach together: the best value in each objective, averaged over the objectives.

    rewards (N, n, k), consecutive candidates form a rollout -> (N). Policies with single answers are grouped by the same m,
    so the budget is equal.
    """
    N, n, k = rewards.shape
    return rewards[:, :n - n % m].reshape(N, -1, m, k).amax(2).mean((1, 2))


def bootstrap_interval(values: Tensor, *, samples: int = 1000, level: float = 0.95, seed: int = 0) -> tuple[float, float]:
    """Percentile interval of the mean of values (N), resampling the N problems."""
    generator = torch.Generator().manual_seed(seed)
    draws = values[torch.randint(len(values), (samples, len(values)), generator=generator)].double().mean(1)
    low, high = draws.quantile(torch.tensor([(1 - level) / 2, (1 + level) / 2], dtype=torch.float64)).tolist()
    return low, high


@dataclass
class Pool:
    """The candidates of one policy for N problems."""
    problems: list[Problem]
    answers: list[list[str]]  # (N, n) what was parsed; shorter where a rollout left slots empty
    rewards: Tensor  # (N, n, k) zero beyond a problem's own objectives
    scalars: Tensor  # (N, n)
    objective_mask: Tensor  # (N, k) bool, the objectives that each problem has


def sample_pool(model, tokenizer, task: Task, problems: list[Problem], *, m: int, size: int, temperature: float,
                max_new_tokens: int, seed: int, desc: str = "evaluate", micro_batch: int = 750, cuda_graph: bool = True) -> Pool:
    """`size` candidates for each problem from rollouts of m answers, sampled at `temperature`."""
    generator = torch.Generator(model.device).manual_seed(seed)
    G, chunk = math.ceil(size / m), max(1, micro_batch // size)
    answers, scored_parts = [], []
    for i in tqdm(range(0, len(problems), chunk), desc=desc, unit="batch", leave=False):
        part = problems[i:i + chunk]
        prompts = [build_prompt(tokenizer, task, problem, m) for problem in part]
        texts = sample(model, tokenizer, prompts, G, max_new_tokens=max_new_tokens, temperature=temperature, generator=generator,
                       static=None if cuda_graph else False).texts
        scored = score_texts(task, part, texts, m)
        scored_parts.append(scored)
        answers += [[answer for text in texts[j:j + G] for answer in parse_answers(text, task, m, distinct=False)][:size]
                    for j in range(0, len(texts), G)]
    k = max(scored.vectors.shape[-1] for scored in scored_parts)
    rewards, objective_mask = (torch.cat([torch.nn.functional.pad(part, (0, k - part.shape[-1])) for part in parts]) for parts in (
        [scored.vectors.flatten(1, 2)[:, :size] for scored in scored_parts], [scored.objective_mask for scored in scored_parts]))
    return Pool(problems, answers, rewards, torch.cat([scored.scalars.flatten(1, 2)[:, :size] for scored in scored_parts]),
                objective_mask)


def measure(pool: Pool, task: Task, m: int) -> dict[str, Tensor]:
    """Every measure of a pool, per problem: name -> (N)."""
    n = pool.scalars.shape[1]
    budgets = [k for k in BUDGETS if k < n] + [n]
    exists = pool.objective_mask
    passed = ((pool.rewards >= 1) | ~exists[:, None]).all(-1).sum(1).tolist()
    values = {f"best@{k}": best_at_k(pool.scalars, k) for k in budgets}
    values |= {f"pass@{k}": torch.tensor([pass_at_k(n, c, k) for c in passed]) for k in budgets}
    values |= {f"W@{k}": weighted_best_at_k(pool.rewards, k, objective_mask=exists) for k in budgets}
    values |= {"diversity": diversity(pool.rewards), "pareto_share": pareto_share(pool.rewards),
               "coverage": coverage(pool.rewards, m) * exists.shape[1] / exists.sum(1)}
    return values | {f"reward_{name}": pool.rewards[..., i].mean(1) for i, name in enumerate(task.objectives)}


def evaluate_run(run: Path, flags: dict, task: Task, *, split: str, problems: int, size: int, temperature: float,
                 device: str) -> dict[str, Pool]:
    """The pools of the start model and of every trained method of one run folder, by name."""
    folders = {"start": (run / "start", 1), "start_sets": (run / "start", flags["m"])}
    for method in ADVANTAGES:
        if trained := checkpoints(run / method):
            folders[method] = (trained[-1], answers_per_rollout(method, flags["m"]))
    if len(folders) == 2 or not (run / "start").is_dir():
        raise UserError(f"{run}: holds no checkpoint yet; let train.py get further, or --resume it")
    for folder, _ in folders.values():
        check_folder(folder)
    held_out = list({problem.id: problem for problem in task.problems(split, problems)}.values())  # a finite set wraps around
    pools = {}
    for name, (folder, m) in folders.items():
        model, tokenizer = load_policy(str(folder), task, device=device, dtype=flags["dtype"])
        pools[name] = sample_pool(model, tokenizer, task, held_out, m=m, size=size, temperature=temperature, seed=flags["seed"],
                                  max_new_tokens=rollout_length(task, tokenizer, m, flags["max_new_tokens"]),
                                  desc=f"evaluate {title(name)}", cuda_graph=flags.get("cuda_graph", True),
                                  micro_batch=750 if is_tiny(tokenizer) else (flags.get("sampling_batch") or 96) * m)
    return pools




def check_device(name: str, must_exist: bool = True) -> str:
    """The device of this name, for auto cuda if there is one, else cpu. Raises UserError if there is no such device."""
    available = {"auto": True, "cpu": True, "cuda": torch.cuda.is_available(), "mps": torch.backends.mps.is_available()}
    if name not in available:
        raise UserError(f"--device {name}: unknown; choose from {', '.join(available)}")
    if must_exist and not available[name]:
        raise UserError(f"--device {name}: this machine has none; take --device cpu")
    return name if name != "auto" else "cuda" if available["cuda"] else "cpu"


def print_table(heading: str, measures: dict[str, dict[str, Tensor]], n: int) -> None:
    """One row per policy; best@k, pass@k and W@k at a few budgets, then the measures of variety."""
    ks = [k for k in (1, 3, 10) if k < n] + [n]
    anything_passes = any(values[f"pass@{n}"].any() for values in measures.values())
    columns = [f"best@{k}" for k in ks] + ["pass@1"] * anything_passes + [f"pass@{n}", f"W@{n}", "diversity", "pareto_share", "coverage"]
    print(f"\n{heading}\n" + " " * 20 + "".join(f"{name.replace('pareto_share', 'pareto'):>11}" for name in columns))
    for policy, values in measures.items():
        print(f"{title(policy):20}" + "".join(f"{values[column].mean():11.3f}" for column in columns))


def evaluate_runs(runs: list[Path], *, split: str = "test", problems: int | None = None, size: int | None = None,
                  temperature: float | None = None, device: str = "cpu", out: Path | None = None) -> None:
    """Evaluate run folders: print tables, write eval.json and figures into each; several: their means as well.

    Settings left at None are those of each run's own flags. UserError for a folder that is no run, or runs not to be compared.
    """
    plans = []
    for run in runs:  # all of them are checked before the first is evaluated
        flags = load_config(run)["flags"]
        task = task_of(flags)
        plans.append((run, flags, task, {
            "split": split, "problems": problems or flags["eval_problems"] or task.eval_problems, "size": size or flags["pool"],
            "temperature": temperature or flags["eval_temperature"]}))
        if plans[-1][3]["size"] < flags["m"]:
            raise UserError(f"--pool {plans[-1][3]['size']}: must hold at least one rollout of the run's {flags['m']} answers")
        if plans[-1][3] != plans[0][3] or flags["m"] != plans[0][1]["m"]:
            raise UserError(f"{run}: evaluated otherwise than {runs[0]}; give --problems, --pool and --temperature, same m")
        if any(flags.get(name) != plans[0][1].get(name) for name in ("task", *task.flags)):
            raise UserError(f"{run}: has other problems than {runs[0]}, their mean says nothing")
    collected: list[dict[str, dict[str, Tensor]]] = []
    for run, flags, task, settings in plans:
        pools = evaluate_run(run, flags, task, **settings, device=device)
        settings["problems"] = len(pools["start"].problems)  # a finite set may hold fewer than were asked for
        measures = {name: measure(pool, task, flags["m"]) for name, pool in pools.items()}
        collected.append(measures)
        write_report(run / "eval.json", settings, measures)
        print_table(f"{run}: {settings['problems']} {split} problems, pool of {settings['size']} candidates, "
                    f"temperature {settings['temperature']}", measures, settings["size"])
        print("sampled in training: " + "; ".join(training_cost(run, method, flags["m"]) for method in ADVANTAGES if method in pools))
        plot_best_at_k(measures, settings["size"], run / "best_at_k.png")
        plot_training(run, run / "diversity.png")
        plot_reward_vectors(pools, task, run / "reward_vectors.png")
        figures = ["best_at_k.png", "diversity.png", "reward_vectors.png"]
        if plot_answers(pools, task, run / "answers.png"):
            figures.append("answers.png")
        print(f"figures: {', '.join(str(run / name) for name in figures)}")
    if len(runs) > 1:
        shared = [name for name in collected[0] if all(name in measures for measures in collected)]
        # The runs meet the same problems, so a problem's mean over the runs is the unit that the bootstrap resamples.
        mean = {name: {key: torch.stack([measures[name][key] for measures in collected]).double().mean(0)
                       for key in collected[0][name]} for name in shared}
        out = out or runs[0].parent / f"{Path(flags['task']).stem}-summary"
        out.mkdir(parents=True, exist_ok=True)
        write_report(out / "eval.json", settings | {"runs": [str(run) for run in runs]}, mean)
        print_table(f"mean of {len(runs)} runs", mean, settings["size"])
        plot_best_at_k(mean, settings["size"], out / "best_at_k.png")
        print(f"figures: {out / 'best_at_k.png'}")


def read_metrics(run: Path, method: str) -> list[dict]:
    """The rows of a method's metrics.jsonl; none if it was not trained."""
    log = run / method / "metrics.jsonl"
    return [json.loads(line) for line in log.read_text().splitlines()] if log.exists() else []


def training_cost(run: Path, method: str, m: int) -> str:
    """What a method was given, so that a reader sees whether a comparison is fair."""
    rows = read_metrics(run, method)
    answers = sum(row["rollouts"] for row in rows) * answers_per_rollout(method, m)
    return f"{title(method)} {len(rows)} steps, {answers:,} answers, {sum(row['tokens'] for row in rows):,} tokens"


def write_report(path: Path, settings: dict, measures: dict[str, dict[str, Tensor]]) -> None:
    """Means and 95% bootstrap intervals over problems, as JSON."""
    report = {"settings": settings, "policies": {name: {key: {"mean": value.double().mean().item(), "interval": bootstrap_interval(value)}
                                                        for key, value in values.items()} for name, values in measures.items()}}
    temporary = path.with_suffix(".tmp")
    temporary.write_text(json.dumps(report, indent=1))
    os.replace(temporary, path)


def plot_best_at_k(measures: dict[str, dict[str, Tensor]], n: int, path: Path) -> None:
    """Figure 1: the expected best of k candidates against k, and where any passes pass@k, with 95% intervals over problems."""
    ks = [k for k in BUDGETS if k < n] + [n]
    panels = {"best": "best@k on the task's own scalar", "W": "W@k: best@k on a random weighting"}
    panels |= {"pass": "pass@k: one of k reaches 1 everywhere"} if any(v[f"pass@{n}"].any() for v in measures.values()) else {}
    figure, axes = _figure(1, len(panels), (4.5 * len(panels), 3.8))
    for ax, (kind, heading) in zip(axes[0], panels.items(), strict=True):
        for name, values in measures.items():
            means = [values[f"{kind}@{k}"].mean().item() for k in ks]
            low, high = zip(*(bootstrap_interval(values[f"{kind}@{k}"]) for k in ks), strict=True)
            style = {"start": "--", "start_sets": ":"}.get(name, "-")
            ax.plot(ks, means, style, color=color(name), label=title(name), lw=2, marker="o", ms=3)
            ax.fill_between(ks, low, high, color=color(name), alpha=0.13, lw=0)
        ax.set(xscale="log", title=heading, xlabel="candidates k", xticks=ks, xticklabels=ks)
        ax.minorticks_off()
    axes[0][0].set_ylabel("expected best reward")
    axes[0][0].legend(frameon=False, fontsize=8)
    _save(figure, path)


def plot_training(run: Path, path: Path) -> None:
    """Figure 2: diversity of the rollouts' reward vectors over training, and the reward beside it.

    In step 1 every method still samples from the start model: their mean there is its level.
    """
    figure, axes = _figure(1, 2, (9, 3.4))
    logs = {name: rows for name in ADVANTAGES if (rows := read_metrics(run, name))}
    for ax, key in zip(axes[0], ("diversity", "reward"), strict=True):
        for name, rows in logs.items():
            steps, values = [row["step"] for row in rows], torch.tensor([row[key] for row in rows])
            window = min(10, len(rows))
            ax.plot(steps, values, color=color(name), alpha=0.2, lw=0.8)
            ax.plot(steps[window - 1:], values.unfold(0, window, 1).mean(1), color=color(name), label=title(name), lw=2)
        start = sum(rows[0][key] for rows in logs.values()) / len(logs)
        ax.axhline(start, color=color("start"), ls="--", label=title("start"))
    axes[0][0].set(title="diversity of a prompt's answers", xlabel="training step", ylabel="mean pairwise L1", ylim=(0, None))
    axes[0][1].set(title="mean reward of an answer", xlabel="training step", ylabel="task scalar")
    axes[0][0].legend(frameon=False, fontsize=8)
    _save(figure, path)


def plot_reward_vectors(pools: dict[str, Pool], task: Task, path: Path) -> None:
    """Figure 3: the reward vectors of one problem's pool in the two objectives that conflict most, a panel per policy."""
    everything = torch.cat([pool.rewards for pool in pools.values()]).flatten(0, 1)  # (policies * N * n, k)
    successes = everything[everything.any(-1)]
    conflict = torch.corrcoef((successes if len(successes) > 1 else everything).T).nan_to_num(1.0).reshape(everything.shape[-1], -1)
    x, y = divmod(int(conflict.argmin()), len(conflict))
    names = [name for name in pools if name != "start_sets"]
    index = typical_problem(pools)
    labels = task.objectives or [f"objective {i + 1}" for i in range(len(conflict))]
    figure, axes = _figure(1, len(names), (3 * len(names), 3.2))
    for ax, name in zip(axes[0], names, strict=True):
        points, counts = pools[name].rewards[index][:, [x, y]].unique(dim=0, return_counts=True)
        ax.scatter(points[:, 0], points[:, 1], s=30 * counts, color=color(name), alpha=0.6)
        for point, count in zip(points.tolist(), counts.tolist(), strict=True):
            ax.annotate(str(count), point, ha="center", va="center", fontsize=7)
        ax.set(title=f"{title(name)}: {len(points)} distinct", xlabel=labels[x], xlim=(-0.15, 1.15), ylim=(-0.15, 1.15))
    axes[0][0].set_ylabel(labels[y])
    _save(figure, path)


def typical_problem(pools: dict[str, Pool]) -> int:
    """The problem whose gap in diversity between the first and the last method is the median one: no hand-picking."""
    names = [name for name in pools if not name.startswith("start")]
    gap = diversity(pools[names[-1]].rewards) - diversity(pools[names[0]].rewards)
    return int(gap.argsort()[len(gap) // 2])


def plot_answers(pools: dict[str, Pool], task: Task, path: Path, columns: int = 4) -> bool:
    """Figure 4: the answers of the pools to the first held-out problems, drawn by the task; False if it cannot.

    A row per policy, or where drawings are wide a column.
    """
    names = [name for name in pools if name != "start_sets"]
    columns = min(columns, len(pools[names[0]].problems))
    if task.wide:
        figure, axes = _figure(columns, len(names), (3.4 * len(names), 1.9 * columns))
        axes = axes.T
    else:
        figure, axes = _figure(len(names), columns, (2.3 * columns, 2.45 * len(names)))
    for row, name in zip(axes, names, strict=True):
        pool = pools[name]
        for i, ax in enumerate(row):
            if not task.draw(ax, pool.problems[i], pool.answers[i], color(name)):
                _close(figure)
                return False
            ax.spines[:].set_visible(False)
            successes = pool.rewards[i][pool.rewards[i].any(-1)]
            ways = len(successes.unique(dim=0))
            ax.set_title(f"{len(successes)} of {len(pool.rewards[i])} score, {ways} way{'s' * (ways != 1)}", fontsize=8)
        if task.wide:
            row[0].set_title(f"{title(name)}\n{row[0].get_title()}", fontsize=9, color=color(name))
        else:
            row[0].set_ylabel(title(name), fontsize=11, color=color(name))
    _save(figure, path)
    return True


def _figure(rows: int, columns: int, size: tuple[float, float]):
    import matplotlib  # here, so that the measures can be imported without it
    matplotlib.use("Agg")
    from matplotlib import pyplot
    pyplot.rcParams.update({"axes.spines.top": False, "axes.spines.right": False, "font.size": 9})
    return pyplot.subplots(rows, columns, figsize=size, squeeze=False, layout="constrained")


def _save(figure, path: Path) -> None:
    figure.savefig(path, dpi=150)
    _close(figure)


def _close(figure) -> None:
    from matplotlib import pyplot
    pyplot.close(figure)


def build_parser() -> argparse.ArgumentParser:
    """All flags."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0], formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.add_argument("runs", nargs="+", type=Path, help="run folders of train.py; several: also their means")
    parser.add_argument("--split", default="test", choices=["test", "validation"], help="held-out problems; tune on validation")
    parser.add_argument("--problems", type=int, help="how many; as trained if not given")
    parser.add_argument("--pool", type=int, help="candidates per problem; as trained if not given")
    parser.add_argument("--temperature", type=float, help="of the candidates; as trained if not given")
    parser.add_argument("--device", default="cpu", help="cpu, cuda or mps")
    parser.add_argument("--out", type=Path, help="folder for the means of several runs; TASK-summary beside the first if not given")
    return parser


def main(argv: list[str] | None = None) -> None:
    """The command, with a user's mistakes as one line and exit code 2."""
    transformers_logging.disable_progress_bar()
    transformers_logging.set_verbosity_error()
    args = build_parser().parse_args(argv)
    try:
        device = check_device(args.device)
        for flag in ("problems", "pool", "temperature"):
            value = getattr(args, flag)
            if value is not None and not 0 < value < math.inf:
                raise UserError(f"--{flag} {value}: must be positive")
        evaluate_runs(args.runs, split=args.split, problems=args.problems, size=args.pool, temperature=args.temperature,
                      device=device, out=args.out)
    except UserError as error:
        print(f"eval.py: error: {error}", file=sys.stderr)
        raise SystemExit(2) from None
    except KeyboardInterrupt:
        print("\nstopped; the same command starts again", file=sys.stderr)
        raise SystemExit(130) from None


if __name__ == "__main__":
    main()
