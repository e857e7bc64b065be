"""The page and the film of a run, from its metrics and its snapshots.

A frame of the snapshots holds a step, and by method one record per problem: its "answers" (n),
None where a slot was left empty, and their "rewards" (n, d).
"""

import json
import tempfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
from PIL import Image
from torch import Tensor

import vpo
from report import plots
from report.drawings import Drawing, FenceDrawing, drawing_of
from report.looks import look_of
from report.snapshots import Snapshots, utility
from rewards import Problem, Task, UserError

MAX_BYTES = 1_900_000  # of a page or a film; one that is larger leaves out every other frame


def write_page(path: Path, snapshots: Snapshots) -> None:
    """Write one HTML file that needs no other: page.html with page.js and the data in it."""

    def write(frames: list) -> None:
        path.write_text(_page(replace(snapshots, frames=frames)), "utf-8")

    _write_small(path, snapshots.frames, write)


def write_film(path: Path, snapshots: Snapshots) -> None:
    """Write a GIF with a picture of the answers per frame, of a task that draws."""
    drawing = drawing_of(snapshots.task)
    if drawing is None:
        problem = f"task {snapshots.task.name} draws no answers"
        raise UserError(f"film: {problem}; python -m report page shows their text")
    pictures = []
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "picture.png"
        for frame in snapshots.frames:
            pools = {}
            for name, records in frame.pools.items():
                rewards = [torch.tensor(record["rewards"]) for record in records]
                pools[look_of(name)] = ([record["answers"] for record in records], rewards)
            heading = f"after {frame.step} of {snapshots.config.steps} training steps"
            plots.answers(pools, snapshots.problems, drawing, file, heading)
            picture = Image.open(file).convert("RGB")
            picture.thumbnail((1000, 1000))
            pictures.append(picture)

    some = np.concatenate(pictures[:: 1 + len(pictures) // 20])
    method = Image.Quantize.MAXCOVERAGE  # a color may be rare
    colors = Image.fromarray(some).quantize(64, method)  # the same palette for all pictures
    pictures = [picture.quantize(palette=colors, dither=Image.Dither.NONE) for picture in pictures]

    def write(pictures: list) -> None:
        durations = [400] * (len(pictures) - 1) + [2400]  # ms, the last picture stays for longer
        options = {"save_all": True, "duration": durations, "loop": 0}
        pictures[0].save(path, append_images=pictures[1:], **options)

    _write_small(path, pictures, write)


def _write_small(path: Path, frames: list, write: Callable[[list], None]) -> None:
    """Write a file from frames, without every other of them as often as it is too large."""
    write(frames)
    while path.stat().st_size > MAX_BYTES and len(frames) > 2:
        frames = [*frames[:-1:2], frames[-1]]
        write(frames)
    print(f"written: {path}")


def _page(snapshots: Snapshots) -> str:
    config = snapshots.config
    drawing = drawing_of(snapshots.task) or Drawing()
    shown = plots.distinct_problems(snapshots.problems)
    gaps = []  # of each problem that is shown, between the best and the worst method's W@n at the end
    for i in shown:
        worths = [utility(records[i]) for records in snapshots.frames[-1].pools.values()]
        gaps.append(max(worths) - min(worths))
    data = {
        "task": snapshots.task.name,
        "model": Path(config.model).name,  # not where it lies
        "seed": config.seed,
        "objectives": snapshots.task.objectives,
        "legend": drawing.legend,
        "paints": isinstance(drawing, FenceDrawing),  # answers are colors
        "marks": type(drawing).marks is not Drawing.marks,
        "temperature": config.eval_temperature,
        "draws": config.n_weights,
        "steps": [frame.step for frame in snapshots.frames],
        "methods": [_method(name, rows, config.m) for name, rows in snapshots.metrics.items()],
        "problems": [_problem(snapshots, drawing, i) for i in shown],
        "opens": gaps.index(max(gaps)),
    }
    text = json.dumps(data, separators=(",", ":")).replace("<", "\\u003c")  # holds no </script>

    folder = Path(__file__).parent
    page = (folder / "page.html").read_text("utf-8")
    page = page.replace("/*SCRIPT*/", (folder / "page.js").read_text("utf-8"))
    return page.replace("/*DATA*/", text)


def _method(name: str, rows: list[dict], m: int) -> dict:
    """A method on the page; of long logs a part of the rows."""
    rows = rows[:: 1 + len(rows) // 500]
    look = look_of(name)
    return {
        "name": name,
        "title": look.title,
        "color": look.color,
        "m": vpo.answers_per_rollout(name, m),
        "curve": [(row["step"], row["diversity"], row["reward"]) for row in rows],
    }


def _problem(snapshots: Snapshots, drawing: Drawing, i: int) -> dict:
    """A problem on the page.

    Every distinct pair of answer and reward vector is held once and has a number. The pools of
    all frames and methods name their answers by these numbers. Routes are held as cells.
    """
    task = snapshots.task
    config = snapshots.config
    problem = snapshots.problems[i]
    records = next(iter(snapshots.frames[0].pools.values()))  # of any method
    d = len(records[i]["rewards"][0])
    options = {"alpha": config.alpha, "generator": torch.Generator().manual_seed(config.seed)}
    weights = vpo.sample_weights(1, config.n_weights, d, **options)  # (1, K, d)

    numbers: dict[tuple, int] = {}  # (answer, reward vector) -> its number
    pools = []
    for frame in snapshots.frames:
        by_method = {}
        for name, records in frame.pools.items():
            record = records[i]
            pairs = zip(record["answers"], map(tuple, record["rewards"]), strict=True)
            rewards = torch.tensor(record["rewards"])  # (n, d)
            by_method[name] = {
                "summary": drawing.summary(rewards),
                "answers": [numbers.setdefault(pair, len(numbers)) for pair in pairs],
                **_set_rewards(rewards, vpo.answers_per_rollout(name, config.m), weights),
            }
        pools.append(by_method)

    texts = []  # the problem in words, for each number of answers
    for m in sorted({vpo.answers_per_rollout(name, config.m) for name in snapshots.metrics}):
        number = "one answer" if m == 1 else f"{m} answers"
        texts.append(f"[{number} a rollout]\n{task.prompt(problem, m)[:3000]}")
    return {
        "text": "\n\n".join(texts),
        "grid": problem.data["grid"] if _is_maze(task) else None,
        "pools": pools,
        "answers": [_shown_answer(task, problem, text) for text, _ in numbers],
        "marks": [drawing.marks(problem, text or "") for text, _ in numbers],
        "vectors": [vector for _, vector in numbers],
        "weights": _rounded(weights[0, :5]),
    }


def _is_maze(task: Task) -> bool:
    """Whether the page draws the task's routes: of a maze, or of a task that is made of one."""
    return any(base.__module__ == "tasks.maze" for base in type(task).__mro__)


def _shown_answer(task: Task, problem: Problem, text: str | None) -> str | list[int] | None:
    """An answer as the page draws it: the cells of a route, else the beginning of the text."""
    if not text:
        return text
    if _is_maze(task):
        return task.walk(problem, text)
    return text[:600]


def _set_rewards(rewards: Tensor, m: int, weights: Tensor) -> dict[str, list]:
    """Set rewards and advantages of a pool that holds several rollouts of several answers, else nothing.

    Args:
        rewards: (n, d); the answers of a rollout stand together. An empty slot has the minimum in
            each component, so it is never better than an answer.
        m: answers per rollout.
        weights: (1, K, d), preference weights.

    Returns:
        "best", the utility of a set under each of five weights; "R", its mean over all weights;
        "A", the advantages of the rollouts, with all rollouts of the pool as their group.
    """
    G = len(rewards) // m
    if m == 1 or G < 2:
        return {}
    sets = rewards[: G * m].unflatten(0, (1, G, m))  # (1, G, m, d)
    scores = vpo.set_scores(sets, weights)  # (1, G, K)
    R = scores.mean(-1)  # (1, G)
    return {
        "best": _rounded(scores[0, :, :5]),
        "R": _rounded(R[0]),
        "A": _rounded(vpo.group_normalize(R)[0]),
    }


def _rounded(numbers: Tensor) -> list:
    return numbers.double().round(decimals=4).tolist()
