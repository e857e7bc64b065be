"""The paper's claims: what was measured of each, and the verdict that follows from it.

- C1 and C2 hold VPO with the KL term that validation chose for thirty candidates against the scalar
  baseline that is the best of all rates and cures in the evaluation itself. Both hold VPO against the
  best scalar baseline with half-way weights (t = 0.5), too, in runs of their own.
- "Matches or beats" (C1): shown if the whole interval is above -0.02, refuted if all of it is below.
- A lead (C2, C3): shown if it is firm, refuted by a firm difference of the other sign.
- The crossing (C3), of GRPO, of GRPO with KL 0.1 and of GRPO with half-way weights: the first k at which
  VPO's mean is above GRPO's. It counts only where GRPO's lead at k = 1 is firm: up to k = 5 it shows the
  claim, later it refutes it.
- A search (C5): shown if in every run VPO solves more problems that GRPO does not solve than GRPO of
  another run does, which is chance; refuted if in no run. It is GRPO at its low rate where that took part.
- Tokens (C6): shown if VPO sampled less than 1.1 times as many.
- "Alike" (C7): shown if the whole interval is within 0.02 of 0, refuted if none of it is.
"""

from collections.abc import Iterator
from dataclasses import dataclass

from examples.markdown import markdown
from study.entries import GRPO, GRPO_KL, MAX_AT_K, MULTI_RLVR, VPO, Entry, mixed
from study.grid import HEADLINE
from study.searches import counts_alone
from study.stored import SINGLE, Difference, Stored, TaskResults
from study.tables import HALF, KS, compared, counts_of_other_runs, listed, rival_of
from study.validation import own

# By what many candidates are judged in each task. In headlines best@30 nearly ties: few tell four facts.
LARGE_K = {"maze": "best@30", "code": "pass@30", HEADLINE: "W@30"}
ALIKE = 0.02  # smaller differences count as none


@dataclass(frozen=True)
class Finding:
    """One measurement; `verdict` is None where it neither shows nor refutes the claim."""

    text: str
    verdict: bool | None


def verdict_table(stored: Stored, _: str) -> str:
    """The claims with their verdicts and one number each."""
    rows = []
    for text, measure in CLAIMS.items():
        name, _, claim = text.partition(": ")
        findings = list(measure(stored))
        rows.append([name, claim, f"**{verdict_of(findings)}**", decisive(findings)])
    return markdown(["", "claim of the paper", "verdict", "measured"], rows)


def verdict_of(findings: list[Finding]) -> str:
    """Holds: shown in all findings. Partly: shown and refuted. Fails: refuted, never shown.

    Open: never refuted, but not shown everywhere.
    """
    verdicts = {finding.verdict for finding in findings}
    if verdicts == {True}:
        return "holds"
    if False not in verdicts:
        return "open"
    return "partly" if True in verdicts else "fails"


def decisive(findings: list[Finding]) -> str:
    """The text of the first finding that is refuted, else undecided, else shown."""
    order = (False, None, True)
    return min(findings, key=lambda finding: order.index(finding.verdict)).text


def beats_scalar_baselines(stored: Stored) -> Iterator[Finding]:
    for task, ours, scalar in with_scalars(stored):
        measure = LARGE_K[task.name]
        lead = task.difference(ours, scalar, measure)
        verdict = decided(lead.low > -ALIKE, lead.high < -ALIKE)
        text = f"{task.name}, {measure}, {ours.title} - {scalar.title}: {lead.short}"
        yield Finding(text, verdict)


def lead_widens_with_k(stored: Stored) -> Iterator[Finding]:
    for task, ours, scalar in with_scalars(stored):
        lead_at_30 = task.lead(ours, scalar, "best@30")
        lead = task.summary(lead_at_30)
        growth = task.summary(lead_at_30 - task.lead(ours, scalar, "best@3"))
        text = f"{task.name}, {ours.title} - {scalar.title}: {growth.short} from best@3 to best@30, where it is "
        yield Finding(text + lead.short, both(is_positive(growth), is_positive(lead)))


def curves_cross(stored: Stored) -> Iterator[Finding]:
    for name in LARGE_K:
        task = stored.task(name)
        yield crossing(task, GRPO)
        yield crossing(task, GRPO_KL)
        yield crossing(stored.mixed.task(name), mixed(GRPO, HALF))


def crossing(task: TaskResults, grpo: Entry) -> Finding:
    """Who is ahead with one candidate, and from which k on VPO is."""
    grpo_lead = task.difference(grpo, VPO, "best@1")
    ahead = [k for k in KS[1:] if task.lead(VPO, grpo, f"best@{k}").mean() > 0]
    since = f"from k = {ahead[0]}" if ahead else "at no k"
    text = f"{task.name}, best@1, {grpo.title} - VPO: {grpo_lead.short}; VPO's mean above in best@k {since}"
    crosses_early = bool(ahead) and ahead[0] <= 5
    return Finding(text, both(is_positive(grpo_lead), crosses_early))


