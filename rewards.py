"""Tasks: where problems come from, how an answer is asked for, and the reward vector that an answer earns.

A task is one small class (`Task` below). Three live here: `maze` (the paper's grid with conflicting treasures, section 4),
`toy` (a deceptive valley: partial progress scores worse than a safe stub) and `code` (programs, a component per test). Your
own goes into a file of its own: `python train.py --task my_task.py`, see "Your own task" in the README.

Where the maze departs from the official code:
1. The reward vector is the paper's linear one; the bonus tile in the centre is drawn but earns nothing.
2. Sizes from 5 to 9. The number of extra openings scales with the area; below size 7 lava may lie one tile from the
   border, else there would be no room for it.
3. A route may name directions (RIGHT DOWN ...) or the cells that it enters (b1 b2 ...): tiny models learn cells faster.
"""

import collections
import functools
import hashlib
import importlib.util
import itertools
import random
import sys
from collections import deque
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

import code_problems
import sandbox

MAX_ANSWERS = 8  # that one rollout of the tiny model may hold; its vocabulary has a tag for each


class UserError(Exception):
    """A mistake in what the user gave: reported as one line, exit code 2, no traceback."""


@dataclass
class Problem:
    """One problem of a task. `data` is whatever the task needs to score an answer; it must be plain JSON data."""
    id: str
    data: Any


class Task:
    """What a task must offer. Rewards are lists of k floats, higher is better, in [0, 1] unless the task says otherwise.

    The first block is all that a language model needs. `--model tiny` starts from nothing, so it also needs the words
    that may occur and demonstrations to imitate during the warm start.
    """
    name = "task"
    tag = "answer"  # answers stand between <answer_1> and </answer_1>, <answer_2> and </answer_2>, ...
    objectives: tuple[str, ...] = ()
    flags: tuple[str, ...] = ()  # flags of train.py that the constructor takes
    fingerprint = ""  # of the files that the problems come from; a run goes on with no others
    m = 3  # answers per rollout, where --m does not say
    steps = 200  # of RL, where --steps does not say
    eval_problems = 200  # held out, where --eval-problems does not say

    def problems(self, split: str, n: int, seed: int = 0, start: int = 0) -> list[Problem]:
        """Problems start .. start + n - 1 of a split; equal arguments, equal problems; a finite data set wraps around.

        Splits: "train", "validation", "test", and for a warm start "demonstrations" (those of "train" will do).
        """
        raise NotImplementedError

    def prompt(self, problem: Problem, m: int) -> str:
        """The text that asks a language model for m answers."""
        raise NotImplementedError

    def reward(self, problem: Problem, answer: str) -> list[float]:
        """The reward vector (k) of one answer; must not raise, whatever the text."""
        raise NotImplementedError

    def rewards(self, pairs: list[tuple[Problem, str]]) -> list[list[float]]:
        """The reward vectors of many answers at once, for tasks that score faster that way."""
        return [self.reward(problem, answer) for problem, answer in pairs]

    def find_answers(self, text: str, m: int) -> list[str] | None:
        """The answers in a rollout's text where they do not stand in tags; None: they do."""
        return None

    def scalar(self, rewards: Tensor) -> Tensor:
        """The task scalar, what GRPO trains on: rewards (..., k) -> (...); the plain mean unless overridden."""
        return rewards.mean(-1)

    def canonical(self, answer: str) -> str:
        """Two answers of one rollout with equal canonical forms count once."""
        return " ".join(answer.split())

    wide = False  # whether a drawing is wider than high: policies then stand side by side

    def draw(self, axes, problem: Problem, answers: list[str], color: str) -> bool:
        """Draw the answers to a problem on matplotlib axes; False if the task has no picture."""
        return False

    # For --model tiny only: its whole language is single words separated by blanks.
    warm_steps = 300  # of imitation, where --warm-steps does not say
    lr: float | None = None  # peak learning rate of every method, where --lr does not say; None: each method's own
    words: tuple[str, ...] = ()  # every word of a tiny prompt or answer, the tags excepted
    answer_words = 0  # words in the longest answer

    def tiny_prompt(self, problem: Problem) -> str:
        """The problem in words; the number of answers and the tags are added around it."""
        raise NotImplementedError

    def demonstration(self, problem: Problem, rng: random.Random) -> str:
        """One answer in words, to be imitated. It need not be good: what RL discovers should not be shown here."""
        raise NotImplementedError


