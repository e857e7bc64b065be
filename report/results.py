"""The tables of docs/results.md from stored results alone: means, paired differences, temperatures, rates, claims."""

import functools
import re
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

from eval import bootstrap_interval, pass_at_k
from report.plots import title

SINGLE = ("grpo", "dr_grpo", "maxrl", "gdpo", "random_weighting", "goal_conditioned", "max_at_k")
METHODS = ("start", "start_sets", *SINGLE, "multi_rlvr", "vpo", "group_vpo")
PAIRS = (("vpo", "grpo"), ("vpo", "max_at_k"), ("group_vpo", "vpo"), ("group_vpo", "max_at_k"))
HEADLINE = {"maze": ("best@1", "best@3", "best@30", "W@30"), "code": ("best@1", "best@30", "pass@1", "pass@30", "W@30"),
            "toy": ("best@30", "pass@1", "pass@30")}
TARGET = {"vpo": "W@3", "group_vpo": "W@3", "max_at_k": "best@3"}  # what a learning rate is chosen by; else best@1


class Stored:
    """Results by task, method, seed and setting: {(task, method, seed, flags): result of reproduce.py}."""

    def __init__(self, results: dict[tuple, dict]):
        self.results = results

    def seeds(self, task: str, method: str, flags: tuple = ()) -> list[int]:
        """The seeds of a setting that are stored."""
        cell = "grpo" if method.startswith("start") else method
        return sorted(seed for t, name, seed, f in self.results if (t, name, f) == (task, cell, flags) and seed < 100)

    def values(self, task: str, method: str, measure: str, T: str = "0.7", flags: tuple = (),
               seeds: list[int] | None = None) -> Tensor:
        """One measure per seed and problem: (seeds, N), in the measure's own unit."""
        cell, rows = "grpo" if method.startswith("start") else method, []
        for seed in self.seeds(task, method, flags) if seeds is None else seeds:
            result = self.results[task, cell, seed, flags]
            at = result["at"][T][method]
            if measure.startswith("pass@"):
                rows.append([pass_of(result["size"], c, int(measure[5:])) for c in at["passed"]])
            else:
                rows.append([value / 1000 for value in at[measure]])
        return torch.tensor(rows, dtype=torch.float64)

    def groups(self, task: str) -> Tensor | None:
        """Which problems share a prompt (N); None if none do."""
        for (t, _, seed, flags), result in self.results.items():
            if t == task and seed < 100 and not flags and result["groups"]:
                return torch.tensor(result["groups"])
        return None

    def mean(self, task: str, method: str, measure: str, T: str = "0.7", flags: tuple = ()) -> float:
        return self.values(task, method, measure, T, flags).mean().item()

    def difference(self, task: str, ours: tuple, theirs: tuple, measure: str) -> tuple[float, float, float, int]:
        """Ours minus theirs over the seeds that both have, paired by seed and problem: mean, 95% interval, seeds.

        ours and theirs are (method, temperature, flags). The interval resamples seeds and problems.
        """
        seeds = [seed for seed in self.seeds(task, ours[0], ours[2]) if seed in self.seeds(task, theirs[0], theirs[2])]
        a, b = (self.values(task, method, measure, T, flags, seeds) for method, T, flags in (ours, theirs))
        low, high = bootstrap_interval(a - b, self.groups(task), samples=2000)
        return (a - b).mean().item(), low, high, len(seeds)

    def best_temperature(self, task: str, method: str, measure: str) -> str:
        temperatures = next(iter(r["at"] for (t, _, s, _), r in self.results.items() if t == task and s < 100))
        return max(temperatures, key=lambda T: self.mean(task, method, measure, T))

    def methods(self, task: str) -> list[str]:
        return [method for method in METHODS if self.seeds(task, method)]

    def pairs(self, task: str) -> list[tuple[str, str]]:
        return [pair for pair in PAIRS if all(self.seeds(task, method) for method in pair)]


@functools.cache
def pass_of(n: int, c: int, k: int) -> float:
    return pass_at_k(n, c, k)

def table(head: list[str], rows: list[list[str]]) -> str:
    """A Markdown table."""
    return "\n".join("| " + " | ".join(row) + " |" for row in [head, ["---"] * len(head), *rows])

def span(mean: float, low: float, high: float, *_: object) -> str:
    """A difference with its interval, bold where that does not hold 0."""
    text = f"{mean:+.3f} [{low:+.3f}, {high:+.3f}]"
    return f"**{text}**" if low > 0 or high < 0 else text

def means(stored: Stored, task: str) -> str:
    """All methods at temperature 0.7, the mean over their seeds."""
    passes = ["pass@1", "pass@30"] * (task != "maze")
    columns = ["best@1", "best@3", "best@10", "best@30", *passes, "W@30", "diversity"]
    return table(["method", "seeds", *columns], [
        [title(method), str(len(stored.seeds(task, method))),
         *(f"{stored.mean(task, method, column):.3f}" for column in columns)] for method in stored.methods(task)])

def per_seed(stored: Stored, task: str) -> str:
    """Every seed of every method."""
    columns = HEADLINE[task]
    return table(["method", "seed", *columns, "diversity"], [
        [title(method), str(seed), *(f"{stored.values(task, method, column, seeds=[seed]).mean():.3f}"
                                     for column in (*columns, "diversity"))]
        for method in stored.methods(task) for seed in stored.seeds(task, method)])

