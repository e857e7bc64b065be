"""Snapshots, the page and the film."""

import re
import shutil
from pathlib import Path

import pytest
import torch
from helpers import data_of, fails, made_snapshots
from PIL import Image

import train
import vpo
from engine.config import Config
from engine.files import read_log
from engine.runs import load_run
from engine.tasks import held_out, load_task
from engine.training.logs import snapshot_steps
from engine.training.start import load_start
from eval import sample_pool
from report import page
from report.__main__ import main
from report.looks import look_of


def test_training_is_the_same_with_and_without_snapshots(toy_run):
    """Guards against a snapshot that draws from training's random numbers, and one that a resume keeps twice."""
    log = Path("run/vpo/snapshots.jsonl")
    weights = Path("run/vpo/checkpoint-000004/model.safetensors")
    whole = [log.read_bytes(), weights.read_bytes()]
    for n, lost in (("0", "*"), ("20", "*"), ("20", "000004")):
        for checkpoint in Path("run/vpo").glob(f"checkpoint-{lost}"):
            shutil.rmtree(checkpoint)
        with log.open("a", encoding="utf-8") as file:
            file.write('{"step": 9, "prob')
        resume = ["--out", "run", "--resume", "--eval-problems", "0", "--snapshots", n]
        train.main(resume)
        expected = whole if n == "20" else [b"", whole[1]]
        assert [log.read_bytes(), weights.read_bytes()] == expected


def test_snapshots_are_evenly_spaced_from_the_start_at_least_six_steps_apart():
    for steps, n, expected in ((200, 3, [0, 100, 200]), (24, 20, [0, 8, 16, 24]), (1, 20, [0, 1])):
        assert sorted(snapshot_steps(Config(steps=steps, snapshots=n))) == expected


def test_the_page_of_a_run(toy_run, capsys):
    """The answers of a real run, and the rewards that its task gives them; set rewards and advantages as of vpo.py. A line
    that a kill cut off counts as missing, and only steps that all methods share are shown."""
    capsys.readouterr()
    main(["page", "run"])
    assert capsys.readouterr().out == "written: run/report.html\n"
    data = data_of(Path("run/report.html"))
    assert data["steps"] == [0, 4]
    assert [method["title"] for method in data["methods"]] == ["GRPO", "VPO"]
    assert len(data["problems"]) == 1, "the toy's one problem is not offered four times"
    (problem,) = data["problems"]
    log = toy_run / "vpo/snapshots.jsonl"
    records = read_log(log)
    task = load_task("toy")
    config = load_run(Path("run")).config
    policy = load_start("run/start", task)
    pool = sample_pool(policy, task, held_out(task, "test", 4), config, 2, min(30, config.pool))
    assert [shown["answers"] for shown in records[0]["problems"]] == pool.answers
    record = records[-1]["problems"][0]
    pool = problem["pools"][-1]["vpo"]
    assert [problem["answers"][n] for n in pool["answers"]] == record["answers"]
    rewards = [problem["vectors"][n] for n in pool["answers"]]
    for answer, vector in zip(record["answers"], rewards, strict=True):
        expected = [0.0] * 3 if answer is None else task.reward(None, answer)
        assert vector == pytest.approx(expected, abs=1e-6)
    assert "R" not in problem["pools"][-1]["grpo"]
    sets = torch.tensor(rewards).view(1, 2, 2, 3)
    weights = vpo.sample_weights(1, 100, 3, generator=torch.Generator().manual_seed(0))
    R = vpo.set_reward(sets, weights)  # an empty slot has rewards of 0
    assert pool["R"] == pytest.approx(R[0].tolist(), abs=1e-4)
    assert pool["A"] == pytest.approx(vpo.group_normalize(R)[0].tolist(), abs=1e-3)

    first, _, _ = log.read_text("utf-8").partition("\n")
    log.write_text(first + '\n{"step": 4, "prob', "utf-8")
    main(["page", "run"])
    assert data_of(Path("run/report.html"))["steps"] == [0]


