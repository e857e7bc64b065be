"""The commands end to end: train, evaluate, kill, resume, and every mistake that a user may make."""

import contextlib
import fcntl
import json
import multiprocessing
import os
import re
import shlex
import shutil
import signal
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
from engine import trackers, warmup
from engine.advice import why_unread
from engine.checkpoints import checkpoints
from engine.config import Config
from engine.decoding import rollouts_of_texts
from engine.kinds import fill_in
from engine.models import load_policy
from engine.run_folder import load_run
from engine.tiny import tiny_tokenizer
from engine.update import token_logprobs
from engine.warmup import Demonstrations, WarmUp, demonstrations, imitation_gradient
from rewards import UserError
from rollout import Scored
from tasks import load_task

ROOT = Path(__file__).resolve().parent.parent
QUICK = shlex.split(
    "--size 5 --m 2 --warm-steps 3 --steps 4 --prompts-per-step 2 --group-size 3 --eval-problems 3 "
    "--pool 4 --save-every 3 --device cpu"
)
# A warm-up that is long enough for rewards and advantages that are not all zero. Without them a resume
# has nothing to get wrong.
LEARNING = [*QUICK, *shlex.split("--task toy --warm-steps 40 --steps 8 --eval-problems 0")]


@pytest.fixture(autouse=True)
def in_an_empty_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def weights(folder: Path) -> dict[str, torch.Tensor]:
    return load_file(folder / "model.safetensors")


def metrics(run: Path) -> list[dict]:
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


