"""How tasks are loaded, the tasks of the examples, and the maze, by hand and by random cases."""

import collections
import hashlib
import itertools
import json
from pathlib import Path

import pytest
from helpers import write_fence

from engine.tasks import load_task
from rewards import Problem, parse_answers
from rollout import score
from tasks import maze
from tasks.maze import Maze

EXAMPLES = Path(__file__).resolve().parent.parent / "examples"


# Loading.


def test_the_tiny_model_writes_tags_whatever_the_form():
    """Guards against a form for language models that turns every answer of the tiny one into none."""
    write_fence("def find_answers(self, text, m, finished): return [text]")
    text = "<answer_1> a </answer_1> <answer_2> b </answer_2>"
    assert parse_answers(text, load_task("mine.py"), 2) == ["a", "b"]
    assert parse_answers(text, load_task("mine.py", "some model"), 2) == [text]


def test_a_file_that_was_changed_is_read_again_and_may_import_its_neighbours():
    """Guards against a notebook that goes on with the rewards of before."""
    write_fence("name = 'one'")
    assert load_task("mine.py").name == "one"
    Path("helpers_of_mine.py").write_text("NAME = 'two'\n", "utf-8")
    write_fence("from helpers_of_mine import NAME as name")
    assert load_task("mine.py").name == "two"


# The examples.


def test_the_task_to_copy_has_the_conflict_that_it_tells_of():
    task = load_task(str(EXAMPLES / "my_task.py"), "some model")
    (problem,) = task.problems("test", 1)
    assert len(parse_answers(task.prompt(problem, 4), task, 4)) == 3  # the examples
    means = {}
    for dish in task.words[1:]:
        means[dish] = sum(task.reward(problem, f"{dish}, {dish} {dish}"))
    assert max(means, key=means.get) == "pasta"


# The maze.


def steps_through(task: Maze, tiles: str, stops: list[int]) -> float:
    """Length of the shortest walk through these cells, in this order."""
    legs = itertools.pairwise(stops)
    return sum(task.distances(tiles, one)[other] for one, other in legs)


