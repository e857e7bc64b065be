"""The search of the study: evolution towards all diamonds of a maze, with the policies of three seeds.

python study/one/searches.py        an hour; needs their runs in runs/study/, and writes results/search.json
"""

import json
import os
import shutil
import sys
from pathlib import Path
from unittest.mock import patch

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from engine.errors import as_command
from engine.files import write_text
from examples import search
from rewards import UserError
from study.one.reproduce import RUNS
from study.one.results import SEARCH
from vpo import ADVANTAGES, grpo

POLICIES = ("grpo", "grpo-kl", "max_at_k", "vpo", "group_vpo")
FLAGS = "--goal diamond --budget 1000 --problems 100 --among 1000"


def joined(seed: int) -> str:
    """A run that holds the policies of a seed; its name."""
    run = RUNS / "search" / f"maze-seed{seed}"
    shutil.rmtree(run, ignore_errors=True)
    for policy in POLICIES:
        cell = f"maze-{policy}-seed{seed}"
        source = RUNS / cell
        if not source.exists():
            advice = f"python study/one/reproduce.py --only {cell} --out runs/again"
            raise UserError(f"{source}: is not there; {advice} trains it")
        method = policy.partition("-")[0]
        shutil.copytree(source / method, run / policy.replace("-", "_"))
    shutil.copytree(source / "start", run / "start")
    record = json.loads((source / "config.json").read_text("utf-8"))
    record["flags"]["method"] = [policy.replace("-", "_") for policy in POLICIES]
    write_text(run / "config.json", json.dumps(record))
    return str(run)


@as_command("study/searches.py")
def main(seeds: tuple[int, ...] = (0, 1, 2), flags: str = FLAGS) -> None:
    """Search, and store with how many candidates each problem was solved, 0 if never."""
    out = RUNS / "search" / "diamond"
    with patch.dict(ADVANTAGES, grpo_kl=grpo):
        search.main([*map(joined, seeds), *flags.split(), "--out", str(out)])
    found = json.loads((out / "search.json").read_text("utf-8"))
    solved = {}
    for policy, runs in found["policies"].items():
        solved[policy.replace("grpo_kl", "grpo-kl")] = [run["solved"] for run in runs]
    write_text(
        SEARCH, json.dumps({"flags": flags, "problems": found["problems"], "solved": solved})
    )


if __name__ == "__main__":
    os.chdir(Path(__file__).resolve().parents[2])  # where runs/ is
    main()
