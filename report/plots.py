"""The table and figures of an evaluation, from plain numbers; figures as SVG, PDF or PNG."""

import contextlib
import math
import textwrap
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

LOOKS = {  # name: title, color, marker, line; colors that the colour-blind tell apart, markers for grey
    "start": ("start model", "#757575", "", "--"),
    "start_sets": ("start model, sets", "#a3a3a3", "", ":"),
    "grpo": ("GRPO", "#d55e00", "s", "-"),
    "multi_rlvr": ("Multi-RLVR", "#e69f00", "^", "-"),
    "max_at_k": ("Max@K", "#009e73", "D", "-"),
    "vpo": ("VPO", "#0b559f", "o", "-"),
    "group_vpo": ("Group VPO", "#56b4e9", "v", "-"),
    "dr_grpo": ("Dr. GRPO", "#8c510a", "X", "-"),
    "maxrl": ("MaxRL", "#cc79a7", "P", "-"),
    "gdpo": ("GDPO", "#7b3294", "*", "-"),
    "random_weighting": ("Random weighting", "#542788", "<", "-"),
    "goal_conditioned": ("Goal-conditioned", "#c51b7d", ">", "-"),
}
OTHERS = ("#276419", "#8e0152", "#a50026", "#01665e")  # of methods that have no look yet
STYLE = {
    "font.size": 10,
    "axes.titlesize": 11,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "legend.frameon": False,
    "text.parse_math": False,
    "svg.hashsalt": "",
}  # salted: equal numbers, equal files
SMALL = 9  # points, the smallest text here


def title(name: str) -> str:
    """What a policy is called in tables and figures: "grpo 2e-05" at this rate; without a look by its own name."""
    return " at ".join(LOOKS[part][0] if part in LOOKS else part for part in name.split())


def color(name: str) -> str:
    """A policy's color in every figure; for a method without a look one of a few, by its name."""
    return LOOKS.get(name.partition(" ")[0], ("", OTHERS[zlib.crc32(name.encode()) % len(OTHERS)]))[
        1
    ]


def bootstrap_interval(
    values: Tensor, groups: Tensor | None = None, *, samples: int = 1000
) -> tuple[float, float]:
    """95% percentile interval of the mean of values (N) or (runs, N), resampling runs and problems. Problems of one
    group (N) come and go together: those that show the same prompt are not independent."""
    values = torch.atleast_2d(values).double()
    runs, N = values.shape
    groups = torch.arange(N) if groups is None else groups
    sizes, generator = torch.bincount(groups), torch.Generator().manual_seed(0)
    sums = torch.zeros(runs, len(sizes), dtype=torch.float64).index_add_(1, groups, values)
    drawn = torch.randint(len(sizes), (samples, len(sizes)), generator=generator)
    means = sums[:, drawn].sum(-1) / sizes[drawn].sum(-1)  # (runs, samples)
    draws = means.gather(0, torch.randint(runs, (runs, samples), generator=generator)).mean(0)
    return tuple(
        draws.quantile(torch.tensor([(1 - 0.95) / 2, (1 + 0.95) / 2], dtype=torch.float64)).tolist()
    )


def print_table(heading: str, measures: dict[str, dict[str, Tensor]], n: int) -> None:
    """One row per policy; best@k, pass@k and W@k at a few budgets up to n, then the measures of variety: means."""
    ks = [k for k in (1, 3, 10) if k < n] + [n]
    passes = ["pass@1"] * any(values[f"pass@{n}"].any() for values in measures.values())
    columns = [f"best@{k}" for k in ks] + [
        *passes,
        f"pass@{n}",
        f"W@{n}",
        "diversity",
        "pareto_share",
        "coverage",
    ]
    print(
        f"\n{heading}\n"
        + " " * 20
        + "".join(f"{name.removesuffix('_share'):>11}" for name in columns)
    )
    for policy, values in measures.items():
        print(
            f"{title(policy):20}" + "".join(f"{values[column].mean():11.3f}" for column in columns)
        )
    if not any(values["diversity"].any() for values in measures.values()):
        print(
            "all candidates of all policies earned the same: nothing was learnt, or nothing can be"
        )


