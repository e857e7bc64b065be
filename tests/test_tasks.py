"""The maze and the toy: construction and scoring by random cases; what is read out of rollouts and scored."""

import hashlib
import itertools
import json
import random
from pathlib import Path

import pytest
import torch

from rewards import Problem, Task, UserError, load_task
from rollout import parse_answers, score, write_answers
from tasks import maze
from tasks.maze import Maze
from tasks.toy import Toy


def solve(task: Maze, problem: Problem, targets: list) -> int | None:
    """Length of the shortest walk from S through the targets, in that order, to E."""
    grid = "".join(problem.data["grid"])
    stops, total = [grid.index("S"), *(r * task.size + c for r, c in targets), grid.index("E")], 0
    for a, b in itertools.pairwise(stops):
        distances = task.distances(grid, a)
        if b not in distances:
            return None
        total += distances[b]
    return total


@pytest.mark.parametrize("size", [5, 6, 7, 8, 9])
def test_mazes_keep_the_papers_promises(size):
    """Guards against mazes without the conflict: one corner fits the budget, both never do, a safe way exists."""
    task, n = Maze(size), size - 1
    for problem in task.problems("test", 40, seed=3):
        grid, budget = problem.data["grid"], problem.data["budget"]
        assert len(grid) == size and all(len(row) == size for row in grid)
        text = "".join(grid)
        assert (
            text.count("S") == text.count("E") == text.count("B") == 1
            and grid[size // 2][size // 2] == "B"
        )
        assert (
            3 <= text.count("G") <= 5 and 3 <= text.count("D") <= 5 and text.count("L") in (3, 4, 5)
        )
        ends = {(r, c) for r in (0, n) for c in (0, n) if grid[r][c] in "SE"}
        assert ends in ({(0, 0), (n, n)}, {(0, n), (n, 0)})
        corners = [corner for corner in ((0, 0), (0, n), (n, 0), (n, n)) if corner not in ends]
        for tile in "GD":
            found = [(r, c) for r in range(size) for c in range(size) if grid[r][c] == tile]
            assert any(all(abs(r - a) + abs(c - b) <= 2 for r, c in found) for a, b in corners)
        assert budget - task.slack == max(solve(task, problem, [corner]) for corner in corners)
        assert min(solve(task, problem, corners), solve(task, problem, corners[::-1])) > budget
        assert task.distances(text, text.index("S"), blocked="#L")[text.index("E")] <= budget
        json.dumps(problem.data)


def test_splits_and_indices_are_stable():
    """Guards against problems that depend on how many are asked for, and against seeds that change nothing."""
    task = Maze(7)
    train = task.problems("train", 30)
    assert (
        task.problems("train", 5, start=7) == train[7:12]
        and task.problems("train", 3, seed=1) != train[:3]
    )


@pytest.mark.parametrize(
    ("size", "expected"),
    [(6, "bbd59039012c2b04"), (7, "f1927a538420fe59"), (9, "cfa35f2cdf66478a")],
)
def test_mazes_and_their_words_are_those_of_the_published_tables(size, expected):
    """Guards against a change to the generator or to the vocabulary: another order of words is another model."""
    task = Maze(size)
    found = [
        task.words,
        [
            [problem.data for problem in task.problems(split, 20, seed)]
            for split in ("train", "demonstrations", "test", "validation")
            for seed in (0, 1)
        ],
    ]
    assert hashlib.sha256(json.dumps(found).encode()).hexdigest()[:16] == expected


def grids(problems: list[Problem]) -> list[str]:
    return ["".join(problem.data["grid"]) for problem in problems]


def test_no_held_out_maze_occurs_in_training(monkeypatch):
    """Guards against training on what is tested: of size 5 that happened to 3 test mazes of 200 in every run.

    The mazes that do not collide must be those of always: published tables rest on them.
    """
    task = Maze(5)
    held_out = set(
        grids(task.problems("test", maze.HELD_OUT) + task.problems("validation", maze.HELD_OUT))
    )
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
        (
            "RIGHT DOWN RIGHT RIGHT RIGHT DOWN LEFT DOWN DOWN",
            [0, 0, 0, 0],
        ),  # the budget ends one step before E
        ("RIGHT DOWN DOWN DOWN RIGHT RIGHT DOWN RIGHT", [1, 1, 0, 1]),
        ("DOWN DOWN DOWN DOWN RIGHT RIGHT RIGHT RIGHT", [1, 0, 1, 0]),
        ("down Down DOWN down right right right right", [1, 0, 1, 0]),
        ("a2 a3 a4 a5 b5 c5 d5 e5", [1, 0, 1, 0]),  # the cells that are entered
        ("La2 .a3 Da4 Da5 Db5 .c5 .d5 Ee5", [1, 0, 1, 0]),  # with what lies there
        (
            "UP RIGHT DOWN DOWN DOWN RIGHT RIGHT DOWN RIGHT",
            [1, 1, 0, 1],
        ),  # the border blocks, the step is spent
        ("RIGHT RIGHT DOWN DOWN DOWN RIGHT RIGHT DOWN RIGHT", [1, 1, 0, 1]),  # so does a wall
        (
            "RIGHT DOWN DOWN DOWN RIGHT RIGHT DOWN RIGHT UP",
            [1, 1, 0, 1],
        ),  # what follows E is not walked
        ("a2 c3", [0, 0, 0, 0]),  # not a neighbour
        ("RIGHT then DOWN", [0, 0, 0, 0]),
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
        (
            "DOWN DOWN DOWN DOWN RIGHT RIGHT RIGHT RIGHT",
            "a2 a3 a4 a5 b5 c5 d5 e5 e4 UP nonsense",
            True,
        ),  # words after E
        ("RIGHT DOWN", "DOWN RIGHT", False),
        ("RIGHT LEFT", "RIGHT", False),
        ("RIGHT then DOWN", "RIGHT  then\nDOWN", True),
        ("RIGHT then DOWN", "RIGHT then UP", False),
        ("a2", "a1 a2", False),
        ("", "nonsense", False),
    ],
)  # no route: a1 is where one stands
def test_a_route_is_the_cells_that_it_enters(one, other, same):
    """Guards against one route that counts three times in a set, for the words that stand behind its exit."""
    task = Maze(5)
    assert (task.canonical(EXAMPLE, one) == task.canonical(EXAMPLE, other)) == same
    scored = score(task, [EXAMPLE], [[[one, other]]], 2)
    assert scored.mask.tolist() == [[[True, not same]]]


