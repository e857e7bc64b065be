"""The figures of the study, drawn from stored results; those of headlines are in documents.py."""

from pathlib import Path

import torch

from examples.search_report import solved_at
from report import style
from report.looks import look_of
from study.entries import CURVES, GROUP_VPO, GRPO, GRPO_KL, MAX_AT_K, VPO, Entry, mixed
from study.grid import HEADLINE, MIXES
from study.stored import Stored, TaskResults
from study.tables import KS, collapse_records, geometry_tasks, regret

KINDS = {  # task -> the measures of its figure
    "maze": ("best", "W"),
    "code": ("best", "pass"),
    "toy": ("best", "pass"),
    HEADLINE: ("best", "W"),
}
SHOWN_WORDS = {"maze": 12, "headline": 6}  # in the figure of the collapse
SEARCHES = {
    "maze_diamond_79_evolve": "79 hard mazes: a route with all the diamonds",
    "nested_scalar_evolve": "40 hard programs",
}
LABELS = {
    "best": "best score of k candidates (best@k)",
    "W": "best of k, random preferences (W@k)",
    "pass": "a full solution among k (pass@k)",
}


def draw_figures(stored: Stored, root: Path) -> None:
    """Draw all figures of results."""
    pages = root / "study/figures"
    for name, kinds in KINDS.items():
        best_of_k(stored.task(name), kinds, pages / f"{name}_best_at_k.png")
    solved(stored, pages / "search.png")
    two_halves(geometry_tasks(stored), pages / "two_halves.png")
    frontier(stored, root / "docs/figures/mixing.png")
    collapse(pages / "collapse.png")


def best_of_k(task: TaskResults, kinds: tuple[str, ...], path: Path) -> None:
    """Draw best@k, W@k or pass@k of a task's policies, a panel for each."""
    with style.new_figure(1, len(kinds), (5.4 * len(kinds), 4.6)) as axes:
        for ax, kind in zip(axes.flat, kinds, strict=True):
            for policy in CURVES:
                if task.runs(policy):
                    means = [task.mean(policy, f"{kind}@{k}") for k in KS]
                    ax.plot(KS, means, **style.curve_style(policy.look))
            ax.set(title=task.name, xlabel="number of candidates k", ylabel=LABELS[kind])
            ax.set_xscale("log")
            ax.set_xticks(KS, KS)
            ax.minorticks_off()
        style.finish(axes, path, f"mean of {len(task.runs(VPO))} seeds; temperature 0.7")


def solved(stored: Stored, path: Path) -> None:
    """Draw the share of problems that each policy of a search solved within so many candidates."""
    with style.new_figure(1, len(SEARCHES), (5.4 * len(SEARCHES), 4.6)) as axes:
        for ax, (key, title) in zip(axes.flat, SEARCHES.items(), strict=True):
            search = stored.searches[key]
            for name, runs in search["policies"].items():
                after = solved_at(runs)[..., None]  # (runs, N, 1), 0: never
                within = (after > 0) & (after <= torch.tensor(search["ticks"]))
                shares = within.double().mean((0, 1))  # (ticks)
                curve = style.curve_style(look_of(name)) | {"marker": ""}
                ax.plot(search["ticks"], shares, **curve)
            ax.set(title=title, xlabel="candidates scored", ylabel="share of problems solved")
            ax.set_xscale("log")
            ax.xaxis.set_major_formatter("{x:,.0f}")
        style.finish(axes, path, "mean of three training seeds")


def two_halves(tasks: list[TaskResults], path: Path) -> None:
    """Draw what a set and what a vector gained in W@30, a pair of bars for each reward."""
    halves = (
        ("a set instead of single answers (Max@K - GRPO)", MAX_AT_K, GRPO, -0.2),
        ("a vector instead of its mean (Group VPO - Max@K)", GROUP_VPO, MAX_AT_K, 0.2),
    )
    with style.new_figure(1, 1, (9.6, 4.4)) as axes:
        ax = axes[0, 0]
        for label, ours, theirs, shift in halves:
            gains = [task.difference(ours, theirs, "W@30") for task in tasks]
            means = [gain.mean for gain in gains]
            below = [gain.mean - gain.low for gain in gains]
            above = [gain.high - gain.mean for gain in gains]
            x = [i + shift for i in range(len(tasks))]
            bars = {"width": 0.38, "color": look_of(ours.method).color, "capsize": 3}
            ax.bar(x, means, yerr=[below, above], label=label, **bars)
        ax.axhline(0, color="#666666", lw=0.8)
        names = [f"{task.name}\n{regret(task):.3f}" for task in tasks]
        ax.set_xticks(range(len(tasks)), names)
        ax.set(ylabel="gained in W@30", xlabel="reward, and the regret of its scalar")
        style.finish(axes, path, "five seeds; 95% intervals over seeds and problems")


def frontier(stored: Stored, path: Path) -> None:
    """Draw best@1 against W@30, a line per method along t, and GRPO with a KL weight of 0.1 as a point."""
    panels = {"maze": "Maze", "code": "Programs", "fence": "Fence", HEADLINE: "Headlines"}
    with style.new_figure(2, 2, (10.4, 8.4)) as axes:
        for ax, (name, title) in zip(axes.flat, panels.items(), strict=True):
            task = stored.mixed.task(name)
            for policy in (GRPO, MAX_AT_K, VPO, GROUP_VPO):
                if task.runs(policy):
                    draw_line(ax, task, policy)
            trained = task if task.runs(GRPO_KL) else stored.task(name)
            if trained.runs(GRPO_KL):
                mark = {"color": look_of("grpo").color, "mfc": "white", "ms": 10, "mew": 2}
                ax.plot(*point(trained, GRPO_KL), "s", label=GRPO_KL.title, **mark)
            ax.set(title=title, xlabel="best@1", ylabel="W@30")
        caption = (
            "Five seeds. A line goes from the start model (t = 0; of VPO it is asked for three answers) "
            "to the trained policy (large, t = 1)."
        )
        style.finish(axes, path, caption)


def draw_line(ax, task: TaskResults, policy: Entry) -> None:
    """The line of a method along t, its trained policy with a large marker."""
    points = [point(task, mixed(policy, t)) for t in MIXES]
    look = style.curve_style(look_of(policy.method))
    ax.plot(*zip(*points, strict=True), **look | {"ms": 4})
    ax.plot(*points[-1], look["marker"], color=look["color"], ms=10, mec="white")


def point(task: TaskResults, policy: Entry) -> tuple[float, float]:
    return task.mean(policy, "best@1"), task.mean(policy, "W@30")


def collapse(path: Path) -> None:
    """Draw entropy and distinct beginnings by word, for the start model, GRPO and VPO."""
    labels = {"nats": "entropy of the next word, nats", "distinct": "distinct beginnings of 30"}
    tasks = collapse_records()
    with style.new_figure(2, len(tasks), (4.8 * len(tasks), 6.4)) as axes:
        for column, (name, records) in enumerate(tasks.items()):
            n_words = SHOWN_WORDS[name]
            for row, (key, label) in enumerate(labels.items()):
                ax = axes[row, column]
                for policy in ("start", "grpo", "vpo"):
                    values = torch.tensor([record[key][policy][:n_words] for record in records])
                    curve = style.curve_style(look_of(policy))
                    ax.plot(range(1, n_words + 1), values.mean(0), **curve)
                ax.set(ylabel=label, xlabel="word of the answer", title=name, ylim=(0, None))
        style.finish(axes, path, "means over seeds and 40 held-out problems; temperature 0.7")
