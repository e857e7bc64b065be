"""The grid and the document: cells are distinct, results survive, a failure stays alone, tables follow from numbers."""

import gzip
import json
import re
import subprocess
from pathlib import Path

import pytest
import torch

import eval as evaluation
import reproduce
import train
from engine.flags import train_parser
from report import results
from rewards import UserError
from vpo import ADVANTAGES

ROOT = Path(__file__).resolve().parent.parent


def stored() -> results.Stored:
    """What lies in results/, of this version."""
    return results.Stored(reproduce.all_stored())


@pytest.mark.parametrize("name", ["docs/results.md", "README.md"])
def test_the_tables_follow_from_the_stored_results(name, monkeypatch):
    """Nothing typed by hand: every block made anew from results/ is what stands in the document."""
    monkeypatch.chdir(ROOT)
    assert results.fill(stored(), Path(name)) == Path(name).read_text(), (
        "run: python reproduce.py --write"
    )


def test_the_grid_is_sound():
    """Distinct names; every command is one that train.py takes; no seed of the tables was tuned on; all methods."""
    cells = reproduce.cells()
    assert len({cell.name for cell in cells}) == len(cells)
    for cell in cells:
        args = train_parser().parse_args(cell.command)
        assert (args.method, args.seed) == ([cell.method], cell.seed) and (
            cell.seed < 100
        ) != cell.tuning
        assert cell.task in ("maze", "code", "toy", "open_cases") or (ROOT / cell.task).is_file()
    assert {cell.method for cell in cells} == set(ADVANTAGES)


@pytest.mark.parametrize("task", ["maze", "code", "open_cases"])
def test_default_rates_are_those_that_validation_chose(task, monkeypatch):
    """For every method whose whole grid of rates is stored."""
    monkeypatch.chdir(ROOT)
    for method, rates in results.tuned(stored(), task).items():
        common = reproduce.REAL_LR if task == "open_cases" else reproduce.RATES
        if set(rates) >= {*common, *reproduce.MORE.get((task, method), ())}:
            assert reproduce.LR[task][method] == results.best_rate(rates, method), method


class Small(reproduce.Cell):
    """A cell that trains for moments."""

    @property
    def command(self) -> list[str]:
        return [
            *super().command,
            "--size",
            "5",
            "--warm-steps",
            "3",
            "--steps",
            "2",
            "--prompts-per-step",
            "1",
            "--group-size",
            "4",
            "--pool",
            "30",
            "--device",
            "cpu",
        ]


@pytest.fixture
def small(tmp_path, monkeypatch):
    """One small cell measured in this process, in an empty folder."""
    monkeypatch.chdir(tmp_path)

    def call(command, **rest):
        try:
            train.main(command[2:])
        except SystemExit as stop:
            return subprocess.CompletedProcess(command, stop.code)
        return subprocess.CompletedProcess(command, 0)

    monkeypatch.setattr(reproduce.subprocess, "run", call)
    monkeypatch.setattr("tasks.maze.Maze.eval_problems", 3)
    return Small("maze", "grpo", 0)


def test_a_cell_is_measured_once_and_kept(small, monkeypatch):
    """The stored numbers are those of eval.py to a thousandth; other versions and settings are not taken for it."""
    assert reproduce.load(small) is None
    reproduce.measure_cell(small)
    result = reproduce.load(small)
    assert list(result["at"]) == ["0.7", "1", "1.3"] and list(result["at"]["0.7"]) == [
        "start",
        "start_sets",
        "grpo",
    ]
    assert result["threads"] and result["date"] and result["tokens"] and result["steps"] == 2
    before = reproduce.path_of(small).read_bytes()
    reproduce.measure_cell(small)  # evaluated again, trained no more
    again = reproduce.load(small)
    assert again["at"] == result["at"] and len(before) < 5000
    data = results.Stored({("maze", "grpo", 0, ()): result})
    evaluation.main([str(small.run), "--problems", "3"])
    report = json.loads(next(Path("runs").rglob("eval.json")).read_text())["policies"]
    for measure in ("best@1", "best@30", "pass@30", "W@30", "diversity"):
        ours = data.mean("maze", "start", measure)
        assert ours == pytest.approx(report["start"][measure]["mean"], abs=1e-3)
    monkeypatch.setattr(reproduce, "VERSION", 2)
    assert reproduce.load(small) is None and reproduce.path_of(small).exists()