def diversity_in_training(stored: Stored) -> Iterator[Finding]:
    for name in LARGE_K:
        task = stored.task(name)
        first = {}  # ten steps of training
        last = {}
        for policy in (GRPO, MULTI_RLVR, VPO):
            first[policy] = task.average(policy, lambda run: run.training["diversity"][0])
            last[policy] = task.average(policy, lambda run: run.training["diversity"][-1])
        for policy, expectation, met in (
            (GRPO, "below half", last[GRPO] < 0.5 * first[GRPO]),
            (MULTI_RLVR, "below two thirds of VPO's", last[MULTI_RLVR] < 0.67 * last[VPO]),
            (VPO, "as high as at first", last[VPO] >= first[VPO]),
        ):
            outcome = expectation if met else f"not {expectation}"
            change = f"{first[policy]:.2f} to {last[policy]:.2f}"
            text = f"{name}, diversity of {policy.title} in training: {change}, {outcome}"
            yield Finding(text, met)


def vpo_solves_more(stored: Stored) -> Iterator[Finding]:
    for name, search in stored.searches.items():
        if not name.endswith("evolve"):
            continue
        policies = search["policies"]
        rival = rival_of(policies)
        alone = counts_alone(policies, ("vpo",), (rival,))
        chance = counts_of_other_runs(policies, (rival,))
        text = f"search {name.replace('_', ' ')}: three runs of VPO solve {listed(alone)} problems that "
        text += f"{Entry(rival).title} does not; chance {listed(chance)}"
        is_more = [own > other for own, other in zip(alone, chance, strict=True)]
        is_refuted = any(alone + chance) and not any(is_more)
        yield Finding(text, decided(all(is_more), is_refuted))


def no_extra_compute(stored: Stored) -> Iterator[Finding]:
    for name in LARGE_K:
        task = stored.task(name)
        vpo_tokens = task.average(VPO, lambda run: run.tokens)
        for other in (MULTI_RLVR, GRPO):
            ratio = vpo_tokens / task.average(other, lambda run: run.tokens)
            yield Finding(f"{name}, tokens of VPO / {other.title}: {ratio:.2f}", ratio < 1.1)


def collinear_objectives(stored: Stored) -> Iterator[Finding]:
    for name in ("copies", "noisy"):
        task = stored.task(name)
        lead = task.difference(VPO, GRPO, "W@30")
        control = task.difference(VPO, MAX_AT_K, "W@30")
        text = f"reward {name}, W@30, VPO - GRPO: {lead.short}; VPO - Max@K: {control.short}"
        is_none = lead.low > -ALIKE and lead.high < ALIKE
        is_one = lead.low > ALIKE or lead.high < -ALIKE
        yield Finding(text, decided(is_none, is_one))


def crosses_the_valley(stored: Stored) -> Iterator[Finding]:
    toy = stored.task("toy")
    grpo, vpo, max_at_k = [toy.mean(policy, "pass@30") for policy in (GRPO, VPO, MAX_AT_K)]
    text = f"toy, pass@30: GRPO {grpo:.2f}, VPO {vpo:.2f}, and Max@K {max_at_k:.2f}"
    yield Finding(text, grpo < 0.1 and vpo > 0.9)


CLAIMS = {
    "C1: at k = 30 VPO matches or beats the strongest scalar baseline": beats_scalar_baselines,
    "C2: its lead over that baseline widens with k": lead_widens_with_k,
    "C3: GRPO is ahead at k = 1, and VPO overtakes it by k = 5": curves_cross,
    "C4: in training GRPO's diversity falls, Multi-RLVR's is low, VPO's stays": diversity_in_training,
    "C5: in a search VPO solves what GRPO does not, above chance": vpo_solves_more,
    "C6: at most 10% more tokens than Multi-RLVR and GRPO": no_extra_compute,
    "C7: with collinear objectives VPO is GRPO": collinear_objectives,
    "C10: GRPO stays out of a deceptive valley, VPO crosses it": crosses_the_valley,
}


def with_scalars(stored: Stored) -> Iterator[tuple[TaskResults, Entry, Entry]]:
    """Results, VPO with the KL term that validation chose, and the scalar baseline that is best at k = 30.

    Then VPO with the paper's KL term, and the best of the scalar baselines with half-way weights.
    """
    for name, measure in LARGE_K.items():
        task = stored.task(name)
        yield task, own(stored, name, "vpo", measure), strongest_scalar(task)
        half_way = stored.mixed.task(name)
        measured = []
        for policy in (GRPO, GRPO_KL, MAX_AT_K):
            if half_way.runs(policy):
                measured.append(mixed(policy, HALF))
        yield half_way, VPO, max(measured, key=lambda policy: half_way.mean(policy, measure))


def strongest_scalar(task: TaskResults) -> Entry:
    """The best baseline at k = 30 of all rates and cures."""
    measured = []
    for policy in compared(task):
        is_scalar = policy.method in (*SINGLE, "multi_rlvr")
        if is_scalar and task.shared_seeds(policy, VPO) == task.shared_seeds(VPO):
            measured.append(policy)
    return max(measured, key=lambda policy: task.mean(policy, LARGE_K[task.name]))


def decided(is_shown: bool, is_refuted: bool) -> bool | None:
    """A verdict; None if a claim is neither shown nor refuted."""
    if is_shown:
        return True
    return False if is_refuted else None


def is_positive(difference: Difference) -> bool | None:
    """The sign of a firm difference; None if it is not firm."""
    return difference.mean > 0 if difference.firm else None


def both(first: bool | None, second: bool | None) -> bool | None:
    """The first verdict unless it is True, else the second."""
    return second if first else first
