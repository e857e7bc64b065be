"""Evaluation: what a policy is worth to a search that takes the best of k candidates, and the pictures that show it.

    python eval.py runs/maze-seed0                       table and figures of one run of train.py
    python eval.py runs/maze-seed0 runs/maze-seed1 ...   the same for each, then their means over the seeds

Every policy answers the same held-out problems with the same number of candidates (the pool): single answers, or
rollouts of m. Candidates, not rollouts, are the unit of budget. A slot that a rollout left empty is a candidate worth
the minimum, and a duplicate is a candidate like any other: both have cost the search an evaluation."""

import signal

from engine.flags import as_command, check_eval, eval_parser

if __name__ == "__main__":
    eval_parser(
        __doc__
    ).parse_args()  # --help and mistakes are answered here: what follows takes seconds to import
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # as_command takes Ctrl-C back

import json
import math
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor
from tqdm import tqdm

from engine.models import check_device, load_policy
from engine.runs import (
    check_folder,
    comparable,
    held_out,
    policies,
    read_log,
    snapshots,
    start_of,
    write_text,
    writing,
)
from engine.tiny import is_tiny
from report import page, plots
from report.geometry import describe
from report.plots import bootstrap_interval
from rewards import Problem, Task, UserError, take_problems
from rollout import build_prompt, parse_answers, rollout_length, sample, score_texts
from vpo import ADVANTAGES, answers_per_rollout, sample_weights

BUDGETS = (1, 2, 3, 5, 8, 10, 15, 20, 30, 50, 100)


def pass_at_k(n: int, c: int, k: int) -> float:
    """Probability that one of k candidates out of n passes when c of the n do: 1 - C(n-c, k) / C(n, k), unbiased
    (Chen et al. 2021, arXiv 2107.03374). Raises ValueError unless 0 <= c <= n and 1 <= k <= n."""
    if not (0 <= c <= n and 1 <= k <= n):
        raise ValueError(f"pass_at_k(n={n}, c={c}, k={k}): needs 0 <= c <= n and 1 <= k <= n")
    return 1.0 - math.comb(n - c, k) / math.comb(n, k)


def best_at_k(scores: Tensor, k: int) -> Tensor:
    """Expected best of k candidates drawn without replacement from n: scores (..., n) -> (...), unbiased.
    By order statistics: the i-th smallest is the best of C(i-1, k-1) of the C(n, k) subsets. A bootstrap over the n,
    with replacement, would be biased low. Raises ValueError unless 1 <= k <= n."""
    n = scores.shape[-1]
    if not 1 <= k <= n:
        raise ValueError(f"best_at_k(k={k}): needs 1 <= k <= n = {n} candidates")
    share = torch.tensor(
        [math.comb(i, k - 1) / math.comb(n, k) for i in range(n)], dtype=torch.float64
    )
    return (scores.sort(-1).values.double() * share.to(scores.device)).sum(-1)


def weighted_best_at_k(rewards: Tensor, k: int, *, objective_mask: Tensor | None = None) -> Tensor:
    """W@k: best@k of the scalar w . r, averaged over w ~ Dirichlet(1): rewards (N, n, objectives) -> (N).
    What the pool is worth to a user whose preference was not known in training. Low-discrepancy weightings, over those
    objectives that a problem has: objective_mask (N, objectives), the existing ones first."""
    sizes = (
        torch.full(rewards.shape[:1], rewards.shape[-1])
        if objective_mask is None
        else objective_mask.sum(1)
    )
    values = torch.zeros(len(rewards), dtype=torch.float64)
    for size in sizes.unique().tolist():
        weights = sample_weights(
            256, size, sampler="sobol", generator=torch.Generator().manual_seed(0)
        ).to(rewards)
        values[sizes == size] = best_at_k(
            (rewards[sizes == size][..., :size] @ weights.T).mT, k
        ).mean(-1)
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
    rewards (N, n, k), consecutive candidates form a rollout -> (N). Single answers are grouped by the same m."""
    N, n, k = rewards.shape
    return rewards[:, : n - n % m].reshape(N, -1, m, k).amax(2).mean((1, 2))


@dataclass
class Pool:
    """The candidates of one policy for N problems."""

    problems: list[Problem]
    answers: list[
        list[str | None]
    ]  # (N, n) what was parsed; None where a rollout left the slot empty
    rewards: Tensor  # (N, n, k) zero beyond a problem's own objectives
    scalars: Tensor  # (N, n)
    objective_mask: Tensor  # (N, k) bool, the objectives that each problem has

    def vectors(self) -> list[Tensor]:
        """N times the rewards (n, k) in a problem's own objectives."""
        return [
            rewards[:, exists]
            for rewards, exists in zip(self.rewards, self.objective_mask, strict=True)
        ]


