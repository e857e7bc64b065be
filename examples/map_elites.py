"""MAP-Elites with islands (arXiv 1504.04909): the best answer of every behaviour, and the parents among them.

An island is a grid. The behaviour of an answer, its cell, is its reward vector, rounded to quarters.
"""

import random
from dataclasses import dataclass
from operator import attrgetter

from rewards import Problem

ISLANDS = 3
FRESH = 0.2  # share of the children that have no parent


@dataclass
class Candidate:
    """An answer, or the empty slot of one."""

    problem: str  # the id
    order: int  # among the candidates of the problem, from 1
    parent: int  # the order of the parent, 0 if there is none
    island: int
    answer: str  # empty where the rollout left the slot empty
    rewards: list[float]  # (d)
    score: float  # what the goal makes of the rewards


by_score = attrgetter("score")


class Population:
    """All candidates of one problem, and on every island the best answer of each behaviour."""

    def __init__(self, problem: Problem, target: float):
        self.problem = problem
        self.target = target  # the score that solves the problem
        self.candidates: list[Candidate] = []
        self.islands: list[dict[tuple, Candidate]] = [{} for _ in range(ISLANDS)]

    def add(self, candidate: Candidate) -> None:
        self.candidates.append(candidate)
        self.settle(candidate, candidate.island)

    def settle(self, candidate: Candidate, island: int) -> None:
        """Put an answer in the cell of its behaviour, unless a better one is there."""
        grid = self.islands[island]
        cell = tuple(round(4 * reward) for reward in candidate.rewards)
        if candidate.answer and (cell not in grid or candidate.score >= grid[cell].score):
            grid[cell] = candidate

    def migrate(self) -> None:
        """Settle the best answer of every island on the next island."""
        best = [max(grid.values(), key=by_score, default=None) for grid in self.islands]
        for island, candidate in enumerate(best, 1):
            if candidate:
                self.settle(candidate, island % ISLANDS)

    def parent(self, island: int, strategy: str, rng: random.Random) -> Candidate | None:
        """The goal's best of three answers of an island. None: the child has no parent, as in best-of-n."""
        elites = list(self.islands[island].values())
        if strategy == "best_of_n" or not elites or rng.random() < FRESH:
            return None
        return max(rng.sample(elites, min(3, len(elites))), key=by_score)

    def solved_after(self) -> int:
        """The number of candidates up to the target score, 0 if none reached it."""
        for candidate in self.candidates:
            if candidate.score >= self.target - 1e-6:
                return candidate.order
        return 0
