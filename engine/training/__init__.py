"""What the job of train.py calls."""
