"""The tables of the study as Markdown and as CSV, one function each, from stored results alone."""

import csv
import io
import itertools
from collections import Counter

import torch
from torch import Tensor

from examples.markdown import markdown
from examples.search_report import BUDGETS, final_mean, solved_at
from study.bootstrap import bootstrap_interval
from study.entries import (
    GROUP_VPO,
    GRPO,
    GRPO_AT_30,
    GRPO_KL,
    GRPO_QUARTER,
    LOW_RATE,
    MAX_AT_K,
    MULTI_RLVR,
    PAIRS,
    START_MODEL,
    TWO_ANSWERS,
    VPO,
    Entry,
    short_title,
)
from study.grid import HEADLINE, HEADLINES, MAIN_METHODS, REAL_TASKS, REWARDS, VERSION, tuning_rates
from study.searches import RIVALS, alone_cell, counts_alone, solved_by
from study.stored import (
    METHODS,
    START,
    TEMPERATURES,
    Difference,
    Result,
    Stored,
    TaskResults,
    scipy_stats,
)
from tasks.headline import words_of
from vpo import SEVERAL_ANSWERS

HEADLINE_POLICIES = (
    START_MODEL,
    GRPO,
    GRPO_AT_30,
    GRPO_QUARTER,
    GRPO_KL,
    MAX_AT_K,
    MULTI_RLVR,
    VPO,
    GROUP_VPO,
)
WITH_PASSES = ("code", "toy", "open_cases")  # where an answer can have the full reward
SIDE_BY_SIDE = ("best@1", "best@30", "W@30", "diversity")  # where a table holds several tasks
KS = (1, 2, 3, 5, 10, 30)
# By what a learning rate is chosen; for all other methods by best@1.
CHOSEN_BY = {"vpo": "W@3", "group_vpo": "W@3", "max_at_k": "best@3"}
# The differences that are counted where they are corrected for their number.
COUNTED = {
    "maze": ("best@1", "best@3", "best@30", "W@30"),
    "code": ("best@1", "best@30", "pass@1", "pass@30", "W@30"),
}


def low_grpo(task: TaskResults) -> Entry | None:
    """GRPO at the lowest other rate with which it was trained, if there is one."""
    rates = [policy for policy in task.policies() if policy.method == "grpo" and policy.lr]
    return rates[0] if rates else None


def cures_of(task: TaskResults, method: str) -> list[Entry]:
    """The cures with which a method was trained."""
    settings = task.policies(flags=True)
    return [entry for entry in settings if entry.method == method and entry.is_cure]


def all_policies(task: TaskResults) -> list[Entry]:
    """Those with their method's own flags, then those with others."""
    return [*task.policies(), *task.policies(flags=True)]


# Tables of the pages.


def main_table(stored: Stored) -> str:
    """The maze and programs side by side, as far as they are stored."""
    head = [""]
    rows: dict[str, list] = {}
    for name in ("maze", "code"):
        if name not in stored.names:
            continue
        task = stored.task(name)
        head += [f"{name} {measure}" for measure in SIDE_BY_SIDE]
        for policy in main_policies(task):
            title = short_title(policy)
            means = [task.mean(policy, measure) for measure in SIDE_BY_SIDE]
            rows[title] = [*rows.get(title, [title]), *means]
    return markdown(head, list(rows.values()))


def main_policies(task: TaskResults) -> list[Entry]:
    """The start model, GRPO, also at its low rate or with a strong KL term, the methods with sets."""
    wanted = (START_MODEL, GRPO, low_grpo(task), GRPO_KL, MAX_AT_K, VPO, GROUP_VPO)
    return [policy for policy in wanted if policy and task.runs(policy)]


def leads(stored: Stored) -> str:
    """Who is ahead of whom in the maze and on programs, without intervals."""
    columns = {
        "maze": ("best@1", "best@30", "W@30"),
        "code": ("best@1", "best@30", "pass@30"),
    }
    head = ["minus"]
    rows: dict[str, list[str]] = {}
    for name, measures in columns.items():
        task = stored.task(name)
        head += [f"{name} {measure}" for measure in measures]
        for ours, theirs in main_pairs(task):
            heading = f"{ours.title} - {short_title(theirs)}"
            cells = [task.difference(ours, theirs, measure).short for measure in measures]
            rows[heading] = [*rows.get(heading, [heading]), *cells]
    return markdown(head, list(rows.values()))


