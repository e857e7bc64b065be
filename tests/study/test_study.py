"""The grid and the documents: cells are distinct, results survive, a failure stays alone, tables follow from numbers."""

import json
import subprocess
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

import eval as evaluation
import train
from engine.config import Config, Parser, peak_rate, task_defaults
from engine.tasks import load_task
from rewards import UserError
from study import documents, exhibit, reproduce, searches, store, stored, tables, validation
from study.entries import GROUP_VPO, GRPO, VPO, Entry
from study.grid import (
    EIGHT_WORDS,
    HEADLINE,
    HEADLINES,
    LR,
    LR_AT_30,
    MAIN_METHODS,
    PAPERS_KL,
    VERSION,
    Cell,
    cells,
    tuning_rates,
)
from study.store import RESULTS, Store, load_stored, result_of
from study.stored import Difference, Result, Stored, TaskResults, t_test
from vpo import ADVANTAGES

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def results() -> Stored:
    """What lies in study/results/."""
    return load_stored(Store(ROOT / RESULTS))


@pytest.mark.parametrize("path", documents.documents(ROOT), ids=lambda path: path.name)
def test_the_tables_follow_from_the_stored_results(path, results):
    """Nothing typed by hand: every block made anew from study/results/ is what stands in the document."""
    assert documents.fill(results, path.read_text()) == path.read_text(), (
        "run: python study/reproduce.py --write"
    )


def test_the_csv_file_follows_from_the_stored_results(results):
    text = (ROOT / documents.RUNS).read_text()
    assert documents.runs_csv(results) == text, "run: python study/reproduce.py --write"


def test_the_minute_of_the_readme_is_the_measured_one(results):
    """Guards against rows of README.md that the newest program does not print."""
    text = (ROOT / "README.md").read_text("utf-8")
    fence = results.task("fence")
    starts = {GRPO: Entry("start"), VPO: Entry("start_sets"), GROUP_VPO: Entry("start")}
    for policy in (Entry("start"), *starts):
        means = [fence.values(policy, name, seeds=[0]).mean() for name in ("best@1", "W@30")]
        row = " | ".join(f"{mean:.3f}" for mean in means)
        assert f"\n| {policy.title} | {row} |" in text
        if policy in starts:
            ours, theirs = [
                fence.values(entry, "diversity", seeds=[0]).mean()
                for entry in (policy, starts[policy])
            ]
            ratio = ours / theirs
            collapsed = ", collapsed" if ratio < 1 / 3 else ""
            assert f"| {row} | {ratio:.1f}x{collapsed} |\n" in text


def test_the_grid_is_sound():
    """Distinct names; every command is one that train.py takes; no seed of the tables was tuned on; all methods."""
    grid = cells()
    assert len({cell.name for cell in grid}) == len(grid)
    for cell in grid:
        assert (cell.seed < 100) != cell.tuning
        name = cell.task.removesuffix("_v1")
        is_ours = name in ("maze", "code", "toy", "fence", *HEADLINES)
        assert is_ours or (ROOT / cell.task).is_file()
        parser = Parser(Config, "train.py", "")
        config = parser.parse_args_into_dataclass(cell.command)[0]
        assert config.method == [cell.method] and config.seed == cell.seed
        assert all((ROOT / word).is_file() for word in cell.script if word.endswith(".py"))
    assert {cell.method for cell in grid} == set(ADVANTAGES)


def test_eight_words_are_trained_as_six_are():
    """Guards against a flag that one of the two has besides, such as another KL weight."""
    for method in MAIN_METHODS:
        six = Cell(HEADLINE, method, 1).command
        eight = Cell(EIGHT_WORDS, method, 1).command
        assert eight == [*six[: six.index("--lr")], "--max-words", "8", *six[six.index("--lr") :]]


def test_all_results_are_found(results):
    assert len(results.results) == len(cells()) == 786


def test_versions_do_not_mix(results):
    """Guards against a lead of what version 1 measured over what version 3 did."""
    for run in results.results:
        if not run.tuning:
            assert (run.version < 3) == run.task.endswith("_v1"), run.task


@pytest.mark.parametrize("task", ["maze", "code", HEADLINE])
def test_the_program_has_the_rates_that_validation_chose(task):
    """Guards against defaults of train.py that differ from what the study measured."""
    model = "some model" if task == HEADLINE else "tiny"
    defaults = task_defaults(load_task("headline" if task == HEADLINE else task), model)
    config = Config(lr=defaults.get("lr", Config().lr))
    for method, rate in LR[task].items():
        if method in ADVANTAGES:
            assert peak_rate(config, method) == rate, method


