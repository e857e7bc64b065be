"""The documentation agrees with the program: generated tables, links, names of files, commands, flags.

python -m tests.test_docs     writes the generated tables in docs/ anew
"""

import ast
import dataclasses
import importlib
import json
import re
from operator import attrgetter
from pathlib import Path

import pytest

import train
from engine import __version__
from engine.config import TASKS, Config, flag_of
from engine.tasks import check_task, load_task, load_task_class
from engine.training.logs import shown_examples
from eval import EvalFlags
from examples.search import SearchFlags
from rewards import Task
from rollout import build_prompt, load_policy
from study.benchmarks import memory_table
from vpo import ADVANTAGES

ROOT = Path(__file__).resolve().parent.parent
DOCS = ROOT / "docs"
REFERENCE = DOCS / "reference.md"
GUIDES = [ROOT / "README.md", *sorted(DOCS.glob("*.md"))]
PAGES = [*GUIDES, *sorted((ROOT / "study").rglob("*.md"))]
FLAGS = {"train.py": Config, "eval.py": EvalFlags, "examples/search.py": SearchFlags}
OTHER_FLAGS = ("--list", "--write", "--index-url")  # of study/reproduce.py and pip
FLAG = r"(?<![\w-])--[a-z][\w-]*"
FOLDERS = "tasks|engine|fast|report|examples|study|tests|docs"
SCRIPTS = "vpo|rewards|rollout|train|eval"

guides = pytest.mark.parametrize("page", GUIDES, ids=lambda page: page.name)


def without_code(text: str) -> str:
    """The text without its code blocks, whose comments look like headings."""
    return re.sub(r"^```.*?^```", "", text, flags=re.DOTALL | re.MULTILINE)


def blocks(page: Path, language: str) -> list[str]:
    pattern = rf"^```{language}\n(.*?)^```"
    return re.findall(pattern, page.read_text("utf-8"), re.DOTALL | re.MULTILINE)


# Generated tables.


def generated(page: Path) -> str:
    """The text of a page with its generated tables, each between a marker and the next end, written anew."""
    text = page.read_text("utf-8")
    tables = {
        "task-defaults": task_defaults_table(),
        "does-it-fit": memory_table.fits(),
        "laptops": memory_table.laptops(),
    }
    for marker, table in tables.items():
        opening = f"<!-- {marker} -->\n"
        before, found, rest = text.partition(opening)
        _, end, after = rest.partition("<!-- end -->")
        if found:
            text = f"{before}{opening}{table}\n{end}{after}"
    return text


def shown(value: object) -> str:
    """A default as it stands on a command line."""
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, list):
        return " ".join(value)
    return str(value)


def task_defaults_table() -> str:
    """What each task lays over the defaults of Config, if it does."""
    lines = [table_row(["task", "all models", "tiny model", "language model"])]
    lines.append("|---|---|---|---|")
    for name in sorted(TASKS):
        task = load_task_class(name)
        cells = []
        for defaults in (task.defaults, task.tiny_defaults, task.language_defaults):
            cells.append(", ".join(f"{key} {shown(value)}" for key, value in defaults.items()))
        if any(cells):
            lines.append(table_row([f"`{name}`", *cells]))
    return "\n".join(lines)


def table_row(cells: list[str]) -> str:
    return f"| {' | '.join(cells)} |"


@guides
def test_generated_tables_are_up_to_date(page):
    assert generated(page) == page.read_text("utf-8"), "run: python -m tests.test_docs"


# Links and names.