def test_a_pool_of_routes_in_few_words():
    """Every route is counted once: those with neither or as much of both are no failures."""
    pool = [[1, 1, 0, 1]] * 18 + [[1, 0.2, 0.5, 0]] * 9 + [[0, 0, 0, 0]] * 3
    assert Maze(5).summary(torch.tensor(pool, dtype=torch.float)) == "gold 18, diamonds 9, failed 3"
    pool += [[1, 0, 0, 1], [1, 0.5, 0.5, 1]]
    assert (
        Maze(5).summary(torch.tensor(pool, dtype=torch.float))
        == "gold 18, diamonds 9, neither 2, failed 3"
    )


def test_a_drawing_shows_ways_not_wandering():
    """Guards against stray lines: a walk to and fro is no way, except to something that is collected."""
    pyplot = pytest.importorskip("matplotlib.pyplot")
    pyplot.switch_backend("Agg")
    direct = "DOWN DOWN DOWN DOWN RIGHT RIGHT RIGHT RIGHT"
    problem = Problem("long", EXAMPLE.data | {"budget": 30})
    lines = {}
    for route in (direct, "DOWN UP DOWN UP UP " + direct, "RIGHT RIGHT LEFT " + direct, "a2"):
        figure, axes = pyplot.subplots()
        assert Maze(5).draw(axes, problem, [route], "red")
        assert min(text.get_fontsize() for text in axes.texts) >= 8
        lines[route] = [line.get_xydata().tolist() for line in axes.lines]
        pyplot.close(figure)
    plain, wander, gold, failed = lines.values()
    assert len(plain) == 1 and len(plain[0]) == 9 and wander == plain and not failed
    assert len(gold) == 2 and len(gold[0]) == 11 and gold[1] == [gold[0][1]], (
        "a spur, and a dot where it ends"
    )


@pytest.mark.parametrize("size", [4, 10])
def test_a_size_out_of_range_is_named(size):
    with pytest.raises(UserError, match=f"--size {size}: a maze has 5 to 9 rows"):
        Maze(size)


def test_items_count_once_and_lava_by_share():
    """Guards against counting a tile at every visit: back and forth over gold is still all of the gold, no more."""
    problem = Problem("long", EXAMPLE.data | {"budget": 99})
    route = "DOWN UP DOWN RIGHT UP DOWN UP DOWN DOWN DOWN RIGHT RIGHT DOWN RIGHT"
    assert Maze(5).reward(problem, route) == [1, 1, 0, 0]


def test_random_routes_never_break_the_scorer():
    """Random words, good and bad: k numbers in [0, 1], all zero exactly where E was not reached."""
    task, rng = Maze(6), random.Random(0)
    words = [*task.words, "UP", "DOWN", "LEFT", "RIGHT", "²", "\0", "<route_1>", "a", "zz9"]
    for problem in task.problems("test", 20):
        routes = [" ".join(rng.choices(words, k=rng.randrange(30))) for _ in range(50)]
        routes += [task.demonstration(problem, rng) for _ in range(20)]
        for route in routes:
            reward = task.reward(problem, route)
            assert len(reward) == 4 and all(0 <= value <= 1 for value in reward)
            assert reward[0] == 1 or not any(reward)


@pytest.mark.parametrize("name", ["maze", "toy", "code"])
def test_a_tiny_model_knows_every_word(name):
    """Guards against words that the vocabulary lacks: they would become padding, silently."""
    task, rng = load_task(name), random.Random(1)
    for split in ("train", "demonstrations", "test"):
        for problem in task.problems(split, 100):
            answer = task.demonstration(problem, rng)
            assert {*task.tiny_prompt(problem).split(), *answer.split()} <= set(task.words)
            assert len(answer.split()) <= task.answer_words
            assert len(task.reward(problem, answer)) == len(task.objectives)


