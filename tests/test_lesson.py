"""The lesson, run from top to bottom in a small size: every solution is right, every wrong answer is told so."""

import copy
import json
import re
from pathlib import Path

import pytest

nbclient = pytest.importorskip(
    "nbclient", reason="nbclient runs the notebook: pip install nbclient ipykernel"
)
nbformat = pytest.importorskip("nbformat")
pytest.importorskip(
    "ipykernel", reason="nbclient runs the notebook: pip install nbclient ipykernel"
)

ROOT = Path(__file__).parent.parent
SIZE = "--steps 2 --warm-steps 2 --prompts-per-step 2 --group-size 2 --eval-problems 4 --pool 8 --snapshots 2"
SMALL = f"""
MAZE = "train.py --task maze --method grpo vpo {SIZE}"
TOY = "train.py --task toy --method grpo vpo {SIZE}"
SEARCH = "search.py runs/lesson-maze --goal diamond --policies grpo vpo --budget 9 --problems 2 --among 4 --screen 0"
"""
WRONG = {
    1: [
        "def best(answers, w):\n    return (answers @ w).mean()",
        "def best(answers, w):\n    return answers.max()",
        "def best(answers, w):\n    return unknown",
    ],
    2: [
        'R = {"C and C": 0.6, "A and C": 0.8, "A and B": 0.75}\nwinner = "A and B"',
        'R = {"C and C": 0.6, "A and C": 0.68, "A and B": 0.75}\nwinner = "C and C"',
        'R = {}\nwinner = "A and B"',
    ],
    3: [
        "def advantage(scores):\n    return (scores - scores.mean()) / scores.std()",
        "def advantage(scores):\n    return (scores - scores.mean()) / scores.std(correction=0)",
        "def advantage(scores):\n    return scores - scores.mean()",
    ],
    4: [
        'earns = {"000 000 000": 0.8, "100 000 000": 0.9}\nbits_at_once = 3',
        'earns = {"000 000 000": 0.8}\nbits_at_once = 3',
        'earns = {"000 000 000": 0.8, "100 000 000": 0.667, "110 000 000": 0.533, "111 000 000": 0.867}\n'
        "bits_at_once = 1",
    ],
    5: [
        "def distinct(pool):\n    return len(pool)",
        "def distinct(pool):\n    return len(set(pool))",
        "def distinct(pool):\n    return max(1, len(set(pool) - {None}))",
    ],
    6: [
        "def best_of(scores, k):\n    return sum(sorted(scores)[-k:]) / k",
        "def best_of(scores, k):\n    return max(scores)",
        "def best_of(scores, k):\n    choices = list(itertools.product(scores, repeat=k))\n"
        "    return sum(map(max, choices)) / len(choices)",
    ],
    7: [
        "def two_rewards(gold, diamond):\n    return gold, diamond",
        "def two_rewards(gold, diamond):\n    return 0.5, 0.5",
        "def two_rewards(gold, diamond):\n    return 1 + gold - diamond, 1 + diamond - gold",
    ],
    8: [
        "def solved_within(solved, budget):\n    return sum(n <= budget for n in solved) / len(solved)",
        "def solved_within(solved, budget):\n    return sum(0 < n <= budget for n in solved)",
    ],
}


def exercise(cell, kind: str) -> int | None:
    """The number of the exercise of which this cell is the `kind`."""
    tags = [tag for tag in cell.metadata.get("tags", []) if tag.startswith(f"{kind}-")]
    return int(tags[0].split("-")[1]) if tags else None


def said(cell) -> str:
    return "".join(output.get("text", "") for output in cell.outputs)


def test_the_lesson_runs_and_every_check_tells_right_from_wrong(tmp_path):
    for name in (
        "vpo.py",
        "rollout.py",
        "rewards.py",
        "train.py",
        "eval.py",
        "search.py",
        "tasks",
        "engine",
        "report",
    ):
        (tmp_path / name).symlink_to(ROOT / name)  # so that runs/ is a folder of its own
    notebook = nbformat.read(ROOT / "lesson.ipynb", as_version=4)
    nbformat.validate(notebook)
    assert not any(cell.outputs for cell in notebook.cells if cell.cell_type == "code")
    solutions = dict(
        re.findall(
            r"<summary>Exercise (\d)</summary>\n\n```python\n(.*?)\n```",
            notebook.cells[-1].source,
            re.DOTALL,
        )
    )
    assert list(solutions) == [str(n) for n in range(1, 9)]
    cells, tried = [], []
    for cell in notebook.cells:
        if (n := exercise(cell, "exercise")) is not None:
            stub = copy.deepcopy(cell)
        elif (n := exercise(cell, "check")) is not None:
            for source in (stub.source, *WRONG[n], solutions[str(n)]):
                cells += [nbformat.v4.new_code_cell(source), copy.deepcopy(cell)]
                tried.append((n, source, cells[-1]))
        else:
            cells.append(cell)
            if "parameters" in cell.metadata.get("tags", []):
                cells.append(nbformat.v4.new_code_cell(SMALL))
    notebook.cells = cells
    nbclient.NotebookClient(
        notebook, timeout=300, resources={"metadata": {"path": str(tmp_path)}}
    ).execute()
    for n, source, cell in tried:
        right = source == solutions[str(n)]
        (verdict,) = (line for line in said(cell).splitlines() if line.startswith("Exercise"))
        assert verdict.startswith(f"Exercise {n}: {'right.' if right else 'not yet. '}"), (
            source,
            said(cell),
        )
        assert right or len(verdict.split("not yet. ")[1]) > 20, (
            f"no word of what is wrong: {verdict}"
        )
    assert (tmp_path / "runs/lesson-maze/film.gif").exists() and (
        tmp_path / "runs/lesson-search/search.json"
    ).exists()
    pictures = [
        output
        for cell in cells
        for output in cell.get("outputs", [])
        if "image/png" in output.get("data", {})
    ]
    assert len(pictures) >= 5


def test_the_notebook_is_what_the_teachers_page_says():
    source = json.dumps(json.loads((ROOT / "lesson.ipynb").read_text()))
    plan = (ROOT / "docs/lesson.md").read_text()
    for n in WRONG:
        assert f"Exercise {n}." in source and f"| {n} |" in plan
