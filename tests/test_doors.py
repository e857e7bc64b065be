"""The doors of both commands: a mistake gets one line and exit code 2, nothing is lost, nothing changed."""

import dataclasses
import errno
import fcntl
import json
import os
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from test_train import ROOT, fails, in_an_empty_folder, metrics  # noqa: F401 - the fixture applies by its name

import eval as evaluation
import train
import vpo
from engine import prepare, warmup
from engine.config import Config, Parser, add_flags
from engine.models import load_policy, save_policy
from engine.run_folder import checksum_of, load_run
from report.statistics import bootstrap_interval
from report.style import Entry
from rollout import score
from tasks import load_task

TOY = shlex.split(
    "--task toy --method grpo vpo --m 2 --warm-steps 4 --steps 2 --group-size 2 --prompts-per-step 2 "
    "--eval-problems 2 --pool 4 --save-every 1 --device cpu"
)
FENCE = """
from rewards import Problem, Task

class Fence(Task):
    name, objectives, words, answer_words, steps = "fence", ("a", "b"), ("red", "green"), 2, 2
    def problems(self, split, n, seed=0, start=0): return [Problem(f"{split}-{start + i}", None) for i in range(n)]
    def prompt(self, problem, m): return "paint"
    def tiny_prompt(self, problem): return "red"
    def reward(self, problem, answer): return [float("red" in answer), float("green" in answer)]
    def demonstration(self, problem, rng): return rng.choice(self.words)
"""


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A finished run of the toy, to be copied."""
    folder = tmp_path_factory.mktemp("trained")
    before = os.getcwd()
    os.chdir(folder)
    train.main(["--out", "run", *TOY])
    os.chdir(before)
    return folder / "run"


@pytest.fixture
def run(trained):
    """A copy of it as ./run."""
    shutil.copytree(trained, "run")
    return Path("run")


def files(folder: Path) -> dict[str, bytes]:
    """Everything below a folder but the lock."""
    return {
        str(path): path.read_bytes()
        for path in folder.rglob("*")
        if path.is_file() and path.name != "lock"
    }


def test_a_changed_task_is_noticed_and_can_be_accepted(capsys):
    Path("fence.py").write_text(FENCE)
    own = [*TOY, "--task", "fence.py", "--out", "run", "--method", "vpo"]
    train.main(own)
    Path("fence.py").write_text(FENCE + "\n# a comment changes nothing\n")
    evaluation.main(["run"])
    changed = FENCE.replace('float("red" in answer)', 'float("red" == answer) / 2')
    assert changed != FENCE
    Path("fence.py").write_text(changed)
    for command, arguments in (
        (train.main, ["--resume", "--out", "run"]),
        (evaluation.main, ["run"]),
        (train.main, ["--out", "run", "--method", "grpo"]),
    ):
        message = "--task fence.py: the rewards have changed since the run began"
        fails(arguments, capsys, message, "--resume --changed-task --out run", command=command)
    train.main(["--resume", "--changed-task", "--out", "run"])
    assert (
        "--changed-task"
        in json.loads(Path("run/config.json").read_text())["history"][-1]["command"]
    )
    evaluation.main(["run"])


def test_a_refused_command_changes_nothing(run, capsys):
    """Whatever is refused, and whenever: no folder, no config, no file of the run is touched."""
    before = files(run)
    fails(
        ["--out", "run", "--task", "toy", "--method", "multi_rlvr", "--lr", "0.5"],
        capsys,
        "with --lr 0.00025, not --lr 0.5",
        "take another --out",
    )
    fails(["--out", "run", "--task", "toy"], capsys, "already holds grpo, vpo", "--out run-2")
    fails(["--out", "run", "--resume", "--m", "3"], capsys, "with --m 2, not --m 3")
    fails(["--out", "new", *TOY, "--max-new-tokens", "4000"], capsys, "need a context")
    fails(
        ["--out", "new", *TOY, "--model", "run"], capsys, "--model run: no Hugging Face checkpoint"
    )
    fails(["--out", "run/config.json", *TOY], capsys, "--out run/config.json", "take another name")
    assert files(run) == before and not Path("new").exists()


def test_two_commands_in_one_new_folder_do_not_mix(capsys):
    """The one that comes second is refused before it writes a flag."""
    Path("run").mkdir()
    with Path("run/lock").open("a") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        fails(["--out", "run", *TOY], capsys, "another train.py is writing to it")
        assert [path.name for path in Path("run").iterdir()] == ["lock"]


def test_a_run_that_was_written_to_meanwhile_is_read_again(capsys, monkeypatch):
    """Between reading the folder and locking it another command may have come and gone."""
    start_model = train.start_model

    def slow(*args):
        monkeypatch.setattr(train, "start_model", start_model)
        train.main(["--out", "run", *TOY, "--seed", "1"])
        return start_model(*args)

    monkeypatch.setattr(train, "start_model", slow)
    fails(["--out", "run", *TOY], capsys, "another train.py has just written to it")
    assert json.loads(Path("run/config.json").read_text())["flags"]["seed"] == 1


def test_a_crash_before_the_first_checkpoint_leaves_the_folder_reusable(capsys, monkeypatch):
    step = train.train_step

    def fail(*args):
        raise RuntimeError("boom")

    monkeypatch.setattr(train, "train_step", fail)
    with pytest.raises(RuntimeError, match="boom"):
        train.main(["--out", "run", *TOY, "--jobs", "1"])
    monkeypatch.setattr(train, "train_step", step)
    train.main(["--out", "run", *TOY, "--lr", "0.001"])
    assert json.loads(Path("run/config.json").read_text())["flags"]["lr"] == 0.001
    assert len(metrics(Path("run/vpo"))) == 2


def test_a_run_that_has_just_saved_is_not_replaced(run, capsys, monkeypatch):
    """Guards against a race: read while nothing was saved, locked after the first checkpoint was."""
    early = dataclasses.replace(load_run(run), has_checkpoint=False)
    monkeypatch.setattr(prepare, "find_run", lambda out: early)
    fails(["--out", "run", *TOY], capsys, "another train.py has just written to it")
    assert (run / "vpo/checkpoint-000002").exists() and (run / "start").exists()


def test_the_minimum_of_a_task_reaches_rewards_and_advantages(monkeypatch):
    """Guards against an empty rollout that beats real answers where rewards are negative."""
    Path("fence.py").write_text(
        FENCE.replace('steps = "fence"', 'steps, minimum = "fence"')
        .replace("2, 2\n", "2, 2, -1.0\n")
        .replace("float(", "-1.0 + float(")
    )
    task = load_task("fence.py")
    scored = score(task, task.problems("train", 1), [["red"], []], 2)
    assert scored.vectors.tolist() == [[[[0, -1], [-1, -1]], [[-1, -1], [-1, -1]]]]
    assert scored.scalars.tolist() == [[[-0.5, -1], [-1, -1]]]
    advantage = vpo.ADVANTAGES["vpo"]
    minima = []

    def record(*args, **options):
        minima.append(options["missing_answer_reward"])
        return advantage(*args, **options)

    monkeypatch.setitem(train.ADVANTAGES, "vpo", record)
    train.main([*TOY, "--task", "fence.py", "--method", "vpo", "--eval-problems", "0"])
    assert minima == [-1.0, -1.0]


def test_evaluations_do_not_overwrite_one_another(run, capsys):
    """Other settings, or --out: the run's own table and figures stay."""
    before = files(run)
    evaluation.main(["run", "--split", "validation", "--problems", "3", "--figure-format", "svg"])
    assert Path("run/eval-validation-3x4-T0.7/best_at_k.svg").exists()
    evaluation.main(["run", "--out", "elsewhere"])
    assert json.loads(Path("elsewhere/eval.json").read_text()) == json.loads(
        before["run/eval.json"]
    )
    assert {name: data for name, data in files(run).items() if "eval-" not in name} == before
    fails(["run", "./run"], capsys, "names a run twice", command=evaluation.main)


