"""The tables of the study. --write puts them into README.md and study/, in place of the blocks there."""

import csv
import io
import re
from collections.abc import Callable
from pathlib import Path

from examples.markdown import markdown
from study.claims import claim_table
from study.estimates import estimate
from study.grid import CONTRASTS, HEADLINE, JUDGED, MEANS, SETTINGS
from study.results import OUR_TERM, SIX, Pair, Results, title_of

FOLDER = Path(__file__).parent
TASKS = ("maze", "code", HEADLINE)
CONFLICT = ("fence", "gems", "tradeoff", "copies", HEADLINE)
# What a page compares with what. The words of a page and task are one family of Holm's correction.
CURES = (
    ("grpo-kl", "grpo"),
    (OUR_TERM, "grpo"),
    ("grpo-kl-clamped", "grpo"),
    ("grpo-kl-clamped", OUR_TERM),
    ("grpo-kl-k2", OUR_TERM),
    ("grpo@half", "grpo"),
    ("grpo-quarter-rate", "grpo"),
    ("grpo-tenth-rate", "grpo"),
    ("vpo-rate-of-grpo", "vpo"),
    ("vpo-rate-of-grpo", "grpo"),  # added when the rates were known
    ("vpo@half", "vpo"),
)
ABLATION = tuple((row, "vpo") for row in (
    "grpo", "gdpo", "random_weighting", "multi_rlvr", "vpo-1-answer", "grpo-24-rollouts", "max_at_k"
))  # fmt: skip
SETTINGS_OF_METHODS = (  # three seeds: too few for a word
    ("vpo-2-answers", "vpo"),
    ("vpo-5-answers", "vpo"),
    ("vpo-alpha-0.3", "vpo"),
    ("vpo-alpha-3", "vpo"),
    ("vpo-10-weights", "vpo"),
    ("vpo-1000-weights", "vpo"),
    ("group_vpo-sets-of-2", "group_vpo"),
    ("max_at_k-sets-of-2", "max_at_k"),
)


# Measures that stand beside the judged ones, without words.
BESIDE = ("best@30", "pass@30", "W@30 at its best temperature")


def main_table(results: Results) -> str:
    """The table of README.md: means of the six policies."""
    head = [""]
    lines = [[title_of(row)] for row in SIX]
    for task in TASKS:
        for measure in JUDGED:
            head.append(f"{task} {measure}")
            for line, row in zip(lines, SIX, strict=True):
                line.append(results.average(task, row, measure))
    return markdown(head, lines)


def contrasts(results: Results, tasks: tuple[str, ...], more: tuple[str, ...] = ()) -> str:
    """Who is ahead of whom: a line for each task and measure; those of `more` have no words."""
    lines = []
    for task in tasks:
        words = results.judged(task, CONTRASTS)
        for title in (*JUDGED, *more):
            measure, _, setting = title.partition(" at its ")
            line = [f"{task} {title}"]
            for pair in CONTRASTS:
                rows = tuple(f"{row}@best" for row in pair) if setting else pair
                word = words.get((pair, title), "")
                line.append(f"{results.difference(task, rows, measure)} {word}".strip())
            lines.append(line)
    pairs = [f"{title_of(ours)} - {title_of(theirs)}" for ours, theirs in CONTRASTS]
    return markdown(["", *pairs], lines)


def comparisons(
    results: Results, tasks: tuple[str, ...], judged: tuple[Pair, ...], more: tuple[Pair, ...] = ()
) -> str:
    """Means of rows, in brackets their difference from another row; diversity over the start model's."""
    words = {task: results.judged(task, judged) for task in tasks}
    lines = []
    for pair in (*judged, *more):
        line = [title_of(pair[0]), title_of(pair[1])]
        for task in tasks:
            seeds = results.seeds(task, *pair)
            for measure in JUDGED:
                mean = results.values(task, pair[0], measure, seeds).mean()
                lead = results.difference(task, pair, measure)
                word = words[task].get((pair, measure), "")
                gap = f"({lead.mean:+.3f} ± {lead.half:.3f})"
                line.append(f"{mean:.3f} {gap} {word}".strip())
            line.append(variety(results, task, pair[0]))
        lines.append(line)
    head = ["", "less"]
    for task in tasks:
        head += [f"{task} {measure}" for measure in (*JUDGED, "x start")]
    return markdown(head, lines)


def variety(results: Results, task: str, row: str) -> str:
    """The diversity of a row over that of its start model, which VPO asks for sets of three."""
    start = "start_sets" if row.startswith(("vpo", "multi_rlvr")) else "start"
    if "answer" in row:  # of sets of another size the start was not measured
        return ""
    ours, theirs = [results.average(task, name, "diversity") for name in (row, start)]
    return f"{ours / theirs:.2f}"


def kl_choice(results: Results) -> str:
    """best@1 + W@30 of every KL weight on validation problems, by which KL was chosen."""
    sums: dict[tuple[str, str], list[float]] = {}
    for cell, record in results.records.items():
        if cell.is_validation:
            means = record["policies"][cell.method]["0.7"]
            key = (cell.task, cell.policy.removeprefix("grpo-kl"))
            sums.setdefault(key, []).append(means["best@1"] + means["W@30"])
    parts = []
    for (task, kl), own in sums.items():
        mean = sum(own) / len(own)
        parts.append(f"{task} {kl}: {mean:.3f}")
    return f"best@1 + W@30 of KL weights on validation problems, three seeds: {', '.join(parts)}."


