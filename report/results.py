"""The tables of docs/results.md from stored results alone: means, paired differences, temperatures, rates, claims."""

import functools
import gzip
import json
import operator
import re
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

from eval import pass_at_k
from report import plots
from report.plots import bootstrap_interval, title
from vpo import SAMPLERS, answers_per_rollout, group_normalize, set_reward_exact, vpo_advantage

SINGLE = ("grpo", "dr_grpo", "maxrl", "gdpo", "random_weighting", "goal_conditioned", "max_at_k")
RATED = (
    "grpo 2e-05",
    "grpo 5e-05",
    "max_at_k 2e-05",
    "max_at_k 5e-05",
    "vpo 2e-05",
    "vpo 5e-05",
    "group_vpo 2e-05",
)
METHODS = (
    "start",
    "start_sets",
    *SINGLE,
    "multi_rlvr",
    "vpo",
    "group_vpo",
    *RATED,
)  # the last: of a real model
START = {"open_cases": "grpo 5e-05"}  # whose result holds the start's; else grpo's
TEMPERATURES = ("0.7", "1", "1.3")
PAIRS = (
    ("vpo", "grpo"),
    ("vpo", "max_at_k"),
    ("group_vpo", "vpo"),
    ("group_vpo", "max_at_k"),
    *((method, "grpo") for method in (*SINGLE[1:], "multi_rlvr", "group_vpo")),
)
PAIRS += tuple((f"{a} {rate}", f"{b} {rate}") for rate in ("2e-05", "5e-05") for a, b in PAIRS)
HEADLINE = {
    "maze": ("best@1", "best@3", "best@30", "W@30"),
    "code": ("best@1", "best@30", "pass@1", "pass@30", "W@30"),
    "toy": ("best@30", "pass@1", "pass@30"),
    "open_cases": ("best@1", "best@30", "pass@30", "W@30"),
}
VARIED = {
    "vpo": {
        "m": 3,
        "alpha": 1.0,
        "n-weights": 100,
        "sampler": "iid",
        "subset": 1,
        "credit": "rollout",
    },
    "group_vpo": {"subset": 4, "group-size": 8},
}  # with the defaults
TARGET = {
    "vpo": "W@3",
    "group_vpo": "W@3",
    "max_at_k": "best@3",
}  # what a learning rate is chosen by; else best@1


