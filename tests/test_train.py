"""Training from end to end: train, evaluate, kill, resume, join, and what becomes of damaged files."""

import json
import re
import shlex
import shutil
import signal
import weakref
from pathlib import Path
from unittest.mock import Mock

import pytest
import torch
from helpers import (
    LEARNING,
    QUICK,
    SCRIPTS,
    assert_equal_weights,
    change_config,
    fails,
    metrics,
    save_random_model,
    weights,
)

import eval as evaluation
import fast
import train
import vpo
from engine.config import Config
from engine.optimizer import MasterWeightAdamW
from engine.runs import checkpoints, load_run
from engine.tasks import load_task
from engine.training.logs import MethodLog
from rollout import Rollouts, load_policy, rollouts_of_texts, score, token_logprobs


def test_the_main_job():
    """Warm-up, three methods, table, figures. Guards against more candidates for one method: a step
    of each has G * P * m answers, --max-new-tokens is per answer, what ran into it is a metric."""
    maze = "--task maze --size 5 --max-new-tokens 10 --eval-every 2 --out run"
    train.main([*QUICK, *maze.split()])
    run = Path("run")
    for method, n_rollouts, m in (("grpo", 12, 1), ("vpo", 6, 2), ("group_vpo", 12, 1)):
        rows = metrics(run / method)
        assert [row["step"] for row in rows] == list(range(1, 5))
        assert all(set(row) == set(rows[0]) for row in rows)
        assert rows[0]["rollouts"] == n_rollouts and 0 < rows[0]["cut_off"] <= 1
        assert 10 * (m - 1) < rows[0]["tokens"] / n_rollouts <= 10 * m
        assert [path.name for path in checkpoints(run / method)] == ["checkpoint-000004"]
        assert not list(run.rglob("trainer.pt")), "the optimizer's state is for --keep-optimizer"
        assert json.loads((run / method / "samples.jsonl").read_text().splitlines()[0])["rollouts"]
        held_out = (run / method / "evaluations.jsonl").read_text().splitlines()
        assert [json.loads(row)["step"] for row in held_out] == [0, 2, 4]
    report = json.loads((run / "eval.json").read_text())["policies"]
    sets = ["vpo", "vpo, one answer"]
    assert list(report) == ["start", "start_sets", "grpo", *sets, "group_vpo"]
    for name in ("best_at_k", "diversity", "progress", "reward_vectors", "answers"):
        assert (run / f"{name}.png").exists()


def test_a_run_that_is_stopped_goes_on_bit_for_bit(monkeypatch, capsys):
    """Ctrl-C and SIGTERM in the middle of a step say how to go on, and a kill leaves a line that is cut off; tests/processes
    kills in earnest. Guards against state that a resume forgets, such as float32 weights behind bfloat16 ones."""
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's "&" ignores it
    arguments = [*LEARNING, *shlex.split("--method vpo --steps 9 --dtype bfloat16 --snapshots 0")]
    train.main(["--out", "whole", *arguments])
    learnt = [row["signal"] for row in metrics(Path("whole/vpo"))]
    assert sum(learnt) > 5, "the test wants steps that learn something"
    log = Path("run/vpo/metrics.jsonl")
    score = train.score
    signals = {4: signal.SIGINT, 7: signal.SIGTERM}  # after so many steps

    def interrupted(*arguments):
        number = signals.pop(len(log.read_text("utf-8").splitlines()) if log.exists() else 0, None)
        if number:
            signal.raise_signal(number)
        return score(*arguments)

    monkeypatch.setattr("sys.argv", ["train.py", *arguments])
    monkeypatch.setattr(train, "score", interrupted)
    for flags, kept in ((arguments, "checkpoint-000003"), (["--resume"], "checkpoint-000006")):
        with pytest.raises(SystemExit) as stop:
            train.main(["--out", "run", *flags])
        assert stop.value.code == 130
        assert "--resume --out run" in capsys.readouterr().err.splitlines()[-1]
        assert checkpoints(Path("run/vpo"))[-1].name == kept
        with log.open("a", encoding="utf-8") as file:
            file.write('{"step": 99, "rew')
    train.main(["--out", "run", "--resume"])
    assert not signals and metrics(Path("whole/vpo")) == metrics(Path("run/vpo"))
    for file in ("checkpoint-000009/model.safetensors", "samples.jsonl"):
        assert Path("whole/vpo", file).read_bytes() == Path("run/vpo", file).read_bytes()