@pytest.mark.parametrize("task", LR)
def test_default_rates_are_those_that_validation_chose(task, results):
    """For few candidates the lowest within the noise of the best, for thirty the highest within 0.002.

    For thirty it is that for few, if that is within the noise.
    """
    found = results.task(task, tuning=True)
    for method, rate in LR[task].items():
        compared = [policy for policy in found.policies() if policy.method == method]
        if {policy.lr for policy in compared} < set(tuning_rates(task, method)):
            continue
        chooser = validation.CHOSEN_BY.get(method, "best@1")
        usual = validation.first_close(found, compared, chooser)
        assert usual.lr == rate, method
        highest = max(found.mean(policy, "best@30") for policy in compared)
        many = LR_AT_30.get(task, {}).get(method)
        if many:
            best = [
                policy for policy in compared if found.mean(policy, "best@30") >= highest - 0.002
            ]
            assert best[-1].lr == many, method
        else:
            assert found.mean(usual, "best@30") >= highest - validation.NOISE


@pytest.mark.parametrize("task", ["maze", "code", "headline"])
def test_the_default_kl_is_the_one_of_the_main_table(task):
    """Guards against a first run that does not show what README tells of GRPO."""
    assert (Config().kl, PAPERS_KL) == (0.001, 0.001)
    assert "kl" not in task_defaults(load_task(task), "tiny")


def test_each_method_has_its_own_cure(results):
    """For few candidates the weakest that is as good as the best, for thirty the best; of GRPO any kind of cure."""
    titles = {}
    for method in MAIN_METHODS:
        chosen = [
            validation.own(results, "code", method, key) for key in ("best@1", "best@3", "W@30")
        ]
        titles[method] = [entry.setting for entry in chosen]
    assert titles == {
        "grpo": ["", "KL 0.1", "KL 0.3"],
        "max_at_k": ["", "", "KL 0.1"],
        "vpo": ["", "", "KL 0.03"],
        "group_vpo": ["", "", "KL 0.3"],
    }
    assert validation.own(results, HEADLINE, "vpo", "W@30") == VPO


class Small(Cell):
    """A cell that trains for moments."""

    @property
    def command(self) -> list[str]:
        flags = "--size 5 --warm-steps 3 --steps 2 --prompts-per-step 1 --group-size 4 --device cpu"
        return [*super().command, *flags.split()]


@pytest.fixture
def small(monkeypatch):
    """One small cell measured in this process, in an empty folder."""

    def call(command, **rest):
        try:
            train.main(command[2:])
        except SystemExit as stop:
            return subprocess.CompletedProcess(command, stop.code)
        return subprocess.CompletedProcess(command, 0)

    monkeypatch.setattr(reproduce.subprocess, "run", call)
    monkeypatch.setattr("tasks.maze.Maze.tiny_defaults", {"eval_problems": 3})
    return Small("maze", "grpo", 0)


STORE = Store(RESULTS)  # of the folder in which a test runs


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_a_cell_of_the_real_model_takes_a_small_part_of_a_card(device, monkeypatch):
    commands = []

    def call(command, **rest):
        commands.append(command)
        return subprocess.CompletedProcess(command, 1)

    monkeypatch.setattr(reproduce.subprocess, "run", call)
    monkeypatch.setattr(reproduce, "device_of", lambda flag, is_tiny: device)
    with pytest.raises(UserError, match="training failed"):
        reproduce.measure_cell(Cell(HEADLINE, "vpo", 0), STORE)
    assert ("--sampling-batch" in commands[0]) == (device == "cuda")


def test_a_cell_is_measured_once_and_kept(small):
    """The stored numbers are those of eval.py to a thousandth."""
    assert not STORE.current([small])
    reproduce.measure_cell(small, STORE)
    record = STORE.current([small])[small]
    assert list(record["at"]) == ["0.7", "1", "1.3"]
    assert list(record["at"]["0.7"]) == ["start", "start_sets", "grpo"]
    assert record["threads"] and record["date"] and record["tokens"] and record["steps"] == 2
    assert record["version"] == VERSION and record["groups"] == [0, 1, 2]
    before = STORE.path(small).read_bytes()
    reproduce.measure_cell(small, STORE)  # evaluated again, trained no more
    again = STORE.current([small])[small]
    assert again["at"] == record["at"] and len(before) < 5000
    data = TaskResults("maze", [result_of(small, record)])
    evaluation.main([str(STORE.runs / small.name), "--problems", "3"])
    report = json.loads(next(Path("runs").rglob("eval.json")).read_text())["policies"]
    for measure in ("best@1", "best@30", "pass@30", "W@30", "diversity"):
        ours = data.mean(Entry("start"), measure)
        assert ours == pytest.approx(report["start"][measure]["mean"], abs=1e-3)


