"""The documentation agrees with the code: tables of flags, links, anchors, file names.

python -m tests.test_docs     writes the tables of flags in docs/reference.md anew
"""

import argparse
import dataclasses
import re
from pathlib import Path

import pytest

from engine.config import (
    Config,
    EvalConfig,
    SearchConfig,
    default_text_of,
    is_required,
    name_of,
)
from engine.kinds import TINY_LR
from report.style import LOOKS
from study import reproduce
from study.stored import METHODS
from vpo import ADVANTAGES

ROOT = Path(__file__).resolve().parent.parent
REFERENCE = ROOT / "docs" / "reference.md"
PAGES = [
    ROOT / "README.md",
    *sorted((ROOT / "docs").rglob("*.md")),
    *sorted((ROOT / "study").rglob("*.md")),
]


def without_code(text: str) -> str:
    """The text without its code blocks, whose comments look like headings."""
    return re.sub(r"^```.*?^```", "", text, flags=re.DOTALL | re.MULTILINE)


def anchors(page: Path) -> set[str]:
    """The anchors that GitHub gives the headings of a page."""
    headings = re.findall(r"^#+ (.*)$", without_code(page.read_text()), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def test_the_tables_of_flags_are_up_to_date():
    text = REFERENCE.read_text()
    assert with_flags_tables(text) == text, "run: python -m tests.test_docs"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_somewhere(page):
    for target in re.findall(r"\]\(([^)\s]+)\)", without_code(page.read_text())):
        if "://" in target:
            continue
        name, _, anchor = target.partition("#")
        file = (page.parent / name) if name else page
        assert file.exists(), f"{page.name}: {target} does not exist"
        if anchor:
            assert anchor in anchors(file), f"{page.name}: {target} has no such heading"


@pytest.mark.parametrize("page", ["docs/CONTRIBUTING.md", "docs/own.md", "docs/sandbox.md"])
def test_files_that_are_named_exist(page):
    """Every path in backticks that begins with a folder of the project."""
    text = (ROOT / page).read_text()
    for path in re.findall(r"`((?:tasks|engine|report|examples|study|tests)/[\w./]*)`", text):
        assert (ROOT / path).exists(), f"{page}: {path} does not exist"


def with_flags_tables(text: str) -> str:
    """The text of docs/reference.md with its tables of flags written anew."""
    for config_class in (Config, EvalConfig, SearchConfig):
        marker = f"<!-- flags:{config_class.__name__} -->"
        before, _, rest = text.partition(marker)
        _, end, after = rest.partition("<!-- end -->")
        text = f"{before}{marker}\n{flags_tables(config_class)}\n{end}{after}"
    return text


def flags_tables(config_class: type) -> str:
    """The flags of a command as Markdown: a table per group of its fields."""
    head = ["| flag | default | meaning |", "|---|---|---|"]
    lines = []
    for field in dataclasses.fields(config_class):
        if not field.metadata:
            continue
        group = field.metadata["begins_group"]
        if group and lines:
            lines.append("")
        if group:
            lines += [f"### {group.capitalize()}", ""]
        if group or not lines:
            lines += head
        lines.append(table_row(field))
    return "\n".join(lines)


def table_row(field: dataclasses.Field) -> str:
    options = field.metadata["argparse"]
    name = "RUN ..." if is_required(field) else name_of(field.name)
    if options.get("action") is argparse.BooleanOptionalAction:
        name += f"`, `{name_of('no_' + field.name)}"
    meaning = field.metadata["help"].replace("|", "\\|")
    choices = options.get("choices", ())
    if not all(choice in meaning for choice in choices):
        meaning += f" ({', '.join(choices)})"
    return f"| `{name}` | {default_text_of(field)} | {meaning} |"


@pytest.mark.parametrize("method", ADVANTAGES)
def test_a_method_is_entered_in_every_place(method):
    """Guards against a new method that fails only when a table or a figure is made."""
    places = {
        "LOOKS of report/style.py": LOOKS,
        "SINGLE or METHODS of study/stored.py": METHODS,
        "OTHERS of study/reproduce.py": reproduce.MAIN_METHODS + reproduce.OTHERS,
    }
    for task, rates in TINY_LR.items():
        places[f"TINY_LR of engine/kinds.py, {task}"] = rates
    missing = [place for place, known in places.items() if method not in known]
    if f"| `{method}` (" not in REFERENCE.read_text():
        missing.append("the table of docs/reference.md#methods, with a source in brackets")
    assert not missing


if __name__ == "__main__":
    REFERENCE.write_text(with_flags_tables(REFERENCE.read_text()))
