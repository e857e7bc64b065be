"""The stored records as rows of tables: values by seed and problem, and their differences."""

import json
from pathlib import Path

import torch
from torch import Tensor

from examples.search_report import solved_at
from report.looks import look_of
from rewards import UserError
from study.estimates import Estimate, estimate, words
from study.grid import HEADLINE, JUDGED, KL, TERMS_AT, Cell

SEARCH = Path(__file__).parent / "results" / "search" / "search.json"
Pair = tuple[str, str]  # ours and theirs
# A row is a policy, after @ the setting in which it was sampled; "best" is the best temperature of these.
TEMPERATURES = ("0.7", "1", "1.3")
OUR_TERM = f"grpo-kl{TERMS_AT:g}"  # which the other KL terms are compared with
SIX = ("start", "grpo", "grpo-kl", "max_at_k", "vpo", "group_vpo")
TITLES = {
    "kl": "KL",
    f"kl{TERMS_AT:g}": f"KL {TERMS_AT:g}",
    "kl-clamped": f"KL {TERMS_AT:g}, clamped",
    "kl-k2": f"KL {TERMS_AT:g}, k2",
    "rate-of-grpo": "GRPO's rate",
    "rate-of-vpo": "VPO's rate",
    "half": "half-way weights",
}


class Results:
    """What was measured, by task, policy, seed and setting.

    Args:
        solved: by policy, which problems each of its runs solved in the search, (runs, N) bool.
    """

    def __init__(self, records: dict[Cell, dict], solved: dict[str, Tensor]):
        self.records = records
        self.solved = solved
        self._runs: dict[tuple[str, str], dict[int, dict]] = {}  # -> seed -> settings
        for cell, record in records.items():
            for name, settings in record["policies"].items():
                policy = cell.policy if name == cell.method else name
                if not cell.is_validation:
                    self._runs.setdefault((cell.task, policy), {})[cell.seed] = settings
        for task, weight in KL.items():
            if weight == TERMS_AT and (task, "grpo-kl") in self._runs:  # one policy with two names
                self._runs[task, OUR_TERM] = self._runs[task, "grpo-kl"]

    def seeds(self, task: str, *rows: str) -> list[int]:
        """The seeds in which all these rows were measured."""
        of_each = []
        for row in rows:
            policy, _, setting = row.partition("@")
            needed = set(TEMPERATURES) if setting == "best" else {setting or TEMPERATURES[0]}
            runs = self._runs.get((task, policy), {})
            of_each.append({seed for seed, settings in runs.items() if needed <= set(settings)})
        return sorted(set.intersection(*of_each))

    def stored(self, task: str, policy: str, seeds: list[int]) -> list[dict]:
        """The records of some seeds."""
        by_seed = {}
        for cell, record in self.records.items():
            if (cell.task, cell.policy) == (task, policy):
                by_seed[cell.seed] = record
        return [by_seed[seed] for seed in seeds]

    def candidates(self, row: str) -> list[list[str]]:
        """The candidates of seed 0 for the first held-out texts of headlines."""
        return self._runs[HEADLINE, row][0][TEMPERATURES[0]]["candidates"]

    def values(self, task: str, row: str, measure: str, seeds: list[int] | None = None) -> Tensor:
        """A measure of a row: (seeds, N), or (seeds, 1) where only means are stored."""
        policy, _, setting = row.partition("@")
        runs = self._runs[task, policy]
        if setting == "best":
            of_each = [self.values(task, f"{policy}@{t}", measure) for t in TEMPERATURES]
            n = min(values.shape[1] for values in of_each)
            means = [values[:, :n].mean().item() for values in of_each]
            row = f"{policy}@{TEMPERATURES[means.index(max(means))]}"
            return self.values(task, row, measure, seeds)[:, :n]
        measured = [runs[seed][setting or TEMPERATURES[0]] for seed in seeds or sorted(runs)]
        name = f"{measure} of each"
        if name in measured[0]:
            return torch.tensor([data[name] for data in measured], dtype=torch.float64) / 1000
        return torch.tensor([[data[measure]] for data in measured], dtype=torch.float64)

    def average(self, task: str, row: str, measure: str) -> float:
        return self.values(task, row, measure).mean().item()

    def gaps(self, task: str, pair: Pair, measure: str) -> Tensor:
        """Ours minus theirs, paired by seed and problem: (seeds that both have, N)."""
        seeds = self.seeds(task, *pair)
        ours, theirs = [self.values(task, row, measure, seeds) for row in pair]
        return ours - theirs

    def difference(self, task: str, pair: Pair, measure: str) -> Estimate:
        return estimate(self.gaps(task, pair, measure))

    def judged(self, task: str, pairs: tuple[Pair, ...]) -> dict[tuple[Pair, str], str]:
        """The words of a task's differences in the judged measures: one family of Holm's correction."""
        found = {}
        for pair in pairs:
            is_again = pair == (OUR_TERM, "grpo") and KL[task] == TERMS_AT  # judged as "grpo-kl"
            for measure in JUDGED:
                if not is_again:
                    found[pair, measure] = self.difference(task, pair, measure)
        return words(found)


def solved_in_search() -> dict[str, Tensor]:
    """The stored search: by policy, which problems each of its runs solved, (runs, N) bool."""
    try:
        policies = json.loads(SEARCH.read_text("utf-8"))["policies"]
        solved = {policy: solved_at(runs) > 0 for policy, runs in policies.items()}
        torch.stack([solved["grpo"], solved["vpo"], *solved.values()])  # all have one shape
    except (OSError, ValueError, LookupError, TypeError, AttributeError, RuntimeError) as error:
        advice = "restore it, or give the commands of study/pages/search.md"
        raise UserError(f"{SEARCH}: cannot be read ({error!s:.200}); {advice}") from error
    return solved


def title_of(row: str) -> str:
    """What tables and figures call a row."""
    policy, _, setting = row.partition("@")
    method, _, rest = policy.partition("-")
    parts = [TITLES.get(word, word.replace("-", " ")) for word in (rest, setting) if word]
    return ", ".join([look_of(method).title, *parts])
