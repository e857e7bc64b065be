"""The page of headlines, docs/headlines.html: what GRPO and VPO wrote while they were trained."""

from pathlib import Path

from engine.config import Config, Parser
from engine.tasks import load_task, take_problems
from report.page import write_page
from report.snapshots import Frame, Snapshots
from rewards import Problem, Task
from study.grid import HEADLINE, Cell
from study.store import Store

METHODS = ("grpo", "vpo")
# Held-out texts on the page, in this order. On the last one GRPO writes VPO's headlines, too, mostly one.
TEXTS = (1, 2, 0)
PAGE = Path("docs/headlines.html")


def cells_shown() -> list[Cell]:
    """The runs of the page, one of each method."""
    return [Cell(HEADLINE, method, 0) for method in METHODS]


def write_exhibit(store: Store, path: Path) -> None:
    """Write the page from the stored runs of seed 0."""
    write_page(path, snapshots_of(store))


def snapshots_of(store: Store) -> Snapshots:
    """What the start model and the methods answered to some held-out texts: step 0, then those stored."""
    cells = cells_shown()
    records = {cell.method: record for cell, record in store.current(cells).items()}
    config = Parser(Config, "train.py", "").parse_args_into_dataclass(cells[0].command)[0]
    task = load_task(config.task)
    held_out = take_problems(task, "test", len(TEXTS))
    problems = [held_out[i] for i in TEXTS]
    start = records["grpo"]["answers"]
    start_of = {"grpo": start["start"], "vpo": start["start_sets"]}

    by_step = {0: start_of}  # step -> method -> answers to each text
    for method, record in records.items():
        for step, answers in record["during"].items():
            by_step.setdefault(int(step), {})[method] = answers
    frames = []
    for step, answers in sorted(by_step.items()):
        pools = {}
        for method in METHODS:
            shown = [answers[method][i] for i in TEXTS]
            pools[method] = records_of(task, problems, shown)
        frames.append(Frame(step, pools))
    metrics = {method: curve_of(record["training"]) for method, record in records.items()}
    return Snapshots(config, task, problems, frames, metrics)


def records_of(task: Task, problems: list[Problem], answers: list[list[str | None]]) -> list[dict]:
    """Answers (n) to each problem with their rewards (n, d), as a snapshot holds them.

    An empty slot earns what "" does.
    """
    records = []
    for problem, own in zip(problems, answers, strict=False):
        rewards = [task.reward(problem, text or "") for text in own]
        records.append({"answers": own, "rewards": rewards})
    return records


def curve_of(training: dict[str, list[float]]) -> list[dict]:
    """The stored means over ten steps each as rows of a log."""
    rows = []
    for diversity, reward in zip(training["diversity"], training["reward"], strict=True):
        step = 10 * len(rows) + 5
        rows.append({"step": step, "diversity": diversity, "reward": reward})
    return rows