def test_bfloat16_weights_take_small_steps_and_their_gradients_add_up():
    """Guards against an optimizer that rounds: steps of 1e-4 from 1.0 would move no such weight; and against a sum of a
    thousand micro-batches in bfloat16, which stops growing at a half."""
    model = torch.nn.Linear(1, 1, bias=False).bfloat16()
    model.weight.data.fill_(1.0)
    optimizer = MasterWeightAdamW(model)
    for _ in range(60):
        model.weight.grad = torch.ones(1, 1)
        optimizer.step(1e-4)
    assert model.weight.dtype == torch.bfloat16
    assert model.weight.item() == pytest.approx(1 - 60e-4, abs=1 / 256)
    assert model.weight.item() < 1
    model.weight.grad = None
    for _ in range(1000):
        (0.001 * model.weight).float().sum().backward()
    assert model.weight.grad.item() == pytest.approx(1, abs=0.01)


def test_a_finished_run_goes_on(toy_run, capsys, monkeypatch):
    """More steps, told what becomes of the learning rate; fewer are refused and change nothing."""
    with monkeypatch.context() as patch:
        patch.setattr(train, "train_method", None)  # no model is loaded for it
        train.main(["--resume", "--out", "run"])
    assert "all 4 steps are done" in capsys.readouterr().err
    fails(["--resume", "--out", "run", "--steps", "3"], capsys, "--steps 3: grpo has 4 already")
    train.main(["--resume", "--out", "run", "--steps", "6", "--eval-problems", "0"])
    assert "the learning rate now falls over 6 steps" in capsys.readouterr().err
    for method in ("grpo", "vpo"):
        assert [row["step"] for row in metrics(toy_run / method)] == [1, 2, 3, 4, 5, 6]
        (toy_run / method / "checkpoint-000006/trainer.pt").unlink()  # as without --keep-optimizer
    assert load_run(toy_run).config.steps == 6
    finished = "--steps 7: grpo has finished its 6 steps"
    fails(["--resume", "--out", "run", "--steps", "7"], capsys, finished)


def test_plain_runs_nothing_of_fast(monkeypatch, capsys):
    """Guards against a gradient of fast/ where readers ask for what they read, and a train.backward that never runs."""
    flags = [*QUICK, "--method", "vpo", "--steps", "1"]
    train.main([*flags, "--eval-problems", "0", "--out", "fast"])
    assert "gradient: fast.backward (--plain: train.backward)" in capsys.readouterr().err
    for name in ("backward", "token_logprobs"):
        monkeypatch.setattr(fast, name, None)
    train.main([*flags, "--plain", "--out", "run"])
    assert "vpo on cpu; gradient: train.backward\n" in capsys.readouterr().err
    evaluation.main(["run"])


def test_a_language_model_goes_through_the_same_code(capsys, monkeypatch):
    """A random model from disk: text prompts, and its first rollouts are shown, and how many of the
    answers, made up here, copy an example. Guards against a list that seems to begin with the text of its first line."""
    answers = ["red", "grey red blue blue green red"]
    monkeypatch.setattr(
        train, "read_answers", lambda task, rollouts, m: [answers[:m]] * len(rollouts.texts)
    )
    model = save_random_model("model", "llama")
    flags = "--task fence --method grpo vpo --steps 2 --max-new-tokens 30 --eval-problems 2"
    train.main(["--out", "run", "--model", model, *QUICK, *flags.split()])
    assert "start" in json.loads(Path("run/eval.json").read_text("utf-8"))["policies"]
    told = capsys.readouterr().err
    for text in (
        "vpo, the end of the prompt of problem 'train-0':",
        "\n1.\nthe best of the first step's 6 rollouts",
        "rewards: 0.00, 0.00, 0.00",
        "\n50% of the answers copy an example of the prompt: these should earn little",
    ):
        assert text in told
    assert "\n0% of the answers copy" not in told
    assert len(re.findall(r"[\r\n]vpo: +\d+%", told)) == 2, "a line for each step of a bar"


