"""The paper's claims, judged against its own baselines, and their verdicts.

A finding is an interval that must lie above a bound, or below it: shown where all of it does, refuted where none of
it does. A claim holds if all its findings are shown, and fails if some are refuted and none is shown; it is open
if none is refuted, and else holds partly. C6 and C10 come from summaries of the paper.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import torch

from examples.markdown import markdown
from study.estimates import Estimate, estimate
from study.grid import ALIKE, HEADLINE
from study.results import Pair, Results, title_of

CLAIMS = {
    "C1": "at k = 30 VPO matches or beats the strongest scalar baseline",
    "C2": "its lead over that baseline widens with k",
    "C3": "GRPO is ahead at k = 1, VPO by k = 5",
    "C4": "in training GRPO's and Multi-RLVR's diversity halves, VPO's stays",
    "C5": "in a search VPO solves what GRPO does not, above chance",
    "C6": "at most 10% more tokens than GRPO and Multi-RLVR",
    "C7": "with collinear objectives VPO is GRPO",
    "C10": "GRPO stays out of a deceptive valley, VPO crosses it",
}
BASELINES = ("grpo", "max_at_k", "gdpo", "random_weighting", "multi_rlvr")
LARGE_K = {
    "maze": "best@30",
    "code": "pass@30",
    HEADLINE: "W@30",
}  # best@5 and best@30 of headlines tie


@dataclass(frozen=True)
class Finding:
    claim: str
    text: str
    value: Estimate
    above: float = 0.0
    below: float | None = None  # in place of above

    @property
    def is_shown(self) -> bool | None:
        """None: the bound lies inside the interval."""
        low, high = self.value.low, self.value.high
        bound = self.above if self.below is None else self.below
        if low <= bound <= high:
            return None
        return (low > bound) == (self.below is None)

    @property
    def margin(self) -> float:
        """How far the mean lies on the right side of the bound."""
        return self.value.mean - self.above if self.below is None else self.below - self.value.mean

    def __str__(self) -> str:
        rule = f"above {self.above:g}" if self.below is None else f"below {self.below:g}"
        return f"{self.text}: {self.value}, {rule}?"


def claim_table(results: Results) -> str:
    """The claims with their verdicts, and of each the finding that decides.

    That is a refuted one, else an open one, else one that is shown; of several the one with the least margin.
    """
    findings = [*of_tasks(results), *of_single_tasks(results)]
    rows = []
    for name, claim in CLAIMS.items():
        own = [finding for finding in findings if finding.claim == name]
        rows.append([name, claim, verdict(own), str(min(own, key=rank))])
    return markdown(["", "claim", "verdict", "the finding that decides"], rows)


def rank(finding: Finding) -> tuple[int, float]:
    """The order in which findings decide."""
    return (False, None, True).index(finding.is_shown), finding.margin


def verdict(findings: list[Finding]) -> str:
    shown = {finding.is_shown for finding in findings}
    if shown == {True}:
        return "holds"
    if False not in shown:
        return "open"
    return "partly" if True in shown else "fails"


def of_tasks(results: Results) -> Iterator[Finding]:
    """The findings of each main task."""
    for task, large_k in LARGE_K.items():
        scalars = [row for row in BASELINES if results.seeds(task, row)]
        best = max(scalars, key=lambda row: results.average(task, row, large_k))
        lead = f"VPO - {title_of(best)}"
        yield difference(results, "C1", task, ("vpo", best), large_k, -ALIKE)
        kind = "W" if task == HEADLINE else "best"
        leads = [results.gaps(task, ("vpo", best), f"{kind}@{k}").mean(1) for k in (3, 30)]
        growth = (leads[1] - leads[0])[:, None]  # (seeds, 1)
        text = f"{task}, growth of {lead} from {kind}@3 to {kind}@30"
        yield Finding("C2", text, estimate(growth))
        yield difference(results, "C2", task, ("vpo", best), f"{kind}@30")
        yield difference(results, "C3", task, ("grpo", "vpo"), "best@1")
        yield difference(results, "C3", task, ("vpo", "grpo"), f"{kind}@5")
        for policy in ("vpo", "grpo", "multi_rlvr"):
            seeds = results.seeds(task, policy)
            stored = results.stored(task, policy, seeds)
            if not seeds:
                continue
            curves = torch.tensor([record["training"]["diversity"] for record in stored])
            kept = estimate(curves[:, -1:] / curves[:, :1])
            text = f"{task}, diversity of {title_of(policy)}, last over first"
            if policy == "vpo":
                yield Finding("C4", text, kept, above=0.9)
                continue
            yield Finding("C4", text, kept, below=0.5)
            ratios = []
            for ours, theirs in zip(results.stored(task, "vpo", seeds), stored, strict=True):
                ratios.append([ours["tokens"] / theirs["tokens"]])
            text = f"{task}, tokens of VPO over {title_of(policy)}'s"
            yield Finding("C6", text, estimate(torch.tensor(ratios)), below=1.1)


def difference(
    results: Results, claim: str, task: str, pair: Pair, measure: str, above: float = 0.0
) -> Finding:
    """A finding about a difference."""
    text = f"{task}, {measure}, {title_of(pair[0])} - {title_of(pair[1])}"
    return Finding(claim, text, results.difference(task, pair, measure), above)


def of_single_tasks(results: Results) -> Iterator[Finding]:
    """The findings of the search, of the collinear reward and of the valley."""
    grpo = results.solved["grpo"]  # (runs, N)
    alone = (results.solved["vpo"] & ~grpo).sum(1)
    chance = (grpo.roll(1, 0) & ~grpo).sum(1)  # what another run of GRPO solves
    more = (alone - chance).double()[:, None]  # (runs, 1)
    yield Finding("C5", "mazes that VPO alone solves, less chance", estimate(more))
    gaps = results.gaps("copies", ("vpo", "grpo"), "W@30")
    gap = estimate(gaps * gaps.mean().sign())
    yield Finding("C7", "copies, W@30, VPO's gap to GRPO", gap, below=ALIKE)
    stays, crosses = [estimate(results.values("toy", row, "pass@30")) for row in ("grpo", "vpo")]
    yield Finding("C10", "toy, pass@30 of GRPO", stays, below=0.1)
    yield Finding("C10", "toy, pass@30 of VPO", crosses, above=0.9)