def main_pairs(task: TaskResults) -> list[tuple[Entry, Entry]]:
    """VPO and Group VPO against the others that are stored; GRPO also at its low rate or with a strong KL term."""
    low = low_grpo(task)
    pairs = [
        (VPO, GRPO),
        (VPO, low),
        (VPO, GRPO_KL),
        (VPO, MAX_AT_K),
        (VPO, MULTI_RLVR),
        (GROUP_VPO, GRPO),
        (GROUP_VPO, low),
        (GROUP_VPO, GRPO_KL),
        (GROUP_VPO, MAX_AT_K),
        (GROUP_VPO, VPO),
    ]
    return [pair for pair in pairs if pair[1] and task.shared_seeds(*pair)]


def means(task: TaskResults) -> str:
    """All policies at temperature 0.7, the mean over their seeds."""
    measures = ["best@1", "best@3", "best@30", "W@30", "diversity"]
    if task.name in WITH_PASSES:
        measures = ["best@1", "best@30", "pass@1", "pass@30", "W@30", "diversity"]
    rows = []
    policies = all_policies(task) if task.name in HEADLINES else task.policies()
    for policy in policies:
        values = [task.mean(policy, measure) for measure in measures]
        rows.append([policy.title, len(task.runs(policy)), *values, earning(task, policy)])
    return markdown(["method", "seeds", *measures, "earn something"], rows)


def earning(task: TaskResults, policy: Entry) -> float | str:
    """The share of candidates that earn anything, over the seeds for which it is stored."""
    shares = []
    for run in task.runs(policy).values():
        measures = run.measures[TEMPERATURES[0]][policy.method]
        if "earned" in measures:
            shares.append(measures["earned"].mean())
    return torch.stack(shares).mean().item() if shares else ""


def every_k(task: TaskResults) -> str:
    """The methods with sets against GRPO, at its own rate, at the low one and with a strong KL term."""
    measures = [f"best@{k}" for k in (1, 3, 10, 30)] + ["W@30"]
    rows = []
    for theirs in (GRPO, low_grpo(task), GRPO_KL):
        for ours in (MAX_AT_K, VPO, GROUP_VPO):
            cells = [task.difference(ours, theirs, measure) for measure in measures]
            rows.append([f"{ours.title} - {theirs.title}", *cells])
    return markdown(["difference", *measures], rows)


def differences(task: TaskResults) -> str:
    """VPO and Group VPO against all others, with one candidate, with m and with thirty."""
    measures = ("best@1", "W@3", "W@30")
    pairs = main_pairs(task) + rate_pairs(task)
    pairs += [(MAX_AT_K, GRPO), (GRPO, START_MODEL), (VPO, START_MODEL)]
    pairs += [(policy, VPO) for policy in task.policies(flags=True) if policy.method == "vpo"]
    rows = []
    for ours, theirs in dict.fromkeys(pairs):
        n_seeds = len(task.shared_seeds(ours, theirs))
        if n_seeds:
            cells = [task.difference(ours, theirs, measure) for measure in measures]
            rows.append([f"{ours.title} - {theirs.title}", n_seeds, *cells])
    return markdown(["difference", "seeds", *measures], rows)


def rate_pairs(task: TaskResults) -> list[tuple[Entry, Entry]]:
    """VPO and Group VPO against GRPO and Multi-RLVR at each of their rates."""
    rivals = [policy for policy in task.policies() if policy.method in ("grpo", "multi_rlvr")]
    return list(itertools.product((VPO, GROUP_VPO), rivals))


def card_costs(task: TaskResults) -> str:
    """What a run of each method cost on a card."""
    return costs(task, on_card=True)


def cpu_costs(task: TaskResults) -> str:
    """What a run of each method cost on a core of a CPU."""
    return costs(task, on_card=False)


def costs(task: TaskResults, on_card: bool) -> str:
    """Time and memory of the runs on a kind of machine, and the tokens of all runs, on any machine."""
    rows = []
    for policy, runs in runs_by_machine(task, on_card).items():
        seconds = sum(run.step_seconds for run in runs) / len(runs)
        peaks = [run.peak_gib for run in runs if run.peak_gib is not None]
        gib = f"{sum(peaks) / len(peaks):.1f}" if peaks else ""
        tokens = task.average(policy, lambda run: run.tokens)
        ratio = tokens / task.average(GRPO, lambda run: run.tokens)
        own = [f"{seconds:.1f}", gib, f"{tokens:,.0f}", f"{ratio:.2f}"]
        rows.append([policy.title, len(runs), *own])
    head = ["method", "runs", "s per step", "peak GiB", "sampled tokens", "tokens / GRPO's"]
    return markdown(head, rows)


