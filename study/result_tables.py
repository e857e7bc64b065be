"""The tables of study/pages/ as Markdown, one function each, from stored results alone."""

import torch

from report.markdown import markdown
from study.entries import Entry
from study.significance import benjamini_hochberg, holm
from study.stored import METHODS, START, TEMPERATURES, Stored, TaskResults
from vpo import SEVERAL_ANSWERS, answers_per_rollout, group_normalize, sample_weights, set_reward

START_MODEL = Entry("start")
GRPO = Entry("grpo")
MAX_AT_K = Entry("max_at_k")
VPO = Entry("vpo")
GROUP_VPO = Entry("group_vpo")

MEASURES = {
    "maze": ("best@1", "best@3", "best@30", "W@30"),
    "code": ("best@1", "best@30", "pass@1", "pass@30", "W@30"),
    "toy": ("best@30", "pass@1", "pass@30"),
    "open_cases": ("best@1", "best@30", "pass@30", "W@30"),
    "headline": ("best@1", "best@3", "best@30", "W@30"),
}
PRETRAINED = ("open_cases", "headline")  # whose start model is a pretrained one
WITHOUT_PASSES = ("maze", "headline")  # where no answer has the full reward in all objectives
MAIN_MEASURES = {
    "maze": ("best@1", "best@3", "best@30", "W@30", "diversity"),
    "code": ("best@1", "best@30", "pass@30", "W@30", "diversity"),
}
SIDE_BY_SIDE = ("best@1", "best@30", "W@30", "diversity")  # where a table holds several tasks
# By what a learning rate is chosen; for all other methods by best@1.
CHOSEN_BY = {"vpo": "W@3", "group_vpo": "W@3", "max_at_k": "best@3"}


def main_table(*tasks: TaskResults) -> str:
    """The most important rows and columns of these tasks side by side, as far as they are stored."""
    head = [""]
    policies = (START_MODEL, GRPO, MAX_AT_K, VPO, GROUP_VPO)
    rows = [[policy.title] for policy in policies]
    low_rate = ["GRPO, low rate"]
    several = len(tasks) > 1
    for task in tasks:
        if not task.runs(GRPO):
            continue
        for measure in SIDE_BY_SIDE if several else MAIN_MEASURES[task.name]:
            head.append(f"{task.name} {measure}" if several else measure)
            for policy, row in zip(policies, rows, strict=True):
                row.append(task.mean(policy, measure) if task.runs(policy) else "")
            other = grpo_for_many(task)
            low_rate.append(task.mean(other, measure) if other else "")
    if any(low_rate[1:]):
        rows.insert(2, low_rate)
    return markdown(head, rows)


def grpo_for_many(task: TaskResults) -> Entry | None:
    """GRPO at the rate that is best for thirty candidates, if it was trained so."""
    rates = [policy for policy in task.policies() if policy.method == "grpo" and policy.lr]
    return rates[0] if rates else None


def means(task: TaskResults) -> str:
    """All policies at temperature 0.7, the mean over their seeds."""
    passes = [] if task.name in WITHOUT_PASSES else ["pass@1", "pass@30"]
    measures = ["best@1", "best@3", "best@10", "best@30", *passes, "W@30", "diversity"]
    rows = []
    for policy in task.policies():
        values = [task.mean(policy, measure) for measure in measures]
        rows.append([policy.title, len(task.runs(policy)), *values])
    return markdown(["method", "seeds", *measures], rows)


def completion(task: TaskResults) -> str:
    """How many candidates earn anything, and how much those earn on average, at temperature 0.7.

    Over the seeds for which it is stored: older results lack it.
    """
    rows = []
    for policy in (*task.policies(), *task.variants()):
        measured = []
        for run in task.runs(policy).values():
            values = run.measures[TEMPERATURES[0]][policy.method]
            if "earned" in values:
                measured.append([values["earned"].mean(), values["best@1"].mean()])
        if measured:
            earned, best = torch.tensor(measured).mean(0).tolist()
            name = f"{policy.title}, {flags_text(policy)}" if policy.flags else policy.title
            rows.append([name, len(measured), earned, best / earned, best])
    head = ["method", "seeds", "candidates that earn anything", "their mean score", "best@1"]
    return markdown(head, rows)