def test_a_cell_that_fails_does_not_stop_the_others(tmp_path, monkeypatch, capsys):
    """It is named with the command that failed; what was stored stays; the next call tries it alone."""
    monkeypatch.chdir(tmp_path)

    def call(command, **rest):
        cell = next(cell for cell in reproduce.cells() if cell.name == command[-1])
        if "max_at_k" not in cell.name:
            reproduce.store(cell, {"version": reproduce.VERSION, "command": cell.command})
        return subprocess.CompletedProcess(command, int("max_at_k" in cell.name))

    monkeypatch.setattr(reproduce.subprocess, "run", call)
    monkeypatch.setattr(reproduce, "write", lambda document: None)
    monkeypatch.setattr(reproduce, "RESULTS", reproduce.RESULTS)  # it is moved by --quick
    with pytest.raises(SystemExit) as stop:
        reproduce.main(["--quick", "--jobs", "1"])
    told = capsys.readouterr()
    assert stop.value.code == 2 and "1 of 4 cells failed" in told.err
    assert "python train.py --task maze --method max_at_k --seed 0 --lr" in told.err
    reproduce.main(["--quick", "--list"])
    assert [line.split()[0] for line in capsys.readouterr().out.splitlines()].count("missing") == 1
    cell = reproduce.Cell("maze", "vpo", 0)
    reproduce.path_of(cell).write_bytes(
        gzip.compress(json.dumps({"version": 0, "command": []}).encode())
    )
    reproduce.main(["--quick", "--list"])
    assert "maze-vpo-seed0.json.gz: of another version or setting" in capsys.readouterr().out
    for flags, text in (
        (["--only", "nothing"], "--only nothing: no cell"),
        (["--only", "["], "no regular expression"),
        (["--list", "--write"], "not allowed with"),
        (["--out", "note"], "--out note: a file"),
    ):
        Path("note").touch()
        with pytest.raises(SystemExit):
            reproduce.main(flags)
        assert text in capsys.readouterr().err
    reproduce.RESULTS = Path("results")
    reproduce.path_of(cell).parent.mkdir(exist_ok=True)
    reproduce.path_of(cell).write_bytes(b"cut off")
    with pytest.raises(UserError, match=r"maze-vpo-seed0.json.gz: damaged"):
        reproduce.load(cell)
    for flags, real in (
        (["--list"], 0),
        (["--list", "--only", "open_cases"], 15),
    ):  # hours, for who asks
        reproduce.main([*flags, "--out", "empty"])
        assert capsys.readouterr().out.count("open_cases") == real


def test_differences_are_paired():
    """A constant gain on problems that differ a lot: the interval is narrow, though those of the means overlap."""
    values = (1000 * torch.rand(50, generator=torch.Generator().manual_seed(0))).round()

    def result(method: str, gain: int) -> dict:
        at = {method: {"best@1": (values + gain).long().tolist(), "passed": [3] * 50}}
        return {"at": {"0.7": at, "1": at}, "size": 30, "groups": None}

    data = results.Stored(
        {
            ("maze", method, seed, ()): result(method, gain + seed)
            for method, gain in (("vpo", 20), ("grpo", 0))
            for seed in range(3)
        }
    )
    mean, low, high, seeds, firm = data.difference(
        "maze", ("vpo", "0.7", ()), ("grpo", "1", ()), "best@1"
    )
    assert (mean, low, high, seeds, firm) == (*[pytest.approx(0.02)] * 3, 3, True)
    assert data.mean("maze", "vpo", "pass@30") == 1 and data.mean(
        "maze", "vpo", "pass@1"
    ) == pytest.approx(0.1)