class Stored:
    """Results by task, method, seed and setting: {(task, method, seed, flags): result of reproduce.py}."""

    def __init__(self, results: dict[tuple, dict]):
        self.results = results

    def seeds(self, task: str, method: str, flags: tuple = ()) -> list[int]:
        cell = START.get(task, "grpo") if method.startswith("start") else method
        return sorted(
            seed
            for t, name, seed, f in self.results
            if (t, name, f) == (task, cell, flags) and seed < 100
        )

    def values(
        self,
        task: str,
        method: str,
        measure: str,
        T: str = "0.7",
        flags: tuple = (),
        seeds: list[int] | None = None,
    ) -> Tensor:
        """One measure per seed and problem: (seeds, N), in the measure's own unit."""
        cell, rows = START.get(task, "grpo") if method.startswith("start") else method, []
        for seed in self.seeds(task, method, flags) if seeds is None else seeds:
            result = self.results[task, cell, seed, flags]
            at = result["at"][T][method.split()[0]]
            rows.append(
                [pass_of(result["size"], c, int(measure[5:])) for c in at["passed"]]
                if measure.startswith("pass@")
                else [value / 1000 for value in at[measure]]
            )
        return torch.tensor(rows, dtype=torch.float64)

    def groups(self, task: str) -> Tensor | None:
        """Which problems share a prompt (N); None if none do."""
        return next(
            (
                torch.tensor(result["groups"])
                for (t, _, seed, flags), result in self.results.items()
                if t == task and seed < 100 and not flags and result["groups"]
            ),
            None,
        )

    def mean(self, *which, **more) -> float:
        return self.values(*which, **more).mean().item()

    def average(
        self, task: str, method: str, *keys: str | int, seeds: list[int] | None = None
    ) -> float:
        """The mean over the seeds of what a result holds under these keys."""
        found = [
            functools.reduce(operator.getitem, keys, self.results[task, method, seed, ()])
            for seed in seeds or self.seeds(task, method)
        ]
        return sum(found) / len(found)

    def lead(self, task: str, ours: tuple, theirs: tuple, measure: str) -> Tensor:
        """Ours minus theirs, each (method, temperature, flags) of which the last may be left out, over the seeds that
        both have, paired by seed and problem: (seeds, N)."""
        others = self.seeds(task, theirs[0], *theirs[2:])
        seeds = [seed for seed in self.seeds(task, ours[0], *ours[2:]) if seed in others]
        a, b = (
            self.values(task, method, measure, *setting, seeds=seeds)
            for method, *setting in (ours, theirs)
        )
        return a - b

    def interval(self, task: str, values: Tensor) -> tuple[float, float, float, int, bool]:
        """Of differences (seeds, N): mean, 95% interval, seeds, firm. The interval resamples seeds and problems; so few
        seeds make it too narrow, so a difference is firm only if besides three seeds or more all have its sign."""
        each, (low, high) = (
            values.mean(1),
            bootstrap_interval(values, self.groups(task), samples=2000),
        )
        firm = len(each) > 2 and bool(min(low, each.min()) > 0 or max(high, each.max()) < 0)
        return values.mean().item(), low, high, len(each), firm

    def difference(
        self, task: str, ours: tuple, theirs: tuple, measure: str
    ) -> tuple[float, float, float, int, bool]:
        return self.interval(task, self.lead(task, ours, theirs, measure))

    def methods(self, task: str) -> list[str]:
        return [method for method in METHODS if self.seeds(task, method)]


pass_of = functools.cache(pass_at_k)


def table(head: list[str], rows: list[list]) -> str:
    """A Markdown table, numbers with three digits, or that there is nothing for it yet."""
    rows = [
        [f"{cell:.3f}" if isinstance(cell, float) else str(cell) for cell in row] for row in rows
    ]
    lines = ["| " + " | ".join(row) + " |" for row in [head, ["---"] * len(head), *rows]]
    return "\n".join(lines) if rows else "*Not measured yet.*"


def span(mean: float, low: float, high: float, seeds: int, firm: bool) -> str:
    """A difference with its interval, bold where it is firm."""
    text = f"{mean:+.3f} [{low:+.3f}, {high:+.3f}]"
    return f"**{text}**" if firm else text


def alike(mean: float, low: float, high: float, *_: object) -> bool | None:
    """Whether a difference is below 0.02; None if the interval does not say."""
    return True if low > -0.02 and high < 0.02 else False if low > 0.02 or high < -0.02 else None


def means(stored: Stored, task: str) -> str:
    """All methods at temperature 0.7, the mean over their seeds."""
    passes = ["pass@1", "pass@30"] * (task != "maze")
    columns = ["best@1", "best@3", "best@10", "best@30", *passes, "W@30", "diversity"]
    return table(
        ["method", "seeds", *columns],
        [
            [
                title(method),
                len(stored.seeds(task, method)),
                *(stored.mean(task, method, column) for column in columns),
            ]
            for method in stored.methods(task)
        ],
    )


def per_seed(stored: Stored, task: str) -> str:
    columns = (*HEADLINE[task], "diversity")
    return table(
        ["method", "seed", *columns],
        [
            [
                title(name),
                seed,
                *(stored.mean(task, name, column, seeds=[seed]) for column in columns),
            ]
            for name in stored.methods(task)
            for seed in stored.seeds(task, name)
        ],
    )