def test_learning_that_has_stopped_is_said_once(capsys):
    """After ten steps in a row without a signal. Guards against a night of steps that change nothing."""
    Path("run/vpo").mkdir(parents=True)
    log = MethodLog("vpo", Config(out="run", steps=99), load_task("toy"), 0)
    told_at = []
    for step in range(1, 36):
        row = dict.fromkeys(("reward", "diversity", "W@m", "tokens"), 0)
        row |= {"rewarded": 1, "answers": 1 / 3, "signal": int(step == 10), "seconds": 1}
        row["gap"] = 2e-6 if step == 15 else 1e-6
        log.write(step, row, {})
        told = capsys.readouterr().err
        if "vpo: no signal" in told:
            assert "33% of the answers asked for are there and distinct; 100% earn a" in told
            assert "rewards differ by 2e-06 at most" in told
            told_at.append(step)
    assert told_at == [20]


def test_the_objective_is_logged():
    """W@m by brute force: of sets their own best, of single answers the best of m rollouts of a group. And what earns
    in each objective: guards against one that is 0 in every answer, unseen."""
    task = load_task("fence")
    problems = task.problems("train", 2)
    red, blue, grey = (" ".join([color] * 6) for color in ("red", "blue", "grey"))
    w = evaluation.spread_weights(3, 512)

    def best(*answers: str) -> float:
        rewards = [torch.tensor(task.reward(None, answer)).double() for answer in answers]
        return (w @ torch.stack(rewards, 1)).amax(1).mean().item()

    def logged(answers: list[list[str]], m: int, per_rollout: int) -> dict[str, torch.Tensor]:
        scored = score(task, problems, answers, per_rollout)
        rollouts = Rollouts(None, [], None, None, [1] * 4, [""] * 4, [True] * 4)
        return train.step_metrics(task, problems, answers, rollouts, scored, torch.zeros(2, 2), m)

    sets = [[red, blue], [red], [grey, grey], []]
    expected = (best(red, blue) + best(red, "") + best(grey) + best("")) / 4
    row = logged(sets, m=2, per_rollout=2)
    assert row["W@m"].item() == pytest.approx(expected, abs=1e-6)
    assert row["distinct"] == 3 / 8, "an answer is new if none of its group has given it"
    singles = [[red], [blue], [grey], ["red"]]
    expected = (best(red, blue) + best(grey, "")) / 2
    row = logged(singles, m=2, per_rollout=1)
    assert row["W@m"].item() == pytest.approx(expected, abs=1e-6)
    assert [row[f"rewarded_{name}"].item() for name in task.objectives] == [0.5, 0.5, 0.25]


@pytest.mark.parametrize("steps", [1, 6, 20, 59, 60, 90, 100, 300])
def test_short_runs_reach_their_peak_rate(steps):
    """Guards against a rise that takes so long that the fall has begun: 22% of --lr in six steps."""
    config = Config(steps=steps)
    rates = [train.learning_rate(1.0, t, config) for t in range(steps)]
    assert 0.86 < max(rates) <= 1
    if steps >= 60:  # what was measured was measured with ten steps of rise
        assert rates == [min(1.0, (t + 1) / 10) * (1 - 0.9 * t / steps) for t in range(steps)]
    constant = Config(steps=steps, lr_schedule="constant")
    assert {train.learning_rate(1.0, t, constant) for t in range(steps)} == {1.0}


@pytest.mark.parametrize("script", [train, fast])
def test_each_update_takes_its_own_groups(script, monkeypatch):
    """Guards against passes over the whole batch, torn groups, one token count for all, and updates that sample anew."""
    parts = []
    backward = script.backward

    def recorded(policy, reference, rollouts, advantages, config):
        parts.append((rollouts, advantages.double()))
        return backward(policy, reference, rollouts, advantages, config)

    monkeypatch.setattr(script, "backward", recorded)
    flags = "--method vpo --steps 1 --kl 0 --lr 0.05 --lr-schedule constant --updates 2"
    plain = ["--plain"] if script is train else []
    train.main([*LEARNING, *shlex.split(flags), *plain, "--prompts-per-step", "4", "--out", "run"])
    policy = load_policy("run/start", load_task("toy"))
    policy.model.double()
    optimizer = torch.optim.AdamW(policy.model.parameters(), lr=0.05, weight_decay=0.01)
    for rollouts, A in parts:
        assert len(rollouts.prompt_ids) == 2 and rollouts.group_size == 3
        new, _ = token_logprobs(policy.model, rollouts, torch.arange(6), 1.0)
        old, mask = rollouts.logprobs.double(), rollouts.token_mask
        loss, numbers = vpo.policy_loss(new, old, A, mask, sum(rollouts.lengths))
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(policy.model.parameters(), 1.0)
        optimizer.step()
    assert len(parts) == 2 and numbers["clip_fraction"] > 0
    (row,) = metrics(Path("run/vpo"))
    assert row["clip_fraction"] > 0
    trained = load_policy("run/vpo/checkpoint-000001", load_task("toy")).model
    for ours, expected in zip(trained.parameters(), policy.model.parameters(), strict=True):
        # Adam takes the sign of the smallest gradients.
        assert (ours - expected).abs().mean() < 1e-4