def test_a_read_only_run_is_evaluated(run, capsys, monkeypatch):
    """The table comes first; then the file, the reason and --out."""

    def fail(path, text):
        raise OSError(errno.EROFS, os.strerror(errno.EROFS), str(path))

    monkeypatch.setattr("report.evaluation.write_text", fail)
    capsys.readouterr()
    with pytest.raises(SystemExit) as stop:
        evaluation.main(["run"])
    out, err = capsys.readouterr()
    assert stop.value.code == 2
    assert "VPO" in out
    assert "Read-only" in err and "--out" in err.splitlines()[-1]


def test_a_full_disk_is_named_and_leaves_nothing_half(capsys, monkeypatch):
    def fail(*args, **kwargs):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(torch, "save", fail)
    fails(
        ["--out", "run", *TOY],
        capsys,
        "grpo, step 1",
        "checkpoint-000001: cannot be written",
        "No space left",
    )
    assert not list(Path("run").rglob("*.tmp*")) and not list(Path("run/grpo").glob("checkpoint-*"))


def test_a_full_disk_is_named_in_the_warm_up(capsys, monkeypatch):
    """torch.save leaves a part of the file and raises an error of its own."""

    def fail(state, path):
        Path(path).write_bytes(b"a part")
        raise RuntimeError(
            "[enforce fail at inline_container.cc] . unexpected pos 122624 vs 122518"
        )

    monkeypatch.setattr(torch, "save", fail)
    monkeypatch.setattr(warmup, "PARTIAL_EVERY", 0)
    fails(["--out", "run", *TOY], capsys, ".partial: cannot be written", "make room")
    assert not list(Path("runs").rglob("*.tmp*")) and not Path("run/start").exists()


