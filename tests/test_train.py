"""The commands end to end: train, evaluate, kill, resume, and every mistake that a user may make."""

import fcntl
import functools
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from test_rollout import save_random_model

import eval as evaluation
import train
import vpo
from engine.decoding import given_rollouts
from engine.imitation import warm_start
from engine.models import load_policy
from engine.runs import checkpoints
from engine.tiny import tiny_tokenizer
from engine.update import token_logprobs
from rewards import load_task
from rollout import demonstrations

ROOT = Path(__file__).resolve().parent.parent
QUICK = [
    "--size",
    "5",
    "--m",
    "2",
    "--warm-steps",
    "3",
    "--steps",
    "4",
    "--prompts-per-step",
    "2",
    "--group-size",
    "3",
    "--eval-problems",
    "3",
    "--pool",
    "4",
    "--save-every",
    "3",
    "--device",
    "cpu",
]
# A warm start long enough for rewards, hence advantages, that are not all zero: else a resume has nothing to get wrong.
LEARNING = [*QUICK, "--task", "toy", "--warm-steps", "40", "--steps", "8", "--eval-problems", "0"]


@pytest.fixture(autouse=True)
def in_an_empty_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def weights(folder: Path) -> dict[str, torch.Tensor]:
    return load_file(folder / "model.safetensors")


def metrics(run: Path) -> list[dict]:
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


def fails(arguments: list[str], capsys, *texts: str, command=train.main) -> None:
    """The command ends with code 2 and one line that holds the texts."""
    capsys.readouterr()
    with pytest.raises(SystemExit) as stop:
        command(arguments)
    error = capsys.readouterr().err.strip()
    assert stop.value.code == 2
    last = error.splitlines()[-1]
    for text in texts:
        assert text in last, error


def test_the_main_job(capsys):
    """Warm start, two methods, table, figures; then one more method joins the same folder and the same start."""
    train.main(["--out", "run", *QUICK])
    run = Path("run")
    for method in ("grpo", "vpo", "group_vpo"):
        rows = metrics(run / method)
        assert [row["step"] for row in rows] == list(range(1, 5))
        assert all(set(row) == set(rows[0]) for row in rows)
        assert [path.name for path in checkpoints(run / method)] == [
            "checkpoint-000003",
            "checkpoint-000004",
        ]
        assert json.loads((run / method / "samples.jsonl").read_text().splitlines()[0])["rollouts"]
    report = json.loads((run / "eval.json").read_text())["policies"]
    assert list(report) == ["start", "start_sets", "grpo", "vpo", "group_vpo"]
    low, high = report["vpo"]["best@4"]["interval"]
    assert low <= report["vpo"]["best@4"]["mean"] <= high
    for name in ("best_at_k", "diversity", "reward_vectors", "answers"):
        assert (run / f"{name}.png").exists()
    start = weights(run / "start")
    train.main(["--out", "run", *QUICK, "--method", "multi_rlvr"])
    assert "Multi-RLVR" in capsys.readouterr().out
    assert all(torch.equal(start[name], value) for name, value in weights(run / "start").items())
    assert list(json.loads((run / "eval.json").read_text())["policies"]) == [
        "start",
        "start_sets",
        "grpo",
        "multi_rlvr",
        "vpo",
        "group_vpo",
    ]
    shutil.copytree(run, "other")
    evaluation.main(
        ["run", "other", "--split", "validation", "--problems", "3", "--pool", "4", "--out", "both"]
    )
    assert "mean of 2 runs" in capsys.readouterr().out and Path("both/best_at_k.png").exists()


def test_methods_spend_equal_answers():
    """Guards against giving one method more candidates per step: answers per step are G * P * m for every method."""
    train.main(["--out", "run", *QUICK, "--steps", "2", "--eval-problems", "0"])
    for method, rollouts in (("grpo", 2 * 2 * 3), ("vpo", 2 * 3)):
        sample = json.loads((Path("run") / method / "samples.jsonl").read_text().splitlines()[0])
        assert len(sample["rollouts"]) == 3
        assert metrics(Path("run") / method)[0]["rollouts"] == rollouts


