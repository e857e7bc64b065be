"""The new study: its cells, what is stored of a run, and the words and tables that follow from records."""

import sys
from pathlib import Path
from unittest.mock import Mock

import pytest
import torch
from helpers import fails

import fast.update
import train
from engine.config import Config, Parser
from engine.files import owned
from study import estimates, figures, reproduce, tables, variants
from study.grid import KL, KL_WEIGHTS, SETTINGS, VERSION, Cell, cells
from study.results import SIX, Results, solved_in_search
from study.store import RESULTS, Store
from vpo import ADVANTAGES

SMALL = "--size 5 --warm-steps 3 --steps 2 --prompts-per-step 1 --group-size 4"


def record_of(cell: Cell) -> dict:
    """A made-up record with 6 problems, in which policies differ in their means."""
    values = 400 + 20 * len(cell.policy) + torch.arange(6) + cell.seed
    measured = dict.fromkeys(tables.MEANS, values.double().mean().item() / 1000)
    found = {}
    for name in (cell.method, "start", "start_sets") if cell.policy == "grpo" else (cell.method,):
        found[name] = {}
        for setting in cell.settings(name):
            per_problem = [f"{measure} of each" for measure in SETTINGS[setting].per_problem]
            found[name][setting] = measured | dict.fromkeys(per_problem, values.tolist())
    record = {"version": f"{VERSION}.0", "command": cell.shown_command, "machine": "CPU"}
    record |= {"tokens": 100 + cell.seed, "seconds": {"cpu": 1.0}, "policies": found}
    return record | {"training": {"diversity": [1.0, 0.4]}}


SOLVED = {"grpo": torch.eye(3, 4) > 0, "vpo": torch.ones(3, 4) > 0}  # in the search
ALL = Results({cell: record_of(cell) for cell in cells()}, SOLVED)


def test_the_grid_is_sound():
    """Distinct names; every command is one that train.py takes; pages compare what is trained."""
    grid = cells()
    assert len({cell.name for cell in grid}) == len(grid) == 382
    for cell in grid:
        config = Parser(Config, "train.py", "").parse_args_into_dataclass(cell.command())[0]
        assert config.method == [cell.method] and cell.method in ADVANTAGES
        assert cell.kl_term in ("", *variants.TERMS)
    for row in (*tables.CURES, *tables.ABLATION, *tables.SETTINGS_OF_METHODS):
        assert {name.partition("@")[0] for name in row} <= {cell.policy for cell in grid}


def test_a_cell_is_measured_anew_to_the_digit(monkeypatch, tmp_path, capsys):
    """What a stop leaves behind is no matter, a failure names its log, and the other cells are stored."""
    usual = Cell.command
    monkeypatch.setattr(Cell, "command", lambda cell, model="": usual(cell) + SMALL.split())
    monkeypatch.setattr(Cell, "problems", property(lambda cell: ("test", 3)))
    monkeypatch.setattr("study.grid.SHOWN", ["maze-grpo-seed0"])
    reproduce.RUNS.mkdir(parents=True)
    found = []
    for name in ("maze-grpo-seed0", "maze-grpo-kl-k2-seed0", "maze-grpo-seed0"):
        (cell,) = [cell for cell in cells() if cell.name == name]
        assert not reproduce.run_cell(cell, Store(tmp_path), "")
        record = Store(tmp_path).records()[cell]
        found.append([record["policies"], record["training"], record["tokens"]])
    assert found[0] == found[2] != found[1] and len(found[0][0]["grpo"]["0.7"]["candidates"]) == 3
    assert len(found[0][0]["start"]["0.7"]["W@30 of each"]) == 3
    assert [*found[0][0], *found[0][0]["grpo"]] == ["grpo", "start", "start_sets", *SETTINGS]
    with owned(reproduce.RUNS / cell.name):  # another command trains it
        assert reproduce.run_cell(cell, Store(tmp_path), "")
    monkeypatch.setattr(train, "main", lambda command: 1 / 0)
    assert reproduce.run_cell(cell, Store(tmp_path), "")
    assert f"FAILED, see {reproduce.RUNS / cell.name}.log" in capsys.readouterr().out


