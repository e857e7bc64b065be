"""Progress bars."""

import math
import sys

from tqdm import tqdm


def progress_bar(*arguments, **options) -> tqdm:
    """A bar of tqdm. What is no terminal, such as a file, gets a line for ten steps, at most one every ten seconds."""
    if not sys.stderr.isatty():
        options |= {"miniters": 10, "mininterval": 10, "maxinterval": math.inf}
    return tqdm(*arguments, **options)
