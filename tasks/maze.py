"""The maze: reach the exit within a budget of steps (paper, section 4).

Gold lies around one corner and diamonds around the opposite one. The budget allows a route past
either corner, but not past both. Entering lava costs reward.

`problem.data` holds the rows of the maze ("grid") and the number of steps allowed ("budget").
Inside this file a maze is one sequence of tiles, row after row, and a cell is an index into it:

    # wall   . floor   S start   E exit   G gold   D diamond   L lava   B bonus, worth nothing
"""

import functools
import itertools
import math
import textwrap
from collections import deque
from collections.abc import Iterable, Sequence
from random import Random

from torch import Tensor

from report.drawings import Drawing
from rewards import Problem, Task

DIRECTIONS = {"UP": (-1, 0), "DOWN": (1, 0), "LEFT": (0, -1), "RIGHT": (0, 1)}  # rows, columns
HELD_OUT = 500  # training avoids so many mazes of "test" and "validation"; of size 5 some recur
TILE_COLORS = {
    "#": "#3b3b3b",
    "S": "#e0e0e0",
    "E": "#b8e0b0",
    "G": "#f7dc6f",
    "D": "#aed9f7",
    "L": "#f4b6a6",
}


class Maze(Drawing, Task):
    """A square maze.

    The reward vector is zero unless the route reaches the exit in time. Else it is
    [1, share of the gold, share of the diamonds, 1 - share of the lava]. A tile counts once.

    A route is a list of moves (UP DOWN LEFT RIGHT) or of the cells that it enters (a2 b2), which
    tiny models learn faster.

    Args:
        size: number of rows and of columns, 5 to 9.
    """

    name = "maze"
    legend = "S start, E exit, G gold, D diamond, L lava; failed routes are not drawn"
    tag = "route"
    flags = ("size",)
    objectives = ("completion", "gold", "diamond", "avoid_lava")
    tiny_defaults = {"warm_steps": 700}
    slack = 7  # steps of the budget beyond the longer one of the two shortest one-corner routes

    def __init__(self, size: int = 7):
        self.size = size
        self.max_budget = 2 * (size - 1) + self.slack + 4  # past a corner, with a few detours
        self.answer_words = self.max_budget  # a word per step

        # a1 is the top left corner, b1 stands to the right of it.
        rows_and_columns = itertools.product("123456789"[:size], "abcdefghi"[:size])
        self.cells = [letter + row for row, letter in rows_and_columns]
        self.moves = [self._moves_from(cell) for cell in range(size**2)]
        self.centre = size // 2 * (size + 1)
        corners = [self.cells[cell] for cell in (0, size - 1, -size, -1)]
        self.words = (
            *"#.SEGDLB",
            *(f"steps={budget}" for budget in range(2 * size, self.max_budget + 1)),
            *map("".join, itertools.product(".GDL", self.cells)),
            *map("".join, itertools.product("SE", corners)),
            "B" + self.cells[self.centre],
        )

    def problems(self, split: str, n: int, seed: int = 0, start: int = 0) -> list[Problem]:
        """Mazes of a split, those of training and demonstrations none of the held-out ones."""
        held_out = split in ("test", "validation")
        avoided = frozenset() if held_out else _held_out(self.size)

        problems = []
        for i in range(start, start + n):
            problem = Problem(f"maze{self.size}-{split}-{seed}-{i}", None)
            rng = Random(problem.id)
            while problem.data is None or _tiles(problem) in avoided:
                problem.data = self._try_to_build(rng, walled=split == "demonstrations")
            problems.append(problem)
        return problems

    def prompt(self, problem: Problem, m: int) -> str:
        routes = "a route" if m == 1 else f"{m} different routes"
        rows = "\n".join(" ".join(row) for row in problem.data["grid"])
        examples = "\n".join(f"<route_{i}>RIGHT DOWN DOWN</route_{i}>" for i in range(1, m + 1))
        return (
            f"Find {routes} through this {self.size}x{self.size} maze, "
            f"from S to E in at most {problem.data['budget']} steps.\n\n"
            f"{rows}\n\n"
            "# is a wall: walking into it or off the grid costs a step and does not move you. "
            "Step on G (gold) and D (diamond) to collect them before you reach E; avoid L (lava). "
            "A route that does not reach E in time earns nothing; it ends at E.\n"
            "A route is a list of the moves UP, DOWN, LEFT and RIGHT, separated by blanks. "
            f"Answer in exactly this form and write nothing else:\n{examples}"
        )

    def reward(self, problem: Problem, answer: str) -> list[float]:
        tiles = _tiles(problem)
        path = self.walk(problem, answer)
        if not path or tiles[path[-1]] != "E":
            return [0.0] * 4
        return _reward_at_exit(tiles, set(path))

    def walk(self, problem: Problem, answer: str) -> list[int]:
        """The cells of a route up to the exit or the last step of the budget, the start first.

        It is empty if a word is no move and no neighbour.
        """
        tiles = _tiles(problem)
        path = [tiles.index("S")]
        for word in answer.split()[: problem.data["budget"]]:
            here = path[-1]
            target = self._target(here, word)
            if target is None:
                return []
            path.append(here if tiles[target] == "#" else target)
            if tiles[target] == "E":
                break
        return path

    def canonical(self, problem: Problem, answer: str) -> str:
        """The cells that a route enters: spelling, bumps and words after the exit do not count."""
        path = self.walk(problem, answer)
        if not path:
            return super().canonical(problem, answer)
        return str([cell for cell, _ in itertools.groupby(path)])

    def reachable(self, problem: Problem) -> list[list[float]]:
        """Find the reward vectors of all routes that reach the exit within the budget.

        The search is breadth first. A state is a cell and the gold, diamond and lava tiles entered.
        """
        if type(self).reward is not Maze.reward:  # a subclass that judges routes in another way
            return []

        tiles = _tiles(problem)
        to_exit = self.distances(tiles, tiles.index("E"))
        state = (tiles.index("S"), frozenset())
        steps = {state: 0}  # the fewest that lead to a state
        queue = deque([state])
        vectors = set()
        while queue:
            state = queue.popleft()
            cell, entered = state
            if tiles[cell] == "E":
                vectors.add(tuple(_reward_at_exit(tiles, entered)))
                continue
            for neighbour in self._neighbours(tiles, cell):
                following = (neighbour, entered)
                if tiles[neighbour] in "GDL":
                    following = (neighbour, entered | {neighbour})
                in_time = steps[state] + 1 + to_exit[neighbour] <= problem.data["budget"]
                if in_time and following not in steps:
                    steps[following] = steps[state] + 1
                    queue.append(following)
        return [list(vector) for vector in sorted(vectors)]

    def summary(self, rewards: Tensor) -> str:
        """The number of routes of a pool (n, 4) that collect mostly gold, mostly diamonds, or fail."""
        if self.objectives != Maze.objectives:  # of a subclass
            return super().summary(rewards)
        completion, gold, diamonds, _ = rewards.unbind(-1)
        kinds = {
            "gold": gold > diamonds,
            "diamonds": diamonds > gold,
            "neither": (gold == diamonds) & (completion > 0),
            "failed": completion == 0,
        }
        counts = {name: int(routes.sum()) for name, routes in kinds.items()}
        parts = [f"{name} {n}" for name, n in counts.items() if n > 0 or name != "neither"]
        return ", ".join(parts)

    def draw(self, axes, problem: Problem, answers: list[str], color: str) -> None:
        """Draw the routes that reach the exit; the title counts those that fail."""
        tiles = _tiles(problem)
        self._draw_tiles(axes, tiles)

        rng = Random(0)
        for answer in answers:
            if self.reward(problem, answer)[0] == 0:
                continue
            # Every route has an offset of its own, so that equal parts do not hide each other.
            right = rng.uniform(-0.28, 0.28)
            down = rng.uniform(-0.28, 0.28)
            path = self.walk(problem, answer)
            xs = [cell % self.size + 0.5 + right for cell in path]
            ys = [cell // self.size + 0.5 + down for cell in path]
            axes.plot(xs, ys, color=color, alpha=0.35, lw=1.3, solid_joinstyle="round")
            for i in range(1, len(path) - 1):
                if path[i - 1] == path[i + 1]:  # a dot where the route turns back
                    axes.plot(xs[i], ys[i], ".", color=color, alpha=0.5, ms=4)

        axes.set(xlim=(0, self.size), ylim=(self.size, 0), xticks=[], yticks=[], aspect="equal")

    def tiny_prompt(self, problem: Problem) -> str:
        return " ".join([f"steps={problem.data['budget']}", *_tiles(problem)])

    def demonstration(self, problem: Problem, rng: Random) -> str:
        """A short way to the exit, a tenth of its steps random: nothing shows what to collect."""
        tiles = _tiles(problem)
        cell = tiles.index("S")
        to_exit = self.distances(tiles, tiles.index("E"))
        route = []
        while tiles[cell] != "E" and len(route) < self.answer_words:
            choices = self._neighbours(tiles, cell)
            if rng.random() >= 0.1:
                choices = [choice for choice in choices if to_exit[choice] < to_exit[cell]]
            cell = rng.choice(choices)
            route.append(tiles[cell] + self.cells[cell])
        return " ".join(route)

    def distances(self, tiles: Sequence[str], start: int, blocked: str = "#") -> dict[int, int]:
        """Steps from a cell to every cell that can be reached without the blocked tiles."""
        is_open = [tile not in blocked for tile in tiles]
        distances = {start: 0}
        queue = deque([start])
        while queue:
            cell = queue.popleft()
            for neighbour in self.moves[cell].values():
                if is_open[neighbour] and neighbour not in distances:
                    distances[neighbour] = distances[cell] + 1
                    queue.append(neighbour)
        return distances

    def _moves_from(self, cell: int) -> dict[str, int]:
        """The cell that each move leads to, without the moves that leave the grid."""
        row, column = divmod(cell, self.size)
        moves = {}
        for move, (down, right) in DIRECTIONS.items():
            if 0 <= row + down < self.size and 0 <= column + right < self.size:
                moves[move] = cell + down * self.size + right
        return moves

    def _neighbours(self, tiles: Sequence[str], cell: int, blocked: str = "#") -> list[int]:
        return [other for other in self.moves[cell].values() if tiles[other] not in blocked]

    def _target(self, cell: int, word: str) -> int | None:
        """The cell that a word of a route leads to, walls aside; None if it is no such word."""
        if word.upper() in DIRECTIONS:
            return self.moves[cell].get(word.upper(), cell)  # the border blocks
        if len(word) <= 3:  # the name of a cell, with or without its tile in front
            for neighbour in self.moves[cell].values():
                if word.endswith(self.cells[neighbour]):
                    return neighbour
        return None

    def _try_to_build(self, rng: Random, walled: bool) -> dict | None:
        """The data of one random maze, or None if the attempt breaks one of the rules.

        Args:
            rng: the order of its calls decides what the mazes are.
            walled: whether the maze has many walls and need not hold the conflict of the two
                corners, as those of demonstrations.
        """
        tiles = self._carve(rng)
        self._open_walls(tiles, rng, walled)

        corners = self._choose_corners(rng)
        start, end, gold, diamond = corners
        tiles[start] = "S"
        tiles[end] = "E"
        tiles[gold] = "."
        tiles[diamond] = "."
        tiles[self.centre] = "B"

        budget = self._budget(tiles, corners, walled)
        if budget is None or budget > self.max_budget:
            return None

        for item, corner in (("G", gold), ("D", diamond)):
            floor = self._floor_around(tiles, corner)
            if len(floor) < 3:
                return None
            _scatter(item, tiles, floor, rng.randint(3, min(5, len(floor))), rng)
        _scatter("L", tiles, self._inner_floor(tiles), rng.randint(3, 5), rng)

        without_lava = self.distances(tiles, start, blocked="#L")
        if without_lava.get(end, math.inf) > budget:
            return None
        return {"grid": textwrap.wrap("".join(tiles), self.size), "budget": budget}

    def _carve(self, rng: Random) -> list[str]:
        """Prim's algorithm: open a random wall if exactly one of its neighbours is open."""
        n = self.size
        tiles = ["#"] * n**2
        cell = rng.randrange(n) * n + rng.randrange(n)
        tiles[cell] = "."
        frontier = self._neighbours(tiles, cell, blocked=".")
        while frontier:
            cell = frontier.pop(rng.randrange(len(frontier)))
            if tiles[cell] == "#" and len(self._neighbours(tiles, cell)) == 1:
                tiles[cell] = "."
                frontier += self._neighbours(tiles, cell, blocked=".")
        return tiles

    def _open_walls(self, tiles: list[str], rng: Random, walled: bool) -> None:
        """Open walls between floors, 18 to 28 of them in 81 cells, or 0 to 8 if `walled`."""
        walls = []
        for cell, tile in enumerate(tiles):
            if tile == "#" and len(self._neighbours(tiles, cell)) > 1:
                walls.append(cell)
        fewest, most = (0, 8) if walled else (18, 28)
        scale = len(tiles) / 81
        n = rng.randint(round(fewest * scale), round(most * scale))
        _scatter(".", tiles, walls, n, rng)

    def _choose_corners(self, rng: Random) -> tuple[int, int, int, int]:
        """Start, exit, gold and diamond; start and exit face each other, and so do the others."""
        last = self.size - 1
        diagonals = [[0, last * (self.size + 1)], [last, last * self.size]]
        rng.shuffle(diagonals)
        gold, diamond = rng.sample(diagonals[1], 2)
        start, end = diagonals[0]
        if rng.random() < 0.5:
            start, end = end, start
        return start, end, gold, diamond

    def _budget(self, tiles: list[str], corners: tuple[int, ...], walled: bool) -> int | None:
        """The steps that a route may take; None if a corner is cut off or one route passes both."""
        start, end, gold, diamond = corners
        distances = {corner: self.distances(tiles, corner) for corner in (start, gold, diamond)}

        def steps(*stops: int) -> float:
            """The length of the shortest way past these corners to the exit, infinite if none."""
            legs = itertools.pairwise([start, *stops, end])
            return sum(distances[a].get(b, math.inf) for a, b in legs)

        past_both = min(steps(gold, diamond), steps(diamond, gold))
        if math.isinf(past_both):
            return None
        if walled:
            return steps() + self.slack
        budget = max(steps(gold), steps(diamond)) + self.slack
        return budget if budget < past_both else None

    def _floor_around(self, tiles: list[str], corner: int) -> list[int]:
        """The floor cells that are at most two steps from a corner where no wall counts."""
        steps = self.distances(tiles, corner, blocked="")
        return [cell for cell, tile in enumerate(tiles) if tile == "." and steps[cell] <= 2]

    def _inner_floor(self, tiles: list[str]) -> list[int]:
        """The floor cells off the border, in mazes of 7 rows or more two steps away from it."""
        margin = 2 if self.size >= 7 else 1
        inner = range(margin, self.size - margin)
        cells = []
        for cell, tile in enumerate(tiles):
            row, column = divmod(cell, self.size)
            if tile == "." and row in inner and column in inner:
                cells.append(cell)
        return cells

    def _draw_tiles(self, axes, tiles: str) -> None:
        for cell, tile in enumerate(tiles):
            row, column = divmod(cell, self.size)
            color = TILE_COLORS.get(tile, "white")
            axes.bar(column, 1, 1, row, align="edge", color=color, edgecolor="#dddddd", lw=0.5)
            if tile in "SEGDL":
                style = {"ha": "center", "va": "center", "fontsize": 8, "weight": "bold"}
                axes.text(column + 0.5, row + 0.5, tile, zorder=3, **style)


@functools.cache
def _held_out(size: int) -> frozenset[str]:
    """The tiles of the mazes that training avoids."""
    task = Maze(size)
    problems = task.problems("test", HELD_OUT) + task.problems("validation", HELD_OUT)
    return frozenset(_tiles(problem) for problem in problems)


def _tiles(problem: Problem) -> str:
    """The tiles of a maze, row after row."""
    return "".join(problem.data["grid"])


def _scatter(tile: str, tiles: list[str], cells: list[int], n: int, rng: Random) -> None:
    """Put a tile on n of the cells, or on all of them if there are fewer."""
    for cell in rng.sample(cells, min(n, len(cells))):
        tiles[cell] = tile


def _reward_at_exit(tiles: str, entered: Iterable[int]) -> list[float]:
    """The reward vector (4) of a route that reached the exit, from the cells that it entered."""
    items = [tiles[cell] for cell in entered]
    gold, diamonds, lava = (items.count(tile) / max(1, tiles.count(tile)) for tile in "GDL")
    return [1.0, gold, diamonds, 1.0 - lava]