def runs_by_machine(task: TaskResults, on_card: bool) -> dict[Entry, list[Result]]:
    """The runs of each method that a card trained, or those that a CPU did."""
    found = {}
    for policy in all_policies(task):
        runs = [run for run in task.runs(policy).values() if bool(run.gpu) == on_card]
        if runs and policy.method not in START:
            found[policy] = runs
    return found


def thirty_candidates(task: TaskResults) -> str:
    """The main methods' W@30 in one line."""
    n_seeds = len(task.shared_seeds(VPO, GRPO))
    values = []
    for policy in HEADLINE_POLICIES:
        value = f"{policy.title} {task.mean(policy, 'W@30'):.3f}"
        own = len(task.runs(policy))
        values.append(value if own == n_seeds else f"{value} (seeds: {own})")
    return f"W@30, means of {n_seeds} seeds: {', '.join(values)}."


def by_temperature(task: TaskResults) -> str:
    """The main methods' W@30 at each temperature of the evaluation, and who is ahead with each at its best."""
    head = ["method", *(f"W@30 at {temperature}" for temperature in TEMPERATURES)]
    head += ["VPO's lead", "Group VPO's lead"]
    rows = []
    for policy in HEADLINE_POLICIES:
        if not task.runs(policy):
            continue
        means = [task.mean(policy, "W@30", temperature) for temperature in TEMPERATURES]
        leads = [lead_at_best(task, ours, policy, "W@30") for ours in (VPO, GROUP_VPO)]
        rows.append([policy.title, *means, *leads])
    return markdown(head, rows)


def lead_at_best(task: TaskResults, ours: Entry, theirs: Entry, measure: str) -> Difference | str:
    """The difference of two policies, each at its own best temperature; empty for the same one."""
    if ours == theirs:
        return ""
    seeds = task.shared_seeds(ours, theirs)
    our_values = values_at_best(task, ours, measure, seeds)
    their_values = values_at_best(task, theirs, measure, seeds)
    return task.summary(our_values - their_values)


def values_at_best(task: TaskResults, policy: Entry, measure: str, seeds: list[int]) -> Tensor:
    """A measure at the temperature of the evaluation where its mean is highest: (seeds, N)."""
    of_temperatures = [task.values(policy, measure, name, seeds) for name in TEMPERATURES]
    return max(of_temperatures, key=torch.mean)


def different_headlines(task: TaskResults) -> str:
    """How many different headlines the main methods write for a text, in one line."""
    values = []
    for policy in HEADLINE_POLICIES:
        counts = []
        for run in task.runs(policy).values():
            texts = run.answers[policy.method]
            for candidates in texts:
                headlines = {" ".join(words_of(text)) for text in candidates if text}
                counts.append(len(headlines))
        values.append(f"{policy.title} {sum(counts) / len(counts):.1f}")
    return f"Different headlines among thirty, means of {len(texts)} texts a seed: {', '.join(values)}."


def each_seed(task: TaskResults) -> str:
    """The main methods' W@30 of every seed in one line."""
    values = []
    for policy in HEADLINE_POLICIES[1:]:  # without the start model
        if task.runs(policy):
            of_seeds = task.values(policy, "W@30").mean(1).tolist()
            texts = ", ".join(f"{value:.3f}" for value in of_seeds)
            values.append(f"{policy.title} {texts}")
    return f"W@30 of each seed: {'; '.join(values)}."


def ablations(stored: Stored) -> str:
    """What every varied setting changes against its method's default, on the seeds that both have."""
    measures = ("best@1", "best@30", "W@30", "diversity")
    rows = []
    for name in ("maze", "code"):
        task = stored.task(name)
        for policy in task.policies(flags=True):
            if "steps" in dict(policy.flags) or policy.is_cure:
                continue  # in `more_steps`, or in cures.py
            default = Entry(policy.method)
            cells = [task.difference(policy, default, measure).short for measure in measures]
            seeds = len(task.shared_seeds(policy, default))
            rows.append([name, default.title, policy.setting, seeds, *cells])
    return markdown(["task", "method", "setting", "seeds", *measures], rows)


