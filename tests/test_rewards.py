"""The tasks: maze construction and scoring by random cases, the toy's valley, custom tasks, the parser of answers."""

import itertools
import json
import random

import pytest
import torch

from rewards import TASKS, Maze, Problem, Task, Toy, UserError, _distances, load_task
from rollout import parse_answers, score, write_answers


def solve(task: Maze, problem: Problem, targets: list) -> int | None:
    """Length of the shortest walk from S through the targets, in that order, to E."""
    grid = problem.data["grid"]
    place = {tile: (r, row.index(tile)) for r, row in enumerate(grid) for tile in "SE" if tile in row}
    stops, total = [place["S"], *targets, place["E"]], 0
    for a, b in itertools.pairwise(stops):
        distances = _distances(grid, a)
        if b not in distances:
            return None
        total += distances[b]
    return total


@pytest.mark.parametrize("size", [5, 6, 7, 8, 9])
def test_mazes_keep_the_papers_promises(size):
    """Guards against mazes without the designed conflict: one corner fits the budget, both never do, a safe way exists."""
    task, n = Maze(size), size - 1
    for problem in task.problems("test", 40, seed=3):
        grid, budget = problem.data["grid"], problem.data["budget"]
        assert len(grid) == size and all(len(row) == size for row in grid)
        text = "".join(grid)
        assert text.count("S") == text.count("E") == text.count("B") == 1 and grid[size // 2][size // 2] == "B"
        assert 3 <= text.count("G") <= 5 and 3 <= text.count("D") <= 5 and text.count("L") in (3, 4, 5)
        ends = {(r, c) for r in (0, n) for c in (0, n) if grid[r][c] in "SE"}
        assert ends in ({(0, 0), (n, n)}, {(0, n), (n, 0)})
        corners = [corner for corner in ((0, 0), (0, n), (n, 0), (n, n)) if corner not in ends]
        for tile in "GD":
            found = [(r, c) for r in range(size) for c in range(size) if grid[r][c] == tile]
            assert any(all(abs(r - a) + abs(c - b) <= 2 for r, c in found) for a, b in corners)
        assert budget - task.slack == max(solve(task, problem, [corner]) for corner in corners)
        assert min(solve(task, problem, corners), solve(task, problem, corners[::-1])) > budget
        start = next((r, row.index("S")) for r, row in enumerate(grid) if "S" in row)
        end = next((r, row.index("E")) for r, row in enumerate(grid) if "E" in row)
        assert _distances(grid, start, blocked="#L")[end] <= budget
        json.dumps(problem.data)


def test_splits_and_indices_are_stable_and_disjoint():
    """Guards against training on the held-out mazes, and against problems that depend on how many are asked for."""
    task = Maze(7)
    train, test = task.problems("train", 300), task.problems("test", 200)
    assert task.problems("train", 5, start=7) == train[7:12]
    assert not {"".join(p.data["grid"]) for p in train} & {"".join(p.data["grid"]) for p in test}
    assert task.problems("train", 3, seed=1) != train[:3]


EXAMPLE = Problem("example", {"grid": ["SG#..", "LG...", "...B.", "D...#", "DD..E"], "budget": 9})


@pytest.mark.parametrize("route, expected", [
    ("RIGHT DOWN RIGHT RIGHT RIGHT DOWN LEFT DOWN DOWN", [0, 0, 0, 0]),  # the budget ends one step before E
    ("RIGHT DOWN DOWN DOWN RIGHT RIGHT DOWN RIGHT", [1, 1, 0, 1]),
    ("DOWN DOWN DOWN DOWN RIGHT RIGHT RIGHT RIGHT", [1, 0, 1, 0]),
    ("down Down DOWN down right right right right", [1, 0, 1, 0]),
    ("a2 a3 a4 a5 b5 c5 d5 e5", [1, 0, 1, 0]),  # the cells that are entered
    ("La2 .a3 Da4 Da5 Db5 .c5 .d5 Ee5", [1, 0, 1, 0]),  # with what lies there
    ("UP RIGHT DOWN DOWN DOWN RIGHT RIGHT DOWN RIGHT", [1, 1, 0, 1]),  # the border blocks, the step is spent
    ("RIGHT RIGHT DOWN DOWN DOWN RIGHT RIGHT DOWN RIGHT", [1, 1, 0, 1]),  # so does a wall
    ("RIGHT DOWN DOWN DOWN RIGHT RIGHT DOWN RIGHT UP", [1, 1, 0, 1]),  # what follows E is not walked
    ("a2 c3", [0, 0, 0, 0]),  # not a neighbour
    ("RIGHT then DOWN", [0, 0, 0, 0]), ("", [0, 0, 0, 0]), ("DOWN", [0, 0, 0, 0])])
def test_routes_by_hand(route, expected):
    assert Maze(5).reward(EXAMPLE, route) == expected


def test_items_count_once_and_lava_by_share():
    """Guards against counting a tile at every visit: back and forth over gold is still all of the gold, no more."""
    problem = Problem("long", EXAMPLE.data | {"budget": 99})
    assert Maze(5).reward(problem, "DOWN UP DOWN RIGHT UP DOWN UP DOWN DOWN DOWN RIGHT RIGHT DOWN RIGHT") == [1, 1, 0, 0]


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


@pytest.mark.parametrize("name", TASKS)
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
    """Every bit that is set costs, until the block is full: 0.8, 0.53, 0.27, 0, 1."""
    task, problem = Toy(blocks=1, bits=4), Problem("toy", {})
    values = [task.reward(problem, " ".join("1" * n + "0" * (4 - n)))[0] for n in range(5)]
    assert values[0] == pytest.approx(0.8) and values[4] == 1.0
    assert all(a > b for a, b in itertools.pairwise(values[:4]))
    for text in ("", "1", "1 1 1 2", "1 1 1 1 1"):
        assert task.reward(problem, text) == [0.0]


# ---------------------------------------------------------------------------------------------------- answers

TOY = Toy(blocks=4, bits=4)


@pytest.mark.parametrize("text, m, expected", [
    ("<answer_1>0 1</answer_1> <answer_2> 1 </answer_2>", 2, ["0 1", "1"]),
    ("talk <answer_2>b</answer_2> talk <answer_1>a</answer_1>", 2, ["a", "b"]),  # any order in the text
    ("<answer_1>a</answer_1><answer_2>b</answer_2>", 1, ["a"]),  # more than were asked for
    ("<answer_1>a</answer_1><answer_2>a </answer_2><answer_3>b</answer_3>", 3, ["a", "b"]),  # a duplicate
    ("<answer_1>a<answer_2>b</answer_2>", 2, ["b"]),  # the first was never closed
    ("<answer_1>a<answer_2>b</answer_1></answer_2>", 2, []),
    ("<answer_1></answer_1>", 1, [""]), ("</answer_1>a<answer_1>", 1, []), ("<answer_¹>a</answer_¹>", 1, []), ("", 3, [])])
def test_parsing_by_hand(text, m, expected):
    assert parse_answers(text, TOY, m) == expected


def test_parsing_random_text():
    """Fragments of tags in random order: never an exception, at most m answers, all of them distinct."""
    rng = random.Random(2)
    pieces = [f"<{slash}answer_{i}>" for i in range(5) for slash in ("", "/")] + ["0 1", "\n", "<", "answer_", "é\ud800", "\0"]
    for _ in range(5000):
        text = "".join(rng.choices(pieces, k=rng.randrange(15)))
        m = rng.randint(1, 4)
        answers = parse_answers(text, TOY, m)
        assert len(answers) <= m and len(answers) == len({TOY.canonical(answer) for answer in answers})
        assert set(answers) <= set(parse_answers(text, TOY, m, distinct=False))
    for m in (1, 3):
        answers = [str(i) for i in range(m)]
        assert parse_answers(write_answers(TOY, answers), TOY, m) == answers


def test_scoring_a_batch():
    """Missing answers: zero rows, out of the mask. Duplicates: their reward, out of the mask."""
    stub, perfect = " ".join("0" * 16), " ".join("1" * 16)
    scored = score(TOY, TOY.problems("test", 2), [[[stub, stub, perfect], []], [[perfect], [stub, perfect]]], 3)
    assert scored.vectors.shape == (2, 2, 3, 4) and scored.mask.tolist() == [
        [[True, False, True], [False, False, False]], [[True, False, False], [True, True, False]]]
    torch.testing.assert_close(scored.scalars[0], torch.tensor([[0.8, 0.8, 1.0], [0.0, 0.0, 0.0]]))
    assert scored.objective_mask.all()


def test_problems_may_differ_in_their_objectives():
    """k varies from problem to problem: shorter vectors are padded and the padding is marked as absent."""
    class Varying(Task):
        def reward(self, problem, answer):
            return [1.0] * problem.data

    scored = score(Varying(), [Problem("a", 2), Problem("b", 3)], [[["x"]], [["x"]]], 1)
    assert scored.vectors.tolist() == [[[[1, 1, 0]]], [[[1, 1, 1]]]] and scored.scalars.tolist() == [[[1]], [[1]]]
    assert scored.objective_mask.tolist() == [[True, True, False], [True, True, True]]


def test_unknown_tasks_are_named(tmp_path):
    with pytest.raises(UserError, match="--task maz: unknown; choose from maze, toy"):
        load_task("maz")
    (tmp_path / "empty.py").write_text("x = 1\n")
    with pytest.raises(UserError, match="defines 0 subclasses"):
        load_task(str(tmp_path / "empty.py"))
    with pytest.raises(UserError, match="--size 4"):
        Maze(4)