STEPS = {"UP": (-1, 0), "DOWN": (1, 0), "LEFT": (0, -1), "RIGHT": (0, 1)}
Cell = tuple[int, int]


class Maze(Task):
    """Reach the exit within the budget; gold lies in one corner, diamonds in the other, and both never fit (section 4).

    Vector: zero unless E is reached in time, else [1, gold share, diamond share, 1 - lava share], items counted once.
    """
    name, tag, flags = "maze", "route", ("size",)
    objectives = ("completion", "gold", "diamond", "avoid_lava")
    warm_steps = 700
    slack = 7  # steps of the budget beyond the longer one-corner route

    def __init__(self, size: int = 7):
        if not 5 <= size <= 9:
            raise UserError(f"--size {size}: a maze has 5 to 9 rows")
        self.size = size
        self.cells = [f"{'abcdefghi'[c]}{r + 1}" for r in range(size) for c in range(size)]  # a1 is the top left corner
        corners, centre = (0, size - 1, -size, -1), size // 2 * (size + 1)
        self.words = (*"#.SEGDLB", *(f"steps={n}" for n in range(2 * size, self.max_budget + 1)),
                      *(tile + cell for tile in ".GDL" for cell in self.cells),
                      *(tile + self.cells[i] for tile in "SE" for i in corners), "B" + self.cells[centre])
        self.answer_words = self.max_budget

    @property
    def max_budget(self) -> int:
        """Mazes whose budget is longer are not generated: 2 (size - 1) steps lead past a corner, detours add a few."""
        return 2 * (self.size - 1) + self.slack + 4

    def problems(self, split: str, n: int, seed: int = 0, start: int = 0) -> list[Problem]:
        """The paper's mazes; in the split "demonstrations", which a warm start imitates, far more walls and no conflict."""
        return [self._generate(f"maze{self.size}-{split}-{seed}-{start + i}", split == "demonstrations") for i in range(n)]

    def _generate(self, id: str, walled: bool) -> Problem:
        rng = random.Random(id)
        while (data := self._try_to_build(rng, walled)) is None:
            pass
        return Problem(id, data)

    def _try_to_build(self, rng: random.Random, walled: bool) -> dict | None:
        n, area = self.size, self.size**2 / 81
        fewest, most = (0, 8) if walled else (18, 28)
        grid = _prim(rng, n)
        walls = [(r, c) for r in range(n) for c in range(n) if grid[r][c] == "#" and len(_open_neighbours(grid, (r, c))) > 1]
        for r, c in rng.sample(walls, min(len(walls), rng.randint(round(fewest * area), round(most * area)))):
            grid[r][c] = "."
        diagonals = [[(0, 0), (n - 1, n - 1)], [(0, n - 1), (n - 1, 0)]]
        rng.shuffle(diagonals)
        (start, end), (gold, diamond), centre = diagonals[0], rng.sample(diagonals[1], 2), (n // 2, n // 2)
        if rng.random() < 0.5:
            start, end = end, start
        for (r, c), tile in zip((start, end, gold, diamond, centre), "SE..B", strict=True):
            grid[r][c] = tile
        from_start, from_gold, from_diamond = (_distances(grid, cell) for cell in (start, gold, diamond))
        if not {end, gold, diamond} <= from_start.keys():
            return None
        via_gold, via_diamond = from_start[gold] + from_gold[end], from_start[diamond] + from_diamond[end]
        via_both = from_gold[diamond] + min(from_start[gold] + from_diamond[end], from_start[diamond] + from_gold[end])
        budget = (from_start[end] if walled else max(via_gold, via_diamond)) + self.slack
        if budget > self.max_budget or (via_both <= budget and not walled):
            return None
        for corner, tile in ((gold, "G"), (diamond, "D")):
            zone = [(r, c) for r in range(n) for c in range(n)
                    if grid[r][c] == "." and abs(r - corner[0]) + abs(c - corner[1]) <= 2]
            if len(zone) < 3:
                return None
            for r, c in rng.sample(zone, rng.randint(3, min(5, len(zone)))):
                grid[r][c] = tile
        margin = 2 if n >= 7 else 1
        interior = [(r, c) for r in range(margin, n - margin) for c in range(margin, n - margin) if grid[r][c] == "."]
        for r, c in rng.sample(interior, min(rng.randint(3, 5), len(interior))):
            grid[r][c] = "L"
        if _distances(grid, start, blocked="#L").get(end, budget + 1) > budget:
            return None
        return {"grid": ["".join(row) for row in grid], "budget": budget}

    def prompt(self, problem: Problem, m: int) -> str:
        grid, budget = problem.data["grid"], problem.data["budget"]
        examples = "\n".join(f"<route_{i + 1}>RIGHT DOWN DOWN</route_{i + 1}>" for i in range(m))
        return (f"Find {'a route' if m == 1 else f'{m} different routes'} through this {self.size}x{self.size} maze, from S "
                f"to E in at most {budget} steps.\n\n" + "\n".join(" ".join(row) for row in grid) +
                "\n\n# is a wall: walking into it or off the grid costs a step and does not move you. Step on G (gold) and "
                "D (diamond) to collect them before you reach E; avoid L (lava). A route that does not reach E in time "
                "earns nothing; it ends at E.\nA route is a list of the moves UP, DOWN, LEFT and RIGHT, separated by "
                f"blanks. Answer in exactly this form and write nothing else:\n{examples}")

    def reward(self, problem: Problem, answer: str) -> list[float]:
        path = self.walk(problem, answer)
        grid = problem.data["grid"]
        if not path or grid[path[-1][0]][path[-1][1]] != "E":
            return [0.0] * 4
        seen = [grid[r][c] for r, c in set(path)]
        total = {tile: sum(row.count(tile) for row in grid) for tile in "GDL"}
        share = {tile: seen.count(tile) / total[tile] if total[tile] else 0.0 for tile in "GDL"}
        return [1.0, share["G"], share["D"], 1.0 - share["L"]]

    def walk(self, problem: Problem, answer: str) -> list[Cell]:
        """The cells that a route visits, S first, ended by E or by the budget; [] if the text is not a route."""
        grid, n = problem.data["grid"], self.size
        row = next(r for r in range(n) if "S" in grid[r])
        path = [(row, grid[row].index("S"))]
        for word in answer.split()[:problem.data["budget"]]:
            r, c = path[-1]
            if word.upper() in STEPS:
                r, c = r + STEPS[word.upper()][0], c + STEPS[word.upper()][1]
            elif word[-2:] in self.cells and len(word) <= 3:
                target = divmod(self.cells.index(word[-2:]), n)
                if abs(target[0] - r) + abs(target[1] - c) != 1:
                    return []
                r, c = target
            else:
                return []
            blocked = not (0 <= r < n and 0 <= c < n) or grid[r][c] == "#"
            path.append(path[-1] if blocked else (r, c))
            if not blocked and grid[r][c] == "E":
                break
        return path

    def draw(self, axes, problem: Problem, answers: list[str], color: str) -> bool:
        grid, n, rng = problem.data["grid"], self.size, random.Random(0)
        fill = {"#": "#3b3b3b", "L": "#f4b6a6", "G": "#f7dc6f", "D": "#aed9f7", "S": "#e0e0e0", "E": "#b8e0b0"}
        for r in range(n):
            for c in range(n):
                axes.add_patch(_rectangle(c, r, fill.get(grid[r][c], "white")))
                if grid[r][c] in "SEGDL":
                    axes.text(c + 0.5, r + 0.5, grid[r][c], ha="center", va="center", fontsize=7, color="#555555")
        for answer in answers:
            path = self.walk(problem, answer)
            if self.reward(problem, answer)[0]:  # failed routes are counted in the title, not drawn
                dx, dy = rng.uniform(-0.28, 0.28), rng.uniform(-0.28, 0.28)
                axes.plot([c + 0.5 + dx for _, c in path], [r + 0.5 + dy for r, _ in path], color=color, alpha=0.35, lw=1.3)
        axes.set(xlim=(0, n), ylim=(n, 0), xticks=[], yticks=[], aspect="equal")
        return True

    def tiny_prompt(self, problem: Problem) -> str:
        return " ".join([f"steps={problem.data['budget']}", *"".join(problem.data["grid"])])

    def demonstration(self, problem: Problem, rng: random.Random) -> str:
        """A short way to the exit, every tenth step a random one: it shows how to walk, not what is worth collecting."""
        grid = problem.data["grid"]
        here = self.walk(problem, "")[0]
        end = next((r, row.index("E")) for r, row in enumerate(grid) if "E" in row)
        to_end, route = _distances(grid, end), []
        while here != end and len(route) < self.answer_words:
            options = _open_neighbours(grid, here)
            if rng.random() >= 0.1:
                options = [cell for cell in options if to_end[cell] < to_end[here]]
            here = rng.choice(options)
            route.append(grid[here[0]][here[1]] + self.cells[here[0] * self.size + here[1]])
        return " ".join(route)


def _prim(rng: random.Random, n: int) -> list[list[str]]:
    """Prim's algorithm on n x n cells: a random wall is opened if exactly one of its neighbours is open."""
    grid = [["#"] * n for _ in range(n)]
    cell = rng.randrange(n), rng.randrange(n)
    grid[cell[0]][cell[1]] = "."
    frontier = list(_neighbours(n, cell))
    while frontier:
        r, c = frontier.pop(rng.randrange(len(frontier)))
        if grid[r][c] == "#" and len(_open_neighbours(grid, (r, c))) == 1:
            grid[r][c] = "."
            frontier += [(i, j) for i, j in _neighbours(n, (r, c)) if grid[i][j] == "#"]
    return grid


@functools.cache
def _neighbours(n: int, cell: Cell) -> list[Cell]:
    return [(cell[0] + dr, cell[1] + dc) for dr, dc in STEPS.values() if 0 <= cell[0] + dr < n and 0 <= cell[1] + dc < n]


def _open_neighbours(grid: list, cell: Cell, blocked: str = "#") -> list[Cell]:
    return [(r, c) for r, c in _neighbours(len(grid), cell) if grid[r][c] not in blocked]


def _distances(grid: list, start: Cell, blocked: str = "#") -> dict[Cell, int]:
    """Breadth-first distances in steps from a cell to every cell that can be reached."""
    distances, queue = {start: 0}, deque([start])
    while queue:
        cell = queue.popleft()
        for neighbour in _open_neighbours(grid, cell, blocked):
            if neighbour not in distances:
                distances[neighbour] = distances[cell] + 1
                queue.append(neighbour)
    return distances


def _rectangle(x: float, y: float, color: str):
    from matplotlib.patches import Rectangle  # drawing is optional: training never imports matplotlib
    return Rectangle((x, y), 1, 1, facecolor=color, edgecolor="#dddddd", lw=0.5)


class Toy(Task):
    """A deceptive valley: an answer is `blocks` blocks of `bits` bits; every bit set costs, but all of them set pay.

    A block scores 0.8 at all zeros, falls evenly to 0 with each further bit, and is worth 1.0 at all ones. k = blocks.
    """
    name = "toy"
    m, warm_steps, steps, lr = 5, 150, 60, 2.5e-4

    def __init__(self, blocks: int = 3, bits: int = 3):
        self.blocks, self.bits = blocks, bits
        self.objectives = tuple(f"block_{i + 1}" for i in range(blocks))
        self.words, self.answer_words = ("bits", "0", "1"), blocks * bits

    def problems(self, split: str, n: int, seed: int = 0, start: int = 0) -> list[Problem]:
        return [Problem(f"toy-{split}-{start + i}", {}) for i in range(n)]  # one and the same problem, asked n times

    def prompt(self, problem: Problem, m: int) -> str:
        return (f"Write {m} strings of {self.blocks * self.bits} bits (0 or 1, separated by blanks), each in its own tags: " +
                " ".join(f"<answer_{i + 1}>0 1 ...</answer_{i + 1}>" for i in range(m)))

    def tiny_prompt(self, problem: Problem) -> str:
        return "bits"

    def reward(self, problem: Problem, answer: str) -> list[float]:
        bits = answer.split()
        if len(bits) != self.blocks * self.bits or not set(bits) <= {"0", "1"}:
            return [0.0] * self.blocks
        ones = [bits[i:i + self.bits].count("1") for i in range(0, len(bits), self.bits)]
        return [1.0 if n == self.bits else 0.8 * (1 - n / (self.bits - 1)) for n in ones]

    def demonstration(self, problem: Problem, rng: random.Random) -> str:
        return " ".join(rng.choice("01") for _ in range(self.blocks * self.bits))


class Code(Task):
    """Programs, a component per test: 1 if the program passes it. k may differ from problem to problem (section 4, code).

    Problems come from a file (`data`; `test_data`, or a part of `data`, is held out), else they are the small ones of
    code_problems.py. seconds, memory_mb and unconfined are the sandbox's. Raises UserError for a bad file, and where the
    system cannot confine programs.
    """
    name, tag, wide = "code", "program", True
    flags = ("data", "test_data", "seconds", "memory_mb", "unconfined")
    warm_steps, steps, eval_problems = 1500, 300, 500

    def __init__(self, data: str = "", test_data: str = "", seconds: float = 2.0, memory_mb: int = 512, unconfined: bool = False):
        if test_data and not data:
            raise UserError(f"--test-data {test_data}: needs --data to train on")
        try:
            self.sandbox = sandbox.Sandbox(seconds=seconds, memory_mb=memory_mb, unconfined=unconfined)
        except sandbox.SandboxError as error:
            raise UserError(f"--task code: {error}") from error
        except ValueError as error:
            raise UserError(f"--seconds, --memory-mb: {error}") from error
        try:
            self.parts = code_problems.load(data, test_data, self.sandbox.run) if data else code_problems.small_problems()
        except code_problems.BadRecord as error:
            raise UserError(f"--data {error}") from error
        files = b"".join(Path(path).read_bytes() for path in (data, test_data) if path)
        self.fingerprint = hashlib.sha256(files).hexdigest() if files else ""
        if not data:
            self.words, self.answer_words = code_problems.small_words(), code_problems.LONGEST
            self.objectives = tuple(f"f({x})" for x in code_problems.HIDDEN)

    def problems(self, split: str, n: int, seed: int = 0, start: int = 0) -> list[Problem]:
        part = self.parts["train" if split == "demonstrations" else split]
        if not part:
            raise UserError(f"--data: no problem is left for the split {split}; give a larger file")
        rounds = {i // len(part): None for i in range(start, start + n)}  # each passes through all problems, in its own order
        order = {i: random.Random(f"{split}-{seed}-{i}").sample(part, len(part)) for i in rounds}
        return [Problem(data["id"], data) for data in (order[i // len(part)][i % len(part)] for i in range(start, start + n))]

    def prompt(self, problem: Problem, m: int) -> str:
        data = problem.data
        form = (f"a Python function named {data['entry_point']}" if data["entry_point"] else
                "a complete Python program that reads from stdin and writes to stdout")
        starter = f"\n\nStart from:\n```python\n{data['starter']}\n```" if data["starter"] else ""
        ask = ("Write it in one ```python block." if m == 1 else
               f"Write {m} different solutions, each complete and in a ```python block of its own, one after the other.")
        return f"{data['text']}\n\nThe solution is {form}.{starter}\n\n{ask}"

    def find_answers(self, text: str, m: int) -> list[str] | None:
        return code_problems.find_blocks(text)[:m] if "```" in text else None

    def canonical(self, answer: str) -> str:
        return code_problems.canonical(answer) or super().canonical(answer)

    def reward(self, problem: Problem, answer: str) -> list[float]:
        return self.rewards([(problem, answer)])[0]

    def rewards(self, pairs: list[tuple[Problem, str]]) -> list[list[float]]:
        rewards = [[0.0] * len(problem.data["tests"]) for problem, _ in pairs]
        jobs = code_problems.pack([(problem.data, answer) for problem, answer in pairs])
        try:
            results = self.sandbox.run([job for _, job in jobs])
        except sandbox.SandboxError as error:
            raise UserError(f"--task code: {error}") from error
        for (indices, _), passed in zip(jobs, results, strict=True):
            verdicts = map(float, passed)
            for i in indices:
                rewards[i] = list(itertools.islice(verdicts, len(rewards[i])))
        return rewards

    def draw(self, axes, problem: Problem, answers: list[str], color: str) -> bool:
        """The most frequent programs, a row each: a square per test, filled if it passes; how often; the program's beginning."""
        counts, k = collections.Counter(answers).most_common(10), len(problem.data["tests"])
        vectors = self.rewards([(problem, answer) for answer, _ in counts])
        axes.text(0, -0.2, problem.data.get("tiny_prompt", problem.id), fontsize=6, va="bottom", parse_math=False)
        for row, ((answer, count), vector) in enumerate(zip(counts, vectors, strict=True)):
            for i, passed in enumerate(vector):
                axes.add_patch(_rectangle(i, row, color if passed else "white"))
            text = " ".join(answer.split())
            label = f"{count:2}\u00d7  {text[:34]}{'...' * (len(text) > 34)}{'  (solved)' * all(vector)}"
            axes.text(k * 1.05, row + 0.55, label, va="center", fontsize=5.5, family="monospace", parse_math=False)
        axes.set(xlim=(0, 3.4 * k), ylim=(10, -1), xticks=[], yticks=[])
        return True

    def tiny_prompt(self, problem: Problem) -> str:
        return problem.data["tiny_prompt"]

    def demonstration(self, problem: Problem, rng: random.Random) -> str:
        return code_problems.demonstration(problem.data, rng)


TASKS: dict[str, type[Task]] = {"maze": Maze, "toy": Toy, "code": Code}


def load_task(name: str, **options) -> Task:
    """The task of that name, or the one `Task` subclass that a Python file defines. UserError if there is none.

    Of the options a task is given those that its `flags` name.
    """
    task = TASKS[name] if name in TASKS else _load_file(name)
    return task(**{flag: options[flag] for flag in task.flags if flag in options})


def _load_file(name: str) -> type[Task]:
    path = Path(name)
    if path.suffix != ".py" or not path.is_file():
        raise UserError(f"--task {name}: unknown; choose from {', '.join(TASKS)}, or name a Python file that defines a Task")
    spec = importlib.util.spec_from_file_location(f"task_{path.stem}", path)
    module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
    except Exception as error:  # whatever the user's file raises
        line = f", line {error.lineno}" if isinstance(error, SyntaxError) else ""
        raise UserError(f"--task {name}{line}: cannot be imported ({type(error).__name__}: {error})") from error
    found = [v for v in vars(module).values() if isinstance(v, type) and issubclass(v, Task) and v.__module__ == module.__name__]
    if len(found) != 1:
        raise UserError(f"--task {name}: defines {len(found)} subclasses of Task; it needs exactly one")
    return found[0]