def cost(method: str, rows: list[dict], m: int) -> str:
    """What a method was given in training, by its metrics and answers per rollout: was the comparison fair?"""
    rollouts, tokens = (sum(row[name] for row in rows) for name in ("rollouts", "tokens"))
    return f"{title(method)} {len(rows)} steps, {rollouts * m:,} answers, {tokens:,} tokens"


def crossing(ours: list[float], theirs: list[float]) -> int | None:
    """The first position at which ours is above theirs and at the one before was not; None if there is none."""
    ahead = [a > b for a, b in zip(ours, theirs, strict=True)]
    return next((i for i in range(1, len(ahead)) if ahead[i] and not ahead[i - 1]), None)


def best_at_k(report: dict, path: Path) -> None:
    """What the best of k candidates is worth, against k, with a ring where VPO, else the last method, overtakes GRPO,
    else the first; `report` is what eval.json holds: settings, policies. pass@k is drawn if any policy has passed."""
    settings, policies, seeds = (
        report["settings"],
        report["policies"],
        report["settings"].get("seeds", 1),
    )
    ks = sorted(
        int(key.removeprefix("best@"))
        for key in next(iter(policies.values()))
        if key.startswith("best@")
    )
    ticks = [
        k for k, after in zip(ks, [*ks[1:], math.inf], strict=True) if after > 1.2 * k
    ]  # labels need room
    panels = {
        "best": "best@k: the task's own scalar",
        "W": "W@k: a random weighting of the objectives",
    }
    if any(policy[f"pass@{k}"]["mean"] > 0 for policy in policies.values() for k in ks):
        panels["pass"] = "pass@k: one of k is a full solution"
    trained = [name for name in policies if not name.startswith("start")] or list(policies)
    ours, theirs = (
        "vpo" if "vpo" in trained else trained[-1],
        "grpo" if "grpo" in trained else trained[0],
    )
    with _figure(1, len(panels), (4.4 * len(panels), 4.2)) as (figure, axes):
        axes[0, 1].sharey(axes[0, 0])
        for ax, (kind, heading) in zip(axes[0], panels.items(), strict=True):
            curves = {
                name: [policy[f"{kind}@{k}"]["mean"] for k in ks]
                for name, policy in policies.items()
            }
            for name, means in curves.items():
                low, high = zip(
                    *(policies[name][f"{kind}@{k}"]["interval"] for k in ks), strict=True
                )
                thin = len(curves) > 7 and name.split(" 2")[0] not in (
                    "start",
                    "grpo",
                    "max_at_k",
                    "vpo",
                    "group_vpo",
                )
                ax.plot(ks, means, **_line(name) | ({"lw": 0.7, "ms": 4} if thin else {}))
                ax.fill_between(ks, low, high, color=color(name), alpha=0 if thin else 0.15, lw=0)
            if " " not in ours and (i := crossing(curves[ours], curves[theirs])) is not None:
                at, (bottom, top) = (ks[i], curves[ours][i]), ax.get_ylim()
                ax.plot(
                    *at,
                    "o",
                    ms=13,
                    mfc="none",
                    mec="black",
                    mew=1.3,
                    zorder=4,
                    label=f"first k with {title(ours)} above {title(theirs)}",
                )
                beside = (5, -20) if at[1] > bottom + 0.2 * (top - bottom) else (-25, 12)
                ax.annotate(
                    f"k = {ks[i]}",
                    at,
                    beside,
                    textcoords="offset points",
                    zorder=5,
                    bbox={"boxstyle": "round,pad=0.15", "fc": "white", "ec": "none", "alpha": 0.8},
                )
            ax.set(xscale="log", title=heading, xlabel="candidates k", xlim=(0.9, 1.12 * ks[-1]))
            ax.set_xticks(ticks, ticks)
            ax.minorticks_off()
        axes[0, 0].set_ylabel("expected best of k")
        for ax in axes[0, 2:]:
            ax.set(ylabel="share of problems", ylim=(0, None))
        few = "at least " * settings.get("uneven", False)
        bands = (
            f"mean of {few}{seeds} seeds, bands: 95% over seeds and"
            if seeds > 1
            else "one run, bands: 95% over"
        )
        _finish(
            figure,
            axes,
            path,
            f"{settings['problems']} {settings['split']} problems, {settings['size']} "
            f"candidates each at temperature {settings['temperature']:g}; {bands} problems",
        )