def more_steps(stored: Stored) -> str:
    """GRPO at its low rate and VPO after as many steps as elsewhere and after more, on the same seeds."""
    measures = ("best@1", "best@3", "best@30", "W@30", "diversity")
    rows = []
    for name in ("maze", "code"):
        task = stored.task(name)
        longer = [policy for policy in task.policies(flags=True) if "steps" in dict(policy.flags)]
        for policy in longer:
            flags = dict(policy.flags)
            usual = Entry(policy.method, flags.get("lr"))
            title = short_title(usual)
            seeds = task.shared_seeds(usual, policy)
            for entry in (usual, policy):
                steps = task.runs(entry)[seeds[0]].steps
                values = [task.values(entry, measure, seeds=seeds) for measure in measures]
                means = [value.mean().item() for value in values]
                rows.append([name, title, steps, len(seeds), *means])
    return markdown(["task", "method", "steps", "seeds", *measures], rows)


def rewards(stored: Stored) -> str:
    """What sets and vectors gained in W@30 with each reward, and the regret of its scalar."""
    pairs = ((VPO, GRPO), (MAX_AT_K, GRPO), (GROUP_VPO, MAX_AT_K), (VPO, MAX_AT_K))
    rows = []
    for task in geometry_tasks(stored):
        gains = [task.difference(*pair, "W@30") for pair in pairs]
        rows.append([task.name, f"{regret(task):.3f}", *gains])
    head = ["reward", "regret", *(f"{ours.title} - {theirs.title}" for ours, theirs in pairs)]
    return markdown(head, rows)


def geometry_tasks(stored: Stored) -> list[TaskResults]:
    """The tasks with a reward geometry; first the one whose scalar has the least regret."""
    names = ("maze", "code", "copies", "noisy", "halfway", "gems", "tradeoff", "fence")
    return sorted([stored.task(name) for name in names], key=regret)


def regret(task: TaskResults) -> float:
    """What the start model's answer that the scalar prefers lacks for a user of random preferences.

    It is measured at the temperature of training. The scalar of these tasks is the mean over the
    objectives, and so is the expected utility of an answer.
    """
    return task.mean(START_MODEL, "W@30", "1") - task.mean(START_MODEL, "best@30", "1")


def chosen_rates(stored: Stored) -> str:
    """The rates for few and for thirty candidates of each method in each task.

    A method whose rates are not all measured yet has none.
    """
    tasks = []
    for name in ("maze", "code", *REAL_TASKS):
        if name in stored.tuned_names:
            tasks.append(stored.task(name, tuning=True))
    rows = []
    for method in METHODS:
        row = [Entry(method).title]
        for task in tasks:
            measured = means_by_rate(task, method, "best@30")
            if not measured or not measured.keys() >= set(tuning_rates(task.name, method)):
                row.append("")
                continue
            few = f"{best_rate(task, method):g}"
            thirty = f"{best_rate_for_many(task, method):g}"
            row.append(few if few == thirty else f"{few}, 30: {thirty}")
        if any(row[1:]):
            rows.append(row)
    return markdown(["method", *(task.name for task in tasks)], rows)


def validation(task: TaskResults) -> str:
    """What each rate gave on validation problems, with the tokens that it sampled in training."""
    measures = ("best@1", "best@3", "best@30", "W@3", "W@30", "diversity")
    rows = []
    for policy in all_policies(task):
        values = [task.mean(policy, measure) for measure in measures]
        tokens = task.average(policy, lambda run: run.tokens)
        rows.append([policy.title, *values, f"{tokens:,.0f}"])
    return markdown(["method", *measures, "sampled tokens"], rows)


def best_rate_for_many(validation: TaskResults, method: str) -> float:
    """The rate with the highest best@30, of those within 0.002 the highest one.

    It is the rate for few candidates if that is within 0.005.
    """
    utilities = means_by_rate(validation, method, "best@30")
    highest = max(utilities.values())
    usual = best_rate(validation, method)
    if utilities[usual] >= highest - 0.005:
        return usual
    return max(rate for rate, utility in utilities.items() if utility >= highest - 0.002)


def best_rate(validation: TaskResults, method: str) -> float:
    """The lowest rate that is within 0.005 of the best: less is noise."""
    utilities = means_by_rate(validation, method, CHOSEN_BY.get(method, "best@1"))
    best = max(utilities.values())
    return min(rate for rate, utility in utilities.items() if utility >= best - 0.005)


def means_by_rate(validation: TaskResults, method: str, measure: str) -> dict[float, float]:
    """The mean of a measure at every learning rate of a method."""
    policies = [policy for policy in validation.policies() if policy.method == method]
    return {policy.lr: validation.mean(policy, measure) for policy in policies}


