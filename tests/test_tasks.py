"""The maze and the toy: construction and scoring by random cases; what is read out of rollouts and scored."""

import collections
import hashlib
import itertools
import json
import math
import random
from pathlib import Path

import pytest
import torch

from rewards import Problem, Task, UserError, write_answers
from rollout import parse_answers, score
from tasks import load_task, maze
from tasks.maze import Maze
from tasks.toy import Toy


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
        for tile in "GD":
            assert any(lies_around(tiles, tile, divmod(corner, size)) for corner in corners)

        one, other = corners
        past_one = steps_through(task, tiles, [start, one, end])
        past_other = steps_through(task, tiles, [start, other, end])
        assert budget == max(past_one, past_other) + task.slack
        assert steps_through(task, tiles, [start, one, other, end]) > budget
        assert steps_through(task, tiles, [start, other, one, end]) > budget
        assert task.distances(tiles, start, blocked="#L")[end] <= budget


def lies_around(tiles: str, item: str, corner: tuple[int, int]) -> bool:
    """Whether all tiles of this kind are at most two steps from a corner (row, column)."""
    size = math.isqrt(len(tiles))
    for cell, tile in enumerate(tiles):
        row, column = divmod(cell, size)
        if tile == item and abs(row - corner[0]) + abs(column - corner[1]) > 2:
            return False
    return True


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
    mazes = []
    for split in ("train", "demonstrations", "test", "validation"):
        for seed in (0, 1):
            mazes.append([problem.data for problem in task.problems(split, 20, seed)])
    text = json.dumps([task.words, mazes])
    assert hashlib.sha256(text.encode()).hexdigest()[:16] == expected


def grids(problems: list[Problem]) -> list[str]:
    return ["".join(problem.data["grid"]) for problem in problems]


def test_no_held_out_maze_occurs_in_training(monkeypatch):
    """Guards against training on what is tested: of size 5 that happened to 3 test mazes of 200 in every run.

    The mazes that do not collide must be those of always: published tables rest on them.
    """
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
    scored = score(task, [EXAMPLE], [[one, other]], 2)
    assert scored.answer_mask.tolist() == [[[True, not same]]]


def test_a_pool_of_routes_in_few_words():
    """Every route is counted once: those with neither or as much of both are no failures."""
    gold = [[1.0, 1.0, 0.0, 1.0]]
    diamonds = [[1.0, 0.2, 0.5, 0.0]]
    failed = [[0.0] * 4]
    pool = gold * 18 + diamonds * 9 + failed * 3
    assert Maze(5).summary(torch.tensor(pool)) == "gold 18, diamonds 9, failed 3"
    pool += [[1.0, 0.0, 0.0, 1.0], [1.0, 0.5, 0.5, 1.0]]
    assert Maze(5).summary(torch.tensor(pool)) == "gold 18, diamonds 9, neither 2, failed 3"


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
    assert [len(line) for line in plain] == [9]
    assert wander == plain and not failed
    spur, dot = gold
    assert len(spur) == 11
    assert dot == [spur[1]], "a dot where the spur ends"


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
    task = Maze(6)
    rng = random.Random(0)
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
    task = load_task(name)
    rng = random.Random(1)
    for split in ("train", "demonstrations", "test"):
        for problem in task.problems(split, 100):
            answer = task.demonstration(problem, rng)
            assert {*task.tiny_prompt(problem).split(), *answer.split()} <= set(task.words)
            assert len(answer.split()) <= task.answer_words
            assert len(task.reward(problem, answer)) == len(task.objectives)


def test_toy_is_a_deceptive_valley():
    """Every bit that is set costs, until the block is full: 0.8, 0.4, 0, 1; the other blocks do not matter."""
    task = Toy()
    problem = Problem("toy", {})
    for block, score_of_block in (("000", 0.8), ("100", 0.4), ("110", 0.0), ("111", 1.0)):
        answer = " ".join("000" + block + "000")
        assert task.reward(problem, answer) == pytest.approx([0.8, score_of_block, 0.8])
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


@pytest.mark.parametrize(
    ("text", "m", "finished", "unfinished"),
    [
        ("1. red\n2) blue\n3: green", 3, ["red", "blue", "green"], ["red", "blue"]),
        ("Sure:\n 1. red \n2. blue\n2. late\n4. beyond\n", 3, ["red", "blue"], ["red", "blue"]),
        ("1. r", 1, ["r"], []),
        ("1. red\n", 1, ["red"], ["red"]),
        ("1.5 apples", 1, ["1.5 apples"], []),
        ("1.red\n", 1, ["red"], ["red"]),
        ("two\nlines", 1, ["two\nlines"], []),
        ("no list", 3, [], []),
        ("<answer_1> red </answer_1>\n2. blue\n", 2, ["red"], ["red"]),  # tags: lines do not count
        ("<answer_1> red", 1, [], []),  # never closed
        ("<think>1. no\n</think>1. red\n2. blue\n", 2, ["red", "blue"], ["red", "blue"]),
        ("<think>1. no\n2. no\n", 2, [], []),
        (" \n", 1, [], []),
    ],
)
def test_answers_without_tags(text, m, finished, unfinished):
    """What a text that still grows already holds never changes: a rollout may end with it."""
    task = Task()
    assert parse_answers(text, task, m) == finished
    assert parse_answers(text, task, m, finished=False) == unfinished
    task.reads_untagged = False
    assert parse_answers(text, task, m) == (["red"] if "</answer" in text else [])