def test_writers_that_store_at_once_lose_nothing(tmp_path):
    """Four threads store ten cells each in one file; each opens the lock for itself, as a process does."""
    methods = ("grpo", "vpo", "max_at_k", "group_vpo")

    def store_ten(method: str) -> None:
        for seed in range(10):
            Store(tmp_path).add(Cell("toy", method, seed), {"seed": seed})

    with ThreadPoolExecutor(4) as threads:
        list(threads.map(store_ten, methods))
    grid = [Cell("toy", method, seed) for method in methods for seed in range(10)]
    records = Store(tmp_path).read(tmp_path / "toy.json.gz")
    assert [records[cell.name]["seed"] for cell in grid] == [cell.seed for cell in grid]
    assert {path.name for path in tmp_path.iterdir()} == {"lock", "toy.json.gz"}


@pytest.fixture
def failing_grid(monkeypatch):
    """An empty folder in which every cell but those of Max@K is measured at once."""

    def call(command, **rest):
        cell = next(cell for cell in cells() if cell.name == command[-1])
        has_failed = "max_at_k" in cell.name
        if not has_failed:
            STORE.add(cell, {"command": cell.command})
        return subprocess.CompletedProcess(command, int(has_failed))

    monkeypatch.setattr(reproduce.subprocess, "run", call)


def test_a_cell_that_fails_does_not_stop_the_others(failing_grid, capsys):
    """It is named with its log; what was stored stays; the next call tries it alone."""
    with pytest.raises(SystemExit) as stop:
        reproduce.main(["--only", "toy-", "--jobs", "1"])
    printed = capsys.readouterr()
    assert stop.value.code == 2 and "5 cells failed" in printed.err
    assert "toy-max_at_k-seed0  FAILED, see runs/reproduce/toy-max_at_k-seed0.log" in printed.out
    reproduce.main(["--only", "toy-", "--list"])
    assert [line.split()[0] for line in capsys.readouterr().out.splitlines()].count("missing") == 5


def test_a_list_names_all_cells_and_a_bare_command_trains_no_real_model():
    """The error of an unknown --only points to --list."""
    listed = reproduce.grid_of(reproduce.ReproduceFlags(list=True))
    trained = reproduce.grid_of(reproduce.ReproduceFlags())
    assert listed == cells()
    assert trained == [cell for cell in cells() if cell.task not in HEADLINES]


def result(task: str, policy: Entry, seed: int, **values: object) -> Result:
    """A result with made-up defaults for what a test does not look at."""
    defaults = {
        "version": VERSION,
        "tuning": False,
        "measures": {},
        "prompt_ids": None,
        "training": {},
        "tokens": 1000,
        "step_seconds": 0.5,
        "answers": {},
    }
    return Result(task, policy, seed, **(defaults | values))


def record_of(cell: Cell, score: int, version: int) -> dict:
    """A record with one number for every measure, in thousandths."""
    values = dict.fromkeys(("best@1", "best@30", "W@30", "diversity"), [score] * 3)
    policies = {cell.method: values | {"passed": [0] * 3}}
    record = {"command": cell.command, "version": version, "size": 30, "steps": 2, "tokens": 10}
    temperatures = dict.fromkeys(("0.7", "1"), policies)
    return record | {"seconds": {"training": 1.0}, "training": {}, "at": temperatures}


def test_differences_are_paired():
    """A constant gain on problems that differ a lot: the interval is narrow, though those of the means overlap."""
    values = (1000 * torch.rand(50, generator=torch.Generator().manual_seed(0))).round()
    data = []
    for method, gain in (("vpo", 20), ("grpo", 0)):
        for seed in range(3):
            thousandths = (values + gain + seed).long().tolist()
            stored_values = {"best@1": thousandths, "passed": [3] * 50}
            at = {method: store.measures_of(stored_values, 30, tuning=False)}
            measures = {"0.7": at, "1": at}
            data.append(result("maze", Entry(method), seed, measures=measures))
    data = TaskResults("maze", data)
    vpo = Entry("vpo")
    difference = data.difference(vpo, Entry("grpo"), "best@1")
    close = pytest.approx(0.02)
    assert difference == Difference(close, close, close, pytest.approx(0, abs=1e-6), n_seeds=3)
    assert difference.firm
    assert data.mean(vpo, "pass@30") == 1
    assert data.mean(vpo, "pass@1") == pytest.approx(0.1)