def seed_rows(task: TaskResults) -> list[list]:
    """The table of every seed, its head first."""
    measures = (*MEASURES[task.name], "diversity")
    rows: list[list] = [["method", "seed", *measures]]
    for policy in task.policies():
        columns = [task.values(policy, measure).mean(1) for measure in measures]
        for seed, values in zip(task.shared_seeds(policy), torch.stack(columns, 1), strict=True):
            rows.append([policy.title, seed, *(f"{value:.3f}" for value in values)])
    return rows


def temperatures(task: TaskResults) -> str:
    columns = []
    at_30 = "pass@30" if task.name == "code" else "best@30"
    for measure in ("best@1", at_30, "W@30", "diversity"):
        columns += [(measure, temperature) for temperature in TEMPERATURES]
    rows = []
    for policy in task.policies():
        rows.append([policy.title, *(task.mean(policy, *column) for column in columns)])
    return markdown(["method", *(f"{measure} at {T}" for measure, T in columns)], rows)


def differences(task: TaskResults) -> str:
    """Paired differences at temperature 0.7, and with each method at its best setting for the measure."""
    measures = MEASURES[task.name]
    rows = []
    for ours, theirs in compared_pairs(task):
        heading = f"{ours.title} - {theirs.title}"
        seeds = len(task.shared_seeds(ours, theirs))
        rows.append([heading, "0.7", seeds, *task.differences(ours, theirs, measures)])
        if task.name != "open_cases":  # of which one temperature is stored
            best = [best_difference(task, ours, theirs, measure) for measure in measures]
            rows.append([heading, "each its best", seeds, *best])
    return markdown(["difference", "temperature", "seeds", *measures], rows)


def pairs(task: TaskResults) -> str:
    """Group VPO with sets of two rollouts against the others: is there a method without a price?"""
    measures = ("best@1", "best@3", "best@10", "best@30", "W@3", "W@30")
    ours = Entry("group_vpo", flags=(("subset", 2),))
    rows = []
    for theirs in (GRPO, MAX_AT_K, VPO, GROUP_VPO):
        seeds = len(task.shared_seeds(ours, theirs))
        rows.append([theirs.title, seeds, *task.differences(ours, theirs, measures)])
    return markdown(["minus", "seeds", *measures], rows)


def every_k(task: TaskResults) -> str:
    """The methods with sets against GRPO, at its own rate and at that for thirty candidates."""
    measures = [f"best@{k}" for k in (1, 2, 3, 5, 10, 30)]
    if task.name not in WITHOUT_PASSES:
        measures += ["pass@1", "pass@30"]
    measures += ["W@3", "W@30"]
    rows = []
    for theirs in (GRPO, grpo_for_many(task)):
        for ours in (MAX_AT_K, VPO, GROUP_VPO):
            heading = f"{ours.title} - {theirs.title}"
            rows.append([heading, *task.differences(ours, theirs, measures)])
    return markdown(["difference", *measures], rows)


def multiplicity(stored: Stored) -> str:
    """How many differences of the tables survive a correction for their number."""
    p_values = []
    n_firm = 0
    for name in ("maze", "code"):
        task = stored.task(name)
        for ours, theirs in compared_pairs(task):
            if len(task.shared_seeds(ours, theirs)) < 3:
                continue
            for difference in task.differences(ours, theirs, MEASURES[name]):
                p_values.append(difference.p)
                n_firm += difference.firm
    return (
        f"Of {len(p_values)} differences at temperature 0.7 in the maze and on programs "
        f"{n_firm} are firm. By the t-test alone {benjamini_hochberg(p_values)} survive "
        f"Benjamini-Hochberg at a false discovery rate of 5%, and {holm(p_values)} survive Holm."
    )


def compared_pairs(task: TaskResults) -> list[tuple[Entry, Entry]]:
    """The pairs of policies whose differences are shown; only those that share a seed."""
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
    if task.name in PRETRAINED:
        trained = [policy for policy in task.policies() if policy.method not in START]
        pairs += [(policy, START_MODEL) for policy in trained]
        with_sets = [policy for policy in trained if policy.method in SEVERAL_ANSWERS]
        pairs += [(policy, Entry("start_sets")) for policy in with_sets]
    return [pair for pair in pairs if task.shared_seeds(*pair)]