def test_a_drawing_that_raises_comes_after_the_table(capsys):
    Path("fence.py").write_text(
        FENCE + "    def draw(self, axes, problem, answers, color): return 1 / 0\n"
    )
    fails(
        [*TOY, "--task", "fence.py", "--out", "run"],
        capsys,
        "task fence: draw of problem",
        "ZeroDivisionError",
    )
    assert Path("run/eval.json").exists() and Path("run/best_at_k.png").exists()


def test_a_lost_or_damaged_start_costs_no_trained_method(run, capsys):
    path = run / "start" / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-1] + b"x")
    for arguments in (
        ["--out", "run", "--method", "multi_rlvr", "--task", "toy"],
        ["--out", "run", "--resume"],
    ):
        fails(arguments, capsys, f"{path}: missing or damaged; restore it")
    shutil.rmtree(run / "start")
    fails(["--out", "run", "--resume"], capsys, "run/start: is missing", "restore it")
    fails(["run"], capsys, "run/start/checksums.json: missing", command=evaluation.main)
    assert (run / "vpo/checkpoint-000002").exists()


@pytest.mark.parametrize("name", ["run/vpo/checkpoint-000002", "run/start"])
def test_a_checkpoint_is_no_run(name, run, capsys):
    text = f"{name}: no config.json of a run in it"
    fails([name], capsys, text, "name the folder", command=evaluation.main)


def test_a_cut_line_in_the_log_is_left_out(run, capsys):
    log = run / "vpo" / "metrics.jsonl"
    log.write_text(log.read_text() + '{"step": 3, "rew')
    evaluation.main(["run"])
    assert "VPO 2 steps" in capsys.readouterr().out


