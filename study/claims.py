"""The paper's claims, C1 to C11: what was measured of each, and the verdict that follows from it.

- C1 and C2 hold VPO with the KL term that validation chose for thirty candidates against the scalar
  baseline that is the best of all rates and cures in the evaluation itself.
- "Matches or beats" (C1): shown if the whole interval is above -0.02, refuted if all of it is below.
- A lead (C2, C3, C9): shown if it is firm, refuted by a firm difference of the other sign.
- The crossing (C3), of GRPO and of GRPO with KL 0.1: the first k at which VPO's mean is above
  GRPO's. It counts only where GRPO's lead at k = 1 is firm: up to k = 5 it shows the claim, later it
  refutes it.
- A search (C5): shown if in every run the method solves more problems that GRPO does not solve than
  GRPO of another run does, which is chance; refuted if in no run. It is GRPO at its low rate where
  that took part.
- "Alike" (C7, C8): shown if the whole interval is within 0.02 of 0, refuted if none of it is.
- Difficulty (C11): a t-test over seeds of the leads in the hardest and the easiest third of the problems.
"""

from collections.abc import Iterator
from dataclasses import dataclass

from examples.markdown import markdown
from study.cures import own
from study.entries import GRPO, GRPO_KL, MAX_AT_K, MULTI_RLVR, START_MODEL, TWO_ANSWERS, VPO, Entry
from study.grid import HEADLINE
from study.result_tables import as_csv, counts_of_other_runs, rival_of
from study.searches import RIVALS, counts_alone
from study.stored import SINGLE, Difference, Stored, TaskResults, t_test

ONE_ANSWER = Entry("vpo", flags=(("m", 1), ("prompts-per-step", 36), ("lr", 1.2e-3)))
FIVE_ANSWERS = Entry("vpo", flags=(("m", 5), ("prompts-per-step", 7)))
FEW_WEIGHTS = Entry("vpo", flags=(("n-weights", 10),))
SOBOL = Entry("vpo", flags=(("sampler", "sobol"),))

# By what many candidates are judged in each task. In headlines best@30 nearly ties: few tell four facts.
LARGE_K = {"maze": "best@30", "code": "pass@30", HEADLINE: "W@30"}
ALIKE = 0.02  # smaller differences count as none


@dataclass(frozen=True)
class Finding:
    """One measurement; `verdict` is None where it neither shows nor refutes the claim."""

    text: str
    verdict: bool | None
    detail: str = ""  # further numbers, on which the verdict does not depend

    @property
    def outcome(self) -> str:
        """The verdict as a word."""
        if self.verdict is None:
            return "undecided"
        return "shown" if self.verdict else "refuted"


@dataclass(frozen=True)
class Claim:
    id: str
    text: str
    findings: list[Finding]

    @property
    def verdict(self) -> str:
        """Holds: shown in all findings. Partly: shown and refuted. Fails: refuted, never shown.

        Open: never refuted, but not shown everywhere.
        """
        verdicts = {finding.verdict for finding in self.findings}
        if verdicts == {True}:
            return "holds"
        if False not in verdicts:
            return "open"
        return "partly" if True in verdicts else "fails"

    @property
    def decisive(self) -> str:
        """The text of the first finding that is refuted, else undecided, else shown."""
        order = (False, None, True)
        return min(self.findings, key=lambda finding: order.index(finding.verdict)).text


def all_claims(stored: Stored) -> list[Claim]:
    """The claims with all that was measured of them."""
    measured = {
        "C1: at k = 30 VPO matches or beats the strongest scalar baseline": beats_scalar_baselines,
        "C2: its lead over that baseline widens with k": lead_widens_with_k,
        "C3: GRPO is ahead at k = 1, and VPO overtakes it by k = 5": curves_cross,
        "C4: in training GRPO's diversity falls, Multi-RLVR's is low, VPO's stays": diversity_in_training,
        "C5: in a search VPO solves what GRPO does not, above chance": vpo_solves_more,
        "C5G: so does Group VPO": group_vpo_solves_more,
        "C6: at most 10% more tokens than Multi-RLVR and GRPO": no_extra_compute,
        "C7: with collinear objectives VPO is GRPO": collinear_objectives,
        "C8: with m = 1 VPO is GRPO": one_answer_is_grpo,
        "C9: more answers, more and more even preference weights help": more_answers_and_weights,
        "C10: GRPO stays out of a deceptive valley, VPO crosses it": crosses_the_valley,
        "C11: VPO's lead over GRPO is larger on harder problems": lead_grows_with_difficulty,
    }
    claims = []
    for text, measure in measured.items():
        name, _, claim = text.partition(": ")
        claims.append(Claim(name, claim, list(measure(stored))))
    return claims


def verdict_table(stored: Stored) -> str:
    """The claims with their verdicts and one number each."""
    head = ["", "claim of the paper", "verdict", "measured"]
    rows = []
    for claim in all_claims(stored):
        rows.append([claim.id, claim.text, f"**{claim.verdict}**", claim.decisive])
    return markdown(head, rows)