def best_difference(task: TaskResults, ours: Entry, theirs: Entry, measure: str) -> str:
    """A difference with each method at the rate and temperature that are best for this measure."""
    if measure == "best@3":  # not stored at other temperatures
        return ""
    seeds = task.shared_seeds(ours, theirs)
    our_best, our_temperature = best_setting(task, ours, measure, seeds)
    their_best, their_temperature = best_setting(task, theirs, measure, seeds)
    our_values = task.values(our_best, measure, our_temperature, seeds)
    their_values = task.values(their_best, measure, their_temperature, seeds)
    difference = task.summary(our_values - their_values)
    our_text = setting_text(our_best, our_temperature)
    their_text = setting_text(their_best, their_temperature)
    return f"{difference} ({our_text}; {their_text})"


def best_setting(
    task: TaskResults, policy: Entry, measure: str, seeds: list[int]
) -> tuple[Entry, str]:
    """The learning rate and the temperature at which a policy's method has the highest mean.

    Only rates with all these seeds count, and they count alone: others may be easier.
    """
    settings = []
    for rival in task.policies():
        if rival.method == policy.method and set(seeds) <= set(task.runs(rival)):
            settings += [(rival, temperature) for temperature in TEMPERATURES]

    def mean(setting: tuple[Entry, str]) -> float:
        rival, temperature = setting
        return task.values(rival, measure, temperature, seeds).mean().item()

    return max(settings, key=mean)


def setting_text(policy: Entry, temperature: str) -> str:
    """A temperature, with the learning rate where it is not the method's own."""
    if policy.lr is None:
        return temperature
    return f"{temperature} at {policy.lr:g}"


def learning_rates(validation: TaskResults) -> str:
    measures = ("best@1", "best@3", "best@30", "W@3", "W@30", "diversity")
    rows = []
    for policy in validation.policies():
        values = [validation.mean(policy, measure) for measure in measures]
        uses = []
        if policy.lr == best_rate(validation, policy.method):
            uses.append("few")
        if policy.lr == best_rate_for_many(validation, policy.method):
            uses.append("30")
        rate = f"**{policy.lr:g}**" if uses else f"{policy.lr:g}"
        rows.append([Entry(policy.method).title, rate, ", ".join(uses), *values])
    return markdown(["method", "peak lr", "chosen for", *measures], rows)


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


def ablations(task: TaskResults) -> str:
    """What every varied setting changes against its method's default, on the seeds that both have.

    VPO with two answers per rollout, the best m, is compared with its rivals too.
    """
    measures = (*MEASURES[task.name], "diversity")
    rows = []
    for policy in task.variants():
        others = [Entry(policy.method)]
        if policy.flags[0] == ("m", 2):
            others += [MAX_AT_K, GROUP_VPO]
        for other in others:
            cells = task.differences(policy, other, measures)
            seeds = len(task.runs(policy))
            rows.append([policy.title, flags_text(policy), other.title, seeds, *cells])
    return markdown(["method", "setting", "minus", "seeds", *measures], rows)


def flags_text(policy: Entry) -> str:
    """The flags of a variant, or the name of the script of study/ that trained it."""
    scripts = {"answer": "reward-to-go", "shapley": "Shapley credit"}
    words = []
    for name, value in policy.flags:
        if name == "credit":
            words.append(scripts[value])
        elif name == "variant":
            words.append(value.replace("_", " "))
        else:
            words.append(f"--{name} {value}")
    return " ".join(words)


def cost(task: TaskResults) -> str:
    """What every policy sampled in training, and how long it took; cells ran side by side."""
    m = 5 if task.name == "toy" else 3
    rows = []
    for policy in task.policies():
        if policy.method in START:
            continue
        rollouts = task.average(policy, lambda run: run.rollouts)
        answers = rollouts * answers_per_rollout(policy.method, m)
        tokens = task.average(policy, lambda run: run.tokens)
        seconds = task.average(policy, lambda run: run.training_seconds / run.steps)
        rows.append([policy.title, f"{answers:,.0f}", f"{tokens:,.0f}", f"{seconds:.2f}"])
    return markdown(["method", "answers", "tokens", "seconds per step"], rows)