def valley(results: Results) -> str:
    """The share of the toy's problems that each method solves with 30 candidates, across a deceptive valley."""
    parts = []
    for row in ("grpo", "random_weighting", "multi_rlvr", "max_at_k", "vpo", "group_vpo"):
        parts.append(f"{title_of(row)} {results.average('toy', row, 'pass@30'):.2f}")
    return f"pass@30 in the toy, five seeds: {', '.join(parts)}."


def starts(results: Results) -> str:
    """The diversity of the six policies over that of the start model, in the maze and on programs."""
    parts = []
    for task in ("maze", "code"):
        own = [f"{title_of(row)} {variety(results, task, row)}" for row in SIX[1:]]
        parts.append(f"{task}: {'; '.join(own)}.")
    return f"Diversity divided by the start model's. {' '.join(parts)}"


def more_leads(results: Results) -> str:
    """A list of comparisons that were not fixed beforehand."""
    lines = ["Comparisons that were not fixed beforehand, without words:", ""]
    for row in ("vpo", "grpo", "grpo-kl"):
        leads = []
        for task in dict.fromkeys((*TASKS, *CONFLICT)):
            leads.append(f"{task} {results.difference(task, ('group_vpo', row), 'W@30')}")
        lines.append(f"- Group VPO - {title_of(row)} in W@30: {', '.join(leads)}.")
    pair = ("group_vpo", "max_at_k-rate-of-vpo")
    leads = [f"{name} {results.difference(HEADLINE, pair, name)}" for name in JUDGED]
    lines.append(f"- Group VPO - Max@K in headlines, both at Group VPO's rate: {', '.join(leads)}.")
    lead = results.difference("maze", ("vpo", OUR_TERM), "W@30")
    lines.append(f"- VPO - {title_of(OUR_TERM)} in W@30: maze {lead}.")
    return "\n".join(lines)


def regrets(results: Results) -> str:
    """What the best answer of the scalar lacks in W@30, among the start model's candidates: from least to most."""
    regret_of = {}
    for task in dict.fromkeys((*TASKS, *CONFLICT)):
        best, users = [results.average(task, "start", name) for name in ("best@30", "W@30")]
        regret_of[task] = users - best  # all scalars are the mean of the objectives
    ranked = sorted(regret_of, key=regret_of.get)
    parts = [f"{task} {regret_of[task]:.3f}" for task in ranked]
    return f"Regret of the scalar, W@30 less best@30 of the start model: {', '.join(parts)}."


def search(results: Results) -> str:
    """The share of the problems that each policy solved in the search, its lead over GRPO, and what GRPO did not."""
    rows = []
    for policy, solved in results.solved.items():  # (runs, N)
        grpo = results.solved["grpo"]
        lead = estimate(solved.double() - grpo.double())
        alone = ", ".join(map(str, (solved & ~grpo).sum(1).tolist()))
        share = solved.double().mean().item()
        rows.append([title_of(policy), share, "" if policy == "grpo" else str(lead), alone])
    return markdown(["", "solved", "less GRPO's", "solved, not by GRPO, in each run"], rows)


def runs_csv(results: Results) -> str:
    """A line for every cell, policy, t and temperature."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    head = ["cell", "policy", "version", "machine", "core seconds", "tokens", "t", "temperature"]
    writer.writerow([*head, *MEANS])
    for cell, record in results.records.items():
        seconds = record["seconds"]["cpu"]
        about = [record["version"], record["machine"], seconds, record["tokens"]]
        for name, settings in record["policies"].items():
            for title, measured in settings.items():
                setting = SETTINGS[title]
                row = [cell.name, name, *about, setting.t, setting.temperature]
                writer.writerow([*row, *(measured.get(measure, "") for measure in MEANS)])
    return text.getvalue()


# Documents.

BLOCKS: dict[str, Callable[[Results], str]] = {
    "main": main_table,
    "answer": lambda results: contrasts(results, TASKS),
    "contrasts": lambda results: contrasts(results, ("maze", "code"), BESIDE),
    "conflict": lambda results: contrasts(results, CONFLICT),
    "cures": lambda results: comparisons(results, ("maze", "code"), CURES),
    "kl": kl_choice,
    "valley": valley,
    "starts": starts,
    "leads": more_leads,
    "regrets": regrets,
    "search": search,
    "ablation": lambda results: comparisons(results, ("maze",), ABLATION, SETTINGS_OF_METHODS),
    "claims": claim_table,
}
BLOCK = re.compile(r"(<!-- study:(\w+) -->\n).*?(<!-- end -->)", re.DOTALL)


def documents() -> list[Path]:
    """The documents that may hold blocks."""
    return [FOLDER.parent / "README.md", *sorted(FOLDER.rglob("*.md"))]


def fill(results: Results, text: str) -> str:
    """A document with every block <!-- study:NAME --> ... <!-- end --> made anew."""

    def filled(match: re.Match) -> str:
        begin, name, end = match.groups()
        return f"{begin}{BLOCKS[name](results)}\n{end}"

    return BLOCK.sub(filled, text)


def write(results: Results) -> None:
    """Write all documents, and the CSV file of all runs."""
    for path in documents():
        path.write_text(fill(results, path.read_text("utf-8")), "utf-8")
    (FOLDER / "pages" / "runs.csv").write_text(runs_csv(results), "utf-8")
