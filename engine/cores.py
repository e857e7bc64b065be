"""How many CPU cores this process may use."""

import contextlib
import math
import os
from pathlib import Path

CGROUP = Path("/sys/fs/cgroup")  # of the container
QUOTA_FILES = (["cpu.max"], ["cpu/cpu.cfs_quota_us", "cpu/cpu.cfs_period_us"])  # version 2, 1


def cores() -> int:
    """The CPU cores that this process may use: by its affinity, and by its container's quota."""
    allowed = float(os.cpu_count() or 1)
    if hasattr(os, "sched_getaffinity"):
        allowed = len(os.sched_getaffinity(0))
    for names in QUOTA_FILES:
        with contextlib.suppress(OSError, ValueError):  # not there, or "max"
            words = " ".join((CGROUP / name).read_text("utf-8") for name in names).split()
            quota, period = map(int, words)
            if quota > 0:  # -1: none
                allowed = min(allowed, quota / period)
    return math.ceil(allowed)
