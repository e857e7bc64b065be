"""The maze: reach the exit within the budget; gold in one corner, diamonds in the other (paper, section 4).
The bonus tile in the centre earns nothing. Openings scale with the area; below size 7 lava may lie next to the border,
else there would be no room for it. A route names moves, or the cells that it enters, which tiny models learn faster."""

import functools
import itertools
import random
from collections import deque

from torch import Tensor

from rewards import Problem, Task, UserError

STEPS = {"UP": (-1, 0), "DOWN": (1, 0), "LEFT": (0, -1), "RIGHT": (0, 1)}
HELD_OUT = 500  # mazes of "test" and of "validation" that training avoids; else 1 to 2% of those of size 5 occurred


class Maze(Task):
    """A square maze of `size` rows, 5 to 9; UserError for any other size. The reward vector (4) is zero unless E is
    reached in time, else [1, gold share, diamond share, 1 - lava share]; an item counts once."""

    name, tag, flags = "maze", "route", ("size",)
    objectives = ("completion", "gold", "diamond", "avoid_lava")
    warm_steps, slack = 700, 7  # slack: steps of the budget beyond the longer one-corner route

    def __init__(self, size: int = 7):
        if not 5 <= size <= 9:
            raise UserError(f"--size {size}: a maze has 5 to 9 rows")
        self.size = size
        self.answer_words = self.max_budget = (
            2 * (size - 1) + self.slack + 4
        )  # past a corner, with a few detours
        self.cells = [
            f"{'abcdefghi'[c]}{r + 1}" for r in range(size) for c in range(size)
        ]  # a1 is the top left corner
        self.ways = [
            {
                move: (r + dr) * size + c + dc
                for move, (dr, dc) in STEPS.items()  # that do not leave the grid
                if 0 <= r + dr < size and 0 <= c + dc < size
            }
            for r in range(size)
            for c in range(size)
        ]
        corners, centre = (0, size - 1, -size, -1), size // 2 * (size + 1)
        self.words = (
            *"#.SEGDLB",
            *(f"steps={n}" for n in range(2 * size, self.max_budget + 1)),
            *(tile + cell for tile in ".GDL" for cell in self.cells),
            *(tile + self.cells[i] for tile in "SE" for i in corners),
            "B" + self.cells[centre],
        )

    def problems(self, split: str, n: int, seed: int = 0, start: int = 0) -> list[Problem]:
        """The paper's mazes, none of those that are held out; "demonstrations" have far more walls and no conflict."""
        avoided, found = (
            frozenset() if split in ("test", "validation") else _held_out(self.size),
            [],
        )
        for i in range(start, start + n):
            rng = random.Random(id := f"maze{self.size}-{split}-{seed}-{i}")
            while (data := self._built(rng, split == "demonstrations")) is None or "".join(
                data["grid"]
            ) in avoided:
                pass
            found.append(Problem(id, data))
        return found

    def _built(self, rng: random.Random, walled: bool) -> dict | None:
        """One attempt at a maze: None where the ways are too long or too short, or there is no room for the items."""
        n, area, grid = self.size, self.size**2, self._prim(rng)
        walls = [i for i in range(area) if grid[i] == "#" and len(self._neighbours(grid, i)) > 1]
        fewest, most = (round(count * area / 81) for count in ((0, 8) if walled else (18, 28)))
        for i in rng.sample(walls, min(len(walls), rng.randint(fewest, most))):
            grid[i] = "."
        diagonals = [[0, area - 1], [n - 1, area - n]]
        rng.shuffle(diagonals)
        gold, diamond = rng.sample(diagonals[1], 2)
        end, start = diagonals[0] if rng.random() < 0.5 else diagonals[0][::-1]
        grid[start], grid[end], grid[gold], grid[diamond], grid[n // 2 * (n + 1)] = "SE..B"
        from_start, from_gold, from_diamond = (
            self.distances(grid, i) for i in (start, gold, diamond)
        )
        if not {end, gold, diamond} <= from_start.keys():
            return None
        via_gold, via_diamond = (
            from_start[gold] + from_gold[end],
            from_start[diamond] + from_diamond[end],
        )
        via_both = from_gold[diamond] + min(
            from_start[gold] + from_diamond[end], from_start[diamond] + from_gold[end]
        )
        budget = (from_start[end] if walled else max(via_gold, via_diamond)) + self.slack
        if budget > self.max_budget or (via_both <= budget and not walled):
            return None
        for (row, column), tile in ((divmod(gold, n), "G"), (divmod(diamond, n), "D")):
            near = [
                i
                for i in range(area)
                if grid[i] == "." and abs(i // n - row) + abs(i % n - column) <= 2
            ]
            if len(near) < 3:
                return None
            for i in rng.sample(near, rng.randint(3, min(5, len(near)))):
                grid[i] = tile
        inner = range(2, n - 2) if n >= 7 else range(1, n - 1)
        interior = [i for i in range(area) if grid[i] == "." and i // n in inner and i % n in inner]
        for i in rng.sample(interior, min(rng.randint(3, 5), len(interior))):
            grid[i] = "L"
        if self.distances(grid, start, blocked="#L").get(end, budget + 1) > budget:
            return None
        return {"grid": ["".join(grid[i : i + n]) for i in range(0, area, n)], "budget": budget}

    def prompt(self, problem: Problem, m: int) -> str:
        grid, budget = problem.data["grid"], problem.data["budget"]
        examples = "\n".join(f"<route_{i + 1}>RIGHT DOWN DOWN</route_{i + 1}>" for i in range(m))
        return (
            f"Find {'a route' if m == 1 else f'{m} different routes'} through this {self.size}x{self.size} maze, "
            f"from S to E in at most {budget} steps.\n\n"
            + "\n".join(" ".join(row) for row in grid)
            + "\n\n"
            "# is a wall: walking into it or off the grid costs a step and does not move you. Step on G (gold) and "
            "D (diamond) to collect them before you reach E; avoid L (lava). A route that does not reach E in time "
            "earns nothing; it ends at E.\nA route is a list of the moves UP, DOWN, LEFT and RIGHT, separated by "
            f"blanks. Answer in exactly this form and write nothing else:\n{examples}"
        )

    def reward(self, problem: Problem, answer: str) -> list[float]:
        path, grid = self.walk(problem, answer), "".join(problem.data["grid"])
        if not path or grid[path[-1]] != "E":
            return [0.0] * 4
        seen = [grid[i] for i in set(path)]
        gold, diamonds, lava = (seen.count(tile) / max(1, grid.count(tile)) for tile in "GDL")
        return [1.0, gold, diamonds, 1.0 - lava]

    def reachable(self, problem: Problem) -> list[list[float]]:
        """Those of all routes within the budget, breadth first over the cell and what was stepped on."""
        if type(self).reward is not Maze.reward:  # a task of yours that judges routes its own way
            return []
        grid, budget = "".join(problem.data["grid"]), problem.data["budget"]
        place = {
            cell: 1 << i for i, cell in enumerate(i for i, tile in enumerate(grid) if tile in "GDL")
        }
        tiles, to_end = [grid[cell] for cell in place], self.distances(grid, grid.index("E"))
        edge, ends = {(grid.index("S"), 0)}, set()
        known = set(edge)
        for step in range(1, budget + 1):
            reached = {
                (i, seen | place.get(i, 0))
                for cell, seen in edge
                for i in self._neighbours(grid, cell)
            }
            ends |= {seen for i, seen in reached if grid[i] == "E"}
            edge = {state for state in reached - known if 0 < to_end[state[0]] <= budget - step}
            known |= edge
        counts = {
            tuple(sum(seen >> i & 1 for i, at in enumerate(tiles) if at == tile) for tile in "GDL")
            for seen in ends
        }
        totals = [max(1, tiles.count(tile)) for tile in "GDL"]
        shares = [
            [count / total for count, total in zip(each, totals, strict=True)]
            for each in sorted(counts)
        ]
        return [[1.0, gold, diamonds, 1.0 - lava] for gold, diamonds, lava in shares]

    def walk(self, problem: Problem, answer: str) -> list[int]:
        """The cells of a route, counted row by row, S first, ended by E or by the budget; [] if it is no route."""
        grid = "".join(problem.data["grid"])
        path = [grid.index("S")]
        for word in answer.split()[: problem.data["budget"]]:
            ways = self.ways[path[-1]]
            if word.upper() in STEPS:
                cell = ways.get(word.upper(), path[-1])  # the border blocks
            else:
                cell = (
                    self.cells.index(word[-2:])
                    if word[-2:] in self.cells and len(word) <= 3
                    else -1
                )
                if cell not in ways.values():
                    return []
            path.append(path[-1] if grid[cell] == "#" else cell)
            if grid[cell] == "E":
                break
        return path

    def canonical(self, problem: Problem, answer: str) -> str:
        """The cells that a route enters, one a line: spelling, bumps into walls, words after the exit are nothing."""
        if not (path := self.walk(problem, answer)):
            return super().canonical(problem, answer)
        # Line breaks, which no text keeps above: the route "a2" from a1 is not the malformed text "a1 a2".
        return "\n".join(["route", *(self.cells[i] for i, _ in itertools.groupby(path))])

    def summary(self, rewards: Tensor) -> str:
        """How many of a pool (n, 4) reach the exit by the gold, by the diamonds, with equal shares of both, or not."""
        reached, gold, diamonds, _ = rewards.unbind(-1)
        counts = {
            "gold": (gold > diamonds).sum(),
            "diamonds": (diamonds > gold).sum(),
            "neither": ((gold == diamonds) & (reached > 0)).sum(),
            "failed": (reached == 0).sum(),
        }
        return ", ".join(
            f"{name} {count}" for name, count in counts.items() if count or name != "neither"
        )

    def draw(self, axes, problem: Problem, answers: list[str], color: str) -> bool:
        """The routes that reach the exit, without the loops that collect nothing; a dot marks where one turns back."""
        grid, n, rng = "".join(problem.data["grid"]), self.size, random.Random(0)
        fill = {
            "#": "#3b3b3b",
            "L": "#f4b6a6",
            "G": "#f7dc6f",
            "D": "#aed9f7",
            "S": "#e0e0e0",
            "E": "#b8e0b0",
        }
        for i, tile in enumerate(grid):
            r, c = divmod(i, n)
            axes.fill(
                [c, c + 1, c + 1, c],
                [r, r, r + 1, r + 1],
                fill.get(tile, "white"),
                edgecolor="#dddddd",
                lw=0.5,
            )
            if tile in "SEGDL":
                axes.text(
                    c + 0.5,
                    r + 0.5,
                    tile,
                    ha="center",
                    va="center",
                    fontsize=8,
                    weight="bold",
                    zorder=3,
                )
        for answer in answers:
            if self.reward(problem, answer)[0]:  # failed routes are counted in the title, not drawn
                dx, dy = rng.uniform(-0.28, 0.28), rng.uniform(-0.28, 0.28)
                path = [
                    (i % n + 0.5 + dx, i // n + 0.5 + dy)
                    for i in _without_loops(grid, self.walk(problem, answer))
                ]
                axes.plot(
                    *zip(*path, strict=True),
                    color=color,
                    alpha=0.35,
                    lw=1.3,
                    solid_joinstyle="round",
                )
                if turns := [
                    b for a, b, c in zip(path, path[1:], path[2:], strict=False) if a == c
                ]:
                    axes.plot(*zip(*turns, strict=True), ".", color=color, alpha=0.5, ms=4)
        axes.set(xlim=(0, n), ylim=(n, 0), xticks=[], yticks=[], aspect="equal")
        return True

    def tiny_prompt(self, problem: Problem) -> str:
        return " ".join([f"steps={problem.data['budget']}", *"".join(problem.data["grid"])])

    def demonstration(self, problem: Problem, rng: random.Random) -> str:
        """A short way to the exit, every tenth step a random one: it shows walking, not what is worth collecting."""
        grid, route = "".join(problem.data["grid"]), []
        here, to_end = grid.index("S"), self.distances(grid, grid.index("E"))
        while grid[here] != "E" and len(route) < self.answer_words:
            closer = rng.random() >= 0.1
            here = rng.choice(
                [i for i in self._neighbours(grid, here) if not closer or to_end[i] < to_end[here]]
            )
            route.append(grid[here] + self.cells[here])
        return " ".join(route)

    def distances(self, grid: str | list[str], start: int, blocked: str = "#") -> dict[int, int]:
        """Steps from a cell to every cell that can be reached, breadth first."""
        distances, queue = {start: 0}, deque([start])
        while queue:
            cell = queue.popleft()
            for i in self._neighbours(grid, cell, blocked):
                if i not in distances:
                    distances[i] = distances[cell] + 1
                    queue.append(i)
        return distances

    def _neighbours(self, grid: str | list[str], cell: int, blocked: str = "#") -> list[int]:
        return [i for i in self.ways[cell].values() if grid[i] not in blocked]

    def _prim(self, rng: random.Random) -> list[str]:
        """Prim's algorithm: a random wall is opened if exactly one of its neighbours is open."""
        n, grid = self.size, ["#"] * self.size**2
        cell = rng.randrange(n) * n + rng.randrange(n)
        grid[cell] = "."
        frontier = self._neighbours(grid, cell, blocked=".")
        while frontier:
            cell = frontier.pop(rng.randrange(len(frontier)))
            if grid[cell] == "#" and len(self._neighbours(grid, cell)) == 1:
                grid[cell] = "."
                frontier += self._neighbours(grid, cell, blocked=".")
        return grid


@functools.cache
def _held_out(size: int) -> frozenset[str]:
    return frozenset(
        "".join(problem.data["grid"])
        for split in ("test", "validation")
        for problem in Maze(size).problems(split, HELD_OUT)
    )


def _without_loops(grid: str, path: list[int]) -> list[int]:
    """A path without the parts that lead back to where they began and pass no gold or diamond."""
    kept: list[int] = []
    for cell in path:
        loop = kept[::-1].index(cell) + 1 if cell in kept else 0
        if not {"G", "D"} & {grid[i] for i in kept[len(kept) - loop + 1 :]}:
            del kept[len(kept) - loop :]
        kept.append(cell)
    return kept
