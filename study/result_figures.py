"""The figures of study/figures/, drawn from stored results."""

from pathlib import Path

import torch
from torch import Tensor

from report import plots
from study import eval_report, result_plots
from study.entries import Entry
from study.eval_report import EvalReport
from study.result_tables import (
    GROUP_VPO,
    GRPO,
    MAX_AT_K,
    PRETRAINED,
    geometry_tasks,
    grpo_for_many,
    unseen_share,
)
from study.stored import START, TEMPERATURES, Difference, Result, Stored, TaskResults

DRAWN_SEARCHES = ("maze_diamond_87_evolve", "nested_scalar_evolve")
# The flags that were varied in the maze, with the values that they have by default.
DEFAULTS: dict[str, dict[str, object]] = {
    "vpo": {
        "m": 3,
        "alpha": 1.0,
        "n-weights": 100,
        "sampler": "iid",
        "subset": 1,
        "credit": "rollout",
    },
    "group_vpo": {"subset": 4, "group-size": 8},
}


def draw_figures(stored: Stored, folder: Path) -> None:
    """Draw all figures of results."""
    for name in ("maze", "code", *PRETRAINED):
        task = stored.task(name)
        eval_report.best_at_k(report_of(task), folder / f"{name}_best_at_k.png")
        draw_training(task, folder / f"{name}_diversity.png")
    result_plots.ablations(ablation_panels(stored.task("maze")), folder / "ablations.png")
    points = {}
    for task in geometry_tasks(stored):
        set_gain = task.difference(MAX_AT_K, GRPO, "W@30")
        vector_gain = task.difference(GROUP_VPO, MAX_AT_K, "W@30")
        points[task.name] = (unseen_share(task), set_gain, vector_gain)
    result_plots.two_halves(points, folder / "two_halves.png")
    result_plots.frontier(frontier_rows(stored), folder / "frontier.png")
    for name in DRAWN_SEARCHES:
        search = stored.searches[name]
        plots.search(search["ticks"], search["policies"], folder / f"search_{name}.png")


def frontier_rows(stored: Stored) -> list[dict[str, dict[Entry, Tensor]]]:
    """The curves over learning rates, and those over temperatures, of the maze and of programs."""
    rates = {}
    temperatures = {}
    for name, title in (("maze", "maze"), ("code", "programs")):
        rates[f"{title}: learning rates"] = rate_curves(stored.task(name, tuning=True))
        temperatures[f"{title}: temperatures"] = temperature_curves(stored.task(name))
    return [rates, temperatures]


def rate_curves(validation: TaskResults) -> dict[Entry, Tensor]:
    """What each method reached at every learning rate, from the lowest to the highest."""
    curves: dict[Entry, list] = {}
    for policy in validation.policies():  # in the order of their rates
        point = [validation.mean(policy, measure) for measure in ("best@1", "best@30")]
        curves.setdefault(Entry(policy.method), []).append(point)
    return {policy: torch.tensor(points) for policy, points in curves.items()}


def temperature_curves(task: TaskResults) -> dict[Entry, Tensor]:
    """What each method reaches at every temperature, from the lowest to the highest.

    Each has its own rate. GRPO has a second curve at its low rate.
    """
    curves = {}
    for policy in drawn_policies(task):
        points = []
        for temperature in TEMPERATURES:
            means = [task.mean(policy, name, temperature) for name in ("best@1", "best@30")]
            points.append(means)
        curves[policy] = torch.tensor(points)
    return curves


def drawn_policies(task: TaskResults) -> list[Entry]:
    """The policies at their own rates, and GRPO at that for k = 30; of the real model at all rates."""
    policies = [policy for policy in task.policies() if policy.method != "start_sets"]
    if task.name == "open_cases":
        return policies
    low_rate_grpo = grpo_for_many(task)
    return [policy for policy in policies if policy.lr is None or policy == low_rate_grpo]


def report_of(task: TaskResults) -> EvalReport:
    """What was measured of all policies at temperature 0.7, over all seeds."""
    policies = drawn_policies(task)
    names = []
    for k in (1, 2, 3, 5, 10, 30):
        names += [f"best@{k}", f"W@{k}", f"pass@{k}"]
    measures = {}
    for policy in policies:
        measures[policy] = {name: task.values(policy, name) for name in names}  # (seeds, N) each
    return EvalReport(
        name=task.name,
        split="test",
        problems=measures[policies[0]]["best@1"].shape[1],
        pool=30,
        temperature=0.7,
        measures=measures,
        prompt_ids=task.prompt_ids,
    )


def draw_training(task: TaskResults, path: Path) -> None:
    """Draw training metrics of all methods, as means over seeds and ten steps."""
    curves = []
    for policy in drawn_policies(task):
        if policy.method not in START:
            rows = mean_metrics(list(task.runs(policy).values()))
            curves.append(plots.TrainingCurve(policy.method, policy.look, rows))
    plots.training(curves, 0.7 if task.name in PRETRAINED else 1.0, path, window=1)


def mean_metrics(runs: list[Result]) -> list[dict[str, float]]:
    """The means over runs of the training metrics, a record for every ten steps."""
    curves = {}
    for name in runs[0].training:
        if all(name in run.training for run in runs):  # older results lack some
            of_runs = torch.tensor([run.training[name] for run in runs], dtype=torch.float64)
            curves[name] = of_runs.mean(0).tolist()
    rows = []
    for i, values in enumerate(zip(*curves.values(), strict=True)):
        metrics = dict(zip(curves, values, strict=True))
        rows.append({"step": 10 * i + 5, **metrics})
    return rows


def ablation_panels(maze: TaskResults) -> dict[str, dict[str, dict[str, Difference]]]:
    """A panel for every flag that was varied: heading -> value -> measure -> mean and interval."""
    panels = {}
    for method, flags in DEFAULTS.items():
        for flag, default in flags.items():
            variants = {default: Entry(method)}
            for policy in maze.variants():
                name, value = policy.flags[0]
                if policy.method == method and name == flag:
                    variants[value] = policy
            seeds = maze.shared_seeds(*variants.values())
            points = {}
            for value, policy in sorted(variants.items()):
                points[str(value)] = panel_point(maze, policy, seeds)
            panels[f"{Entry(method).title}: {flag}"] = points
    return panels


def panel_point(maze: TaskResults, policy: Entry, seeds: list[int]) -> dict[str, Difference]:
    """Of three measures the mean over these seeds, and its interval."""
    return {
        measure: maze.summary(maze.values(policy, measure, seeds=seeds))
        for measure in ("best@1", "best@30", "W@30")
    }