def searches(stored: Stored) -> str:
    """The share that each policy solved in each search, and the counts behind claim C5."""
    names = ("start", "grpo", LOW_RATE, "max_at_k", "multi_rlvr", "vpo", "group_vpo")
    head = ["search", *(Entry(name).title for name in names)]
    head += ["VPO, not GRPO", "Group VPO, not GRPO", "by chance"]
    rows = []
    for key, search in stored.searches.items():
        policies = search["policies"]
        row = [key.replace("_", " ")]
        for name in names:
            solved = (solved_at(policies[name]) > 0).double() if name in policies else None
            row.append("" if solved is None else f"{solved.mean():.2f}")
        rival = rival_of(policies)
        for name in ("vpo", "group_vpo"):
            row.append(" ".join(map(str, counts_alone(policies, (name,), (rival,)))))
        row.append(" ".join(map(str, counts_of_other_runs(policies, (rival,)))))
        rows.append(row)
    return markdown(head, rows)


def rival_of(policies: dict[str, list[dict]]) -> str:
    """The GRPO that VPO is held against in a search: the one that keeps its variety, if it took part."""
    return LOW_RATE if LOW_RATE in policies else "grpo"


def counts_of_other_runs(policies: dict[str, list[dict]], names: tuple[str, ...]) -> list[int]:
    """What chance gives: the most that the same policies of another run solved and this run's did not."""
    solved = solved_by(policies, names)  # (runs, N)
    new = solved[None] & ~solved[:, None]  # (this run, other run, N)
    return new.sum(-1).amax(1).tolist()


# Sentences of the pages.


def multiplicity(stored: Stored) -> str:
    """How many differences between methods survive a correction for their number."""
    p_values = []
    n_firm = 0
    for name, measures in COUNTED.items():
        task = stored.task(name)
        for ours, theirs in method_pairs(task) + low_rate_pairs(task) + cure_pairs(task):
            if len(task.shared_seeds(ours, theirs)) < 3:
                continue
            for measure in measures:
                difference = task.difference(ours, theirs, measure)
                p_values.append(difference.p)
                n_firm += difference.firm
    discovered, strict = survivors(p_values)
    return (
        f"Of {len(p_values)} differences between methods, GRPO's low rate and all cures among them, "
        f"{n_firm} are firm in the maze and on programs. By the t-test alone {discovered} survive Benjamini-Hochberg at a false discovery "
        f"rate of 5%, and {strict} survive Bonferroni."
    )


def hours(stored: Stored) -> str:
    """How long the stored runs were trained."""
    tiny = []
    real = []
    cards = []
    for result in stored.results:
        of_run = result.steps * result.step_seconds / 3600
        if result.gpu:
            cards.append(result.gpu)
        elif result.task in REAL_TASKS:
            real.append(of_run)
        else:
            tiny.append(of_run)
    sentence = (
        f"{len(tiny)} runs of the tiny model were trained for {sum(tiny):.0f} hours of a core, "
        f"{len(real)} of the real one for {sum(real):.0f} hours."
    )
    for name, n in Counter(cards).items():
        sentence = f"{sentence} Another {n} shared one {name}, up to fifteen at a time."
    return sentence


def measured_twice(stored: Stored) -> str:
    """How many differences between methods are firm in one version's measurement and not in the other's."""
    former = measured_by(stored, is_former=True)
    newest = measured_by(stored, is_former=False)
    n_both = 0
    n_changed = 0
    for name, measures in COUNTED.items():
        if name not in former.names or name not in newest.names:
            continue
        before = former.task(name)
        after = newest.task(name)
        for ours, theirs in method_pairs(after) + low_rate_pairs(after):
            seeds = after.shared_seeds(ours, theirs)
            if len(seeds) < 3 or seeds != before.shared_seeds(ours, theirs):
                continue
            for measure in measures:
                old = before.difference(ours, theirs, measure)
                new = after.difference(ours, theirs, measure)
                n_both += 1
                n_changed += old.firm != new.firm
    return (
        f"Of {n_both} of them that a former version measured, too, with other random numbers, "
        f"{n_changed} were firm in one of the two measurements alone."
    )


def measured_by(stored: Stored, is_former: bool) -> Stored:
    """The results of a former version of the program, or of this one."""
    return Stored([result for result in stored.results if result.is_former == is_former], {})


def survivors(p_values: list[float]) -> tuple[int, int]:
    """How many tests are significant at 5% by Benjamini and Hochberg, and by Bonferroni."""
    adjusted = scipy_stats().false_discovery_control(p_values)
    strict = [p for p in p_values if p <= 0.05 / len(p_values)]
    return int((adjusted <= 0.05).sum()), len(strict)