def claims_csv(stored: Stored) -> str:
    """Every measurement with the claim that it was made for, and what it says of it."""
    rows: list[list] = [["claim", "text", "verdict", "measurement", "details", "outcome"]]
    for claim in all_claims(stored):
        for finding in claim.findings:
            about = [claim.id, claim.text, claim.verdict]
            rows.append([*about, finding.text, finding.detail, finding.outcome])
    return as_csv(rows)


def beats_scalar_baselines(stored: Stored) -> Iterator[Finding]:
    for task in main_tasks(stored):
        scalar = strongest_scalar(task)
        measure = LARGE_K[task.name]
        ours = own(stored, task.name, "vpo", measure)
        lead = task.difference(ours, scalar, measure)
        verdict = None
        if lead.low > -ALIKE:
            verdict = True
        elif lead.high < -ALIKE:
            verdict = False
        text = f"{task.name}, {measure}, {ours.title} - {scalar.title}: {lead.short}"
        yield Finding(text, verdict, str(lead))


def lead_widens_with_k(stored: Stored) -> Iterator[Finding]:
    for task in main_tasks(stored):
        scalar = strongest_scalar(task)
        ours = own(stored, task.name, "vpo", "best@30")
        lead_at_30 = task.lead(ours, scalar, "best@30")
        lead = task.summary(lead_at_30)
        growth = task.summary(lead_at_30 - task.lead(ours, scalar, "best@3"))
        text = f"{task.name}, {ours.title} - {scalar.title}: {growth.short} from best@3 to best@30, where it is "
        text += lead.short
        detail = f"{growth} to {lead}"
        yield Finding(text, both(is_positive(growth), is_positive(lead)), detail)


def curves_cross(stored: Stored) -> Iterator[Finding]:
    for task in main_tasks(stored):
        yield crossing(task, GRPO, VPO)
        if task.runs(GRPO_KL):
            yield crossing(task, GRPO_KL, VPO)


def crossing(task: TaskResults, grpo: Entry, vpo: Entry) -> Finding:
    """Who is ahead with one candidate, and from which k on VPO is."""
    grpo_lead = task.difference(grpo, vpo, "best@1")
    ahead = []  # the k at which VPO's mean is above GRPO's
    for k in (2, 3, 5, 10, 30):
        if task.lead(vpo, grpo, f"best@{k}").mean() > 0:
            ahead.append(k)
    since = f"from k = {ahead[0]}" if ahead else "at no k"
    text = f"{task.name}, best@1, {grpo.title} - {vpo.title}: {grpo_lead.short}; VPO's mean above in best@k {since}"
    crosses_early = bool(ahead) and ahead[0] <= 5
    return Finding(text, both(is_positive(grpo_lead), crosses_early), str(grpo_lead))


def diversity_in_training(stored: Stored) -> Iterator[Finding]:
    for task in main_tasks(stored):
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
            text = f"{task.name}, diversity of {policy.title} in training: {change}, {outcome}"
            yield Finding(text, met)


def vpo_solves_more(stored: Stored) -> Iterator[Finding]:
    return solves_more(stored, "vpo")


def group_vpo_solves_more(stored: Stored) -> Iterator[Finding]:
    return solves_more(stored, "group_vpo")


def solves_more(stored: Stored, method: str) -> Iterator[Finding]:
    """What a method solves and GRPO does not, held against what GRPO of another run solves."""
    title = Entry(method).title
    for name, search in stored.searches.items():
        if not name.endswith("evolve"):
            continue
        policies = search["policies"]
        rival = rival_of(policies)
        rival_title = Entry(rival).title
        alone = counts_alone(policies, (method,), (rival,))
        chance = counts_of_other_runs(policies, (rival,))
        text = f"search {name.replace('_', ' ')}: three runs of {title} solve {listed(alone)} problems that "
        text += f"{rival_title} does not; chance {listed(chance)}"
        reverse = counts_alone(policies, (rival,), (method,))
        neither = counts_alone(policies, (method,), RIVALS)
        neither_by_chance = counts_of_other_runs(policies, RIVALS)
        lost = counts_alone(policies, RIVALS, (method,))
        detail = (
            f"{rival_title} solves {listed(reverse)} that {title} does not; beside GRPO and the start model "
            f"{title} solves {listed(neither)}, these two in another run {listed(neither_by_chance)}, "
            f"and {listed(lost)} that {title} does not"
        )
        is_more = [own > other for own, other in zip(alone, chance, strict=True)]
        verdict = True if all(is_more) else None
        if not any(is_more) and any(alone + chance):
            verdict = False
        yield Finding(text, verdict, detail)


def listed(counts: list[int]) -> str:
    """Counts in a sentence."""
    return ", ".join(map(str, counts))


