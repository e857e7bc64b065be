"""The page, the film and the reward geometry of runs.

    python -m report page RUN ...       report.html, a page that shows the training in a browser
    python -m report film RUN ...       film.gif, the drawn answers step by step
    python -m report geometry RUN ...   whether the reward vector can matter

`python -m report COMMAND --help` lists the flags of a command.
"""

import sys

from engine import is_no_part_of_python

sys.path.sort(key=is_no_part_of_python)
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from engine.config import Parser, flag
from engine.errors import as_command
from engine.evaluations import output_folders
from engine.files import writing
from report.geometry import geometry_of
from report.page import write_film, write_page
from report.snapshots import Snapshots, read_snapshots
from rewards import UserError


@dataclass
class PageFlags:
    """The flags of the page and the film."""

    out: str = flag("", "folder for what is written; empty: the run folder")


@dataclass
class GeometryFlags:
    """The flags of the reward geometry."""

    task: str = flag("maze", "the task of a model; a run has its own")
    problems: int = flag(100, "number of validation problems", 1, 2**20)
    device: Literal["auto", "cpu", "cuda", "mps"] = flag("auto", "auto: as train.py chooses")


def page(argv: list[str]) -> None:
    """Write report.html of each run: the answers during training, with sliders for k and the weights."""
    for snapshots, folder in snapshots_and_folders(page, argv):
        write_page(folder / "report.html", snapshots)


def film(argv: list[str]) -> None:
    """Write film.gif of each run whose task draws: the answers, step by step."""
    for snapshots, folder in snapshots_and_folders(film, argv):
        write_film(folder / "film.gif", snapshots)


def geometry(argv: list[str]) -> None:
    """Say whether the reward vector can matter, before any training. RUN may be a model, too."""
    flags, names = read_flags(geometry, GeometryFlags, argv)
    for name in names:
        print(f"\n{geometry_of(name, flags.task, flags.problems, flags.device)}")


def snapshots_and_folders(command: Callable, argv: list[str]) -> Iterator[tuple[Snapshots, Path]]:
    """The snapshots of each run, and the folder for its page or film."""
    flags, names = read_flags(command, PageFlags, argv)
    runs = [Path(name) for name in names]
    for run, folder in zip(runs, output_folders(runs, flags.out), strict=True):
        snapshots = read_snapshots(run)
        with writing(folder):
            yield snapshots, folder


def read_flags(command: Callable, flags_class: type, argv: list[str]) -> tuple[Any, list[str]]:
    """The flags of a command, and the runs that it names."""
    parser = Parser(flags_class, f"-m report {command.__name__}", command.__doc__)
    parser.add_argument("runs", nargs="+", metavar="RUN", help="run folders of train.py")
    flags, rest = parser.parse_args_into_dataclass(argv)
    return flags, rest.runs


COMMANDS = {"page": page, "film": film, "geometry": geometry}


def main(argv: list[str] | None = None) -> None:
    """Run the command that is named first."""
    argv = sys.argv[1:] if argv is None else argv
    with as_command("report"):
        if not argv or argv[0] in ("-h", "--help"):
            print(__doc__.strip())
        elif argv[0] in COMMANDS:
            COMMANDS[argv[0]](argv[1:])
        else:
            raise UserError(f"{argv[0]}: must be one of {', '.join(COMMANDS)}")


if __name__ == "__main__":
    main()