def made_up(cells: list[reproduce.Cell]) -> results.Stored:
    """Random results of cells, 12 problems each; VPO gains 0.2 at k = 30 and loses 0.2 at k = 1."""
    found, draw = {}, torch.Generator().manual_seed(0)
    for cell in cells:
        at: dict = {}
        for T in ("0.7", "1", "1.3")[: 1 if cell.tuning else 3]:
            for name in (
                ["start", "start_sets", "grpo"]
                if cell.method == "grpo" and not cell.flags
                else [cell.method]
            ):
                tilt = {"vpo": 200, "group_vpo": 150}.get(name, 0)
                values = {
                    f"{kind}@{k}": (
                        300
                        + 5 * k
                        + tilt * (1 if k > 3 else -1)
                        + 9 * torch.rand(12, generator=draw)
                    )
                    .long()
                    .tolist()
                    for kind in ("best", "W")
                    for k in (reproduce.CURVE if T == "0.7" else (1, 30))
                }
                values |= {"diversity": [500 + tilt] * 12, "passed": [3 * (tilt > 0)] * 12}
                at.setdefault(T, {})[name] = {
                    key: [sum(v) / 12] if cell.tuning else v for key, v in values.items()
                }
        real = cell.task == "open_cases" and not cell.tuning
        method, flags = (
            (f"{cell.method} {cell.command[-1]}", ()) if real else (cell.method, cell.flags)
        )
        found[Path(cell.task).stem, method, cell.seed, flags] = {
            "at": at,
            "size": 30,
            "groups": [i // 2 for i in range(12)],
            "rollouts": 100,
            "tokens": 1000,
            "steps": 200,
            "geometry": {"unseen": 0.5, "effective": 2.0},
            "seconds": {"training": 10.0},
            "training": {
                "diversity": [1.0, 0.5 if cell.method != "vpo" else 0.9],
                "reward": [0.1, 0.2],
            }
            | ({"answers": [0.5, 0.9]} if cell.task == "open_cases" else {}),
        }
    return results.Stored(found)


def test_what_neither_grpo_nor_the_start_solves():
    """GRPO's second run solves problem 3, its start problem 1: that leaves less, most of all beside all runs."""
    found = {
        "start": [{"solved": [0, 0, 0]}, {"solved": [9, 0, 0]}],
        "vpo": [{"solved": [4, 4, 4]}] * 2,
        "grpo": [{"solved": [0, 0, 0]}, {"solved": [0, 0, 1]}],
    }
    assert results.alone(found, "vpo") == [[1, 2, 3], [2]] and results.alone(
        found, "vpo", True
    ) == [[2], [2]]
    assert (
        results.alone({"vpo": found["vpo"]}, "vpo", True)
        == [[1, 2, 3], [1, 2, 3]]
        != results.alone(found, "grpo")
    )


def test_every_table_and_figure_of_the_whole_grid(tmp_path, monkeypatch):
    """On made-up numbers whose verdicts are known, and with half of the grid missing."""
    monkeypatch.setattr(
        results,
        "bootstrap_interval",
        lambda values, groups=None, **_: evaluation.bootstrap_interval(values, groups, samples=30),
    )
    data = made_up(reproduce.cells())
    for task, name in re.findall(
        r"<!-- results:(\w+)-(\w+) -->", (ROOT / "docs/results.md").read_text()
    ):
        lines = results.TABLES[name](data, task).partition("\n\n")[0].splitlines()
        assert len({line.count("|") for line in lines}) == 1 and len(lines) > 3, name
    rest = {"best": 12 * [[0.1, 0.2]], "behaviours": 12 * [[1, 2]]}
    none, ten = [{"solved": 12 * [0], **rest}] * 3, [{"solved": [7] * 10 + [0, 0], **rest}] * 3
    monkeypatch.setattr(
        results,
        "searches",
        lambda: {
            "nested_scalar_evolve": {
                "ticks": [1, 10],
                "policies": {"start": none, "grpo": none, "vpo": ten, "group_vpo": none},
            }
        },
    )
    verdicts = {
        line.split(" | ")[0][2:]: line.split("**")[-2]
        for line in results.claims(data).splitlines()[2:]
    }
    assert [verdicts[f"C{i}"] for i in range(1, 11)] == [
        "holds",
        "holds",
        "holds",
        "partly",
        "holds",
        "holds",
        "fails",
        "fails",
        "open",
        "holds",
    ]
    assert "**+0.2" in results.differences(data, "maze").splitlines()[2]
    written = results.figures(data, tmp_path)
    assert len(written) == 9 and all(path.exists() for path in written)
    rates = results.learning_rates(data, "maze")
    assert rates.count("| **") == len(results.tuned(data, "maze")) == len(ADVANTAGES)
    monkeypatch.setattr(reproduce, "all_stored", dict)
    with pytest.raises(UserError, match="nothing to write"):
        reproduce.write(True)
    few = made_up(
        [cell for cell in reproduce.cells() if cell.method in ("grpo", "vpo") and not cell.tuning]
    )
    assert (
        results.claims(few)
        and results.differences(few, "code")
        and results.learning_rates(few, "maze")
    )