def differences(stored: Stored, task: str) -> str:
    """Paired differences at temperature 0.7, and with each method at its own best temperature for that column."""
    rows = []
    for ours, theirs in stored.pairs(task):
        for best in (False, True):
            row = []
            for column in HEADLINE[task]:
                T = [stored.best_temperature(task, name, column) if best else "0.7" for name in (ours, theirs)]
                found = stored.difference(task, (ours, T[0], ()), (theirs, T[1], ()), column)
                row.append(span(*found) + f" ({T[0]}, {T[1]})" * best)
            rows.append([f"{title(ours)} - {title(theirs)}", "each its best" if best else "0.7", str(found[3]), *row])
    return table(["difference", "temperature", "seeds", *HEADLINE[task]], rows)

def temperatures(stored: Stored, task: str) -> str:
    """best@1, best@30 (or pass@30) and W@30 of every method at every temperature."""
    measures = ("best@1", "pass@30" if task == "code" else "best@30", "W@30", "diversity")
    known = next(iter(r["at"] for (t, _, s, _), r in stored.results.items() if t == task and s < 100))
    return table(["method", *(f"{measure} at {T}" for measure in measures for T in known)], [
        [title(method), *(f"{stored.mean(task, method, measure, T):.3f}" for measure in measures for T in known)]
        for method in stored.methods(task)])

def tuned(stored: Stored, task: str) -> dict[str, dict[float, dict[str, float]]]:
    """What the validation problems say of every learning rate: method -> rate -> measure -> mean."""
    found: dict[str, dict[float, dict[str, float]]] = {}
    for (t, method, seed, flags), result in sorted(stored.results.items(), key=str):
        if t == task and seed >= 100 and dict(flags).keys() == {"lr"}:
            at = result["at"]["0.7"][method]
            found.setdefault(method, {})[dict(flags)["lr"]] = {
                **{key: value[0] / 1000 for key, value in at.items() if key != "passed"}, "passed": at["passed"][0]}
    return {method: found[method] for method in METHODS if method in found}

def best_rate(rates: dict[float, dict[str, float]], method: str) -> float:
    return max(rates, key=lambda rate: rates[rate][TARGET.get(method, "best@1")])

def learning_rates(stored: Stored, task: str) -> str:
    """All rates that were tried, the chosen one bold."""
    rows = []
    for method, rates in tuned(stored, task).items():
        for rate, values in sorted(rates.items()):
            mark = "**" * (rate == best_rate(rates, method))
            rows.append([title(method), f"{mark}{rate:g}{mark}", *(f"{values[column]:.3f}" for column in (
                "best@1", "best@3", "best@30", "W@3", "W@30", "diversity"))])
    return table(["method", "peak lr", "best@1", "best@3", "best@30", "W@3", "W@30", "diversity"], rows)

def ablations(stored: Stored, task: str = "maze") -> str:
    """Every setting that was varied beside the default of its method: means over its seeds, cost of the training."""
    settings = sorted({(method, flags) for t, method, seed, flags in stored.results
                       if t == task and seed < 100 and (flags or method in ("vpo", "group_vpo", "grpo"))},
                      key=lambda setting: (METHODS.index(setting[0]), str(setting[1])))
    rows = []
    for method, flags in settings:
        name = " ".join(f"--{flag} {value}" for flag, value in flags) or "default"
        rows.append([title(method), name, str(len(stored.seeds(task, method, flags))), *(
            f"{stored.mean(task, method, column, flags=flags):.3f}" for column in (*HEADLINE[task], "diversity"))])
    return table(["method", "setting", "seeds", *HEADLINE[task], "diversity"], rows)

def cost(stored: Stored, task: str) -> str:
    """What every method was given: answers, tokens, seconds per step (cells ran side by side: noisy)."""
    rows = []
    for method in stored.methods(task):
        if method.startswith("start"):
            continue
        results = [stored.results[task, method, seed, ()] for seed in stored.seeds(task, method)]
        m = 1 if method in (*SINGLE, "group_vpo") else 3 if task != "toy" else 5
        rows.append([title(method), f"{sum(r['rollouts'] for r in results) * m / len(results):,.0f}",
                     f"{sum(r['tokens'] for r in results) / len(results):,.0f}",
                     f"{sum(r['seconds']['training'] / r['steps'] for r in results) / len(results):.2f}"])
    return table(["method", "answers", "tokens", "seconds per step"], rows)

TABLES: dict[str, Callable[..., str]] = {"mean": means, "seeds": per_seed, "differences": differences, "cost": cost,
                                         "temperatures": temperatures, "rates": learning_rates, "ablations": ablations}

def fill(stored: Stored, path: Path) -> str:
    """The text of a document with every block <!-- results:TASK-TABLE --> ... <!-- end --> made anew."""
    def block(match: re.Match) -> str:
        task, _, name = match[1].partition("-")
        return f"<!-- results:{match[1]} -->\n{TABLES[name](stored, task)}\n<!-- end -->"
    return re.sub(r"<!-- results:([\w-]+) -->\n.*?<!-- end -->", block, path.read_text(), flags=re.DOTALL)
