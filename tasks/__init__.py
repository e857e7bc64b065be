"""One file per task: `--task maze` is tasks/maze.py. engine/tasks.py loads them."""