def test_a_record_that_is_no_use_is_left_out_with_a_line(tmp_path, capsys):
    store, grid = Store(tmp_path), cells()[:4]
    changes = ({}, {"version": "2.9"}, {"command": "python train.py"}, {})
    for cell, change in zip(grid, changes, strict=True):
        store.add(cell, record_of(cell) | change)
    whole = store.path(grid[0]).read_bytes()
    store.path(grid[0]).write_bytes(whole[:200])
    (tmp_path / "maze-foo-seed0.json.gz").write_bytes(whole)
    assert list(store.records()) == grid[3:]
    told = capsys.readouterr().err
    for part in ("cannot be read", "of version", "of the command", "no such cell"):
        assert told.count(part) == 1
    store.add(grid[3], record_of(grid[3]) | {"policies": {}})
    assert not store.records()
    store.add(grid[0], record_of(grid[0]))
    assert store.path(grid[0]).read_bytes() == whole  # equal numbers, equal bytes


def test_other_kl_terms_change_the_gradient_of_the_kl_term_alone():
    """veRL's has none for a token that is rarer than in the reference by more than 13.6; k2's is log(policy / ref)."""
    gradients = []
    ref, mask = torch.tensor([[-1.5, -3.0, -2.5]]), torch.tensor([[True, True, False]])
    for name in ("", "clamped", "k2"):
        new = torch.tensor([[-1.0, -6.0, -2.0]], requires_grad=True)
        batch = (new, new.detach(), torch.zeros(1), mask, 2)
        with variants.kl_term(name):
            loss, _ = train.policy_loss(*batch, ref_logprobs=ref, kl_coef=1.0)
            assert fast.update.policy_loss is train.policy_loss
        gradients.append(2 * torch.autograd.grad(loss, new)[0][0])
    usual, clamped, k2 = gradients
    assert usual[1] < -10 and clamped.tolist() == pytest.approx([usual[0].item(), 0, 0])
    assert k2.tolist() == pytest.approx([0.5, -3.0, 0])


def test_intervals_cover_seeds_and_problems_and_words_need_holms_correction():
    """One value per seed: Student's; seeds that agree: the bootstrap's. Of eight differences p = 0.01 does not survive."""
    seeds = estimates.estimate(torch.tensor([[1.0], [2.0], [3.0]]))
    assert (seeds.half, seeds.p) == pytest.approx((2.484, 0.0742), abs=1e-3)
    problems = estimates.estimate(torch.arange(100.0).expand(4, 100))
    assert problems.half == pytest.approx(1.96 * torch.arange(100.0).std().item() / 10, rel=0.1)
    weak = estimates.Estimate(0.05, 0.01, 0.09, 0.01)
    two = [estimates.Estimate(-0.2, -0.3, -0.1, 1e-6), estimates.Estimate(0.01, 0.005, 0.015, 1e-6)]
    words = estimates.words(dict(enumerate([*two, *[weak] * 8])))
    assert [words[i] for i in (0, 1, 2)] == ["behind", "equal", "open"]
    assert estimates.words({0: weak}) == {0: "ahead"}


@pytest.mark.draws
def test_tables_and_figures_are_made_of_records():
    for block in tables.BLOCKS:
        assert "OLD" not in tables.fill(ALL, f"<!-- study:{block} -->\nOLD\n<!-- end -->")
    assert ALL.average("maze", "vpo", "W@30") == pytest.approx(0.46 + 0.0025 + 0.0055)
    assert "| 0.468 |" in tables.main_table(ALL)
    assert "| VPO | 1.000 | +0.750 [+0.500, +1.000] | 3, 3, 3 |" in tables.search(ALL)
    assert "less chance: +2.000 [+2.000, +2.000]" in tables.claim_table(ALL)
    assert ALL.seeds("code", *SIX) == list(range(8))
    assert len(tables.runs_csv(ALL).splitlines()) > len(cells())
    for draw in (figures.intervals, figures.curves, figures.mixing):
        draw(ALL, Path(f"{draw.__name__}.png"))
        assert Path(f"{draw.__name__}.png").stat().st_size


