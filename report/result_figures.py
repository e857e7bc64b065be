"""The figures of docs/results/, drawn from stored results by report/plots.py."""

from pathlib import Path

import torch
from torch import Tensor

from report import plots
from report.evaluation import EvalReport
from report.result_tables import (
    GROUP_VPO,
    GRPO,
    MAX_AT_K,
    PRETRAINED,
    geometry_tasks,
    grpo_for_many,
    unseen_share,
)
from report.stored import START, TEMPERATURES, Difference, Result, Stored, TaskResults
from report.style import Entry

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


def draw_figures(stored: Stored, folder: Path) -> list[Path]:
    """Draw all figures for which there are results. Returns their paths."""
    written = []
    for name in ("maze", "code", *PRETRAINED):
        task = stored.task(name)
        if len(task.policies()) > 3:  # more than GRPO and the start model
            written.append(folder / f"{name}_best_at_k.png")
            plots.best_at_k(report_of(task), written[-1])
            written.append(folder / f"{name}_diversity.png")
            draw_training(task, written[-1])
    panels = ablation_panels(stored.task("maze"))
    if panels:
        written.append(folder / "ablations.png")
        plots.ablations(panels, written[-1])
    points = {}
    for task in geometry_tasks(stored):
        set_gain = task.difference(MAX_AT_K, GRPO, "W@30")
        vector_gain = task.difference(GROUP_VPO, MAX_AT_K, "W@30")
        points[task.name] = (unseen_share(task), set_gain, vector_gain)
    if points:
        written.append(folder / "two_halves.png")
        plots.two_halves(points, written[-1])
    for measure, name in (("best@30", "frontier.png"), ("W@30", "frontier_weighted.png")):
        rows = frontier_rows(stored, measure)
        if all(rows[0].values()) and all(rows[1].values()):
            written.append(folder / name)
            plots.frontier(rows, measure, written[-1])
    for name in DRAWN_SEARCHES:
        if name in stored.searches:
            written.append(folder / f"search_{name}.png")
            search = stored.searches[name]
            plots.search(search["ticks"], search["policies"], written[-1])
    return written


def frontier_rows(stored: Stored, measure: str) -> list[dict[str, dict[Entry, Tensor]]]:
    """The curves over learning rates, and those over temperatures, of the maze and of programs."""
    rates = {}
    temperatures = {}
    for name, title in (("maze", "maze"), ("code", "programs")):
        validation = stored.task(name, tuning=True)
        rates[f"{title}: learning rates"] = rate_curves(validation, measure)
        temperatures[f"{title}: temperatures"] = temperature_curves(stored.task(name), measure)
    return [rates, temperatures]


def rate_curves(validation: TaskResults, measure: str) -> dict[Entry, Tensor]:
    """What each method reached at every learning rate, from the lowest to the highest."""
    curves: dict[Entry, list] = {}
    for policy in validation.policies():  # in the order of their rates
        point = [validation.mean(policy, name) for name in ("best@1", measure)]
        curves.setdefault(Entry(policy.method), []).append(point)
    return {policy: torch.tensor(points) for policy, points in curves.items()}


def temperature_curves(task: TaskResults, measure: str) -> dict[Entry, Tensor]:
    """What each method reaches at every temperature, from the lowest to the highest.

    Each has its own rate. GRPO has a second curve at its rate for k = 30.
    """
    curves = {}
    for policy in drawn_policies(task):
        if policy.method != "start_sets":
            points = []
            for temperature in TEMPERATURES:
                names = ("best@1", measure)
                points.append([task.mean(policy, name, temperature) for name in names])
            curves[policy] = torch.tensor(points)
    return curves


def drawn_policies(task: TaskResults) -> list[Entry]:
    """The policies at their own rates, and GRPO at that for k = 30; of the real model all."""
    if task.name == "open_cases":
        return task.policies()
    low_rate_grpo = grpo_for_many(task)
    return [policy for policy in task.policies() if policy.lr is None or policy == low_rate_grpo]


def report_of(task: TaskResults) -> EvalReport:
    """What was measured of all policies at temperature 0.7, over all seeds."""
    policies = [policy for policy in drawn_policies(task) if policy.method != "start_sets"]
    example = next(iter(task.runs(policies[0]).values()))
    names = dict(example.measures[TEMPERATURES[0]]["start"])
    names.pop("earned", None)  # of which older results know nothing
    measures = {}
    for policy in policies:
        measures[policy] = {name: task.values(policy, name) for name in names}  # (seeds, N) each
    return EvalReport(
        name=task.name,
        split="test",
        problems=len(names["best@1"]),
        pool=example.size,
        temperature=float(TEMPERATURES[0]),
        measures=measures,
        prompt_ids=task.prompt_ids,
    )


def draw_training(task: TaskResults, path: Path) -> None:
    """Draw training metrics of all methods, as means over seeds and ten steps."""
    logs = {}
    for policy in drawn_policies(task):
        if policy.method not in START:
            logs[policy] = mean_metrics(list(task.runs(policy).values()))
    plots.training(logs, 0.7 if task.name in PRETRAINED else 1.0, path, window=1)


def mean_metrics(runs: list[Result]) -> list[dict[str, float]]:
    """The means over runs of the training metrics, a record for every ten steps."""
    names = [name for name in runs[0].training if all(name in run.training for run in runs)]
    rows = []
    for i in range(len(runs[0].training["reward"])):
        row = {"step": 10 * i + 5}
        for name in names:
            row[name] = sum(run.training[name][i] for run in runs) / len(runs)
        rows.append(row)
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
            if len(variants) > 1 and seeds:
                panels[f"{Entry(method).title}: {flag}"] = {
                    str(value): panel_point(maze, variants[value], seeds)
                    for value in sorted(variants)
                }
    return panels


def panel_point(maze: TaskResults, policy: Entry, seeds: list[int]) -> dict[str, Difference]:
    """Of three measures the mean over these seeds, and its interval."""
    return {
        measure: maze.summary(maze.values(policy, measure, seeds=seeds))
        for measure in ("best@1", "best@30", "W@30")
    }