def differences(stored: Stored, task: str) -> str:
    """Paired differences at temperature 0.7, and with each method at its own best temperature for that column."""

    def cell(ours: str, theirs: str, column: str, best: bool) -> str:
        if best and column == "best@3":  # not stored at other temperatures
            return ""
        T = [
            max(
                TEMPERATURES[: 3 if best else 1],
                key=functools.partial(stored.mean, task, name, column),
            )
            for name in (ours, theirs)
        ]
        return (
            span(*stored.difference(task, (ours, T[0]), (theirs, T[1]), column))
            + f" ({T[0]}, {T[1]})" * best
        )

    pairs = PAIRS + tuple((name, "start") for name in METHODS[2:]) * (
        task == "open_cases"
    )  # its start is pre-trained
    return table(
        ["difference", "temperature", "seeds", *HEADLINE[task]],
        [
            [
                f"{title(ours)} - {title(theirs)}",
                "each its best" if best else "0.7",
                len(stored.lead(task, (ours,), (theirs,), "best@1")),
                *(cell(ours, theirs, column, best) for column in HEADLINE[task]),
            ]
            for ours, theirs in pairs
            if stored.seeds(task, ours) and stored.seeds(task, theirs)
            for best in (False, True)[: 1 if task == "open_cases" else 2]
        ],
    )  # of which one temperature is stored


def temperatures(stored: Stored, task: str) -> str:
    measures = ("best@1", "pass@30" if task == "code" else "best@30", "W@30", "diversity")
    every = [(measure, T) for measure in measures for T in TEMPERATURES]
    return table(
        ["method", *(f"{measure} at {T}" for measure, T in every)],
        [
            [title(method), *(stored.mean(task, method, measure, T) for measure, T in every)]
            for method in stored.methods(task)
        ],
    )


def tuned(stored: Stored, task: str) -> dict[str, dict[float, dict[str, float]]]:
    """What the validation problems say of every learning rate: method -> rate -> measure -> mean."""
    found: dict[str, dict[float, list[dict]]] = {}
    for (t, method, seed, flags), result in sorted(stored.results.items(), key=str):
        if t == task and seed >= 100 and dict(flags).keys() == {"lr"}:
            found.setdefault(method, {}).setdefault(dict(flags)["lr"], []).append(
                result["at"]["0.7"][method]
            )
    return {
        method: {
            rate: {key: sum(at[key][0] for at in each) / len(each) / 1000 for key in each[0]}
            for rate, each in found[method].items()
        }
        for method in METHODS
        if method in found
    }


def best_rate(rates: dict[float, dict[str, float]], method: str) -> float:
    """The lowest rate that is within 0.005 of the best: less is noise."""
    worth = {rate: values[TARGET.get(method, "best@1")] for rate, values in rates.items()}
    return min(rate for rate in worth if worth[rate] >= max(worth.values()) - 0.005)


def learning_rates(stored: Stored, task: str) -> str:
    rows, columns = [], ("best@1", "best@3", "best@30", "W@3", "W@30", "diversity")
    for method, rates in tuned(stored, task).items():
        for rate, values in sorted(rates.items()):
            mark = "**" * (len(rates) > 1 and rate == best_rate(rates, method))
            rows.append([title(method), f"{mark}{rate:g}{mark}", *map(values.get, columns)])
    return table(["method", "peak lr", *columns], rows)


def ablations(stored: Stored, task: str = "maze") -> str:
    """What every varied setting changes against its method's default, on shared seeds; the best m against rivals."""
    settings = sorted(
        {
            (method, flags)
            for t, method, seed, flags in stored.results
            if t == task and seed < 100 and flags
        },
        key=lambda each: (METHODS.index(each[0]), str(each[1])),
    )
    rows, columns = [], (*HEADLINE[task], "diversity")
    for method, flags in settings:
        name = " ".join(f"--{flag} {value}" for flag, value in flags).replace(
            "--credit answer", "reward-to-go"
        )
        for other in (method, "max_at_k", "group_vpo")[: 3 if flags[0] == ("m", 2) else 1]:
            rows.append(
                [
                    title(method),
                    name,
                    title(other),
                    len(stored.seeds(task, method, flags)),
                    *(
                        span(*stored.difference(task, (method, "0.7", flags), (other,), column))
                        for column in columns
                    ),
                ]
            )
    return table(["method", "setting", "minus", "seeds", *columns], rows)