def assert_equal_weights(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> None:
    torch.testing.assert_close(a, b, rtol=0, atol=0)


def without_times(rows: list[dict]) -> list[dict]:
    """Metrics without what differs from one run to the next."""
    for row in rows:
        del row["seconds"], row["tokens_per_second"]
    return rows


def train_in_a_process(arguments: list[str]) -> multiprocessing.Process:
    """Begin a training that can be killed. A fork has imported everything already."""
    kind = "fork" if sys.platform == "linux" else "spawn"
    child = multiprocessing.get_context(kind).Process(target=train.main, args=(arguments,))
    child.start()
    return child


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
    assert_equal_weights(start, weights(run / "start"))
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
    flags = "--method grpo vpo --steps 1 --eval-problems 0"
    train.main(["--out", "run", *QUICK, *flags.split()])
    for method, rollouts in (("grpo", 2 * 2 * 3), ("vpo", 2 * 3)):
        sample = json.loads((Path("run") / method / "samples.jsonl").read_text().splitlines()[0])
        assert len(sample["rollouts"]) == 3
        assert metrics(Path("run") / method)[0]["rollouts"] == rollouts


def test_a_killed_run_resumes_bit_for_bit():
    """SIGKILL at an arbitrary step, between and inside checkpoints; guards against state that a resume forgets, as are
    the lower halves of bfloat16 weights."""
    flags = shlex.split("--method vpo --steps 10 --sampler sobol --dtype bfloat16")
    arguments = [*LEARNING, *flags]
    train.main(["--out", "whole", *arguments])
    assert sum(row["signal"] for row in metrics(Path("whole/vpo"))) > 6, (
        "the test wants steps that learn something"
    )
    log = Path("killed/vpo/metrics.jsonl")
    child = train_in_a_process(["--out", "killed", *arguments])
    deadline = time.monotonic() + 120
    while not (log.exists() and len(log.read_text().splitlines()) >= 5):
        assert child.is_alive() and time.monotonic() < deadline, (
            "the child ended before it could be killed"
        )
        time.sleep(0.005)
    child.kill()
    child.join()
    log.write_text(log.read_text() + '{"step": 99, "rew')  # a line that the kill cut off
    assert not Path("killed/vpo/checkpoint-000010").exists(), (
        "the kill came too late for the test to say anything"
    )
    train.main(["--out", "killed", "--resume"])
    checkpoint = Path("vpo/checkpoint-000010")
    assert_equal_weights(weights("whole" / checkpoint), weights("killed" / checkpoint))
    whole = without_times(metrics(Path("whole/vpo")))
    assert whole == without_times(metrics(Path("killed/vpo")))


def test_a_finished_run_goes_on(capsys):
    """More steps, told what becomes of the learning rate; fewer are refused and change nothing."""
    flags = ["--task", "toy", *QUICK, "--method", "vpo", "--out", "run", "--eval-problems", "0"]
    train.main([*flags, "--steps", "2"])
    train.main(["--resume", "--out", "run"])
    assert "all 2 steps are done, nothing is left to train" in capsys.readouterr().err
    fails(["--resume", "--out", "run", "--steps", "1"], capsys, "--steps 1: vpo has 2 already")
    train.main(["--resume", "--out", "run", "--steps", "4"])
    assert "the learning rate now falls over 4 steps" in capsys.readouterr().err
    assert [row["step"] for row in metrics(Path("run/vpo"))] == [1, 2, 3, 4]
    assert load_run(Path("run")).config.steps == 4


class FakeTrackers:
    """Stands for wandb and for torch.utils.tensorboard: writes down what is logged."""

    def __init__(self, *_, **options):
        self.options = options
        self.rows = []

    SummaryWriter = init = lambda self, *arguments, **options: self.begin(options)

    def begin(self, options):
        self.options = options
        return self

    def add_scalar(self, name, value, step):
        self.rows.append((step, name, value))

    def log(self, metrics, step):
        self.rows += [(step, name, value) for name, value in metrics.items()]

    def close(self):
        self.rows.append("closed")

    finish = close


@pytest.mark.parametrize("name", ["tensorboard", "wandb"])
def test_trackers_get_the_metrics_of_the_log(name, monkeypatch):
    fake = FakeTrackers()
    monkeypatch.setitem(sys.modules, trackers.MODULES[name], fake)
    flags = ["--task", "toy", *QUICK, "--method", "vpo", "--out", "run", "--eval-problems", "0"]
    train.main([*flags, "--steps", "2", "--log", name])
    assert fake.rows.pop() == "closed"
    logged = [(row.pop("step"), row) for row in metrics(Path("run/vpo"))]
    assert fake.rows == [(step, *pair) for step, row in logged for pair in row.items()]
    fake.rows.clear()
    train.main(["--resume", "--out", "run", "--steps", "3", "--log", name])
    assert {row[0] for row in fake.rows[:-1]} == {3}
    assert fake.options.get("purge_step", 3) == 3


def test_a_tracker_that_is_not_installed_is_refused_at_once(capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "wandb", None)
    fails(["--log", "wandb"], capsys, "--log wandb: needs a package; pip install wandb")


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
    assert stop.value.code == 130
    assert "python train.py --resume --out run" in capsys.readouterr().err
    assert checkpoints(Path("run/grpo"))[-1].name == "checkpoint-000005"
    train.main(["--resume", "--out", "run"])
    checkpoint = Path("grpo/checkpoint-000008")
    assert_equal_weights(weights("whole" / checkpoint), weights("run" / checkpoint))


@pytest.mark.parametrize("architecture", ["llama", "qwen2"])
def test_a_language_model_goes_through_the_same_code(architecture, capsys):
    """A random model of a real architecture from disk: text prompts, then loaded in plain transformers."""
    model = save_random_model(Path("model"), architecture)
    flags = shlex.split("--steps 2 --max-new-tokens 30 --eval-problems 2")
    train.main(["--out", "run", "--model", model, *QUICK, *flags])
    assert "start" in json.loads(Path("run/eval.json").read_text())["policies"]
    assert ("prompts are plain text" in capsys.readouterr().err) == (architecture == "llama")


def test_an_adapter_goes_through_the_same_code():
    """LoRA: checkpoints hold the adapter alone, a killed run goes on from it, so does the evaluation."""
    pytest.importorskip("peft")
    model = save_random_model(Path("model"), "qwen2")
    flags = "--lora-rank 2 --method vpo --steps 4 --save-every 2 --max-new-tokens 30 --lr 0.01"
    arguments = ["--model", model, *QUICK, *shlex.split(flags)]
    train.main(["--out", "whole", *arguments])
    folder = Path("whole/vpo/checkpoint-000004")
    assert (folder / "adapter_model.safetensors").exists()
    assert not (folder / "model.safetensors").exists()
    shutil.copytree("whole", "run")
    shutil.rmtree("run/vpo/checkpoint-000004")
    train.main(["--out", "run", "--resume"])
    adapter = "vpo/checkpoint-000004/adapter_model.safetensors"
    assert_equal_weights(load_file(f"whole/{adapter}"), load_file(f"run/{adapter}"))
    whole = [row["loss"] for row in metrics(Path("whole/vpo"))]
    assert whole == [row["loss"] for row in metrics(Path("run/vpo"))]
    report = json.loads(Path("run/eval.json").read_text())["policies"]
    assert list(report) == ["start", "start_sets", "vpo"]


def test_a_task_without_a_picture_has_no_figure_of_answers():
    train.main(["--task", "toy", *QUICK, "--steps", "2"])
    assert Path("runs/toy-seed0/eval.json").exists()
    assert not Path("runs/toy-seed0/answers.png").exists()


def test_the_task_of_the_readme():
    """The README's task trains by the README's command, but for the model and a smaller size."""
    readme = (ROOT / "README.md").read_text()
    (snippet,) = re.findall(r"```python\n([^`]*\(Task\)[^`]*)```", readme)
    (flags,) = re.findall(r"python train.py (--task my_task.py .*)", readme)
    Path("my_task.py").write_text(snippet)
    small = "--steps 2 --prompts-per-step 1 --group-size 3 --eval-problems 2 --pool 4 --method vpo"
    model = save_random_model("model", "llama")
    train.main([*shlex.split(flags), *small.split(), "--model", model, "--out", "run"])
    assert Path("run/eval.json").exists()


@pytest.mark.parametrize(
    "arguments, texts",
    [
        (["--task", "maz"], ["--task maz: unknown; choose from", "did you mean maze?"]),
        (["--method", "ppo"], ["--method ppo (choose from grpo, dr_grpo", "did you mean vpo?"]),
        (["--method", "grpo", "--subset", "2"], ["--subset 2: not used by grpo", "leave it out"]),
        (["--temperature", "0"], ["--temperature 0: greedy decoding is not offered, because"]),
        (["--task", "code", "--data", ""], ["--data is empty; name a file"]),
        (["--method", "vpo", "grpo", "vpo"], ["--method vpo grpo vpo: names a method twice"]),
        (["--sampler", "sobol", "--alpha", "2"], ["--alpha 2: --sampler sobol needs --alpha 1"]),
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
    train.main(["--out", "run", *QUICK, "--method", "grpo", "vpo", "--eval-problems", "0"])
    before = {path: path.stat().st_mtime_ns for path in Path("run").rglob("*")}
    fails(["--out", "run", *QUICK], capsys, "already holds grpo, vpo", "--resume")
    fails(["--out", "run", *QUICK, "--lr", "0.1"], capsys, "another run", "--lr")
    fails(["--out", "run", "--resume", "--kl", "0.5"], capsys, "another run", "--kl")
    assert before == {path: path.stat().st_mtime_ns for path in Path("run").rglob("*")}
    Path("notes").mkdir()
    Path("notes/thesis.txt").write_text("mine")
    fails(["--out", "notes", *QUICK], capsys, "--out notes", "not empty")
    assert [path.name for path in Path("notes").iterdir()] == ["thesis.txt"]


@pytest.fixture(scope="module")
def trained(tmp_path_factory) -> Path:
    """A finished run of VPO, to be copied."""
    folder = tmp_path_factory.mktemp("trained")
    with contextlib.chdir(folder):
        train.main(["--out", "run", *QUICK, "--method", "vpo", "--eval-problems", "0"])
    return folder / "run"


@pytest.mark.parametrize("name", ["model.safetensors", "trainer.pt", "checksums.json"])
def test_a_damaged_checkpoint_is_named(name, trained, capsys):
    """One flipped byte, or a lost file: the file is named, and the checkpoint before it is offered and works."""
    shutil.copytree(trained, "run")
    last = Path("run/vpo/checkpoint-000004")
    if name == "checksums.json":
        (last / name).unlink()
    else:
        content = bytearray((last / name).read_bytes())
        content[len(content) // 2] ^= 1
        (last / name).write_bytes(content)
    fails(
        ["--out", "run", "--resume"],
        capsys,
        str(last / name),
        "damaged",
        f"delete the folder {last}",
    )
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
        "vpo, step 5",
        "an advantage is not finite",
        "checkpoint-000003",
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
    """The goals in the prompts are the preference weights of the advantages; and all is evaluated."""
    told = []
    paid = []
    advantage = train.ADVANTAGES["goal_conditioned"]
    build_prompt = train.build_prompt

    def record_weights(rewards, scalars, mask, **options):
        generator = options["generator"].clone_state()
        paid.append(vpo.sample_weights(len(rewards), 4, generator=generator))
        return advantage(rewards, scalars, mask, **options)

    def record_goal(tokenizer, task, problem, m, goal):
        told.append(goal)
        return build_prompt(tokenizer, task, problem, m, goal)

    monkeypatch.setitem(train.ADVANTAGES, "goal_conditioned", record_weights)
    monkeypatch.setattr(train, "build_prompt", record_goal)
    train.main(["--out", "run", *QUICK, "--steps", "1", "--method", "goal_conditioned"])
    assert len(told) == 4
    torch.testing.assert_close(torch.tensor(told), paid[0])
    report = json.loads(Path("run/eval.json").read_text())["policies"]
    assert list(report) == ["start", "start_sets", "goal_conditioned"]
    # Its start has imitated prompts that name weights.
    assert Path("run/goal_conditioned/start/checksums.json").is_file()


def test_prompts_of_the_warm_up_may_name_goals():
    """The same demonstrations with and without; the goal of 4 weights w stands behind as 1 + 7 w each, rounded."""
    task = load_task("maze")
    tokenizer = tiny_tokenizer(task)
    plain = demonstrations(task, tokenizer, WarmUp(steps=1, m=1, seed=0), 0)
    goals = demonstrations(task, tokenizer, WarmUp(steps=1, m=1, seed=0, with_goals=True), 0)
    assert plain.texts == goals.texts
    for without, prompt in zip(plain.prompts, goals.prompts, strict=True):
        words = prompt.removeprefix(without).split()
        levels = [int(word.removeprefix("answers=")) for word in words]
        assert len(levels) == 4 and 8 <= sum(levels) <= 14


def test_a_new_method_slots_in(monkeypatch, capsys):
    """One function more in vpo.ADVANTAGES is all that training, table and figures need."""
    monkeypatch.setitem(
        train.ADVANTAGES,
        "best_scalar",
        lambda rewards, scalars, mask, **options: vpo.group_normalize(scalars.amax(-1)),
    )
    train.main(["--out", "run", *QUICK, "--method", "best_scalar", "grpo"])
    assert "best_scalar" in capsys.readouterr().out and Path("run/answers.png").exists()


def test_a_method_with_another_signature_is_named(monkeypatch, capsys):
    monkeypatch.setitem(vpo.ADVANTAGES, "mine", lambda rewards, scalars, answer_mask: scalars)
    fails(
        ["--method", "mine"],
        capsys,
        "--method mine: must take (rewards, scalars, answer_mask, **options)",
    )


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("--metod vpo", "unrecognized arguments: --metod vpo; did you mean --method?"),
        ("--method grpo,vpo", "; separate them by blanks"),
        ("--model ./nowhere", "--model ./nowhere: there is no such folder"),
    ],
)
def test_likely_slips_of_the_keyboard_get_their_fix(capsys, flags, message):
    fails(["--out", "run", *flags.split()], capsys, message)
    assert not Path("run").exists()


def test_a_tiny_model_that_writes_no_answer_is_told_of_its_warm_up():
    """Guards against advice for language models, whose forms the tiny model never writes."""
    config = Config(task="toy", warm_steps=7)
    assert why_unread(config, load_task("toy"), "1 0 1").startswith("- are --warm-steps 7 too few")
    assert "Task.request" not in why_unread(config, load_task("toy"), "1 0 1")


@pytest.mark.parametrize("name", ["my/m", "start"])
def test_a_method_with_the_name_of_something_else_is_refused(monkeypatch, capsys, name):
    monkeypatch.setitem(vpo.ADVANTAGES, name, vpo.grpo)
    fails(["--out", "run", "--method", name], capsys, f"--method {name}: must be a name such as")
    assert not Path("run").exists()


@pytest.mark.parametrize(
    ("advantages", "message"),
    [
        (lambda r: None, "must return a tensor of floats, not None"),
        (lambda r: r.numpy(), "must return a tensor of floats, not array("),
        (lambda r: r.T, "its advantages have the shape (4, 2), not (P, G) = (2, 4)"),
        (lambda r: r / 0, "an advantage is not finite"),
        (lambda r: {}["n_weight"], "failed (test_train.py, line"),
    ],
)
def test_wrong_advantages_are_named(monkeypatch, advantages, message):
    """Guards against advantages that belong to other rollouts: (G, P) has as many numbers."""
    task = load_task("toy")
    config = Config(task="toy", m=1)
    fill_in(config, task, cuda=False)
    shape = (2, 4, 1)
    mask = torch.ones(shape, dtype=torch.bool)
    scored = Scored(torch.ones(*shape, 2), torch.ones(shape), mask, torch.ones(2, 2).bool())
    monkeypatch.setitem(
        vpo.ADVANTAGES, "mine", lambda rewards, r, mask, **options: advantages(r[..., 0])
    )
    with pytest.raises(UserError, match=re.escape(message)):
        train.step_advantages("mine", scored, task, config, 0)


def test_a_run_with_a_method_of_ones_own_is_refused_where_it_is_unknown(monkeypatch, capsys):
    """Guards against an eval.json and a page that lose the method without a word."""
    flags = [*QUICK, "--method", "mine", "--steps", "1", "--eval-problems", "0"]
    with monkeypatch.context() as own:
        own.setitem(vpo.ADVANTAGES, "mine", vpo.grpo)
        train.main(["--out", "run", *flags])
    message = "run: has the method mine, which only the file that defines it knows"
    fails(["run"], capsys, message, command=evaluation.main)
    fails(["--out", "run", "--resume"], capsys, message)
    fails(["--out", "run", *QUICK, "--method", "grpo"], capsys, message)


def test_eval_names_what_it_cannot_evaluate(capsys):
    flags = "--method vpo --steps 1 --eval-problems 0"
    train.main(["--out", "run", *QUICK, *flags.split()])
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
    flags = [*QUICK, "--eval-problems", "0"]
    train.main(["--out", "a", *flags, "--method", "grpo", "--steps", "1"])
    train.main(["--out", "b", *flags, "--method", "vpo", "--steps", "2"])
    train.main(["--out", "c", *flags, "--method", "vpo", "--steps", "1", "--seed", "5"])
    assert len(list(Path("runs/start").iterdir())) == 2
    a = weights(Path("a/start"))
    c = weights(Path("c/start"))
    assert_equal_weights(a, weights(Path("b/start")))
    assert any(not torch.equal(a[name], c[name]) for name in a)


def test_an_interrupted_warm_up_goes_on(monkeypatch, capsys):
    """Ctrl-C in the SFT warm-up: the same command ends with the weights of an uninterrupted one."""
    flags = ["--task", "toy", *QUICK, "--method", "vpo", "--warm-steps", "6", "--steps", "1"]
    flags += ["--eval-problems", "0"]
    train.main([*flags, "--out", "whole"])
    shutil.rmtree("runs/start")
    gradient = warmup.imitation_gradient
    calls = []

    def interrupted(*arguments):
        calls.append(1)
        if len(calls) == 3:
            os.kill(os.getpid(), signal.SIGINT)
        return gradient(*arguments)

    monkeypatch.setattr(warmup, "imitation_gradient", interrupted)
    with pytest.raises(SystemExit) as stopped:
        train.main([*flags, "--out", "run"])
    assert stopped.value.code == 130
    assert "stopped after step 3 of 6" in capsys.readouterr().err
    train.main([*flags, "--out", "run"])
    assert "goes on after step 3" in capsys.readouterr().err and len(calls) == 6
    weights = "start/model.safetensors"
    assert_equal_weights(load_file(f"whole/{weights}"), load_file(f"run/{weights}"))
    assert not list(Path("runs/start").glob("*.partial"))


def test_a_language_model_imitates_every_token_alike():
    """Its demonstrations pass one by one, for the memory. Guards against a short text whose tokens count more."""
    task = load_task("maze", size=5)
    model, tokenizer = load_policy(save_random_model("m", "llama"), task)
    texts = [tokenizer.decode(range(20, 24)), tokenizer.decode(range(30, 130))]
    shown = Demonstrations(["Go.", "Go on."], texts)
    loss = imitation_gradient(model, tokenizer, shown, micro_batch=1)
    one_by_one = [weight.grad.clone() for weight in model.parameters()]

    model.zero_grad()
    rollouts = rollouts_of_texts(model, tokenizer, shown.prompts, shown.texts)
    logprobs, _ = token_logprobs(model, rollouts, [0, 1])
    expected = -logprobs[rollouts.token_mask].mean()
    expected.backward()
    assert loss.item() == pytest.approx(expected.item(), rel=1e-5)
    together = [weight.grad for weight in model.parameters()]
    torch.testing.assert_close(one_by_one, together, rtol=1e-3, atol=1e-6)
    assert any(gradient.any() for gradient in together)
