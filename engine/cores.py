"""How many CPU cores this process may use."""

import contextlib
import math
import os
from pathlib import Path

# The files of a control group that hold its quota and the period: of version 2, and of version 1.
QUOTA_FILES = (["cpu.max"], ["cpu.cfs_quota_us", "cpu.cfs_period_us"])


def cores() -> int:
    """The CPU cores that this process may use: by its affinity, and by its container's quota."""
    number = os.cpu_count() or 1
    if hasattr(os, "sched_getaffinity"):
        number = len(os.sched_getaffinity(0))
    return math.ceil(min(number, quota(Path("/"))))


def quota(root: Path) -> float:
    """The cores that the control groups around this process allow; infinity without a limit.

    Args:
        root: the folder that holds `proc` and `sys`.
    """
    lines = []
    with contextlib.suppress(OSError):
        lines = (root / "proc/self/cgroup").read_text("utf-8").splitlines()
    folders = []
    for line in lines:
        _, controllers, group = line.split(":", 2)
        if not controllers or "cpu" in controllers.split(","):
            own = root / "sys/fs/cgroup" / ("cpu" if controllers else "") / group.strip("/")
            folders += [own, *own.parents]
    return min(map(_quota_of, folders), default=math.inf)


def _quota_of(folder: Path) -> float:
    """The cores that one control group allows."""
    for names in QUOTA_FILES:
        with contextlib.suppress(OSError, ValueError):  # not there, or "max"
            words = " ".join((folder / name).read_text("utf-8") for name in names).split()
            limit, period = map(int, words)
            if limit > 0:  # -1: none
                return limit / period
    return math.inf