def versions(stored: Stored, subject: str) -> str:
    """Which version of the program measured the numbers of a page, in one line.

    Args:
        subject: a task, whose policies are named; or "all", "ablations", "rates" or "searches".
    """
    found: dict[str, set[int]] = {}  # what is named -> versions
    if subject == "searches":
        for key, search in stored.searches.items():
            name = key.replace("_", " ")
            own_versions = found.setdefault(name, set())
            own_versions.add(search.get("version", 2))
    if subject == "rates":
        validation = [run for run in newest_results(stored, tuning=True) if not run.policy.flags]
        found["learning rates"] = {run.version for run in validation}
    for result in newest_results(stored, tuning=False):
        name = name_on_page(result, subject)
        if name:
            found.setdefault(name, set()).add(result.version)

    groups: dict[str, list[str]] = {}  # which versions -> what is named
    for name, numbers in found.items():
        groups.setdefault(version_text(numbers), []).append(name)
    parts = []
    for text, names in sorted(groups.items(), reverse=True):
        is_all = len(groups) == 1 and subject != "all"  # other pages hold what "all" sums up
        what = "all numbers" if is_all else ", ".join(names)
        parts.append(f"{text}: {what}.")
    return f"*{' '.join(parts)}*"


def version_text(numbers: set[int]) -> str:
    """Which program these versions are."""
    if numbers == {VERSION}:
        return f"Measured with version {VERSION} of this software"
    if VERSION in numbers:
        return f"Measured with version {VERSION} in some seeds, in the others with a former one"
    return f"Measured with a former version (1 or 2; this is {VERSION})"


def newest_results(stored: Stored, tuning: bool) -> list[Result]:
    """The newest result of every cell, on validation problems or on those that are held out."""
    newest: dict[tuple, Result] = {}
    for result in sorted(stored.results, key=lambda result: result.version):
        if result.tuning == tuning:
            newest[result.task, result.policy, result.seed] = result
    return list(newest.values())


def name_on_page(result: Result, subject: str) -> str:
    """What a page calls a result that it rests on in its line of versions; "" for other results."""
    policy = result.policy
    flags = dict(policy.flags)
    # The tables of many tasks hold GRPO at its low rate, too, but not for headlines.
    has_table_rate = policy.lr is None or (policy.method == "grpo" and result.task not in HEADLINES)
    is_main = policy.method in MAIN_METHODS and has_table_rate and not flags
    if subject == "rates":
        return "more steps" if "steps" in flags else ""
    if subject == "all":
        return result.task if is_main and result.task in ("maze", "code", HEADLINE) else ""
    if subject == "ablations":
        if flags:
            is_elsewhere = "steps" in flags or policy.is_cure or result.task in HEADLINES
            return "" if is_elsewhere else f"settings of {Entry(policy.method).title}"
        tasks = (*REWARDS.split(), "maze", "code", "fence")
        return result.task if is_main and result.task in tasks else ""
    return policy.title if result.task == subject and not flags else ""


# CSV files.


def as_csv(rows: list[list]) -> str:
    """The text of a CSV file, floats with four digits."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    for row in rows:
        writer.writerow([f"{cell:.4g}" if isinstance(cell, float) else cell for cell in row])
    return text.getvalue()


def runs_csv(stored: Stored) -> str:
    """A row for every run, policy and temperature; its learning rate where it is not the method's own."""
    measures = ["earned", "diversity"]
    for kind in ("best", "W", "pass"):
        measures += [f"{kind}@{k}" for k in KS]
    head = ["task", "split", "method", "learning rate", "setting", "seed", "version"]
    rows: list[list] = [[*head, "machine", "tokens", "seconds per step", "temperature", *measures]]
    for run in stored.results:
        split = "validation" if run.tuning else "test"
        for temperature, policies in run.measures.items():
            for method, values in policies.items():
                name = Entry(method).title
                policy = Entry(method) if method in START else run.policy
                row = [run.task, split, name, policy.lr or "", policy.setting, run.seed]
                row += [run.version, run.gpu or "CPU", run.tokens, run.step_seconds, temperature]
                for measure in measures:
                    row.append(values[measure].mean().item() if measure in values else "")
                rows.append(row)
    return as_csv(rows)


