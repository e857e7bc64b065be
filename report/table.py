"""The sentences below the table of an evaluation."""

import itertools
from pathlib import Path

from engine.evaluations import Results
from engine.files import read_log
from engine.looks import look_of
from vpo import ADVANTAGES, SEVERAL_ANSWERS, answers_per_rollout


def sentences(results: Results) -> list[str]:
    """What the table says: whose variety is left, and who is best for one candidate and for all."""
    n = results.settings.pool
    if not any(results.mean(policy, "diversity") for policy in results.estimates):
        return [
            "all candidates of all policies earned the same: nothing was learnt, or nothing can be"
        ]
    outcomes = [outcome(results, policy) for policy in results.estimates if policy in ADVANTAGES]
    if not outcomes:
        return []
    return [
        f"diversity, against the start model's: {', '.join(outcomes)}",
        f"one candidate, best@1: {ranking(results, 'best@1')}",
        f"{n} candidates for a user of unknown preferences, W@{n}: {ranking(results, f'W@{n}')}",
    ]


def outcome(results: Results, policy: str) -> str:
    """What became of a method's diversity, such as "GRPO 3% (collapsed)"."""
    title = look_of(policy).title
    # The start model is asked for what the method is asked for.
    start = "start_sets" if policy in SEVERAL_ANSWERS else "start"
    before = results.mean(start, "diversity")
    after = results.mean(policy, "diversity")
    if before < 1e-6:
        return f"{title} {after:.3f} (start model 0)"
    what = variety(after / before)
    utility = f"W@{results.settings.pool}"
    if results.mean(policy, utility) < results.mean(start, utility):
        what += f", {utility} below the start model"
    return f"{title} {after / before:.0%} ({what})"


def variety(share: float) -> str:
    """What became of a policy's diversity, given as a share of the start model's."""
    if share < 1 / 3:
        return "collapsed"
    if share < 0.9:
        return "narrowed"
    if share < 1.1:
        return "kept"
    return "grew"


def ranking(results: Results, measure: str) -> str:
    """The policies from the best to the worst, with half of the 95% interval of each."""
    has_sets = any(policy in SEVERAL_ANSWERS for policy in results.estimates)
    shown = [policy for policy in results.estimates if policy != "start_sets" or has_sets]
    shown.sort(key=lambda policy: results.mean(policy, measure), reverse=True)
    parts = []
    for policy in shown:
        estimate = results.estimates[policy][measure]
        parts.append(f"{look_of(policy).title} {estimate.mean:.3f} ± {estimate.margin:.3f}")
    return ", ".join(parts)


def training_cost(run: Path, method: str, m: int) -> str:
    """What a method sampled in training, which shows whether a comparison of methods is fair."""
    rows = read_log(run / method / "metrics.jsonl", "rollouts", "tokens")
    answers = answers_per_rollout(method, m) * sum(row["rollouts"] for row in rows)
    tokens = sum(row["tokens"] for row in rows)
    return f"{look_of(method).title} {len(rows)} steps, {answers:,} answers, {tokens:,} tokens"


def print_left_out(policies_of: dict[str, list[str]]) -> None:
    """Name the policies that a mean over runs lacks, given those of each run."""
    of_any = itertools.chain.from_iterable(policies_of.values())
    for policy in dict.fromkeys(of_any):
        lacking = [run for run, own in policies_of.items() if policy not in own]
        if lacking:
            title = look_of(policy).title
            print(f"{title} is left out of the mean: not trained in {', '.join(lacking)}")