@pytest.mark.parametrize(
    "change, texts",
    [
        ('"red", "green")', ["'green'", "not in Task.words"]),
        ('answer_words = "fence"', ["answer_words = 0"]),
        ('words = "red"', ["'red apple'", "must be one word"]),
        ('tag = "my tag"', ["'my tag'", "must be one word"]),
    ],
)
def test_the_words_of_a_tiny_task_are_checked_when_the_run_starts(change, texts, capsys):
    """Guards against words that silently become padding."""
    source = {
        '"red", "green")': FENCE.replace('("red", "green")', '("red",)').replace(
            "rng.choice(self.words)", '"green"'
        ),
        'answer_words = "fence"': FENCE.replace('"green"), 2, 2', '"green"), 0, 2'),
        'words = "red"': FENCE.replace('("red", "green")', '("red", "green", "red apple")'),
        'tag = "my tag"': FENCE + '    tag = "my tag"\n',
    }[change]
    assert source != FENCE
    Path("fence.py").write_text(source)
    fails([*TOY, "--task", "fence.py"], capsys, *texts)
    assert not Path("runs").exists()


@pytest.mark.parametrize(
    "flags",
    [
        "--warm-steps -1",
        "--lr 1e6",
        "--alpha 1e-40",
        "--alpha 1e31",
        "--n-weights 100000000",
        "--pool 1000000000",
        "--m 99",
        "--kl nan",
        "--eval-temperature 0",
    ],
)
def test_extreme_flags_are_refused_at_once(flags, capsys):
    fails([*TOY, *flags.split()], capsys, flags)


def test_an_unknown_flag_is_named(capsys):
    fails([*TOY, "--figs", "1"], capsys, "unrecognized arguments: --figs 1")


def test_no_warm_up_at_all(capsys):
    """--warm-steps 0: a model of random weights; it learns nothing, and the table says so."""
    train.main(["--out", "run", *TOY, "--warm-steps", "0", "--eval-problems", "1", "--steps", "1"])
    assert "nothing was learnt" in capsys.readouterr().out


def test_max_new_tokens_is_per_answer():
    """A rollout of two answers may take twice as many; what ran into the limit is a metric."""
    train.main(["--out", "run", *TOY, "--max-new-tokens", "3", "--eval-problems", "0"])
    single = metrics(Path("run/grpo"))[0]
    double = metrics(Path("run/vpo"))[0]
    assert 0 < single["cut_off"] <= 1
    assert single["tokens"] <= 3 * single["rollouts"]
    assert 3 * double["rollouts"] < double["tokens"] <= 6 * double["rollouts"]


def test_without_evaluation_the_checkpoints_are_named(run, capsys):
    """And a method is added with the run's own flags, none of them repeated."""
    train.main(["--out", "run", "--method", "multi_rlvr", "--eval-problems", "0"])
    out = capsys.readouterr().out
    assert "run/multi_rlvr/checkpoint-000002" in out and "python eval.py run" in out
    assert json.loads((run / "config.json").read_text())["flags"]["method"] == [
        "grpo",
        "vpo",
        "multi_rlvr",
    ]


@pytest.mark.parametrize("command", [train, evaluation])
def test_help(command, capsys):
    with pytest.raises(SystemExit) as stop:
        command.main(["--help"])
    out = capsys.readouterr().out
    assert stop.value.code == 0
    assert out.startswith(f"usage: python {command.__name__}.py ") and "\n\n" in out


def test_a_script_says_a_mistake_in_one_line():
    """As a process of its own, whose imports may print nothing either."""
    done = subprocess.run(
        [sys.executable, "train.py", "--task", "maz"],
        capture_output=True,
        text=True,
        cwd=ROOT,
        check=False,
    )
    assert done.returncode == 2 and done.stdout == ""
    assert len(done.stderr.splitlines()) == 1
    assert done.stderr.startswith("train.py: error: --task maz: unknown")


def test_the_help_names_every_method_and_sampler():
    """The flags hold the names of vpo.py a second time."""
    parser = Parser("train.py")
    add_flags(parser, Config)
    text = parser.format_help()
    for name in (*vpo.ADVANTAGES, *vpo.SAMPLERS):
        assert name in text
    for value in vpo.ALPHAS:
        assert parser.parse_args(["--alpha", str(value)]).alpha == value
    for name in vpo.ADVANTAGES:
        assert Entry(name).title != name