def noise() -> str:
    """Mean error of VPO's advantage by the number of preference weights K, for two ways to draw them.

    With k = 2 objectives the set reward has a closed form, from which the exact advantage follows.
    """
    rewards = torch.rand(256, 8, 3, 2, generator=torch.Generator().manual_seed(0))  # (P, G, m, k)
    exact = group_normalize(set_reward_of_two(rewards))  # (P, G)
    counts = (10, 30, 100, 300, 1000)
    samplers = {"iid": sample_weights, "sobol": sobol_weights}
    rows = []
    for name, sampler in samplers.items():
        row = [name]
        for n_weights in counts:
            error = 0.0
            for seed in range(5):
                generator = torch.Generator().manual_seed(seed)
                weights = sampler(256, n_weights, 2, generator=generator)  # (P, K, k)
                advantage = group_normalize(set_reward(rewards, weights))
                error += (advantage - exact).abs().mean().item()
            row.append(f"{error / 5:.4f}")
        rows.append(row)
    return markdown(["sampler", *(f"K = {n_weights}" for n_weights in counts)], rows)


def set_reward_of_two(rewards: torch.Tensor) -> torch.Tensor:
    """The set reward in closed form for k = 2 objectives and alpha = 1: rewards (P, G, m, 2) -> (P, G).

    The utility of an answer under w = (u, 1 - u) is a line in u. The best of m answers is the upper
    envelope of m lines, and R is the area under it on [0, 1]. The envelope is straight between the
    points where two lines cross, so the trapezoidal rule is exact.
    """
    offset = rewards[..., 1]  # (P, G, m)
    slope = rewards[..., 0] - offset
    rise = offset[..., None, :] - offset[..., None]  # (P, G, m, m)
    run = slope[..., None] - slope[..., None, :]
    crossings = (rise / run).nan_to_num(0.0).clamp(0, 1).flatten(2)  # (P, G, m * m)
    ends = torch.tensor([0.0, 1.0]).expand(*crossings.shape[:2], 2)
    u = torch.cat([crossings, ends], -1).sort(-1).values  # (P, G, m * m + 2)
    lines = slope[..., None] * u[:, :, None] + offset[..., None]  # (P, G, m, m * m + 2)
    return torch.trapezoid(lines.amax(2), u, dim=-1)


def sobol_weights(P: int, K: int, k: int, generator: torch.Generator) -> torch.Tensor:
    """K preference weights (P, K, k) for each of P prompts, spread evenly over the simplex.

    A Sobol net that every prompt shifts at random gives k - 1 cuts of [0, 1]. Their gaps are a weight.
    """
    bits = 2**23
    net = torch.quasirandom.SobolEngine(k - 1, scramble=True, seed=0).draw(K, dtype=torch.float64)
    shift = torch.randint(bits, (P, 1, k - 1), generator=generator)
    points = (net * bits).long() ^ shift  # (P, K, k - 1)
    cuts = ((points + 0.5) / bits).sort(-1).values
    ends = torch.nn.functional.pad(cuts, (1, 0)), torch.nn.functional.pad(cuts, (0, 1), value=1.0)
    return ends[1] - ends[0]


def rewards(stored: Stored) -> str:
    """What the start model's rollouts said of each reward, and what sets and vectors then gained."""
    pairs = ((VPO, GRPO), (MAX_AT_K, GRPO), (GROUP_VPO, MAX_AT_K), (VPO, MAX_AT_K))
    rows = []
    for task in geometry_tasks(stored):
        seeds = len(task.shared_seeds(VPO, GRPO, MAX_AT_K, GROUP_VPO))
        gains = [task.difference(*pair, "W@30") for pair in pairs]
        levels = [task.mean(policy, "W@30") for policy in (START_MODEL, MAX_AT_K)]
        rows.append([task.name, seeds, f"{unseen_share(task):.0%}", *gains, *levels])
    head = ["reward", "seeds", "unseen by the scalar"]
    head += [f"{ours.title} - {theirs.title}" for ours, theirs in pairs]
    head += ["start model", "Max@K"]
    return markdown(head, rows)


def geometry_tasks(stored: Stored) -> list[TaskResults]:
    """The tasks with a reward geometry; first the one whose scalar misses the least variance."""
    names = ("maze", "code", "copies", "noisy", "halfway", "gems", "tradeoff", "fence")
    return sorted([stored.task(name) for name in names], key=unseen_share)


def unseen_share(task: TaskResults) -> float:
    """The share of the variance that the scalar misses; GRPO's results hold the start model."""
    return task.average(GRPO, lambda run: run.geometry["unseen_variance_share"])
