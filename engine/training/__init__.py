"""The parts of train.py's job."""