def sample_pool(
    name: str,
    policy: tuple,
    task: Task,
    problems: list[Problem],
    flags: dict,
    *,
    m: int,
    size: int,
    temperature: float,
    training: bool = False,
) -> Pool:
    """`size` candidates of a policy (model, tokenizer) for each problem from rollouts of m answers, with a run's flags;
    goal_conditioned is told a weighting for each. `training`: no more at a time than a training step samples."""
    (model, tokenizer), seed, batch = policy, flags["seed"], flags.get("sampling_batch") or 0
    generator, G, texts = torch.Generator(model.device).manual_seed(seed), math.ceil(size / m), []
    told = [None] * math.ceil(
        G / flags["group_size"] if training else 1
    )  # the same prompt so many times
    if name == "goal_conditioned":
        told = sample_weights(
            size, len(task.objectives), generator=torch.Generator().manual_seed(seed)
        ).tolist()
    each, chunk = (
        math.ceil(G / len(told)),
        max(1, (750 if is_tiny(tokenizer) else (batch or 96) * m) // size),
    )
    for i in tqdm(
        range(0, len(problems), chunk),
        f"evaluate {plots.title(name)}",
        leave=False,
        disable=training,
    ):
        prompts = [
            build_prompt(tokenizer, task, problem, m, goal)
            for problem in problems[i : i + chunk]
            for goal in told
        ]
        texts += sample(
            model,
            tokenizer,
            prompts,
            each,
            task=task,
            m=m,
            generator=generator,
            temperature=temperature,
            max_new_tokens=rollout_length(task, tokenizer, m, flags["max_new_tokens"]),
            batch=batch * training,
            static=None if flags.get("cuda_graph", True) else False,
        ).texts
    scored, n = score_texts(task, problems, texts, m), each * len(told)  # n rollouts for a problem
    parsed = [(parse_answers(text, task, m) + [None] * m)[:m] for text in texts]
    answers = [sum(parsed[i : i + n], [])[:size] for i in range(0, len(texts), n)]
    return Pool(
        problems,
        answers,
        scored.vectors.flatten(1, 2)[:, :size],
        scored.scalars.flatten(1, 2)[:, :size],
        scored.objective_mask,
    )


def measure(pool: Pool, task: Task, m: int) -> dict[str, Tensor]:
    """Every measure of a pool, per problem: name -> (N)."""
    n, exists = pool.scalars.shape[1], pool.objective_mask
    budgets = [k for k in BUDGETS if k < n] + [n]
    passed = ((pool.rewards >= 1) | ~exists[:, None]).all(-1).sum(1).tolist()
    values = {f"best@{k}": best_at_k(pool.scalars, k) for k in budgets}
    values |= {f"pass@{k}": torch.tensor([pass_at_k(n, c, k) for c in passed]) for k in budgets}
    values |= {
        f"W@{k}": weighted_best_at_k(pool.rewards, k, objective_mask=exists) for k in budgets
    }
    values |= {
        "diversity": diversity(pool.rewards),
        "pareto_share": pareto_share(pool.rewards),
        "coverage": coverage(pool.rewards, m) * exists.shape[1] / exists.sum(1),
    }
    return values | {
        f"reward_{name}": pool.rewards[..., i].mean(1) for i, name in enumerate(task.objectives)
    }


def evaluate_run(
    run: Path, flags: dict, task: Task, settings: dict, device: str, names: list[str] | None = None
) -> tuple[dict[str, Pool], Tensor | None]:
    """The pools of the start model and every method of a run, or of `names`; and which problems share a prompt (N)."""
    folders = policies(run, flags["m"])
    folders = {name: folders[name] for name in names or folders}
    for folder, _ in folders.values():
        check_folder(folder)
    problems, pools = held_out(task, settings["split"], settings["problems"]), {}
    for name, (folder, m) in folders.items():
        policy = load_policy(str(folder), task, device=device, dtype=flags["dtype"])
        pools[name] = sample_pool(
            name,
            policy,
            task,
            problems,
            flags,
            m=m,
            size=settings["size"],
            temperature=settings["temperature"],
        )
    prompts = [build_prompt(policy[1], task, problem, 1) for problem in problems]
    known = {prompt: i for i, prompt in enumerate(dict.fromkeys(prompts))}
    return pools, torch.tensor([known[prompt] for prompt in prompts]) if len(known) > 1 else None


def evaluate_runs(
    runs: list[Path],
    *,
    device: str = "cpu",
    out: Path | None = None,
    figure_format: str = "png",
    **given: str | float | None,
) -> None:
    """Evaluate run folders: print tables, then write eval.json and figures; several: their means as well. Settings
    (split, problems, size, temperature) and errors are those of `comparable`."""
    collected: list[dict[str, dict[str, Tensor]]] = []
    for run, flags, task, settings, folder in comparable(runs, out, given):
        pools, groups = evaluate_run(run, flags, task, settings, device)
        settings |= {
            "problems": len(pools["start"].problems),
            "seeds": 1,
        }  # a finite set may hold fewer than asked for
        collected.append(
            measures := {name: measure(pool, task, flags["m"]) for name, pool in pools.items()}
        )
        plots.print_table(
            f"{run}: {settings['problems']} {settings['split']} problems, pool of {settings['size']} "
            f"candidates, temperature {settings['temperature']}",
            measures,
            settings["size"],
        )
        logs = {
            name: read_log(run / name / "metrics.jsonl") for name in pools if name in ADVANTAGES
        }
        print(
            "sampled in training: "
            + "; ".join(
                plots.cost(name, rows, answers_per_rollout(name, flags["m"]))
                for name, rows in logs.items()
            )
        )
        folder = folder if out is None else out if len(runs) == 1 else out / run.name
        with writing(folder):
            plots.run_figures(
                folder,
                figure_format,
                write_report(folder, settings, measures, groups),
                logs,
                flags["temperature"],
                task,
                pools,
            )
    if len(runs) > 1:
        shared = [name for name in collected[0] if all(name in measures for measures in collected)]
        together = {
            name: {
                key: torch.stack([measures[name][key] for measures in collected])  # (runs, N)
                for key in collected[0][name]
            }
            for name in shared
        }
        plots.print_table(f"mean of {len(runs)} runs", together, settings["size"])
        out = out or runs[0].parent / f"{Path(flags['task']).stem}-summary" / (
            "" if folder == run else folder.name
        )
        settings |= {"seeds": len(runs), "runs": [str(run) for run in runs]}
        best = out / f"best_at_k.{figure_format}"
        with writing(out):
            plots.best_at_k(write_report(out, settings, together, groups), best)
        print(f"figures: {best}")


def reward_geometry(name: str, task_name: str, device: str, problems: int) -> None:
    """Print what a start model's rollouts on validation problems, sampled as in training, say of the task's reward."""
    flags, task, folder = start_of(name, task_name, device == "cuda")
    policy = load_policy(folder, task, device=device, dtype=flags["dtype"])
    pool = sample_pool(
        "start",
        policy,
        task,
        take_problems(task, "validation", problems),
        flags,
        m=1,
        size=4 * flags["group_size"],
        temperature=flags["temperature"],
    )
    print(
        f"\n{name}: the start model on {problems} validation problems, {pool.scalars.shape[1]} answers each"
    )
    print(
        describe(
            pool.rewards, pool.objective_mask, pool.scalars, flags["group_size"], task.objectives
        )
    )


def show(run: Path, folder: Path, as_page: bool, as_film: bool) -> None:
    """The page and the film of a run, from the snapshots and metrics that its training kept."""
    flags, task, problems, frames = snapshots(run)
    logs = {
        name: read_log(run / name / "metrics.jsonl", "diversity", "reward") for name in frames[0][1]
    }
    with writing(folder):
        if as_page:
            page.write_page(folder / "report.html", task, flags, problems, frames, logs)
            print(f"written: {folder}/report.html")
        if as_film and not page.write_film(folder / "film.gif", task, problems, frames):
            raise UserError(f"--film: task {task.name} draws no answers; --page shows them as text")
        print(f"written: {folder}/film.gif\n" * as_film, end="")


def write_report(
    folder: Path, settings: dict, measures: dict[str, dict[str, Tensor]], groups: Tensor | None
) -> dict:
    """Means and 95% bootstrap intervals, written as eval.json."""
    report = {
        "settings": settings,
        "policies": {
            name: {
                key: {
                    "mean": value.double().mean().item(),
                    "interval": bootstrap_interval(value, groups),
                }
                for key, value in values.items()
            }
            for name, values in measures.items()
        },
    }
    write_text(folder / "eval.json", json.dumps(report, indent=1))
    return report


def main(argv: list[str] | None = None) -> None:
    args = eval_parser(__doc__).parse_args(argv)
    check_eval(eval_parser(), args)
    runs, out = [Path(run) for run in args.runs], Path(args.out) if args.out else None
    if args.reward_geometry:
        return as_command(
            eval_parser(),
            lambda: [
                reward_geometry(name, args.task, check_device(args.device), args.problems or 100)
                for name in args.runs
            ],
        )
    if args.page or args.film:
        folders = [run if out is None else out / run.name if len(runs) > 1 else out for run in runs]
        return as_command(
            eval_parser(),
            lambda: [show(*each, args.page, args.film) for each in zip(runs, folders, strict=True)],
        )
    given = {
        "split": args.split,
        "problems": args.problems,
        "size": args.pool,
        "temperature": args.temperature,
    }
    return as_command(
        eval_parser(),
        lambda: evaluate_runs(
            runs,
            device=check_device(args.device),
            out=out,
            figure_format=args.figure_format,
            **given,
        ),
    )


if __name__ == "__main__":
    main()