def test_documents_and_kl_weights_follow_from_the_stored_records():
    stored = Results(Store(RESULTS).records(), solved_in_search())
    sums = {}
    for cell in filter(lambda cell: cell.is_validation, stored.records):
        means = stored.records[cell]["policies"]["grpo"]["0.7"]
        of_task = sums.setdefault(cell.task, dict.fromkeys(KL_WEIGHTS, 0.0))
        of_task[dict(cell.flags)["kl"]] += means["best@1"] + means["W@30"]
    assert {task: max(own, key=own.get) for task, own in sums.items()}.items() <= KL.items()
    for path in tables.documents():
        text = path.read_text("utf-8")
        assert tables.fill(stored, text) == text, f"{path}; run: reproduce.py --write"


@pytest.mark.parametrize("ours, theirs, measure, words", [  # of maze, code, headline and fence
    ("vpo", "grpo", "best@1", ["behind", "behind", "open"]),
    ("vpo", "grpo", "W@30", ["ahead", "ahead", "ahead", "ahead"]),
    ("vpo", "grpo-kl", "W@30", ["ahead", "equal", "open", "ahead"]),
    ("vpo", "max_at_k", "best@1", ["behind", "behind", "open"]),
    ("vpo", "max_at_k", "W@30", ["open", "equal", "open", "ahead"]),
    ("group_vpo", "max_at_k", "W@30", ["ahead", "ahead", "open", "ahead"]),
    ("grpo-kl-clamped", "grpo-kl0.1", "W@30", ["behind", "open"]),
    ("vpo-rate-of-grpo", "grpo", "best@1", ["behind", "behind"]),
    ("grpo-tenth-rate", "grpo", "best@1", ["behind", "behind"]),
    ("grpo-tenth-rate", "grpo", "W@30", ["ahead", "ahead"]),
])  # fmt: skip
def test_the_sentences_of_the_readme_follow_from_the_records(ours, theirs, measure, words):
    stored = Results(Store(RESULTS).records(), {})
    pairs = tables.CONTRASTS if (ours, theirs) in tables.CONTRASTS else tables.CURES
    judged = [stored.judged(task, pairs) for task in (*tables.TASKS, "fence")[: len(words)]]
    assert [of_task[(ours, theirs), measure] for of_task in judged] == words


def test_mistakes_of_the_command_are_one_line(monkeypatch, capsys, tmp_path):
    monkeypatch.setattr("study.results.SEARCH", tmp_path / "search.json")
    for text in ('{"policies": {"grpo": [', "[]", '{"policies": {}}'):
        (tmp_path / "search.json").write_text(text, "utf-8")
        fails(["--write"], capsys, "search.json: cannot be read", command=reproduce.main)
    fails(["--write", "--out", "."], capsys, "382 cells are not stored", command=reproduce.main)
    monkeypatch.setattr("tempfile.TemporaryFile", Mock(side_effect=PermissionError(13, "refused")))
    fails(["--only", "toy", "--out", "o"], capsys, "o: cannot be written", command=reproduce.main)
    monkeypatch.setitem(sys.modules, "scipy", None)
    told = {"--only no": "no chosen cell has such a name", "--block no": "choose from kl-weight"}
    told |= {"--list --out no": "--out no: no such folder"}
    for flags, text in (told | {"--write": "pip install -r study/requirements.txt"}).items():
        fails(flags.split(), capsys, text, command=reproduce.main)
