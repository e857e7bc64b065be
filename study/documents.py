"""study/README.md, study/pages/ and the table of README.md, filled from stored results."""

import csv
import io
import re
from pathlib import Path

from report import search_tables
from study import claims, result_tables, searches
from study.result_figures import draw_figures
from study.stored import Stored

TASK_TABLES = {
    "main": result_tables.main_table,
    "mean": result_tables.means,
    "completion": result_tables.completion,
    "pairs": result_tables.pairs,
    "every_k": result_tables.every_k,
    "differences": result_tables.differences,
    "temperatures": result_tables.temperatures,
    "ablations": result_tables.ablations,
    "cost": result_tables.cost,
}
GENERAL_TABLES = {
    "rewards": result_tables.rewards,
    "verdicts": claims.verdict_table,
    "findings": claims.finding_table,
    "multiplicity": result_tables.multiplicity,
    "searches": searches.all_searches,
}
BLOCK = re.compile(r"(<!-- results:(\w+)-(\w+) -->\n).*?(<!-- end -->)", re.DOTALL)
SEED_TASKS = ("maze", "code", "toy", "headline")  # measured with several seeds


def write(stored: Stored, root: Path) -> None:
    """Write all documents, the tables of every seed, and all figures."""
    texts = {path: fill(stored, path.read_text()) for path in documents(root)}
    for task in SEED_TASKS:
        texts[root / f"study/pages/{task}_seeds.csv"] = seed_csv(stored, task)
    for path, text in texts.items():
        path.write_text(text)
    draw_figures(stored, root / "study/figures")


def documents(root: Path) -> list[Path]:
    """The documents that hold tables of results."""
    pages = sorted((root / "study/pages").glob("*.md"))
    return [root / "README.md", root / "study/README.md", *pages]


def fill(stored: Stored, text: str) -> str:
    """A document with every block <!-- results:TASK-TABLE --> ... <!-- end --> made anew."""

    def filled(match: re.Match) -> str:
        table = block(stored, match[2], match[3])
        return f"{match[1]}{table}\n{match[4]}"

    return BLOCK.sub(filled, text)


def block(stored: Stored, subject: str, table: str) -> str:
    """One table, of a task, of a search by its name, or of "all"."""
    if table in GENERAL_TABLES:
        return GENERAL_TABLES[table](stored)
    if table == "search":
        return search_tables.search_table(stored.searches[subject])
    if table == "rates":
        return result_tables.learning_rates(stored.task(subject, tuning=True))
    if table == "noise":
        return result_tables.noise()
    if subject == "all":
        return result_tables.main_table(stored.task("maze"), stored.task("code"))
    return TASK_TABLES[table](stored.task(subject))


def seed_csv(stored: Stored, task: str) -> str:
    """Every seed of every policy, as the text of a CSV file."""
    text = io.StringIO()
    csv.writer(text, lineterminator="\n").writerows(result_tables.seed_rows(stored.task(task)))
    return text.getvalue()
