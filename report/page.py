"""The page and the film of a run, from its metrics and its snapshots; frames: (step, {method: a record for each problem
of answers (n), None where a slot was left empty, and rewards (n, k)})."""

import itertools
import json
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor

import vpo
from report import plots

MOST = (
    1_900_000  # bytes of a page or a film; where there would be more, every other frame is left out
)


def write_page(
    path: Path, task: Any, flags: dict, problems: list, frames: list, logs: dict[str, list[dict]]
) -> None:
    """One HTML file that needs no other: page.html with page.js and the data in it; logs: metrics by method."""
    sizes, here = (
        {name: vpo.answers_per_rollout(name, flags["m"]) for name in logs},
        Path(__file__).parent,
    )
    data = {
        "task": task.name,
        "objectives": task.objectives,
        "temperature": flags["eval_temperature"],
        "draws": flags["n_weights"],
        "steps": [step for step, _ in frames],
        "methods": [
            {
                "name": name,
                "title": plots.title(name),
                "color": plots.color(name),
                "m": sizes[name],
                "curve": [
                    [row[key] for key in ("step", "diversity", "reward")]
                    for row in rows[:: 1 + len(rows) // 500]
                ],
            }
            for name, rows in logs.items()
        ],
        "problems": [
            _problem(
                task,
                flags,
                sizes,
                problem,
                [{name: pools[name][i] for name in sizes} for _, pools in frames],
            )
            for i, problem in enumerate(problems)
        ],
    }
    page = (here / "page.html").read_text().replace("/*SCRIPT*/", (here / "page.js").read_text())
    page = page.replace("/*DATA*/", json.dumps(data, separators=(",", ":")).replace("<", "\\u003c"))
    if len(page) > MOST and len(frames) > 2:
        return write_page(path, task, flags, problems, [*frames[:-1:2], frames[-1]], logs)
    path.write_text(page)


def _problem(
    task: Any, flags: dict, sizes: dict[str, int], problem: Any, frames: list[dict[str, dict]]
) -> dict:
    """What the page knows of a problem: its distinct answers (routes as cells), by number those of every pool; where a
    rollout holds several also what vpo.py makes of them: the best under five weightings, R(S) and the advantages."""
    numbers, pools = {}, [{} for _ in frames]
    grid = (
        isinstance(problem.data, dict)
        and hasattr(task, "walk")
        and problem.data.get("grid")
        or None
    )
    k = len(frames[0][next(iter(sizes))]["rewards"][0])
    weights = vpo.sample_weights(
        flags["n_weights"],
        k,
        alpha=flags["alpha"],
        sampler=flags["sampler"],
        generator=torch.Generator().manual_seed(flags["seed"]),
    )
    for (frame, found), (name, m) in itertools.product(
        zip(frames, pools, strict=True), sizes.items()
    ):
        rewards = torch.tensor(frame[name]["rewards"])
        pairs, G = (
            zip(frame[name]["answers"], map(tuple, frame[name]["rewards"]), strict=True),
            len(rewards) // m,
        )
        found[name] = {
            "summary": task.summary(rewards),
            "answers": [numbers.setdefault(pair, len(numbers)) for pair in pairs],
        }
        if (
            m > 1 < G
        ):  # an empty slot, the minimum in each component, is never better than an answer
            best = vpo.set_scores(rewards[: G * m].view(1, G, m, k), weights[None])  # (1, G, K)
            found[name] |= {
                "best": _plain(best[0, :, :5]),
                "R": _plain(best[0].mean(-1)),
                "A": _plain(vpo.group_normalize(best.mean(-1))[0]),
            }
    vectors = [vector for _, vector in numbers]
    return {
        "text": task.prompt(problem, 1)[:3000],
        "grid": grid,
        "pools": pools,
        "answers": [
            text and (task.walk(problem, text) if grid else text[:600]) for text, _ in numbers
        ],
        "vectors": vectors,
        "scalars": _plain(task.scalar(torch.tensor(vectors))),
        "weights": _plain(weights[:5]),
    }


def _plain(numbers: Tensor) -> list:
    return numbers.double().round(decimals=4).tolist()


def write_film(path: Path, task: Any, problems: list, frames: list) -> bool:
    """A GIF of plots.answers, a picture per step; False if the task draws none."""
    pictures = []
    with tempfile.TemporaryDirectory() as folder:
        for step, pools in frames:
            drawn = {
                name: (
                    [record["answers"] for record in records],
                    [torch.tensor(record["rewards"]) for record in records],
                )
                for name, records in pools.items()
            }
            if not plots.answers(
                drawn, problems, task, Path(folder) / "a.png", when=f"after training step {step}"
            ):
                return False
            pictures.append(Image.open(Path(folder) / "a.png").convert("RGB"))
            pictures[-1].thumbnail((1000, 1000))
    colors = Image.fromarray(np.concatenate(pictures[:: 1 + len(pictures) // 20])).quantize(
        128
    )  # the same in all
    pictures = [picture.quantize(palette=colors, dither=Image.Dither.NONE) for picture in pictures]
    while True:
        shown = [400] * (len(pictures) - 1) + [2400]  # ms: the end is looked at for longer
        pictures[0].save(path, append_images=pictures[1:], save_all=True, duration=shown, loop=0)
        if path.stat().st_size < MOST or len(pictures) < 3:
            return True
        pictures = [*pictures[:-1:2], pictures[-1]]
