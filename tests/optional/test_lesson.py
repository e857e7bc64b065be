"""The lesson, run from top to bottom in a small size: every solution is right, every wrong answer is told so.

python -m tests.optional.test_lesson    runs it in full (twelve minutes) and stores its figures and numbers in it
"""

import copy
import re
import sys
import tempfile
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from unittest.mock import Mock

import pytest
import torch

from examples.silent_bugs import BUGS, version
from vpo import vpo_advantage

INSTALL = "nbclient runs the notebook: pip install nbclient ipykernel"
nbclient = pytest.importorskip("nbclient", reason=INSTALL)
nbformat = pytest.importorskip("nbformat")
pytest.importorskip("ipykernel", reason=INSTALL)

ROOT = Path(__file__).resolve().parents[2]
LESSON = ROOT / "docs/lesson.ipynb"
PROJECT = "vpo.py rollout.py rewards.py train.py eval.py tasks engine fast report examples"
SIZE = "--steps 2 --warm-steps 2 --prompts-per-step 2 --group-size 2 --eval-problems 4 --pool 8 --snapshots 2 --jobs 1"
SMALL = f"""
MAZE = "train.py --task maze --method grpo vpo {SIZE}"
TOY = "train.py --task toy --method grpo vpo {SIZE} --eval-problems 0"
FENCE = "train.py --task fence --method grpo vpo {SIZE} --eval-problems 0"
SEARCH = "examples/search.py runs/lesson-maze --goal diamond --policies grpo vpo --budget 9 --problems 2 --among 4 --screen 0"
"""
MEAN_OUTSIDE = "def set_rewards(sets, weights):\n    return (sets @ weights.T).amax(1).mean(-1)\n\n"
USES = "def vpo_advantage(sets, weights):\n    return advantage(set_rewards(sets, weights))"
HALF_WAY = (
    "def half_way(start, trained, t):\n"
    "    return {name: start[name] + t * (trained[name] - start[name]) for name in start}"
)
WRONG = {
    1: ["def best(answers, w):\n    return (answers @ w).mean()"],
    2: ['R = {"C and C": 0.6, "A and C": 0.8, "A and B": 0.75}\nwinner = "A and B"'],
    3: ["def advantage(scores):\n    return (scores - scores.mean()) / scores.std()"],
    4: [
        "def set_rewards(sets, weights):\n    return sets.mean((1, 2))\n\n" + USES,
        MEAN_OUTSIDE.replace("amax(1).mean(-1)", "mean((1, 2))") + USES,
        MEAN_OUTSIDE.replace("amax(1).mean(-1)", "mean(-1).amax(1)") + USES,
        MEAN_OUTSIDE + "def vpo_advantage(sets, weights):\n    return set_rewards(sets, weights)",
    ],
    5: ['earns = {"000 000 000": 0.8, "100 000 000": 0.9}\nbits_at_once = 3'],
    6: ["def distinct(pool):\n    return len(set(pool))"],
    7: [
        "def best_of(scores, k):\n    choices = list(itertools.product(scores, repeat=k))\n"
        "    return sum(map(max, choices)) / len(choices)",
        "def best_of(scores, k):\n    return sum(sorted(scores)[-k:]) / k",
    ],
    8: ["def two_rewards(gold, diamond):\n    return 1 + gold - diamond, 1 + diamond - gold"],
    9: [
        "def solved_within(solved, budget):\n    return sum(n <= budget for n in solved) / len(solved)",
        "def solved_within(solved, budget):\n    return sum(0 < n <= budget for n in solved)",
    ],
    10: [
        HALF_WAY.replace("start[name] + t *", "t *"),
        "def half_way(start, trained, t):\n    for name in start:\n"
        "        start[name] += t * (trained[name] - start[name])\n    return start",
    ],
    11: ['bugs = {1: "d", 2: "a", 3: "e", 4: "c", 5: "b"}', 'bugs = {1: "d", 2: "a", 3: "e"}'],
}


HINTS = {  # of attempts with this part
    "= ...": "Replace the ... by your code.",
    "return ...": "Replace the ... by your code.",
    "mean((1, 2))": "You give the mean of each set.",
    "mean(-1).amax(1)": "You take the mean over users first",
}


def number_of(cell, kind: str) -> int | None:
    """The number of the exercise of which this cell is the `kind`, exercise or check; else None."""
    for tag in cell.metadata.get("tags", []):
        if tag.startswith(f"{kind}-"):
            return int(tag.split("-")[1])
    return None


def printed(cell) -> str:
    return "".join(output.get("text", "") for output in cell.outputs)


@dataclass
class Attempt:
    """A solution of an exercise, right or wrong, and the cell that checks it."""

    exercise: int
    source: str
    is_right: bool
    check: nbformat.NotebookNode