@pytest.mark.parametrize("size", [5, 6, 7, 8, 9])
def test_mazes_keep_the_papers_promises(size):
    """Guards against mazes without the conflict: one corner fits the budget, both never do, a safe way exists."""
    task = Maze(size)
    diagonals = [{0, size**2 - 1}, {size - 1, size**2 - size}]
    for problem in task.problems("test", 40, seed=3):
        json.dumps(problem.data)
        grid = problem.data["grid"]
        budget = problem.data["budget"]
        assert [len(row) for row in grid] == [size] * size

        tiles = "".join(grid)
        counts = collections.Counter(tiles)
        assert counts["S"] == counts["E"] == counts["B"] == 1
        assert grid[size // 2][size // 2] == "B"
        assert {counts["G"], counts["D"], counts["L"]} <= {3, 4, 5}

        start = tiles.index("S")
        end = tiles.index("E")
        assert {start, end} in diagonals
        (corners,) = [diagonal for diagonal in diagonals if start not in diagonal]

        one, other = corners
        past_one = steps_through(task, tiles, [start, one, end])
        past_other = steps_through(task, tiles, [start, other, end])
        assert budget == max(past_one, past_other) + task.slack
        assert steps_through(task, tiles, [start, one, other, end]) > budget
        assert steps_through(task, tiles, [start, other, one, end]) > budget
        assert task.distances(tiles, start, blocked="#L")[end] <= budget


HASHES = {6: "bbd59039012c2b04", 7: "f1927a538420fe59", 9: "cfa35f2cdf66478a"}


@pytest.mark.parametrize("size, expected", HASHES.items())
def test_mazes_and_their_words_are_those_of_the_published_tables(size, expected):
    """Guards against another generator or vocabulary: another order of words is another model."""
    task = Maze(size)
    mazes = []
    for split in ("train", "demonstrations", "test", "validation"):
        for seed in (0, 1):
            problems = task.problems(split, 7, seed) + task.problems(split, 13, seed, start=7)
            mazes.append([problem.data for problem in problems])
    text = json.dumps([task.words, mazes])
    assert hashlib.sha256(text.encode()).hexdigest()[:16] == expected


def grids(problems: list[Problem]) -> list[str]:
    return ["".join(problem.data["grid"]) for problem in problems]


def test_no_held_out_maze_occurs_in_training(monkeypatch):
    """Guards against training on what is tested: of size 5 that happened to 3 test mazes of 200 in every run. The mazes
    that do not collide must be those of always: published tables rest on them."""
    task = Maze(5)
    test = task.problems("test", maze.HELD_OUT)
    validation = task.problems("validation", maze.HELD_OUT)
    held_out = set(grids(test + validation))
    train = grids(task.problems("train", 1500, seed=3))
    monkeypatch.setattr(maze, "_held_out", lambda size: frozenset())
    free = grids(task.problems("train", 1500, seed=3))
    moved = [i for i in range(1500) if train[i] != free[i]]
    assert moved and moved == [i for i in range(1500) if free[i] in held_out]
    assert not held_out & set(train)


EXAMPLE = Problem("example", {"grid": ["SG#..", "LG...", "...B.", "D...#", "DD..E"], "budget": 9})


@pytest.mark.parametrize(
    "route, expected",
    [
        # The budget ends one step before E.
        ("RIGHT DOWN RIGHT RIGHT RIGHT DOWN LEFT DOWN DOWN", [0, 0, 0, 0]),
        ("RIGHT DOWN DOWN DOWN RIGHT RIGHT DOWN RIGHT", [1, 1, 0, 1]),
        ("DOWN DOWN DOWN DOWN RIGHT RIGHT RIGHT RIGHT", [1, 0, 1, 0]),
        ("down Down DOWN down right right right right", [1, 0, 1, 0]),
        ("a2 a3 a4 a5 b5 c5 d5 e5", [1, 0, 1, 0]),  # the cells that are entered
        ("La2 .a3 Da4 Da5 Db5 .c5 .d5 Ee5", [1, 0, 1, 0]),  # with what lies there
        # The border and a wall block, and the step is spent. What follows E is not walked.
        ("UP RIGHT DOWN DOWN DOWN RIGHT RIGHT DOWN RIGHT", [1, 1, 0, 1]),
        ("RIGHT RIGHT DOWN DOWN DOWN RIGHT RIGHT DOWN RIGHT", [1, 1, 0, 1]),
        ("RIGHT DOWN DOWN DOWN RIGHT RIGHT DOWN RIGHT UP", [1, 1, 0, 1]),
        ("a2 c3", [0, 0, 0, 0]),  # not a neighbour
        ("RIGHT then DOWN", [0, 0, 0, 0]),
        ("a² \0 zz9 a RIGHT² 2", [0, 0, 0, 0]),
        ("", [0, 0, 0, 0]),
        ("DOWN", [0, 0, 0, 0]),
    ],
)
def test_routes_by_hand(route, expected):
    assert Maze(5).reward(EXAMPLE, route) == expected


@pytest.mark.parametrize(
    ("one", "other", "same"),
    [
        ("RIGHT DOWN DOWN", "b1 b2 b3", True),
        ("right down", "Gb1 Gb2", True),  # words for steps, cells, what lies there
        ("UP RIGHT DOWN", "RIGHT DOWN", True),  # a bump leaves one where one is
        # words after E
        ("DOWN " * 4 + "RIGHT " * 4, "a2 a3 a4 a5 b5 c5 d5 e5 e4 UP nonsense", True),
        ("RIGHT DOWN", "DOWN RIGHT", False),
        ("RIGHT LEFT", "RIGHT", False),
        ("RIGHT then DOWN", "RIGHT  then\nDOWN", True),
        ("RIGHT then DOWN", "RIGHT then UP", False),
        ("a2", "a1 a2", False),
        ("", "nonsense", False),  # no route: a1 is where one stands
    ],
)
def test_a_route_is_the_cells_that_it_enters(one, other, same):
    """Guards against one route that counts three times in a set, for the words that stand behind its exit."""
    task = Maze(5)
    assert (task.canonical(EXAMPLE, one) == task.canonical(EXAMPLE, other)) == same
    scored = score(task, [EXAMPLE], [[one, other]], 2)
    assert scored.answer_mask.all()
    assert scored.repeat_mask.tolist() == [[[False, same]]]
