"""The figures that only the study draws, from plain numbers."""

import math
from pathlib import Path

import torch
from torch import Tensor

from report import style
from study.entries import HIGHLIGHTED, Entry
from study.stored import Difference


def two_halves(points: dict[str, tuple[float, Difference, Difference]], path: Path) -> None:
    """Draw what sets gained and what the vector gained, by how much of the variance the scalar misses.

    Args:
        points: by reward the variance share, Max@K - GRPO and Group VPO - Max@K, both in W@30.
        path: the file that is written.
    """
    halves = (
        ("a set instead of single answers: Max@K - GRPO", "max_at_k"),
        ("a vector instead of the scalar: Group VPO - Max@K", "group_vpo"),
    )
    shares = sorted(x for x, *_ in points.values())
    with style.new_figure(1, 2, (10.4, 4.2), sharey=True) as axes:
        for half, (ax, (heading, method)) in enumerate(zip(axes[0], halves, strict=True)):
            policy = Entry(method)
            for i, (name, (x, *gains)) in enumerate(points.items()):  # by rising x
                gain = gains[half]
                interval = [[gain.mean - gain.low], [gain.high - gain.mean]]
                ax.errorbar(
                    x, gain.mean, interval, fmt=policy.look.marker, color=policy.color, capsize=3
                )
                # On the side of the farther neighbour, so that names keep apart.
                before = x - shares[i - 1] if i else 1
                after = shares[i + 1] - x if i + 1 < len(shares) else 1
                is_right = after > before
                ax.annotate(
                    name,
                    (x, gain.mean),
                    (6 if is_right else -6, -3),
                    textcoords="offset points",
                    ha="left" if is_right else "right",
                )
            ax.axhline(0, color="#999999", lw=0.8)
            ax.set(title=heading, xlabel="variance that the scalar does not see, before training")
            ax.xaxis.set_major_formatter("{x:.0%}")
            ax.margins(x=0.15)
        axes[0, 0].set_ylabel("difference in W@30 after training")
        style.finish(axes, path, "a point per reward, 95% intervals")


def frontier(rows: list[dict[str, dict[Entry, Tensor]]], path: Path) -> None:
    """Draw what each method reaches with one candidate against what it reaches with thirty.

    Args:
        rows: in each of two rows of axes: heading -> policy -> (settings, 2): best@1 and best@30. The
            settings, such as learning rates, are in the order in which they are joined.
        path: the file that is written.
    """
    with style.new_figure(2, 2, (10.4, 7.8)) as axes:
        for of_row, panels in zip(axes, rows, strict=True):
            for ax, (heading, curves) in zip(of_row, panels.items(), strict=True):
                ax.set(title=heading, xlabel="best@1", ylabel="best@30")
                ax.grid(alpha=0.25, lw=0.6)
                for policy, points in curves.items():
                    look = policy.line_style
                    if policy.method not in (*HIGHLIGHTED, "multi_rlvr"):
                        look |= {"lw": 1, "ms": 3.5, "alpha": 0.55}
                    ax.plot(*points.T, **look)
        caption = (
            "The best choice lies at the top right. Above: a point per peak learning rate, validation "
            "problems, temperature 0.7, one seed, for most of GRPO's rates in the maze two. Below: "
            "temperatures 0.7 (right end), 1 and 1.3, held-out problems, three or five seeds."
        )
        style.finish(axes, path, caption)


def ablations(panels: dict[str, dict[str, dict[str, Difference]]], path: Path) -> None:
    """Draw measures against the values of a flag, a panel per flag.

    Args:
        panels: flag -> value -> measure -> its mean and interval, of three measures.
        path: the file that is written.
    """
    columns = math.ceil(len(panels) / 2)
    looks = (("s", "grpo"), ("o", "vpo"), ("^", "max_at_k"))  # a marker, and whose color
    with style.new_figure(2, columns, (2.4 * columns + 1, 5.6), sharey=True) as axes:
        for ax, (heading, values) in zip(axes.flat, panels.items(), strict=False):
            measures = next(iter(values.values()))
            for name, (marker, method) in zip(measures, looks, strict=True):
                points = [by_name[name] for by_name in values.values()]
                bounds = [(point.mean, point.low, point.high) for point in points]
                means, low, high = torch.tensor(bounds).T.numpy()
                ax.errorbar(
                    list(values),
                    means,
                    [means - low, high - means],
                    label=name,
                    marker=marker,
                    color=Entry(method).color,
                    capsize=3,
                )
            ax.set_title(heading)
            ax.margins(x=0.15)
        for ax in axes.flat[len(panels) :]:
            ax.set_axis_off()
        caption = "maze, temperature 0.7; the seeds that all points of a panel have; 95%"
        style.finish(axes, path, caption)
