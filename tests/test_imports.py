"""Which file may import which, read from the files."""

import ast
import functools
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
SCRIPTS = ("vpo", "rewards", "rollout", "train", "eval")  # the reading path
FOLDERS = ("engine", "fast", "tasks", "report", "examples", "study")
PROGRAM = ("vpo", "rewards", "rollout", "eval", "engine/", "fast/", "tasks/", "report/")
# What a file may import of the project, by file or by folder. "engine/" are all files of a folder.
MAY_KNOW = {
    "vpo": (),
    "rewards": ("engine.answers",),
    "rollout": ("vpo", "rewards", "engine/"),
    "eval": ("vpo", "rewards", "rollout", "engine/", "report/", "fast/"),
    "train": ("vpo", "rewards", "rollout", "eval", "engine/", "fast/"),
    "engine.answers": (),
    "engine.cores": (),
    "engine.training.start": ("rewards", "rollout", "engine/"),
    "engine.training.memory": ("rewards", "rollout", "engine/"),
    "engine.training.checkpoints": ("rewards", "rollout", "engine/"),
    "engine.mixtures": ("vpo", "rewards", "rollout", "engine/"),
    "engine/": ("vpo", "rewards", "engine/"),
    "fast/": ("vpo", "rollout", "engine.models", "engine.config", "fast/"),
    "tasks.sandbox": (),
    "tasks.sandbox.child": (),
    "tasks/": ("rewards", "engine.answers", "engine.cores", "report.drawings", "tasks/"),
    "report.drawings": ("rewards",),
    "report/": ("vpo", "rewards", "rollout", "engine/", "report/"),
    "examples/": (*PROGRAM, "examples/"),
    "study/": (*PROGRAM, "train", "examples/", "study/"),
}


def files_by_name() -> dict[str, Path]:
    """The files of the project as they are imported. In the root a user's own files may lie, too."""
    paths = [ROOT / f"{name}.py" for name in SCRIPTS]
    for folder in FOLDERS:
        paths += (ROOT / folder).rglob("*.py")
    files = {}
    for path in paths:
        name = ".".join(path.relative_to(ROOT).with_suffix("").parts)
        files[name.removesuffix(".__init__")] = path
    return files


FILES = files_by_name()


def folder(name: str) -> str:
    """The folder of the root that holds a file, with a slash; empty for the files of the root."""
    first, *rest = FILES[name].relative_to(ROOT).parts
    return f"{first}/" if rest else ""


@functools.cache
def imported_names(name: str) -> set[str]:
    """All that a file imports, in functions and for type checking too; of `from a import b` a and
    a.b. A module that is named in a string, as in import_module("a.b"), is imported too."""
    names = set()
    for node in ast.walk(ast.parse(FILES[name].read_text("utf-8"))):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            module = node.module or "."
            names.add(module)
            names |= {f"{module}.{alias.name}" for alias in node.names}
        elif isinstance(node, ast.Call) and node.args:
            called = ast.unparse(node.func).rpartition(".")[2]
            argument = node.args[0]
            if called in ("import_module", "__import__") and isinstance(argument, ast.Constant):
                names.add(argument.value)
    return names


def imports(name: str) -> set[str]:
    return imported_names(name) & FILES.keys()


@pytest.mark.parametrize("name", sorted(FILES))
def test_a_file_knows_only_what_it_may(name):
    """Guards against an engine that knows a command, a sandbox child that could see what is expected, and a first command
    that ends on Windows with "No module named 'resource'"."""
    allowed = MAY_KNOW.get(name, MAY_KNOW.get(folder(name), ()))
    for known in imports(name):
        assert known in allowed or folder(known) in allowed, f"{name} must not know {known}"
    of_linux = imported_names(name) & {"fcntl", "grp", "pwd", "resource", "termios"}
    assert not of_linux or name.startswith("tasks.sandbox")


def test_vpo_can_be_copied_into_another_trainer():
    """Guards against an import of anything but torch."""
    others = {name.partition(".")[0] for name in imported_names("vpo")} - {"torch"}
    assert others <= sys.stdlib_module_names


@pytest.mark.parametrize("name", sorted(FILES))
def test_a_text_file_is_opened_with_its_encoding(name):
    """What ruff's PLW1514 does not see. Guards against Windows, where the default is not UTF-8."""
    for node in ast.walk(ast.parse(FILES[name].read_text("utf-8"))):
        method = node.func.attr if isinstance(node, ast.Call) and hasattr(node.func, "attr") else ""
        n_before = {"read_text": 0, "write_text": 1}.get(method)
        if n_before is not None and len(node.args) <= n_before:
            assert "encoding" in [each.arg for each in node.keywords], f"{name}:{node.lineno}"