def differences_csv(stored: Stored) -> str:
    """A row for every difference of two policies in a measure."""
    head = ["task", "method", "minus", "temperature", "seeds"]
    rows: list[list] = [[*head, "measure", "mean", "low", "high", "p", "firm"]]
    for name in stored.names:
        task = stored.task(name)
        for ours, theirs in compared_pairs(task):
            start = [task.name, ours.title, theirs.title, TEMPERATURES[0]]
            for measure in compared_measures(task):
                difference = task.difference(ours, theirs, measure)
                rows.append([*start, *difference_cells(measure, difference)])
        if name in ("maze", "code", *HEADLINES):
            for ours, theirs in main_pairs(task):
                if theirs.method in MAIN_METHODS and theirs == Entry(theirs.method):
                    rows += best_rows(task, ours, theirs)
    return as_csv(rows)


def difference_cells(measure: str, difference: Difference) -> list:
    """The cells of a difference in a CSV file."""
    interval = [difference.mean, difference.low, difference.high]
    firm = "yes" if difference.firm else "no"
    return [difference.n_seeds, measure, *interval, difference.p, firm]


def compared_measures(task: TaskResults) -> list[str]:
    measures = ["best@1", "best@3", "best@10", "best@30", "W@30", "diversity"]
    if task.name in HEADLINES:
        measures += ["W@3", "W@10"]
    return [*measures, "pass@1", "pass@30"] if task.name in WITH_PASSES else measures


def compared_pairs(task: TaskResults) -> list[tuple[Entry, Entry]]:
    """All pairs of policies whose differences are listed; only those that share a seed."""
    pairs = method_pairs(task) + low_rate_pairs(task) + cure_pairs(task)
    pairs += [(PAIRS, theirs) for theirs in (GRPO, MAX_AT_K, VPO)]
    pairs += [(TWO_ANSWERS, theirs) for theirs in (MAX_AT_K, GROUP_VPO)]
    pairs += [(policy, Entry(policy.method)) for policy in task.policies(flags=True)]
    if task.name in HEADLINES:
        pairs += [pair for pair in rate_pairs(task) if pair not in pairs]
    if task.name in REAL_TASKS:
        trained = [policy for policy in task.policies() if policy.method not in START]
        pairs += [(policy, START_MODEL) for policy in trained]
        with_sets = [policy for policy in trained if policy.method in SEVERAL_ANSWERS]
        pairs += [(policy, Entry("start_sets")) for policy in with_sets]
    return [pair for pair in pairs if task.shared_seeds(*pair)]


def low_rate_pairs(task: TaskResults) -> list[tuple[Entry, Entry]]:
    """The methods that reward sets against GRPO at its low rate, where they share a seed."""
    low = low_grpo(task)
    pairs = [(ours, low) for ours in (MAX_AT_K, VPO, GROUP_VPO) if low]
    return [pair for pair in pairs if task.shared_seeds(*pair)]


def cure_pairs(task: TaskResults) -> list[tuple[Entry, Entry]]:
    """The methods that reward sets, with and without a cure, against every cure of GRPO and of one another."""
    low = low_grpo(task)
    pairs = [(entry, low) for entry in cures_of(task, "grpo") if low]
    grpo = [GRPO, *cures_of(task, "grpo")]
    for method in ("max_at_k", "vpo", "group_vpo"):
        own = [Entry(method), *cures_of(task, method)]
        pairs += itertools.product(own, grpo)
    max_at_k = [MAX_AT_K, *cures_of(task, "max_at_k")]
    vpo = [VPO, *cures_of(task, "vpo")]
    group_vpo = [GROUP_VPO, *cures_of(task, "group_vpo")]
    pairs += itertools.product(vpo, max_at_k)
    pairs += itertools.product(group_vpo, max_at_k + vpo)
    with_cure = [pair for pair in pairs if pair[0].flags or pair[1].flags]
    return [pair for pair in with_cure if task.shared_seeds(*pair)]


def method_pairs(task: TaskResults) -> list[tuple[Entry, Entry]]:
    """The pairs of methods, each at the same kind of rate, that share a seed."""
    names = [
        ("vpo", "grpo"),
        ("vpo", "max_at_k"),
        ("group_vpo", "vpo"),
        ("group_vpo", "max_at_k"),
        ("vpo", "multi_rlvr"),
        ("vpo", "goal_conditioned"),
    ]
    names += [(method, "grpo") for method in METHODS if method not in (*START, "grpo", "vpo")]
    pairs = []
    for lr in (None, 2e-5, 5e-5):
        pairs += [(Entry(ours, lr), Entry(theirs, lr)) for ours, theirs in names]
    return [pair for pair in pairs if task.shared_seeds(*pair)]