def with_attempts(notebook, solutions: dict[str, str]) -> tuple[list, list[Attempt]]:
    """The cells of the notebook with every solution checked, the stub and wrong ones first; small runs."""
    cells = []
    attempts = []
    stub = ""
    for cell in notebook.cells:
        if number_of(cell, "exercise") is not None:
            stub = cell.source
            continue
        n = number_of(cell, "check")
        if n is None:
            cells.append(cell)
            if "parameters" in cell.metadata.get("tags", []):
                cells.append(nbformat.v4.new_code_cell(SMALL))
            continue
        right = solutions[str(n)]
        for source in (stub, *WRONG[n], right):
            check = copy.deepcopy(cell)
            cells += [nbformat.v4.new_code_cell(source), check]
            attempts.append(Attempt(n, source, source == right, check))
    return cells, attempts


def check_verdict(attempt: Attempt) -> None:
    """A right solution is called right; of a wrong one is said what is wrong."""
    text = printed(attempt.check)
    (verdict,) = [line for line in text.splitlines() if line.startswith("Exercise")]
    if attempt.is_right:
        assert verdict.startswith(f"Exercise {attempt.exercise}: right."), (attempt.source, text)
        return
    beginning = f"Exercise {attempt.exercise}: not yet. "
    assert verdict.startswith(beginning), (attempt.source, text)
    assert len(verdict.removeprefix(beginning)) > 20, f"no word of what is wrong: {verdict}"
    assert not re.search(r"\d\.\d{4}", verdict), "numbers have three digits"
    for part, hint in HINTS.items():
        assert part not in attempt.source or hint in verdict, (attempt.source, verdict)


def solutions_of(notebook) -> dict[str, str]:
    pattern = r"<summary>Exercise (\d+)</summary>\n\n```python\n(.*?)\n```"
    return dict(re.findall(pattern, notebook.cells[-1].source, re.DOTALL))


def execute(notebook, folder: Path) -> None:
    """Run a notebook in a folder that holds the project, so that runs/ is a folder of its own."""
    for name in PROJECT.split():
        (folder / name).symlink_to(ROOT / name)
    (folder / "docs").mkdir()
    resources = {"metadata": {"path": str(folder / "docs")}}  # where Jupyter starts it
    nbclient.NotebookClient(
        notebook, timeout=3600, resources=resources, record_timing=False
    ).execute()


def pictures(notebook) -> int:
    count = 0
    for cell in notebook.cells:
        for output in cell.get("outputs", []):
            count += "image/png" in output.get("data", {})
    return count


def test_the_lesson_runs_and_every_check_tells_right_from_wrong(tmp_path):
    notebook = nbformat.read(LESSON, as_version=4)
    nbformat.validate(notebook)
    solutions = solutions_of(notebook)
    assert list(solutions) == [str(n) for n in range(1, 12)]
    once_more = copy.deepcopy(notebook.cells[1:3])  # as after a restart: nothing is known to run
    once_more.append(nbformat.v4.new_code_cell('finish(begin(MAZE, "runs/lesson-maze"), "")'))
    notebook.cells, attempts = with_attempts(notebook, solutions)
    notebook.cells += once_more
    execute(notebook, tmp_path)
    for attempt in attempts:
        check_verdict(attempt)
    assert (tmp_path / "docs/runs/lesson-maze/film.gif").exists()
    assert (tmp_path / "docs/runs/lesson-search/search.json").exists()
    resumed = printed(once_more[-1])
    assert resumed.startswith("python train.py --resume --out runs/lesson-maze\n")
    assert "\nstart model " in resumed and "\nVPO " in resumed
    assert pictures(notebook) >= 5
    (urn,) = [printed(cell) for cell in notebook.cells if cell.get("id") == "why-code"]
    assert "start [2, 1, 7], rate 1, KL 0: half of the runs end from 0.97 to 0.99" in urn


def run_cells(*numbers: int) -> dict:
    """The names that some cells of the notebook define, run in this process."""
    notebook = nbformat.read(LESSON, as_version=4)
    names = {}
    for i in numbers:
        exec(notebook.cells[i].source, names)
    return names


@pytest.fixture
def in_a_folder(tmp_path, monkeypatch):
    """A folder two below a project, in which the notebook may lie."""
    folder = tmp_path / "project/my/lesson"
    folder.mkdir(parents=True)
    monkeypatch.chdir(folder)
    monkeypatch.setattr(sys, "path", list(sys.path[1:]))
    monkeypatch.setenv("PYTHONPATH", "")
    return folder