def test_a_killed_run_resumes_bit_for_bit():
    """SIGKILL at an arbitrary step, between and inside checkpoints; guards against state that a resume forgets, as are
    the lower halves of bfloat16 weights."""
    arguments = [
        "--method",
        "vpo",
        *LEARNING,
        "--steps",
        "10",
        "--sampler",
        "sobol",
        "--dtype",
        "bfloat16",
    ]
    train.main(["--out", "whole", *arguments])
    assert sum(row["signal"] for row in metrics(Path("whole/vpo"))) > 6, (
        "the test wants steps that learn something"
    )
    log = Path("killed/vpo/metrics.jsonl")
    child = subprocess.Popen(
        [sys.executable, str(ROOT / "train.py"), "--out", "killed", *arguments],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    deadline = time.monotonic() + 120
    while not (log.exists() and len(log.read_text().splitlines()) >= 5):
        assert child.poll() is None and time.monotonic() < deadline, (
            "the child ended before it could be killed"
        )
        time.sleep(0.005)
    os.kill(child.pid, signal.SIGKILL)
    child.wait()
    log.write_text(log.read_text() + '{"step": 99, "rew')  # a line that the kill cut off
    assert not Path("killed/vpo/checkpoint-000010").exists(), (
        "the kill came too late for the test to say anything"
    )
    train.main(["--out", "killed", "--resume"])
    whole, resumed = (weights(Path(name) / "vpo/checkpoint-000010") for name in ("whole", "killed"))
    assert all(torch.equal(whole[name], resumed[name]) for name in whole)
    volatile = ("seconds", "tokens_per_second")
    assert [
        {k: v for k, v in row.items() if k not in volatile} for row in metrics(Path("whole/vpo"))
    ] == [
        {k: v for k, v in row.items() if k not in volatile} for row in metrics(Path("killed/vpo"))
    ]


def test_ctrl_c_saves_and_says_how_to_go_on(monkeypatch, capsys):
    """An interrupt in the middle of a step: the step is finished and saved, the run goes on to the same weights."""
    arguments = ["--method", "grpo", *LEARNING]
    train.main(["--out", "whole", *arguments])
    sample = train.sample

    def interrupting_sample(*args, **kwargs):
        log = Path("run/grpo/metrics.jsonl")
        if log.exists() and len(log.read_text().splitlines()) == 4:
            os.kill(os.getpid(), signal.SIGINT)
        return sample(*args, **kwargs)

    with monkeypatch.context() as patch:
        patch.setattr(train, "sample", interrupting_sample)
        with pytest.raises(SystemExit) as stop:
            train.main(["--out", "run", *arguments])
    assert (
        stop.value.code == 130 and "python train.py --resume --out run" in capsys.readouterr().err
    )
    assert checkpoints(Path("run/grpo"))[-1].name == "checkpoint-000005"
    train.main(["--resume", "--out", "run"])
    whole, resumed = (weights(Path(name) / "grpo/checkpoint-000008") for name in ("whole", "run"))
    assert all(torch.equal(whole[name], resumed[name]) for name in whole)


@pytest.mark.parametrize("architecture", ["llama", "qwen2"])
def test_a_language_model_goes_through_the_same_code(architecture, capsys):
    """A random model of a real architecture from disk: text prompts, then loaded in plain transformers."""
    model = save_random_model(Path("model"), architecture)
    train.main(
        [
            "--out",
            "run",
            "--model",
            model,
            *QUICK,
            "--steps",
            "2",
            "--max-new-tokens",
            "30",
            "--eval-problems",
            "2",
        ]
    )
    assert "start" in json.loads(Path("run/eval.json").read_text())["policies"]
    assert ("prompts are plain text" in capsys.readouterr().err) == (architecture == "llama")


def test_an_adapter_goes_through_the_same_code():
    """LoRA: checkpoints hold the adapter alone, a killed run goes on from it, so does the evaluation."""
    pytest.importorskip("peft")
    arguments = [
        "--model",
        save_random_model(Path("model"), "qwen2"),
        "--lora-rank",
        "2",
        "--method",
        "vpo",
        *QUICK,
        "--steps",
        "4",
        "--save-every",
        "2",
        "--max-new-tokens",
        "30",
        "--lr",
        "0.01",
    ]
    train.main(["--out", "whole", *arguments])
    folder = Path("whole/vpo/checkpoint-000004")
    assert (folder / "adapter_model.safetensors").exists() and not (
        folder / "model.safetensors"
    ).exists()
    shutil.copytree("whole", "run")
    shutil.rmtree("run/vpo/checkpoint-000004")
    train.main(["--out", "run", "--resume"])
    whole, resumed = (
        load_file(Path(name) / "vpo/checkpoint-000004/adapter_model.safetensors")
        for name in ("whole", "run")
    )
    assert all(torch.equal(whole[name], resumed[name]) for name in whole)
    assert [row["loss"] for row in metrics(Path("whole/vpo"))] == [
        row["loss"] for row in metrics(Path("run/vpo"))
    ]
    assert list(json.loads(Path("run/eval.json").read_text())["policies"]) == [
        "start",
        "start_sets",
        "vpo",
    ]


def test_toy_and_the_tasks_of_the_readme():
    """The snippet of the README, word for word, trains; guards against documentation that has rotted."""
    train.main(["--task", "toy", *QUICK, "--steps", "2"])
    assert (
        Path("runs/toy-seed0/eval.json").exists()
        and not Path("runs/toy-seed0/answers.png").exists()
    )
    (snippet,) = [
        block
        for block in re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
        if "(Task)" in block
    ]
    assert len(snippet.splitlines()) <= 30
    Path("fence.py").write_text(snippet)
    train.main(["--task", "fence.py", *QUICK, "--steps", "2"])
    assert Path("runs/fence-seed0/eval.json").exists()


@pytest.mark.parametrize(
    "arguments, texts",
    [
        (["--task", "maz"], ["--task maz: unknown; choose from code, eureqa, maze"]),
        (["--method", "ppo"], ["--method ppo: unknown; choose from grpo, dr_grpo"]),
        (["--model", "no/such/model"], ["--model no/such/model"]),
        (["--group-size", "1"], ["--group-size 1", "2 to 4096"]),
        (["--subset", "8"], ["--subset 8", "below --group-size", "no signal"]),
        (
            ["--method", "max_at_k", "--group-size", "2"],
            ["--group-size 2", "max_at_k", "3 or more"],
        ),
        (["--m", "0"], ["--m 0"]),
        (["--m", "9"], ["--m 9"]),
        (["--n-weights", "0"], ["--n-weights 0"]),
        (["--alpha", "0"], ["--alpha 0:"]),
        (["--alpha", "nan"], ["--alpha nan"]),
        (["--temperature", "-1"], ["--temperature -1:"]),
        (["--steps", "0"], ["--steps 0"]),
        (["--steps", "many"], ["--steps", "many"]),
        (["--sampler", "halton"], ["--sampler halton"]),
        (["--pool", "1"], ["--pool 1", "--m 2"]),
        (["--seed", "99999999999"], ["--seed 99999999999"]),
        (["--size", "4"], ["--size 4"]),
        (["--lr", "inf"], ["--lr inf"]),
        (["--device", "tpu"], ["--device tpu", "cpu"]),
        (
            ["--max-new-tokens", "4000"],
            ["need a context of 40", "the model's is 512", "--max-new-tokens"],
        ),
        (["--lora-rank", "-1"], ["--lora-rank -1"]),
        (["--model", "Qwen/Qwen2.5-0.5B"], ["no connection", "gated", "hf auth login"]),
        (["--resume"], ["--resume", "holds no run"]),
    ],
)
def test_bad_flags_are_named_before_any_minute_is_spent(arguments, texts, capsys, monkeypatch):
    monkeypatch.setattr(train, "tqdm", lambda *args, **kwargs: pytest.fail("training began"))
    fails([*QUICK, *arguments], capsys, *texts)
    assert not list(Path().rglob("config.json")), "a command that failed must not claim its folder"


def test_an_occupied_folder_is_refused(capsys):
    """Nothing that a run wrote is ever overwritten."""
    train.main(["--out", "run", *QUICK, "--eval-problems", "0"])
    before = {path: path.stat().st_mtime_ns for path in Path("run").rglob("*")}
    fails(["--out", "run", *QUICK], capsys, "already holds grpo, vpo", "--resume")
    fails(["--out", "run", *QUICK, "--lr", "0.1"], capsys, "another run", "--lr")
    fails(["--out", "run", "--resume", "--kl", "0.5"], capsys, "another run", "--kl")
    assert before == {path: path.stat().st_mtime_ns for path in Path("run").rglob("*")}
    Path("notes").mkdir()
    Path("notes/thesis.txt").write_text("mine")
    fails(["--out", "notes", *QUICK], capsys, "--out notes", "not empty")
    assert [path.name for path in Path("notes").iterdir()] == ["thesis.txt"]


@pytest.mark.parametrize("name", ["model.safetensors", "trainer.pt", "checksums.json"])
def test_a_damaged_checkpoint_is_named(name, capsys):
    """One flipped byte, or a lost file: the file is named, and the checkpoint before it is offered and works."""
    arguments = ["--out", "run", *QUICK, "--method", "vpo", "--eval-problems", "0"]
    train.main(arguments)
    last = Path("run/vpo/checkpoint-000004")
    if name == "checksums.json":
        (last / name).unlink()
    else:
        content = bytearray((last / name).read_bytes())
        content[len(content) // 2] ^= 1
        (last / name).write_bytes(content)
    fails(["--out", "run", "--resume"], capsys, str(last / name), "damaged", "checkpoint-000003")
    good = weights(Path("run/vpo/checkpoint-000003"))
    for path in last.iterdir():
        path.unlink()
    last.rmdir()
    train.main(["--out", "run", "--resume"])
    assert last.exists() and any(
        not torch.equal(good[key], value) for key, value in weights(last).items()
    )


def test_a_non_finite_loss_stops_the_run(capsys, monkeypatch):
    """At step 5 the advantages explode: the step is named, the good checkpoint of step 3 stays the last one."""
    advantage = train.ADVANTAGES["vpo"]

    def explode(rewards, scalars, mask, **options):
        log = Path("run/vpo/metrics.jsonl")
        broken = log.exists() and len(log.read_text().splitlines()) == 4
        return advantage(rewards, scalars, mask, **options) * (float("nan") if broken else 1.0)

    monkeypatch.setitem(train.ADVANTAGES, "vpo", explode)
    fails(
        ["--out", "run", "--method", "vpo", *QUICK, "--steps", "6"],
        capsys,
        "vpo",
        "nan",
        "step 5",
        "checkpoint-000003",
        "--lr",
    )
    assert [path.name for path in checkpoints(Path("run/vpo"))] == ["checkpoint-000003"]
    assert all(
        torch.isfinite(value).all() for value in weights(Path("run/vpo/checkpoint-000003")).values()
    )


def test_a_model_that_diverges_stops_the_run(capsys, monkeypatch):
    """For real: at an absurd learning rate the weights are ruined; step and fix are named, none is saved."""
    monkeypatch.setattr(train, "learning_rate", lambda *args: 1e30)
    fails(["--out", "run", *QUICK, "--method", "vpo"], capsys, "vpo, step", "--lr")
    for folder in checkpoints(Path("run/vpo")):
        assert all(torch.isfinite(value).all() for value in weights(folder).values())


def test_a_damaged_start_model_is_named(capsys):
    """It is the reference policy and every later method's start: a flipped byte must not pass silently."""
    train.main(["--out", "run", *QUICK, "--method", "grpo", "--eval-problems", "0", "--steps", "2"])
    path = Path("run/start/model.safetensors")
    path.write_bytes(path.read_bytes()[:-1] + b"x")
    fails(["--out", "run", *QUICK, "--method", "vpo", "--steps", "2"], capsys, str(path), "damaged")
    fails(["run"], capsys, str(path), "damaged", command=evaluation.main)


def test_two_processes_cannot_write_to_one_folder(capsys):
    train.main(["--out", "run", *QUICK, "--method", "grpo", "--eval-problems", "0", "--steps", "2"])
    with Path("run/lock").open("a") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        fails(["--out", "run", "--resume"], capsys, "--out run", "another train.py")


def test_a_goal_is_told_and_paid(monkeypatch):
    """Guards against a prompt that names other weights than those of its group's advantage; and all is evaluated."""
    told, paid, advantage, ask = [], [], train.ADVANTAGES["goal_conditioned"], train.build_prompt

    def record(rewards, scalars, mask, **options):
        paid.append(
            vpo.sample_weights(len(rewards), 4, generator=options["generator"].clone_state())
        )
        return advantage(rewards, scalars, mask, **options)

    monkeypatch.setitem(train.ADVANTAGES, "goal_conditioned", record)
    monkeypatch.setattr(train, "build_prompt", lambda *args: told.append(args[4:]) or ask(*args))
    train.main(["--out", "run", *QUICK, "--steps", "1", "--method", "goal_conditioned"])
    goals = [goal for (goal,) in filter(None, told)][-4:]
    torch.testing.assert_close(torch.tensor(goals), paid[0])
    prompt = json.loads(Path("run/eval.json").read_text())["policies"]
    assert list(prompt) == ["start", "start_sets", "goal_conditioned"]
    assert Path(
        "run/goal_conditioned/start/checksums.json"
    ).is_file()  # it has imitated prompts that name weights
    task = load_task("maze")
    plain, goal = (
        demonstrations(task, tiny_tokenizer(task), 1, 0, 0, goals=goals) for goals in (False, True)
    )
    assert plain[1] == goal[1]
    for without, told in zip(plain[0], goal[0], strict=True):
        levels = [int(word.removeprefix("answers=")) for word in told.removeprefix(without).split()]
        assert len(levels) == 4 and 8 <= sum(levels) <= 14  # 1 + 7 w each, rounded


def test_a_new_method_slots_in(monkeypatch, capsys):
    """One function more in vpo.ADVANTAGES is all that training, table and figures need."""
    monkeypatch.setitem(
        train.ADVANTAGES,
        "best_scalar",
        lambda rewards, scalars, mask, **options: vpo.group_normalize(scalars.amax(-1)),
    )
    train.main(["--out", "run", *QUICK, "--method", "best_scalar", "grpo"])
    assert "best_scalar" in capsys.readouterr().out and Path("run/answers.png").exists()


def test_eval_names_what_it_cannot_evaluate(capsys):
    train.main(["--out", "run", *QUICK, "--eval-problems", "0", "--steps", "1"])
    evaluation.main(["run", "--problems", "2"])  # trained without an evaluation: still possible
    fails(["run", "--pool", "1"], capsys, "--pool 1", command=evaluation.main)
    fails(["run", "--device", "tpu"], capsys, "--device tpu", command=evaluation.main)
    Path("run/config.json").write_text("{")
    fails(["run"], capsys, "config.json: damaged", command=evaluation.main)
    fails(["--out", "run", *QUICK], capsys, "config.json: damaged")
    Path("empty").mkdir()
    fails(["empty"], capsys, "empty: no config.json", command=evaluation.main)
    Path("empty/config.json").write_text('{"model_type": "llama"}')
    fails(["empty"], capsys, "empty: no config.json of a run in it", command=evaluation.main)
    fails(["empty", "--pool", "0"], capsys, "--pool 0", command=evaluation.main)


def test_the_start_model_is_cached():
    """The second run with another method budget loads the same start; another seed has its own."""
    train.main(["--out", "a", *QUICK, "--method", "grpo", "--eval-problems", "0", "--steps", "1"])
    train.main(["--out", "b", *QUICK, "--method", "vpo", "--eval-problems", "0", "--steps", "2"])
    train.main(
        [
            "--out",
            "c",
            *QUICK,
            "--method",
            "vpo",
            "--eval-problems",
            "0",
            "--steps",
            "1",
            "--seed",
            "5",
        ]
    )
    assert len(list(Path("runs/start").iterdir())) == 2
    a, b, c = (weights(Path(name) / "start") for name in "abc")
    assert all(torch.equal(a[name], b[name]) for name in a) and any(
        not torch.equal(a[name], c[name]) for name in a
    )


def test_a_language_model_imitates_every_token_alike():
    """Its demonstrations pass one by one, for the memory. Guards against a text that counts as much as a longer one:
    the first step of Adam moves a weight by the sign of its gradient, which would then often be another."""
    task = load_task("maze", size=5)
    model, tokenizer = load_policy(save_random_model("m", "llama"), task)
    before = [weight.detach().clone() for weight in model.parameters()]
    shown = [tokenizer.decode(range(20, 24)), tokenizer.decode(range(30, 130))]

    show = functools.partial(lambda step, model=None: (["Go.", "Go on."], shown))
    imitated, _ = warm_start(task, "maze", show, model, tokenizer, 1)
    for weight, old in zip(model.parameters(), before, strict=True):
        weight.data.copy_(old)
    model.zero_grad()
    rollouts = given_rollouts(model, tokenizer, *show(0))
    logprobs, _ = token_logprobs(model, rollouts, [0, 1])
    (-logprobs[rollouts.mask].mean()).backward()
    moved = [new - old for new, old in zip(imitated.parameters(), before, strict=True)]
    wrong = sum(
        ((move * weight.grad > 0) & (weight.grad.abs() > 1e-6)).sum().item()
        for move, weight in zip(moved, model.parameters(), strict=True)
    )
    assert any(move.any() for move in moved) and wrong < 1e-3 * sum(move.numel() for move in moved)
