"""What keeps runs: flags, folders, checkpoints, models, tasks, processes, messages."""