def test_toy_is_a_deceptive_valley():
    """Every bit that is set costs, until the block is full: 0.8, 0.4, 0, 1; the other blocks do not matter."""
    task, problem = Toy(), Problem("toy", {})
    values = [task.reward(problem, " ".join("000" + "1" * n + "0" * (6 - n))) for n in range(4)]
    assert values == [
        [pytest.approx(0.8), pytest.approx(value), pytest.approx(0.8)]
        for value in (0.8, 0.4, 0.0, 1.0)
    ]
    for text in ("", "1", "1 1 1 1 1 1 1 1 2", "1 1 1 1 1 1 1 1 1 1"):
        assert task.reward(problem, text) == [0.0] * 3


# ---------------------------------------------------------------------------------------------------- answers

TOY = Toy()


@pytest.mark.parametrize(
    "text, m, expected",
    [
        ("<answer_1>0 1</answer_1> <answer_2> 1 </answer_2>", 2, ["0 1", "1"]),
        (
            "talk <answer_2>b</answer_2> talk <answer_1>a</answer_1>",
            2,
            ["a", "b"],
        ),  # any order in the text
        ("<answer_1>a</answer_1><answer_2>b</answer_2>", 1, ["a"]),  # more than were asked for
        (
            "<answer_1>a</answer_1><answer_2>a </answer_2><answer_3>b</answer_3>",
            3,
            ["a", "a", "b"],
        ),  # `score` masks it
        ("<answer_1>a<answer_2>b</answer_2>", 2, ["b"]),  # the first was never closed
        ("<answer_1>a<answer_2>b</answer_1></answer_2>", 2, []),
        ("<answer_1></answer_1>", 1, [""]),
        ("</answer_1>a<answer_1>", 1, []),
        ("<answer_¹>a</answer_¹>", 1, []),
        ("", 3, []),
    ],
)
def test_parsing_by_hand(text, m, expected):
    assert parse_answers(text, TOY, m) == expected


def test_parsing_random_text():
    """Fragments of tags in random order: never an exception, at most m answers, each from the text."""
    rng = random.Random(2)
    pieces = [f"<{slash}answer_{i}>" for i in range(5) for slash in ("", "/")]
    pieces += ["0 1", "\n", "<", "answer_", "é\ud800", "\0"]
    for _ in range(5000):
        text = "".join(rng.choices(pieces, k=rng.randrange(15)))
        m = rng.randint(1, 4)
        answers = parse_answers(text, TOY, m)
        assert len(answers) <= m and all(answer in text for answer in answers)
    for m in (1, 3):
        answers = [str(i) for i in range(m)]
        assert parse_answers(write_answers(TOY, answers), TOY, m) == answers


def test_scoring_a_batch():
    """Missing answers: zero rows, out of the mask. Duplicates: their reward, out of the mask."""
    stub, perfect = " ".join("0" * 9), " ".join("1" * 9)
    scored = score(
        TOY, TOY.problems("test", 2), [[[stub, stub, perfect], []], [[perfect], [stub, perfect]]], 3
    )
    assert scored.vectors.shape == (2, 2, 3, 3) and scored.mask.tolist() == [
        [[True, False, True], [False, False, False]],
        [[True, False, False], [True, True, False]],
    ]
    torch.testing.assert_close(scored.scalars[0], torch.tensor([[0.8, 0.8, 1.0], [0.0, 0.0, 0.0]]))
    assert scored.objective_mask.all()


def test_problems_may_differ_in_their_objectives():
    """k varies from problem to problem: shorter vectors are padded and the padding is marked as absent."""

    class Varying(Task):
        def reward(self, problem, answer):
            return [1.0] * problem.data

    scored = score(Varying(), [Problem("a", 2), Problem("b", 3)], [[["x"]], [["x"]]], 1)
    assert scored.vectors.tolist() == [
        [[[1, 1, 0]]],
        [[[1, 1, 1]]],
    ] and scored.scalars.tolist() == [[[1]], [[1]]]
    assert scored.objective_mask.tolist() == [[True, True, False], [True, True, True]]


def test_the_nested_programs_of_the_examples():
    """Judged at their own twelve places; a demonstration is a program of the task, seldom a right one."""
    task = load_task(str(Path(__file__).parent.parent / "examples" / "nested.py"))
    problems = task.problems("test", 20)
    assert all(
        vector == [1.0] * 12
        for vector in task.rewards([(p, p.data["reference"]) for p in problems])
    )
    assert task.reward(problems[0], "") == [0.0] * len(task.objectives) == [0.0] * 12
    shown = [task.demonstration(problem, random.Random(i)) for i, problem in enumerate(problems)]
    assert all(
        len(text.split()) <= task.answer_words and set(text.split()) <= set(task.words)
        for text in shown
    )
    assert (
        sum(min(vector) == 1 for vector in task.rewards(list(zip(problems, shown, strict=True))))
        < 3
    )
