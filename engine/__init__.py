"""What keeps runs: flags, folders, checkpoints, models, tasks, processes, messages."""

import os

__version__ = "4.0"  # the first number changes with what is measured; docs/changes.md


def is_no_part_of_python(folder: str) -> bool:
    """By which sys.path is sorted, so that a user's queue.py beside the scripts hides no module of Python."""
    return folder.removesuffix("/lib-dynload") != os.path.dirname(os.__file__)