@pytest.mark.parametrize("task", ["maze", "prose"])
def test_the_page_opens_where_the_methods_differ_most(task, tmp_path):
    """At the end. Guards against a problem in which they do not."""
    snapshots = made_snapshots(task)
    record = snapshots.frames[-1].pools["grpo"][2]
    record["rewards"] = [[-2.0] * len(vector) for vector in record["rewards"]]
    page.write_page(tmp_path / "report.html", snapshots)
    assert data_of(tmp_path / "report.html")["opens"] == 2


def test_a_long_page_leaves_out_frames(tmp_path, monkeypatch):
    snapshots = made_snapshots("maze", steps=10)
    page.write_page(tmp_path / "whole.html", snapshots)
    monkeypatch.setattr(page, "MAX_BYTES", len((tmp_path / "whole.html").read_text("utf-8")) - 1)
    page.write_page(tmp_path / "half.html", snapshots)
    assert data_of(tmp_path / "half.html")["steps"] == [1, 21, 41, 61, 81, 91]


@pytest.mark.draws
def test_the_film(tmp_path, monkeypatch):
    snapshots = made_snapshots("fence", size=10, steps=3)
    path = tmp_path / "film.gif"
    page.write_film(path, snapshots)
    with Image.open(path) as film:
        assert film.n_frames == 3 and path.stat().st_size < 2_000_000
    monkeypatch.setattr(page, "MAX_BYTES", path.stat().st_size - 1)
    page.write_film(path, snapshots)
    with Image.open(path) as film:
        assert film.n_frames == 2


def test_the_legend_the_paint_and_the_colors_of_words_are_the_tasks_own(tmp_path):
    """Guards against another task's legend, "red" that becomes a square, and a color for a headline without reward."""
    data = {}
    for name in ("fence", "prose", "headline"):
        page.write_page(tmp_path / f"{name}.html", made_snapshots(name))
        data[name] = data_of(tmp_path / f"{name}.html")
    assert [own["paints"] for own in data.values()] == [True, False, False]
    assert [own["marks"] for own in data.values()] == [False, False, True]
    assert data["fence"]["legend"] and data["headline"]["legend"] and not data["prose"]["legend"]
    for problem in data["headline"]["problems"]:
        answers = zip(problem["answers"], problem["vectors"], problem["marks"], strict=True)
        for text, vector, marks in answers:
            assert len(marks) == sum(vector)
            assert set(marks) <= set((text or "").split())


def test_what_is_missing_is_named(toy_run, capsys):
    """A run without snapshots, a task that draws nothing, two runs of one name."""
    for name in ("one/run", "two/run"):
        shutil.copytree(toy_run, name)
    for log in toy_run.rglob("snapshots.jsonl"):
        log.unlink()
    for command in ("page", "film"):
        fails([command, "run"], capsys, "run: no snapshots; training with", command=main)
    fails(["film", "one/run"], capsys, "film: task toy draws no answers", command=main)
    fails(["run"], capsys, "run: must be one of page, film, geometry", command=main)
    twice = ["page", "one/run", "two/run", "--out", "pages"]
    fails(twice, capsys, "and two have one name", command=main)
    shutil.copytree("one/run", "other")
    shutil.rmtree("one/run/grpo")
    main(["page", "one/run", "other", "--out", "pages"])
    methods = data_of(Path("pages/run/report.html"))["methods"]
    assert [method["name"] for method in methods] == ["vpo"]
    assert len(data_of(Path("pages/other/report.html"))["methods"]) == 2


def test_a_task_and_a_method_of_ones_own_have_a_page(tmp_path, monkeypatch):
    """Guards against views that look methods up among ours, and take any `walk` for a maze's."""
    snapshots = made_snapshots("prose")
    snapshots.metrics = {"my_method": snapshots.metrics["grpo"]}
    for frame in snapshots.frames:
        frame.pools = {"my_method": frame.pools["grpo"]}
    monkeypatch.setattr(snapshots.config, "model", "/home/ann/model")
    page.write_page(tmp_path / "report.html", snapshots)
    data = data_of(tmp_path / "report.html")
    assert data["model"] == "model", "the page names no path of this machine"
    assert data["methods"][0]["color"] == look_of("my_method").color
    pool = data["problems"][0]["pools"][0]["my_method"]
    assert "R" not in pool and data["problems"][0]["grid"] is None
    assert re.fullmatch(r"best of 30 for each objective: -?\d\.\d\d", pool["summary"])