def varied(stored: Stored, task: str = "maze") -> dict[str, dict[str, dict[str, tuple]]]:
    """Of every flag that was varied: heading -> value -> measure -> (mean, low, high, ...)."""
    panels = {}
    for method, flag, default in (
        (name, *setting) for name, flags in VARIED.items() for setting in flags.items()
    ):
        found = {default: ()} | {
            flags[0][1]: flags
            for t, name, _, flags in stored.results
            if (t, name) == (task, method) and flags and flags[0][0] == flag
        }
        if len(found) > 1 and stored.seeds(task, method):
            seeds = sorted(
                set.intersection(
                    *(set(stored.seeds(task, method, flags)) for flags in found.values())
                )
            )
            panels[f"{title(method)}: {flag}"] = {
                str(value): {
                    measure: stored.interval(
                        task, stored.values(task, method, measure, flags=found[value], seeds=seeds)
                    )
                    for measure in ("best@1", "best@30", "W@30")
                }
                for value in sorted(found)
            }
    return panels


def cost(stored: Stored, task: str) -> str:
    """What every method was given: answers, tokens, seconds per step (cells ran side by side: noisy)."""
    rows = []
    for method in (name for name in stored.methods(task) if not name.startswith("start")):
        rollouts, tokens, steps, seconds = (
            stored.average(task, method, *keys)
            for keys in (("rollouts",), ("tokens",), ("steps",), ("seconds", "training"))
        )
        answers = rollouts * answers_per_rollout(method.split()[0], 5 if task == "toy" else 3)
        rows.append([title(method), f"{answers:,.0f}", f"{tokens:,.0f}", f"{seconds / steps:.2f}"])
    return table(["method", "answers", "tokens", "seconds per step"], rows)


def noise(*_: object) -> str:
    """C9: mean error of VPO's advantage against the number of weightings, for both samplers; k = 2 gives the truth."""
    rewards = torch.rand(256, 8, 3, 2, generator=torch.Generator().manual_seed(0))
    truth = group_normalize(set_reward_exact(rewards))

    def error(K: int, sampler: str) -> str:
        draws = [
            vpo_advantage(
                rewards, n_weights=K, sampler=sampler, generator=torch.Generator().manual_seed(seed)
            )
            for seed in range(5)
        ]
        return f"{sum((A - truth).abs().mean().item() for A in draws) / 5:.4f}"

    counts = (10, 30, 100, 300, 1000)
    return table(
        ["sampler", *(f"K = {K}" for K in counts)],
        [[sampler, *(error(K, sampler) for K in counts)] for sampler in SAMPLERS],
    )


def rewards(stored: Stored, *_: object) -> str:
    """What the start model's rollouts said of each reward, and what VPO then gained on GRPO in it."""
    return table(
        [
            "reward",
            "seeds",
            "unseen",
            "effective objectives",
            "W@30, VPO - GRPO",
            "best@30, VPO - GRPO",
        ],
        [
            [name, d[3], f"{unseen:.0%}", f"{effective:.2f}", span(*d), span(*e)]
            for name, unseen, effective, d, e in geometries(stored)
        ],
    )


def geometries(stored: Stored) -> list[tuple]:
    """(reward, unseen, effective, difference in W@30, in best@30), the least conflicting reward first."""
    found = []
    for task in dict.fromkeys(t for t, *_ in stored.results):
        seeds = [seed for seed in stored.seeds(task, "grpo") if seed in stored.seeds(task, "vpo")]
        if task not in ("toy", "open_cases") and seeds:
            found.append(
                (
                    task,
                    *(
                        stored.average(task, "grpo", "geometry", key, seeds=seeds)
                        for key in ("unseen", "effective")
                    ),
                    *(
                        stored.difference(task, ("vpo",), ("grpo",), measure)
                        for measure in ("W@30", "best@30")
                    ),
                )
            )
    return sorted(found, key=lambda row: row[1])