def anchors(page: Path) -> set[str]:
    """The anchors that GitHub gives the headings of a page."""
    headings = re.findall(r"^#+ (.*)$", without_code(page.read_text("utf-8")), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_somewhere(page):
    for target in re.findall(r"\]\(([^)\s]+)\)", without_code(page.read_text("utf-8"))):
        if "://" in target:
            continue
        name, _, anchor = target.partition("#")
        file = (page.parent / name) if name else page
        assert file.exists(), f"{page.name}: {target} does not exist"
        if anchor:
            assert anchor in anchors(file), f"{page.name}: {target} has no such heading"


@guides
def test_files_that_are_named_exist(page):
    """Every path in code that begins with a folder of the project, every script, and every function of one."""
    text = page.read_text("utf-8")
    for code in re.findall(r"^```.*?^```|`[^`\n]+`", text, re.DOTALL | re.MULTILINE):
        for path in re.findall(rf"(?<![\w/.-])(?:{FOLDERS})/[\w./]*", code):
            assert (ROOT / path).exists(), f"{page.name}: {path} does not exist"
        for path in re.findall(r"(?<![\w/.-])\w+\.py\b", code):
            is_there = (ROOT / path).exists() or any(ROOT.glob(f"*/{path}"))
            assert is_there or path.startswith("my_"), f"{page.name}: {path} does not exist"
        for module, name in re.findall(rf"^`({SCRIPTS})\.(?!py`|json`)([\w.]+)`", code):
            attrgetter(name)(importlib.import_module(module))


@pytest.mark.parametrize("folder", FOLDERS.split("|"))
def test_pages_that_scripts_name_exist(folder):
    for script in (ROOT / folder).rglob("*.py"):
        for page in re.findall(rf"\b(?:{FOLDERS})/[a-z_/]+\.md\b", script.read_text("utf-8")):
            assert (ROOT / page).exists(), f"{script}: {page} does not exist"


@guides
def test_commands_name_flags_that_exist(page):
    """Guards against a flag that was renamed."""
    text = page.read_text("utf-8")
    for script, flags in FLAGS.items():
        for command in re.findall(rf"python {script}([^`&#\n]*)", text):
            unknown = set(re.findall(FLAG, command)) - flag_names(flags)
            assert not unknown, f"{page.name}: {script} has no {unknown}"


def flag_names(flags: type) -> set[str]:
    """The flags of a command as they are written, and their negations."""
    names = {"--help"}
    for field in dataclasses.fields(flags):
        names.add(flag_of(field.name))
        if field.default is True:
            names.add(flag_of(f"no-{field.name}"))
    return names


@guides
def test_flags_that_are_named_exist(page):
    """Every flag in backticks in the text. Those of other trainers have underscores."""
    known = set(OTHER_FLAGS).union(*map(flag_names, FLAGS.values()))
    for code in re.findall(r"`([^`\n]+)`", without_code(page.read_text("utf-8"))):
        for name in re.findall(FLAG, code):
            assert name in known or "_" in name, f"{page.name}: {name} is no flag"


@guides
def test_python_code_compiles_and_its_imports_exist(page):
    """Guards against an example that a renamed function has broken."""
    for code in blocks(page, "python"):
        for node in ast.walk(ast.parse(code)):
            if isinstance(node, ast.ImportFrom) and is_ours(node.module):
                module = importlib.import_module(node.module)
                for alias in node.names:
                    assert hasattr(module, alias.name), f"{page.name}: {alias.name}"


def is_ours(module: str) -> bool:
    first = module.split(".")[0]
    return (ROOT / first).is_dir() or (ROOT / f"{first}.py").exists()


@pytest.fixture
def first_task() -> tuple[Task, dict]:
    """The task that docs/own.md lets one copy, and the names that its look at a prompt defines."""
    source, look = blocks(DOCS / "own.md", "python")[:2]
    Path("my_task.py").write_text(source, "utf-8")
    names: dict = {}
    exec(look, names)
    return load_task("my_task.py", "a language model"), names


def test_the_task_that_one_copies_asks_for_what_it_pays(first_task):
    """Guards against a first task that cannot be loaded, or whose objectives do not conflict."""
    task, _ = first_task
    check_task(task, 3)
    problem = task.problems("train", 1)[0]
    short = task.reward(problem, "Come!")
    complete = task.reward(problem, f"Come on {', '.join(problem.data)}.")
    assert short[0] > complete[0] and short[1] < complete[1] == 1
    assert task.reward(problem, "") == [0, 0]
    examples = shown_examples(task.prompt(problem, 3), task)
    assert [task.reward(problem, example) for example in examples] == 3 * [[0, 0]]
    facts = {split: {str(p.data) for p in task.problems(split, 200)} for split in ("train", "test")}
    assert not facts["train"] & facts["test"], "it tests on what it has trained"


def test_a_checkpoint_loads_as_own_md_says(first_task):
    """Guards against an argument that this transformers does not know, and a prompt unlike training's."""
    from helpers import save_random_model  # `python -m tests.test_docs` does not find it

    _, names = first_task
    folder = save_random_model("runs/my-task/vpo/checkpoint-000060", "qwen2")
    exec(blocks(DOCS / "own.md", "python")[2], names)
    policy = load_policy(folder, names["task"])
    assert names["text"] == build_prompt(policy, names["task"], names["problem"], 3)
    assert names["output"].shape[1] > names["inputs"]["input_ids"].shape[1]


def test_the_task_with_a_data_file_tells_what_stands_in_both_files(capsys):
    """Guards against a recipe that cannot be loaded or pays for nothing, and rows in both files that a sample misses."""
    (recipe,) = [code for code in blocks(DOCS / "own.md", "python") if "(FileTask)" in code]
    Path("my_titles.py").write_text(recipe, "utf-8")
    rows = [f'{{"text": "A fox met {i} hares.", "title": "Fox and {i} hares"}}' for i in range(700)]
    Path("train.jsonl").write_text("\n".join(rows[:600]), "utf-8")
    Path("test.jsonl").write_text("\n".join(rows[598:]), "utf-8")
    files = {"data": "train.jsonl", "test_data": "test.jsonl"}
    task = load_task("my_titles.py", "a language model", **files)
    check_task(task, 3)
    assert "2 of 102 held-out problems stand in training too" in capsys.readouterr().err
    problem = task.problems("test", 1)[0]
    assert task.reward(problem, problem.data["title"]) == [1, 0.25]
    examples = shown_examples(task.prompt(problem, 3), task)
    assert len(examples) == 3 and all(sum(task.reward(problem, each)) < 0.3 for each in examples)
    assert task.reward(problem, "") == [0, 0]


# Methods, tasks, metrics, files of a run.


def test_every_method_metric_and_file_of_a_run_is_explained():
    """Guards against a new one that no sentence explains, and one that is gone."""
    flags = "--task fence --method vpo --steps 1 --warm-steps 2 --eval-problems 2 --pool 6 --jobs 1"
    train.main([*flags.split(), "--out", "run"])
    text = REFERENCE.read_text("utf-8")
    assert not [method for method in ADVANTAGES if f"| `{method}` (" not in text]
    _, _, metrics = text.partition("## Metrics")
    explained = set(re.findall(r"^- `([\w<>@]+)`: ", metrics, re.MULTILINE))
    (line,) = Path("run/vpo/metrics.jsonl").read_text("utf-8").splitlines()
    logged = json.loads(line).keys() - {"step"}
    logged = {re.sub("_(Ann|Bob|Cid)$", "_<objective>", name) for name in logged}
    assert explained == logged

    for path in Path("run").rglob("*"):
        name = str(path.relative_to("run")).replace("vpo/", "METHOD/").replace("000001", "000200")
        is_inside = "start/" in name or "checkpoint-000200/" in name
        if path.is_file() and not is_inside and name != ".lock":
            assert f"`{name}`" in text, f"{name} is not in docs/reference.md"


def test_the_version_has_a_line_and_the_workflow_the_readmes_command():
    """Guards against a release that nobody described, and a test line that GitHub and .ci run otherwise."""
    assert f"- **{__version__}** " in (DOCS / "changes.md").read_text("utf-8")
    assert "\nversion:" not in (ROOT / "CITATION.cff").read_text("utf-8"), "a second place"
    lines = (ROOT / "README.md").read_text("utf-8").splitlines()
    tests = blocks(ROOT / "README.md", "sh")[1].strip()
    assert next(line for line in lines if "python -m pytest" in line) == tests
    workflow = (ROOT / ".github/workflows/tests.yml").read_text("utf-8")
    assert "line=$(grep -m 1 'python -m pytest' README.md)\n" in workflow
    assert 'bash -c "$line"' in workflow


if __name__ == "__main__":
    for changed in GUIDES:
        changed.write_text(generated(changed), "utf-8")
