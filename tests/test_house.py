"""Which file may import which. Read from the files, nothing is run."""

import ast
import functools
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
FILES = {
    ".".join(path.relative_to(ROOT).with_suffix("").parts): path
    for pattern in ("*.py", "tasks/*.py", "engine/*.py", "report/*.py")
    for path in ROOT.glob(pattern)
}
# What a file may import of the project: a name, or everything in a folder.
MAY_KNOW = {
    "vpo": (),
    "rewards": (),
    "tasks.sandbox_child": (),
    "tasks": ("rewards", "tasks"),
    "engine": ("vpo", "rewards", "engine"),
    "report": ("report",),
    "report.results": ("vpo", "eval", "report"),
    "report.page": ("vpo", "report"),
    "rollout": ("rewards", "engine"),
    "eval": ("vpo", "rewards", "rollout", "engine", "report"),
    "train": ("vpo", "rewards", "rollout", "engine", "eval"),
    "reproduce": ("rewards", "engine", "eval", "report"),
    "search": ("rewards", "rollout", "engine", "eval", "report"),
}


@functools.cache
def imports(name: str) -> set[str]:
    """The files of the project that a file imports, wherever in it, those for type checking too."""
    found = set()
    for node in ast.walk(ast.parse(FILES[name].read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            found |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
    return {name for name in found if name in FILES}


def folder(name: str) -> str:
    return name.partition(".")[0] if "." in name else ""


@pytest.mark.parametrize("name", [name for name in FILES if not name.endswith("__init__")])
def test_a_room_knows_only_what_it_may(name):
    """Guards against a wing that reaches into the reading path, and a sandbox child that could see what is expected."""
    allowed = MAY_KNOW.get(name) if name in MAY_KNOW else MAY_KNOW[folder(name)]
    wrong = [
        known for known in imports(name) if known not in allowed and folder(known) not in allowed
    ]
    assert not wrong, f"{name} must not know {wrong}"


def test_vpo_can_be_copied_as_one_file():
    nodes = list(ast.walk(ast.parse(FILES["vpo"].read_text())))
    known = {
        alias.name.partition(".")[0]
        for node in nodes
        if isinstance(node, ast.Import)
        for alias in node.names
    }
    known |= {
        (node.module or ".").partition(".")[0] for node in nodes if isinstance(node, ast.ImportFrom)
    }
    assert known <= {"functools", "math", "collections", "torch"}


def test_there_are_no_circles():
    """Neither between files nor between folders."""

    def reaches(name: str, seen: tuple[str, ...] = ()) -> None:
        assert name not in seen, " -> ".join((*seen, name))
        for known in imports(name):
            reaches(known, (*seen, name))

    for name in FILES:
        reaches(name)
    edges = {
        (folder(a), folder(b))
        for a in FILES
        for b in imports(a)
        if "" != folder(a) != folder(b) != ""
    }
    assert not any((b, a) in edges for a, b in edges)