def headline(stored: Stored, *_: object) -> str:
    """The few rows and columns that the README shows, of the maze and of programs."""
    shown = {
        "maze": (*HEADLINE["maze"], "diversity"),
        "code": ("best@1", "best@30", "pass@30", "diversity"),
    }
    columns = [
        (task, measure) for task in shown if stored.seeds(task, "grpo") for measure in shown[task]
    ]
    return table(
        ["", *(f"{task} {measure}" for task, measure in columns)],
        [
            [
                title(method),
                *(
                    stored.mean(task, method, measure) if stored.seeds(task, method) else ""
                    for task, measure in columns
                ),
            ]
            for method in ("start", "grpo", "max_at_k", "vpo", "group_vpo")
        ],
    )


def claims(stored: Stored, *_: object) -> str:
    """A row for every claim of the paper: what was measured, the verdict that follows from the intervals. Of several
    findings: all true, holds; some, partly; none, fails; open where one is None, not shown, and none is false."""
    rows, large, three = [], {"maze": "best@30", "code": "pass@30"}, ("grpo", "max_at_k", "vpo")
    tasks = [task for task in large if all(stored.seeds(task, name) for name in three)]
    rivals = [name for name in (*SINGLE, "multi_rlvr") if name != "goal_conditioned"]
    scalar = {
        task: max(
            (name for name in rivals if stored.seeds(task, name)),
            key=lambda name, task=task: stored.mean(task, name, large[task]),
        )
        for task in tasks
    }

    def add(id: str, claim: str, found: list[tuple[str, bool | None]]) -> None:
        held = {ok for _, ok in found}
        word = (
            "holds"
            if held == {True}
            else "open"
            if False not in held
            else "partly"
            if True in held
            else "fails"
        )
        rows.append(
            [id, claim, "; ".join(text for text, _ in found) or "not measured yet", f"**{word}**"]
        )

    def shown(d: tuple, sign: int = 1) -> bool | None:
        return None if not d[4] else sign * d[0] > 0

    found = [
        (task, stored.difference(task, ("vpo",), (scalar[task],), large[task])) for task in tasks
    ]
    add(
        "C1",
        "at k = 30 VPO matches or beats the strongest scalar baseline",
        [
            (
                f"{task}, {large[task]}, against {title(scalar[task])}: {span(*d)}",
                True if d[1] > -0.02 else False if d[2] < -0.02 else None,
            )
            for task, d in found
        ],
    )
    found = []
    for task in tasks:
        before, after = (stored.lead(task, ("vpo",), (scalar[task],), f"best@{k}") for k in (3, 30))
        found.append((task, stored.interval(task, after), stored.interval(task, after - before)))
    add(
        "C2",
        "VPO's lead over it widens with k",
        [
            (
                f"{task}, best@k, from k = 3 to k = 30 {span(*d)}, at 30 it is {span(*lead)}",
                shown(d) and shown(lead),
            )
            for task, lead, d in found
        ],
    )
    found = [
        (
            task,
            stored.difference(task, ("grpo",), ("vpo",), "best@1"),
            next(
                (
                    k
                    for k in (2, 3, 5, 10, 30)
                    if (
                        stored.mean(task, "vpo", f"best@{k}")
                        > stored.mean(task, "grpo", f"best@{k}")
                    )
                ),
                None,
            ),
        )
        for task in tasks
    ]
    add(
        "C3",
        "at k = 1 GRPO is ahead, the curves cross at about k = 3 (from 2 to 5)",
        [
            (
                f"{task}, GRPO - VPO at k = 1: {span(*d)}, VPO ahead from k = {k or '-'}",
                shown(d) and (k or 99) <= 5,
            )
            for task, d, k in found
        ],
    )
    with_sets = [task for task in tasks if stored.seeds(task, "multi_rlvr")]
    found = [
        (
            task,
            {
                name: [stored.average(task, name, "training", "diversity", i) for i in (0, -1)]
                for name in ("grpo", "multi_rlvr", "vpo")
            },
        )
        for task in with_sets
    ]
    add(
        "C4",
        "diversity in training: GRPO's falls towards 0, Multi-RLVR's stays low, VPO's high",
        [
            (
                f"{task}, {title(name)}, first ten steps to last {each[name][0]:.2f} to {each[name][1]:.2f}, "
                f"{'' if ok else 'not '}{asked}",
                ok,
            )
            for task, each in found
            for name, asked, ok in (
                ("grpo", "below half", each["grpo"][1] < 0.5 * each["grpo"][0]),
                (
                    "multi_rlvr",
                    "below two thirds of VPO's",
                    each["multi_rlvr"][1] < 0.67 * each["vpo"][1],
                ),
                ("vpo", "kept", each["vpo"][1] >= each["vpo"][0]),
            )
        ],
    )
    add(
        "C5",
        "in an evolutionary search VPO or Group VPO solves ten problems in every run that GRPO and start do not",
        [
            (f"{name.replace('_', ', ')}: VPO {a}, Group VPO {b}", max(min(a), min(b)) >= 10)
            for name, whole in searches().items()
            if name.endswith("evolve")
            for a, b in [
                [
                    [len(each) for each in alone(whole["policies"], policy)]
                    for policy in ("vpo", "group_vpo")
                ]
            ]
        ],
    )
    add(
        "C6",
        "no extra training compute: tokens of VPO / tokens of Multi-RLVR within 10%",
        [
            (f"{task}: {ratio:.2f}", 0.9 < ratio < 1.1)
            for task in with_sets
            for ratio in [
                stored.average(task, "vpo", "tokens") / stored.average(task, "multi_rlvr", "tokens")
            ]
        ],
    )
    add(
        "C7",
        "with collinear objectives VPO and GRPO are alike (within 0.02)",
        [
            (f"{task}, W@30, VPO - GRPO: {span(*d)}", alike(*d))
            for task in ("copies", "noisy")
            if stored.seeds(task, "vpo")
            for d in [stored.difference(task, ("vpo",), ("grpo",), "W@30")]
        ],
    )
    found = [
        (measure, stored.difference("maze", ("vpo", "0.7", flags), ("grpo",), measure))
        for t, name, seed, flags in stored.results
        if (t, name, dict(flags).get("m")) == ("maze", "vpo", 1)
        for measure in ("best@1", "W@30")
    ][:2]
    add(
        "C8",
        "with m = 1 VPO is GRPO (within 0.02)",
        [(f"maze, {name}: {span(*d)}", alike(*d)) for name, d in found],
    )
    signs = {
        (("m", 1), ("prompts-per-step", 36), ("lr", 1.2e-3)): -1,
        (("m", 2), ("prompts-per-step", 18)): -1,
        (("m", 5), ("prompts-per-step", 7)): 1,
        (("n-weights", 10),): -1,
        (("sampler", "sobol"),): 1,
    }
    found = [
        (
            " ".join(f"--{name} {value}" for name, value in flags),
            sign,
            stored.difference("maze", ("vpo", "0.7", flags), ("vpo",), "W@30"),
        )
        for flags, sign in signs.items()
        if ("maze", "vpo", 0, flags) in stored.results
    ]
    add(
        "C9",
        "more answers, more weightings and low-discrepancy ones help",
        [
            (f"maze, W@30, {flags} against the default: {span(*d)}", shown(d, sign))
            for flags, sign, d in found
        ],
    )
    found = (
        [[stored.mean("toy", name, "pass@30") for name in three]]
        if all(stored.seeds("toy", name) for name in three)
        else []
    )
    add(
        "C10",
        "a valley in which partial progress scores worse: GRPO stays out, VPO crosses it",
        [
            (f"toy, pass@30: GRPO {a:.2f}, VPO {c:.2f}, and Max@K {b:.2f}", a < 0.1 and c > 0.9)
            for a, b, c in found
        ],
    )
    return table(["", "claim", "measured", "verdict"], rows)