def test_intervals_count_prompts_not_problems():
    """Ten problems that show one prompt are one observation: guards against intervals that are too narrow."""
    values = torch.randn(20, generator=torch.Generator().manual_seed(0)).repeat_interleave(10)
    alone = bootstrap_interval(values, None)
    together = bootstrap_interval(values, torch.arange(200) // 10)
    assert together[1] - together[0] > 2.5 * (alone[1] - alone[0])
    two = torch.stack([values, values + 1])
    low, high = bootstrap_interval(two)
    assert low < values.mean() + 0.2 and high > values.mean() + 0.8, "runs are resampled too"


@pytest.mark.parametrize("change", [{"m": 3}, {"m": "two"}, {"seed": 5}, {"seed": None}])
def test_an_edited_config_is_noticed(run, change, capsys):
    config = json.loads((run / "config.json").read_text())
    config["flags"] |= change
    (run / "config.json").write_text(json.dumps(config))
    fails(["run"], capsys, "config.json: damaged", "edited", command=evaluation.main)
    fails(["--out", "run", "--resume"], capsys, "config.json: damaged", "edited")


def test_means_are_not_written_into_a_file(run, capsys):
    Path("a-file").touch()
    text = "--out a-file: must be a folder"
    fails(["run", "--out", "a-file"], capsys, text, command=evaluation.main)


def test_a_config_with_a_flag_that_is_no_more(run, capsys):
    """A run of an older version."""
    record = json.loads((run / "config.json").read_text())
    del record["checksum"]
    record["flags"]["cuda_graph"] = True
    (run / "config.json").write_text(json.dumps(record))
    assert load_run(run).config.method == ["grpo", "vpo"]


def test_a_run_that_is_not_finished_says_so(run, capsys):
    """Of its newest checkpoint; while another process trains, a second one is refused at once."""
    record = json.loads(Path("run/config.json").read_text())
    record["flags"]["steps"] = 300
    record["checksum"] = checksum_of(record["flags"])
    Path("run/config.json").write_text(json.dumps(record))
    with Path("run/lock").open("a") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        evaluation.main(["run"])
        assert "step 2 of 300, still training" in capsys.readouterr().out
        fails(["--resume", "--out", "run"], capsys, "another train.py is writing to it")
    evaluation.main(["run"])
    told = capsys.readouterr().out
    assert "vpo: step 2 of 300" in told and "still training" not in told


def test_a_run_without_its_metrics_is_evaluated(run):
    """The curves of training are missing, the table is not."""
    (run / "grpo" / "metrics.jsonl").unlink()
    (run / "vpo" / "metrics.jsonl").write_text("")
    evaluation.main(["run"])
    assert (run / "eval.json").exists()


def test_metrics_that_lack_a_field_are_left_out(run):
    """Guards against a KeyError after damaged bytes."""
    log = Path("run/vpo/metrics.jsonl")
    rows = log.read_text().splitlines()
    log.write_text("\n".join([rows[0].replace('"answers"', '"answrs"'), *rows[1:]]) + "\n")
    evaluation.main(["run"])


def test_runs_of_two_tasks_are_told_apart_by_the_task(run, capsys):
    train.main([*TOY, "--task", "maze", "--size", "5", "--method", "vpo", "--out", "other"])
    fails(["run", "other"], capsys, "--task maze", "run has toy", command=evaluation.main)


def test_checkpoints_carry_no_sampling_settings(tmp_path):
    """A base model's top-p would change what a trained policy answers elsewhere."""
    model, tokenizer = load_policy("tiny", load_task("toy"))
    model.generation_config.top_p = 0.8
    model.generation_config.temperature = 0.7
    save_policy(model, tokenizer, tmp_path)
    saved = json.loads((tmp_path / "generation_config.json").read_text())
    assert "top_p" not in saved and "temperature" not in saved
    assert saved["eos_token_id"] == tokenizer.eos_token_id