@pytest.mark.parametrize("form", ["tags", "lines"])
def test_what_is_written_is_read(form):
    """A list's prompt ends with its first number; a model may write it again."""
    task = Task()
    task.form = form
    for answers in (["red"], ["red", "blue"]):
        text = write_answers(task, answers)
        assert parse_answers(text, task, 2) == answers
        assert text.startswith("<answer_1>" if form == "tags" else " red")
    assert parse_answers("1. red\n2. blue", task, 2) == ["red", "blue"]
    assert "2. blue" in task.request("Paint!", 1, ["red", "blue"]) or form == "tags"


@pytest.mark.parametrize("m", [1, 2])
def test_a_list_whose_first_number_stands_in_the_prompt(m):
    """The rollout may begin with an empty line, or with a number that is part of the answer."""
    task = Task()
    task.form = "lines"
    assert parse_answers("\nred blue\n", task, m) == ["red blue"]
    assert parse_answers("5 apples\n", task, m, finished=False) == ["5 apples"]
    assert parse_answers(" \n", task, m) == []


def test_what_would_not_be_read_is_not_written():
    """A text in place of a list would be spelt out; of several lines a list reads the first."""
    task = Task()
    with pytest.raises(UserError, match="a list of texts, not 'red blue'"):
        task.request("Paint!", 3, "red blue")
    assert "red\nblue" in task.request("Paint!", 3, ["red\nblue"])
    task.form = "lines"
    for write in (task.request, lambda _, __, answers: write_answers(task, answers)):
        with pytest.raises(UserError, match='several lines.* form = "tags"'):
            write("Paint!", 3, ["red\nblue"])
    assert parse_answers(write_answers(task, ["red\n"]), task, 1) == ["red"]


def test_an_answer_that_counts_stays_when_the_text_grows():
    rng = random.Random(3)
    pieces = ["1. ", "2. ", "red", " ", "\n", "<answer_1>", "</answer_1>", "</think>", "."]
    for _ in range(2000):
        text = ""
        counted = []
        for piece in rng.choices(pieces, k=12):
            text += piece
            parsed = parse_answers(text, Task(), 1, finished=False)
            is_tagged = "answer_1>" in text or "</think>" in text
            assert is_tagged or not counted or parsed == counted
            counted = parsed


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
    stub = " ".join("0" * 9)
    perfect = " ".join("1" * 9)
    answers = [[stub, stub, perfect], [], [perfect], [stub, perfect]]  # P = 2, G = 2
    scored = score(TOY, TOY.problems("test", 2), answers, 3)
    assert scored.vectors.shape == (2, 2, 3, 3)
    assert scored.answer_mask[0].tolist() == [[True, False, True], [False, False, False]]
    assert scored.answer_mask[1].tolist() == [[True, False, False], [True, True, False]]
    expected = torch.tensor([[0.8, 0.8, 1.0], [0.0, 0.0, 0.0]])
    torch.testing.assert_close(scored.scalars[0], expected)
    assert scored.objective_mask.all()


def test_problems_may_differ_in_their_objectives():
    """k varies from problem to problem: shorter vectors are padded and the padding is marked as absent."""

    class Varying(Task):
        def reward(self, problem, answer):
            return [1.0] * problem.data

    problems = [Problem("a", 2), Problem("b", 3)]
    scored = score(Varying(), problems, [["x"], ["x"]], 1)
    assert scored.vectors.tolist() == [[[[1, 1, 0]]], [[[1, 1, 1]]]]
    assert scored.scalars.tolist() == [[[1]], [[1]]]
    assert scored.objective_mask.tolist() == [[True, True, False], [True, True, True]]


def test_the_nested_programs_of_the_examples():
    """Judged at their own twelve places; a demonstration is a program of the task, seldom a right one."""
    task = load_task(str(Path(__file__).parent.parent / "examples" / "nested.py"))
    problems = task.problems("test", 20)
    references = [problem.data["reference"] for problem in problems]
    right = task.rewards(list(zip(problems, references, strict=True)))
    assert right == [[1.0] * 12] * 20
    assert len(task.objectives) == 12
    assert task.reward(problems[0], "") == [0.0] * 12

    demonstrations = []
    for i, problem in enumerate(problems):
        demonstrations.append(task.demonstration(problem, random.Random(i)))
    for text in demonstrations:
        words = text.split()
        assert len(words) <= task.answer_words
        assert set(words) <= set(task.words)
    vectors = task.rewards(list(zip(problems, demonstrations, strict=True)))
    assert sum(min(vector) == 1 for vector in vectors) < 3