def test_each_policy_is_compared_at_its_best_temperature():
    """VPO is best at 1 and GRPO at 1.3: neither the same temperature for both nor 0.7 gives this lead."""
    runs = []
    for policy, scores in ((VPO, (0.5, 0.8, 0.1)), (GRPO, (0.4, 0.2, 0.6))):
        for seed in range(2):
            measures = {}
            for temperature, score in zip(stored.TEMPERATURES, scores, strict=True):
                measures[temperature] = {policy.method: {"W@30": torch.full((4,), score).double()}}
            runs.append(result(HEADLINE, policy, seed, measures=measures))
    task = TaskResults(HEADLINE, runs)
    lead = tables.lead_of(tables.Column(task, "W@30", tables.BEST), (VPO, GRPO))
    assert lead.mean == pytest.approx(0.8 - 0.6) and lead.n_seeds == 2


@pytest.mark.parametrize(("n", "t", "p"), [(3, 4.303, 0.05), (5, 2.776, 0.05), (5, 4.604, 0.01)])
def test_the_t_test_has_the_values_of_the_printed_tables(n, t, p):
    """Critical values of Student's distribution with n - 1 degrees of freedom."""
    values = torch.linspace(-1, 1, n).double()
    values = values / (values.std() / n**0.5) + t  # a standard error of 1 and a mean of t
    assert t_test(values) == pytest.approx(p, abs=2e-4)
    assert t_test(-values) == pytest.approx(p, abs=2e-4)


def test_a_difference_is_firm_only_if_the_t_test_says_so_too():
    """Three seeds whose differences vary: the bootstrap of few seeds is too narrow, t is not."""
    assert Difference(0.02, 0.01, 0.03, p=0.04, n_seeds=3).firm
    assert not Difference(0.02, 0.01, 0.03, p=0.06, n_seeds=3).firm
    assert not Difference(0.02, -0.01, 0.05, p=0.01, n_seeds=5).firm
    assert not Difference(0.02, 0.01, 0.03, p=0.01, n_seeds=2).firm
    assert t_test(torch.tensor([0.3])) == 1
    assert str(Difference(0.02, 0.01, 0.03, p=0.04, n_seeds=5)) == "**+0.020 [+0.010, +0.030]**"
    assert str(Difference(0.02, 0.01, 0.03, p=0.06, n_seeds=5)) == "+0.020 [+0.010, +0.030]"


def test_what_neither_grpo_nor_the_start_solves():
    """GRPO's second run solves problem 3, its start problem 1: that leaves less, most of all beside all runs."""
    found = {
        "start": [{"solved": [0, 0, 0]}, {"solved": [9, 0, 0]}],
        "vpo": [{"solved": [4, 4, 4]}] * 2,
        "grpo": [{"solved": [0, 0, 0]}, {"solved": [0, 0, 1]}],
    }
    alone = searches.counts_alone
    assert alone(found, ("vpo",), ("grpo", "start")) == [3, 1]
    assert alone(found, ("grpo",), ("grpo", "start")) == [0, 0]
    assert tables.counts_of_other_runs(found, ("grpo",)) == [1, 0]  # what chance gives


def test_the_page_of_headlines_shows_the_training_from_its_start(tmp_path):
    """Step 0 is the start model; then come the stored answers, with rewards that are computed anew."""
    store = Store(tmp_path)
    texts = [["fire at the station"] * 5] * 4
    sets = [["Market fire", None, "fire", "A teacher saw rain", "no"]] * 4
    during = {1: sets, 11: texts}
    for cell in exhibit.cells_shown():
        record = record_of(cell, 500, VERSION)
        record["training"] = {"diversity": [1.0, 0.5], "reward": [0.1, 0.4]}
        record["answers"] = {"start": texts, "start_sets": sets}
        store.add(cell, record | {"during": during})
    snapshots = exhibit.snapshots_of(store)
    assert [frame.step for frame in snapshots.frames] == [0, 1, 11]
    assert snapshots.frames[0].pools["vpo"][0]["answers"] == sets[0]
    assert snapshots.frames[0].pools["grpo"][0]["answers"] == texts[0]
    assert len(snapshots.problems) == len(exhibit.TEXTS) and snapshots.config.m == 3
    for pool in snapshots.frames[2].pools.values():
        for problem, record in zip(snapshots.problems, pool, strict=True):
            expected = snapshots.task.reward(problem, "fire at the station")
            assert record["rewards"] == [expected] * 5
    exhibit.write_exhibit(store, tmp_path / "page.html")
    assert "fire at the station" in (tmp_path / "page.html").read_text()