def training(logs: dict[str, list[dict]], temperature: float, path: Path, window: int = 10) -> None:
    """Diversity and reward of the training's own rollouts, step by step: by method the rows of its metrics.jsonl. In
    step 1 every method still samples from the start model, so the methods' mean there is its level."""
    logs, headings = (
        {name: rows for name, rows in logs.items() if rows},
        {
            "diversity": ("diversity of training rollouts", "mean pairwise L1 distance"),
            "reward": ("mean reward of training rollouts", "the task's own scalar"),
            "answers": ("answers parsed in training", "share of those asked for"),
        },
    )
    headings = {
        key: heading
        for key, heading in headings.items()
        if all(key in rows[0] for rows in logs.values())
    }
    means, first = (
        ("Running means", "start model (step 1)")
        if window > 1
        else ("Means", "mean of steps 1 to 10")
    )
    with _figure(1, len(headings), (4.5 * len(headings), 4.1)) as (figure, axes):
        for ax, (key, (heading, unit)) in zip(axes[0], headings.items(), strict=True):
            for name, rows in logs.items():
                curve = torch.tensor([[row["step"], row[key]] for row in rows])
                ax.plot(*curve.T, color=color(name), alpha=0.2, lw=0.8)
                smooth = curve.unfold(0, min(window, len(rows)), 1).mean(-1)
                ax.plot(*smooth.T, **_line(name), markevery=max(1, len(smooth) // 10))
            if logs and key != "answers":  # of which sets give fewer
                start = sum(rows[0][key] for rows in logs.values()) / len(logs)
                ax.axhline(start, color=color("start"), ls="--", label=first)
            ax.set(
                title=f"{heading} (temperature {temperature:g})",
                xlabel="training step",
                ylabel=unit,
            )
        axes[0, 0].set_ylim(0, None)
        _finish(
            figure,
            axes,
            path,
            f"{means} of 10 steps; tables and other figures sample held-out problems, at their "
            "own temperature",
        )


def reward_vectors(pools: dict[str, Tensor], labels: list[str], path: Path, index: int) -> None:
    """One problem's reward vectors, a panel per policy, in the two objectives that conflict most over all problems.
    pools: rewards (N, n, k) by policy; labels: k names, or none if k differs."""
    pools = {name: rewards for name, rewards in pools.items() if name != "start_sets"}
    here = torch.stack([rewards[index] for rewards in pools.values()])  # (policies, n, k)
    x, y = _conflict(torch.cat(list(pools.values())), here.flatten(0, 1).any(0) | bool(labels))
    names = labels or [f"objective {i + 1}" for i in range(here.shape[-1])]
    low, high = min(0.0, here[..., [x, y]].min().item()), max(1.0, here[..., [x, y]].max().item())
    limits = low - 0.17 * (high - low), high + 0.17 * (high - low)
    rows, columns = math.ceil(len(pools) / 4), min(len(pools), 4)
    with _figure(rows, columns, (2.8 * columns, 3.2 * rows + 0.4), sharex=True, sharey=True) as (
        figure,
        axes,
    ):
        for ax in axes.flat[len(pools) :]:
            ax.set_visible(False)
        for ax, name, vectors in zip(axes.flat, pools, here, strict=False):
            points, counts = vectors[:, [x, y]].unique(dim=0, return_counts=True)
            for point, count in zip(points.tolist(), counts.tolist(), strict=True):
                share, style = (
                    count / len(vectors),
                    {"edgecolor": color(name), "lw": 1.3, "clip_on": False},
                )
                ax.scatter(
                    *point,
                    s=25 + 900 * share,
                    facecolor=(color(name), 0.3),
                    zorder=3 - share,
                    **style,
                )
                if count > 1:  # inside its circle, or beside if that is small
                    at = (
                        {"xytext": (0, 0), "ha": "center"}
                        if share >= 0.2
                        else {"xytext": (6, 6), "ha": "left"}
                    )
                    ax.annotate(
                        str(count),
                        point,
                        **at,
                        textcoords="offset points",
                        va="center_baseline",
                        zorder=4,
                    )
            distinct = len(vectors.unique(dim=0))
            view = f", {len(points)} in this view" * (len(points) < distinct)
            ax.set(
                title=f"{title(name)}\n{distinct} distinct{view}",
                xlabel=names[x],
                xlim=limits,
                ylim=limits,
            )
            ax.locator_params(nbins=5)
            ax.tick_params(labelbottom=True)
            ax.grid(alpha=0.25, lw=0.6)
        for ax in axes[:, 0]:
            ax.set_ylabel(names[y])
        _finish(
            figure,
            axes,
            path,
            f"Reward vectors for problem {index + 1}, {here.shape[1]} candidates per policy; "
            "a number: so many at one place, a bare dot: one",
        )


def answers(
    pools: dict[str, tuple[list[list[str]], list[Tensor]]],
    problems: list,
    task: Any,
    path: Path,
    columns: int = 4,
    when: str = "",
) -> bool:
    """The answers to the first problems, drawn by the task, a row per policy, if task.wide a column; False: it cannot.
    pools: by policy N lists of answers and N of their rewards (n, k); `when`: the heading of a film's picture."""
    names, columns = [name for name in pools if name != "start_sets"], min(columns, len(problems))
    solved = {
        name: sum(bool((rewards >= 1).all(-1).any()) for rewards in pools[name][1])
        for name in names
    }
    bold = {"fontsize": 12, "fontweight": "bold"}
    width, height = (3.9, 2.3) if task.wide else (2.4, 2.5)
    shape = (columns, len(names)) if task.wide else (len(names), columns)
    with _figure(*shape, (width * shape[1], height * shape[0] + 0.6)) as (figure, axes):
        for row, name in zip(axes.T if task.wide else axes, names, strict=True):
            texts, rewards = pools[name]
            for i, ax in enumerate(row):
                if not task.draw(
                    ax, problems[i], [text for text in texts[i] if text is not None], color(name)
                ):
                    return False
                ax.spines[:].set_visible(False)
                summary = textwrap.fill(task.summary(rewards[i]), int(15 * width))
                lines = "\n" * (
                    when > "" and "\n" not in summary
                )  # two in every picture, so that nothing moves
                ax.set_title(lines + summary, loc="left" if task.wide else "center", fontsize=SMALL)
            heading = title(name) + f"\nsolves {solved[name]} of {len(problems)} problems" * any(
                solved.values()
            )
            if task.wide:  # above the first drawing's title
                above = 10 + 12 * (row[0].get_title("left").count("\n") + 1)
                row[0].annotate(
                    heading, (0, 1), (0, above), "axes fraction", "offset points", **bold
                )
            else:
                row[0].set_ylabel(heading, **bold)
        figure.suptitle(when, **bold)
        _finish(
            figure,
            axes,
            path,
            f"{columns} of {len(problems)} problems, {len(texts[0])} candidates per policy",
        )
    return True


def run_figures(
    folder: Path,
    suffix: str,
    report: dict,
    logs: dict[str, list[dict]],
    temperature: float,
    task: Any,
    pools: dict[str, Any],
) -> None:
    """The four figures of one run's evaluation, each explained at its function; pools: eval.Pool by policy."""
    files = [
        folder / f"{name}.{suffix}"
        for name in ("best_at_k", "diversity", "reward_vectors", "answers")
    ]
    vectors = {name: pool.rewards for name, pool in pools.items()}
    best_at_k(report, files[0])
    training(logs, temperature, files[1])
    reward_vectors(vectors, task.objectives, files[2], typical_problem(vectors))
    drawn = answers(
        {name: (pool.answers, pool.vectors()) for name, pool in pools.items()},
        pools["start"].problems,
        task,
        files[3],
    )
    print(f"figures: {', '.join(map(str, files if drawn else files[:3]))}")


def against(
    points: dict[str, tuple[float, float, float, float]],
    path: Path,
    xlabel: str,
    ylabel: str,
    caption: str,
) -> None:
    """Points with a vertical interval, each by its name: name -> (x, y, low, high)."""
    with _figure(1, 1, (6.4, 4.2)) as (figure, axes):
        ax = axes[0, 0]
        for i, (name, (x, y, low, high)) in enumerate(
            points.items()
        ):  # names in turn above and below
            ax.errorbar(x, y, [[y - low], [high - y]], fmt="o", color=color("vpo"), capsize=3)
            ax.annotate(name, (x, y), (6, -15 if i % 2 else 6), textcoords="offset points")
        ax.axhline(0, color="#999999", lw=0.8)
        ax.set(xlabel=xlabel, ylabel=ylabel)
        ax.margins(x=0.15)
        _finish(figure, axes, path, caption)


def settings(panels: dict[str, dict[str, dict[str, tuple]]], path: Path, caption: str) -> None:
    """A panel for every flag that was varied: flag -> value -> measure -> (mean, low, high)."""
    columns, looks = math.ceil(len(panels) / 2), (("s", "grpo"), ("o", "vpo"), ("^", "max_at_k"))
    with _figure(2, columns, (2.4 * columns + 1, 5.6), sharey=True) as (figure, axes):
        for ax, (heading, values) in zip(axes.flat, panels.items(), strict=False):
            for name, (mark, shade) in zip(next(iter(values.values())), looks, strict=False):
                means, low, high = torch.tensor(
                    [each[name][:3] for each in values.values()]
                ).T.numpy()
                ax.errorbar(
                    list(values),
                    means,
                    [means - low, high - means],
                    label=name,
                    marker=mark,
                    color=color(shade),
                    capsize=3,
                )
            ax.set_title(heading)
            ax.margins(x=0.15)
        for ax in axes.flat[len(panels) :]:
            ax.set_axis_off()
        _finish(figure, axes, path, caption)


def search(ticks: list[int], found: dict[str, list[dict]], path: Path) -> None:
    """What was solved and how well against scored candidates: found[policy][run] as in search.json; faint: one run."""
    panels = {
        "solved": "share of problems solved",
        "best": "mean best score",
        "behaviours": "distinct reward vectors",
    }
    with _figure(1, 3, (13.2, 4.2)) as (figure, axes):
        for ax, (key, heading) in zip(axes[0], panels.items(), strict=True):
            for name, runs in found.items():
                each = torch.tensor(
                    [run[key] for run in runs], dtype=torch.float64
                )  # (runs, N, ticks)
                if key == "solved":  # (runs, N)
                    each = (
                        (each[..., None] > 0) & (each[..., None] <= torch.tensor(ticks))
                    ).double()
                each = each.mean(1).float()
                ax.plot(ticks, each.T, color=color(name), alpha=0.3, lw=0.8)
                ax.plot(ticks, each.mean(0), **_line(name) | {"marker": ""})
            ax.set(title=heading, xscale="log", xlabel="candidates scored for a problem")
            ax.xaxis.set_major_formatter("{x:,.0f}")
            ax.grid(alpha=0.25, lw=0.6)
        some = next(iter(found.values()))
        _finish(
            figure, axes, path, f"{len(some[0]['solved'])} problems; bold: mean of {len(some)} runs"
        )


def family(populations: dict[str, list], targets: list[float], path: Path) -> None:
    """The candidates of one solved problem, each joined to its parent; the solution's line is bold, its answers beside.
    The problem: where the line of a trained policy passes through most scores."""

    def line(candidates: list, at: int) -> list:
        return [] if at == 0 else [*line(candidates, candidates[at - 1].parent), candidates[at - 1]]

    solved = [
        (line(each.candidates, at), name, i)
        for name, found in populations.items()
        for i, each in enumerate(found)
        if not name.startswith("start") and (at := each.solved(targets[i]))
    ]
    winners, name, i = max(
        solved, key=lambda row: len({c.score for c in row[0]}), default=([], "", 0)
    )
    candidates = populations[name][i].candidates[: winners[-1].order] if winners else []
    with _figure(1, 2, (13.2, 4.6), width_ratios=(3, 4)) as (figure, axes):
        ax, beside = axes[0]
        for c in candidates:
            before = candidates[c.parent - 1]
            ax.plot(
                [before.order, c.order][c.parent == 0 :],
                [before.score, c.score][c.parent == 0 :],
                ".-",
                ms=4,
                color=color("start"),
                lw=0.5,
                alpha=0.5,
            )
        ax.plot(
            [c.order for c in winners], [c.score for c in winners], "o-", color=color(name), lw=2
        )
        ax.set(xlabel="candidate", ylabel="score")
        beside.set_axis_off()
        kept = winners if len(winners) < 9 else [*winners[:2], *winners[-6:]]
        text = "\n".join(
            f"{c.order:>5}  {c.score:.3f}  "
            + textwrap.fill(" ".join(c.answer.split()), 70, max_lines=2, subsequent_indent=15 * " ")
            for c in kept
        )
        beside.text(
            0, 1, "order  score  answer\n" + text, va="top", family="monospace", fontsize=SMALL
        )
        _finish(
            figure,
            axes,
            path,
            "no problem was solved by a trained policy"
            if not winners
            else f"{title(name)}, "
            f"problem {i + 1}: bold the answers that led to its solution, thin all others, all joined to parents",
        )


def typical_problem(pools: dict[str, Tensor]) -> int:
    """The problem of median gap in diversity between first and last method, not a hand-picked one: pools (N, n, k)."""
    methods = [rewards for name, rewards in pools.items() if not name.startswith("start")]
    first, last = (
        torch.cdist(rewards, rewards, p=1).sum((1, 2)) for rewards in (methods[0], methods[-1])
    )
    return int((last - first).argsort(stable=True)[len(first) // 2])


def _conflict(rewards: Tensor, eligible: Tensor) -> tuple[int, int]:
    """The two eligible (k) objectives with the lowest correlation over all that scored in rewards (N, n, k)."""
    scored = rewards[rewards.any(-1)]
    matrix = torch.corrcoef((scored if len(scored) > 1 else rewards.flatten(0, 1)).T).reshape(
        len(eligible), -1
    )
    matrix = matrix.nan_to_num(1.0).fill_diagonal_(2.0)
    if eligible.sum() > 1:
        matrix[~eligible], matrix[:, ~eligible] = 3.0, 3.0
    return divmod(int(matrix.argmin()), len(matrix))


def _line(name: str) -> dict:
    _, _, marker, style = LOOKS.get(
        name.partition(" ")[0], ("", "", "PX*<>hp8"[zlib.crc32(name.encode()) % 8], "-")
    )
    return {
        "label": title(name),
        "color": color(name),
        "marker": marker,
        "ls": ":" if " 5" in name else style,
        "lw": 2,
        "ms": 5.5,
        "mec": "white",
        "mew": 0.5,
    }


@contextlib.contextmanager
def _figure(
    rows: int, columns: int, size: tuple[float, float], **options
) -> Iterator[tuple[Any, Any]]:
    """A figure in the project's style and its axes (rows, columns). Not pyplot's: no window, and nothing to close."""
    import matplotlib
    from matplotlib.figure import Figure

    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=size, layout="constrained")
        yield figure, figure.subplots(rows, columns, squeeze=False, **options)


def _finish(figure: Any, axes: Any, path: Path, caption: str) -> None:
    """Adds a line below all panels and a legend above them, where it hides nothing, and writes the file."""
    figure.supxlabel(textwrap.fill(caption, int(14 * figure.get_figwidth())), fontsize=SMALL)
    shown = {
        label: handle
        for ax in axes.flat
        for handle, label in zip(*ax.get_legend_handles_labels(), strict=True)
    }
    if shown:
        rows = math.ceil(len(shown) / (figure.get_figwidth() // 1.7))
        figure.legend(
            shown.values(),
            shown.keys(),
            loc="outside upper center",
            ncols=math.ceil(len(shown) / rows),
        )
    undated = {".svg": {"Date": None}, ".pdf": {"CreationDate": None}}.get(Path(path).suffix)
    figure.savefig(path, dpi=150, metadata=undated)
