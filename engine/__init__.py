"""What keeps runs: flags, folders, checkpoints, models, tasks, processes, messages."""

__version__ = "4.0"  # the first number changes with what is measured; docs/changes.md