# What was written before.


def cut(path: Path) -> None:
    content = path.read_bytes()
    path.write_bytes(content[: len(content) // 2])


def replace_by_folder(path: Path) -> None:
    path.unlink()
    path.mkdir()


LAST = "vpo/checkpoint-000004"
RESUME = "train --out run --resume --steps 5"
JOIN = "train --out run --method multi_rlvr"
MIX = "eval run --mix 0.5"
START = "run/start: cannot be loaded"


@pytest.mark.parametrize(
    ("file", "damage", "command", "words"),
    [
        (f"{LAST}/model.safetensors", cut, RESUME, f"delete the folder run/{LAST}"),
        (f"{LAST}/tokenizer_config.json", Path.unlink, RESUME, f"delete the folder run/{LAST}"),
        (f"{LAST}/tokenizer.json", cut, RESUME, f"delete the folder run/{LAST}"),
        (f"{LAST}/trainer.pt", cut, RESUME, f"delete the folder run/{LAST}"),
        (f"{LAST}/model.safetensors", Path.unlink, RESUME, f"delete the folder run/{LAST}"),
        (f"{LAST}/model.safetensors", replace_by_folder, RESUME, "a folder, not a file); delete"),
        (f"{LAST}/tokenizer.json", replace_by_folder, "eval run", "a folder, not a file); delete"),
        ("start/tokenizer_config.json", replace_by_folder, "eval run", f"{START} (tokenizer_conf"),
        ("start/model.safetensors", cut, JOIN, "restore it from a copy"),
        ("start/model.safetensors", cut, "eval run", START),
        ("start", shutil.rmtree, MIX, f"{START} (config.json is missing"),
    ],
)
def test_a_damaged_model_is_named(file, damage, command, words, toy_run, capsys):
    damage(toy_run / file)
    script, *arguments = command.split()
    fails(arguments, capsys, words, command=SCRIPTS[script])
    assert (toy_run / "vpo/checkpoint-000003/trainer.pt").exists()


LOAD_MODEL = "transformers.AutoModelForCausalLM.from_pretrained"


@pytest.mark.parametrize(
    ("broken", "error", "message"),
    [
        (LOAD_MODEL, RuntimeError("can't start new thread"), "out of memory"),
        (LOAD_MODEL, OSError(12, "Cannot allocate memory"), "out of memory"),
        (LOAD_MODEL, KeyError("new"), "install what it lacks, or try another transformers than"),
        ("torch.load", MemoryError(), "out of memory"),
    ],
)
def test_a_whole_checkpoint_is_not_to_be_deleted(
    broken, error, message, toy_run, capsys, monkeypatch
):
    """What fails lies elsewhere, and the line says what to do about it."""
    monkeypatch.setattr(broken, Mock(side_effect=error))
    fails(["--out", "run", "--resume", "--steps", "5"], capsys, message)


def test_a_checkpoint_says_what_to_install_for_it(toy_run, capsys, monkeypatch):
    change_config(toy_run, lora_rank=2)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    fails(["run"], capsys, "adapters, which need peft; pip", command=evaluation.main)


def test_the_start_model_is_kept_for_other_runs(capsys):
    """Another budget, the same start; another seed has its own; a damaged one is made again."""
    flags = [*QUICK, "--eval-problems", "0", "--steps", "1"]
    train.main(["--out", "a", *flags, "--method", "grpo"])
    assert "SFT warm-up" in capsys.readouterr().err
    train.main(["--out", "b", *flags, "--method", "vpo", "--steps", "2"])
    assert "SFT warm-up" not in capsys.readouterr().err
    assert_equal_weights(weights(Path("a/start")), weights(Path("b/start")))
    (kept,) = Path("runs/start").iterdir()
    cut(kept / "model.safetensors")
    train.main(["--out", "c", *flags, "--method", "vpo"])
    assert_equal_weights(weights(Path("a/start")), weights(Path("c/start")))
    train.main(["--out", "d", *flags, "--method", "vpo", "--seed", "5"])
    assert len(list(Path("runs/start").iterdir())) == 2
    d = weights(Path("d/start"))
    assert any(not torch.equal(value, d[name]) for name, value in weights(Path("a/start")).items())


# What goes wrong in the middle of a training.


def without_memory(A: torch.Tensor) -> torch.Tensor:
    raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.50 GiB. GPU 0 has")


@pytest.mark.parametrize(
    ("broken", "message"),
    [
        (lambda A: A * float("nan"), "finite advantages (P, G), not tensor([[nan"),
        (lambda A: A + 1e30, "gradient norm inf"),
        (without_memory, "2.50 GiB. GPU 0 has); lower --micro-batch-tokens"),
    ],
)
def test_a_step_that_goes_wrong_is_named(broken, message, capsys, monkeypatch):
    """In the fourth step, with the way on. Guards against NaN in every weight."""
    advantage = vpo.ADVANTAGES["vpo"]

    def method(x, e):
        log = Path("run/vpo/metrics.jsonl")
        n_steps = len(log.read_text("utf-8").splitlines()) if log.exists() else 0
        return broken(advantage(x, e)) if n_steps == 3 else advantage(x, e)

    monkeypatch.setitem(vpo.ADVANTAGES, "vpo", method)
    flags = ["--out", "run", "--method", "vpo", *QUICK, "--kl", "1"]
    fails(flags, capsys, "vpo, step 4: ", message, "--resume --out run")
    assert [path.name for path in checkpoints(Path("run/vpo"))] == ["checkpoint-000003"]


@pytest.mark.parametrize("n_steps", ["0", "1"])
def test_a_model_that_diverges_stops_the_run(n_steps, capsys, monkeypatch):
    """The weights are ruined in a step, or in the last one: guards against a good checkpoint deleted for a ruined one."""
    step = train.train_step

    def ruin(method, state, *rest):
        result = step(method, state, *rest)
        if state.step == 4 - int(n_steps):
            next(state.policy.model.parameters()).data[0] = float("inf")
        return result

    monkeypatch.setattr(train, "train_step", ruin)
    flags = ["--out", "run", *QUICK, "--method", "vpo", "--snapshots", "0", "--save-every", "2"]
    fails(flags, capsys, "finite" if n_steps == "0" else "vpo, step 4")
    assert [path.name for path in checkpoints(Path("run/vpo"))] == ["checkpoint-000002"]


# The warm-up.


def test_a_language_model_imitates_every_token_alike(monkeypatch):
    """In micro-batches, too. Guards against a short text whose tokens count more."""
    task = load_task("maze", model="m", size=5)
    policy = load_policy(save_random_model("m", "llama"), task)
    texts = [policy.tokenizer.decode(range(20, 24)), policy.tokenizer.decode(range(30, 130))]
    prompts = ["Go.", "Go on."]
    one_by_one = []

    def keep_gradient(parameters, limit):
        one_by_one.extend(weight.grad.clone() for weight in parameters)

    rollouts = rollouts_of_texts(policy, prompts, texts)
    logprobs, _ = token_logprobs(policy.model, rollouts, torch.arange(2), 1.0)
    (-logprobs[rollouts.token_mask].mean()).backward()
    together = [weight.grad.clone() for weight in policy.model.parameters()]
    monkeypatch.setattr(train, "demonstrations", lambda *args, **options: (prompts, texts))
    monkeypatch.setattr(torch.nn.utils, "clip_grad_norm_", keep_gradient)
    train.warm_up(policy, task, Config(warm_steps=1, micro_batch_tokens=1))  # one by one
    torch.testing.assert_close(one_by_one, together, rtol=1e-3, atol=1e-6)
    assert any(gradient.any() for gradient in together)


def test_the_start_model_leaves_its_memory_before_the_training(monkeypatch):
    """Also one that refers to itself, as a model does whose layers are computed again."""
    found = []
    start_policy = train.start_policy

    def circular(*arguments):
        policy = start_policy(*arguments)
        policy.model.circle = [policy]
        found.append(weakref.ref(policy.model))
        return policy

    def look(*arguments, **options):
        assert found[0]() is None
        raise RuntimeError("looked")

    monkeypatch.setattr(train, "start_policy", circular)
    monkeypatch.setattr("engine.training.jobs.run_all", look)
    with pytest.raises(RuntimeError, match="looked"):
        train.main([*QUICK, "--out", "run"])
