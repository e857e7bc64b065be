"""study/README.md, study/pages/ and the table of README.md, filled from stored results; their figures."""

import re
from pathlib import Path

import torch

from engine.tasks import load_task, take_problems
from report import plots
from study import claims, cures, exhibit, mixing, result_plots, result_tables
from study.grid import HEADLINE, Cell
from study.store import Store
from study.stored import Stored

TASK_TABLES = {
    "mean": result_tables.means,
    "every_k": result_tables.every_k,
    "differences": result_tables.differences,
    "card_costs": result_tables.card_costs,
    "cpu_costs": result_tables.cpu_costs,
    "thirty_candidates": result_tables.thirty_candidates,
    "each_seed": result_tables.each_seed,
    "temperatures": result_tables.by_temperature,
    "different": result_tables.different_headlines,
    "five_cures": cures.five_seeds,
    "cure_temperatures": cures.by_temperature,
}
GENERAL_TABLES = {
    "main": result_tables.main_table,
    "leads": result_tables.leads,
    "ablations": result_tables.ablations,
    "more_steps": result_tables.more_steps,
    "rewards": result_tables.rewards,
    "rates": result_tables.chosen_rates,
    "chosen_cures": cures.chosen,
    "own_leads": cures.own_leads,
    "own_settings": cures.own_settings,
    "gains": cures.gains,
    "searches": result_tables.searches,
    "verdicts": claims.verdict_table,
    "multiplicity": result_tables.multiplicity,
    "hours": result_tables.hours,
    "mix_leads": mixing.leads,
    "mix_chosen": mixing.chosen,
    "crossings": mixing.crossings,
    "train_test": mixing.train_test,
    "doors": mixing.doors,
}
CSV_FILES = {
    "runs": result_tables.runs_csv,
    "differences": result_tables.differences_csv,
    "searches": result_tables.searches_csv,
    "claims": claims.claims_csv,
}
BLOCK = re.compile(r"(<!-- results:(\w+)-(\w+) -->\n).*?(<!-- end -->)", re.DOTALL)
FIGURES = {  # figure of headlines -> its policies
    "docs/figures/headlines.png": ("start", "grpo", "vpo"),
    "study/figures/headlines_of_others.png": ("max_at_k", "multi_rlvr", "group_vpo"),
}
DRAWN_TEXTS = exhibit.TEXTS[:2]  # held-out texts in a figure of headlines


def write(stored: Stored, root: Path) -> None:
    """Write all documents and CSV files."""
    texts = {path: fill(stored, path.read_text("utf-8")) for path in documents(root)}
    for name, csv_of in CSV_FILES.items():
        texts[root / f"study/pages/{name}.csv"] = csv_of(stored)
    for path, text in texts.items():
        path.write_text(text, "utf-8")


def draw(stored: Stored, store: Store, root: Path) -> None:
    """Draw all figures."""
    result_plots.draw_figures(stored, root)
    mixing.draw_frontier(stored, root / "docs/figures/mixing.png")
    mixing.draw_collapse(root / "study/figures/collapse.png")
    for name, policies in FIGURES.items():
        draw_headlines(store, policies, root / name)
    if exhibit.is_stored(store):
        exhibit.write_exhibit(store, root / exhibit.PAGE)


def documents(root: Path) -> list[Path]:
    """The documents that hold tables of results."""
    pages = sorted((root / "study/pages").glob("*.md"))
    return [root / "README.md", root / "study/README.md", *pages]


def fill(stored: Stored, text: str) -> str:
    """A document with every block <!-- results:SUBJECT-TABLE --> ... <!-- end --> made anew."""

    def filled(match: re.Match) -> str:
        table = block(stored, match[2], match[3])
        return f"{match[1]}{table}\n{match[4]}"

    return BLOCK.sub(filled, text)


def block(stored: Stored, subject: str, table: str) -> str:
    """One table or sentence, of a task or of all."""
    if table == "cures":
        return cures.validation(stored, subject)
    if table == "validation":
        return result_tables.validation(stored.task(subject, tuning=True))
    if table == "along":
        return mixing.along(stored.mixed.task(subject))
    if table in GENERAL_TABLES:
        return GENERAL_TABLES[table](stored)
    return TASK_TABLES[table](stored.task(subject))


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
        pools[policy] = (texts, [torch.tensor(record["rewards"]) for record in records])
    headings = [problem.data["text"] for problem in problems]
    plots.answers(pools, problems, task, path, texts_above=headings)