def test_a_copied_notebook_finds_the_project_above_it(in_a_folder, monkeypatch):
    """Guards against a lesson that works in docs/ alone, and a traceback where there is no project."""
    (in_a_folder.parents[1] / "vpo.py").touch()
    assert run_cells(1)["project"] == in_a_folder.parents[1]
    assert Path.cwd() == in_a_folder
    (in_a_folder.parents[1] / "vpo.py").unlink()
    monkeypatch.setattr(sys, "path", [])
    with pytest.raises(Exception, match="No vpo.py in .*lesson or above: ") as stopped:
        run_cells(1)
    assert stopped.value._render_traceback_() == [str(stopped.value)]


def test_in_a_read_only_folder_the_runs_lie_at_home(in_a_folder, tmp_path, monkeypatch, capsys):
    (in_a_folder / "vpo.py").touch()
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setattr(tempfile, "TemporaryFile", Mock(side_effect=PermissionError))
    for _ in range(2):  # the cell may be run again
        assert run_cells(1)["project"] == in_a_folder
    assert Path.cwd() == tmp_path
    assert f"is read-only, so the runs lie in {tmp_path}/runs." in capsys.readouterr().out


def test_a_skipped_exercise_is_named_by_the_cell_that_uses_it(in_a_folder, monkeypatch):
    """Guards against a TypeError about an ellipsis."""
    monkeypatch.syspath_prepend(ROOT)
    names = run_cells(1, 2)
    sources = [cell.source for cell in nbformat.read(LESSON, as_version=4).cells]
    (training,) = [source for source in sources if source.startswith("needs(3, 4)")]
    for exercise in (3, 4):
        with pytest.raises(names["Stop"], match=f"exercise {exercise}: solve it"):
            exec(training, names)
        names["solved_exercises"].add(exercise)


def test_each_silent_bug_breaks_its_own_property():
    """Guards against a bug of exercise 11 that cannot be told from another, and a wrong version 0."""
    rewards = torch.rand(2, 4, 3, 2, generator=torch.Generator().manual_seed(0))
    compromises = torch.full((2, 2), 0.6)
    two_sets = torch.stack([torch.eye(2), compromises])[None]  # the first of specialists
    equal_sets = rewards[:, :1].expand_as(rewards)
    without_first = rewards.clone()
    without_first[0] = 0
    answer_mask = rewards[..., 0] > 0.2
    answer_mask[0, 1] = False
    objective_mask = torch.tensor([[True, False], [True, True]])
    hidden = rewards.clone()
    hidden[0, ..., 1] = rewards[1, ..., 1]
    for number in range(6):
        advantages = partial(version, number)
        ahead, behind = advantages(two_sets)[0]
        changed = advantages(hidden, objective_mask=objective_mask)
        is_broken = {
            "a": ahead < behind,
            "b": advantages(equal_sets).any(),
            "c": not torch.equal(advantages(without_first)[1], advantages(rewards)[1]),
            "d": advantages(rewards, answer_mask)[0, 1] >= 0,
            "e": not torch.equal(changed, advantages(rewards, objective_mask=objective_mask)),
        }
        broken = [letter for letter in is_broken if is_broken[letter]]
        assert "".join(broken) == BUGS.get(number, "")
    generator = torch.Generator().manual_seed(0)
    right = vpo_advantage(rewards, answer_mask, objective_mask=objective_mask, generator=generator)
    torch.testing.assert_close(version(0, rewards, answer_mask, objective_mask), right)


def test_the_stored_figures_are_those_of_this_lesson():
    """Guards against outputs that were not made by the command above, are too large, or name a machine."""
    notebook = nbformat.read(LESSON, as_version=4)
    assert LESSON.stat().st_size < 2e6 and pictures(notebook) >= 5
    for cell in notebook.cells:
        if cell.cell_type == "code":
            assert "/tmp/" not in printed(cell)
            assert all(output.output_type != "error" for output in cell.outputs)
            assert number_of(cell, "exercise") is None or not cell.outputs


def store_outputs() -> None:
    """Run the lesson with its solutions, and store what it prints and draws, but for the verdicts."""
    notebook = nbformat.read(LESSON, as_version=4)
    solutions = solutions_of(notebook)
    solved = copy.deepcopy(notebook)
    for cell in solved.cells:
        n = number_of(cell, "exercise")
        cell.source = cell.source if n is None else solutions[str(n)]
    with tempfile.TemporaryDirectory() as folder:
        execute(solved, Path(folder))
    for cell, run in zip(notebook.cells, solved.cells, strict=True):
        if cell.cell_type == "code" and number_of(cell, "exercise") is None:
            cell.outputs = run.outputs
            if number_of(cell, "check") is not None:
                cell.outputs = [own for own in run.outputs if own.output_type != "stream"]
        for output in cell.get("outputs", []):
            output.pop("execution_count", None)
            if output.output_type == "stream":
                output.text = output.text.replace(f"file://{folder}/", "")
    nbformat.write(notebook, LESSON)


if __name__ == "__main__":
    store_outputs()