def best_rows(task: TaskResults, ours: Entry, theirs: Entry) -> list[list]:
    """Differences with each method at the rate or cure and temperature that are best for a measure."""
    measures = ["best@1", "best@30", "W@30"]
    if task.name in WITH_PASSES:
        measures.append("pass@30")
    seeds = task.shared_seeds(ours, theirs)
    if programs_of(task, ours, seeds) != programs_of(task, theirs, seeds):
        return []
    rows = []
    for measure in measures:
        our_best, our_temperature = best_setting(task, ours, measure, seeds)
        their_best, their_temperature = best_setting(task, theirs, measure, seeds)
        our_values = task.values(our_best, measure, our_temperature, seeds)
        their_values = task.values(their_best, measure, their_temperature, seeds)
        difference = task.summary(our_values - their_values)
        temperatures = f"each its best: {our_temperature}; {their_temperature}"
        start = [task.name, our_best.title, their_best.title, temperatures]
        rows.append([*start, *difference_cells(measure, difference)])
    return rows


def programs_of(task: TaskResults, policy: Entry, seeds: list[int]) -> set[bool]:
    """Whether the former program measured a policy's newest results of these seeds."""
    runs = task.runs(policy)
    return {runs[seed].is_former for seed in seeds}


def best_setting(
    task: TaskResults, policy: Entry, measure: str, seeds: list[int]
) -> tuple[Entry, str]:
    """The learning rate, or cure, and the temperature at which a policy's method has the highest mean.

    Only those with all these seeds count, and they count alone: others may be easier. The same
    program must have measured them.
    """
    program = programs_of(task, policy, seeds)
    settings = []
    for rival in [*task.policies(), *cures_of(task, policy.method)]:
        is_of_method = rival.method == policy.method
        has_seeds = set(seeds) <= set(task.runs(rival))
        if is_of_method and has_seeds and programs_of(task, rival, seeds) == program:
            settings += [(rival, temperature) for temperature in TEMPERATURES]

    def mean(setting: tuple[Entry, str]) -> float:
        rival, temperature = setting
        return task.values(rival, measure, temperature, seeds).mean().item()

    return max(settings, key=mean)


def searches_csv(stored: Stored) -> str:
    """A row for every search and policy; the counts are those of the runs."""
    head = ["search", "problems", "policy", *(f"solved by {budget}" for budget in BUDGETS)]
    head += ["solved", "low", "high", "best score", "reward vectors"]
    rows: list[list] = [[*head, "not by GRPO or start", "nor in any run", "by chance"]]
    for key, search in stored.searches.items():
        policies = search["policies"]
        chance = " ".join(map(str, counts_of_other_runs(policies, RIVALS)))
        for name, runs in policies.items():
            solved = solved_at(runs)  # (runs, N)
            row = [key, solved.shape[1], Entry(name).title]
            for budget in BUDGETS:
                row.append(share((solved > 0) & (solved <= budget)))
            row += [share(solved > 0), *bootstrap_interval(solved > 0)]
            row += [final_mean(runs, "best"), final_mean(runs, "behaviours")]
            row += [alone_cell(policies, name, any_run) for any_run in (False, True)]
            rows.append([*row, chance])
    return as_csv(rows)


def share(is_so: Tensor) -> float:
    return is_so.double().mean().item()


# The comparison of two versions of the program.


def old_and_new(old: Stored, new: Stored) -> str:
    """Means of policies over the seeds that both have, and the lowest and highest old seed.

    A star marks a new mean outside of the old seeds.
    """
    head = ["task", "policy", "seeds"]
    for measure in SIDE_BY_SIDE:
        head += [measure, "new", "old seeds"]
    rows = []
    for name in new.names:
        before = old.task(name)
        after = new.task(name)
        for policy in all_policies(after):
            shared = set(before.runs(policy)) & set(after.runs(policy))
            seeds = sorted(shared)
            if seeds:
                cells = compared_cells(before, after, policy, seeds)
                rows.append([name, policy.title, len(seeds), *cells])
    return markdown(head, rows)


def compared_cells(
    before: TaskResults, after: TaskResults, policy: Entry, seeds: list[int]
) -> list[str]:
    cells = []
    for measure in SIDE_BY_SIDE:
        old_mean = before.values(policy, measure, seeds=seeds).mean().item()
        new_mean = after.values(policy, measure, seeds=seeds).mean().item()
        of_seeds = before.values(policy, measure).mean(1)  # (seeds)
        low, high = torch.aminmax(of_seeds)
        mark = "" if low <= new_mean <= high else "*"
        cells += [f"{old_mean:.3f}", f"{new_mean:.3f}{mark}", f"{low:.3f}-{high:.3f}"]
    return cells