def alone(found: dict[str, list[dict]], name: str, any_run: bool = False) -> list[list[int]]:
    """Of each run the problems (from 1) that this policy solved, but not GRPO or the start of that run, or of any."""
    solved = {
        each: torch.tensor([run["solved"] for run in runs]) > 0 for each, runs in found.items()
    }  # (runs, N)
    plain = sum(
        (solved[each] for each in ("grpo", "start") if each in solved),
        torch.zeros_like(solved[name]),
    )
    beyond = solved[name] > (plain.any(0) if any_run else plain)
    return [(row.nonzero().flatten() + 1).tolist() for row in beyond]


def searched(whole: dict) -> str:
    """A search.json as a table: of every policy what it solved within budgets up to the whole, and what it found; then
    the problems that GRPO and the start left unsolved, by number."""
    budget, rows, lists = whole["settings"]["budget"], [], []
    against = {"grpo", "start"} <= set(whole["policies"])
    budgets = [*(some for some in (30, 100, 300) if some < budget), budget]
    for name, runs in whole["policies"].items():
        used = torch.tensor([run["solved"] for run in runs])  # (runs, N)
        sets = [
            alone(whole["policies"], name, any_run) if against else [] for any_run in (False, True)
        ]
        low, high = bootstrap_interval(used > 0)
        best, behaviours = (
            sum(row[-1] for run in runs for row in run[key]) / used.numel()
            for key in ("best", "behaviours")
        )
        shares = (((used > 0) & (used <= some)).double().mean().item() for some in budgets)
        rows.append(
            [
                title(name),
                *shares,
                f"[{low:.3f}, {high:.3f}]",
                best,
                f"{behaviours:.1f}",
                *(" ".join(str(len(each)) for each in beyond) for beyond in sets),
            ]
        )
        numbers = " / ".join(" ".join(map(str, each)) or "none" for each in sets[0])
        lists += [f"- {title(name)}: {numbers}"] * any(sets[0])
    heading = "\nProblems that neither GRPO nor the start of the same run solved, by number, run by run:\n"
    return "\n".join(
        [
            table(
                [
                    "",
                    *(f"solved by {some}" for some in budgets),
                    "95% interval",
                    "best score",
                    "reward vectors",
                    "not by GRPO or start",
                    "nor in any run",
                ],
                rows,
            ),
            *[heading] * bool(lists),
            *lists,
        ]
    )


