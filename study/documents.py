"""study/README.md, study/pages/ and the table of README.md, filled from stored results; their figures."""

import csv
import io
import re
from pathlib import Path

import torch

from engine.tasks import load_task, take_problems
from report import plots
from report.looks import look_of
from study import claims, exhibit, result_plots, tables
from study.entries import Entry
from study.grid import HEADLINE, Cell
from study.store import Store
from study.stored import START, Stored

TABLES = {  # name of a block -> what makes it of the stored results and the block's subject
    "main": tables.first_page,
    "leads": tables.headline_leads,
    "main_leads": tables.main_leads,
    "mean": tables.means,
    "real_model": tables.real_model,
    "own_leads": tables.own_leads,
    "own_settings": tables.own_settings,
    "rewards": tables.rewards,
    "rates": tables.chosen_rates,
    "searches": tables.searches,
    "verdicts": claims.verdict_table,
    "half_way": tables.half_way,
    "mix_leads": tables.mix_leads,
    "crossings": tables.crossings,
    "doors": tables.doors,
}
RUNS = "study/pages/runs.csv"
BLOCK = re.compile(r"(<!-- results:(\w+)-(\w+) -->\n).*?(<!-- end -->)", re.DOTALL)
FIGURES = {  # figure of headlines -> its policies
    "docs/figures/headlines.png": ("start", "grpo", "vpo"),
    "study/figures/headlines_of_others.png": ("max_at_k", "multi_rlvr", "group_vpo"),
}
DRAWN_TEXTS = exhibit.TEXTS[:2]  # held-out texts in a figure of headlines


def write(stored: Stored, root: Path) -> None:
    """Write all documents, and the CSV file of all runs."""
    texts = {path: fill(stored, path.read_text("utf-8")) for path in documents(root)}
    texts[root / RUNS] = runs_csv(stored)
    for path, text in texts.items():
        path.write_text(text, "utf-8")


def draw(stored: Stored, store: Store, root: Path) -> None:
    """Draw all figures."""
    result_plots.draw_figures(stored, root)
    for name, policies in FIGURES.items():
        draw_headlines(store, policies, root / name)
    exhibit.write_exhibit(store, root / exhibit.PAGE)


def documents(root: Path) -> list[Path]:
    """The documents that hold tables of results."""
    pages = sorted((root / "study/pages").glob("*.md"))
    return [root / "README.md", root / "study/README.md", *pages]


def fill(stored: Stored, text: str) -> str:
    """A document with every block <!-- results:SUBJECT-TABLE --> ... <!-- end --> made anew."""

    def filled(match: re.Match) -> str:
        begin, subject, name, end = match.groups()
        table = TABLES[name](stored, subject)
        return f"{begin}{table}\n{end}"

    return BLOCK.sub(filled, text)


def draw_headlines(store: Store, policies: tuple[str, ...], path: Path) -> None:
    """Draw what policies of seed 0 wrote for two held-out texts."""
    task = load_task("headline")
    held_out = take_problems(task, "test", max(DRAWN_TEXTS) + 1)
    problems = [held_out[i] for i in DRAWN_TEXTS]
    pools = {}
    for policy in policies:
        method = "grpo" if policy == "start" else policy  # GRPO's record holds the start model too
        cell = Cell(HEADLINE, method, 0)
        answers = store.current([cell])[cell]["answers"][policy]
        texts = [answers[i] for i in DRAWN_TEXTS]
        records = exhibit.records_of(task, problems, texts)
        pools[look_of(policy)] = (texts, [torch.tensor(record["rewards"]) for record in records])
    headings = [problem.data["text"] for problem in problems]
    plots.answers(pools, problems, task, path, texts_above=headings)


def runs_csv(stored: Stored) -> str:
    """A row for every run, policy and temperature; its learning rate where it is not the method's own."""
    measures = ["earned", "diversity"]
    for kind in ("best", "W", "pass"):
        measures += [f"{kind}@{k}" for k in tables.KS]
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    head = ["task", "split", "method", "learning rate", "setting", "seed", "version", "machine"]
    writer.writerow([*head, "tokens", "seconds per step", "temperature", *measures])
    for run in [*stored.results, *stored.mixed.results]:
        split = "validation" if run.tuning else "test"
        for temperature, of_policies in run.measures.items():
            for method, values in of_policies.items():
                policy = Entry(method) if method in START else run.policy
                row = [run.task, split, Entry(method).title, policy.lr or "", policy.setting]
                row += [run.seed, run.version, run.gpu or "CPU", run.tokens]
                row += [f"{run.step_seconds:.4g}", temperature]
                for measure in measures:
                    has_it = measure in values
                    row.append(f"{values[measure].mean().item():.4g}" if has_it else "")
                writer.writerow(row)
    return text.getvalue()
