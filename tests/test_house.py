"""Which file may import which. Read from the files, nothing is run."""

import ast
import functools
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
# What examples and the study may import; the tests may import everything.
PROGRAM = ("vpo", "rewards", "rollout", "tasks", "tasks/", "engine/", "report/", "eval", "search")
# What a file may import of the project, by file or by folder. "engine/" are all files of a folder,
# "tasks" is tasks/__init__.py, which loads tasks.
MAY_KNOW = {
    "vpo": (),
    "rewards": (),
    "tasks.sandbox_child": (),
    "tasks/": ("rewards", "tasks/"),
    "engine/": ("vpo", "rewards", "tasks", "engine/"),
    "report/": ("vpo", "rewards", "engine.files", "report/"),
    "rollout": ("rewards", "engine/"),
    "eval": ("vpo", "rewards", "rollout", "engine/", "report/"),
    "train": ("vpo", "rewards", "rollout", "tasks", "engine/", "eval"),
    "search": ("rewards", "rollout", "tasks", "engine/", "report/"),
    "examples/": (*PROGRAM, "examples/"),
    "study/": (*PROGRAM, "train", "examples/", "study/"),
}


def files_by_name() -> dict[str, Path]:
    """The files of the project as they are imported."""
    paths = []
    for folder in ("tasks", "engine", "report", "examples", "study"):
        paths += (ROOT / folder).rglob("*.py")
    for name in MAY_KNOW:  # in the root a user's own files may lie, too
        path = ROOT / f"{name}.py"
        if path.exists():
            paths.append(path)
    files = {}
    for path in paths:
        name = ".".join(path.relative_to(ROOT).with_suffix("").parts)
        files[name.removesuffix(".__init__")] = path
    return files


FILES = files_by_name()


@functools.cache
def imported_names(name: str) -> set[str]:
    """All that a file imports, wherever in it, for type checking too; of `from a import b` a and a.b."""
    names = set()
    for node in ast.walk(ast.parse(FILES[name].read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            module = node.module or "."
            names.add(module)
            names |= {f"{module}.{alias.name}" for alias in node.names}
    return names


def imports(name: str) -> set[str]:
    """The files of the project that a file imports."""
    return imported_names(name) & FILES.keys()


def folder(name: str) -> str:
    """The folder of the root that holds a file, with a slash; empty for the files of the root."""
    first, *rest = FILES[name].relative_to(ROOT).parts
    return f"{first}/" if rest else ""


@pytest.mark.parametrize("name", sorted(FILES))
def test_a_file_knows_only_what_it_may(name):
    """Guards against an engine that knows a command, and a sandbox child that could see what is expected."""
    allowed = MAY_KNOW.get(name, MAY_KNOW.get(folder(name), ()))
    wrong = []
    for known in imports(name):
        if known not in allowed and folder(known) not in allowed:
            wrong.append(known)
    assert not wrong, f"{name} must not know {wrong}"


def test_only_the_study_knows_train_and_the_study():
    """Guards against a program that needs what administers its results."""
    hidden = {"train", *(name for name in FILES if folder(name) == "study/")}
    outside = [name for name in FILES if folder(name) != "study/"]
    assert not [name for name in outside if imports(name) & hidden]


def test_there_are_no_circles_of_files():
    def follow(name: str, path: tuple[str, ...]) -> None:
        assert name not in path, " -> ".join((*path, name))
        for known in imports(name):
            follow(known, (*path, name))

    for name in FILES:
        follow(name, ())


def test_there_are_no_circles_of_folders():
    edges = set()
    for name in FILES:
        for known in imports(name):
            if folder(name) != folder(known) and folder(name) and folder(known):
                edges.add((folder(name), folder(known)))
    for a, b in edges:
        assert (b, a) not in edges, f"{a} and {b} know each other"