def compared(*_: object) -> str:
    """Of every stored search the share of problems that each policy solved, and differences, with 95% intervals."""
    rows, names = [], ("start", "grpo", "max_at_k", "multi_rlvr", "vpo", "group_vpo")
    for key, found in ((key, whole["policies"]) for key, whole in searches().items()):
        used = {
            name: torch.tensor([run["solved"] for run in runs]).sign().double()
            for name, runs in found.items()
        }
        pairs = [
            *((name, "") for name in names),
            ("vpo", "grpo"),
            ("group_vpo", "grpo"),
            ("group_vpo", "start"),
        ]
        shares = [used[a] - used.get(b, 0) if {a, b} <= {"", *used} else None for a, b in pairs]
        rows.append(
            [
                key.replace("_", " "),
                *(
                    ""
                    if each is None
                    else "{:.2f} [{:.2f}, {:.2f}]".format(each.mean(), *bootstrap_interval(each))
                    for each in shares
                ),
            ]
        )
    return table(
        ["", *map(title, names), "VPO - GRPO", "Group VPO - GRPO", "Group VPO - start"], rows
    )


def searches() -> dict[str, dict]:
    """The stored search.json of every search, by name."""
    return {
        path.name.partition(".")[0]: json.loads(gzip.decompress(path.read_bytes()))
        for path in sorted(Path("results/search").glob("*.json.gz"))
    }