def no_extra_compute(stored: Stored) -> Iterator[Finding]:
    measured = [(task, None) for task in main_tasks(stored)]
    measured += [(stored.task("open_cases"), lr) for lr in (2e-5, 5e-5)]  # two rates, no own one
    for task, lr in measured:
        ours = Entry("vpo", lr)
        for other in (MULTI_RLVR, GRPO):
            theirs = Entry(other.method, lr)
            if not task.runs(theirs):
                continue  # Multi-RLVR was not trained on the open cases
            vpo_tokens = task.average(ours, lambda run: run.tokens)
            ratio = vpo_tokens / task.average(theirs, lambda run: run.tokens)
            text = f"{task.name}, tokens of {ours.title} / {theirs.title}: {ratio:.2f}"
            yield Finding(text, ratio < 1.1)


def collinear_objectives(stored: Stored) -> Iterator[Finding]:
    for name in ("copies", "noisy"):
        task = stored.task(name)
        lead = task.difference(VPO, GRPO, "W@30")
        control = task.difference(VPO, MAX_AT_K, "W@30")
        text = f"reward {name}, W@30, VPO - GRPO: {lead.short}; VPO - Max@K: {control.short}"
        yield Finding(text, is_alike(lead), f"{lead}; {control}")


def one_answer_is_grpo(stored: Stored) -> Iterator[Finding]:
    maze = stored.task("maze")
    for measure in ("best@1", "W@30"):
        lead = maze.difference(ONE_ANSWER, GRPO, measure)
        yield Finding(f"maze, {measure}, VPO - GRPO: {lead.short}", is_alike(lead), str(lead))


def more_answers_and_weights(stored: Stored) -> Iterator[Finding]:
    maze = stored.task("maze")
    for policy in (ONE_ANSWER, TWO_ANSWERS, FIVE_ANSWERS, FEW_WEIGHTS, SOBOL):
        lead = maze.difference(policy, VPO, "W@30")
        verdict = is_positive(lead)
        if policy not in (FIVE_ANSWERS, SOBOL) and verdict is not None:
            verdict = not verdict  # these have less than the default
        text = f"maze, W@30, VPO with {policy.setting} - VPO: {lead.short}"
        yield Finding(text, verdict, str(lead))


def crosses_the_valley(stored: Stored) -> Iterator[Finding]:
    toy = stored.task("toy")
    grpo = toy.mean(GRPO, "pass@30")
    max_at_k = toy.mean(MAX_AT_K, "pass@30")
    vpo = toy.mean(VPO, "pass@30")
    text = f"toy, pass@30: GRPO {grpo:.2f}, VPO {vpo:.2f}, and Max@K {max_at_k:.2f}"
    yield Finding(text, grpo < 0.1 and vpo > 0.9)


def lead_grows_with_difficulty(stored: Stored) -> Iterator[Finding]:
    """The lead in thirds of the problems, ordered by what the start model scores on them."""
    for task, measure in ((stored.task("maze"), "W@30"), (stored.task("code"), "best@30")):
        lead = task.lead(VPO, GRPO, measure)  # (seeds, N)
        for start_measure in ("best@1", "best@30"):
            start_means = task.values(START_MODEL, start_measure).mean(0)  # (N)
            order = start_means.argsort(stable=True)  # hard first
            thirds = [lead[:, chosen].mean(1) for chosen in order.tensor_split(3)]  # (seeds) each
            growth = thirds[0] - thirds[2]
            means = ", ".join(f"{third.mean():+.3f}" for third in thirds)
            p = t_test(growth)
            text = f"{task.name}, {measure}, thirds from hard to easy: {means} (p = {p:.2f})"
            detail = f"sorted by the start model's {start_measure}"
            yield Finding(text, growth.mean().item() > 0 if p < 0.05 else None, detail)


def main_tasks(stored: Stored) -> list[TaskResults]:
    """The maze, programs and headlines."""
    return [stored.task(name) for name in LARGE_K]


def strongest_scalar(task: TaskResults) -> Entry:
    """The best baseline at k = 30 of all rates and cures; not goal-conditioned, which is told a goal."""
    methods = {*SINGLE, "multi_rlvr"} - {"goal_conditioned"}
    seeds = task.shared_seeds(VPO)
    measured = []
    cured = [policy for policy in task.policies(flags=True) if policy.is_cure]
    for policy in [*task.policies(), *cured]:
        if policy.method in methods and task.shared_seeds(policy, VPO) == seeds:
            measured.append(policy)
    return max(measured, key=lambda policy: task.mean(policy, LARGE_K[task.name]))


def is_positive(difference: Difference) -> bool | None:
    """The sign of a firm difference; None if it is not firm."""
    return difference.mean > 0 if difference.firm else None


def is_alike(difference: Difference) -> bool | None:
    """Whether a difference is below 0.02; None if the interval does not say."""
    if difference.low > -ALIKE and difference.high < ALIKE:
        return True
    if difference.low > ALIKE or difference.high < -ALIKE:
        return False
    return None


def both(first: bool | None, second: bool | None) -> bool | None:
    """The first verdict unless it is True, else the second."""
    return second if first else first
