"""One file per task, found by its name: `--task maze` is tasks/maze.py."""