TABLES: dict[str, Callable[..., str]] = {
    "mean": means,
    "seeds": per_seed,
    "differences": differences,
    "cost": cost,
    "temperatures": temperatures,
    "rates": learning_rates,
    "ablations": ablations,
    "noise": noise,
    "claims": claims,
    "rewards": rewards,
    "headline": headline,
    "search": lambda _, name: searched(searches()[name]),
    "searches": compared,
}


def fill(stored: Stored, path: Path) -> str:
    """The text of a document with every block <!-- results:TASK-TABLE --> ... <!-- end --> made anew."""
    return re.sub(
        r"(<!-- results:(\w+)-?([\w-]*) -->\n).*?(<!-- end -->)",
        lambda block: f"{block[1]}{TABLES[block[3]](stored, block[2])}\n{block[4]}",
        path.read_text(),
        flags=re.DOTALL,
    )


def figures(stored: Stored, folder: Path) -> list[Path]:
    """best@k and diversity over training for every task, ablations, reward geometry: of what is stored. The paths."""
    written = []
    for task in (t for t in ("maze", "code", "open_cases") if len(stored.methods(t)) > 3):
        methods = [method for method in stored.methods(task) if method != "start_sets"]
        one = stored.results[task, START.get(task, "grpo"), stored.seeds(task, "start")[0], ()]
        keys = [key for key in one["at"]["0.7"]["grpo"] if "@" in key]
        keys += [key.replace("best", "pass") for key in keys if key.startswith("best")]
        seeds = {len(stored.seeds(task, name)) for name in methods}
        report = {
            "policies": {
                method: {
                    key: {
                        "mean": (values := stored.values(task, method, key)).mean().item(),
                        "interval": bootstrap_interval(values, stored.groups(task)),
                    }
                    for key in keys
                }
                for method in methods
            },
            "settings": {
                "problems": len(one["at"]["0.7"]["grpo"]["best@1"]),
                "split": "test",
                "size": one["size"],
                "temperature": 0.7,
                "seeds": min(seeds),
                "uneven": len(seeds) > 1,
            },
        }
        logs = {
            method: [
                {
                    "step": 10 * i + 5,
                    **{
                        key: stored.average(task, method, "training", key, i)
                        for key in one["training"]
                    },
                }
                for i in range(len(one["training"]["reward"]))
            ]
            for method in methods[1:]
        }
        written += [folder / f"{task}_best_at_k.png", folder / f"{task}_diversity.png"]
        plots.best_at_k(report, written[-2])
        plots.training(logs, 0.7 if task == "open_cases" else 1.0, written[-1], window=1)
    if panels := varied(stored):
        written.append(folder / "ablations.png")
        plots.settings(
            panels,
            written[-1],
            "maze, temperature 0.7; the seeds that all points of a panel have; 95%",
        )
    if len(points := geometries(stored)) > 2:
        written.append(folder / "reward_geometry.png")
        plots.against(
            {name: (unseen, *d[:3]) for name, unseen, _, d, _ in points},
            written[-1],
            "variance among good answers unseen by the scalar, before training",
            "W@30 after training, VPO - GRPO",
            "The start model's rollouts against the measured gain; a point per reward, 95% intervals",
        )
    shown = Path("docs/results.md").read_text()
    for name, whole in (
        (name, whole) for name, whole in searches().items() if f"search_{name}.png" in shown
    ):
        written.append(folder / f"search_{name}.png")
        plots.search(whole["ticks"], whole["policies"], written[-1])
    return written
